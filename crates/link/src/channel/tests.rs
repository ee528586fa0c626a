//! Data on whichever connection there is.

use super::*;
use crossbeam_channel::bounded;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use understudy_protocol::literal;

fn pair() -> (Link, Link) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let dialled = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (accepted, _) = listener.accept().unwrap();
    let ours = Link::dialled(dialled, &literal("b"), None).unwrap();
    let theirs = Link::accepted(accepted, None).unwrap();
    for link in [&ours, &theirs] {
        link.set_read_timeout(None).unwrap();
    }
    (ours, theirs)
}

/// A primary's and a backup's end; a dial reaches the backup at once.
fn channels() -> (Arc<Channel>, Arc<Channel>) {
    let (ours, theirs) = pair();
    let backup = Channel::new(theirs, Renewal::Await);
    let accepting = backup.clone();
    let dial: Dial = Box::new(move |count| {
        let (ours, theirs) = pair();
        let (sender, receiver) = bounded(1);
        let backup = accepting.clone();
        thread::spawn(move || {
            let answer = |count| Ok(sender.send(count)?);
            backup.resume(&theirs, count, answer)
        });
        Ok(Some((ours, receiver.recv()?)))
    });
    (Channel::new(ours, Renewal::Dial(dial)), backup)
}

fn send_numbers(channel: &Channel, count: u64, bytes: usize) {
    let payload = vec![7; bytes];
    for number in 0..count {
        channel.send_parts(Kind::Pages, Epoch(number), &[&payload]).unwrap();
    }
}

#[test]
fn connections_break_and_nothing_is_lost_doubled_or_reordered() {
    // More than the window and the sockets hold, in both directions.
    const COUNT: u64 = 3000;
    const BYTES: usize = 40_000;
    let (primary, backup) = channels();
    let (at_primary, at_backup) = (AtomicU64::new(0), AtomicU64::new(0));
    let hear = |channel: &Arc<Channel>, heard: &AtomicU64| {
        for number in 0..COUNT {
            assert_eq!(channel.receive().unwrap().header.epoch, Epoch(number));
            heard.store(number + 1, Ordering::Relaxed);
        }
        // The primary's receiving thread is the one that dials.
        while channel.receive().is_ok() {}
    };
    thread::scope(|scope| {
        scope.spawn(|| send_numbers(&primary, COUNT, BYTES));
        scope.spawn(|| send_numbers(&backup, COUNT, BYTES));
        let ends = [
            scope.spawn(|| hear(&primary, &at_primary)),
            scope.spawn(|| hear(&backup, &at_backup)),
        ];
        let heard = || [&at_primary, &at_backup].map(|heard| heard.load(Ordering::Relaxed));
        let mut before = [0; 2];
        while heard() != [COUNT; 2] && !ends.iter().any(|end| end.is_finished()) {
            thread::sleep(Duration::from_millis(7));
            // Connections over which nothing comes at all are given up: a busy machine may take
            // longer than this to send something, and an end that has all gets nothing more.
            let now = heard();
            if (0..2).all(|end| now[end] > before[end]) {
                before = now;
                primary.abandon();
            }
        }
        primary.close();
        backup.close();
    });
}

#[test]
fn a_closed_channel_lets_everybody_go() {
    let (primary, backup) = channels();
    thread::scope(|scope| {
        // Nobody receives: the window fills, and the sender waits.
        let sender = scope
            .spawn(|| while primary.send_parts(Kind::Pages, Epoch(1), &[&[0; 1 << 20]]).is_ok() {});
        let receiver = scope.spawn(|| {
            backup.abandon();
            backup.receive().unwrap_err()
        });
        thread::sleep(Duration::from_millis(50));
        backup.close();
        primary.close();
        sender.join().unwrap();
        receiver.join().unwrap();
    });
}

#[test]
fn a_refusal_to_resume_is_final() {
    let (ours, theirs) = pair();
    let dial: Dial = Box::new(|_| Err(Refused("no such session".to_owned()).into()));
    let primary = Channel::new(ours, Renewal::Dial(dial));
    theirs.close();
    assert!(primary.receive().unwrap_err().to_string().contains("no such session"));
}

#[test]
fn a_single_path_breaks_with_its_connection() {
    let (ours, theirs) = pair();
    let channel = Channel::new(ours, Renewal::Never);
    theirs.close();
    assert!(channel.receive().is_err());
}
