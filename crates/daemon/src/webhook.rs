//! Events posted to an address of the operator's, one by one and in their order, each until it was taken.
//!
//! A receiver may get an event twice (its answer was lost), and knows it by its number, or that of the keeper which has
//! recorded it. One that does not answer is asked again, later each time; what the log does not keep for so long is lost
//! to it, which is said.

mod marks;

use crate::config::{self, WebhookUrl};
use crate::host::Host;
use marks::Marks;
use serde::Serialize;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tracing::{info, warn};
use understudy_protocol::HostName;
use understudy_report::events::{Event, Journal};
use ureq::http::Response;
use ureq::http::header::LOCATION;
use ureq::{Agent, Body};

/// Time for the receiver to answer.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Pauses before the next try, doubled each time: the first and the longest wait.
const WAITS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];
/// Time after which a receiver that does not answer is a problem of the host: until then it may be restarted.
const PATIENCE: Duration = Duration::from_secs(180);
/// Time between two looks for new events.
const LOOK: Duration = Duration::from_millis(250);

/// Content that is posted.
#[derive(Serialize)]
struct Post<'a> {
    host: &'a HostName,
    #[serde(flatten)]
    event: &'a Event,
}

/// Outcome of a post.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    /// The receiver has the event.
    Taken,
    /// The receiver never will have it.
    Refused(String),
    /// The receiver may have it later.
    Later(String),
}

/// Posts events for as long as the host lives, if its configuration says where to.
pub(crate) fn start(host: &Arc<Host>) {
    let Some(url) = host.config.webhook.clone() else { return };
    let weak = Arc::downgrade(host);
    let tell = move |problem| {
        if let Some(host) = weak.upgrade() {
            host.vms.note(|all| all.findings.webhook = problem);
        }
    };
    let name = host.config.name.clone();
    let poster = Poster { url, host: name, agent: agent(), tell: Box::new(tell) };
    let (journal, state_dir) = (host.events.clone(), host.config.state_dir.clone());
    let run = move || poster.run(&journal, Marks::of(&state_dir));
    if let Err(error) = thread::Builder::new().name("webhook".to_owned()).spawn(run) {
        warn!("no event is posted: cannot start a thread: {error}");
    }
}

impl Host {
    pub(crate) fn problem_of_webhook(&self) -> Option<String> {
        self.vms.look(|all| all.findings.webhook.clone())
    }
}

fn agent() -> Agent {
    let config = Agent::config_builder().timeout_global(Some(TIMEOUT)).http_status_as_error(false);
    // What follows a redirection is a GET without the event.
    config.max_redirects(0).build().into()
}

struct Poster {
    url: WebhookUrl,
    host: HostName,
    agent: Agent,
    /// Tells what is wrong with the receiver from now on, if something is.
    tell: Box<dyn Fn(Option<String>) + Send>,
}

impl Poster {
    fn run(&self, journal: &Journal, mut marks: Marks) {
        let mut last = 0;
        loop {
            let list = journal.after(last, None);
            if list.missed {
                warn!("webhook: events after number {last} are not kept any more, and not posted");
            }
            for event in &list.events {
                if !marks.have(event) && self.deliver(event, journal) {
                    marks.note(event);
                }
                last = event.number;
            }
            if list.events.is_empty() {
                marks.write();
                if journal.is_closed() {
                    return;
                }
                thread::sleep(LOOK);
            }
        }
    }

    /// Whether the event was taken or refused; else the daemon ends.
    fn deliver(&self, event: &Event, journal: &Journal) -> bool {
        let (mut wait, since, url) = (WAITS[0], Instant::now(), self.url.shown());
        let tell = |why: &str| {
            let problem = format!(
                "[webhook]: {url} did not take the last event: {why}; see to it, or to its address in the configuration"
            );
            (self.tell)(Some(problem));
        };
        loop {
            match self.post(event) {
                Answer::Taken => {
                    (self.tell)(None);
                    if wait > WAITS[0] {
                        info!("webhook: {url} answers again");
                    }
                    return true;
                }
                Answer::Refused(why) => {
                    tell(&why);
                    warn!("webhook: {url} does not want event {}: {why}", event.number);
                    return true;
                }
                Answer::Later(_) if journal.is_closed() => return false,
                Answer::Later(why) => {
                    if since.elapsed() > PATIENCE {
                        tell(&why);
                    }
                    if wait == WAITS[0] {
                        warn!("webhook: {url}: {why}; it is asked again");
                    }
                    thread::sleep(wait);
                    wait = (wait * 2).min(WAITS[1]);
                }
            }
        }
    }

    fn post(&self, event: &Event) -> Answer {
        let post = Post { host: &self.host, event };
        match self.agent.post(self.url.as_str()).send_json(&post) {
            Ok(answer) => judge(answer.status().as_u16(), moved_to(&answer)),
            Err(error) => Answer::Later(error.to_string()),
        }
    }
}

/// Where an answer sends on to, for people.
fn moved_to(answer: &Response<Body>) -> String {
    let place = answer.headers().get(LOCATION).and_then(|place| place.to_str().ok());
    match place {
        Some(place) if place.contains("://") => config::shown(place),
        Some(_) => "another path there".to_owned(),
        None => "somewhere".to_owned(),
    }
}

/// What a status means.
fn judge(status: u16, moved_to: String) -> Answer {
    match status {
        200..=299 => Answer::Taken,
        408 | 425 | 429 | 500..=599 => Answer::Later(format!("it answers {status}")),
        300..=399 => Answer::Refused(format!(
            "it answers {status} and sends on to {moved_to}, which is not followed: name that address in [webhook]"
        )),
        _ => Answer::Refused(format!("it answers {status}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::Inventory;
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::{TcpListener, TcpStream};
    use understudy_protocol::literal;
    use understudy_report::events::EventKind;

    fn poster(url: &str, tell: impl Fn(Option<String>) + Send + 'static) -> Poster {
        let (url, host) = (WebhookUrl::of(url), literal("a"));
        Poster { url, host, agent: agent(), tell: Box::new(tell) }
    }

    /// Of a host without VMs.
    fn marks() -> Marks {
        Marks::of(tempfile::tempdir().unwrap().path())
    }

    /// What keepers remember was told again by each daemon, under new numbers: pagers called for take-overs of weeks ago.
    #[test]
    fn what_an_earlier_daemon_has_posted_of_keepers_is_not_posted_again() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/hook", listener.local_addr().unwrap());
        let state_dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(state_dir.path().join("db")).unwrap();
        let keepers = Journal::default();
        let db = keepers.of(&literal("db"));
        db.record(EventKind::Started);
        db.record(EventKind::Rebooted);
        let posted = |expected: &[&str]| {
            let journal = Journal::default();
            keepers.after(0, None).events.into_iter().for_each(|it| journal.relay(it, Some(7)));
            let last = journal.after(0, None).events.pop().unwrap();
            journal.record(EventKind::LeaseRenewed);
            let (posting, poster) = (journal.clone(), poster(&url, |_| ()));
            let given = Marks::of(state_dir.path());
            let thread = thread::spawn(move || poster.run(&posting, given));
            for kind in expected {
                assert_eq!(answer(listener.accept().unwrap().0, "204 Taken")["kind"], **kind);
            }
            let deadline = Instant::now() + Duration::from_secs(60);
            while !Marks::of(state_dir.path()).have(&last) && Instant::now() < deadline {
                thread::sleep(LOOK);
            }
            journal.close();
            thread.join().unwrap();
        };
        posted(&["started", "rebooted", "lease-renewed"]);
        db.record(EventKind::PoweredOff);
        posted(&["powered-off", "lease-renewed"]);
    }

    #[test]
    fn what_may_pass_is_tried_again_and_a_refusal_is_not() {
        let judge = |status| judge(status, String::new());
        assert_eq!(judge(204), Answer::Taken);
        for status in [408, 429, 500, 503] {
            assert!(matches!(judge(status), Answer::Later(_)), "{status}");
        }
        for status in [301, 400, 401, 404] {
            assert!(matches!(judge(status), Answer::Refused(_)), "{status}");
        }
    }

    /// Reads one request and answers it; returns its body.
    fn answer(mut stream: TcpStream, status: &str) -> serde_json::Value {
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut length = 0;
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            if line.trim().is_empty() {
                break;
            }
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        write!(stream, "HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            .unwrap();
        serde_json::from_slice(&body).unwrap()
    }

    /// It was followed by a GET, and its 200 taken for the event's.
    #[test]
    fn a_redirection_takes_no_event() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/hook", listener.local_addr().unwrap());
        let journal = Journal::default();
        journal.of(&literal("db")).record(EventKind::Started);
        let event = journal.after(0, None).events.remove(0);
        let poster = poster(&url, |_| ());
        let thread = thread::spawn(move || poster.post(&event));
        let place = "301 Moved\r\nlocation: https://alerts.example.org/secret";
        answer(listener.accept().unwrap().0, place);
        let Answer::Refused(why) = thread.join().unwrap() else { panic!("it was followed") };
        assert!(why.contains("301") && why.contains("https://alerts.example.org/…"), "{why}");
    }

    #[test]
    fn each_event_arrives_in_order_also_after_a_failure() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/hook", listener.local_addr().unwrap());
        let journal = Journal::default();
        journal.of(&literal("db")).record(EventKind::Started);
        journal.of(&literal("db")).record(EventKind::Protected { peer: literal("b") });
        let posting = journal.clone();
        let poster = poster(&url, |_| ());
        let thread = thread::spawn(move || poster.run(&posting, marks()));
        let next = |status| answer(listener.accept().unwrap().0, status);
        assert_eq!(next("503 Busy")["kind"], "started");
        let again = next("204 Taken");
        assert_eq!((&again["kind"], &again["host"]), (&"started".into(), &"a".into()));
        assert_eq!(next("204 Taken")["text"], "protected: b stands by");
        journal.close();
        thread.join().unwrap();
    }

    /// Regression: its token had expired, and nobody was woken any more.
    #[test]
    fn a_receiver_that_takes_nothing_is_a_problem_until_it_does() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/hook", listener.local_addr().unwrap());
        let (journal, vms) = (Journal::default(), Inventory::default());
        journal.of(&literal("db")).record(EventKind::Started);
        journal.of(&literal("db")).record(EventKind::Rebooted);
        let (posting, noted) = (journal.clone(), vms.clone());
        let poster = poster(&url, move |problem| noted.note(|all| all.findings.webhook = problem));
        let thread = thread::spawn(move || poster.run(&posting, marks()));
        answer(listener.accept().unwrap().0, "401 Unauthorized");
        let second = listener.accept().unwrap().0;
        let problem = vms.look(|all| all.findings.webhook.clone());
        assert!(problem.as_ref().is_some_and(|it| it.contains("it answers 401")), "{problem:?}");
        answer(second, "204 Taken");
        journal.close();
        thread.join().unwrap();
        assert_eq!(vms.look(|all| all.findings.webhook.clone()), None);
    }
}
