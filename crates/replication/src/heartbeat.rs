//! Signs of life between two hosts, on connections of their own: a large epoch
//! on the data connection must not look like a dead host. Every path has one.
//!
//! One thread, the heart, beats on all of them and hears what comes. Of connections it waits for none:
//! they never block, and whoever dials one does so on a thread that ends with that.

mod line;
#[cfg(test)]
mod tests;

use crate::clock;
use crate::paths::{Consequence, PathMonitor};
use crossbeam_channel::{Receiver, Sender};
use line::{Heard, Line};
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::TimeSpec;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tracing::debug;
use understudy_link::link::Link;
use understudy_protocol::{Beats, PathEvent, PathIndex, TICK, Time, VmName};
use understudy_qemu::urgency::raise_this_thread;
use understudy_threads::spawn;

/// A thread that was not scheduled for this long looks at the peer's messages
/// first: it cannot tell the peer's silence from its own.
const OWN_STALL: Duration = Duration::from_millis(50);

/// Time before a path that is down is dialled again.
const REDIAL_PAUSE: Duration = Duration::from_millis(250);

/// The part of a session that handles its heartbeats. All calls return soon.
pub trait Pulse: Send + Sync + 'static {
    /// The session's paths.
    fn paths(&self) -> &PathMonitor;
    /// The session's heartbeat connections.
    fn heartbeats(&self) -> &Heartbeats;
    /// The peer gave a sign of life.
    fn heard(&self);
    /// The last path was reset.
    fn lost(&self, reason: String);
    /// Time has passed.
    fn tick(&self);
    /// The path that the data goes over is down, or carries none, and another one is up.
    fn leave_path(&self);
    /// Whether the session is over and its threads may end.
    fn is_over(&self) -> bool;
    /// Whether the heartbeats may end too: the end of one is a reason for the peer to give the
    /// session up, and it must not hear that before a better one.
    fn may_hang_up(&self) -> bool {
        self.is_over()
    }
}

/// The handle of a session's other threads on its heart.
pub struct Heartbeats {
    news: (Sender<News>, Receiver<News>),
    /// Readable when there are news, or it is closed.
    wake: EventFd,
    closed: AtomicBool,
}

/// The fate of a path's connection.
enum News {
    Connected(PathIndex, Link),
    /// The connection could not be made, for this reason.
    Failed(PathIndex, String),
}

impl Heartbeats {
    /// No connection yet.
    pub fn new() -> io::Result<Heartbeats> {
        let wake = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?;
        Ok(Heartbeats {
            news: crossbeam_channel::unbounded(),
            wake,
            closed: AtomicBool::new(false),
        })
    }

    /// Gives the heart a path's connection; it ends the one before.
    pub fn attach(&self, path: PathIndex, link: Link) {
        self.tell(News::Connected(path, link));
    }

    /// Ends all connections, also those yet to come.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.wake();
    }

    fn tell(&self, news: News) {
        // The other end is this value's own.
        let _ = self.news.0.send(news);
        match self.is_closed() {
            // The heart may have ended.
            true => self.drop_news(),
            false => self.wake(),
        }
    }

    fn wake(&self) {
        // Fails only if it is signalled 2^64 times already.
        let _ = self.wake.write(1);
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    fn drop_news(&self) {
        for news in self.news.1.try_iter() {
            if let News::Connected(_, link) = news {
                link.close();
            }
        }
    }
}

/// Makes a path's connection, and waits for that.
pub type Dial = Arc<dyn Fn(PathIndex) -> anyhow::Result<Link> + Send + Sync>;

/// Starts the heart of a session, which ends with it, and beats once in an `interval`. `first` are
/// connections that there are already; with `dial` the others are made, and made again when they
/// have ended. The only path is not dialled again: with it, the peer is lost.
pub fn start<P: Pulse>(
    vm: &VmName,
    session: &Arc<P>,
    interval: Duration,
    first: Vec<(PathIndex, Link)>,
    dial: Option<Dial>,
) -> io::Result<()> {
    let now = Instant::now();
    let line = |path| {
        let line = Line::new(path);
        let is_first = first.iter().any(|(first, _)| *first == path);
        if dial.is_some() && !is_first { line.due_at(now) } else { line }
    };
    let lines = session.paths().indices().map(line).collect();
    for (path, link) in first {
        session.heartbeats().attach(path, link);
    }
    let (vm, session, next_tick) = (vm.clone(), session.clone(), clock::now());
    let beats = Beats::new(interval, next_tick);
    let name = format!("heart-{vm}");
    let heart = Heart { vm, session, lines, dial, beats, next_tick };
    spawn(name, move || heart.run()).map(drop)
}

/// The thread.
struct Heart<P> {
    vm: VmName,
    session: Arc<P>,
    /// The line of each path.
    lines: Vec<Line>,
    dial: Option<Dial>,
    beats: Beats,
    next_tick: Time,
}

/// What may have come.
struct Arrived {
    news: bool,
    /// Lines on which something is, by their places.
    lines: Vec<usize>,
}

impl<P: Pulse> Heart<P> {
    fn run(mut self) {
        be_punctual();
        while !self.session.may_hang_up() {
            let arrived = self.wait();
            if arrived.news {
                self.take_news();
            }
            for n in arrived.lines {
                self.hear(n);
            }
            self.dial_again();
            self.tick();
        }
        self.session.heartbeats().close();
        self.session.heartbeats().drop_news();
        self.lines.iter().for_each(Line::close);
    }

    /// Waits until something comes, or a tick is due.
    fn wait(&self) -> Arrived {
        let readable = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let numbers = 0..self.lines.len();
        let up: Vec<usize> = numbers.filter(|n| self.lines[*n].fd().is_some()).collect();
        let mut fds = vec![readable(self.session.heartbeats().wake.as_fd())];
        fds.extend(self.lines.iter().filter_map(Line::fd).map(readable));
        let has_more = |n: usize| self.lines[n].has_more();
        let left = self.next_tick - clock::now();
        let longest = if up.iter().copied().any(has_more) { Duration::ZERO } else { left };
        // A signal only makes it look once more.
        let _ = ppoll(&mut fds, Some(TimeSpec::from_duration(longest)), None);
        let is_ready = |fd: &PollFd<'_>| fd.any() != Some(false);
        let lines = up.into_iter().zip(&fds[1..]).filter(|(n, fd)| is_ready(fd) || has_more(*n));
        Arrived { news: is_ready(&fds[0]), lines: lines.map(|(n, _)| n).collect() }
    }

    fn take_news(&mut self) {
        let heartbeats = self.session.heartbeats();
        // Fails if it was not signalled.
        let _ = heartbeats.wake.read();
        if heartbeats.is_closed() {
            heartbeats.drop_news();
            // Their ends are heard of as any.
            return self.lines.iter().for_each(Line::close);
        }
        while let Ok(news) = self.session.heartbeats().news.1.try_recv() {
            match news {
                News::Connected(path, link) => self.connected(path, link),
                News::Failed(path, reason) => self.ended(path, reason),
            }
        }
    }

    fn connected(&mut self, path: PathIndex, link: Link) {
        let Some(line) = self.lines.get_mut(usize::from(path.0)) else { return link.close() };
        if let Err(error) = line.connect(link) {
            return self.ended(path, error.to_string());
        }
        self.follow(PathEvent::Connected(path));
        self.heard(path);
    }

    fn heard(&self, path: PathIndex) {
        self.session.heard();
        self.follow(PathEvent::Heard(path));
    }

    fn hear(&mut self, n: usize) {
        let path = self.lines[n].path();
        match self.lines[n].hear() {
            Heard::Nothing => {}
            Heard::Signs => self.heard(path),
            Heard::End(reason) => self.ended(path, reason),
        }
    }

    fn ended(&mut self, path: PathIndex, reason: String) {
        if let Some(line) = self.lines.get_mut(usize::from(path.0)) {
            line.end();
            if self.dial.is_some() && self.session.paths().are_several() {
                *line = Line::new(path).due_at(Instant::now() + REDIAL_PAUSE);
            }
        }
        self.follow(PathEvent::Ended(path, format!("heartbeat: {reason}")));
    }

    fn dial_again(&mut self) {
        let ends = self.session.is_over() || self.session.heartbeats().is_closed();
        let Some(dial) = self.dial.clone().filter(|_| !ends) else { return };
        for n in 0..self.lines.len() {
            if !self.lines[n].begin_dialling() {
                continue;
            }
            let (path, session, dial) = (self.lines[n].path(), self.session.clone(), dial.clone());
            let body = move || {
                session.heartbeats().tell(match dial(path) {
                    Ok(link) => News::Connected(path, link),
                    Err(error) => News::Failed(path, format!("{error:#}")),
                });
            };
            // The system shows 15 characters of it: the VM's name comes last.
            if let Err(error) = spawn(format!("dial{path}-{}", self.vm), body) {
                self.ended(path, format!("cannot start a thread: {error}"));
            }
        }
    }

    fn tick(&mut self) {
        let now = clock::now();
        if now < self.next_tick {
            return;
        }
        let late = now - self.next_tick;
        self.next_tick = now + TICK;
        if self.beats.are_due(now) {
            self.lines.iter().for_each(Line::beat);
        }
        if late < OWN_STALL {
            self.follow(PathEvent::Tick);
            self.session.tick();
        }
    }

    fn follow(&self, event: PathEvent) {
        for consequence in self.session.paths().event(event) {
            match consequence {
                Consequence::Leave => self.session.leave_path(),
                Consequence::Renew(path) => {
                    self.lines.get(usize::from(path.0)).into_iter().for_each(Line::close);
                }
                Consequence::Lost(reason) => self.session.lost(reason),
            }
        }
    }
}

/// Raises the priority: on a busy host a late heartbeat would look like a dead one. Where the
/// system does not allow it, the session has said so already.
fn be_punctual() {
    if let Err(error) = raise_this_thread() {
        debug!("no real-time priority for heartbeats: {error}");
    }
}
