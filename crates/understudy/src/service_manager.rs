//! The service manager that has started the daemon: systemd's protocol of notifications.
//!
//! A datagram of `NAME=VALUE` lines to the socket that `NOTIFY_SOCKET` names, sd_notify(3).

use std::ffi::OsString;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;
use tracing::warn;
use understudy_client::{Failure, FailureKind};
use understudy_report::ErrorKind;

const SOCKET: &str = "NOTIFY_SOCKET";
const WATCHDOG: &str = "WATCHDOG_USEC";
const WATCHDOG_OF: &str = "WATCHDOG_PID";

/// A service manager that wants to be told; every message is lost if there is none.
#[derive(Debug)]
pub struct ServiceManager {
    told: Option<(UnixDatagram, SocketAddr)>,
    watchdog: Option<Duration>,
}

/// A notice to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The daemon serves its API and other hosts.
    Ready,
    /// The daemon is alive: proven, not assumed.
    Alive,
    /// The daemon ends, and is to be left so much time for that.
    Stopping(Duration),
    /// The daemon ends still, and is to be left so much time from now on.
    StillStopping(Duration),
    /// Text about what the daemon does, for people.
    Status(String),
}

impl Notice {
    fn line(&self) -> String {
        match self {
            Notice::Ready => "READY=1\n".to_owned(),
            Notice::Alive => "WATCHDOG=1\n".to_owned(),
            Notice::Stopping(time) => {
                format!("STOPPING=1\nEXTEND_TIMEOUT_USEC={}\n", time.as_micros())
            }
            Notice::StillStopping(time) => format!("EXTEND_TIMEOUT_USEC={}\n", time.as_micros()),
            // A line's end would begin another field.
            Notice::Status(words) => format!("STATUS={}\n", words.replace('\n', " ")),
        }
    }
}

impl ServiceManager {
    /// The one that this process's environment names.
    pub fn of_environment() -> Result<ServiceManager, Failure> {
        ServiceManager::named(|name| std::env::var_os(name), std::process::id())
    }

    fn named(
        variable: impl Fn(&str) -> Option<OsString>,
        process: u32,
    ) -> Result<ServiceManager, Failure> {
        let number = |name| variable(name).map(|text| number(name, &text)).transpose();
        let is_meant = number(WATCHDOG_OF)?.is_none_or(|meant| meant == u64::from(process));
        let watchdog = number(WATCHDOG)?.filter(|_| is_meant).map(Duration::from_micros);
        let told = variable(SOCKET).map(|name| connect(&name)).transpose()?;
        Ok(ServiceManager { told, watchdog })
    }

    /// The longest silence that it takes for life, if it counts.
    pub fn watchdog(&self) -> Option<Duration> {
        self.watchdog
    }

    /// Tells it. One that cannot be told is no reason to end VMs.
    pub fn tell(&self, notices: &[Notice]) {
        let Some((socket, address)) = &self.told else { return };
        let text: String = notices.iter().map(Notice::line).collect();
        if let Err(error) = socket.send_to_addr(text.as_bytes(), address) {
            warn!("the service manager cannot be told {:?}: {error}", text.trim());
        }
    }
}

fn number(name: &str, text: &OsString) -> Result<u64, Failure> {
    text.to_str().and_then(|text| text.parse().ok()).ok_or_else(|| {
        wrong(format!("{name} is {text:?}, which is no number: the service manager sets it"))
    })
}

fn connect(name: &OsString) -> Result<(UnixDatagram, SocketAddr), Failure> {
    let address = match name.as_bytes() {
        [b'@', rest @ ..] => SocketAddr::from_abstract_name(rest),
        [b'/', ..] => SocketAddr::from_pathname(name),
        _ => Err(io::Error::from(io::ErrorKind::Unsupported)),
    };
    let socket = address.and_then(|address| Ok((UnixDatagram::unbound()?, address)));
    socket.map_err(|error| {
        wrong(format!(
            "{SOCKET} is {name:?}, which cannot be told anything ({error}): it begins with / or @, \
             and the service manager sets it"
        ))
    })
}

fn wrong(message: String) -> Failure {
    Failure::new(FailureKind::Host(ErrorKind::Invalid), message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(variables: &[(&str, &str)]) -> Result<ServiceManager, Failure> {
        let find = |name: &str| variables.iter().find(|(known, _)| *known == name);
        ServiceManager::named(|name| find(name).map(|(_, value)| value.into()), 7)
    }

    fn heard(socket: &UnixDatagram) -> String {
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut bytes = [0; 1024];
        let length = socket.recv(&mut bytes).unwrap();
        String::from_utf8(bytes[..length].to_vec()).unwrap()
    }

    #[test]
    fn it_is_told_at_a_path_or_an_abstract_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let at_path = UnixDatagram::bind(&path).unwrap();
        let name = format!("understudy-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let abstracted = UnixDatagram::bind_addr(&address).unwrap();
        for (socket, name) in
            [(at_path, path.to_str().unwrap()), (abstracted, &*format!("@{name}"))]
        {
            let manager = named(&[(SOCKET, name)]).unwrap();
            manager.tell(&[Notice::Ready, Notice::Status("2 VMs\nREADY=1".to_owned())]);
            assert_eq!(heard(&socket), "READY=1\nSTATUS=2 VMs READY=1\n");
            manager.tell(&[Notice::Stopping(Duration::from_secs(2))]);
            assert_eq!(heard(&socket), "STOPPING=1\nEXTEND_TIMEOUT_USEC=2000000\n");
        }
    }

    #[test]
    fn without_one_nobody_is_told() {
        let manager = named(&[]).unwrap();
        manager.tell(&[Notice::Ready]);
        assert_eq!(manager.watchdog(), None);
        // Gone since.
        named(&[(SOCKET, "/nonexistent/notify")]).unwrap().tell(&[Notice::Alive]);
    }

    #[test]
    fn the_watchdog_counts_for_the_process_that_is_meant() {
        let of = |pid| named(&[(WATCHDOG, "3000000"), (WATCHDOG_OF, pid)]).unwrap().watchdog();
        assert_eq!((of("7"), of("8")), (Some(Duration::from_secs(3)), None));
        let all = named(&[(WATCHDOG, "3000000")]).unwrap();
        assert_eq!(all.watchdog(), Some(Duration::from_secs(3)));
    }

    #[test]
    fn what_cannot_be_understood_is_named() {
        for (name, value) in [(SOCKET, "notify"), (SOCKET, "vsock:2:1"), (WATCHDOG, "soon")] {
            let message = named(&[(name, value)]).unwrap_err().message;
            assert!(message.contains(name) && message.contains(value), "{message}");
        }
    }
}
