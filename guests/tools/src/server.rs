//! One thread per connection: all that the servers of this program share.

use std::io::{self, BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Threads hold little on their stack, and the load tests open thousands.
const STACK_BYTES: usize = 128 * 1024;

/// Longest request line accepted, in bytes, its newline included.
const MAX_LINE: u64 = 1024 * 1024;

/// Accepts connections on `port` for ever, each handled in its own thread.
///
/// An error of one connection ends that connection only.
pub fn serve<H>(port: u16, handler: H) -> Result<(), String>
where
    H: Fn(TcpStream) -> io::Result<()> + Send + Sync + 'static,
{
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))
        .map_err(|error| format!("cannot listen on port {port}: {error}"))?;
    let handler = Arc::new(handler);
    for stream in listener.incoming() {
        let connection = stream.and_then(|stream| {
            let handler = Arc::clone(&handler);
            thread::Builder::new().stack_size(STACK_BYTES).spawn(move || handler(stream))
        });
        if let Err(error) = connection {
            eprintln!("guest-tools: port {port}: {error}");
            // Out of descriptors or memory: give connections time to end.
            thread::sleep(Duration::from_millis(10));
        }
    }
    Ok(())
}

/// Answers each line of a connection with what `answer` returns for it.
///
/// An answer leaves in one write, so that it is not split over two segments.
pub fn answer_lines<A>(stream: TcpStream, mut answer: A) -> io::Result<()>
where
    A: FnMut(&str) -> io::Result<Vec<u8>>,
{
    let mut replies = stream.try_clone()?;
    let mut requests = BufReader::new(stream);
    let mut line = String::new();
    loop {
        line.clear();
        io::Read::take(&mut requests, MAX_LINE).read_line(&mut line)?;
        // Without its newline the line was cut off, by the peer or by MAX_LINE.
        let Some(request) = line.strip_suffix('\n') else {
            return Ok(());
        };
        replies.write_all(&answer(request)?)?;
    }
}

/// Returns once `port` accepts connections on this machine.
pub fn await_port(port: u16) -> Result<(), String> {
    while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
