//! The client that tells whether the product keeps its promise: it appends
//! numbered records over one connection and remembers every acknowledgement.

use crate::conversation::{Conversation, ConversationError, Exchange, Transcript, connect};
use crate::lab::Lab;
use anyhow::Result;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// The payload of record `number`: 48 hexadecimal digits that only it has.
pub fn record_payload(number: u64) -> String {
    let digits = |lane: u64| format!("{:016x}", mix(number.wrapping_mul(3).wrapping_add(lane)));
    (0..3).map(digits).collect()
}

/// The SplitMix64 generator's output function: every bit of the input changes
/// about half of the output's.
pub(crate) fn mix(seed: u64) -> u64 {
    let mut value = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Appends records 1, 2, 3, … to the guest's record server over one TCP
/// connection, each once the one before is acknowledged. Never reconnects.
pub struct RecordClient {
    conversation: Conversation,
}

impl RecordClient {
    /// Connects from the laboratory's client and begins; two records are sent
    /// at least `pace` apart (zero: as fast as they are acknowledged).
    pub fn start(lab: &Lab, guest: SocketAddr, pace: Duration) -> Result<RecordClient> {
        let conversation = Conversation::start(connect(lab, guest)?, pace, |number| Exchange {
            request: format!("append {number} {}\n", record_payload(number)).into_bytes(),
            answer: format!("ok {number}\n").into_bytes(),
        });
        Ok(RecordClient { conversation })
    }

    /// Records acknowledged until now; also the number of the last one.
    pub fn acked(&self) -> u64 {
        self.conversation.rounds()
    }

    /// Whether it has ended in an error; [`stop`](RecordClient::stop) says which.
    pub fn failed(&self) -> bool {
        self.conversation.failed()
    }

    /// Awaits the acknowledgement under way, closes the connection, reports.
    pub fn stop(self) -> RecordReport {
        RecordReport { transcript: self.conversation.stop() }
    }

    /// The same of a guest that is no more: awaits nothing.
    pub fn abandon(self) -> RecordReport {
        RecordReport { transcript: self.conversation.abandon() }
    }
}

/// The acknowledgement of one record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ack {
    /// The record's number.
    pub number: u64,
    /// Time at which the client had read the whole acknowledgement.
    pub at: Instant,
}

/// Report on what a [`RecordClient`] has seen.
pub struct RecordReport {
    transcript: Transcript,
}

impl RecordReport {
    /// Every acknowledgement, in order; their numbers are 1, 2, 3, …
    pub fn acks(&self) -> impl ExactSizeIterator<Item = Ack> + '_ {
        let ack = |(index, &at): (usize, &Instant)| Ack { number: index as u64 + 1, at };
        self.transcript.answers.iter().enumerate().map(ack)
    }

    /// Number of records that were acknowledged; also the number of the last one.
    pub fn acked(&self) -> u64 {
        self.transcript.answers.len() as u64
    }

    /// Whether the one connection lived to the end and every answer was right.
    pub fn connection_survived(&self) -> bool {
        self.transcript.error.is_none()
    }

    /// Error, if something went wrong.
    pub fn error(&self) -> Option<&ConversationError> {
        self.transcript.error.as_ref()
    }

    /// The longest time without an acknowledgement, from the first request to
    /// the end of the conversation.
    pub fn longest_gap(&self) -> Duration {
        self.transcript.longest_silence()
    }

    /// The outage that the client saw because of a failure at `failed_at`: the
    /// longest time without an acknowledgement among those that ended after
    /// that instant. `None` if no acknowledgement came after it.
    ///
    /// It is measured from the last acknowledgement before the silence, not
    /// from the failure, so it never flatters; and an acknowledgement that was
    /// still on its way when the host died does not hide the silence after it.
    /// Later hiccups count too: stop the client before provoking any.
    pub fn outage(&self, failed_at: Instant) -> Option<Duration> {
        self.outage_until(failed_at, self.transcript.ended)
    }

    /// [`outage`](RecordReport::outage) of a failure among several: silences that
    /// ended after `until` do not count.
    pub fn outage_until(&self, failed_at: Instant, until: Instant) -> Option<Duration> {
        self.transcript.outage(failed_at, until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn report(begun: Instant, answers_ms: &[u64], ended_ms: u64) -> RecordReport {
        let after = |ms: u64| begun + Duration::from_millis(ms);
        let answers = answers_ms.iter().map(|&ms| after(ms)).collect();
        RecordReport {
            transcript: Transcript { answers, begun, ended: after(ended_ms), error: None },
        }
    }

    #[test]
    fn the_outage_runs_from_the_last_ack_before_to_the_first_after() {
        let begun = Instant::now();
        let failed_at = begun + Duration::from_millis(25);
        let outage = |answers: &[u64], ended| report(begun, answers, ended).outage(failed_at);
        let ms = |ms| Some(Duration::from_millis(ms));
        assert_eq!(outage(&[10, 20, 100, 110], 111), ms(80));
        // An ack in flight at the failure does not hide the silence after it.
        assert_eq!(outage(&[10, 20, 26, 100, 110], 111), ms(74));
        // Silences before the failure do not count.
        assert_eq!(outage(&[1, 20, 30], 31), ms(10));
        // Nothing came after the failure: no end of the outage was seen.
        assert_eq!(outage(&[10, 20], 500), None);
        // Of two failures, each has its own.
        let after = |ms| begun + Duration::from_millis(ms);
        let two = report(begun, &[10, 20, 100, 110, 400], 401);
        assert_eq!(two.outage_until(failed_at, after(110)), ms(80));
        assert_eq!(two.outage_until(after(120), after(400)), ms(290));
        assert_eq!(two.outage_until(after(120), after(399)), None);
        // A connection that went silent for good.
        assert_eq!(outage(&[10, 20, 26], 500), ms(474));
        assert_eq!(report(begun, &[10, 50, 60], 61).longest_gap(), Duration::from_millis(40));
    }

    #[test]
    fn payloads_differ_and_stay_on_their_line() {
        let payloads: BTreeSet<String> = (0..1000).map(record_payload).collect();
        assert_eq!(payloads.len(), 1000);
        assert!(payloads.iter().all(|text| text.len() == 48 && text.is_ascii()));
    }
}
