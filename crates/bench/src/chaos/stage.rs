//! One guest under load, and its clients: they live through many runs.

use anyhow::{Context, Result, anyhow, bail, ensure};
use std::path::Path;
use std::time::{Duration, Instant};
use understudy_client::Client;
use understudy_lab::check::{DiskCheck, Snapshot};
use understudy_lab::scene::{ECHO_PORT, RECORDS_PORT, VM};
use understudy_lab::{ChatterClient, ChatterReport, Load, RecordClient, RecordReport};
use understudy_lab::{Scene, SceneOptions, Watcher, tells_of_a_follower, wait_for};
use understudy_report::{HostStatus, Protection, Role, VmStatus};

/// The two hosts.
pub const HOSTS: [&str; 2] = ["a", "b"];
/// Pause between two records, so that a run is not about the disk's speed.
const PACE: Duration = Duration::from_millis(2);
/// Load on memory and CPU, and on the disk; both leave the guest some time for
/// its clients.
const LOADS: [&str; 2] =
    ["exec guest-tools dirty 400 30", "mkdir -p /data/load; exec nice guest-tools load /data/load"];
/// Load on the network.
const PINGS: usize = 3;
const BULK: Load = Load::Bulk(16 * 1024);
/// Time for a host to be protected to again after its failure.
const PROTECT_LIMIT: Duration = Duration::from_secs(90);
/// Time for the guest to answer its clients again, once a failure is over.
const SERVICE_LIMIT: Duration = Duration::from_secs(30);
/// Acknowledgements that prove that the guest serves its client.
const SERVED: u64 = 20;

/// A guest on two hosts, its clients, and who watches them.
pub struct Stage {
    /// The laboratory.
    pub scene: Scene,
    records: RecordClient,
    chatter: Vec<ChatterClient>,
    watchers: [Watcher; 2],
}

/// Reports on what the clients have seen.
pub struct Said {
    /// The one that appends records.
    pub records: RecordReport,
    /// The others.
    pub chatter: Vec<ChatterReport>,
}

impl Stage {
    /// Boots the guest on the first host and puts it under load.
    pub fn under_load(options: SceneOptions) -> Result<Stage> {
        Stage::set(options, &LOADS, &[(RECORDS_PORT, PINGS, Load::Pings), (ECHO_PORT, 1, BULK)])
    }

    /// Boots the guest on the first host; it has nothing to do but for its client, and
    /// another connection that carries blocks of so many bytes both ways, if any.
    pub fn at_rest(options: SceneOptions, bulk: Option<usize>) -> Result<Stage> {
        let bulk: Vec<_> =
            bulk.map(|bytes| (ECHO_PORT, 1, Load::Bulk(bytes))).into_iter().collect();
        Stage::set(options, &[], &bulk)
    }

    /// Stage with these commands in the guest, and these connections beside the records.
    fn set(
        options: SceneOptions,
        commands: &[&str],
        connections: &[(u16, usize, Load)],
    ) -> Result<Stage> {
        let scene = Scene::start(options)?;
        scene.start_guest(HOSTS[0])?;
        scene.await_guest()?;
        let mut shell = scene.shell()?;
        for command in commands {
            shell.start(command)?;
        }
        let (lab, guest) = (scene.lab(), |port| scene.guest(port));
        let chatter = connections.iter().map(|&(port, count, load)| {
            ChatterClient::start(lab, guest(port), count, load, Duration::ZERO)
        });
        let chatter = chatter.collect::<Result<_>>()?;
        let records = scene.record_client(PACE)?;
        let watchers = [scene.watch_uplink(HOSTS[0], 0)?, scene.watch_uplink(HOSTS[1], 0)?];
        Ok(Stage { scene, records, chatter, watchers })
    }

    /// Records acknowledged until now.
    pub fn acked(&self) -> u64 {
        self.records.acked()
    }

    /// Whether a client's connection has broken, or got a wrong answer.
    pub fn connection_broke(&self) -> bool {
        self.records.failed() || self.chatter.iter().any(ChatterClient::failed)
    }

    /// Status of the guest by the daemon on `host`; none if it knows none. Not to
    /// be asked of a host that stands still.
    pub fn status(&self, host: &str) -> Result<Option<VmStatus>> {
        Ok(self.host_status(host)?.vms.into_iter().find(|vm| vm.name == VM))
    }

    /// Status of the daemon on `host`.
    pub fn host_status(&self, host: &str) -> Result<HostStatus> {
        client(&self.scene, host)?.status().map_err(|failure| anyhow!(failure.message))
    }

    /// The host that runs the guest and may let its output go, if there is just one.
    /// An error if there are two.
    pub fn owner(&mut self) -> Result<Option<&'static str>> {
        let mut owner = None;
        for host in HOSTS {
            if !self.scene.host_mut(host)?.is_running() {
                continue;
            }
            // A daemon that ends just now does not own anything.
            let Ok(Some(status)) = self.status(host) else { continue };
            if status.role != Role::Primary || !status.live {
                continue;
            }
            if matches!(&status.protection, Protection::Degraded { reason } if reason.contains("until the arbiter decides"))
            {
                return Ok(None);
            }
            ensure!(owner.is_none(), "both hosts say that they run the guest");
            owner = Some(host);
        }
        Ok(owner)
    }

    /// Waits until the guest is one host's, and has served its client from there.
    pub fn await_service(&mut self) -> Result<&'static str> {
        let goal = self.acked() + SERVED;
        let begun = Instant::now();
        loop {
            ensure!(!self.connection_broke(), "a client's connection broke");
            let served = self.acked() >= goal;
            match self.owner() {
                Ok(Some(owner)) if served => return Ok(owner),
                // Two for a moment: one of them answered before the other changed its mind.
                Err(error) if begun.elapsed() >= SERVICE_LIMIT => return Err(error),
                _ => {}
            }
            if begun.elapsed() >= SERVICE_LIMIT {
                let runs = if served {
                    "no host says that it runs the guest"
                } else {
                    "the guest serves nobody"
                };
                bail!("{runs}, {SERVICE_LIMIT:?} after the failure");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Has the guest protected by the other host, which is started again if it
    /// is dead. Returns the hosts that are now primary and backup.
    pub fn protect(&mut self, complete: bool) -> Result<(&'static str, &'static str)> {
        for host in HOSTS {
            if !self.scene.host_mut(host)?.is_running() {
                self.scene.restart(host)?;
            }
        }
        let begun = Instant::now();
        loop {
            // Anew each time: a false alarm may have moved the guest.
            let owner = self.await_service()?;
            let other = other(owner);
            let status = self.status(owner)?.context("its owner does not know the guest")?;
            match &status.protection {
                Protection::Protected { .. } => return Ok((owner, other)),
                Protection::Syncing { .. } if !complete => return Ok((owner, other)),
                Protection::Syncing { .. } => {}
                _ => {
                    let request = self.scene.protect(owner, other);
                    if let Err(error) = request {
                        // The former copy takes a moment to end.
                        ensure!(begun.elapsed() < PROTECT_LIMIT, "{error:#}");
                    }
                }
            }
            ensure!(begun.elapsed() < PROTECT_LIMIT, "not protected after {PROTECT_LIMIT:?}");
        }
    }

    /// Whether `primary` says that its guest is protected.
    pub fn is_protected(&self, primary: &str) -> Result<bool> {
        let status = self.status(primary)?;
        Ok(status.is_some_and(|status| matches!(status.protection, Protection::Protected { .. })))
    }

    /// Whether the guest of `primary` has its backup, which may be late with its proof that it could
    /// take over.
    pub fn has_backup(&self, primary: &str) -> Result<bool> {
        let has_one = |status: VmStatus| match &status.protection {
            Protection::Protected { .. } => true,
            Protection::Degraded { reason } => tells_of_a_follower(reason),
            _ => false,
        };
        Ok(self.status(primary)?.is_some_and(has_one))
    }

    /// Whether the guest's address was heard from two hosts: from `loser` after
    /// `owner` had begun to send in its name, since `begun`. A loser that never
    /// owned it must have been silent all the time.
    pub fn answered_from_two(&self, owner: &str, begun: Instant, moved: bool) -> Result<bool> {
        let since = if moved { self.first_frame(owner, begun)? } else { begun };
        Ok(self.watcher(other(owner)).frames_after(since)? > 0)
    }

    /// The first frame after `instant` that `host` sent in the guest's name.
    pub fn first_frame(&self, host: &str, instant: Instant) -> Result<Instant> {
        let first = self.watcher(host).first_frame_after(instant)?;
        first.with_context(|| format!("host {host} has sent nothing in the guest's name"))
    }

    fn watcher(&self, host: &str) -> &Watcher {
        &self.watchers[usize::from(host == HOSTS[1])]
    }

    /// Compares the disk of the running guest with what was acknowledged until now.
    pub fn check_disk(&self, owner: &str) -> Result<DiskCheck> {
        let image = self.scene.disk(owner, 0)?;
        let frozen = self.scene.host(owner)?.freeze_guest(VM)?;
        let snapshot = Snapshot::of(&image)?;
        let acked = self.acked();
        drop(frozen);
        snapshot.check(acked)
    }

    /// Copies all logs into `directory`.
    pub fn keep_logs(&self, directory: &Path) -> Result<()> {
        self.scene.lab().keep_logs(directory)
    }

    /// Ends the guest and its clients; `clean`: proves that nothing is left behind.
    pub fn clear(self, clean: bool) -> Result<Said> {
        let Stage { mut scene, records, chatter, watchers } = self;
        let said = Said {
            records: records.stop(),
            chatter: chatter.into_iter().map(ChatterClient::stop).collect(),
        };
        let errors: Vec<String> = said
            .chatter
            .iter()
            .flat_map(|report| report.errors().into_iter().map(ToString::to_string))
            .collect();
        drop(watchers);
        if clean {
            ensure!(errors.is_empty(), "a client's connection broke: {errors:?}");
            for host in HOSTS {
                if !scene.host_mut(host)?.is_running() {
                    scene.restart(host)?;
                }
            }
            scene.finish()?;
        }
        Ok(said)
    }
}

/// The other one of the two hosts.
pub fn other(host: &str) -> &'static str {
    if host == HOSTS[0] { HOSTS[1] } else { HOSTS[0] }
}

fn client(scene: &Scene, host: &str) -> Result<Client> {
    Client::new(scene.host(host)?.socket()).map_err(|failure| anyhow!(failure.message))
}

/// Waits so long, unless `early` says that waiting is in vain.
pub fn pause(length: Duration, mut early: impl FnMut() -> bool) {
    let until = Instant::now() + length;
    let _ =
        wait_for("the moment", length, || Ok((early() || Instant::now() >= until).then_some(())));
}
