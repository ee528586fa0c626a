//! Costs of a fail-over: the demo's result.

use crate::cli::Cut;
use indicatif::HumanBytes;
use serde::Serialize;
use understudy_report::{LockstepReport, PauseReport};

/// The result of `understudy-lab demo`; `--json` prints it as it is.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// The longest time without an acknowledgement that the failure caused, in
    /// milliseconds; none if there was no acknowledgement after it.
    pub outage_ms: Option<f64>,
    /// Checkpoints committed before the failure.
    pub checkpoints: u64,
    /// Their pauses.
    pub pause_ms: PauseReport,
    /// Bytes sent to the backup before the failure.
    pub bytes_sent: u64,
    /// Distance of both hosts in lockstep.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lockstep: Option<LogOutcome>,
    /// Records that the client saw acknowledged.
    pub acked: u64,
    /// Records of them that are not on the survivor's disk.
    pub lost: u64,
    /// Whether the client's one connection lived through it all.
    pub connection_survived: bool,
    /// Connection that was cut, instead of the host being killed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cut: Option<Cut>,
    /// Whether the old copy sent anything after the new one had begun to; only
    /// where the old one lives on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub both_answered: Option<bool>,
    /// Everything that went wrong, in words.
    #[serde(skip)]
    pub problems: Vec<String>,
}

/// Figures of lockstep, as of the primary's last report before the failure.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LogOutcome {
    /// Time for which the backup had had log that it had not executed, in milliseconds: this
    /// much of the outage at least is its catching up.
    pub lag_ms: f64,
    /// Log of the last seconds, in Mbit/s.
    pub log_mbit_s: f64,
}

impl From<LockstepReport> for LogOutcome {
    fn from(report: LockstepReport) -> LogOutcome {
        LogOutcome { lag_ms: report.lag_ms, log_mbit_s: report.log_mbit_s }
    }
}

impl Outcome {
    /// Whether the product kept its promise.
    pub fn is_good(&self) -> bool {
        self.problems.is_empty()
            && self.lost == 0
            && self.connection_survived
            && self.both_answered != Some(true)
    }

    /// A few aligned lines for people.
    pub fn summary(&self) -> String {
        let PauseReport { p50, p99, max } = self.pause_ms;
        let outage = match self.outage_ms {
            Some(ms) => format!("{ms:.0} ms, as the client saw it"),
            None => "without end: no acknowledgement after the failure".to_owned(),
        };
        let connection = if self.connection_survived { "survived" } else { "broke" };
        let mut rows = vec![
            ("outage", outage),
            ("connection", connection.to_owned()),
            ("records", format!("{} acknowledged, {} lost", self.acked, self.lost)),
        ];
        match self.lockstep {
            Some(LogOutcome { lag_ms, log_mbit_s }) => {
                rows.push(("lag", format!("{lag_ms:.1} ms when host a failed")));
                rows.push(("log", format!("{log_mbit_s:.1} Mbit/s")));
            }
            None => rows.push(("checkpoints", self.checkpoints.to_string())),
        }
        rows.push(("pause", format!("p50 {p50:.2} ms, p99 {p99:.2} ms, max {max:.2} ms")));
        rows.push(("sent to b", HumanBytes(self.bytes_sent).to_string()));
        if let Some(both) = self.both_answered {
            let text = if both { "answered at the same time" } else { "never both answered" };
            rows.push(("the two copies", text.to_owned()));
        }
        rows.iter().map(|(name, value)| format!("  {name:<14}  {value}\n")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome() -> Outcome {
        Outcome {
            outage_ms: Some(184.3),
            checkpoints: 900,
            pause_ms: PauseReport { p50: 0.9, p99: 2.0, max: 4.0 },
            bytes_sent: 1 << 20,
            lockstep: None,
            acked: 1234,
            lost: 0,
            connection_survived: true,
            cut: None,
            both_answered: None,
            problems: Vec::new(),
        }
    }

    #[test]
    fn the_json_has_the_documented_fields() {
        let json = serde_json::to_value(outcome()).unwrap();
        let expected = serde_json::json!({
            "outage_ms": 184.3, "checkpoints": 900, "bytes_sent": 1 << 20,
            "pause_ms": {"p50": 0.9, "p99": 2.0, "max": 4.0},
            "acked": 1234, "lost": 0, "connection_survived": true,
        });
        assert_eq!(json, expected);
        let lockstep = Some(LogOutcome { lag_ms: 1.5, log_mbit_s: 3.0 });
        let json = serde_json::to_value(Outcome { lockstep, ..outcome() }).unwrap();
        assert_eq!(json["lockstep"], serde_json::json!({"lag_ms": 1.5, "log_mbit_s": 3.0}));
        let cut = Outcome { cut: Some(Cut::Network), both_answered: Some(false), ..outcome() };
        let json = serde_json::to_value(cut).unwrap();
        assert_eq!((&json["cut"], &json["both_answered"]), (&"network".into(), &false.into()));
    }

    #[test]
    fn one_fault_is_enough_to_fail() {
        assert!(outcome().is_good());
        let bad = [
            Outcome { lost: 1, ..outcome() },
            Outcome { connection_survived: false, ..outcome() },
            Outcome { both_answered: Some(true), ..outcome() },
            Outcome { problems: vec!["the file system is damaged".to_owned()], ..outcome() },
        ];
        assert!(bad.iter().all(|outcome| !outcome.is_good()));
    }

    #[test]
    fn the_summary_is_aligned() {
        let text = outcome().summary();
        assert!(text.contains("  outage          184 ms"), "{text}");
        assert!(text.contains("  records         1234 acknowledged, 0 lost"), "{text}");
        assert!(!text.contains("copies"), "{text}");
    }
}
