//! A small search service over several guests, for measurements: each holds documents in memory
//! and looks up those that a query chooses, its own and its peers'.
//!
//! | request        | answer | |
//! |----------------|--------|-|
//! | `find NUMBER`  | `found NUMBER COUNT` | looked up here and at all peers |
//! | `part NUMBER`  | `found NUMBER COUNT` | looked up here |
//!
//! A query looks up [`LOOKUPS`] documents in each guest, most of them of the eighth that is asked
//! for often. `error …` if a document is not what was written, or a peer does not answer.

use crate::server;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::sync::Arc;

/// Bytes of a document.
const DOCUMENT: usize = 4096;
const WORDS: usize = DOCUMENT / size_of::<u64>();
const DOCUMENTS_PER_MIB: usize = 1024 * 1024 / DOCUMENT;
/// Documents of each guest that a query looks up.
const LOOKUPS: u64 = 16;
/// Of so many lookups one goes to any document, the others to the first eighth.
const ANY: u64 = 8;

/// Serves the protocol above on `port`, with `mib` MiB of documents.
pub fn serve(port: u16, mib: usize, peers: &[&str]) -> Result<(), String> {
    let words = mib
        .checked_mul(DOCUMENTS_PER_MIB * WORDS)
        .filter(|&words| words > 0)
        .ok_or("MIB must be at least 1 and fit in memory")?;
    let documents: Arc<Vec<u64>> = Arc::new((0..words as u64).map(mix).collect());
    let peers: Arc<Vec<String>> = Arc::new(peers.iter().map(|peer| (*peer).to_owned()).collect());
    server::serve(port, move |stream| {
        stream.set_nodelay(true)?;
        let mut lines = Vec::new();
        server::answer_lines(stream, |request| {
            let answer = answer(&documents, &peers, &mut lines, request);
            Ok(answer.unwrap_or_else(|error| format!("error: {error}\n")).into_bytes())
        })
    })
}

/// `lines` are this connection's to the peers, made when they are needed first.
fn answer(
    documents: &[u64],
    peers: &[String],
    lines: &mut Vec<Line>,
    request: &str,
) -> Result<String, String> {
    let (verb, number) = request.split_once(' ').ok_or(format!("`{request}`"))?;
    let query: u64 = number.parse().map_err(|_| format!("`{number}` is no number"))?;
    let mut found = look_up(documents, query)?;
    match verb {
        "part" => {}
        "find" => {
            while lines.len() < peers.len() {
                lines.push(Line::connect(&peers[lines.len()])?);
            }
            // All of them look at once.
            lines.iter_mut().try_for_each(|line| line.ask(query))?;
            for line in lines {
                found += line.answer(query)?;
            }
        }
        _ => return Err(format!("`{request}`; known: find, part")),
    }
    Ok(format!("found {query} {found}\n"))
}

/// Reads the documents that a query chooses; an error if one is damaged.
fn look_up(documents: &[u64], query: u64) -> Result<u64, String> {
    let count = (documents.len() / WORDS) as u64;
    for lookup in 0..LOOKUPS {
        let dice = mix(query.wrapping_mul(LOOKUPS) + lookup);
        let range = if dice % ANY == 0 { count } else { (count / 8).max(1) };
        let document = (dice / ANY % range) as usize;
        let words = &documents[document * WORDS..][..WORDS];
        let first = (document * WORDS) as u64;
        if (first..).zip(words).any(|(place, &word)| word != mix(place)) {
            return Err(format!("document {document} is damaged"));
        }
    }
    Ok(LOOKUPS)
}

/// SplitMix64.
fn mix(seed: u64) -> u64 {
    let mut value = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

struct Line {
    peer: String,
    requests: TcpStream,
    answers: BufReader<TcpStream>,
}

impl Line {
    fn connect(peer: &str) -> Result<Line, String> {
        let connect = || {
            let requests = TcpStream::connect(peer)?;
            requests.set_nodelay(true)?;
            let answers = BufReader::new(requests.try_clone()?);
            std::io::Result::Ok(Line { peer: peer.to_owned(), requests, answers })
        };
        connect().map_err(|error| format!("no connection to {peer}: {error}"))
    }

    fn ask(&mut self, query: u64) -> Result<(), String> {
        let asked = self.requests.write_all(format!("part {query}\n").as_bytes());
        asked.map_err(|error| format!("{}: {error}", self.peer))
    }

    fn answer(&mut self, query: u64) -> Result<u64, String> {
        let mut answer = String::new();
        let read = self.answers.read_line(&mut answer);
        read.map_err(|error| format!("{}: {error}", self.peer))?;
        let count = answer.trim_end().strip_prefix(&format!("found {query} "));
        count
            .and_then(|count| count.parse().ok())
            .ok_or_else(|| format!("{} says {answer:?}", self.peer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn queries_are_spread_over_all_and_damage_is_told() {
        let documents: Vec<u64> = (0..(64 * WORDS) as u64).map(mix).collect();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = listener.local_addr().unwrap().to_string();
        let theirs = documents.clone();
        std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            server::answer_lines(stream, |request| {
                Ok(answer(&theirs, &[], &mut Vec::new(), request).unwrap().into_bytes())
            })
        });
        let (peers, mut lines) = ([peer], Vec::new());
        for query in 1..9 {
            let found = answer(&documents, &peers, &mut lines, &format!("find {query}"));
            assert_eq!(found.unwrap(), format!("found {query} 32\n"));
        }
        assert_eq!(lines.len(), 1, "one connection is enough");
        let damaged: Vec<u64> = documents.iter().map(|word| word ^ 1).collect();
        let error = answer(&damaged, &[], &mut lines, "part 1").unwrap_err();
        assert!(error.contains("is damaged"), "{error}");
        assert!(answer(&documents, &[], &mut lines, "find x").is_err());
    }
}
