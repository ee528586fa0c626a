//! Bulk bytes: whatever a connection sends comes back, until it closes.

use std::io;
use std::net::TcpStream;

use crate::server;

/// Echoes on `port`.
pub fn serve(port: u16) -> Result<(), String> {
    server::serve(port, echo)
}

fn echo(mut stream: TcpStream) -> io::Result<()> {
    let mut input = stream.try_clone()?;
    io::copy(&mut input, &mut stream).map(drop)
}
