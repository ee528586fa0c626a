//! Messages between a host that joins and the inviting one, inside TLS: a request and its
//! reply, each as JSON behind its length, with a proof that the speaker knows the secret.
//!
//! So the secret never travels: somebody with a certificate of the same authority who answers in
//! the inviting host's place can neither use it for a request of its own nor make up a reply.

use super::host_file::ArbiterSettings;
use super::token::Secret;
use anyhow::{Context, ensure};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::time::Duration;
use understudy_protocol::HostName;

/// Time for all of a conversation.
pub const LIMIT: Duration = Duration::from_secs(10);
/// Bytes that are far more than any message has.
const MOST_BYTES: u32 = 256 << 10;
const REQUEST: &str = "understudy 2026 invitation: request";
const REPLY: &str = "understudy 2026 invitation: reply";

/// Request of the host that joins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Its name.
    pub name: HostName,
    /// Addresses at which its peers reach it.
    pub listen: Vec<SocketAddr>,
    /// Its public key, base64; the private one stays there.
    pub public_key: String,
}

/// Reply of the inviting host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply {
    /// The host has joined.
    Granted(Box<Grant>),
    /// The host has not joined, for this reason.
    Refused(String),
}

/// Grant that a host that joins gets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// The inviting host.
    pub host: HostName,
    /// The new host's certificate, PEM.
    pub certificate: String,
    /// The authority's, PEM.
    pub ca: String,
    /// The authority's list of revoked certificates, PEM.
    pub revoked: String,
    /// The arbiter, as the inviting host reaches it.
    pub arbiter: Option<ArbiterSettings>,
    /// The inviting host, and all others that it has in its [peers].
    pub peers: BTreeMap<HostName, Vec<SocketAddr>>,
}

#[derive(Serialize, Deserialize)]
struct Envelope {
    body: String,
    proof: String,
}

/// A message is not from somebody who knows the secret.
#[derive(Debug, thiserror::Error)]
#[error("it was not made with this token's secret")]
pub struct WrongSecret;

/// Sends a request; returns its proof, which the reply's covers.
pub fn send_request(
    stream: &mut impl Write,
    secret: &Secret,
    request: &Request,
) -> anyhow::Result<String> {
    let body = serde_json::to_string(request)?;
    let proof = secret.prove(REQUEST, body.as_bytes()).to_hex().to_string();
    send(stream, &Envelope { body, proof: proof.clone() })?;
    Ok(proof)
}

/// Receives a request, and its proof.
pub fn receive_request(
    stream: &mut impl Read,
    secret: &Secret,
) -> anyhow::Result<(Result<Request, WrongSecret>, String)> {
    let Envelope { body, proof } = receive(stream)?;
    if !is_proof(secret.prove(REQUEST, body.as_bytes()), &proof) {
        return Ok((Err(WrongSecret), proof));
    }
    Ok((Ok(serde_json::from_str(&body)?), proof))
}

/// Sends the reply to the request of that proof.
pub fn send_reply(
    stream: &mut impl Write,
    secret: &Secret,
    asked: &str,
    reply: &Reply,
) -> anyhow::Result<()> {
    let body = serde_json::to_string(reply)?;
    let proof = secret.prove(REPLY, format!("{asked}\n{body}").as_bytes()).to_hex().to_string();
    send(stream, &Envelope { body, proof })
}

/// Receives the reply to the request of that proof.
pub fn receive_reply(
    stream: &mut impl Read,
    secret: &Secret,
    asked: &str,
) -> anyhow::Result<Reply> {
    let Envelope { body, proof } = receive(stream)?;
    let expected = secret.prove(REPLY, format!("{asked}\n{body}").as_bytes());
    ensure!(is_proof(expected, &proof), WrongSecret);
    Ok(serde_json::from_str(&body)?)
}

/// Compares in constant time, as hashes are compared.
fn is_proof(expected: blake3::Hash, shown: &str) -> bool {
    blake3::Hash::from_hex(shown).is_ok_and(|shown| shown == expected)
}

fn send(stream: &mut impl Write, envelope: &Envelope) -> anyhow::Result<()> {
    let text = serde_json::to_vec(envelope)?;
    let length = u32::try_from(text.len()).context("the message is too long")?;
    stream.write_all(&length.to_le_bytes())?;
    stream.write_all(&text)?;
    Ok(stream.flush()?)
}

fn receive<T: DeserializeOwned>(stream: &mut impl Read) -> anyhow::Result<T> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    ensure!(length <= MOST_BYTES, "a message of {length} bytes is announced");
    let mut text = vec![0; length as usize];
    stream.read_exact(&mut text)?;
    serde_json::from_slice(&text).context("it is not what the other host should say")
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::literal;

    fn request() -> Request {
        let listen = vec!["10.0.0.2:7700".parse().unwrap()];
        Request { name: literal("b"), listen, public_key: "key".to_owned() }
    }

    #[test]
    fn who_knows_the_secret_is_understood() {
        let secret = Secret::fresh().unwrap();
        let (mut there, mut back) = (Vec::new(), Vec::new());
        let asked = send_request(&mut there, &secret, &request()).unwrap();
        let (heard, proof) = receive_request(&mut &there[..], &secret).unwrap();
        assert_eq!((heard.unwrap(), &proof), (request(), &asked));
        let refused = Reply::Refused("no".to_owned());
        send_reply(&mut back, &secret, &proof, &refused).unwrap();
        assert_eq!(receive_reply(&mut &back[..], &secret, &asked).unwrap(), refused);
        // The reply to another request is none to this one.
        let other = receive_reply(&mut &back[..], &secret, "other").unwrap_err();
        assert!(other.is::<WrongSecret>(), "{other:#}");
    }

    #[test]
    fn who_does_not_is_not() {
        let (secret, other) = (Secret::fresh().unwrap(), Secret::fresh().unwrap());
        let mut there = Vec::new();
        send_request(&mut there, &other, &request()).unwrap();
        let (heard, _) = receive_request(&mut &there[..], &secret).unwrap();
        assert!(heard.is_err());
    }

    #[test]
    fn nonsense_is_an_error() {
        let secret = Secret::fresh().unwrap();
        for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"\x02\0\0\0{}", b"\x09\0\0\0{}", b""] {
            assert!(receive_request(&mut &bytes[..], &secret).is_err(), "{bytes:?}");
        }
    }
}
