//! Payments that are sent once, in datagrams that nobody answers or repeats, and the ledgers of
//! both sides: a frame that is lost or doubled on its way shows in them for good.
//!
//! Those of one bank to another are numbered 1, 2, 3, …, and the number is the amount: no two are
//! the same. A datagram is `once NAME NUMBER` and a newline, NAME being who pays.
//!
//! | request      | answer | |
//! |--------------|--------|-|
//! | `once BURST` | `ok` | from now on pays each peer so many times in a row, every 30 ms; 0: no more |
//! | `ledger`     | JSON | `sent`: the last number by peer (HOST:PORT); `got`, by who paid: `last`, the last number; `holes`, `[first, last]` of numbers that did not come before a later one; `again`, numbers that came when they were not the next |

use std::collections::BTreeMap;
use std::fmt::Write;

/// What came from one bank.
#[derive(Debug, Default)]
struct Got {
    last: u64,
    holes: Vec<(u64, u64)>,
    again: Vec<u64>,
}

/// What one bank has paid and got.
#[derive(Debug, Default)]
pub struct Ledger {
    /// Payments in a row, to each peer.
    pub burst: u64,
    sent: BTreeMap<String, u64>,
    got: BTreeMap<String, Got>,
}

impl Ledger {
    /// The next payment to a peer, which counts as sent.
    pub fn pay(&mut self, peer: &str) -> u64 {
        let sent = self.sent.entry(peer.to_owned()).or_default();
        *sent += 1;
        *sent
    }

    /// A payment has come.
    pub fn take(&mut self, from: &str, number: u64) {
        let got = self.got.entry(from.to_owned()).or_default();
        if number <= got.last {
            got.again.push(number);
            return;
        }
        if number > got.last + 1 {
            got.holes.push((got.last + 1, number - 1));
        }
        got.last = number;
    }

    /// The answer to `ledger`. Names and addresses need no escapes.
    pub fn report(&self) -> String {
        let sent = self.sent.iter().map(|(peer, number)| format!("\"{peer}\":{number}"));
        let got = self.got.iter().map(|(from, Got { last, holes, again })| {
            let holes: Vec<String> = holes.iter().map(|(a, b)| format!("[{a},{b}]")).collect();
            let mut text = format!("\"{from}\":{{\"last\":{last},\"holes\":[{}]", holes.join(","));
            let _ = write!(text, ",\"again\":{again:?}}}");
            text
        });
        let (sent, got): (Vec<String>, Vec<String>) = (sent.collect(), got.collect());
        format!("{{\"sent\":{{{}}},\"got\":{{{}}}}}\n", sent.join(","), got.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_or_comes_twice_is_noted() {
        let mut ledger = Ledger::default();
        assert_eq!((ledger.pay("b:1"), ledger.pay("b:1"), ledger.pay("c:1")), (1, 2, 1));
        for number in [1, 2, 5, 4, 5, 6, 8] {
            ledger.take("b", number);
        }
        let report = "{\"sent\":{\"b:1\":2,\"c:1\":1},\"got\":{\"b\":{\"last\":8,\
                      \"holes\":[[3,4],[7,7]],\"again\":[4, 5]}}}\n";
        assert_eq!(ledger.report(), report);
    }
}
