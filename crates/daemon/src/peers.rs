//! The [peers] of the configuration, read again when the file changes, so that a host can join
//! without a restart: a restart ends guests.

use crate::config::HostConfig;
use crate::host::Host;
use crate::inventory::Inventory;
use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;
use tracing::{info, warn};
use understudy_protocol::HostName;

/// Time between two looks at the file.
const INTERVAL: Duration = Duration::from_secs(2);

/// The configured peers as they are now.
#[derive(Debug, Default)]
pub struct Peers {
    /// All of them, with an address for each path.
    pub by_name: BTreeMap<HostName, Vec<SocketAddr>>,
    /// Problem with the changed file that the operator should see to; for people.
    pub problem: Option<String>,
}

impl Peers {
    /// Peers that the daemon starts with.
    pub fn of(config: &HostConfig) -> Peers {
        Peers { by_name: config.peers.clone(), problem: None }
    }
}

impl Host {
    /// The peers that the configuration has now, with an address for each path.
    pub(crate) fn peers(&self) -> BTreeMap<HostName, Vec<SocketAddr>> {
        self.vms.look(|all| all.findings.peers.by_name.clone())
    }

    /// Problem with the changed configuration.
    pub(crate) fn problem_of_peers(&self) -> Option<String> {
        self.vms.look(|all| all.findings.peers.problem.clone())
    }

    /// Takes over the [peers] of the file now: somebody names one who joined a moment ago. What is wrong with it, the
    /// next look tells.
    pub(crate) fn look_at_peers(&self) {
        let _ = refresh(&self.vms, &self.config.file);
    }
}

/// Takes over what the file has now; returns whether that is something else.
fn refresh(vms: &Inventory, file: &Path) -> Result<bool, String> {
    let fresh = HostConfig::load(file).map_err(|error| error.message)?.peers;
    let former = vms.note(|all| std::mem::replace(&mut all.findings.peers.by_name, fresh.clone()));
    Ok(former != fresh)
}

/// Looks for as long as the host lives.
pub fn watch(host: &Arc<Host>) {
    let host = Arc::downgrade(host);
    let spawned = thread::Builder::new().name("peers".to_owned()).spawn(move || run(&host));
    if let Err(error) = spawned {
        warn!("new [peers] are not noticed: cannot start a thread: {error}");
    }
}

fn run(host: &Weak<Host>) {
    let mut seen = None;
    while let Some(host) = host.upgrade() {
        if is_news(&mut seen, &host.config.file) {
            look(&host);
        }
        drop(host);
        thread::sleep(INTERVAL);
    }
}

/// Whether the file is another than was seen last, or cannot be read. What is as it was is not read again: what its
/// reader complains of would be logged each time.
fn is_news(seen: &mut Option<Vec<u8>>, file: &Path) -> bool {
    let text = fs::read(file).ok();
    let is_news = text.is_none() || text != *seen;
    *seen = text;
    is_news
}

fn look(host: &Host) {
    let problem = match refresh(&host.vms, &host.config.file) {
        Ok(true) => {
            let names = host.peers().into_keys().collect::<Vec<_>>();
            info!("[peers] has changed and is in use: {names:?}");
            None
        }
        Ok(false) => None,
        Err(error) => Some(unused(host.config.keepers, &error)),
    };
    let noted = problem.clone();
    let before = host.vms.note(|all| std::mem::replace(&mut all.findings.peers.problem, noted));
    if let Some(problem) = problem.filter(|problem| before.as_ref() != Some(problem)) {
        warn!("{problem}");
    }
}

/// Words on a changed file with an error. This daemon goes on with what it has read, and a keeper would begin with the file.
fn unused(keepers: bool, error: &str) -> String {
    let until_then = match keepers {
        true => ", and until it is corrected no VM starts in a keeper",
        false => "",
    };
    format!("the changed configuration is not used{until_then}: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_error_in_the_file_costs_is_said() {
        let plain = "the changed configuration is not used: host.toml:1: name";
        assert_eq!(unused(false, "host.toml:1: name"), plain);
        assert!(
            unused(true, "host.toml:1: name").contains("no VM starts in a keeper: host.toml:1")
        );
    }

    /// Regression: what is warned of in a sound file was logged every two seconds.
    #[test]
    fn a_file_that_is_as_it_was_is_not_read_again() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("host.toml");
        let mut seen = None;
        assert!(is_news(&mut seen, &file), "it is not there");
        assert!(is_news(&mut seen, &file), "it may come");
        fs::write(&file, "name = 'a'").unwrap();
        assert!(is_news(&mut seen, &file));
        assert!(!is_news(&mut seen, &file));
        fs::write(&file, "name = 'b'").unwrap();
        assert!(is_news(&mut seen, &file));
    }

    #[test]
    fn peers_are_those_of_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("host.toml");
        let head = "name = 'a'\nlisten = '127.0.0.1:7700'\n[peers]\n";
        fs::write(&file, head).unwrap();
        let peers = Peers::of(&HostConfig::load(&file).unwrap());
        let vms = Inventory::default();
        vms.note(|all| all.findings.peers = peers);
        let knows_b = || vms.look(|all| all.findings.peers.by_name.contains_key("b"));
        assert_eq!(refresh(&vms, &file), Ok(false));
        fs::write(&file, format!("{head}b = '127.0.0.1:7701'\n")).unwrap();
        assert_eq!(refresh(&vms, &file), Ok(true));
        assert!(knows_b());
        fs::write(&file, format!("{head}b = 7\n")).unwrap();
        assert!(refresh(&vms, &file).unwrap_err().contains("peers.b"));
        assert!(knows_b(), "what was right is kept");
    }
}
