//! What ending a host's keepers takes of its configuration, which may have become wrong since they began: they are told to
//! end all the same.

use super::{DEFAULT_POWER_OFF_SECONDS, DEFAULT_STATE_DIR, HostConfig, POWER_OFF_SECONDS};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;
use understudy_report::HostError;

/// What ending a host's keepers takes of its configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    /// Directory where they are found.
    pub state_dir: PathBuf,
    /// Time that a guest may take to power off.
    pub power_off_timeout: Duration,
}

impl Ending {
    /// Reads it; what cannot be had of it is as without a configuration, and comes with the error.
    pub fn load(path: &Path) -> (Ending, Option<HostError>) {
        match HostConfig::load(path) {
            Ok(HostConfig { state_dir, power_off_timeout, .. }) => {
                (Ending { state_dir, power_off_timeout }, None)
            }
            Err(error) => (Ending::of(&fs::read(path).unwrap_or_default()), Some(error)),
        }
    }

    /// Reads each line by itself: what is wrong in others hides neither field.
    fn of(text: &[u8]) -> Ending {
        let text = String::from_utf8_lossy(text);
        let lines: Vec<toml::Table> = text.lines().filter_map(|line| line.parse().ok()).collect();
        let first = |find: fn(&toml::Table) -> Option<&toml::Value>| lines.iter().find_map(find);
        let state_dir = first(|line| line.get("state_dir")).and_then(toml::Value::as_str);
        let state_dir = state_dir.map(PathBuf::from).filter(|path| path.is_absolute());
        let seconds = first(|line| {
            line.get("shutdown").map_or(Some(line), toml::Value::as_table)?.get("power_off_seconds")
        });
        let seconds = seconds.and_then(toml::Value::as_integer).map(u64::try_from);
        let seconds = seconds.and_then(Result::ok).filter(|it| POWER_OFF_SECONDS.contains(it));
        Ending {
            state_dir: state_dir.unwrap_or_else(|| DEFAULT_STATE_DIR.into()),
            power_off_timeout: Duration::from_secs(seconds.unwrap_or(DEFAULT_POWER_OFF_SECONDS)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_elsewhere_hides_neither_directory_nor_time() {
        let expected =
            Ending { state_dir: "/srv/vms".into(), power_off_timeout: Duration::from_secs(900) };
        let sound = "state_dir = \"/srv/vms\"\n[shutdown]\npower_off_seconds = 900\n";
        for text in [
            sound.to_owned(),
            format!("of_the_next_release = 1\n{sound}"),
            format!("{sound}[peers\nb = \n"),
            "state_dir = '/srv/vms'\nshutdown = { power_off_seconds = 900 }\n[".to_owned(),
            format!("name = \"a\nlisten = [\n{sound}state_dir = \"/another\"\n"),
        ] {
            assert_eq!(Ending::of(text.as_bytes()), expected, "{text}");
        }
    }

    #[test]
    fn what_is_not_there_is_as_without_a_configuration() {
        let (ending, error) = Ending::load(Path::new("/nonexistent/host.toml"));
        let seconds = Duration::from_secs(DEFAULT_POWER_OFF_SECONDS);
        let without = Ending { state_dir: DEFAULT_STATE_DIR.into(), power_off_timeout: seconds };
        assert_eq!(ending, without);
        assert!(error.unwrap().message.contains("/nonexistent/host.toml"));
        let wrong = b"state_dir = \"vms\"\nshutdown = { power_off_seconds = -1 }\n\xff\n\"\"\"";
        assert_eq!(Ending::of(wrong), without);
    }
}
