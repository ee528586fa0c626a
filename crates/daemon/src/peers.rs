//! The [peers] of the configuration, read again when the file changes, so that a host can join
//! without a restart: a restart ends guests.

use crate::config::HostConfig;
use crate::host::Host;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;
use tracing::{info, warn};
use understudy_protocol::HostName;
use understudy_threads::Common;

/// Time between two looks at the file.
const INTERVAL: Duration = Duration::from_secs(2);

/// The configured peers as they are now.
#[derive(Debug)]
pub struct Peers(Common<Known>);

#[derive(Debug)]
struct Known {
    by_name: BTreeMap<HostName, Vec<SocketAddr>>,
    /// Reason why the changed file is not used.
    problem: Option<String>,
}

impl Peers {
    /// Peers that the daemon starts with.
    pub fn of(config: &HostConfig) -> Peers {
        Peers(Common::new(Known { by_name: config.peers.clone(), problem: None }))
    }

    /// All of them, with an address for each path.
    pub fn all(&self) -> BTreeMap<HostName, Vec<SocketAddr>> {
        self.0.lock().by_name.clone()
    }

    /// Problem that the operator should see to; for people.
    pub fn problem(&self) -> Option<String> {
        self.0.lock().problem.clone()
    }

    /// Takes over what the file has now; returns whether that is something else.
    fn refresh(&self, file: &Path) -> Result<bool, String> {
        let fresh = HostConfig::load(file).map_err(|error| error.message)?.peers;
        let mut known = self.0.lock();
        let changed = known.by_name != fresh;
        known.by_name = fresh;
        Ok(changed)
    }
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
    while let Some(host) = host.upgrade() {
        let problem = match host.peers.refresh(&host.config.file) {
            Ok(true) => {
                let names = host.peers.all().into_keys().collect::<Vec<_>>();
                info!("[peers] has changed and is in use: {names:?}");
                None
            }
            Ok(false) => None,
            Err(error) => Some(format!("the changed configuration is not used: {error}")),
        };
        let before = std::mem::replace(&mut host.peers.0.lock().problem, problem.clone());
        if let Some(problem) = problem.filter(|problem| before.as_ref() != Some(problem)) {
            warn!("{problem}");
        }
        drop(host);
        thread::sleep(INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_those_of_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("host.toml");
        let head = "name = 'a'\nlisten = '127.0.0.1:7700'\n[peers]\n";
        std::fs::write(&file, head).unwrap();
        let peers = Peers::of(&HostConfig::load(&file).unwrap());
        assert_eq!(peers.refresh(&file), Ok(false));
        std::fs::write(&file, format!("{head}b = '127.0.0.1:7701'\n")).unwrap();
        assert_eq!(peers.refresh(&file), Ok(true));
        assert!(peers.all().contains_key("b"));
        std::fs::write(&file, format!("{head}b = 7\n")).unwrap();
        assert!(peers.refresh(&file).unwrap_err().contains("peers.b"));
        assert!(peers.all().contains_key("b"), "what was right is kept");
    }
}
