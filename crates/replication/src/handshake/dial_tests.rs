//! Tests of which address is taken, and of who goes on with a keeper.

use super::super::{Welcome, answer};
use super::*;
use serde_json::json;

fn identity(keepers: bool) -> Identity {
    Identity { name: "a".parse().unwrap(), tls: None, keepers }
}

/// Hosts without keepers say what they always said.
#[test]
fn keepers_are_offered_by_those_that_have_them_alone() {
    let said = serde_json::to_value(identity(true).hello(Purpose::Probe)).unwrap();
    assert_eq!(said.get("keeper_of"), None);
    let mut offering = said;
    offering["keeper_of"] = json!("db");
    let read: Hello = serde_json::from_value(offering.clone()).unwrap();
    assert_eq!(read.keeper_of.unwrap().as_str(), "db");
    offering["keeper_of"] = json!("../db");
    assert!(serde_json::from_value::<Hello>(offering).is_err());
}

fn addresses<const N: usize>() -> [SocketAddr; N] {
    std::array::from_fn(|path| SocketAddr::from(([192, 0, 2, path as u8], 7)))
}

// Before, a survey had used all of its time up where the first path was dead.
#[test]
fn a_dead_path_takes_no_time_from_one_that_is_not() {
    let (leave, dead) = crossbeam_channel::bounded::<()>(0);
    let reach = move |address: SocketAddr| match address == addresses::<2>()[0] {
        true => Err(dead.recv().unwrap_err().into()),
        false => Ok(address),
    };
    let reached = first_reached(&addresses::<2>(), Duration::from_millis(1), reach).unwrap();
    assert_eq!(reached, (addresses::<2>()[1], PathIndex(1)));
    drop(leave);
}

#[test]
fn the_first_path_is_taken_where_it_answers_and_refusals_are_not_waited_for() {
    let (note, tried) = crossbeam_channel::unbounded();
    let reach = move |address: SocketAddr| {
        note.send(address)?;
        anyhow::ensure!(address != addresses::<3>()[0], "refused");
        Ok(())
    };
    // However loaded the machine is, what is tried next is not tried for want of time.
    let stagger = Duration::from_secs(60);
    let begun = std::time::Instant::now();
    let reached = first_reached(&addresses::<3>(), stagger, reach.clone());
    assert_eq!(reached.unwrap(), ((), PathIndex(1)));
    assert!(begun.elapsed() < stagger);
    assert_eq!(tried.try_iter().collect::<Vec<_>>(), addresses::<3>()[..2], "no third");
    let error = first_reached(&addresses::<1>(), stagger, reach.clone()).unwrap_err();
    assert_eq!(error.to_string(), "refused");
    assert!(first_reached(&[], stagger, reach).unwrap_err().to_string().contains("no address"));
}

/// The answer that a dialler about a VM gets from a peer that has a keeper of it.
fn ask(keepers: bool) -> anyhow::Result<Welcome> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let serving = std::thread::spawn(move || -> anyhow::Result<()> {
        let socket = listener.accept()?.0;
        let link = Link::accepted(socket.try_clone()?, None)?;
        let hello = answer(&link)?.context("no hello")?;
        assert_eq!(hello.keeper_of.is_some(), keepers);
        link.send_signal(Kind::BeginAnew, understudy_protocol::Epoch(0))?;
        drop(link);
        let keeper = Link::accepted(socket, None)?;
        // It hangs up if it cannot go on with a keeper.
        let again = answer(&keeper)?.context("no second hello")?;
        keeper.send_json(Kind::Welcome, &Welcome::of(&again.host))
    });
    let (vm, peer) = ("db".parse()?, "b".parse()?);
    let asked = identity(keepers).ask(
        &vm,
        (&peer, &[address]),
        |_| Purpose::Inbound { session: "s".to_owned() },
        Duration::from_secs(20),
    );
    let asked = asked.map(|(_, path, welcome)| {
        assert_eq!(path, PathIndex(0));
        welcome
    });
    let served = serving.join().unwrap();
    assert_eq!(served.is_ok(), asked.is_ok());
    asked
}

#[test]
fn a_dialler_goes_on_with_a_keeper_if_it_has_said_that_it_can() {
    assert_eq!(ask(true).unwrap().host.as_str(), "a");
    let error = ask(false).unwrap_err().to_string();
    assert!(error.contains("BeginAnew where Welcome was due"), "{error}");
}
