//! The checks of what a host's configuration names: its address, the arbiter, the peers.

use super::Check;
use anyhow::{Context, ensure};
use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;
use understudy_arbiter::etcd::Etcd;
use understudy_daemon::config::{ApiConfig, ArbiterConfig, EtcdConfig, HostConfig};
use understudy_daemon::keeper::{seclusion, view};
use understudy_daemon::probe::{self, ProbeAnswer, ProbeError};
use understudy_protocol::HostName;

/// Revisions that an etcd which compacts them need not keep: of ten sole owners in three days.
const MANY_REVISIONS: i64 = 1_000_000;

pub fn checks(config: &HostConfig) -> Vec<Check> {
    let mut checks = vec![Check::ok("configuration", format!("host {}", config.name))];
    checks.extend(config.listen.iter().map(|address| listen("listen", *address)));
    checks.extend(config.metrics.map(|address| listen("metrics", address)));
    checks.extend(certificates(config));
    checks.extend(config.api.iter().flat_map(api));
    checks.extend(webhook(config));
    checks.push(arbiter(config.arbiter.as_ref()));
    checks.extend(peers(config));
    checks.extend(watchdog(Path::new("/dev/watchdog"), config));
    checks.extend(config.keepers.then(keepers));
    checks
}

/// Whether the address is this host's; its port may be in use by the daemon.
fn listen(name: &str, address: SocketAddr) -> Check {
    match TcpListener::bind((address.ip(), 0)) {
        Ok(_) => Check::ok(name, address.to_string()),
        Err(error) => {
            Check::fail(name, format!("{address}: {error}"), "use an address of this host")
        }
    }
}

/// Checks the certificates, read as the daemon reads them.
fn certificates(config: &HostConfig) -> Option<Check> {
    const NAME: &str = "certificates";
    let advice = "see \"Certificates\" in docs/operating.md";
    config.tls.as_ref()?;
    Some(match probe::certificates(config) {
        Err(error) => Check::fail(NAME, error.message, advice),
        Ok(problems) if problems.is_empty() => Check::ok(NAME, format!("of host {}", config.name)),
        Ok(problems) => Check::note(NAME, problems.join("; "), advice),
    })
}

fn api(config: &ApiConfig) -> Vec<Check> {
    let mut checks: Vec<Check> =
        config.listen.iter().map(|address| listen("API", *address)).collect();
    let problems = config.problems_of_tokens();
    checks.push(match problems.is_empty() {
        true => Check::ok("tokens", format!("{} files", config.tokens.len())),
        false => Check::fail("tokens", problems.join("; "), "see [api] in docs/monitoring.md"),
    });
    checks
}

/// Whether everybody on this host may read the address that events are posted to: who knows it may post there, too.
fn webhook(config: &HostConfig) -> Option<Check> {
    const NAME: &str = "webhook";
    let shown = config.webhook.as_ref()?.shown();
    let others_read = fs::metadata(&config.file).is_ok_and(|found| found.mode() & 0o004 != 0);
    let file = config.file.display();
    Some(match others_read {
        false => Check::ok(NAME, shown),
        true => Check::note(
            NAME,
            format!("everybody on this host may read its address in {file}"),
            format!("if that is a secret: `chmod 600 {file}`"),
        ),
    })
}

/// Checks the watchdog, which is not opened: that would arm it. Beside keepers it is refused.
fn watchdog(device: &Path, config: &HostConfig) -> Option<Check> {
    let is_settled = config.watchdog.is_some() || config.keepers || config.lease.is_zero();
    if is_settled || !device.exists() {
        return None;
    }
    let advice = format!(
        "`watchdog = \"{}\"` under [detection] has it reset this host if its daemon hangs while it is \
         a VM's sole owner",
        device.display()
    );
    Some(Check::note("watchdog", "there is one, and nobody uses it", advice))
}

/// What they could do to other processes of this host, and whose files they see.
fn keepers() -> Check {
    const NAME: &str = "keepers";
    let seclusion = match seclusion::probe() {
        Err(error) => return Check::fail(NAME, error.message, "until then no VM starts in one"),
        Ok(seclusion) => seclusion,
    };
    if let Err(why) = view::probe() {
        let message = format!("a keeper sees the files of all VMs: {why}");
        let advice = "that takes CAP_SYS_ADMIN, and a host that allows mounts";
        return Check::note(NAME, message, advice);
    }
    match seclusion.remedy() {
        None => Check::ok(NAME, seclusion.to_string()),
        Some(remedy) => Check::note(NAME, seclusion.to_string(), remedy),
    }
}

fn arbiter(config: Option<&ArbiterConfig>) -> Check {
    const NAME: &str = "arbiter";
    let (tried, detail, advice) = match config {
        None => return Check::note(NAME, "none configured", "VMs run, but none can be protected"),
        Some(ArbiterConfig::File { path }) => (
            understudy_arbiter::try_directory(path)
                .map(|()| Tried::Well)
                .with_context(|| path.display().to_string()),
            format!("{} takes records", path.display()),
            "it must be a directory that all hosts can write, with hard links",
        ),
        Some(ArbiterConfig::Etcd(etcd)) => (
            try_etcd(etcd),
            format!("etcd answers at {}", etcd.endpoints),
            "all endpoints must be members of one cluster that has a leader",
        ),
    };
    match tried {
        Ok(Tried::Well) => Check::ok(NAME, detail),
        Ok(Tried::Fills) => Check::note(
            NAME,
            format!("{detail}, and has not compacted its last {MANY_REVISIONS} revisions"),
            "start it with --auto-compaction-retention=8, or another time in hours: once its space is full no VM can be \
             taken over",
        ),
        Err(error) => Check::fail(NAME, format!("{error:#}"), advice),
    }
}

/// Result of a try that did not fail.
enum Tried {
    Well,
    /// It takes records until its space is full of old ones.
    Fills,
}

/// Every endpoint answers with what the whole cluster knows, which is one and the same; changes nothing.
fn try_etcd(config: &EtcdConfig) -> anyhow::Result<Tried> {
    let mut first = None;
    for endpoints in config.endpoints.each() {
        let alone = EtcdConfig { endpoints, ..config.clone() };
        let (_, cluster) = Etcd::new(&alone)?.get_from::<serde_json::Value>("/doctor")?;
        let known = *first.get_or_insert(cluster);
        ensure!(
            cluster == known,
            "{} is a member of the cluster {cluster}, the first endpoint one of {known}",
            alone.endpoints
        );
    }
    Ok(match Etcd::new(config)?.keeps_all(MANY_REVISIONS)? {
        true => Tried::Fills,
        false => Tried::Well,
    })
}

fn peers(config: &HostConfig) -> Vec<Check> {
    // An etcd that does not answer is told of by now.
    let hosts = probe::hosts(config).unwrap_or_else(|_| config.peers.clone());
    if hosts.is_empty() {
        let found = match config.arbiter {
            Some(ArbiterConfig::Etcd(_)) => "none configured, and etcd knows no other host",
            _ => "none configured",
        };
        return vec![Check::note("peers", found, "VMs run, but none can be protected")];
    }
    thread::scope(|scope| {
        let tries: Vec<_> = hosts
            .iter()
            .flat_map(|(name, addresses)| addresses.iter().map(move |address| (name, *address)))
            .map(|(name, address)| scope.spawn(move || peer(config, name, address)))
            .collect();
        let join = |thread: thread::ScopedJoinHandle<'_, Vec<Check>>| {
            thread.join().expect("the check does not panic")
        };
        tries.into_iter().flat_map(join).collect()
    })
}

/// Says hello to the peer as the daemon would. One that is not there yet is no failure: somebody
/// is the first.
fn peer(config: &HostConfig, name: &HostName, address: SocketAddr) -> Vec<Check> {
    let check = format!("peer {name}");
    let check = match probe::peer(config, name, address) {
        Ok(answer) => {
            let over = if config.tls.is_some() { "over TLS" } else { "in the clear" };
            let detail = format!("{address} answers {over}: Understudy {}", answer.version);
            return vec![Check::ok(&check, detail), take_over(config, &answer)];
        }
        Err(ProbeError::NotUp(error)) => {
            let advice = "start its daemon, see that no firewall is between, and try again: until \
                          then this host is not known to be able to protect VMs to it";
            Check::note(&check, error, advice)
        }
        Err(ProbeError::Wrong(error)) => {
            let advice = "correct the address in [peers], or the certificates of both hosts \
                          (`understudy pki`)";
            Check::fail(&check, error, advice)
        }
    };
    vec![check]
}

/// Whether this host could take over from the peer, as far as the arbiter goes.
fn take_over(config: &HostConfig, peer: &ProbeAnswer) -> Check {
    let name = format!("arbiter with {}", peer.host);
    if config.arbiter.is_none() {
        return Check::note(&name, "none configured here", "VMs run, but none can be protected");
    }
    match probe::take_over(config, peer) {
        Ok(()) => {
            let vms = match peer.protected.len() {
                1 => "the VM that is protected to this host, or was last".to_owned(),
                many => format!("the {many} VMs that are protected to this host, or were last"),
            };
            Check::ok(
                &name,
                format!("the same; it has the right records of {vms}, and takes new ones"),
            )
        }
        Err(error) => {
            let advice = "both hosts must name, and have mounted, one and the same arbiter";
            Check::fail(&name, error, advice)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;
    use std::io;
    use std::os::unix::fs::PermissionsExt;
    use understudy_daemon::config::EtcdEndpoints;
    use understudy_protocol::literal;

    /// A stranger that accepted connections was once taken for the peer, and a peer that was not up
    /// yet for a failure. A peer that answers is in the end-to-end test of `doctor`.
    #[test]
    fn a_stranger_is_told_from_a_peer_that_is_not_there_yet() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let text = "name = \"a\"\nlisten = \"127.0.0.1:7700\"";
        let config = HostConfig::from_toml(text, Path::new("host.toml")).unwrap();
        let stranger = thread::spawn(move || {
            let (mut connection, _) = listener.accept().unwrap();
            io::Write::write_all(&mut connection, b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
            // Until it has been read.
            let _ = io::Read::read_to_end(&mut connection, &mut Vec::new());
        });
        let check = &peer(&config, &literal("b"), address)[0];
        assert_eq!((check.state, check.name.as_str()), (State::Fail, "peer b"), "{check:?}");
        stranger.join().unwrap();
        let check = &peer(&config, &literal("b"), address)[0];
        assert_eq!((check.state, check.name.as_str()), (State::Note, "peer b"), "{check:?}");
    }

    /// Whoever did as he was advised had a configuration that is refused.
    #[test]
    fn a_watchdog_is_advised_where_it_may_be_used() {
        let device = tempfile::NamedTempFile::new().unwrap();
        let advised = |settings: &str| {
            let text = format!("name = \"a\"\nlisten = \"127.0.0.1:7700\"\n{settings}");
            let config = HostConfig::from_toml(&text, Path::new("host.toml")).unwrap();
            watchdog(device.path(), &config).is_some()
        };
        assert!(advised(""));
        assert!(!advised("keepers = true\n"), "not beside keepers");
    }

    #[test]
    fn what_keepers_could_do_to_others_is_said() {
        let check = keepers();
        assert_ne!(check.state, State::Fail, "{check:?}");
        assert!(check.detail.starts_with("a keeper "), "{check:?}");
        assert_eq!(check.advice.is_none(), check.state == State::Ok, "{check:?}");
    }

    #[test]
    fn an_address_of_another_host_cannot_be_listened_on() {
        assert_eq!(listen("listen", "127.0.0.1:7700".parse().unwrap()).state, State::Ok);
        assert_eq!(listen("listen", "192.0.2.1:7700".parse().unwrap()).state, State::Fail);
    }

    /// The daemon refused them, at its start or at the first caller, and the doctor had said nothing.
    #[test]
    fn certificates_and_tokens_are_read_as_the_daemon_reads_them() {
        let directory = tempfile::tempdir().unwrap();
        let pki = directory.path();
        understudy_daemon::pki::init(pki).unwrap();
        understudy_daemon::pki::issue(pki, "a", 40).unwrap();
        let config = |host: &str| {
            let text = format!(
                "name = \"{host}\"\nlisten = \"127.0.0.1:7700\"\n[tls]\nca = \"{0}/ca.pem\"\n\
                 cert = \"{0}/a.pem\"\nkey = \"{0}/a.key\"\n[api]\nlisten = \"127.0.0.1:7780\"\n\
                 [api.tokens]\nadmin = \"{0}/admin.token\"\n",
                pki.display()
            );
            HostConfig::from_toml(&text, &pki.join("host.toml")).unwrap()
        };
        assert_eq!(certificates(&config("a")).unwrap().state, State::Ok);
        assert_eq!(certificates(&config("b")).unwrap().state, State::Fail);
        let tokens = |mode| {
            let path = pki.join("admin.token");
            fs::write(&path, "0123456789abcdef0123456789abcdef\n").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            api(config("a").api.as_ref().unwrap()).pop().unwrap()
        };
        assert_eq!(tokens(0o600).state, State::Ok);
        assert_eq!(tokens(0o644).state, State::Fail);
    }

    #[test]
    fn a_webhook_that_everybody_may_read_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("host.toml");
        let text = "name = \"a\"\nlisten = \"127.0.0.1:7700\"\ninsecure = true\n";
        let state = |webhook: &str, mode| {
            fs::write(&path, format!("{text}{webhook}")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            webhook_state(&HostConfig::load(&path).unwrap())
        };
        let secret = "[webhook]\nurl = \"https://alerts.example.org/T0/c0ffee\"\n";
        assert_eq!(state(secret, 0o644), Some(State::Note));
        assert_eq!((state(secret, 0o600), state("", 0o644)), (Some(State::Ok), None));
    }

    fn webhook_state(config: &HostConfig) -> Option<State> {
        let check = webhook(config)?;
        assert!(!check.detail.contains("c0ffee"), "{check:?}");
        Some(check.state)
    }

    #[test]
    fn the_arbiter_is_tried_and_left_as_it_was() {
        let directory = tempfile::tempdir().unwrap();
        let file = |path: &Path| ArbiterConfig::File { path: path.to_owned() };
        assert_eq!(arbiter(Some(&file(directory.path()))).state, State::Ok);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        let missing = arbiter(Some(&file(&directory.path().join("missing"))));
        assert_eq!(missing.state, State::Fail);
        assert!(missing.detail.contains("missing"), "{}", missing.detail);
        assert_eq!(arbiter(None).state, State::Note);
    }

    #[test]
    fn an_etcd_that_does_not_answer_is_named() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        drop(listener);
        let prefix = "/understudy".to_owned();
        let endpoints = EtcdEndpoints::new(std::slice::from_ref(&endpoint), None).unwrap();
        let etcd = EtcdConfig { endpoints, prefix };
        let check = arbiter(Some(&ArbiterConfig::Etcd(etcd)));
        assert_eq!(check.state, State::Fail);
        assert!(check.detail.contains(&endpoint), "{}", check.detail);
    }
}
