//! The lobby: connections whose peer is not known yet, and how many there may be.
//!
//! Whoever connects gets a place, at the cost of whoever has waited longest when there is none:
//! a peer that goes on with its handshake needs a moment only, so that neither many connections
//! nor slow ones keep it out. Addresses of known hosts have places of their own.

use std::collections::BTreeMap;
use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};
use understudy_threads::Common;

/// Time for all of a handshake: TLS and the hello.
pub const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
/// Handshakes in flight from addresses of known hosts, and from all others.
const PLACES: [usize; 2] = [256, 64];
/// Places of the others for one address.
const PLACES_OF_ADDRESS: usize = 16;
/// Threads of handshakes; those that lost their place may take a moment to end.
const MOST_THREADS: usize = 512;
/// Lines in the log about connections that ended, in each span of time.
const MOST_COMPLAINTS: u32 = 100;
const COMPLAINTS_SPAN: Duration = Duration::from_secs(60);
/// Requests of one authenticated host that are carried out at once.
const MOST_REQUESTS: usize = 256;

/// Connections before and after it is known whose they are.
#[derive(Debug, Default)]
pub struct Lobby(Common<State>);

#[derive(Debug, Default)]
struct State {
    next: u64,
    threads: usize,
    /// Handshakes that wait, by their order.
    waiting: BTreeMap<u64, Waiting>,
    requests: BTreeMap<String, usize>,
    /// Time since which complaints are counted, and how many there were.
    complaints: Option<(Instant, u32)>,
}

#[derive(Debug)]
struct Waiting {
    from: IpAddr,
    known: bool,
    until: Instant,
    socket: TcpStream,
}

/// A connection's place until its peer is known; given up when dropped.
#[derive(Debug)]
pub struct Place {
    lobby: Arc<Lobby>,
    number: u64,
}

/// An authenticated host's request under way; over when dropped.
#[derive(Debug)]
pub struct Request {
    lobby: Arc<Lobby>,
    host: String,
}

impl Lobby {
    /// Gives a new connection a place, if need be that of the one that has waited longest.
    /// `known`: it comes from the address of a known host. None if there is no room at all.
    pub fn admit(self: &Arc<Self>, socket: &TcpStream, from: IpAddr, known: bool) -> Option<Place> {
        let socket = socket.try_clone().ok()?;
        let mut state = self.0.lock();
        if state.threads >= MOST_THREADS {
            return None;
        }
        if !known && state.count(|other| !other.known && other.from == from) >= PLACES_OF_ADDRESS {
            state.dismiss(|other| !other.known && other.from == from);
        }
        if state.count(|other| other.known == known) >= PLACES[usize::from(!known)] {
            state.dismiss(|other| other.known == known);
        }
        let number = state.next;
        state.next += 1;
        state.threads += 1;
        let until = Instant::now() + HANDSHAKE_LIMIT;
        state.waiting.insert(number, Waiting { from, known, until, socket });
        Some(Place { lobby: self.clone(), number })
    }

    /// Ends whoever has taken too long; returns when the next one will have.
    pub fn end_overdue(&self) -> Option<Instant> {
        let (mut state, now) = (self.0.lock(), Instant::now());
        while state.waiting.values().next().is_some_and(|first| first.until <= now) {
            state.dismiss(|_| true);
        }
        state.waiting.values().next().map(|first| first.until)
    }

    /// Whether the log may take another line about a connection that ended: a flood must not fill
    /// the disk.
    pub fn may_complain(&self) -> bool {
        let (mut state, now) = (self.0.lock(), Instant::now());
        let (since, said) = state.complaints.get_or_insert((now, 0));
        if now.duration_since(*since) >= COMPLAINTS_SPAN {
            (*since, *said) = (now, 0);
        }
        *said += 1;
        *said <= MOST_COMPLAINTS
    }

    /// Whether nobody is there, and no request is under way.
    pub fn is_empty(&self) -> bool {
        let state = self.0.lock();
        state.threads == 0 && state.requests.is_empty()
    }

    /// Ends the connection that has waited longest, for its descriptors.
    pub fn make_room(&self) {
        let mut state = self.0.lock();
        if state.count(|other| !other.known) > 0 {
            state.dismiss(|other| !other.known);
        }
    }
}

impl State {
    fn count(&self, fits: impl Fn(&Waiting) -> bool) -> usize {
        self.waiting.values().filter(|other| fits(other)).count()
    }

    /// Ends the one of these that has waited longest: its thread notices.
    fn dismiss(&mut self, fits: impl Fn(&Waiting) -> bool) {
        let first = self.waiting.iter().find(|(_, other)| fits(other)).map(|(number, _)| *number);
        if let Some(gone) = first.and_then(|number| self.waiting.remove(&number)) {
            // An error means that it is closed already.
            let _ = gone.socket.shutdown(Shutdown::Both);
        }
    }
}

impl Place {
    /// The peer is known now: its connection is no longer bounded by the handshake's deadline.
    /// An error if it was too late, or if the host has too many requests under way.
    pub fn authenticated(self, host: &str) -> anyhow::Result<Request> {
        let lobby = self.lobby.clone();
        let mut state = lobby.0.lock();
        let in_time = state.waiting.remove(&self.number).is_some();
        anyhow::ensure!(in_time, "host {host} took too long for its handshake");
        let requests = state.requests.entry(host.to_owned()).or_default();
        anyhow::ensure!(
            *requests < MOST_REQUESTS,
            "host {host} has {requests} requests under way here, which is the most"
        );
        *requests += 1;
        drop(state);
        Ok(Request { lobby: lobby.clone(), host: host.to_owned() })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.lobby.0.lock();
        state.threads -= 1;
        state.waiting.remove(&self.number);
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        let mut state = self.lobby.0.lock();
        if let Some(requests) = state.requests.get_mut(&self.host) {
            *requests -= 1;
            if *requests == 0 {
                state.requests.remove(&self.host);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::TcpListener;

    fn sockets() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let dialled = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (dialled, listener.accept().unwrap().0)
    }

    fn address(last: u8) -> IpAddr {
        IpAddr::from([127, 0, 0, last])
    }

    /// Regression: each connection had a thread for as long as it liked, without any bound.
    #[test]
    fn the_oldest_strangers_make_room_and_known_hosts_stay() {
        let lobby = Arc::new(Lobby::default());
        let (mut far, near) = sockets();
        let known = lobby.admit(&near, address(1), true).unwrap();
        let (mut oldest, near) = sockets();
        let mut places = vec![lobby.admit(&near, address(2), false).unwrap()];
        for round in 0..PLACES[1] {
            let (_, near) = sockets();
            places.push(lobby.admit(&near, address(3 + (round / 8) as u8), false).unwrap());
        }
        assert_eq!(lobby.0.lock().waiting.len(), PLACES[1] + 1);
        assert_eq!(oldest.read(&mut [0]).unwrap(), 0, "the oldest was not ended");
        let late = places.remove(0).authenticated("a").unwrap_err().to_string();
        assert!(late.contains("took too long"), "{late}");
        far.set_nonblocking(true).unwrap();
        assert!(far.read(&mut [0]).is_err(), "the known host's was ended");
        known.authenticated("a").unwrap();
        drop(places);
        let state = lobby.0.lock();
        assert_eq!((state.waiting.len(), state.threads, state.requests.len()), (0, 0, 0));
    }

    #[test]
    fn one_address_has_its_part_of_the_places_only() {
        let lobby = Arc::new(Lobby::default());
        let admit = || lobby.admit(&sockets().1, address(9), false).unwrap();
        let places: Vec<_> = (0..PLACES[1]).map(|_| admit()).collect();
        assert_eq!(lobby.0.lock().waiting.len(), PLACES_OF_ADDRESS);
        drop(places);
    }

    /// Regression: each byte that came gave a peer the whole time again.
    #[test]
    fn a_handshake_has_one_deadline() {
        let lobby = Arc::new(Lobby::default());
        let (mut far, near) = sockets();
        let place = lobby.admit(&near, address(1), true).unwrap();
        assert!(lobby.end_overdue().unwrap() > Instant::now());
        lobby.0.lock().waiting.get_mut(&place.number).unwrap().until = Instant::now();
        assert_eq!(lobby.end_overdue(), None);
        assert_eq!(far.read(&mut [0]).unwrap(), 0, "it was not ended");
    }

    #[test]
    fn a_host_has_its_part_of_the_requests_only() {
        let lobby = Arc::new(Lobby::default());
        let ask = |host| lobby.admit(&sockets().1, address(1), true).unwrap().authenticated(host);
        let requests: Vec<_> = (0..MOST_REQUESTS).map(|_| ask("a").unwrap()).collect();
        assert!(ask("a").unwrap_err().to_string().contains("the most"));
        ask("b").unwrap();
        drop(requests);
        ask("a").unwrap();
    }
}
