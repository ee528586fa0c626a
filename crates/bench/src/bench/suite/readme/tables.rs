//! The tables themselves.

use super::{BACKUP_SIDE, Figure, Figures, PRIMARY_SIDE, workloads};
use crate::bench::suite::papers;
use crate::bench::suite::table::number;
use crate::bench::suite::variant::{Subject, Variant};
use anyhow::Result;

/// A ratio, or the milliseconds that are added.
fn shown(subject: Subject, value: Option<f64>) -> String {
    match value {
        None => String::new(),
        Some(ms) if subject == Subject::Latency => {
            let digits = if ms.abs() < 9.95 { 1 } else { 0 };
            // Not "-0.0".
            let ms = if ms.abs() < 0.05 { 0.0 } else { ms };
            format!("{ms:+.digits$} ms").replace('-', "−")
        }
        Some(ratio) => format!("{ratio:.2}"),
    }
}

/// The table of README.md: speed under the default policy, beside both.
pub(super) fn readme(figures: &Figures) -> Result<String> {
    let subjects: Vec<Subject> = figures.subjects().collect();
    let mut text = String::from("| speed under the default policy, beside |");
    for subject in &subjects {
        text += &format!(" {subject} |");
    }
    text += &format!("\n|---|{}\n", "---:|".repeat(subjects.len()));
    type Speed = fn(&Figures, Subject) -> Option<f64>;
    let rows: [(&str, Speed); 4] = [
        ("plain QEMU", |figures, subject| figures.beside_plain(subject, Variant::Adaptive)),
        ("Understudy, unprotected", |figures, subject| figures.speed(subject, Variant::Adaptive)),
        ("the same, all processors shared", Figures::shared_speed),
        ("(published, the best)", |_, subject| papers::best_published(subject)),
    ];
    for (name, speed) in rows {
        if !subjects.iter().any(|&subject| speed(figures, subject).is_some()) {
            continue;
        }
        text += &format!("| {name} |");
        for &subject in &subjects {
            text += &format!(" {} |", shown(subject, speed(figures, subject)));
        }
        text += "\n";
    }
    text += &format!(
        "\n1 is as fast, less is slower; of latency the time that is added. {}\n",
        sources(figures)?
    );
    text += &own_figures(figures);
    Ok(text)
}

/// Reports that the figures are of, and who had which processors.
fn sources(figures: &Figures) -> Result<String> {
    let mut text = format!("One report: {}.", figures.source()?);
    if let Some(processors) = figures.conditions.first() {
        text += &format!(" {processors}");
    }
    if let Some(shared) = &figures.shared {
        text += &format!(" All processors shared: another report, {}.", shared.source);
    }
    Ok(text)
}

/// Pauses and outages, if the report has them.
fn own_figures(figures: &Figures) -> String {
    let own = |subject| figures.figure(subject, Variant::Adaptive);
    let detail = |figure: &Figure, name: &str| figure.details.get(name).copied();
    let pause = own(Subject::Pause).and_then(|figure| {
        let idle = number(figure.median?);
        let written = number(detail(figure, "10000_pages_ms")?);
        Some(format!(
            "A checkpoint pauses a guest of 512 MiB for {idle} ms if it is idle, {written} ms with \
             10 000 pages written (medians).\n"
        ))
    });
    let outage = own(Subject::Failover).and_then(|figure| {
        let [kill, longest, cut] =
            ["kill_p50_ms", "kill_max_ms", "cut_p50_ms"].map(|name| detail(figure, name));
        let few = if figures.scale == "quick" { " A first look: few fail-overs." } else { "" };
        Some(format!(
            "A client of a guest whose host is killed waits {:.0} ms at the median, {:.0} at most; \
             {:.0} at the median if the host is cut off.{few}\n",
            kill?, longest?, cut?
        ))
    });
    pause.into_iter().chain(outage).collect()
}

/// The table of docs/performance.md: every workload in every variant that was measured.
pub(super) fn performance(figures: &Figures) -> Result<String> {
    let measured =
        |variant: &Variant| workloads().any(|subject| figures.speed(subject, *variant).is_some());
    let columns: Vec<Variant> = Variant::all()
        .iter()
        .copied()
        .filter(|variant| *variant != Variant::Unprotected && measured(variant))
        .collect();
    let mut text = sources(figures)?;
    if let Some(note) = &figures.note {
        text += &format!(" {note}");
    }
    text += "\n\n| workload | unprotected |";
    for variant in &columns {
        text += &format!(" {variant} |");
    }
    text += " adaptive beside plain QEMU | adaptive, all processors shared | to the backup, Mbit/s | aim \
             | met | published, the best |\n";
    text += &format!("|---|{}---|---|---:|\n", "---:|".repeat(columns.len() + 4));
    for subject in figures.subjects() {
        text += &format!("| {subject} | {} |", base(figures.figure(subject, Variant::Unprotected)));
        for &variant in &columns {
            text += &format!(" {} |", shown(subject, figures.speed(subject, variant)));
        }
        let beside = shown(subject, figures.beside_plain(subject, Variant::Adaptive));
        let sent = figures.figure(subject, Variant::Adaptive).and_then(|f| f.replication_mbit_s);
        let (aims, met) = judged(figures, subject);
        text += &format!(
            " **{beside}** | {} | {} | {aims} | {met} | {} |\n",
            shown(subject, figures.shared_speed(subject)),
            sent.map_or_else(String::new, |mbit| format!("{mbit:.0}")),
            shown(subject, papers::best_published(subject))
        );
    }
    Ok(text + "\n" + &own_figures(figures) + &processors(figures) + &waits(figures))
}

/// Costs of the same work for the processors of both hosts.
fn processors(figures: &Figures) -> String {
    let columns = [
        (Variant::Plain, PRIMARY_SIDE),
        (Variant::Adaptive, PRIMARY_SIDE),
        (Variant::Adaptive, BACKUP_SIDE),
    ];
    let row = |subject: Subject| {
        let cell = |(variant, side)| {
            Some(format!(" {:.2} |", figures.processors(subject, variant, side)?))
        };
        let cells: Option<String> = columns.into_iter().map(cell).collect();
        Some(format!("| {subject} |{}\n", cells?))
    };
    let rows: String = figures.subjects().filter_map(row).collect();
    if rows.is_empty() {
        return String::new();
    }
    format!(
        "\nProcessor seconds for the same work (QEMU, daemon and what they have the kernel do), beside those of the \
         unprotected guest's host:\n\n| workload | plain QEMU | protected: the primary host | the backup host |\n\
         |---|---:|---:|---:|\n{rows}"
    )
}

/// Times that the clients of databases wait.
fn waits(figures: &Figures) -> String {
    let columns = [Variant::Plain, Variant::Unprotected, Variant::Adaptive];
    let row = |subject: Subject| {
        let cell = |variant| {
            let details = &figures.figure(subject, variant)?.details;
            let [p50, p99] = ["p50_ms", "p99_ms"].map(|name| details.get(name).copied());
            Some(format!(" {}, {} |", number(p50?), number(p99?)))
        };
        let cells: Option<String> = columns.into_iter().map(cell).collect();
        Some(format!("| {subject} |{}\n", cells?))
    };
    let databases = figures.subjects().filter(|subject| super::LATER.contains(subject));
    let rows: String = databases.filter_map(row).collect();
    if rows.is_empty() {
        return String::new();
    }
    format!(
        "\nHow long a client waits for a transaction, of redis for a change that is on the disk; p50 and p99, ms:\n\n\
         | workload | plain QEMU | unprotected | adaptive |\n|---|---:|---:|---:|\n{rows}"
    )
}

/// `12.3 s ± 0.1`
fn base(figure: Option<&Figure>) -> String {
    let parts =
        figure.and_then(|figure| Some((figure.median?, figure.spread?, figure.unit.as_ref()?)));
    parts.map_or_else(String::new, |(median, spread, unit)| {
        format!("{} {unit} ± {}", number(median), number(spread))
    })
}

/// The aims of a subject, and whether they are met.
fn judged(figures: &Figures, subject: Subject) -> (String, String) {
    let judge = |&variant: &Variant| {
        let aim = papers::aim(subject, variant)?;
        let met = figures.met(subject, variant, aim)?;
        let at =
            if variant == Variant::Adaptive { String::new() } else { format!(" at {variant}") };
        Some((format!("{}{at}", aim.words()), if met { "yes" } else { "**no**" }))
    };
    let (aims, met): (Vec<String>, Vec<&str>) = Variant::all().iter().filter_map(judge).unzip();
    (aims.join("; "), met.join("; "))
}
