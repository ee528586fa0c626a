//! The clients against real TCP servers across the laboratory's switch.

mod fixture;

use fixture::{answer_lines, echo, guest, records};
use std::net::TcpStream;
use std::time::{Duration, Instant};
use understudy_lab::{
    ChatterClient, ConversationError, GuestOutput, GuestShell, Lab, Load, RecordClient,
    RecordReport, wait_for,
};

const LIMIT: Duration = Duration::from_secs(120);

fn start(lab: &Lab, serve: fn(TcpStream)) -> RecordClient {
    RecordClient::start(lab, guest(lab, "a", serve), Duration::ZERO).unwrap()
}

fn await_acks(client: &RecordClient, more: u64) {
    let goal = client.acked() + more;
    wait_for("acknowledgements", LIMIT, || Ok((client.acked() >= goal).then_some(()))).unwrap();
}

/// The report of a client whose server does wrong.
fn failure(serve: fn(TcpStream)) -> RecordReport {
    let lab = Lab::new(&["a"]).unwrap();
    let client = start(&lab, serve);
    wait_for("the failure", LIMIT, || Ok(client.failed().then_some(()))).unwrap();
    let report = client.stop();
    assert!(!report.connection_survived());
    report
}

#[test]
fn a_record_client_lives_through_a_cut_and_measures_it() {
    let lab = Lab::new(&["a"]).unwrap();
    let client = start(&lab, records);
    await_acks(&client, 20);
    lab.cut("a").unwrap();
    let cut_at = Instant::now();
    // Long enough to be told from the pace of a busy machine.
    std::thread::sleep(Duration::from_millis(400));
    let before_heal = Instant::now();
    lab.heal("a").unwrap();
    await_acks(&client, 20);
    let report = client.stop();
    assert!(report.connection_survived(), "{:?}", report.error());
    // A busy machine's client may have read the last one a while after the cut.
    let last = report.acks().filter(|ack| ack.at <= before_heal).last().unwrap().at;
    assert!(report.outage(cut_at).unwrap() >= before_heal - last);
    assert!(report.longest_gap() >= report.outage(cut_at).unwrap());
    let numbers: Vec<u64> = report.acks().map(|ack| ack.number).collect();
    assert_eq!(numbers, (1..=report.acked()).collect::<Vec<_>>());
    assert!(report.acks().zip(report.acks().skip(1)).all(|(one, next)| one.at <= next.at));
}

#[test]
fn a_paced_client_keeps_its_distance() {
    let lab = Lab::new(&["a"]).unwrap();
    let pace = Duration::from_millis(30);
    let begun = Instant::now();
    let client = RecordClient::start(&lab, guest(&lab, "a", records), pace).unwrap();
    await_acks(&client, 5);
    assert!(begun.elapsed() >= pace * 4);
    assert!(client.stop().connection_survived());
}

#[test]
fn a_closed_connection_is_not_opened_again() {
    let report = failure(drop);
    assert_eq!(report.acked(), 0);
    assert!(matches!(report.error(), Some(ConversationError::Broken { round: 1, .. })));
}

#[test]
fn a_wrong_acknowledgement_is_an_error() {
    let report = failure(|connection| answer_lines(connection, |_| b"ok 1\n".to_vec()));
    assert_eq!(report.acked(), 1);
    let error = report.error().unwrap().to_string();
    assert!(error.contains("expected `ok 2") && error.contains("round 2"), "{error}");
}

#[test]
fn a_refusal_shorter_than_the_right_answer_is_told_at_once() {
    let report = failure(|connection| answer_lines(connection, |_| b"e\n".to_vec()));
    assert!(matches!(report.error(), Some(ConversationError::WrongAnswer { round: 1, .. })));
}

#[test]
fn many_connections_carry_verified_bytes() {
    let lab = Lab::new(&["a"]).unwrap();
    let pings =
        ChatterClient::start(&lab, guest(&lab, "a", records), 8, Load::Pings, Duration::ZERO)
            .unwrap();
    let bulk = Load::Bulk(100_000);
    let bulk = ChatterClient::start(&lab, guest(&lab, "a", echo), 2, bulk, Duration::ZERO).unwrap();
    for client in [&pings, &bulk] {
        let enough = || Ok((client.least_rounds() >= 5).then_some(()));
        wait_for("five rounds on each connection", LIMIT, enough).unwrap();
    }
    for (client, least) in [(pings, 40), (bulk, 10)] {
        let report = client.stop();
        assert!(report.errors().is_empty(), "{:?}", report.errors());
        assert!(report.rounds() >= least && report.longest_gap() > Duration::ZERO);
    }
}

#[test]
fn one_changed_byte_is_found() {
    let lab = Lab::new(&["a"]).unwrap();
    let swap = |connection| answer_lines(connection, |_| b"pong 0000000000000000\n".to_vec());
    let client =
        ChatterClient::start(&lab, guest(&lab, "a", swap), 1, Load::Pings, Duration::ZERO).unwrap();
    let report = client.stop();
    assert!(matches!(report.errors()[..], [ConversationError::WrongAnswer { .. }]));
}

#[test]
fn shell_lines_give_their_output() {
    let lab = Lab::new(&["a"]).unwrap();
    let serve = |connection| {
        answer_lines(connection, |line| match line {
            "wait printf abc" => b"exit 3 3\nabc".to_vec(),
            "sleep 1" => b"started 17\n".to_vec(),
            _ => b"error: cannot run\n".to_vec(),
        });
    };
    let mut shell = GuestShell::connect(&lab, guest(&lab, "a", serve)).unwrap();
    assert_eq!(shell.start("sleep 1").unwrap(), 17);
    let expected = GuestOutput { code: 3, text: "abc".to_owned() };
    assert_eq!(shell.run("printf abc").unwrap(), expected);
    assert!(shell.start("what").unwrap_err().to_string().contains("cannot run"));
    assert!(shell.run("two\nlines").unwrap_err().to_string().contains("one line"));
}
