//! Clients that misbehave: the server drops them and goes on serving the others.

mod common;

use common::{MIB, Numbers, Served};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

const WRITE: u16 = 1;
const FLUSH: u16 = 3;

/// A client that has entered transmission by EXPORT_NAME.
fn connect(served: &Served) -> UnixStream {
    let mut stream = UnixStream::connect(served.server().socket()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    stream.write_all(&[0, 0, 0, 3]).unwrap();
    stream.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
    stream.read_exact(&mut [0; 10]).unwrap();
    stream
}

fn request(command: u16, handle: u64, offset: u64, length: u32) -> Vec<u8> {
    let mut bytes = vec![0x25, 0x60, 0x95, 0x13, 0, 0];
    bytes.extend(command.to_be_bytes());
    bytes.extend(handle.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(length.to_be_bytes());
    bytes
}

/// Error number and handle of the next reply.
fn reply(stream: &mut UnixStream) -> (u32, u64) {
    let mut bytes = [0; 16];
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(bytes[..4], [0x67, 0x44, 0x66, 0x98]);
    let status = u32::from_be_bytes(bytes[4..8].try_into().unwrap());
    (status, u64::from_be_bytes(bytes[8..].try_into().unwrap()))
}

fn assert_dropped(mut stream: UnixStream) {
    let mut rest = Vec::new();
    // A reset is as good an end as a hang-up.
    let _ = stream.read_to_end(&mut rest);
    assert!(rest.is_empty(), "no reply, but {rest:?}");
}

#[test]
fn a_refused_request_leaves_the_connection_in_step() {
    let served = Served::empty(MIB);
    let mut stream = connect(&served);
    stream.write_all(&request(WRITE, 1, MIB, 4)).unwrap();
    stream.write_all(b"data").unwrap();
    assert_eq!(reply(&mut stream), (28, 1), "ENOSPC");
    stream.write_all(&request(99, 2, 0, 4)).unwrap();
    assert_eq!(reply(&mut stream), (22, 2), "EINVAL");
    stream.write_all(&request(0, 3, 0, u32::MAX)).unwrap();
    assert_eq!(reply(&mut stream), (22, 3), "EINVAL");
    stream.write_all(&request(FLUSH, 4, 0, 0)).unwrap();
    assert_eq!(reply(&mut stream), (0, 4));
}

#[test]
fn nonsense_and_oversized_writes_are_dropped() {
    let served = Served::empty(MIB);
    let mut oversized = connect(&served);
    oversized.write_all(&request(WRITE, 1, 0, (32 << 20) + 1)).unwrap();
    assert_dropped(oversized);
    let mut nonsense = connect(&served);
    nonsense.write_all(&[0x55; 28]).unwrap();
    assert_dropped(nonsense);
    served.io(&["write -P 1 0 4k", "read -P 1 0 4k"]);
}

#[test]
fn a_write_cut_short_changes_nothing() {
    let served = Served::empty(MIB);
    let mut stream = connect(&served);
    stream.write_all(&request(WRITE, 1, 0, 4096)).unwrap();
    stream.write_all(&[1; 4095]).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert_dropped(stream);
    served.io(&["read -P 0 0 4k"]);
}

#[test]
fn random_bytes_at_any_stage_do_not_stop_the_server() {
    let served = Served::empty(MIB);
    let mut numbers = Numbers(4711);
    for round in 0..60 {
        let mut stream = match round % 3 {
            0 => UnixStream::connect(served.server().socket()).unwrap(),
            _ => connect(&served),
        };
        let mut bytes = numbers.bytes(1 + round * 7);
        if round % 3 == 2 {
            let mut sound = request((round % 8) as u16, 0, numbers.below(2 * MIB), 512);
            sound.append(&mut bytes);
            bytes = sound;
        }
        // The server may hang up before it has read all of it.
        let _ = stream.write_all(&bytes);
    }
    served.io(&["write -P 1 0 4k", "read -P 1 0 4k"]);
}

#[test]
fn dropping_the_server_ends_connections_at_every_stage() {
    let mut served = Served::empty(MIB);
    let greeted = UnixStream::connect(served.server().socket()).unwrap();
    let idle = connect(&served);
    let mut halfway = connect(&served);
    halfway.write_all(&request(WRITE, 1, 0, 4096)[..20]).unwrap();
    drop(served.server.take());
    let mut greeting = Vec::new();
    let _ = (&greeted).read_to_end(&mut greeting);
    assert_dropped(idle);
    assert_dropped(halfway);
}

#[test]
fn too_many_clients_are_turned_away_and_places_come_free() {
    let served = Served::empty(MIB);
    let clients: Vec<_> = (0..16).map(|_| connect(&served)).collect();
    assert_dropped(UnixStream::connect(served.server().socket()).unwrap());
    for client in clients {
        client.shutdown(std::net::Shutdown::Both).unwrap();
    }
    // The server notices the hang-ups in its own time.
    let deadline = std::time::Instant::now() + Duration::from_secs(20);
    loop {
        let mut stream = UnixStream::connect(served.server().socket()).unwrap();
        if stream.read_exact(&mut [0; 18]).is_ok() {
            break;
        }
        assert!(std::time::Instant::now() < deadline, "no place came free");
    }
}
