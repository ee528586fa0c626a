use super::*;
use serde_json::json;
use std::sync::mpsc;
use std::thread;

const TIMEOUT: Duration = Duration::from_secs(30);
const GREETING: &str = r#"{"QMP": {"version": {"qemu": {"micro": 2, "minor": 0, "major": 10}, "package": ""}, "capabilities": ["oob"]}}"#;

/// A connection to something that greets, then answers every command with the
/// next of these texts, then hangs up; and the commands that it got.
fn connected_to(answers: &'static [&str]) -> (Connection, mpsc::Receiver<Value>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (sender, commands) = mpsc::channel();
    thread::spawn(move || {
        let mut writer = theirs.try_clone().unwrap();
        let mut received = serde_json::Deserializer::from_reader(theirs).into_iter::<Value>();
        writeln!(writer, "{GREETING}").unwrap();
        for answer in ["{\"return\": {}}"].iter().chain(answers) {
            let Some(Ok(command)) = received.next() else { return };
            sender.send(command).unwrap();
            write!(writer, "{answer}\r\n").unwrap();
        }
    });
    let (connection, _) = Connection::open(ours, TIMEOUT).unwrap();
    assert_eq!(commands.recv().unwrap()["execute"], "qmp_capabilities");
    (connection, commands)
}

fn stop(connection: &mut Connection) -> Result<Empty, QmpError> {
    connection.execute(&qapi::qmp::stop {})
}

#[test]
fn events_are_not_taken_for_answers() {
    let (mut connection, _commands) = connected_to(&[concat!(
        r#"{"timestamp": {"seconds": 1, "microseconds": 2}, "event": "FROM_THE_FUTURE"}"#,
        "\n",
        r#"{"return": {}}"#
    )]);
    stop(&mut connection).unwrap();
}

#[test]
fn refusals_carry_the_reason() {
    let (mut connection, _commands) =
        connected_to(&[r#"{"error": {"class": "GenericError", "desc": "not now"}}"#]);
    let error = stop(&mut connection).unwrap_err().to_string();
    assert_eq!(error, "QEMU refused \"stop\": not now");
}

#[test]
fn nonsense_and_hang_ups_are_errors() {
    for nonsense in ["{\"retur", "[]", "{}", "\u{0}"] {
        let answers: &'static [&str] = Box::leak(Box::new([nonsense]));
        let error = stop(&mut connected_to(answers).0).unwrap_err();
        assert!(matches!(error, QmpError::Malformed { command: "stop", .. }), "{error}");
    }
    // Seen when writing or when reading, as it happens.
    let (mut connection, _commands) = connected_to(&[]);
    assert!(matches!(stop(&mut connection).unwrap_err(), QmpError::Closed));
}

#[test]
fn abandoned_answers_are_not_taken_for_later_ones() {
    let (mut connection, _commands) = connected_to(&[
        r#"{"return": {}}"#,
        r#"{"error": {"class": "GenericError", "desc": "abandoned"}}"#,
        r#"{"return": {"running": true}}"#,
    ]);
    connection.push(&qapi::qmp::stop {}).unwrap();
    connection.push(&qapi::qmp::cont {}).unwrap();
    connection.flush().unwrap();
    let status: Value = connection.execute(&qapi::qmp::query_status {}).unwrap();
    assert_eq!(status["running"], true);
}

#[test]
fn a_primed_command_is_one_only_when_fired() {
    const DONE: &str = r#"{"return": {}}"#;
    let (mut connection, commands) = connected_to(&[DONE, DONE]);
    connection.prime(&qapi::qmp::stop {}).unwrap();
    connection.prime(&qapi::qmp::stop {}).unwrap();
    connection.flush().unwrap();
    assert!(connection.is_primed("stop") && commands.try_recv().is_err());
    connection.fire();
    connection.prime(&qapi::qmp::cont {}).unwrap();
    connection.flush().unwrap();
    connection.reply::<Empty>("stop").unwrap();
    assert_eq!(commands.recv().unwrap(), json!({"execute": "stop"}));
    connection.fire();
    connection.flush().unwrap();
    connection.reply::<Empty>("cont").unwrap();
    assert_eq!(commands.recv().unwrap(), json!({"execute": "cont"}));
}

#[test]
fn a_primed_command_that_is_not_wanted_is_spoilt() {
    let (mut connection, commands) = connected_to(&[
        r#"{"error": {"class": "GenericError", "desc": "QMP input member 'disarmed' is unexpected"}}"#,
        r#"{"return": {"running": true}}"#,
    ]);
    connection.prime(&qapi::qmp::stop {}).unwrap();
    connection.flush().unwrap();
    let status: Value = connection.execute(&qapi::qmp::query_status {}).unwrap();
    assert_eq!(status["running"], true);
    assert_eq!(commands.recv().unwrap(), json!({"execute": "stop", "disarmed": 0}));
    assert_eq!(commands.recv().unwrap(), json!({"execute": "query-status"}));
}

#[test]
fn silence_is_a_timeout() {
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let error = Connection::open(ours, Duration::from_millis(1)).unwrap_err();
    assert!(matches!(error, QmpError::Timeout { command: "greeting", .. }), "{error}");
}

/// Another process has left a command and an answer half done.
#[test]
fn a_connection_of_another_process_is_caught_up_with() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let asked = thread::spawn(move || {
        let mut lines = theirs.try_clone().unwrap();
        lines.write_all(b"rest\": {}}\r\n{\"return\": {\"former\": 1}}\r\n").unwrap();
        let mut received = Vec::new();
        let mut reader = BufReader::new(theirs);
        reader.read_until(b'}', &mut received).unwrap();
        for line in [
            r#"{"error": {"class": "GenericError", "desc": "JSON parse error"}}"#,
            r#"{"event": "RESUME", "data": {}}"#,
            r#"{"return": {}, "id": "catch-up"}"#,
            r#"{"return": {}}"#,
        ] {
            lines.write_all(format!("{line}\r\n").as_bytes()).unwrap();
        }
        // The socket is not closed before the second command is written.
        reader.read_until(b'}', &mut Vec::new()).unwrap();
        received
    });
    let mut connection = Connection::adopt(ours, TIMEOUT).unwrap();
    connection.catch_up().unwrap();
    stop(&mut connection).unwrap();
    let received = asked.join().unwrap();
    assert_eq!(received[0], FORGET);
    let command: Value = serde_json::from_slice(&received[1..]).unwrap();
    assert_eq!(command["id"], "catch-up");
}
