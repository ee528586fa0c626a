//! Connections of other hosts before, and just after, it is known whose they are: a flood of them,
//! slow ones, and ones of hosts that this one does not know.

use crate::peer::{MadeUpPeer, message, read, refusal_of};
use crate::refusals::{definition, says, with_peers, write};
use crate::stage::{
    Calm, LIMIT, daemon_with_peers, options, play, play_protected, prove_survival, refusal,
};
use anyhow::{Context, Result, ensure};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use understudy_lab::scene::VM;
use understudy_lab::{HostOptions, Namespace, PEER_PORT, Scene, in_namespace, wait_for};
use understudy_protocol::wire::Kind;

/// Connections that say nothing, all open at once as far as the daemon lets them.
const IDLE: usize = 5_000;
/// The number of these that may be open: the places of known hosts and of strangers, and a few.
const MOST_OPEN: usize = 340;

fn entries(scene: &Scene, host: &str, of: &str) -> Result<usize> {
    let path = format!("/proc/{}/{of}", scene.host(host)?.pid());
    Ok(fs::read_dir(&path).with_context(|| path.clone())?.count())
}

/// The route of connections: where they come from, and where they go.
struct Route(Namespace, SocketAddr);

impl Route {
    fn new(scene: &Scene, from: Namespace, host: &str) -> Result<Route> {
        Ok(Route(from, SocketAddr::from((scene.lab().host_address(host)?, PEER_PORT))))
    }

    fn connect(&self) -> Result<TcpStream> {
        Ok(in_namespace(&self.0, || TcpStream::connect(self.1))??)
    }

    /// Sends a byte of a TLS record now and then, on a new connection when one is ended.
    fn drip(&self, over: &AtomicBool) -> Result<usize> {
        let mut ended = 0;
        while !over.load(Ordering::Acquire) {
            let mut stream = self.connect()?;
            // The beginning of a handshake record that is never whole.
            let mut bytes = [22, 3, 3, 0x3f, 0xff].into_iter().chain(std::iter::repeat(0));
            while stream.write_all(&[bytes.next().unwrap_or(0)]).is_ok() {
                if over.load(Ordering::Acquire) {
                    return Ok(ended);
                }
                thread::sleep(Duration::from_millis(50));
            }
            ended += 1;
        }
        Ok(ended)
    }

    /// Keeps all the daemon's places taken: a connection that is ended is followed by another.
    fn crowd(&self, over: &AtomicBool) -> Result<usize> {
        let (mut crowd, mut ended) = (Vec::new(), 0);
        while !over.load(Ordering::Acquire) {
            match crowd.len() < MOST_OPEN {
                true => crowd.push(self.connect()?),
                false => thread::sleep(Duration::from_millis(5)),
            }
            let before = crowd.len();
            crowd.retain(|stream| !is_closed(stream));
            ended += before - crowd.len();
        }
        Ok(ended)
    }
}

/// Each of these connections once had a thread and a descriptor of the backup's for as long as
/// it liked: at the usual limit of 1024 the backup had none left for the arbiter or its QEMU.
#[test]
fn a_flood_of_connections_keeps_no_backup_from_taking_over() {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("the limit of open files");
    assert!(hard > IDLE as u64 + 1_000, "this test needs more open files: `ulimit -Hn`");
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).expect("own limit can be raised");
    play_protected(options().calm(), |scene, client| {
        let before = [entries(scene, "b", "fd")?, entries(scene, "b", "task")?];
        let stranger = Route::new(scene, scene.lab().client(), "b")?;
        let peer = Route::new(scene, scene.lab().host("a")?, "b")?;
        // Some from the address of a host that the backup knows.
        let route = |number: usize| if number % 5 == 0 { &peer } else { &stranger };
        let idle: Vec<_> =
            (0..IDLE).map(|number| route(number).connect()).collect::<Result<_>>()?;
        let over = AtomicBool::new(false);
        let (slow, replaced) = thread::scope(|scope| {
            let dripping = scope.spawn(|| stranger.drip(&over));
            let crowds = [&stranger, &peer].map(|route| scope.spawn(|| route.crowd(&over)));
            let told = endure(scene, &idle, before);
            over.store(true, Ordering::Release);
            let slow = dripping.join().expect("no panic")?;
            let mut replaced = 0;
            for crowd in crowds {
                replaced += crowd.join().expect("no panic")?;
            }
            told.map(|()| (slow, replaced))
        })?;
        println!("{slow} slow handshakes and {replaced} idle connections were ended meanwhile");
        ensure!(replaced > 0, "nothing was crowded out: the flood was over before the take-over");
        prove_survival(scene, client, "b")
    });
}

/// The flood goes on, up to and through the take-over, and is bounded; host a dies.
fn endure(scene: &mut Scene, idle: &[TcpStream], before: [usize; 2]) -> Result<()> {
    wait_for("most of the idle connections to be ended", LIMIT, || {
        let open = idle.iter().filter(|stream| !is_closed(stream)).count();
        Ok((open < MOST_OPEN).then_some(()))
    })?;
    // What its client sees closed may have its thread for a moment yet.
    wait_for("descriptors and threads to be few", LIMIT, || {
        let after = [entries(scene, "b", "fd")?, entries(scene, "b", "task")?];
        println!("{IDLE} idle connections: descriptors, threads {before:?} then {after:?}");
        let few = after[0] < before[0] + 2 * MOST_OPEN && after[1] < before[1] + MOST_OPEN;
        Ok(few.then_some(()))
    })?;
    scene.await_protected("a", |_| ())?;
    scene.host_mut("a")?.kill_everything()?;
    let died = Instant::now();
    scene.await_live("b")?;
    println!("b runs the guest {:.2} s after its host died", died.elapsed().as_secs_f64());
    Ok(())
}

fn is_closed(stream: &TcpStream) -> bool {
    let looked = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
    !matches!(&looked, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
}

/// A genuine offer of host a's guest, made to a peer that only reads it.
fn genuine_offer(scene: &Scene) -> Result<Value> {
    scene.start_guest("a")?;
    let peer = MadeUpPeer::start(scene, message(Kind::Refuse, b"only asking"))?;
    refusal(scene.host("a")?, &["protect", VM, "--to", "madeup"])?;
    peer.hello()
}

fn hello(offer: &Value) -> Result<Vec<u8>> {
    Ok(message(Kind::Hello, &serde_json::to_vec(offer)?))
}

/// The command `vm start` once waited for as long as the primary took to send its kernel.
#[test]
fn a_vm_starts_while_a_primary_sends_its_kernel_byte_by_byte() {
    play(with_peers(), |scene| {
        let mut offer = genuine_offer(scene)?;
        offer["purpose"]["definition"]["kernel"] = json!("/boot/vmlinuz");
        offer["purpose"]["files"] = json!([{ "role": "kernel", "bytes": 1 << 20 }]);
        let mut primary = Route::new(scene, scene.lab().client(), "b")?.connect()?;
        primary.write_all(&hello(&offer)?)?;
        let answer = read(&mut primary)?;
        ensure!(answer.header.kind == Kind::Welcome, "{answer:?}");
        primary.write_all(&message(Kind::File, b"k"))?;
        let other = write(scene, "other.toml", &definition(scene, "other")?)?;
        scene.host("b")?.call(["vm", "start", &other.to_string_lossy()])?;
        // Its own name is taken all the while.
        let again = refusal_of(scene, "b", &hello(&offer)?)?;
        says(&again, &["is about to back up", "host a"])?;
        primary.write_all(&message(Kind::File, b"k"))?;
        ensure!(!is_closed(&primary), "the primary was hung up: nothing was shown");
        Ok(())
    });
}

/// A host with a certificate of the authority was once answered, whoever it was.
#[test]
fn hosts_that_are_not_known_or_do_not_own_the_vm_are_refused() {
    let mut options = with_peers();
    let peers = "a = \"10.77.0.1:7700\"\nc = \"10.77.0.9:7700\"";
    let daemon = HostOptions { insecure: true, ..daemon_with_peers(peers) };
    options.daemons.insert("b".to_owned(), daemon);
    play(options, |scene| {
        let mut offer = genuine_offer(scene)?;
        offer["host"] = json!("mallory");
        let unknown = ["host b refuses", "host mallory is not known", "[peers]"];
        says(&refusal_of(scene, "b", &hello(&offer)?)?, &unknown)?;
        offer["host"] = json!("c");
        says(&refusal_of(scene, "b", &hello(&offer)?)?, &["does not say that c owns"])?;
        offer["host"] = json!("mallory");
        let cpu = json!({ "accelerator": "tcg", "model": null });
        offer["purpose"] =
            json!({ "purpose": "survey", "vm": VM, "memory": 1, "cpu": cpu, "cards": [] });
        says(&refusal_of(scene, "b", &hello(&offer)?)?, &unknown)
    });
}
