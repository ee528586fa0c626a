//! Real handshakes over loopback: who is let in, who is not, and what both
//! sides say.

mod intermediates;
mod renewals;

use super::*;
use crate::link::{Link, Next};
use crate::pki;
use std::io::{IoSlice, Read, Write};
use std::net::{Shutdown, TcpListener};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::thread;
use std::time::{Duration, SystemTime};
use understudy_protocol::wire::{Header, Kind};
use understudy_protocol::{Epoch, literal};

fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let dialled = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let accepted = listener.accept().unwrap().0;
    for socket in [&dialled, &accepted] {
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    }
    (dialled, accepted)
}

/// Both ends' streams, of which `a` dials and `b` accepts.
fn shake_hands(
    a: &Tls,
    dialled: &TcpStream,
    b: &Tls,
    accepted: &TcpStream,
) -> (TlsStream, TlsStream) {
    thread::scope(|scope| {
        let accepting = scope.spawn(|| b.accept(accepted).unwrap());
        (a.dial(dialled, "b").unwrap(), accepting.join().unwrap())
    })
}

/// A CA in a directory of its own.
struct Authority(tempfile::TempDir);

impl Authority {
    fn new() -> Authority {
        let directory = tempfile::tempdir().unwrap();
        pki::init(directory.path()).unwrap();
        Authority(directory)
    }

    fn issue(&self, name: &str) -> Tls {
        self.issue_at(SystemTime::now(), name)
    }

    /// A host that heeds the list of revoked certificates.
    fn heedful(&self, name: &str) -> Tls {
        let written = pki::issue(self.0.path(), name, 1).unwrap();
        let path = |file| self.0.path().join(file);
        let (ca, revoked) = (path(pki::CA_CERT), Some(path(pki::REVOKED)));
        Tls::load(&TlsFiles { ca, cert: written.cert, key: written.key, revoked }, name).unwrap()
    }

    /// Issues for a day from then on.
    fn issue_at(&self, then: SystemTime, name: &str) -> Tls {
        let written = pki::issue_at(then, self.0.path(), name, 1).unwrap();
        let ca = self.0.path().join(pki::CA_CERT);
        Tls::load(&TlsFiles { ca, cert: written.cert, key: written.key, revoked: None }, name)
            .unwrap()
    }
}

/// A dials `peer` on B; what each side says of it. The dialler hears of a
/// refusal of its certificate with its first read.
fn meet(a: &Tls, b: &Tls, peer: &str) -> (Result<(), String>, Result<(), String>) {
    let (dialled, accepted) = sockets();
    thread::scope(|scope| {
        let accepting = scope.spawn(move || {
            let stream = b.accept(&accepted).map_err(|error| format!("{error:#}"))?;
            stream.check_peer("a").map_err(|error| format!("{error:#}"))?;
            stream
                .write_all(&accepted, &[IoSlice::new(b"!")], Next::Unknown)
                .map_err(|e| e.to_string())
        });
        let dialling = || {
            let stream = a.dial(&dialled, peer).map_err(|error| format!("{error:#}"))?;
            match stream.read(&dialled, &mut [0]) {
                Ok(1) => Ok(()),
                Ok(_) => Err("hung up".to_owned()),
                Err(error) => Err(explain(&error).unwrap_or_else(|| error.to_string())),
            }
        };
        let dialled = dialling();
        (dialled, accepting.join().unwrap())
    })
}

fn assert_says(result: Result<(), String>, words: &str) {
    let said = result.expect_err("it was let in");
    assert!(said.contains(words), "{said:?} does not say {words:?}");
}

#[test]
fn hosts_of_one_authority_know_each_other() {
    let authority = Authority::new();
    let (a, b) = (authority.issue("a"), authority.issue("b"));
    assert_eq!(meet(&a, &b, "b"), (Ok(()), Ok(())));
}

#[test]
fn a_host_of_another_authority_is_refused() {
    let (one, other) = (Authority::new(), Authority::new());
    let (dialler, acceptor) = meet(&one.issue("a"), &other.issue("b"), "b");
    assert_says(dialler, "another CA than the one in this host's [tls]");
    assert_says(acceptor, "another CA than the one in the peer's [tls]");
}

#[test]
fn a_dialler_of_another_authority_is_refused() {
    let (one, other) = (Authority::new(), Authority::new());
    // The dialler trusts the acceptor; the acceptor does not trust it.
    let (key, cert) = {
        let written = pki::issue(other.0.path(), "a", 1).unwrap();
        (written.key, written.cert)
    };
    let ca = one.0.path().join(pki::CA_CERT);
    let stranger = Tls::load(&TlsFiles { ca, cert, key, revoked: None }, "a").unwrap();
    let (dialler, acceptor) = meet(&stranger, &one.issue("b"), "b");
    assert_says(dialler, "another CA than the one in the peer's [tls]");
    assert_says(acceptor, "another CA than the one in this host's [tls]");
}

#[test]
fn an_expired_certificate_is_refused() {
    let authority = Authority::new();
    const DAY: Duration = Duration::from_secs(24 * 3600);
    let (a, b) = (authority.issue("a"), authority.issue("b"));
    let (before, after) = (SystemTime::now() - 2 * DAY, SystemTime::now() + 2 * DAY);
    let old = authority.issue_at(before, "old");
    let (dialler, acceptor) = meet(&old, &b, "b");
    assert_says(dialler, "this host's certificate has expired");
    assert_says(acceptor, "it has expired");
    let (dialler, acceptor) = meet(&a, &old, "old");
    assert_says(dialler, "it has expired");
    assert_says(acceptor, "this host's certificate has expired");
    let (_, acceptor) = meet(&authority.issue_at(after, "new"), &b, "b");
    assert_says(acceptor, "not valid yet");
}

#[test]
fn a_certificate_of_another_host_is_refused() {
    let authority = Authority::new();
    let (a, b) = (authority.issue("a"), authority.issue("b"));
    let (dialler, _) = meet(&a, &b, "c");
    assert_says(dialler, "it is for another host");
    let (_, acceptor) = meet(&b, &a, "a");
    assert_says(acceptor, "it is for another host");
}

#[test]
fn a_client_without_tls_is_refused_and_so_is_a_server() {
    let authority = Authority::new();
    let host = authority.issue("a");
    let (mut plain, accepted) = sockets();
    plain.write_all(b"USTD, and more than a record's header").unwrap();
    let error = host.accept(&accepted).unwrap_err();
    assert!(error.to_string().contains("does not speak TLS"), "{error}");
    let (dialled, plain) = sockets();
    drop(plain);
    let error = host.dial(&dialled, "b").unwrap_err();
    assert!(error.to_string().contains("does its configuration have [tls]?"), "{error}");
}

/// A client hello of TLS 1.2: without the extension that offers 1.3.
#[test]
fn an_older_version_is_refused() {
    let groups = [0, 10, 0, 4, 0, 2, 0, 0x1d];
    let signatures = [0, 13, 0, 4, 0, 2, 4, 3];
    let extensions = [&[0, 16][..], &groups, &signatures].concat();
    let ciphers = [0, 2, 0xc0, 0x2b];
    let body = [&[3, 3][..], &[7; 32], &[0], &ciphers, &[1, 0], &extensions].concat();
    let handshake = [&[1, 0, 0, body.len() as u8][..], &body].concat();
    let record = [&[22, 3, 3, 0, handshake.len() as u8][..], &handshake].concat();
    let (mut old, accepted) = sockets();
    old.write_all(&record).unwrap();
    let error = Authority::new().issue("a").accept(&accepted).unwrap_err();
    assert!(error.to_string().contains("cannot do TLS 1.3"), "{error}");
    drop(accepted);
    let mut answer = Vec::new();
    old.read_to_end(&mut answer).unwrap();
    // An alert, fatal: protocol version.
    assert_eq!((answer[0], &answer[5..]), (21, &[2, 70][..]));
}

#[test]
fn certificates_and_keys_are_checked_when_they_are_loaded() {
    let authority = Authority::new();
    let written = pki::issue(authority.0.path(), "a", 1).unwrap();
    let other = pki::issue(authority.0.path(), "b", 1).unwrap();
    let ca = authority.0.path().join(pki::CA_CERT);
    let files = TlsFiles { ca, cert: written.cert, key: written.key.clone(), revoked: None };
    let refused = |files: &TlsFiles, name| format!("{:#}", Tls::load(files, name).unwrap_err());
    assert!(refused(&files, "c").contains("is not a certificate of host \"c\""));
    let swapped = TlsFiles { key: other.key, ..files.clone() };
    assert!(refused(&swapped, "a").contains("cannot use the certificate"));
    let no_key = TlsFiles { key: files.cert.clone(), ..files.clone() };
    assert!(refused(&no_key, "a").contains("chmod 600"));
    std::fs::set_permissions(&written.key, std::fs::Permissions::from_mode(0o640)).unwrap();
    assert!(refused(&files, "a").contains("chmod 600"));
    let missing = TlsFiles { ca: "/nonexistent".into(), ..files };
    std::fs::set_permissions(&written.key, std::fs::Permissions::from_mode(0o600)).unwrap();
    assert!(refused(&missing, "a").contains("cannot read /nonexistent"));
}

#[test]
fn one_thread_reads_while_another_writes() {
    const BYTES: usize = 3 << 20;
    let authority = Authority::new();
    let (a, b) = (authority.issue("a"), authority.issue("b"));
    let (dialled, accepted) = sockets();
    let (ours, theirs) = shake_hands(&a, &dialled, &b, &accepted);
    let data: Vec<u8> = (0..BYTES).map(|i| (i % 251) as u8).collect();
    let write = |stream: &TlsStream, socket: &TcpStream| {
        let (head, rest) = data.split_at(24);
        stream.write_all(socket, &[IoSlice::new(head), IoSlice::new(rest)], Next::Unknown).unwrap();
    };
    let read = |stream: &TlsStream, socket: &TcpStream| {
        let (mut got, mut at) = (vec![0; BYTES], 0);
        while at < BYTES {
            at += stream.read(socket, &mut got[at..]).unwrap();
        }
        assert!(got == data);
    };
    // More than the sockets hold, both ways at once.
    thread::scope(|scope| {
        scope.spawn(|| write(&ours, &dialled));
        scope.spawn(|| write(&theirs, &accepted));
        scope.spawn(|| read(&ours, &dialled));
        scope.spawn(|| read(&theirs, &accepted));
    });
}

#[test]
fn small_parts_share_a_record() {
    const PARTS: usize = 300;
    let authority = Authority::new();
    let (a, b) = (authority.issue("a"), authority.issue("b"));
    let (dialled, mut accepted) = sockets();
    let (ours, _) = shake_hands(&a, &dialled, &b, &accepted);
    let parts = [[7; 100]; PARTS];
    let parts: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
    ours.write_all(&dialled, &parts, Next::Unknown).unwrap();
    dialled.shutdown(Shutdown::Write).unwrap();
    let mut sealed = Vec::new();
    accepted.read_to_end(&mut sealed).unwrap();
    let beside = sealed.len() - PARTS * 100;
    assert!(beside < PARTS, "{beside} bytes beside the data: each record takes 22");
}

#[test]
fn a_small_message_leaves_with_the_next_one_and_a_large_one_at_once() {
    let authority = Authority::new();
    let (a, b) = (authority.issue("a"), authority.issue("b"));
    let (dialled, accepted) = sockets();
    let (ours, theirs) = shake_hands(&a, &dialled, &b, &accepted);
    let write =
        |bytes: &[u8], next| ours.write_all(&dialled, &[IoSlice::new(bytes)], next).unwrap();
    let read = |bytes: usize| {
        let (mut got, mut at) = (vec![0; bytes], 0);
        while at < bytes {
            at += theirs.read(&accepted, &mut got[at..]).unwrap();
        }
        got
    };
    // What the handshake has left is read with it.
    write(b"!", Next::Unknown);
    assert_eq!(read(1), b"!");
    let is_there = || {
        accepted.set_nonblocking(true).unwrap();
        let found = accepted.peek(&mut [0]);
        accepted.set_nonblocking(false).unwrap();
        found.is_ok()
    };
    write(b"small, ", Next::Message);
    assert!(!is_there(), "one call of the system for both");
    write(b"and small", Next::Unknown);
    assert_eq!(read(16), b"small, and small");
    let large = vec![7; stream::MOST_WAITING];
    write(&large, Next::Message);
    assert_eq!(read(large.len()), large);
}

/// Regression: what had been opened was opened again after a read that had found nothing.
#[test]
fn who_never_waits_goes_on_after_a_read_that_found_nothing() {
    let authority = Authority::new();
    let (a, b) = (authority.issue("a"), authority.issue("b"));
    let (dialled, accepted) = sockets();
    let (ours, theirs) = thread::scope(|scope| {
        let accepting = scope.spawn(|| Link::accepted(accepted, Some(&b)).unwrap());
        (Link::dialled(dialled, &literal("b"), Some(&a)).unwrap(), accepting.join().unwrap())
    });
    ours.never_wait().unwrap();
    let mut partial = Vec::new();
    for number in 1..4 {
        assert_eq!(ours.receive_arrived(&mut partial).unwrap(), None);
        theirs.send_signal(Kind::Heartbeat, Epoch(number)).unwrap();
        let arrived = loop {
            if let Some(message) = ours.receive_arrived(&mut partial).unwrap() {
                break message;
            }
            thread::yield_now();
        };
        assert_eq!(arrived.header.epoch, Epoch(number));
    }
}

/// Regression: a certificate was good until it expired.
#[test]
fn a_revoked_certificate_is_refused_and_its_connections_end() {
    let authority = Authority::new();
    let (a, b) = (authority.heedful("a"), authority.heedful("b"));
    assert_eq!(meet(&a, &b, "b"), (Ok(()), Ok(())));
    let (dialled, accepted) = sockets();
    let (ours, _theirs) = thread::scope(|scope| {
        let accepting = scope.spawn(|| Link::accepted(accepted, Some(&b)).unwrap());
        (Link::dialled(dialled, &literal("b"), Some(&a)).unwrap(), accepting.join().unwrap())
    });
    assert_eq!(b.refresh().unwrap(), None);
    pki::revoke(authority.0.path(), "a").unwrap();
    assert_eq!(b.refresh().unwrap(), Some(1), "the connection that there was");
    assert!(ours.receive().unwrap_err().to_string().contains("closed"));
    let (dialler, acceptor) = meet(&a, &b, "b");
    assert_says(dialler, "this host's certificate has been revoked");
    assert_says(acceptor, "it has been revoked");
    // It is refused where it answers, too.
    let (dialler, _) = meet(&b, &a, "a");
    assert_says(dialler, "it has been revoked");
    // Who is revoked is told so by its own list.
    assert_eq!(a.refresh().unwrap(), Some(0));
    assert!(a.problems().iter().any(|problem| problem.contains("is revoked")));
}

/// A connection that is passed on: the next process has its own handshake, and nothing of the first.
#[test]
fn a_connection_begins_anew_with_another_process() {
    let authority = Authority::new();
    let (a, b) = (authority.issue("a"), authority.issue("b"));
    let (dialled, accepted) = sockets();
    thread::scope(|scope| {
        let serving = scope.spawn(|| {
            let first = Link::accepted(accepted, Some(&b)).unwrap();
            assert_eq!(first.receive().unwrap().header.epoch, Epoch(1));
            first.check_at_rest().unwrap();
            let passed = TcpStream::from(first.as_fd().try_clone_to_owned().unwrap());
            first.send_signal(Kind::BeginAnew, Epoch(0)).unwrap();
            drop(first);
            let second = Link::accepted(passed, Some(&b)).unwrap();
            second.check_peer(&literal("a")).unwrap();
            second.receive().unwrap().header.epoch
        });
        let link = Link::dialled(dialled, &literal("b"), Some(&a)).unwrap();
        link.send_signal(Kind::Hello, Epoch(1)).unwrap();
        assert_eq!(link.receive().unwrap().header.kind, Kind::BeginAnew);
        let link = link.begin_anew(&literal("b"), Some(&a)).unwrap();
        link.send_signal(Kind::Hello, Epoch(2)).unwrap();
        assert_eq!(serving.join().unwrap(), Epoch(2));
    });
}

#[test]
fn a_peer_that_goes_on_before_it_is_answered_is_noticed() {
    let authority = Authority::new();
    let (a, b) = (authority.issue("a"), authority.issue("b"));
    let (dialled, accepted) = sockets();
    thread::scope(|scope| {
        let serving = scope.spawn(|| {
            let link = Link::accepted(accepted, Some(&b)).unwrap();
            link.receive().unwrap();
            link.check_at_rest()
        });
        let link = Link::dialled(dialled, &literal("b"), Some(&a)).unwrap();
        // Both are in one segment.
        let hello = Header::for_payload(Kind::Hello, Epoch(1), &[]).unwrap();
        link.send_with(&hello, &[], Next::Message).unwrap();
        link.send_signal(Kind::Prepare, Epoch(0)).unwrap();
        let error = serving.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("before it was answered"), "{error}");
    });
}
