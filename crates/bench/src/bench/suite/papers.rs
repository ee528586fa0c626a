//! Figures that others have published, and what is aimed at.
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
/// VMware FT: Scales et al., 2010. Lockstep with the processor's help, one virtual CPU. It has
/// no checkpoints, so its figures stand beside what one gets here without asking: `adaptive`.
pub const VMWARE_FT: &str = "VMware FT (2010, lockstep)";

/// One figure of a paper.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Published {
    /// The paper.
    pub source: &'static str,
    /// Its variant, in our names.
    pub variant: Variant,
    /// Ratio beside the unprotected guest: 1 is as fast, less is slower.
    pub ratio: f64,
    /// Text as it stands in the paper.
    pub text: &'static str,
}

/// Figures that the papers have about a subject, in the order of the variants.
pub fn published(subject: Subject) -> Vec<Published> {
    use Variant::{Adaptive, Hz10, Hz20, Hz30, Hz40, NoBuffer};
    let udesc = |variant, ratio, text| Published { source: UDESC, variant, ratio, text };
    let ft = |ratio, text| Published { source: VMWARE_FT, variant: Adaptive, ratio, text };
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
            ft(0.98, "SPECjbb2005, 0.98"),
        ],
        Subject::Memory => vec![udesc(Hz10, slower_by(100.0), "more than +100 % at best")],
        Subject::Fileio => vec![udesc(
            Hz30,
            slower_by(28.7),
            "+28.7 %, its worst rate; the others are in a figure only",
        )],
        Subject::Compile => vec![
            remus(Hz10, 31.0, "kernel, +31 %"),
            remus(Hz20, 52.0, "kernel, +52 %"),
            remus(Hz30, 80.0, "kernel, +80 %"),
            remus(Hz40, 103.0, "kernel, +103 %"),
            udesc(Hz10, slower_by(68.0), "BIND, +68 % at best"),
            ft(0.95, "kernel, 0.95"),
        ],
        Subject::Upload => {
            // +215 % makes 13.9 s of it.
            let bare = 13.9 * slower_by(215.0);
            vec![
                udesc(Hz40, slower_by(215.0), "50 MB, 13.9 s at best, +215 %"),
                udesc(NoBuffer, bare / 6.2, "6.2 s"),
                ft(860.0 / 940.0, "receive, 940 → 860 Mbit/s, log on 10 Gbit/s (604 on 1)"),
            ]
        }
        Subject::Download => vec![
            udesc(Hz10, slower_by(18_000.0), "50 MB, +18 000 %"),
            udesc(Hz40, 4.5 / 202.0, "4.5 s → 202 s"),
            udesc(NoBuffer, 4.5 / 6.5, "6.5 s"),
            ft(935.0 / 940.0, "transmit, 940 → 935 Mbit/s, log on 10 Gbit/s (855 on 1)"),
        ],
        Subject::Web => vec![
            udesc(Hz10, 53.0 / 9_549.0, "9 549 → 53 requests in 60 s"),
            udesc(Hz40, 200.0 / 9_549.0, "9 549 → 200 requests in 60 s"),
            // Its figure 7 is flat over the rates, and the text has this one ratio for all.
            remus(Hz40, 300.0, "SPECweb2005, somewhat more than a quarter of native"),
        ],
        // The reads of its table I.
        Subject::Tbench => [(Hz10, 3_536.0), (Hz20, 5_975.0), (Hz30, 8_891.0), (Hz40, 11_525.0)]
            .map(|(variant, reads)| udesc(variant, reads / 388_191.0, "of 388 191 reads"))
            .to_vec(),
        // Of many clients each.
        Subject::Pgbench32 => {
            vec![ft(0.99, "Oracle Swingbench, 0.99"), ft(0.94, "MS-SQL DVD Store, 0.94")]
        }
        _ => Vec::new(),
    }
}

/// Words of the papers about a subject that is no ratio of a protected guest.
pub fn remark(subject: Subject) -> Option<&'static str> {
    Some(match subject {
        Subject::Postmark => {
            "Remus (NSDI 2008): no significant cost of replicating the disk alone, with neither \
             memory nor network protected"
        }
        Subject::Web => {
            "VMware FT's authors read 0.31 at 40 checkpoints a second out of Remus's figure 7 \
             (\"225% slowdown\")"
        }
        Subject::Pgbench32 => {
            "RemusDB (VLDB 2011): a database loses up to 32 % under Remus as it is"
        }
        _ => return None,
    })
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
/// Bytes of pages for each byte sent: Remus, section 3.4, with the cache of 8 192 pages.
pub const REMUS_COMPRESSION: f64 = 10.0;

/// Aim for a figure.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Aim {
    /// Ratio beside the unprotected guest, at least.
    Ratio(f64),
    /// More than the unprotected guest's by so many milliseconds at most.
    AddedMs(f64),
    /// An upper bound.
    AtMost(f64),
}

/// The aim of a subject in a variant, if there is one.
pub fn aim(subject: Subject, variant: Variant) -> Option<Aim> {
    Some(match (subject, variant) {
        (Subject::Cpu | Subject::Memory | Subject::Compile, Variant::Adaptive) => Aim::Ratio(0.97),
        (Subject::Fileio | Subject::Postmark, Variant::Adaptive) => Aim::Ratio(0.95),
        (Subject::Compile, Variant::Hz40) => Aim::Ratio(0.9),
        (Subject::Upload | Subject::Web, Variant::Adaptive) => Aim::Ratio(0.85),
        (Subject::Download, Variant::Adaptive) => Aim::Ratio(0.8),
        (Subject::Tbench, Variant::Adaptive) => Aim::Ratio(0.6),
        (Subject::Latency, Variant::Adaptive) => Aim::AddedMs(1.0),
        (Subject::Pgbench4, Variant::Adaptive) => Aim::Ratio(0.75),
        (Subject::Pgbench32, Variant::Adaptive) => Aim::Ratio(0.9),
        // Half of COLO's, of an idle guest; the other sizes are judged beside it.
        (Subject::Pause, Variant::Adaptive) => Aim::AtMost(0.5),
        (Subject::Failover, Variant::Adaptive) => Aim::AtMost(80.0),
        _ => return None,
    })
}

impl Aim {
    /// Words for the aim.
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
        assert_eq!(best(Subject::Cpu), 98.0);
        assert_eq!(best(Subject::Compile), 95.0);
        assert_eq!(best(Subject::Upload), 91.0);
        assert_eq!(best(Subject::Download), 99.0);
        assert_eq!(best(Subject::Web), 25.0);
        assert_eq!(best(Subject::Tbench), 3.0);
        assert_eq!(best_published(Subject::Latency), None);
        // By checkpoints alone: what was called the best before VMware FT and SPECweb stood here.
        let of_udesc = |subject| {
            let all = published(subject).into_iter().filter(|figure| figure.source == UDESC);
            let ratios = all.filter(|figure| figure.variant != Variant::NoBuffer);
            (ratios.map(|figure| figure.ratio).fold(0.0, f64::max) * 100.0).round()
        };
        assert_eq!(of_udesc(Subject::Cpu), 93.0);
        assert_eq!(of_udesc(Subject::Upload), 32.0);
        assert_eq!(of_udesc(Subject::Download), 2.0);
        assert_eq!(of_udesc(Subject::Web), 2.0);
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
