//! The other end of the handshake, made by hand: a peer that says what the test
//! wants, and a dialler that says it to a real one.

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use understudy_lab::{CLIENT_ADDRESS, PEER_PORT, Scene, in_namespace};
use understudy_protocol::Epoch;
use understudy_protocol::wire::{HEADER_BYTES, Header, Kind, Message};

/// Port where the made-up peer listens.
pub const PORT: u16 = 7900;
/// Time for an answer of the real one.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);

/// A peer in the client's namespace that takes one connection, reads the hello,
/// answers with these bytes and hangs up.
pub struct MadeUpPeer(JoinHandle<Result<Value>>);

impl MadeUpPeer {
    pub fn start(scene: &Scene, answer: Vec<u8>) -> Result<MadeUpPeer> {
        let client = scene.lab().client();
        let listener = in_namespace(&client, || TcpListener::bind((CLIENT_ADDRESS, PORT)))??;
        Ok(MadeUpPeer(thread::spawn(move || {
            let (mut stream, _) = listener.accept()?;
            let hello = read(&mut stream)?;
            stream.write_all(&answer)?;
            Ok(serde_json::from_slice(&hello.payload)?)
        })))
    }

    /// The hello that it got.
    pub fn hello(self) -> Result<Value> {
        self.0.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// A message as it is on the wire.
pub fn message(kind: Kind, payload: &[u8]) -> Vec<u8> {
    let message = Message::new(kind, Epoch(0), payload.to_vec());
    [&message.header.encode(), message.payload.as_slice()].concat()
}

/// Sends bytes to the real daemon of `host`; returns the words with which it
/// refuses them.
pub fn refusal_of(scene: &Scene, host: &str, bytes: &[u8]) -> Result<String> {
    refused(&mut dial(scene, host)?, bytes)
}

/// Sends bytes to the real daemon of `host`, which has a keeper go on with whoever says them, and then others to the
/// keeper; returns the words with which that refuses them.
pub fn refusal_of_keeper(scene: &Scene, host: &str, first: &[u8], again: &[u8]) -> Result<String> {
    let mut stream = dial(scene, host)?;
    stream.write_all(first)?;
    let answer = read(&mut stream)?;
    ensure!(answer.header.kind == Kind::BeginAnew, "{answer:?}");
    refused(&mut stream, again)
}

fn dial(scene: &Scene, host: &str) -> Result<TcpStream> {
    let address = SocketAddr::from((scene.lab().host_address(host)?, PEER_PORT));
    let stream = in_namespace(&scene.lab().client(), || TcpStream::connect(address))??;
    stream.set_read_timeout(Some(ANSWER_LIMIT))?;
    Ok(stream)
}

fn refused(stream: &mut TcpStream, bytes: &[u8]) -> Result<String> {
    stream.write_all(bytes)?;
    let answer = read(stream)?;
    if answer.header.kind != Kind::Refuse {
        bail!("{answer:?} instead of a refusal");
    }
    Ok(String::from_utf8_lossy(&answer.payload).into_owned())
}

/// Sends bytes to the real daemon of `host`, which must hang up.
pub fn hung_up(scene: &Scene, host: &str, bytes: &[u8]) -> Result<()> {
    let mut stream = dial(scene, host)?;
    stream.write_all(bytes)?;
    let mut rest = Vec::new();
    // A reset is a way to hang up, too; only silence is not.
    match stream.read_to_end(&mut rest) {
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => bail!("the line is open"),
        _ => Ok(()),
    }
}

/// Reads a message of the real one.
pub fn read(stream: &mut impl Read) -> Result<Message> {
    let mut bytes = [0; HEADER_BYTES];
    stream.read_exact(&mut bytes).context("the other side hung up")?;
    let header = Header::decode(&bytes)?;
    let mut payload = vec![0; header.length];
    stream.read_exact(&mut payload).context("the other side hung up")?;
    header.check(&payload)?;
    Ok(Message { header, payload })
}
