//! The report as one page: nothing outside of it is needed to show it.

use super::charts::{self, Bars, Line, Whose, Words};
use super::papers::{self, REMUS, UDESC, VMWARE_FT};
use super::report::{Cell, Report};
use super::table;
use super::variant::{Subject, Variant};
use crate::bench::machine::Machine;
use crate::bench::papers::COLO_PAUSES;
use anyhow::Result;
use serde_json::Value;

const STYLE: &str = "body{font:15px/1.5 sans-serif;max-width:1200px;margin:2em auto;padding:0 1em;\
color:#222}table{border-collapse:collapse;font-size:13px}td,th{border:1px solid #ccc;padding:2px 8px;\
text-align:right}th{background:#f3f3f3}td:first-child{text-align:left}.met{color:#17703b}.missed{color:\
#b3261e;font-weight:bold}.plots{display:flex;flex-wrap:wrap;gap:12px}figure{margin:0;border:1px solid \
#ddd}figcaption{font-size:12px;color:#555;padding:0 12px 8px;max-width:540px}pre{white-space:pre-wrap}";

/// The rates of the papers' figures, then what the UDESC study added, then ours.
const COMPARED: [Variant; 6] = [
    Variant::Hz10,
    Variant::Hz20,
    Variant::Hz30,
    Variant::Hz40,
    Variant::NoBuffer,
    Variant::Adaptive,
];

/// The page.
pub fn page(report: &Report) -> Result<String> {
    let Machine { cpu, cpus, memory_mib, kernel, qemu, accel, understudy } = &report.machine;
    let machine = format!(
        "{cpu}, {cpus} CPUs, {memory_mib} MiB, Linux {kernel}, QEMU {qemu} ({accel}); understudy \
         {understudy}, build {}, scale {}",
        report.build, report.scale
    );
    let conditions: String =
        report.conditions.iter().map(|words| format!("<li>{}</li>", escape(words))).collect();
    Ok(format!(
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><title>Understudy: what \
         protection costs</title><style>{STYLE}</style>\n<h1>What protection costs</h1>\n\
         <p>{}</p>\n<ul>{conditions}</ul>\n<h2>Beside the unprotected guest</h2>\n{}\n\
         <h2>Beside the papers</h2>\n<p>Grey is published: {REMUS}, {UDESC}, {VMWARE_FT}. Other machines, \
         networks and hypervisors: compare ratios, not times.</p>\n<div class=\"plots\">{}</div>\n\
         <h2>Everything measured</h2>\n{}\n{}</html>\n",
        escape(&machine),
        overview(report),
        plots(report)?,
        details(report),
        errors(report),
    ))
}

fn overview(report: &Report) -> String {
    let mut html = "<table><tr><th>workload<th>unprotected".to_owned();
    let columns: Vec<Variant> =
        Variant::all().iter().copied().filter(|&variant| variant != Variant::Unprotected).collect();
    for variant in &columns {
        html += &format!("<th>{variant}");
    }
    html += "<th>aim<th>the papers' best</tr>\n";
    for (&subject, cells) in &report.workloads {
        let base = cells.get(&Variant::Unprotected).map_or_else(String::new, figure);
        html += &format!("<tr><td>{subject}<td>{base}");
        for variant in &columns {
            html += &format!("<td>{}", cells.get(variant).map_or_else(String::new, beside));
        }
        let aims = cells.values().filter_map(|cell| Some(&cell.aim.as_ref()?.aim));
        let aims: Vec<String> = aims.map(|aim| escape(aim)).collect();
        let best = papers::best_published(subject).map_or_else(String::new, table::number);
        html += &format!("<td>{}<td>{best}</tr>\n", aims.join(", "));
    }
    html + "</table>"
}

fn figure(cell: &Cell) -> String {
    match (cell.median, cell.spread, &cell.unit) {
        (Some(median), Some(spread), Some(unit)) => {
            let (median, spread) = (table::number(median), table::number(spread));
            format!("{median} ± {spread} {}", escape(unit))
        }
        _ => "failed".to_owned(),
    }
}

/// The ratio, or the figure where there is none, in the colour of its aim.
fn beside(cell: &Cell) -> String {
    let text = cell.ratio.map_or_else(|| figure(cell), table::number);
    match cell.aim.as_ref().and_then(|judgement| judgement.met) {
        Some(met) => {
            let class = if met { "met" } else { "missed" };
            format!("<span class=\"{class}\">{text}</span>")
        }
        None => text,
    }
}

fn plots(report: &Report) -> Result<String> {
    let mut html = String::new();
    let mut add = |svg: String, caption: &str| {
        html += &format!("<figure>{svg}<figcaption>{}</figcaption></figure>\n", escape(caption));
    };
    let own = |subject| report.cell(subject, Variant::Adaptive).map(|cell| &cell.extra);
    if let Some(extra) = own(Subject::Pause) {
        add(
            pause(extra)?,
            "As Remus's figure 5. COLO: patched so that it runs, measured earlier on a machine like this. Live migration: downtime of the same guest in this run, with a limit of 10 ms.",
        );
    }
    if let Some(svg) = compile_overhead(report)? {
        add(svg, "As Remus's kernel build: how much longer it takes, by checkpoints a second.");
    }
    for &subject in Subject::all().iter().filter(|subject| subject.own_variant().is_none()) {
        if let Some(svg) = against_papers(report, subject)? {
            add(svg, &sources(subject));
        }
    }
    for svg in compression(report)? {
        add(svg, "As Remus's figure 10, which reports 10 : 1 and 99 % hits for the hybrid.");
    }
    if let Some(extra) = own(Subject::Failover) {
        add(
            outages(extra)?,
            "The share of fail-overs that a client waited for no longer than so. Remus: about 1 s.",
        );
    }
    Ok(html)
}

fn sources(subject: Subject) -> String {
    let published = papers::published(subject);
    let one = |figure: &papers::Published| {
        format!("{}: {} ({})", figure.variant, figure.text, figure.source)
    };
    let remark = papers::remark(subject).map(str::to_owned);
    let all: Vec<String> = published.iter().map(one).chain(remark).collect();
    match all.is_empty() {
        true => "Nothing published to compare with.".to_owned(),
        false => all.join("; "),
    }
}

/// A workload's ratios by variant, and those of the papers.
fn against_papers(report: &Report, subject: Subject) -> Result<Option<String>> {
    let ours: Vec<Option<f64>> =
        COMPARED.iter().map(|&variant| report.cell(subject, variant)?.ratio).collect();
    if ours.iter().flatten().next().is_none() {
        return Ok(None);
    }
    let theirs = |source: &'static str| {
        let all = papers::published(subject);
        let value = |&variant: &Variant| {
            let of =
                |figure: &&papers::Published| (figure.source, figure.variant) == (source, variant);
            all.iter().find(of).map(|figure| figure.ratio)
        };
        let values: Vec<Option<f64>> = COMPARED.iter().map(value).collect();
        let bars = Bars { label: source.to_owned(), whose: Whose::Theirs, values };
        bars.values.iter().flatten().next().is_some().then_some(bars)
    };
    let mut groups: Vec<Bars> = [UDESC, REMUS, VMWARE_FT].into_iter().filter_map(theirs).collect();
    groups.push(Bars { label: "understudy".to_owned(), whose: Whose::Ours, values: ours });
    let categories: Vec<String> = COMPARED.iter().map(Variant::to_string).collect();
    let title = subject.to_string();
    let words = Words { title: &title, x: "checkpoints a second", y: "speed, unprotected = 1" };
    charts::bars(&words, &categories, &groups, Some(1.0)).map(Some)
}

/// Chart of how much longer the compilation takes, in percent.
fn compile_overhead(report: &Report) -> Result<Option<String>> {
    let percent = |ratio: f64| (1.0 / ratio - 1.0) * 100.0;
    let rates = &COMPARED[..4];
    let ours = |&variant: &Variant| report.cell(Subject::Compile, variant)?.ratio.map(percent);
    let ours: Vec<Option<f64>> = rates.iter().chain([&Variant::Adaptive]).map(ours).collect();
    if ours.iter().flatten().next().is_none() {
        return Ok(None);
    }
    let published = papers::published(Subject::Compile).into_iter();
    let theirs =
        published.filter(|figure| figure.source == REMUS).map(|figure| Some(percent(figure.ratio)));
    let groups = [
        Bars { label: REMUS.to_owned(), whose: Whose::Theirs, values: theirs.collect() },
        Bars { label: "understudy".to_owned(), whose: Whose::Ours, values: ours },
    ];
    let categories: Vec<String> =
        rates.iter().chain([&Variant::Adaptive]).map(Variant::to_string).collect();
    let words = Words { title: "Building software", x: "checkpoints a second", y: "overhead, %" };
    charts::bars(&words, &categories, &groups, None).map(Some)
}

/// The pause against the pages written, of what [`Subject::Pause`] has beside its figure.
pub fn pause(extra: &Value) -> Result<String> {
    let bursts = |point: &&Value| point["writer"] != "continuous";
    let points = || list(&extra["points"]).iter().filter(bursts);
    let line = |field: &str| {
        points().filter_map(|p| Some((p["pages"].as_f64()?, p[field].as_f64()?))).collect()
    };
    let ours = |label: &str, field| Line {
        label: label.to_owned(),
        whose: Whose::Ours,
        points: line(field),
    };
    let migration =
        |p: &Value| Some((p["pages"].as_f64()?, p["migration"]["small"]["median_ms"].as_f64()?));
    let migration = points().filter_map(migration).collect();
    let colo = COLO_PAUSES.points.iter();
    let colo = colo.map(|&(pages, least, most)| (pages as f64, f64::midpoint(least, most)));
    let series = [
        Line { label: "COLO".to_owned(), whose: Whose::Theirs, points: colo.collect() },
        Line { label: "live migration".to_owned(), whose: Whose::Theirs, points: migration },
        ours("understudy, median", "total_ms"),
        ours("understudy, p99", "p99_ms"),
    ];
    let words = Words {
        title: "Pause of a checkpoint",
        x: "pages written since the last one",
        y: "milliseconds",
    };
    charts::lines(&words, &series)
}

fn compression(report: &Report) -> Result<Vec<String>> {
    let Some(cell) = report.cell(Subject::Compression, Variant::Hz20) else {
        return Ok(Vec::new());
    };
    let ways = ["none", "general", "xor", "hybrid"];
    let series = ways.map(|way| {
        let rates = list(&cell.extra[way]["samples"][0]["mb_per_s_over_time"]);
        let at = |(n, rate): (usize, &Value)| Some((n as f64 / 2.0, rate.as_f64()?));
        let points = rates.iter().enumerate().filter_map(at).collect();
        Line { label: way.to_owned(), whose: Whose::Ours, points }
    });
    let ratios = ways.map(|way| cell.extra[way]["ratio"].as_f64()).to_vec();
    let remus = vec![None, None, None, Some(papers::REMUS_COMPRESSION)];
    let groups = [
        Bars { label: REMUS.to_owned(), whose: Whose::Theirs, values: remus },
        Bars { label: "understudy".to_owned(), whose: Whose::Ours, values: ratios },
    ];
    let over_time = Words { title: "Bandwidth to the backup", x: "seconds", y: "MB/s" };
    let ratio = Words { title: "Bytes of pages for each byte sent", x: "encoding", y: "ratio" };
    let ways: Vec<String> = ways.map(str::to_owned).to_vec();
    Ok(vec![charts::lines(&over_time, &series)?, charts::bars(&ratio, &ways, &groups, None)?])
}

/// The distribution of outages, of what [`Subject::Failover`] has beside its figure: for each, the
/// share that is no longer.
pub fn outages(extra: &Value) -> Result<String> {
    let all = list(&extra["outages"]);
    let line = |kind: &str| {
        let of = all.iter().filter(|outage| outage["failure"] == kind);
        let mut times: Vec<f64> = of.filter_map(|outage| outage["outage_ms"].as_f64()).collect();
        times.sort_by(f64::total_cmp);
        let count = times.len() as f64;
        let at = |(n, ms): (usize, f64)| (ms, (n + 1) as f64 / count * 100.0);
        let points = times.into_iter().enumerate().map(at).collect();
        Line { label: format!("host {kind}"), whose: Whose::Ours, points }
    };
    let remus = vec![(papers::REMUS_OUTAGE_MS, 0.0), (papers::REMUS_OUTAGE_MS, 100.0)];
    let remus = Line { label: "Remus, about".to_owned(), whose: Whose::Theirs, points: remus };
    let words = Words { title: "Outage of a client", x: "milliseconds", y: "fail-overs, %" };
    charts::lines(&words, &[remus, line("kill"), line("cut")])
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Every cell with all that is known of it.
fn details(report: &Report) -> String {
    let mut html = "<table><tr><th>workload<th>variant<th>median<th>min<th>max<th>runs<th>ratio\
        <th>Mbit/s to the backup<th>checkpoints/s<th>pause p50, ms<th>p99<th>load<th>further</tr>\n"
        .to_owned();
    for (subject, cells) in &report.workloads {
        for (variant, cell) in cells {
            let show = |value: Option<f64>| value.map_or_else(String::new, table::number);
            let further = |(name, value): (&String, &f64)| {
                format!("{} {}", escape(name), table::number(*value))
            };
            let further: Vec<String> = cell.details.iter().map(further).collect();
            html += &format!("<tr><td>{subject}<td>{variant}<td>{}", figure(cell));
            html += &format!("<td>{}<td>{}<td>{}", show(cell.min), show(cell.max), cell.runs);
            for value in [
                cell.ratio,
                cell.replication_mbit_s,
                cell.checkpoints_per_s,
                cell.pause_p50_ms,
                cell.pause_p99_ms,
                cell.load_average,
            ] {
                html += &format!("<td>{}", show(value));
            }
            html += &format!("<td>{}</tr>\n", further.join(", "));
        }
    }
    html + "</table>"
}

fn errors(report: &Report) -> String {
    let text = table::errors(report);
    if text.is_empty() { text } else { format!("<h2>Failed</h2><pre>{}</pre>", escape(&text)) }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::report;
    use super::*;

    #[test]
    fn the_page_has_each_workload_and_every_plot_and_needs_nothing_else() {
        let page = page(&report()).unwrap();
        for subject in Subject::all() {
            assert!(page.contains(&format!("<tr><td>{subject}<td>")), "{subject}");
        }
        // Fourteen workloads; pause, compilation, two of compression, outages.
        assert_eq!(page.matches("<svg").count(), 19);
        assert!(page.contains("QEMU &lt;did&gt; not run") && !page.contains("<did>"));
        for outside in ["src=", "href=", "@import", "<script"] {
            assert!(!page.contains(outside), "{outside}");
        }
    }

    #[test]
    fn missed_aims_are_seen() {
        let page = page(&report()).unwrap();
        assert!(page.contains("<span class=\"missed\">0.50</span>"));
    }
}
