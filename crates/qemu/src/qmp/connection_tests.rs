use super::*;
use std::thread;

const TIMEOUT: Duration = Duration::from_secs(30);
const GREETING: &str = r#"{"QMP": {"version": {"qemu": {"micro": 2, "minor": 0, "major": 10}, "package": ""}, "capabilities": ["oob"]}}"#;

/// A connection to something that greets, then answers every line with the next
/// of these texts, then hangs up.
fn connected_to(answers: &'static [&str]) -> Connection {
    let (ours, theirs) = UnixStream::pair().unwrap();
    thread::spawn(move || {
        let mut writer = theirs.try_clone().unwrap();
        let mut lines = BufReader::new(theirs).lines();
        writeln!(writer, "{GREETING}").unwrap();
        for answer in ["{\"return\": {}}"].iter().chain(answers) {
            if lines.next().is_none() {
                return;
            }
            write!(writer, "{answer}\r\n").unwrap();
        }
        lines.next();
    });
    Connection::open(ours, TIMEOUT).unwrap().0
}

fn stop(connection: &mut Connection) -> Result<Empty, QmpError> {
    connection.execute(&qapi::qmp::stop {})
}

#[test]
fn events_are_not_taken_for_answers() {
    let mut connection = connected_to(&[concat!(
        r#"{"timestamp": {"seconds": 1, "microseconds": 2}, "event": "FROM_THE_FUTURE"}"#,
        "\n",
        r#"{"return": {}}"#
    )]);
    stop(&mut connection).unwrap();
}

#[test]
fn refusals_carry_the_reason() {
    let mut connection =
        connected_to(&[r#"{"error": {"class": "GenericError", "desc": "not now"}}"#]);
    let error = stop(&mut connection).unwrap_err().to_string();
    assert_eq!(error, "QEMU refused \"stop\": not now");
}

#[test]
fn nonsense_and_hang_ups_are_errors() {
    for nonsense in ["{\"retur", "[]", "{}", "\u{0}"] {
        let answers: &'static [&str] = Box::leak(Box::new([nonsense]));
        let error = stop(&mut connected_to(answers)).unwrap_err();
        assert!(matches!(error, QmpError::Malformed { command: "stop", .. }), "{error}");
    }
    let mut connection = connected_to(&[]);
    connection.push(&qapi::qmp::stop {}).unwrap();
    connection.flush().unwrap();
    assert!(matches!(connection.reply::<Empty>("stop").unwrap_err(), QmpError::Closed));
}

#[test]
fn abandoned_answers_are_not_taken_for_later_ones() {
    let mut connection = connected_to(&[
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
fn silence_is_a_timeout() {
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let error = Connection::open(ours, Duration::from_millis(1)).unwrap_err();
    assert!(matches!(error, QmpError::Timeout { command: "greeting", .. }), "{error}");
}
