//! The unix socket of the daemon's API: only for its own user, never stolen
//! from a daemon that lives.

use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket,
};
use nix::sys::stat::{Mode, fchmod};
use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use understudy_report::{ErrorKind, HostError};

/// A bound socket; its file is removed when this is dropped.
#[derive(Debug)]
pub struct ApiSocket {
    listener: UnixListener,
    path: PathBuf,
}

impl ApiSocket {
    /// Binds `path`, with mode 0600. A file that a dead daemon left is replaced.
    pub fn bind(path: &Path) -> Result<ApiSocket, HostError> {
        make_parent(path)?;
        remove_stale(path)?;
        let listener = bind_private(path).map_err(|errno| cannot("bind", path, &errno.into()))?;
        listener.set_nonblocking(true).map_err(|error| cannot("use", path, &error))?;
        Ok(ApiSocket { listener, path: path.to_owned() })
    }

    /// A handle of the listening socket, non-blocking.
    pub fn listener(&self) -> io::Result<UnixListener> {
        self.listener.try_clone()
    }

    /// The path of it.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ApiSocket {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the API socket");
        }
    }
}

/// A listening socket whose file has mode 0600 from its first moment.
fn bind_private(path: &Path) -> nix::Result<UnixListener> {
    let flags = SockFlag::SOCK_CLOEXEC;
    let fd = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    // On Linux the file gets the mode of the socket that is bound to it.
    fchmod(&fd, Mode::S_IRUSR | Mode::S_IWUSR)?;
    bind(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
    listen(&fd, Backlog::MAXCONN)?;
    Ok(UnixListener::from(fd))
}

fn make_parent(path: &Path) -> Result<(), HostError> {
    let Some(parent) = path.parent() else { return Ok(()) };
    let made = DirBuilder::new().recursive(true).mode(0o700).create(parent);
    made.map_err(|error| cannot("make the folder of", path, &error))
}

fn remove_stale(path: &Path) -> Result<(), HostError> {
    let kind = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(cannot("look at", path, &error)),
    };
    if !kind.is_socket() {
        let message = format!("{} exists and is not a socket: remove it", path.display());
        return Err(HostError::new(ErrorKind::Conflict, message));
    }
    match UnixStream::connect(path) {
        Ok(_) => {
            let message = format!(
                "a daemon already answers on {}: stop it, or set another `socket` \
                 in the configuration",
                path.display()
            );
            Err(HostError::new(ErrorKind::Conflict, message))
        }
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(|error| cannot("remove the stale", path, &error))
        }
        Err(error) => Err(cannot("try", path, &error)),
    }
}

fn cannot(what: &str, path: &Path, error: &io::Error) -> HostError {
    let message = format!("cannot {what} API socket {}: {error}", path.display());
    HostError::new(ErrorKind::Conflict, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn only_its_user_can_reach_it_and_it_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("run/api.sock");
        let socket = ApiSocket::bind(&path).unwrap();
        assert_eq!(mode(&path), 0o600);
        assert_eq!(mode(path.parent().unwrap()), 0o700);
        UnixStream::connect(&path).unwrap();
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn a_live_daemon_keeps_its_socket() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("api.sock");
        let _first = ApiSocket::bind(&path).unwrap();
        let error = ApiSocket::bind(&path).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Conflict);
        assert!(error.message.contains("already answers"), "{error}");
        UnixStream::connect(&path).expect("the first one still listens");
    }

    #[test]
    fn a_stale_socket_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("api.sock");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "the standard library leaves the file");
        let _socket = ApiSocket::bind(&path).unwrap();
        UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn another_file_is_not_touched() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("api.sock");
        fs::write(&path, "precious").unwrap();
        let error = ApiSocket::bind(&path).unwrap_err();
        assert!(error.message.contains("not a socket"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }
}
