//! What `status` shows, for a monitoring system: OpenMetrics text.
//!
//! Everything is read from the host's status at the moment of the question, so metrics and
//! `status` cannot differ. A host answers on its API socket (`GET /metrics`) and, if its
//! configuration says so, on an address where nothing else is served.

use crate::api::Control;
use axum::Router;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use tokio::task::spawn_blocking;
use understudy_daemon::report::{HostStatus, Protection, Role, VmStatus};

const FORMAT: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

type Labels = Vec<(&'static str, String)>;

/// The route of the metrics, alone.
pub fn router(host: Arc<dyn Control>) -> Router {
    Router::new().route("/metrics", get(answer)).with_state(host)
}

async fn answer(State(host): State<Arc<dyn Control>>) -> Response {
    match spawn_blocking(move || text(&host.status())).await {
        Ok(text) => ([(CONTENT_TYPE, FORMAT)], text).into_response(),
        Err(error) => {
            let message = format!("the daemon failed on this request: {error}\n");
            (axum::http::StatusCode::INTERNAL_SERVER_ERROR, message).into_response()
        }
    }
}

/// A host's status as OpenMetrics text.
pub fn text(status: &HostStatus) -> String {
    let mut page = Page { vms: &status.vms, registry: Registry::with_prefix("understudy") };
    let versions = vec![
        ("host", status.name.to_string()),
        ("version", status.version.clone()),
        ("qemu_version", status.qemu_version.clone()),
    ];
    page.add("host", "The host that answers; always 1", [(versions, 1.0)]);
    let problems = (vec![("host", status.name.to_string())], status.problems.len() as f64);
    page.add("host_problems", "What `status` says is wrong with the host itself", [problems]);
    let expires = status
        .certificate_expires
        .map(|expires| (vec![("host", status.name.to_string())], expires as f64));
    let help = "When the host's certificate expires, in seconds since 1970";
    page.add("certificate_expiry_timestamp_seconds", help, expires);
    page.standing();
    page.replication();
    page.links();
    let mut text = String::new();
    // A String takes all that it is given.
    let _ = encode(&mut text, &page.registry);
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

    /// One value for each VM that has it.
    fn each(&mut self, name: &str, help: &str, value: impl Fn(&VmStatus) -> Option<f64>) {
        let vms = self.vms;
        let labelled = |vm| Some((of(vm), value(vm)?));
        self.add(name, help, vms.iter().filter_map(labelled));
    }

    /// What the VMs are, and how far they are protected.
    fn standing(&mut self) {
        let roles =
            [("primary", Role::Primary), ("backup", Role::Backup), ("fenced", Role::Fenced)];
        let vms = self.vms;
        let role = |vm| roles.map(|(name, role)| (with(vm, "role", name), vm.role == role));
        let set = |(labels, is): (Labels, bool)| (labels, f64::from(u8::from(is)));
        self.add("vm_role", "1 for what the host is to the VM", vms.iter().flat_map(role).map(set));
        let states = ["off", "syncing", "protected", "unheld", "degraded"];
        let protection =
            |vm| states.map(|name| (with(vm, "state", name), state(&vm.protection) == name));
        let help = "1 for the state that the VM's protection is in";
        self.add("vm_protection", help, vms.iter().flat_map(protection).map(set));
        self.each("vm_live", "1 if the guest executes on this host", |vm| {
            Some(u8::from(vm.live).into())
        });
        self.each("vm_disk_error", "1 if the guest stands still because a disk fails", |vm| {
            Some(u8::from(vm.disk_error.is_some()).into())
        });
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

    /// What protection does, and what it costs the guest.
    fn replication(&mut self) {
        self.each("vm_committed_epoch", "Last epoch known to be committed", |vm| {
            Some(vm.epoch.0 as f64)
        });
        self.each("vm_lag_epochs", "Epochs captured and not acknowledged", |vm| {
            Some(vm.lag_epochs as f64)
        });
        self.each("vm_checkpoints", "Checkpoints committed since protection began", |vm| {
            Some(vm.checkpoints as f64)
        });
        self.each("vm_replicated_bytes", "Bytes sent since protection began", |vm| {
            Some(vm.bytes_sent as f64)
        });
        self.each("vm_held_frames", "Frames that wait for output commit", |vm| {
            Some(vm.held_frames as f64)
        });
        self.each("vm_held_console_bytes", "Bytes of the console held likewise", |vm| {
            vm.held_console_bytes.map(|bytes| bytes as f64)
        });
        let vms = self.vms;
        let pauses = |vm: &VmStatus| {
            let pause = vm.pause_ms;
            let quantiles = [("0.5", pause.p50), ("0.99", pause.p99), ("1", pause.max)];
            quantiles.map(|(name, ms)| (with(vm, "quantile", name), ms / 1e3))
        };
        let help = "Pause of recent checkpoints; quantile 1 since protection began";
        self.add("vm_pause_seconds", help, vms.iter().flat_map(pauses));
        let help = "How long the first output of recent epochs waited";
        self.add("vm_output_wait_seconds", help, vms.iter().flat_map(output_waits));
        let help = "Part of its processors that the guest may use, 0 to 1";
        self.each("vm_cpu_share", help, |vm| {
            vm.throttle.as_ref().map(|throttle| f64::from(throttle.vcpu_percent) / 100.0)
        });
        self.each("vm_lockstep_lag_seconds", "How far the backup's execution is behind", |vm| {
            vm.lockstep.map(|lockstep| lockstep.lag_ms / 1e3)
        });
        let help = "Disk reads that travel with the log, bits a second";
        self.each("vm_lockstep_disk_read_bits", help, |vm| {
            vm.lockstep.map(|lockstep| lockstep.disk_read_mbit_s * 1e6)
        });
        self.each("vm_lockstep_blocked", "1 if QEMU stands still for the log", |vm| {
            vm.lockstep.map(|lockstep| f64::from(u8::from(lockstep.blocked)))
        });
        let counts = |vm: &VmStatus| vm.lockstep.and_then(|lockstep| lockstep.comparison);
        let help = "Comparisons with the backup in lockstep since protection began";
        self.each("vm_lockstep_comparisons", help, |vm| {
            counts(vm).map(|counts| counts.comparisons as f64)
        });
        let help = "Since the last comparison with the backup in lockstep";
        self.each("vm_lockstep_comparison_age_seconds", help, |vm| {
            counts(vm).map(|counts| counts.seconds_ago)
        });
        self.each("vm_takeover_seconds", "How long this host's take-over of the VM took", |vm| {
            vm.takeover.as_ref().map(|takeover| takeover.total_ms / 1e3)
        });
    }

    fn links(&mut self) {
        let vms = self.vms;
        let paths = |vm: &VmStatus| -> Vec<_> {
            let path = |path: &understudy_daemon::report::PathReport| {
                let labels = with(vm, "address", &path.address.to_string());
                (labels, f64::from(u8::from(path.up)))
            };
            vm.paths.iter().map(path).collect()
        };
        let help = "1 if the other host is heard over the path";
        self.add("vm_path_up", help, vms.iter().flat_map(paths));
    }
}

fn of(vm: &VmStatus) -> Labels {
    vec![("vm", vm.name.to_string())]
}

fn output_waits(vm: &VmStatus) -> Vec<(Labels, f64)> {
    let Some(wait) = vm.output_wait_ms else { return Vec::new() };
    let quantiles = [
        ("checkpoint", "0.5", wait.to_checkpoint_p50),
        ("checkpoint", "0.99", wait.to_checkpoint_p99),
        ("release", "0.5", wait.to_release_p50),
        ("release", "0.99", wait.to_release_p99),
    ];
    let named = |(until, quantile, ms): (&str, &str, f64)| {
        let mut labels = with(vm, "until", until);
        labels.push(("quantile", quantile.to_owned()));
        (labels, ms / 1e3)
    };
    quantiles.map(named).into()
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
    use understudy_protocol::literal;

    fn lines(protection: Protection) -> String {
        let vms = vec![example(protection)];
        let [version, qemu_version] = ["0.1.0", "10.0.2"].map(str::to_owned);
        let problems = vec!["arbiter: it is another one".to_owned()];
        text(&HostStatus {
            name: literal("a"),
            version,
            qemu_version,
            problems,
            certificate_expires: Some(1_800_000_000),
            vms,
        })
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
            r#"understudy_vm_pause_seconds{vm="db",quantile="0.99"} 0.0015"#,
            r#"understudy_vm_output_wait_seconds{vm="db",until="checkpoint",quantile="0.5"} 0.0015"#,
            r#"understudy_vm_output_wait_seconds{vm="db",until="release",quantile="0.99"} 0.009"#,
            r#"understudy_vm_path_up{vm="db",address="10.1.0.2:7700"} 1.0"#,
            r#"understudy_vm_path_up{vm="db",address="10.0.0.2:7700"} 0.0"#,
            r#"understudy_certificate_expiry_timestamp_seconds{host="a"} 1800000000.0"#,
            r#"understudy_host{host="a",version="0.1.0",qemu_version="10.0.2"} 1.0"#,
            r#"understudy_host_problems{host="a"} 1.0"#,
        ] {
            check(&text, line);
        }
        assert!(text.ends_with("# EOF\n"), "{text}");
    }

    #[test]
    fn lost_protection_can_be_alarmed_on() {
        let text = lines(Protection::Degraded { reason: "b \"died\"".into() });
        check(&text, r#"understudy_vm_protection{vm="db",state="degraded"} 1.0"#);
        check(&text, r#"understudy_vm_protection{vm="db",state="protected"} 0.0"#);
    }
}
