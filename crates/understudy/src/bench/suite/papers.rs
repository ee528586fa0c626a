//! What others have published, and what is aimed at.
//!
//! The figures are those that the papers state in their text and tables; where a paper has
//! only the best or worst of its rates in words, only that rate is here.

use super::statistics::ratio;
use super::variant::{Subject, Variant};
use crate::bench::workloads::Better;
use serde::Serialize;

/// Remus: Cully et al., NSDI 2008. Xen 3.1, 1 Gbit/s, a guest of 512 MB.
pub const REMUS: &str = "Remus (NSDI 2008)";
/// A study of Remus by the UDESC. Xen 4.2.1, 2 vCPUs, 1 GB, 1 Gbit/s.
pub const UDESC: &str = "UDESC study of Remus on Xen 4.2.1";

/// One figure of a paper.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Published {
    /// The paper.
    pub source: &'static str,
    /// Its variant, in our names.
    pub variant: Variant,
    /// Beside the unprotected guest: 1 is as fast, less is slower.
    pub ratio: f64,
    /// As it stands in the paper.
    pub text: &'static str,
}

/// What the papers have about a subject, in the order of the variants.
pub fn published(subject: Subject) -> Vec<Published> {
    use Variant::{Hz10, Hz20, Hz30, Hz40, NoBuffer};
    let udesc = |variant, ratio, text| Published { source: UDESC, variant, ratio, text };
    let remus = |variant, percent: f64, text| Published {
        source: REMUS,
        variant,
        ratio: slower_by(percent),
        text,
    };
    match subject {
        Subject::Cpu => vec![
            udesc(Hz10, slower_by(7.0), "12.7 s, +7 %"),
            udesc(Hz40, slower_by(25.9), "12.7 s, +25.9 %"),
        ],
        Subject::Memory => vec![udesc(Hz10, slower_by(100.0), "more than +100 % at best")],
        Subject::Fileio => vec![udesc(Hz30, slower_by(28.7), "up to +28.7 %")],
        Subject::Compile => vec![
            remus(Hz10, 31.0, "kernel, +31 %"),
            remus(Hz20, 52.0, "kernel, +52 %"),
            remus(Hz30, 80.0, "kernel, +80 %"),
            remus(Hz40, 103.0, "kernel, +103 %"),
            udesc(Hz10, slower_by(68.0), "BIND, +68 % at best"),
        ],
        Subject::Upload => {
            // +215 % makes 13.9 s of it.
            let bare = 13.9 * slower_by(215.0);
            vec![
                udesc(Hz40, slower_by(215.0), "50 MB, 13.9 s at best, +215 %"),
                udesc(NoBuffer, bare / 6.2, "6.2 s"),
            ]
        }
        Subject::Download => vec![
            udesc(Hz10, slower_by(18_000.0), "50 MB, +18 000 %"),
            udesc(Hz40, 4.5 / 202.0, "4.5 s → 202 s"),
            udesc(NoBuffer, 4.5 / 6.5, "6.5 s"),
        ],
        Subject::Web => vec![
            udesc(Hz10, 53.0 / 9_549.0, "9 549 → 53 requests in 60 s"),
            udesc(Hz40, 200.0 / 9_549.0, "9 549 → 200 requests in 60 s"),
        ],
        // The four rates' reads; the study's text does not say which is which. As with the
        // other loads on the network, more checkpoints a second are better.
        Subject::Tbench => [(Hz10, 3_536.0), (Hz20, 5_975.0), (Hz30, 8_891.0), (Hz40, 11_525.0)]
            .map(|(variant, reads)| udesc(variant, reads / 388_191.0, "of 388 191 reads"))
            .to_vec(),
        _ => Vec::new(),
    }
}

/// The best that the papers have about a subject.
pub fn best_published(subject: Subject) -> Option<f64> {
    let ratios =
        published(subject).into_iter().filter(|figure| figure.variant != Variant::NoBuffer);
    ratios.map(|figure| figure.ratio).reduce(f64::max)
}

/// The ratio of what takes so many percent longer.
fn slower_by(percent: f64) -> f64 {
    ratio(100.0 + percent, 100.0, Better::Lower).unwrap_or(1.0)
}

/// The outage that Remus had, in milliseconds: "about a second".
pub const REMUS_OUTAGE_MS: f64 = 1_000.0;
/// Bytes of pages for each byte sent: Remus, 3.4, with the cache of 8 192 pages.
pub const REMUS_COMPRESSION: f64 = 10.0;

/// What a figure is to be.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Aim {
    /// Beside the unprotected guest, at least.
    Ratio(f64),
    /// More than the unprotected guest's by so many milliseconds at most.
    AddedMs(f64),
    /// So many at most.
    AtMost(f64),
}

/// The aim of a subject in a variant, if there is one.
pub fn aim(subject: Subject, variant: Variant) -> Option<Aim> {
    Some(match (subject, variant) {
        (Subject::Cpu, Variant::Adaptive) => Aim::Ratio(0.97),
        (Subject::Memory, Variant::Adaptive) => Aim::Ratio(0.9),
        (Subject::Fileio | Subject::Compile | Subject::Postmark, Variant::Adaptive) => {
            Aim::Ratio(0.95)
        }
        (Subject::Compile, Variant::Hz40) => Aim::Ratio(0.9),
        (Subject::Upload | Subject::Download, Variant::Adaptive) => Aim::Ratio(0.8),
        (Subject::Web, Variant::Adaptive) => Aim::Ratio(0.7),
        (Subject::Tbench, Variant::Adaptive) => Aim::Ratio(0.5),
        (Subject::Latency, Variant::Adaptive) => Aim::AddedMs(5.0),
        // Half of COLO's, of an idle guest; the other sizes are judged beside it.
        (Subject::Pause, Variant::Adaptive) => Aim::AtMost(0.5),
        (Subject::Failover, Variant::Adaptive) => Aim::AtMost(150.0),
        _ => return None,
    })
}

impl Aim {
    /// In words.
    pub fn words(self) -> String {
        match self {
            Aim::Ratio(ratio) => format!("≥ {ratio}"),
            Aim::AddedMs(ms) => format!("≤ {ms} ms more"),
            Aim::AtMost(most) => format!("≤ {most}"),
        }
    }

    /// Whether `value` keeps it, beside the unprotected guest's; none if that is needed and
    /// missing.
    pub fn met(self, value: f64, base: Option<f64>, better: Better) -> Option<bool> {
        match self {
            Aim::Ratio(least) => Some(ratio(value, base?, better)? >= least),
            Aim::AddedMs(most) => Some(value - base? <= most),
            Aim::AtMost(most) => Some(value <= most),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_slow_downs_are_ratios_below_one() {
        for &subject in Subject::all() {
            for figure in published(subject) {
                assert!((0.0..1.0).contains(&figure.ratio), "{figure:?}");
            }
        }
        let best = |subject| (best_published(subject).unwrap() * 100.0).round();
        assert_eq!(best(Subject::Cpu), 93.0);
        assert_eq!(best(Subject::Upload), 32.0);
        assert_eq!(best(Subject::Download), 2.0);
        assert_eq!(best(Subject::Web), 2.0);
        assert_eq!(best(Subject::Tbench), 3.0);
        assert_eq!(best_published(Subject::Latency), None);
    }

    #[test]
    fn aims_are_kept_or_not() {
        let ratio = Aim::Ratio(0.9);
        assert_eq!(ratio.met(91.0, Some(100.0), Better::Higher), Some(true));
        assert_eq!(ratio.met(120.0, Some(100.0), Better::Lower), Some(false));
        assert_eq!(ratio.met(1.0, None, Better::Lower), None);
        assert_eq!(Aim::AddedMs(5.0).met(7.0, Some(1.0), Better::Lower), Some(false));
        assert_eq!(Aim::AtMost(150.0).met(150.0, None, Better::Lower), Some(true));
    }
}
