//! Load on the guest's network: many connections, every byte verified.

use crate::conversation::{Conversation, ConversationError, Exchange, Transcript, connect};
use crate::lab::Lab;
use crate::records::mix;
use anyhow::Result;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Load that the connections carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// Short questions and answers, with the guest's record server.
    Pings,
    /// Blocks of this many pseudo-random bytes, with the guest's echo server.
    Bulk(usize),
}

/// Connections that talk with the guest.
pub struct ChatterClient {
    conversations: Vec<Conversation>,
}

impl ChatterClient {
    /// Opens so many connections from the laboratory's client and begins; on each, two rounds begin
    /// at least `pace` apart (zero: as fast as the guest answers).
    pub fn start(
        lab: &Lab,
        guest: SocketAddr,
        connections: usize,
        load: Load,
        pace: Duration,
    ) -> Result<ChatterClient> {
        let start = |index: usize| {
            let exchange = move |round| exchange(load, index, round);
            anyhow::Ok(Conversation::start(connect(lab, guest)?, pace, exchange))
        };
        let conversations = (0..connections).map(start).collect::<Result<_>>()?;
        Ok(ChatterClient { conversations })
    }

    /// Answers until now, on the connection that got the fewest.
    pub fn least_rounds(&self) -> u64 {
        self.conversations.iter().map(Conversation::rounds).min().unwrap_or_default()
    }

    /// Whether one of them has ended in an error; [`stop`](ChatterClient::stop) says which.
    pub fn failed(&self) -> bool {
        self.conversations.iter().any(Conversation::failed)
    }

    /// Ends all conversations and reports.
    pub fn stop(self) -> ChatterReport {
        // All at once: each may have to wait for its last answer.
        self.conversations.iter().for_each(Conversation::ask_to_stop);
        ChatterReport {
            transcripts: self.conversations.into_iter().map(Conversation::stop).collect(),
        }
    }
}

/// Report on what a [`ChatterClient`] has seen.
pub struct ChatterReport {
    transcripts: Vec<Transcript>,
}

impl ChatterReport {
    /// Right answers on all connections.
    pub fn rounds(&self) -> u64 {
        self.transcripts.iter().map(|transcript| transcript.answers.len() as u64).sum()
    }

    /// Connections that broke, went silent or carried a wrong byte.
    pub fn errors(&self) -> Vec<&ConversationError> {
        self.transcripts.iter().filter_map(|transcript| transcript.error.as_ref()).collect()
    }

    /// The longest time without an answer on any connection.
    pub fn longest_gap(&self) -> Duration {
        let longest = self.transcripts.iter().map(Transcript::longest_silence).max();
        longest.unwrap_or_default()
    }

    /// The longest outage of a connection because of a failure at `failed_at`, as
    /// [`RecordReport::outage_until`](crate::RecordReport::outage_until) has it.
    pub fn outage_until(&self, failed_at: Instant, until: Instant) -> Option<Duration> {
        let outages = self.transcripts.iter().map(|transcript| transcript.outage(failed_at, until));
        outages.collect::<Option<Vec<_>>>()?.into_iter().max()
    }
}

fn exchange(load: Load, connection: usize, round: u64) -> Exchange {
    // No two rounds of any two connections are alike: a swapped or repeated
    // answer is a wrong one.
    let seed = mix((connection as u64) << 40 ^ round);
    match load {
        Load::Pings => Exchange {
            request: format!("ping {seed:016x}\n").into_bytes(),
            answer: format!("pong {seed:016x}\n").into_bytes(),
        },
        Load::Bulk(bytes) => {
            let words = (0..).flat_map(|word| mix(seed.wrapping_add(word)).to_le_bytes());
            let block: Vec<u8> = words.take(bytes).collect();
            Exchange { request: block.clone(), answer: block }
        }
    }
}
