//! The status for a monitoring system: what `status` shows, as OpenMetrics text.
//!
//! What is so now is read from the host's status at the moment of the question, so metrics and `status` cannot differ.
//! What happens, the daemon counts when it happens ([`Meters`]). Base units throughout: seconds, bytes, ratios. A host
//! answers on its API socket (`GET /metrics`) and, if its configuration says so, on an address where nothing else is
//! served. docs/monitoring has alert rules and a dashboard.

mod kept;

pub use kept::KeptPage;

use crate::api::{Control, room};
use crate::door::patient::Patience;
use crate::door::{Asked, Caller, Door, Greeted, Seats};
use axum::Router;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use tokio::net::TcpListener;
use understudy_report::Meters;
use understudy_report::{
    ArbiterReport, ComparisonCounts, HostStatus, InboundReport, OutboundReport, PathReport,
    Protection, Role, VmStatus,
};

const FORMAT: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

type Labels = Vec<(&'static str, String)>;

/// Serves the metrics, and nothing else, to whoever reaches the listener, until the daemon ends.
pub fn serve(listener: TcpListener, host: Arc<dyn Control>) {
    let router = Router::new().route("/metrics", get(answer)).with_state(host);
    let nameless: Asked = Arc::new(|| Caller::Nameless);
    let door = Door { seats: Seats::default(), patience: Patience::default() };
    door.serve(listener, router, move |socket| {
        let greeted: Greeted = (Box::new(socket), nameless.clone());
        ready(Some(greeted))
    });
}

/// The page of metrics.
pub async fn answer(State(host): State<Arc<dyn Control>>) -> Response {
    match room::call(move || text(&host.status(), &host.meters(), &host.kept_pages())).await {
        Ok(text) => ([(CONTENT_TYPE, FORMAT)], text).into_response(),
        Err(error) => {
            let message = format!("the daemon failed on this request: {error}\n");
            (axum::http::StatusCode::INTERNAL_SERVER_ERROR, message).into_response()
        }
    }
}

/// A host's status, and what it and its keepers have counted, as OpenMetrics text.
pub fn text(status: &HostStatus, meters: &Meters, kept: &[KeptPage]) -> String {
    let mut page = Page { vms: &status.vms, registry: prefixed() };
    page.host(status);
    page.standing();
    page.replication();
    page.lockstep();
    page.frames();
    page.paths();
    let mut text = encoded(&page.registry);
    text += &counted_with(meters, kept);
    // A String takes all that it is given.
    let _ = encode_eof(&mut text);
    text
}

/// The text of what was counted here and by keepers.
fn counted_with(meters: &Meters, kept: &[KeptPage]) -> String {
    let Some(one) = kept.first() else { return counted(meters) };
    // What no VM has is not on a page.
    let all = Meters::default();
    all.begin(&one.vm);
    kept::merge(&counted(&all), &counted(meters), kept)
}

/// The text of what was counted, as a part of a page.
fn counted(meters: &Meters) -> String {
    let mut registry = prefixed();
    meters.register(&mut registry);
    encoded(&registry)
}

fn prefixed() -> Registry {
    Registry::with_prefix("understudy")
}

fn encoded(registry: &Registry) -> String {
    let mut text = String::new();
    // A String takes all that it is given.
    let _ = encode_registry(&mut text, registry);
    text
}

struct Page<'a> {
    vms: &'a [VmStatus],
    registry: Registry,
}

impl Page<'_> {
    fn add(&mut self, name: &str, help: &str, values: impl IntoIterator<Item = (Labels, f64)>) {
        let family = Family::<Labels, Gauge<f64, AtomicU64>>::default();
        for (labels, value) in values {
            family.get_or_create(&labels).set(value);
        }
        self.registry.register(name, help, family);
    }

    /// Adds one value for each VM that has it.
    fn each(&mut self, name: &str, help: &str, value: impl Fn(&VmStatus) -> Option<f64>) {
        let vms = self.vms;
        let labelled = |vm| Some((of(vm), value(vm)?));
        self.add(name, help, vms.iter().filter_map(labelled));
    }

    /// 1 or 0 for each VM.
    fn flag(&mut self, name: &str, help: &str, is: impl Fn(&VmStatus) -> bool) {
        self.each(name, help, |vm| Some(number(is(vm))));
    }

    /// A count since protection began, for each VM that has it.
    fn count(&mut self, name: &str, help: &str, value: impl Fn(&VmStatus) -> Option<u64>) {
        let family = Family::<Labels, Counter>::default();
        for vm in self.vms {
            if let Some(value) = value(vm) {
                family.get_or_create(&of(vm)).inc_by(value);
            }
        }
        self.registry.register(name, help, family);
    }

    fn host(&mut self, status: &HostStatus) {
        let host = || vec![("host", status.name.to_string())];
        let versions = vec![
            ("host", status.name.to_string()),
            ("version", status.version.clone()),
            ("qemu_version", status.qemu_version.clone()),
        ];
        self.registry.register("host", "The host that answers", Info::new(versions));
        let help = "What `status` says is wrong with the host itself";
        self.add("host_problems", help, [(host(), status.problems.len() as f64)]);
        let help = "VMs that are to come up with the host and have not yet";
        self.add("host_awaited_starts", help, [(host(), status.awaited.len() as f64)]);
        let help = "VMs that ran here when the last daemon ended, and that nothing brings up again";
        self.add("host_lost_vms", help, [(host(), status.lost.len() as f64)]);
        let expires = status.certificate_expires.map(|expires| (host(), expires as f64));
        let help = "When the host's certificate expires, in seconds since 1970";
        self.add("certificate_expiry_timestamp_seconds", help, expires);
        let reachable = |arbiter: &ArbiterReport| {
            let labels = vec![("host", status.name.to_string()), ("kind", arbiter.kind.clone())];
            (labels, number(arbiter.problem.is_none()))
        };
        let help = "1 if the host reaches the arbiter that decides about its VMs";
        self.add("arbiter_reachable", help, status.arbiter.as_ref().map(reachable));
    }

    /// Adds what the VMs are, and how far they are protected.
    fn standing(&mut self) {
        let roles =
            [("primary", Role::Primary), ("backup", Role::Backup), ("fenced", Role::Fenced)];
        let vms = self.vms;
        let role = |vm| roles.map(|(name, role)| (with(vm, "role", name), vm.role == role));
        let set = |(labels, is): (Labels, bool)| (labels, number(is));
        self.add("vm_role", "1 for what the host is to the VM", vms.iter().flat_map(role).map(set));
        let states = ["off", "syncing", "protected", "unheld", "degraded"];
        let protection =
            |vm| states.map(|name| (with(vm, "state", name), state(&vm.protection) == name));
        let help = "1 for the state that the VM's protection is in";
        self.add("vm_protection", help, vms.iter().flat_map(protection).map(set));
        let help =
            "1 from the loss of the VM's protection until it is back, on the host that runs it";
        self.flag("vm_protection_lost", help, |vm| {
            let degraded = matches!(vm.protection, Protection::Degraded { .. });
            vm.role == Role::Primary && (degraded || vm.restoring)
        });
        // A copy whose VM another host has says nothing of whether it runs: it may have been stopped there.
        self.each("vm_live", "1 if the guest executes on this host", |vm| {
            (!vm.elsewhere).then(|| number(vm.live))
        });
        let help = "1 if the guest stands still because a disk fails";
        self.flag("vm_disk_error", help, |vm| vm.disk_error.is_some());
        let help = "1 if the guest stands still because its lease ran out: see `status`";
        self.flag("vm_lease_over", help, |vm| vm.lease_over.is_some());
        self.each("vm_generation", "Generation of the VM's ownership", |vm| {
            Some(vm.generation.0 as f64)
        });
        let lacks = "Bytes that the first synchronisation has yet to copy";
        self.each("vm_sync_left_bytes", lacks, |vm| match vm.protection {
            Protection::Syncing { done_bytes, total_bytes, .. } => {
                Some(total_bytes.saturating_sub(done_bytes) as f64)
            }
            _ => None,
        });
    }

    /// Adds what protection does, and what it costs the guest.
    fn replication(&mut self) {
        self.each("vm_committed_epoch", "Last epoch known to be committed", |vm| {
            Some(vm.epoch.0 as f64)
        });
        self.each("vm_lag_epochs", "Epochs captured and not acknowledged", |vm| {
            Some(vm.lag_epochs as f64)
        });
        let help = "Age of the state that the backup would go on with";
        self.each("vm_uncommitted_seconds", help, |vm| vm.uncommitted_ms.map(|ms| ms / 1e3));
        self.each("vm_held_frames", "Frames that wait for output commit", |vm| {
            Some(vm.held_frames as f64)
        });
        self.each("vm_held_console_bytes", "Bytes of the console held likewise", |vm| {
            vm.held_console_bytes.map(|bytes| bytes as f64)
        });
        let help = "Part of its processors that the guest may use";
        self.each("vm_cpu_ratio", help, |vm| {
            vm.throttle.as_ref().map(|throttle| f64::from(throttle.vcpu_percent) / 100.0)
        });
        let help = "Epochs that were cut short because the guest outran the link";
        self.count("vm_epochs_cut_short", help, |vm| Some(vm.throttle.as_ref()?.cut_short));
        let help = "What the link to the backup was found to carry";
        self.each("vm_link_bytes_per_second", help, |vm| {
            vm.compression?.link_bytes_per_second.map(|bytes| bytes as f64)
        });
        let help = "What another synchronisation of the disks would copy";
        self.each("vm_disk_differing_bytes", help, |vm| {
            vm.disk_sync.as_ref().map(|sync| sync.differing_bytes as f64)
        });
    }

    fn lockstep(&mut self) {
        self.each("vm_lockstep_lag_seconds", "How far the backup's execution is behind", |vm| {
            vm.lockstep.map(|lockstep| lockstep.lag_ms / 1e3)
        });
        let help = "Disk reads that travel with the log";
        self.each("vm_lockstep_disk_read_bytes_per_second", help, |vm| {
            vm.lockstep.map(|lockstep| lockstep.disk_read_mbit_s * 1e6 / 8.0)
        });
        self.each("vm_lockstep_blocked", "1 if QEMU stands still for the log", |vm| {
            vm.lockstep.map(|lockstep| number(lockstep.blocked))
        });
        let counts = |vm: &VmStatus| -> Option<ComparisonCounts> { vm.lockstep?.comparison };
        let help = "Comparisons with the backup in lockstep";
        self.count("vm_lockstep_comparisons", help, |vm| Some(counts(vm)?.comparisons));
        let help = "Since the last comparison with the backup in lockstep";
        self.each("vm_lockstep_comparison_age_seconds", help, |vm| Some(counts(vm)?.seconds_ago));
    }

    /// Frames that travel to the backup, so that a take-over does not lose them.
    fn frames(&mut self) {
        let inbound = |vm: &VmStatus, of: fn(InboundReport) -> u64| vm.inbound.map(of);
        let outbound = |vm: &VmStatus, of: fn(OutboundReport) -> u64| vm.outbound.map(of);
        let help = "Frames for the guest that went to the backup too";
        self.count("vm_inbound_frames", help, |vm| inbound(vm, |report| report.frames));
        let help = "Frames for the guest that should have, and did not";
        self.count("vm_inbound_dropped_frames", help, |vm| inbound(vm, |report| report.dropped));
        let help = "Frames of the guest that went to the backup with their epoch";
        self.count("vm_outbound_frames", help, |vm| outbound(vm, |report| report.frames));
        let help = "Frames of the guest that were over their epoch's bound";
        self.count("vm_outbound_left_out_frames", help, |vm| {
            outbound(vm, |report| report.left_out)
        });
    }

    fn paths(&mut self) {
        let vms = self.vms;
        let paths = |vm: &VmStatus| -> Vec<_> {
            let path = |path: &PathReport| {
                (with(vm, "address", &path.address.to_string()), number(path.up))
            };
            vm.paths.iter().map(path).collect()
        };
        let help = "1 if the other host is heard over the path";
        self.add("vm_path_up", help, vms.iter().flat_map(paths));
    }
}

fn number(is: bool) -> f64 {
    f64::from(u8::from(is))
}

fn of(vm: &VmStatus) -> Labels {
    vec![("vm", vm.name.to_string())]
}

fn with(vm: &VmStatus, label: &'static str, value: &str) -> Labels {
    vec![("vm", vm.name.to_string()), (label, value.to_owned())]
}

fn state(protection: &Protection) -> &'static str {
    match protection {
        Protection::Off => "off",
        Protection::Syncing { .. } => "syncing",
        Protection::Protected { .. } => "protected",
        Protection::Unheld { .. } => "unheld",
        Protection::Degraded { .. } => "degraded",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::tests::example;
    use std::collections::{BTreeMap, BTreeSet};
    use std::path::Path;
    use understudy_protocol::literal;
    use understudy_report::{LockstepReport, ThrottleReport};

    fn lines(protection: Protection) -> String {
        page(vec![example(protection)])
    }

    fn page(vms: Vec<VmStatus>) -> String {
        let [version, qemu_version] = ["0.1.0", "10.0.2"].map(str::to_owned);
        let problems = vec!["arbiter: it is another one".to_owned()];
        let arbiter =
            Some(ArbiterReport { kind: "etcd".into(), problem: Some(problems[0].clone()) });
        let status = HostStatus {
            name: literal("a"),
            version,
            qemu_version,
            problems,
            certificate_expires: Some(1_800_000_000),
            arbiter,
            peers: Vec::new(),
            awaited: Vec::new(),
            lost: vec![literal("off")],
            vms,
        };
        let meters = Meters::default();
        meters.begin(&literal("db"));
        text(&status, &meters, &[])
    }

    #[track_caller]
    fn check(text: &str, line: &str) {
        assert!(text.lines().any(|other| other == line), "{line} is not in:\n{text}");
    }

    #[test]
    fn a_vm_is_in_one_state_and_its_figures_are_those_of_status() {
        let text = lines(Protection::Protected { peer: literal("b") });
        for line in [
            r#"understudy_vm_protection{vm="db",state="protected"} 1.0"#,
            r#"understudy_vm_protection{vm="db",state="degraded"} 0.0"#,
            r#"understudy_vm_role{vm="db",role="primary"} 1.0"#,
            r#"understudy_vm_disk_error{vm="db"} 1.0"#,
            r#"understudy_vm_committed_epoch{vm="db"} 1234.0"#,
            r#"understudy_vm_held_frames{vm="db"} 7.0"#,
            r#"understudy_vm_held_console_bytes{vm="db"} 9.0"#,
            r#"understudy_vm_path_up{vm="db",address="10.1.0.2:7700"} 1.0"#,
            r#"understudy_vm_path_up{vm="db",address="10.0.0.2:7700"} 0.0"#,
            r#"understudy_certificate_expiry_timestamp_seconds{host="a"} 1800000000.0"#,
            r#"understudy_arbiter_reachable{host="a",kind="etcd"} 0.0"#,
            r#"understudy_host_info{host="a",version="0.1.0",qemu_version="10.0.2"} 1"#,
            r#"understudy_host_problems{host="a"} 1.0"#,
            r#"understudy_host_lost_vms{host="a"} 1.0"#,
        ] {
            check(&text, line);
        }
        assert!(text.ends_with("# EOF\n"), "{text}");
    }

    // Before, a VM that was stopped in order after a take-over paged for as long as its former host had a copy.
    #[test]
    fn a_copy_whose_vm_another_host_has_does_not_say_that_nobody_runs_it() {
        let fenced = |elsewhere| {
            page(vec![VmStatus { elsewhere, ..VmStatus::new(&literal("db"), Role::Fenced) }])
        };
        check(&fenced(false), r#"understudy_vm_live{vm="db"} 0.0"#);
        let elsewhere = fenced(true);
        assert!(!elsewhere.contains("understudy_vm_live{"), "{elsewhere}");
        check(&elsewhere, r#"understudy_vm_role{vm="db",role="fenced"} 1.0"#);
    }

    #[test]
    fn lost_protection_can_be_alarmed_on() {
        let text = lines(Protection::Degraded { reason: "b \"died\"".into() });
        check(&text, r#"understudy_vm_protection{vm="db",state="degraded"} 1.0"#);
        check(&text, r#"understudy_vm_protection{vm="db",state="protected"} 0.0"#);
        check(&text, r#"understudy_vm_protection_lost{vm="db"} 1.0"#);
        // Copied for the first time, and anew.
        for (restoring, line) in [(false, "0.0"), (true, "1.0")] {
            let text = page(vec![VmStatus { restoring, ..example(syncing()) }]);
            check(&text, &format!("understudy_vm_protection_lost{{vm=\"db\"}} {line}"));
        }
    }

    fn syncing() -> Protection {
        Protection::Syncing {
            peer: literal("b"),
            done_bytes: 1,
            total_bytes: 2,
            remaining_seconds: None,
        }
    }

    /// Names and types of everything that a host may tell.
    fn kinds() -> BTreeMap<String, String> {
        let everything = VmStatus {
            throttle: Some(ThrottleReport {
                vcpu_percent: 90,
                unavailable: None,
                cut_short: 1,
                link_pages_per_second: None,
            }),
            lockstep: Some(LockstepReport {
                comparison: Some(ComparisonCounts::default()),
                ..Default::default()
            }),
            inbound: Some(InboundReport::default()),
            outbound: Some(OutboundReport::default()),
            ..example(syncing())
        };
        let text = page(vec![everything]);
        let of = |line: &str| {
            let (name, kind) = line.strip_prefix("# TYPE ")?.split_once(' ')?;
            Some((name.to_owned(), kind.to_owned()))
        };
        text.lines().filter_map(of).collect()
    }

    #[test]
    fn what_only_grows_is_a_counter_and_spans_have_buckets() {
        let kinds = kinds();
        let counted = ["vm_checkpoints", "vm_written_pages", "vm_sent_bytes", "vm_inbound_frames"];
        for name in counted.map(|name| format!("understudy_{name}")) {
            assert_eq!(kinds.get(&name).map(String::as_str), Some("counter"), "{name}");
        }
        for name in ["vm_pause", "vm_commit_gap", "vm_output_delay", "vm_outage", "vm_move"] {
            let name = format!("understudy_{name}_seconds");
            assert_eq!(kinds.get(&name).map(String::as_str), Some("histogram"), "{name}");
        }
    }

    /// The names that a text speaks of, as a page has them after `# TYPE`.
    fn named(text: &str) -> BTreeSet<String> {
        let word = |word: &str| {
            let name = word.strip_prefix("understudy_").is_some_and(|rest| rest.contains('_'));
            name.then(|| {
                let ends = ["_total", "_bucket", "_count", "_sum", "_info"];
                let base = ends.iter().find_map(|end| word.strip_suffix(end));
                base.unwrap_or(word).to_owned()
            })
        };
        text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').filter_map(word).collect()
    }

    #[test]
    fn rules_and_dashboard_speak_of_metrics_that_there_are() {
        let kinds = kinds();
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/monitoring");
        for file in ["understudy.rules.yml", "understudy.dashboard.json"] {
            let text = std::fs::read_to_string(folder.join(file)).unwrap();
            let named = named(&text);
            assert!(named.len() > 5, "{file}: {named:?}");
            for name in named {
                assert!(kinds.contains_key(&name), "{file}: there is no metric {name}");
            }
        }
        let dashboard = std::fs::read(folder.join("understudy.dashboard.json")).unwrap();
        serde_json::from_slice::<serde_json::Value>(&dashboard).unwrap();
    }
}
