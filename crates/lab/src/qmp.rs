//! QEMU's monitor protocol for the laboratory's own QEMUs: commands as QEMU's
//! documents write them, and every event with QEMU's own time.

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Time for QEMU to answer a command; a QEMU that hangs must not hang its test.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);

/// A monitor for commands.
pub(crate) struct Qmp {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
    closed: bool,
}

impl Qmp {
    /// Waits for QEMU's greeting and enters the mode for commands.
    pub(crate) fn open(stream: UnixStream) -> Result<Qmp> {
        stream.set_read_timeout(Some(ANSWER_LIMIT))?;
        let (writer, reader) = (stream.try_clone()?, BufReader::new(stream));
        let mut qmp = Qmp { reader, writer, closed: false };
        let greeting = qmp.line().context("QEMU does not greet")?;
        ensure!(greeting["QMP"].is_object(), "this is no QEMU's greeting: {greeting}");
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Executes a command; events in between are left to [`Events`].
    pub(crate) fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let request = json!({"execute": command, "arguments": arguments});
        // A QEMU that is gone shows when its answer is read.
        let _ = writeln!(self.writer, "{request}");
        self.answer().with_context(|| format!("QEMU's answer to {request}"))
    }

    /// Whether QEMU has closed its monitor: it is ending, or has ended.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }

    fn answer(&mut self) -> Result<Value> {
        loop {
            let mut line = self.line()?;
            if let Some(error) = line.get("error") {
                bail!("refused: {}", error["desc"].as_str().unwrap_or_default());
            }
            if line.get("return").is_some() {
                return Ok(line["return"].take());
            }
        }
    }

    fn line(&mut self) -> Result<Value> {
        let line = read_line(&mut self.reader)?;
        self.closed |= line.is_none();
        line.context("QEMU has closed its monitor")
    }
}

/// The next line of a monitor; none at its end.
fn read_line(reader: &mut BufReader<UnixStream>) -> Result<Option<Value>> {
    let mut line = String::new();
    let length = match reader.read_line(&mut line) {
        Err(error) if error.kind() == ErrorKind::ConnectionReset => 0,
        Err(error) if error.kind() == ErrorKind::WouldBlock => bail!("none in {ANSWER_LIMIT:?}"),
        read => read?,
    };
    let parse = || serde_json::from_str(&line).with_context(|| format!("this is no JSON: {line}"));
    (length > 0).then(parse).transpose()
}

/// Something that happened to a machine.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    /// Time, by QEMU's clock: microseconds since 1970.
    pub micros: u64,
    /// QEMU's name for it: `STOP`, `RESUME`, `MIGRATION` and so on.
    pub name: String,
    /// Its particulars.
    pub data: Value,
}

/// A monitor that notes all events, on a thread that ends with QEMU.
#[derive(Clone)]
pub(crate) struct Events(Arc<Mutex<Vec<Event>>>);

impl Events {
    /// Notes what happens from now on.
    pub(crate) fn watch(stream: UnixStream) -> Result<Events> {
        let mut reader = Qmp::open(stream)?.reader;
        reader.get_ref().set_read_timeout(None)?;
        let events = Events(Arc::default());
        let noted = events.clone();
        let note = move || {
            // Ends with QEMU, whether by an error or by the end of what it says.
            while let Ok(Some(mut line)) = read_line(&mut reader) {
                noted.list().extend(Event::of(&mut line));
            }
        };
        std::thread::Builder::new().name("qemu-events".to_owned()).spawn(note)?;
        Ok(events)
    }

    /// Number of events that there were so far.
    pub(crate) fn count(&self) -> usize {
        self.list().len()
    }

    /// The last event of that name, but for the first `known` events of all.
    pub(crate) fn last(&self, name: &str, known: usize) -> Option<Event> {
        self.list().iter().skip(known).rev().find(|event| event.name == name).cloned()
    }

    /// All events of that name, oldest first.
    pub(crate) fn all(&self, name: &str) -> Vec<Event> {
        self.list().iter().filter(|event| event.name == name).cloned().collect()
    }

    /// Times that the guest stood still, each time that it did and ran on.
    pub(crate) fn pauses(&self) -> Vec<Duration> {
        let mut stopped = None;
        let mut pauses = Vec::new();
        for event in &*self.list() {
            match &*event.name {
                "STOP" => stopped = Some(event.micros),
                "RESUME" => {
                    let micros = stopped.take().map(|since| event.micros.saturating_sub(since));
                    pauses.extend(micros.map(Duration::from_micros));
                }
                _ => {}
            }
        }
        pauses
    }

    fn list(&self) -> MutexGuard<'_, Vec<Event>> {
        // Whole at every instant.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Event {
    fn of(line: &mut Value) -> Option<Event> {
        let time = |unit: &str| line["timestamp"][unit].as_u64();
        let micros = time("seconds")? * 1_000_000 + time("microseconds")?;
        let name = line["event"].as_str()?.to_owned();
        Some(Event { micros, name, data: line["data"].take() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait_for;

    /// A monitor that greets, and after the first command says these lines.
    fn monitor(lines: &'static str) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::spawn(move || {
            let mut writer = theirs.try_clone().unwrap();
            let mut commands = BufReader::new(theirs).lines();
            writeln!(writer, r#"{{"QMP": {{}}}}"#).unwrap();
            commands.next();
            writeln!(writer, r#"{{"return": {{}}}}"#).unwrap();
            writer.write_all(lines.as_bytes()).unwrap();
            commands.next();
        });
        ours
    }

    #[test]
    fn answers_are_told_from_events_and_refusals_keep_their_reason() {
        let mut qmp = Qmp::open(monitor(concat!(
            r#"{"timestamp": {"seconds": 1, "microseconds": 2}, "event": "STOP"}"#,
            "\n",
            r#"{"return": {"running": false}}"#,
            "\n"
        )))
        .unwrap();
        assert_eq!(qmp.execute("query-status", json!({})).unwrap()["running"], false);
        let refusal = "{\"error\": {\"class\": \"GenericError\", \"desc\": \"not now\"}}\n";
        let mut qmp = Qmp::open(monitor(refusal)).unwrap();
        let error = format!("{:#}", qmp.execute("stop", json!({})).unwrap_err());
        assert!(error.contains("stop") && error.contains("not now"), "{error}");
        let error = format!("{:#}", qmp.execute("cont", json!({})).unwrap_err());
        assert!(error.contains("cont"), "{error}");
    }

    #[test]
    fn pauses_are_told_by_the_time_of_qemu() {
        let events = Events::watch(monitor(concat!(
            r#"{"timestamp": {"seconds": 3, "microseconds": 0}, "event": "RESUME"}"#,
            "\n",
            r#"{"timestamp": {"seconds": 3, "microseconds": 999000}, "event": "STOP"}"#,
            "\n",
            r#"{"timestamp": {"seconds": 4, "microseconds": 1500}, "event": "RESUME", "data": {}}"#,
            "\n",
            r#"{"timestamp": {"seconds": 5, "microseconds": 0}, "event": "STOP"}"#,
            "\n",
        )))
        .unwrap();
        let noted = || Ok((events.count() == 4).then_some(()));
        wait_for("the events", Duration::from_secs(10), noted).unwrap();
        assert_eq!(events.pauses(), [Duration::from_micros(2500)]);
    }
}
