//! The thread that hears what QEMU says by itself. Of its events it tells at once. Words on the
//! console, whose log and client may take their time, it hands to a thread that comes for them and
//! goes when nobody speaks.

use crate::console::Relay;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use understudy_qemu::qmp::{Events, VmEvent};
use understudy_threads::{Crew, Worker, spawn};

/// Hears until it is dropped.
pub(crate) struct Hearing {
    stop: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
}

impl Hearing {
    /// Calls `on_event` for each event, until QEMU has ended, and has the console relayed.
    pub fn begin(
        events: Events,
        on_event: impl FnMut(VmEvent) + Send + 'static,
        relay: Option<Relay>,
    ) -> io::Result<Hearing> {
        // Never read: whoever looks sees it from then on.
        let stop = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC)?);
        let console = relay.map(|relay| Console::new(relay, &stop)).transpose()?;
        let until = stop.clone();
        let listener = Listener { events: Some(events), on_event, console, stop: until };
        let thread = spawn("qemu-events", move || listener.run())?;
        Ok(Hearing { stop, thread: Some(thread) })
    }
}

impl Drop for Hearing {
    fn drop(&mut self) {
        // Fails only if it is signalled 2^64 times already.
        let _ = self.stop.write(1);
        // An event may have been the machine's end: the thread does not wait for itself.
        let other = self.thread.take().filter(|it| it.thread().id() != thread::current().id());
        if let Some(thread) = other {
            // A panic of the thread has already been reported.
            let _ = thread.join();
        }
    }
}

struct Listener<F> {
    /// QEMU's events; none once it has ended.
    events: Option<Events>,
    on_event: F,
    /// The console; none once QEMU has ended, or where there is none.
    console: Option<Console>,
    stop: Arc<EventFd>,
}

/// The sources from which there is something to hear.
struct Heard {
    stop: bool,
    events: bool,
    words: bool,
    rest: bool,
}

impl<F: FnMut(VmEvent)> Listener<F> {
    fn run(mut self) {
        // What came while the monitor was negotiated.
        self.take_events();
        while self.events.is_some() || self.console.is_some() {
            let heard = self.wait();
            if heard.stop {
                break;
            }
            if heard.events {
                self.take_events();
            }
            let Some(console) = &mut self.console else { continue };
            if heard.words {
                console.speak();
            }
            if heard.rest && !console.rest() {
                self.console = None;
            }
        }
        self.console.into_iter().for_each(Console::end);
    }

    fn wait(&self) -> Heard {
        let stop = (self.stop.as_fd(), PollFlags::POLLIN);
        let nothing = (self.stop.as_fd(), PollFlags::empty());
        let events = self.events.as_ref().map_or(nothing, |it| (it.as_fd(), PollFlags::POLLIN));
        let console = self.console.as_ref();
        let rest = console.map_or(nothing, |it| (it.rests.as_fd(), PollFlags::POLLIN));
        let relay = console.and_then(|it| it.relay.as_ref());
        let [qemu, changed, client] = relay.map_or([nothing; 3], Relay::waits_for);
        let mut fds =
            [stop, events, rest, qemu, changed, client].map(|(fd, wanted)| PollFd::new(fd, wanted));
        // A signal only makes the thread look once more.
        let _ = poll(&mut fds, PollTimeout::NONE);
        let [stop, events, rest, words @ ..] = fds.map(|fd| fd.any().unwrap_or(true));
        Heard { stop, events, words: words.contains(&true), rest }
    }

    fn take_events(&mut self) {
        if let Some(events) = &mut self.events
            && !events.take(&mut self.on_event)
        {
            self.events = None;
        }
    }
}

/// A console and the thread for it.
struct Console {
    /// The relay, which is here while nobody speaks.
    relay: Option<Relay>,
    crew: Crew<Relay>,
    /// Channel from the crew: the relay, or none when it is over.
    back: Receiver<Option<Relay>>,
    /// Readable when something is in `back`.
    rests: Arc<EventFd>,
}

impl Console {
    fn new(relay: Relay, stop: &Arc<EventFd>) -> io::Result<Console> {
        let rests = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?);
        let (giver, back) = channel();
        let (stop, ring) = (stop.clone(), rests.clone());
        let crew = Crew::new("console", 1, move || relaying(&stop, &giver, &ring));
        Ok(Console { relay: Some(relay), crew, back, rests })
    }

    /// Hands the relay to the crew, since somebody speaks.
    fn speak(&mut self) {
        if let Some(relay) = self.relay.take() {
            self.crew.hand(relay);
        }
    }

    /// Takes the relay back, since nobody speaks any more. Returns whether anybody may again.
    fn rest(&mut self) -> bool {
        // Fails if it was read already.
        let _ = self.rests.read();
        match self.back.try_recv() {
            Ok(None) => return false,
            Ok(relay) => self.relay = relay,
            Err(_) => {}
        }
        true
    }

    /// A relay that is at work ends by itself, for which the crew's end waits.
    fn end(self) {
        let Console { relay, crew, back, .. } = self;
        drop(crew);
        relay.into_iter().chain(back.try_iter().flatten()).for_each(Relay::end);
    }
}

/// The work of the crew's thread on a relay.
fn relaying(
    stop: &Arc<EventFd>,
    giver: &Sender<Option<Relay>>,
    ring: &Arc<EventFd>,
) -> Worker<Relay> {
    let (stop, giver, ring) = (stop.clone(), giver.clone(), ring.clone());
    Box::new(move |relay| {
        // Nobody listens any more if the machine is gone.
        let _ = giver.send(relay.run(&stop));
        let _ = ring.write(1);
    })
}

#[cfg(test)]
mod tests;
