//! The plots beside the tables.

use super::{Figures, Subject, Variant};
use crate::bench::suite::charts::{self, Bars, Whose, Words};
use crate::bench::suite::html;
use crate::bench::suite::papers::{self, Aim};
use anyhow::Result;

const FOLDER: &str = "docs/performance";

/// Each plot that there are figures for, with its file.
pub(super) fn all(figures: &Figures) -> Result<Vec<(String, String)>> {
    let own = |subject| {
        let figure = figures.figure(subject, Variant::Adaptive);
        figure.map(|figure| &figure.extra).filter(|extra| !extra.is_null())
    };
    let plots = [
        ("speed", Some(speed(figures)?)),
        ("pause", own(Subject::Pause).map(html::pause).transpose()?),
        ("outages", own(Subject::Failover).map(html::outages).transpose()?),
    ];
    let file = |(name, plot): (&str, Option<String>)| Some((format!("{FOLDER}/{name}.svg"), plot?));
    Ok(plots.into_iter().filter_map(file).collect())
}

/// Every workload under the default policy, beside its aim.
fn speed(figures: &Figures) -> Result<String> {
    // Of latency there is no ratio.
    let subjects: Vec<Subject> =
        figures.subjects().filter(|&subject| subject != Subject::Latency).collect();
    let bars = |label: &str, whose, value: &dyn Fn(Subject) -> Option<f64>| Bars {
        label: label.to_owned(),
        whose,
        values: subjects.iter().map(|&subject| value(subject)).collect(),
    };
    let aim = |subject| match papers::aim(subject, Variant::Adaptive) {
        Some(Aim::Ratio(least)) => Some(least),
        _ => None,
    };
    let groups = [
        bars("aim", Whose::Theirs, &aim),
        bars("beside unprotected", Whose::Ours, &|it| figures.speed(it, Variant::Adaptive)),
        bars("beside plain QEMU", Whose::Ours, &|it| figures.beside_plain(it, Variant::Adaptive)),
    ];
    let categories: Vec<String> = subjects.iter().map(Subject::to_string).collect();
    let words = Words {
        title: "Speed of a protected guest, default policy",
        x: "workload",
        y: "1 is as fast, less is slower",
    };
    charts::bars(&words, &categories, &groups, Some(1.0))
}
