//! The token of an invitation: what the host that joins must know, as one word to copy.
//!
//! `UJ1-` and base64 of: length of the address's text, the address, the fingerprint of the
//! authority's certificate, the secret, and a checksum of all that.

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use rustls::pki_types::CertificateDer;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::str::FromStr;

const PREFIX: &str = "UJ1-";
const CHECKSUM_BYTES: usize = 4;
const BYTES: usize = 16;

/// Fingerprint that tells an authority from all others: the beginning of its certificate's hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint([u8; BYTES]);

/// Secret that only the inviting host and the invited one know; it never travels.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Secret([u8; BYTES]);

/// An invitation as its token tells of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// Address where the inviting host waits.
    pub address: SocketAddr,
    /// Its authority.
    pub authority: Fingerprint,
    /// The invitation's secret.
    pub secret: Secret,
}

/// Text that is no token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// The text is something else.
    #[error("this is no token of `understudy invite`: one begins with {PREFIX}")]
    NoToken,
    /// The token was changed or cut.
    #[error("the token is damaged: copy the whole command that the inviting host has printed")]
    Damaged,
}

impl Fingerprint {
    /// Fingerprint of an authority's certificate.
    pub fn of(certificate: &CertificateDer<'_>) -> Fingerprint {
        Fingerprint(first(blake3::hash(certificate).as_bytes()))
    }
}

impl Secret {
    /// One that nobody has had before.
    pub fn fresh() -> io::Result<Secret> {
        let mut bytes = [0; BYTES];
        File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        Ok(Secret(bytes))
    }

    /// The proof that whoever said `text` knows the secret, for one use of it.
    pub fn prove(&self, purpose: &str, text: &[u8]) -> blake3::Hash {
        blake3::keyed_hash(&blake3::derive_key(purpose, &self.0), text)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = self.address.to_string();
        let mut bytes = vec![address.len() as u8];
        bytes.extend(address.as_bytes());
        bytes.extend(self.authority.0);
        bytes.extend(self.secret.0);
        bytes.extend(checksum(&bytes));
        write!(f, "{PREFIX}{}", BASE64_URL_SAFE_NO_PAD.encode(bytes))
    }
}

impl FromStr for Token {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<Token, TokenError> {
        let text = text.trim().strip_prefix(PREFIX).ok_or(TokenError::NoToken)?;
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(text).map_err(|_| TokenError::Damaged)?;
        parse(&bytes).ok_or(TokenError::Damaged)
    }
}

fn parse(bytes: &[u8]) -> Option<Token> {
    let (content, sum) = bytes.split_at_checked(bytes.len().checked_sub(CHECKSUM_BYTES)?)?;
    if sum != checksum(content) {
        return None;
    }
    let (length, rest) = content.split_first()?;
    let (address, rest) = rest.split_at_checked(usize::from(*length))?;
    let (authority, secret) = rest.split_at_checked(BYTES)?;
    Some(Token {
        address: std::str::from_utf8(address).ok()?.parse().ok()?,
        authority: Fingerprint(authority.try_into().ok()?),
        secret: Secret(secret.try_into().ok()?),
    })
}

fn checksum(content: &[u8]) -> [u8; CHECKSUM_BYTES] {
    first(blake3::hash(content).as_bytes())
}

fn first<const N: usize>(bytes: &[u8; 32]) -> [u8; N] {
    std::array::from_fn(|at| bytes[at])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(address: &str) -> Token {
        let authority = Fingerprint::of(&CertificateDer::from(vec![1, 2, 3]));
        Token { address: address.parse().unwrap(), authority, secret: Secret::fresh().unwrap() }
    }

    #[test]
    fn a_token_is_what_it_was() {
        for address in ["10.0.0.1:7701", "[fe80::1]:1", "255.255.255.255:65535"] {
            let token = token(address);
            let text = token.to_string();
            assert_eq!(text.parse::<Token>().unwrap(), token);
            assert_eq!(format!(" {text}\n").parse::<Token>().unwrap(), token);
            assert!(text.len() < 120 && !text.contains(['=', '/', '+', ' ']), "{text}");
        }
    }

    #[test]
    fn what_was_garbled_is_noticed() {
        let text = token("10.0.0.1:7701").to_string();
        assert_eq!("".parse::<Token>(), Err(TokenError::NoToken));
        assert_eq!("10.0.0.1:7701".parse::<Token>(), Err(TokenError::NoToken));
        for length in PREFIX.len()..text.len() {
            assert_eq!(text[..length].parse::<Token>(), Err(TokenError::Damaged), "{length}");
        }
        for at in PREFIX.len()..text.len() - 1 {
            let mut garbled = text.clone().into_bytes();
            garbled[at] = if garbled[at] == b'A' { b'B' } else { b'A' };
            let garbled = String::from_utf8(garbled).unwrap();
            assert_eq!(garbled.parse::<Token>(), Err(TokenError::Damaged), "{garbled}");
        }
        assert_eq!(format!("{text}é").parse::<Token>(), Err(TokenError::Damaged));
    }

    #[test]
    fn secrets_differ_and_are_not_shown() {
        let (one, other) = (token("10.0.0.1:1"), token("10.0.0.1:1"));
        assert!(one.secret != other.secret);
        assert_ne!(one.secret.prove("a", b"x"), one.secret.prove("b", b"x"));
        assert!(format!("{one:?}").contains("secret: Secret }"), "{one:?}");
    }
}
