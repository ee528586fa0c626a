//! Live migrations beside `bench pause`: how long QEMU itself stops the same guest,
//! with the same load and in the same run, to move it to another QEMU.

use super::report::quantile;
use anyhow::Result;
use serde::Serialize;
use std::path::Path;
use std::time::Duration;
use understudy_lab::scene::{ECHO_PORT, SHELL_PORT};
use understudy_lab::{GuestShell, Lab, Migration, MigrationLimits, PlainGuest, PlainOptions};

/// A guest that writes faster than its limits let QEMU send never moves.
const PATIENCE: Duration = Duration::from_secs(15);

/// Limits that one would ask for if downtime is what matters: no switch before the rest takes
/// 10 ms, and all the bandwidth that there is.
const SMALL: MigrationLimits =
    MigrationLimits { downtime: Duration::from_millis(10), bandwidth: 1 << 40 };

/// The downtimes of one guest with one load.
#[derive(Clone, Debug, Serialize)]
pub struct Downtimes {
    /// Downtime with QEMU's own limits: 300 ms, 128 MiB a second.
    pub default: Downtime,
    /// Downtime with a limit of 10 ms, and no limit to the bandwidth.
    pub small: Downtime,
}

/// Migrations with the same limits. Times are in milliseconds.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Downtime {
    /// Migrations that came to their end.
    pub runs: usize,
    /// Migrations that did not, within 15 seconds; no more are tried then.
    pub endless: usize,
    /// Time from the source's standstill until the target runs: the median.
    pub median_ms: Option<f64>,
    /// The shortest.
    pub least_ms: Option<f64>,
    /// The longest.
    pub most_ms: Option<f64>,
    /// The downtime that QEMU reports, median.
    pub reported_ms: Option<f64>,
    /// The whole migration, median.
    pub whole_ms: Option<f64>,
    /// Number of times that QEMU went over the written pages, median.
    pub rounds: Option<f64>,
    /// MiB that were sent, median.
    pub sent_mib: Option<f64>,
}

/// The guest without the product.
pub struct Migrations<'a> {
    lab: &'a Lab,
    // Before the guest that it talks to.
    shell: GuestShell,
    guest: PlainGuest,
}

impl<'a> Migrations<'a> {
    /// Boots it on host a.
    pub fn begin(lab: &'a Lab, guest_files: &Path, memory_mib: u32) -> Result<Migrations<'a>> {
        let options = PlainOptions { memory_mib, ..PlainOptions::test_guest(guest_files) };
        let guest = PlainGuest::start(lab, "a", &options)?;
        guest.await_boot(lab, &[SHELL_PORT, ECHO_PORT])?;
        let shell = GuestShell::connect(lab, guest.server(SHELL_PORT))?;
        Ok(Migrations { lab, shell, guest })
    }

    /// Runs its commands; lives through migrations.
    pub fn shell(&mut self) -> &mut GuestShell {
        &mut self.shell
    }

    /// Migrates it so many times with each of the limits, in turn.
    pub fn downtimes(&mut self, runs: u32) -> Result<Downtimes> {
        let (mut default, mut small) = (Vec::new(), Vec::new());
        for _ in 0..runs {
            self.migrate(&MigrationLimits::default(), &mut default)?;
            self.migrate(&SMALL, &mut small)?;
        }
        Ok(Downtimes { default: Downtime::of(&default), small: Downtime::of(&small) })
    }

    fn migrate(
        &mut self,
        limits: &MigrationLimits,
        so_far: &mut Vec<Option<Migration>>,
    ) -> Result<()> {
        if !so_far.iter().any(Option::is_none) {
            so_far.push(self.guest.migrate(self.lab, limits, PATIENCE)?);
        }
        Ok(())
    }
}

impl Downtime {
    fn of(migrations: &[Option<Migration>]) -> Downtime {
        let whole: Vec<Migration> = migrations.iter().flatten().copied().collect();
        let at = |share: f64, value: fn(&Migration) -> f64| {
            let mut values: Vec<f64> = whole.iter().map(value).collect();
            values.sort_by(f64::total_cmp);
            (!values.is_empty()).then(|| quantile(&values, share))
        };
        let downtime: fn(&Migration) -> f64 = |migration| millis(migration.downtime);
        Downtime {
            runs: whole.len(),
            endless: migrations.len() - whole.len(),
            median_ms: at(0.5, downtime),
            least_ms: at(0.0, downtime),
            most_ms: at(1.0, downtime),
            reported_ms: at(0.5, |migration| millis(migration.reported)),
            whole_ms: at(0.5, |migration| millis(migration.total)),
            rounds: at(0.5, |migration| migration.rounds as f64),
            sent_mib: at(0.5, |migration| migration.bytes as f64 / f64::from(1 << 20)),
        }
    }

    /// Words for the table.
    pub fn words(&self) -> String {
        let times = match (self.median_ms, self.least_ms, self.most_ms) {
            (Some(median), Some(least), Some(most)) => {
                format!("{median:.1} ({least:.1}–{most:.1})")
            }
            _ => String::new(),
        };
        match (self.endless, self.runs) {
            (0, _) => times,
            (_, 0) => "endless".to_owned(),
            _ => format!("{times} or endless"),
        }
    }
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_those_that_ended_and_a_word_on_the_others() {
        let ended = |millis| {
            Some(Migration {
                downtime: Duration::from_millis(millis),
                reported: Duration::from_millis(millis + 1),
                total: Duration::from_secs(1),
                rounds: 3,
                bytes: 64 << 20,
            })
        };
        let all = Downtime::of(&[ended(9), ended(5), ended(7)]);
        assert_eq!(all.words(), "7.0 (5.0–9.0)");
        assert_eq!((all.reported_ms, all.sent_mib), (Some(8.0), Some(64.0)));
        assert_eq!(Downtime::of(&[ended(4), None]).words(), "4.0 (4.0–4.0) or endless");
        assert_eq!(Downtime::of(&[None]).words(), "endless");
        assert_eq!(Downtime::of(&[]).words(), "");
    }
}
