//! The queries' section: its figures, and its text.

use super::clients::Served;
use crate::bench::suite::statistics::median;
use crate::bench::suite::table::number;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::{Duration, Instant};

/// Number of queries of each client that are looked at.
pub const QUERIES: usize = 20;
/// Factor up to which a query is normal, beside one before the snapshot.
const NORMAL: f64 = 2.0;

/// Findings of the section. Times are in milliseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Time that a query takes before the snapshot, on average.
    pub query_ms: f64,
    /// Each mode: the middle of its restores.
    pub queries: BTreeMap<String, Summary>,
    /// Each restore.
    pub query_restores: BTreeMap<String, Vec<Restored>>,
}

/// One restore.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Restored {
    /// Time from the command until both guests ran.
    pub started_ms: f64,
    /// Time that a client waited for its connection, on average.
    pub connect_ms: f64,
    /// Time from the command until the first client had its first answer.
    pub first_answer_ms: f64,
    /// Times that the clients waited for their first, second, … answer, on average.
    pub mean_ms: Vec<f64>,
}

/// Summary of restores in one mode, in the middle.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Time from the command until both guests ran.
    pub started_ms: f64,
    /// Time that a client waited for its connection, on average.
    pub connect_ms: f64,
    /// Time from the command until the first client had its first answer.
    pub first_answer_ms: f64,
    /// Times of the first, second, … answer of a client.
    pub mean_ms: Vec<f64>,
    /// Query, counted from 1, from which on all take at most twice as long as before the
    /// snapshot; none if the last of them does not.
    pub normal_from: Option<usize>,
}

impl Restored {
    /// Result of what each client had after a restore that was asked for then.
    pub fn of(began: Instant, started_ms: f64, served: &[Served]) -> Restored {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let mean = |times: Vec<Duration>| {
            times.iter().copied().map(ms).sum::<f64>() / times.len().max(1) as f64
        };
        let took = |query: usize| {
            let answers = served.iter().filter_map(|own| own.answers.get(query));
            answers.map(|answer| answer.took).collect()
        };
        let first = served.iter().filter_map(|own| own.answers.first()).map(|answer| answer.at);
        Restored {
            started_ms,
            connect_ms: mean(served.iter().map(|own| own.connecting).collect()),
            first_answer_ms: first.min().map_or(0.0, |at| ms(at.saturating_duration_since(began))),
            mean_ms: (0..QUERIES).map(|query| mean(took(query))).collect(),
        }
    }

    /// Words for the progress.
    pub fn words(&self) -> String {
        let at = |query: usize| self.mean_ms.get(query).copied().unwrap_or_default();
        format!(
            "ran after {:.0} ms, connecting took {:.0} ms, first answer after {:.0} ms; queries 1, \
             5, 20 took {:.1}, {:.1}, {:.1} ms",
            self.started_ms,
            self.connect_ms,
            self.first_answer_ms,
            at(0),
            at(4),
            at(QUERIES - 1)
        )
    }
}

impl Report {
    /// Report of nothing yet, but what is normal.
    pub fn new(query_ms: f64) -> Report {
        Report { query_ms, queries: BTreeMap::new(), query_restores: BTreeMap::new() }
    }

    /// Concludes from all restores.
    pub fn conclude(&mut self) {
        for (mode, restores) in &self.query_restores {
            let middle = |figure: &dyn Fn(&Restored) -> Option<f64>| {
                let all: Vec<f64> = restores.iter().filter_map(figure).collect();
                median(&all).unwrap_or_default()
            };
            let mean_ms: Vec<f64> =
                (0..QUERIES).map(|query| middle(&|one| one.mean_ms.get(query).copied())).collect();
            let summary = Summary {
                started_ms: middle(&|one| Some(one.started_ms)),
                connect_ms: middle(&|one| Some(one.connect_ms)),
                first_answer_ms: middle(&|one| Some(one.first_answer_ms)),
                normal_from: normal_from(&mean_ms, self.query_ms),
                mean_ms,
            };
            self.queries.insert(mode.clone(), summary);
        }
    }
}

/// The first query, counted from 1, from which on all are normal.
fn normal_from(mean_ms: &[f64], query_ms: f64) -> Option<usize> {
    let slow = mean_ms.iter().rposition(|&ms| ms > query_ms * NORMAL);
    let from = slow.map_or(0, |last| last + 1);
    (from < mean_ms.len()).then_some(from + 1)
}

/// The section for a terminal.
pub fn table(report: &Report) -> String {
    let mut text = format!(
        "Queries of ten clients, {} ms each before the snapshot; ms until both guests ran, of \
         connecting then, until the first answer, of the first, …, answers\n\n{:<12} {:>8} {:>8} \
         {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}  normal from\n",
        number(report.query_ms),
        "",
        "run",
        "connect",
        "answer",
        "1st",
        "2nd",
        "5th",
        "10th",
        "20th"
    );
    for (mode, summary) in &report.queries {
        let at =
            |query: usize| summary.mean_ms.get(query - 1).map_or("-".to_owned(), |&ms| number(ms));
        let from = summary.normal_from.map_or("never".to_owned(), |query| query.to_string());
        let _ = writeln!(
            text,
            "{mode:<12} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}  {from}",
            number(summary.started_ms),
            number(summary.connect_ms),
            number(summary.first_answer_ms),
            at(1),
            at(2),
            at(5),
            at(10),
            at(20)
        );
    }
    text
}

#[cfg(test)]
pub mod tests {
    use super::super::clients::Answer;
    use super::*;

    pub fn report() -> Report {
        let began = Instant::now();
        let client = |connecting: u64, times: [u64; 3]| {
            let answer = |ms| {
                let took = Duration::from_millis(ms);
                Answer { at: began + Duration::from_millis(1000) + took, took }
            };
            let connecting = Duration::from_millis(connecting);
            Served { connecting, answers: times.map(answer).to_vec() }
        };
        let served = [client(50, [300, 40, 10]), client(70, [100, 20, 10])];
        let restored = Restored::of(began, 900.0, &served);
        let mut report = Report::new(12.0);
        report.query_restores.insert("hot".to_owned(), vec![restored]);
        report.conclude();
        report
    }

    #[test]
    fn answers_are_counted_client_by_client() {
        let hot = &report().queries["hot"];
        assert_eq!(hot.mean_ms[..3], [200.0, 30.0, 10.0]);
        assert_eq!((hot.started_ms, hot.connect_ms, hot.first_answer_ms), (900.0, 60.0, 1100.0));
        assert_eq!(hot.normal_from, Some(3));
        assert!(table(&report()).contains("1100"), "{}", table(&report()));
    }

    #[test]
    fn normal_is_what_stays_so() {
        assert_eq!(normal_from(&[1.0, 1.0], 1.0), Some(1));
        assert_eq!(normal_from(&[9.0, 1.0, 3.0, 2.0], 1.0), Some(4));
        assert_eq!(normal_from(&[1.0, 3.0], 1.0), None);
    }
}
