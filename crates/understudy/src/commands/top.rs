//! `understudy top`: the dashboard in a terminal, drawn anew every second.

use crate::{output, table};
use console::{Key, Term};
use std::io::{self, Write};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, SystemTime};
use understudy_client::{Client, Exit, Failure};

const INTERVAL: Duration = Duration::from_secs(1);
/// Events are asked for from here on: the last of them fill the page.
const FIRST: u64 = 0;
/// The page where no terminal says how large it is.
const UNBOUNDED: (usize, usize) = (usize::MAX, usize::MAX);

/// Shows the host until `q` is pressed; once, if it is not shown on a terminal.
pub fn run(client: &Client, json: bool) -> Result<Exit, Failure> {
    let terminal = Term::stdout();
    if json {
        return output::json(&client.status()?).map(|()| Exit::Ok);
    }
    if !terminal.is_term() {
        return output::print(&(draw(client, UNBOUNDED)? + "\n")).map(|()| Exit::Ok);
    }
    // Before the screen is another one: a daemon that is not there is told as always.
    client.status()?;
    let screen = Screen::enter(&terminal).map_err(unwritable)?;
    let pressed = keys(terminal.clone());
    loop {
        let (rows, columns) = terminal.size();
        let page = draw(client, (rows.into(), columns.into()));
        screen.show(&page.unwrap_or_else(|failure| failure.message)).map_err(unwritable)?;
        match pressed.recv_timeout(INTERVAL) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return Ok(Exit::Ok),
        }
    }
}

fn draw(client: &Client, size: (usize, usize)) -> Result<String, Failure> {
    let (status, list) = (client.status()?, client.events(FIRST, None, false)?);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
    Ok(table::top(&status, &list.events, now, size))
}

/// Tells once when the user wants to leave.
fn keys(terminal: Term) -> Receiver<()> {
    let (sender, pressed) = channel();
    thread::spawn(move || {
        while let Ok(key) = terminal.read_key_raw() {
            if matches!(key, Key::Char('q' | 'Q') | Key::Escape | Key::CtrlC) {
                break;
            }
        }
        // Fails if it is left already.
        let _ = sender.send(());
    });
    pressed
}

fn unwritable(error: io::Error) -> Failure {
    Failure::internal(format!("cannot write to the terminal: {error}"))
}

/// The terminal's other screen; what was there before is back when this is dropped.
struct Screen<'a>(&'a Term);

impl Screen<'_> {
    fn enter(terminal: &Term) -> io::Result<Screen<'_>> {
        let mut out: &Term = terminal;
        out.write_all(b"\x1b[?1049h\x1b[?25l")?;
        Ok(Screen(terminal))
    }

    /// Line over line, so that nothing flickers.
    fn show(&self, page: &str) -> io::Result<()> {
        let lines = page.replace('\n', "\x1b[K\r\n");
        let mut out: &Term = self.0;
        out.write_all(format!("\x1b[H{lines}\x1b[K\x1b[J").as_bytes())?;
        out.flush()
    }
}

impl Drop for Screen<'_> {
    fn drop(&mut self) {
        let mut out: &Term = self.0;
        // Nothing more can be done about a terminal that is gone.
        let _ = out.write_all(b"\x1b[?25h\x1b[?1049l");
    }
}
