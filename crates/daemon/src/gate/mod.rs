//! The gate: what other hosts' connections pass before anything is done for them.
//!
//! | module | is |
//! |--------|----|
//! | [`address`] | where it listens |
//! | [`lobby`] | how many connections there may be, and for how long, before it is known whose they are |
//! | [`authorize`] | who may ask for what |

pub mod address;
pub mod authorize;
pub mod lobby;

use crate::containment;
use crate::host::Host;
use crate::incoming;
use crate::keeper::Passed;
use lobby::Lobby;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};
use tracing::warn;
use understudy_arbiter::descriptors;
use understudy_report::error::{ErrorKind, HostError};

/// Pause before the next try when the system has no descriptor, thread or memory; doubled each
/// time.
const BACK_OFF: [Duration; 2] = [Duration::from_millis(10), Duration::from_secs(1)];

/// Accepts connections for as long as the host lives.
pub fn listen(host: &Arc<Host>, listener: TcpListener) -> Result<(), HostError> {
    let cannot = |what: &str, error: &dyn std::fmt::Display| {
        HostError::new(ErrorKind::Internal, format!("cannot {what}: {error}"))
    };
    listener.set_nonblocking(true).map_err(|error| cannot("listen", &error))?;
    let host = Arc::downgrade(host);
    thread::Builder::new()
        .name("listen".to_owned())
        .spawn(move || Porter { host, listener, back_off: BackOff::default() }.run())
        .map(drop)
        .map_err(|error| cannot("start a thread", &error))
}

/// Accepts the connections of one address.
struct Porter {
    host: Weak<Host>,
    listener: TcpListener,
    back_off: BackOff,
}

impl Porter {
    fn run(mut self) {
        let mut deadline = None;
        loop {
            await_connection(&self.listener, deadline);
            let Some(host) = self.host.upgrade() else { return };
            match self.listener.accept() {
                Ok((stream, from)) => match admit(&host, stream, from, None) {
                    Ok(()) => self.back_off.end(),
                    Err(error) => self.back_off.rest(&host.lobby, &error),
                },
                Err(error) => self.back_off.rest_if_exhausted(&host.lobby, &error),
            }
            deadline = host.lobby.end_overdue();
        }
    }
}

/// The pauses between tries while the system has no descriptor, thread or memory.
pub(crate) struct BackOff {
    pause: Duration,
}

impl Default for BackOff {
    fn default() -> BackOff {
        BackOff { pause: BACK_OFF[0] }
    }
}

impl BackOff {
    /// Ends the pauses: the system has them again.
    pub(crate) fn end(&mut self) {
        *self = BackOff::default();
    }

    /// Rests after an error of `accept` if something is exhausted: nobody may have been there, or
    /// have hung up meanwhile.
    pub(crate) fn rest_if_exhausted(&mut self, lobby: &Lobby, error: &io::Error) {
        if is_exhaustion(error) {
            self.rest(lobby, error);
        }
    }

    fn rest(&mut self, lobby: &Lobby, error: &io::Error) {
        if self.pause == BACK_OFF[0] {
            warn!("connections of other hosts have to wait: {error}");
        }
        lobby.make_room();
        thread::sleep(self.pause);
        self.pause = (self.pause * 2).min(BACK_OFF[1]);
    }
}

/// Waits until there is a connection, or a handshake's deadline has come.
pub(crate) fn await_connection(listener: &impl AsFd, deadline: Option<Instant>) {
    let timeout = deadline.map_or(PollTimeout::NONE, |deadline| {
        let left = deadline.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
        PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
    });
    let mut ready = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
    // An error (a signal) is looked after by trying to accept.
    let _ = poll(&mut ready, timeout);
}

/// Gives a connection a place and a thread; to a keeper its daemon has passed it on for something. An error if there is no
/// thread for it.
pub(crate) fn admit(
    host: &Arc<Host>,
    stream: TcpStream,
    from: SocketAddr,
    passed: Option<Passed>,
) -> io::Result<()> {
    if descriptors::is_one_of_the_last(stream.as_raw_fd()) {
        return Err(Errno::EMFILE.into());
    }
    stream.set_nonblocking(false)?;
    let known = host.is_address_of_known(from.ip());
    // Without a place it is hung up: it may try again.
    let Some(place) = host.lobby.admit(&stream, from.ip(), known) else { return Ok(()) };
    let host = host.clone();
    thread::Builder::new()
        .name("incoming".to_owned())
        .spawn(move || {
            // It ends with the connection, whatever the peer has said.
            containment::request(|| incoming::serve(&host, stream, place, passed));
        })
        .map(drop)
}

/// Whether the system has no more of something, so that trying again at once is of no use.
fn is_exhaustion(error: &io::Error) -> bool {
    use Errno::{EMFILE, ENFILE, ENOBUFS, ENOMEM};
    let errno = error.raw_os_error().map(Errno::from_raw);
    errno.is_some_and(|errno| [EMFILE, ENFILE, ENOBUFS, ENOMEM].contains(&errno))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    use std::fs::File;
    use std::io::Read;
    use std::process::Command;

    /// Says that the test is in a process of its own, whose limits are its own.
    const ALONE: &str = "UNDERSTUDY_TEST_ALONE";

    /// A connection that cannot be accepted is there again at once: trying without a pause takes a processor.
    #[test]
    fn while_no_descriptor_is_left_each_try_comes_later_than_the_last() {
        if std::env::var_os(ALONE).is_some() {
            return alone();
        }
        let name = "gate::tests::while_no_descriptor_is_left_each_try_comes_later_than_the_last";
        let mut child = Command::new(std::env::current_exe().unwrap());
        let output = child.args(["--exact", name]).env(ALONE, "1").output().unwrap();
        let words = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && words.contains("1 passed"), "{words}");
    }

    fn alone() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let lobby = Arc::new(Lobby::default());
        let mut stranger = TcpStream::connect(address).unwrap();
        let place = lobby.admit(&listener.accept().unwrap().0, address.ip(), false).unwrap();
        let _waits = TcpStream::connect(address).unwrap();
        let mut back_off = BackOff::default();
        back_off.rest_if_exhausted(&lobby, &io::ErrorKind::WouldBlock.into());
        assert_eq!(back_off.pause, BACK_OFF[0], "nobody was there");

        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, 64, hard).unwrap();
        let (mut all, mut pauses) = (Vec::new(), Vec::new());
        while back_off.pause < BACK_OFF[1] {
            // The stranger's, too, once it is gone.
            all.extend(std::iter::from_fn(|| File::open("/dev/null").ok()));
            let error = listener.accept().unwrap_err();
            assert_eq!(error.raw_os_error(), Some(Errno::EMFILE as i32));
            pauses.push(back_off.pause);
            back_off.rest_if_exhausted(&lobby, &error);
        }
        assert!(
            pauses.len() > 3 && pauses.is_sorted_by(|one, next| next == &(*one * 2)),
            "{pauses:?}"
        );
        assert_eq!(stranger.read(&mut [0]).unwrap(), 0, "a stranger keeps its descriptor");
        drop((all, place));
        listener.accept().expect("it is still there");
        back_off.end();
        assert_eq!(back_off.pause, BACK_OFF[0]);
    }
}
