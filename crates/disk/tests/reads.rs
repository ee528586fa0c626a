//! Reads in lockstep: what one server's gave answers those of another, which has nothing of it.

mod common;

use common::{MIB, Served};
use std::io;
use std::sync::{Arc, Mutex};
use understudy_disk::{AwaitedRead, ReadFollower, ReadRecorder, Reads, Span};
use understudy_protocol::DiskIndex;

type Given = (u64, Span, Result<Vec<u8>, u32>);

/// Keeps what reads gave.
#[derive(Default)]
struct Recorder(Mutex<(u64, Vec<Given>)>);

impl ReadRecorder for Recorder {
    fn came(&self, _: DiskIndex) -> u64 {
        let mut state = self.0.lock().unwrap();
        state.0 += 1;
        state.0 - 1
    }

    fn gave(&self, _: DiskIndex, number: u64, at: Span, outcome: Result<&[u8], u32>) {
        self.0.lock().unwrap().1.push((number, at, outcome.map(<[u8]>::to_vec)));
    }

    fn let_pass(&self) {}
}

/// Answers with what was kept, in its order; afterwards from the image.
struct Follower(Mutex<std::vec::IntoIter<Given>>);

impl ReadFollower for Follower {
    fn came(&self, read: AwaitedRead) -> Option<AwaitedRead> {
        let Some((_, at, outcome)) = self.0.lock().unwrap().next() else { return Some(read) };
        assert_eq!(at, read.span());
        read.answer(outcome.as_deref().map_err(|&error| error));
        None
    }

    fn failed(&self, _: DiskIndex, at: Span, error: &io::Error) {
        panic!("{at:?}: {error}");
    }
}

fn following(served: &Served, given: Vec<Given>) {
    let follower = Follower(Mutex::new(given.into_iter()));
    served.disk.set_reads(Reads::Followed(Arc::new(follower)));
}

#[test]
fn reads_of_one_server_answer_those_of_another() {
    let primary = Served::empty(MIB);
    let recorder = Arc::new(Recorder::default());
    primary.io(&["write -P 7 0 64k"]);
    primary.disk.set_reads(Reads::Recorded(recorder.clone()));
    let reads = ["read -P 7 4k 8k", "read -P 0 128k 512", "read -P 7 0 64k"];
    primary.io(&reads);
    let given = std::mem::take(&mut recorder.0.lock().unwrap().1);
    assert_eq!(given.iter().map(|given| given.0).collect::<Vec<_>>(), [0, 1, 2]);

    let backup = Served::empty(MIB);
    following(&backup, given);
    backup.io(&reads);
    // What nobody knows is read here.
    backup.io(&["read -P 0 4k 8k"]);
}

#[test]
fn an_error_is_that_of_the_other_server() {
    let backup = Served::empty(MIB);
    following(&backup, vec![(0, Span { offset: 0, length: 4096 }, Err(5))]);
    let output = common::qemu_io(&backup.uri(), &["read 0 4k", "read -P 0 0 4k"]);
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("Input/output error") && said.contains("read 4096/4096"), "{said}");
}
