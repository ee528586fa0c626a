use super::super::batch::take_first;
use super::super::outgoing::Taker;
use super::*;
use understudy_network::{HEADER_BYTES, MacAddress};
use understudy_protocol::Generation;
use understudy_protocol::literal;
use understudy_protocol::wire::Kind;
use understudy_threads::{Mutex, lock};

const FIRST: CardIndex = CardIndex(0);

/// Recorder of what a listener was told.
#[derive(Default)]
struct Recorder {
    taken: Mutex<Vec<SnapshotNumber>>,
    complete: Mutex<Vec<SnapshotNumber>>,
}

impl CutListener for Recorder {
    fn take(&self, number: SnapshotNumber) {
        lock(&self.taken).push(number);
    }

    fn log_complete(&self, number: SnapshotNumber) {
        lock(&self.complete).push(number);
    }
}

/// A host with one member; the other member is on the other host.
struct Side {
    network: Arc<Network>,
    member: Member,
    names: Vec<VmName>,
    heard: Arc<Recorder>,
    way: Arc<Outgoing>,
    machine: Arc<()>,
}

fn mac(member: Member) -> MacAddress {
    MacAddress([0x52, 0x54, 0, 0, 0, member.0 as u8])
}

fn card(member: Member) -> CardDefinition {
    CardDefinition::new(mac(member), "br0", Default::default())
}

fn frame(from: Member, to: Member, text: &str) -> Vec<u8> {
    [&[0; HEADER_BYTES][..], &mac(to).0, &mac(from).0, &[0x88, 0xb5], text.as_bytes()].concat()
}

impl Side {
    fn new(member: u16, peer: &str) -> Side {
        Side::of(&["web", "db"], member, peer)
    }

    /// The same where the members are these.
    fn of(names: &[&str], member: u16, peer: &str) -> Side {
        let network = Network::new(&literal("shop"));
        let way = network.state().new_way(&peer.parse().unwrap()).unwrap();
        let heard = Arc::new(Recorder::default());
        let names = names.iter().map(|name| name.parse().unwrap()).collect();
        let side =
            Side { network, member: Member(member), names, heard, way, machine: Arc::new(()) };
        side.join(Incarnation(1), 4).unwrap();
        side
    }

    fn join(&self, incarnation: Incarnation, number: u64) -> anyhow::Result<u64> {
        let machine = Arc::downgrade(&self.machine);
        let body = Body {
            name: literal("vm"),
            cards: vec![card(self.member)],
            inlets: Vec::new(),
            machine,
        };
        let joining = Joining {
            members: self.names.clone(),
            member: self.member,
            generation: Generation(1),
            incarnation,
            number: SnapshotNumber(number),
            listener: self.heard.clone(),
        };
        self.network.state().join(body, joining, &literal("shop"))
    }

    /// A host says who runs there, and the arbiter says that of it.
    fn learn(&self, host: &str, presence: Presence, word: Word) {
        self.network.learn(&host.parse().unwrap(), presence, &|_, _, _| word);
    }

    fn number(&self) -> u64 {
        self.network.state().locals[&self.member].cut.number().0
    }

    /// Its guest sends a frame, and output commit lets it go.
    fn send(&self, to: Member, text: &str) -> bool {
        let joined = self.network.state().locals[&self.member].joined;
        let (network, member) = (self.network.clone(), self.member);
        let seat = CardSeat { network, member, joined, card: FIRST };
        let mut kept = Vec::new();
        let out = seat.sent(&frame(self.member, to, text), &mut |parts| kept.push(parts.concat()));
        kept.iter().for_each(|message| seat.carry(message));
        out
    }

    fn taken(&self, number: u64) {
        let number = SnapshotNumber(number);
        let taken = CutEvent::Taken { number, unread: Vec::new() };
        let (calls, signs) = self.network.state().event(self.member, taken);
        signs.iter().for_each(|sign| self.network.carry(&sign.encode()));
        calls.into_iter().for_each(Call::make);
    }

    /// Everything that waits for the other host gets there.
    fn deliver(&self, own: &str, other: &Side) {
        let mut taker = Taker::new(&self.way);
        loop {
            // Something to end with, so that nothing is waited for.
            self.way.put(b"end", false);
            let (kind, bytes) = taker.next().unwrap();
            if kind == Kind::Presence {
                let presence = serde_json::from_slice(&bytes).unwrap();
                other.learn(own, presence, Word::No);
                continue;
            }
            let mut batch = &bytes[..];
            while let Some(message) = take_first(&mut batch).unwrap() {
                if message == b"end" {
                    return;
                }
                let calls = other.network.state().received(&own.parse().unwrap(), message).unwrap();
                calls.into_iter().for_each(Call::make);
            }
        }
    }
}

/// Members 0 on host a and 1 on host b, connected.
fn pair() -> (Side, Side) {
    let (a, b) = (Side::new(0, "b"), Side::new(1, "a"));
    for side in [&a, &b] {
        assert!(side.network.state().lacks().unwrap().contains("runs on no host"));
        side.network.state().open(&side.way);
    }
    for _ in 0..2 {
        a.deliver("a", &b);
        b.deliver("b", &a);
    }
    for side in [&a, &b] {
        assert_eq!(side.network.state().lacks(), None);
    }
    (a, b)
}

fn told(numbers: &Mutex<Vec<SnapshotNumber>>) -> Vec<u64> {
    lock(numbers).iter().map(|number| number.0).collect()
}

#[test]
fn a_frame_from_behind_the_cut_makes_its_receiver_take_the_snapshot() {
    let (a, b) = pair();
    assert!(!a.send(b.member, "before"), "to a member, and nobody else");
    a.taken(5);
    a.send(b.member, "behind");
    a.deliver("a", &b);
    assert_eq!((told(&b.heard.taken), b.number()), (vec![5], 4));
    assert_eq!(told(&a.heard.complete), [0; 0], "b may still send from before it");
    b.taken(5);
    b.deliver("b", &a);
    assert_eq!((told(&a.heard.complete), told(&b.heard.complete)), (vec![5], vec![5]));
}

#[test]
fn what_was_in_flight_is_in_the_receivers_log() {
    let (a, b) = pair();
    a.send(b.member, "in flight");
    b.taken(5);
    a.deliver("a", &b);
    b.deliver("b", &a);
    a.taken(5);
    a.send(b.member, "behind");
    a.deliver("a", &b);
    let state = b.network.state();
    let log = state.locals[&b.member].cut.log().unwrap();
    let frames: Vec<_> = log.iter().map(|(from, frame)| (*from, frame.bytes.to_vec())).collect();
    assert_eq!(frames, [(a.member, frame(a.member, b.member, "in flight"))]);
}

#[test]
fn a_connection_that_breaks_loses_frames_and_no_sign() {
    let (a, b) = pair();
    let broken = a.network.state().open(&a.way);
    b.taken(5);
    a.send(b.member, "lost");
    a.taken(5);
    a.way.close(broken);
    assert!(a.network.state().lacks().unwrap().contains("no connection"));
    a.network.state().open(&a.way);
    a.deliver("a", &b);
    assert_eq!(told(&b.heard.complete), [5]);
}

#[test]
fn members_of_another_life_are_not_known() {
    let (a, b) = pair();
    a.join(Incarnation(2), 4).unwrap();
    assert!(a.send(b.member, "to whom?"), "over the bridge: nobody of this incarnation is known");
    a.deliver("a", &b);
    b.deliver("b", &a);
    assert!(a.network.state().lacks().is_some());
    assert!(a.join(Incarnation(1), 4).is_err());
    b.join(Incarnation(2), 4).unwrap();
    b.deliver("b", &a);
    a.deliver("a", &b);
    assert_eq!((a.network.state().lacks(), b.network.state().lacks()), (None, None));
}

#[test]
fn a_machine_that_is_gone_is_no_member() {
    let (mut a, b) = pair();
    a.machine = Arc::new(());
    a.network.state().reap();
    a.deliver("a", &b);
    assert!(b.network.state().lacks().unwrap().contains("web runs on no host"));
    assert!(b.send(a.member, "over the bridge"));
}

/// Host c has won a member, and says so.
fn taken_over(member: Member) -> Presence {
    let known = MemberCards { member, generation: Generation(2), cards: vec![card(member)] };
    Presence { incarnation: Incarnation(1), members: vec![known], names: None, answer: false }
}

/// Place of a member, as a host believes.
fn place(at: &Side, member: Member) -> Option<Place> {
    at.network.state().roster.place(member).cloned()
}

#[test]
fn a_host_that_has_not_heard_of_a_take_over_is_not_believed() {
    let (a, mut b) = pair();
    a.learn("c", taken_over(b.member), Word::Yes);
    // It was cut off, is back, and still has its copy.
    b.network.state().open(&b.way);
    b.deliver("b", &a);
    assert_eq!(place(&a, b.member), Some(Place::Host(literal("c"))));
    b.machine = Arc::new(());
    b.network.state().reap();
    b.deliver("b", &a);
    assert_eq!(place(&a, b.member), Some(Place::Host(literal("c"))));
}

#[test]
fn a_member_that_was_won_elsewhere_is_no_member_here() {
    let (a, mut b) = pair();
    b.learn("c", taken_over(b.member), Word::Yes);
    assert_eq!(place(&b, b.member), Some(Place::Host(literal("c"))));
    a.send(b.member, "to the copy that is about to end");
    a.deliver("a", &b);
    assert!(b.network.state().locals.is_empty());
    b.machine = Arc::new(());
    b.network.state().reap();
    assert_eq!(place(&b, b.member), Some(Place::Host(literal("c"))), "it is known where it went");
}

/// Member 0 of hosts a and b, whose lists are these, once each has heard of the other.
fn strangers() -> (Side, Side) {
    let (a, b) = (Side::of(&["db", "web"], 0, "b"), Side::of(&["cache", "db", "web"], 1, "a"));
    for side in [&a, &b] {
        side.network.state().open(&side.way);
    }
    for _ in 0..2 {
        a.deliver("a", &b);
        b.deliver("b", &a);
    }
    (a, b)
}

/// Regression: db of host b was web to host a. Its frames went to whoever had that number, and a VM whose
/// number another had won had no network at all.
#[test]
fn a_host_with_another_list_of_members_is_another_network() {
    let (a, b) = strangers();
    for side in [&a, &b] {
        assert_eq!(side.network.state().roster.here().len(), 1, "only itself is known");
        assert!(side.send(Member(2), "over the bridge"));
    }
    let expected = "its members are db, web here, and cache, db, web on host b";
    assert_eq!(a.network.state().lacks().unwrap(), expected);
    let [problem] = &a.network.problems()[..] else { panic!("it is a problem of host a") };
    assert!(problem.starts_with(&format!("cluster shop: {expected}: ")), "{problem}");
    assert!(b.network.problems()[0].contains("cache, db, web here, and db, web on host a"));

    let won = MemberCards { member: a.member, generation: Generation(9), cards: vec![] };
    let names = Some(b.names.clone());
    let presence =
        Presence { incarnation: Incarnation(1), members: vec![won], names, answer: false };
    a.learn("b", presence, Word::Yes);
    assert_eq!(place(&a, a.member), Some(Place::Here), "another VM was won there");
    // A sign of host b's db, which is web here.
    let envelope = Envelope {
        from: b.member,
        to: a.member,
        incarnation: Incarnation(1),
        number: SnapshotNumber(5),
    };
    let calls = a.network.state().received(&literal("b"), &envelope.encode()).unwrap();
    assert!(calls.is_empty(), "no snapshot of this cluster");

    // Host c, with this list, ran web; host b has taken it over.
    let there = |member, generation| MemberCards {
        member,
        generation: Generation(generation),
        cards: vec![],
    };
    let presence = |members, names| Presence {
        incarnation: Incarnation(1),
        members,
        names: Some(names),
        answer: false,
    };
    let of_c = presence(vec![there(Member(1), 4)], a.names.clone());
    a.learn("c", of_c, Word::Nobody);
    assert_eq!(place(&a, Member(1)), Some(Place::Host(literal("c"))));
    let stale = presence(vec![there(Member(2), 3)], b.names.clone());
    a.learn("b", stale, Word::No);
    assert_eq!(place(&a, Member(1)), Some(Place::Host(literal("c"))), "it has lost it since");
    let taken = presence(vec![there(Member(2), 5)], b.names.clone());
    a.learn("b", taken, Word::Yes);
    assert_eq!(place(&a, Member(1)), None, "its frames pass outside");

    a.network.state().forget(&literal("b"));
    assert!(a.network.problems().is_empty(), "it is connected no more");
}

#[test]
fn a_member_does_not_join_others_under_another_list() {
    let mut a = Side::new(0, "b");
    a.names.push(literal("cache"));
    let refused = a.join(Incarnation(1), 4).unwrap_err().to_string();
    assert!(refused.contains("are web, db; it has web, db, cache now"), "{refused}");
    a.join(Incarnation(2), 4).unwrap();
}

/// Regression: a known host that said so had the frames for a member, and the member was cut off.
#[test]
fn a_host_that_the_arbiter_does_not_name_takes_no_member() {
    let (a, b) = pair();
    let mut greatest = taken_over(b.member);
    greatest.members[0].generation = Generation((1 << 48) - 1);
    for word in [Word::No, Word::Silent, Word::Nobody] {
        b.learn("c", greatest.clone(), word);
        assert_eq!(place(&b, b.member), Some(Place::Here), "{word:?}");
        assert!(!b.network.state().locals.is_empty(), "{word:?}");
    }
    for word in [Word::No, Word::Silent] {
        a.learn("c", greatest.clone(), word);
        assert_eq!(place(&a, b.member), Some(Place::Host(literal("b"))), "{word:?}");
    }
}

#[test]
fn a_silent_arbiter_is_asked_again() {
    let (a, b) = pair();
    let [at_b, at_c] = ["b", "c"].map(|host| Some(Place::Host(host.parse().unwrap())));
    a.learn("c", taken_over(b.member), Word::Silent);
    let asked = std::cell::RefCell::new(Vec::new());
    let ask = |word| {
        a.network.ask_again(&|vm, host, generation| {
            asked.borrow_mut().push(format!("{vm} {host} {generation}"));
            word
        });
        place(&a, b.member)
    };
    assert_eq!(ask(Word::Silent), at_b);
    assert_eq!(ask(Word::Yes), at_c);
    assert_eq!(ask(Word::Yes), at_c);
    assert_eq!(*asked.borrow(), ["db c 2", "db c 2"], "and once it has answered no more");

    a.learn("b", taken_over(b.member), Word::Silent);
    a.network.state().forget(&literal("b"));
    assert_eq!(ask(Word::Yes), at_c);
    assert_eq!(asked.borrow().len(), 2, "it is connected no more");
}

#[test]
fn a_host_speaks_for_its_own_members_only() {
    let (a, b) = pair();
    let sign = |from| Envelope {
        from,
        to: b.member,
        incarnation: Incarnation(1),
        number: SnapshotNumber(9),
    };
    let says = |host: &str, from| {
        let host = host.parse().unwrap();
        b.network.state().received(&host, &sign(from).encode()).unwrap().len()
    };
    assert_eq!(says("c", a.member), 0, "it runs on host a");
    assert_eq!(says("a", Member(7)), 0, "there is no such member");
    assert_eq!(says("a", a.member), 1, "to take snapshot 9");
}

/// A host that said of its members that they had as many cards as a message has room for, again and again, held up each
/// frame of the members here.
#[test]
fn no_host_says_more_of_its_members_than_there_can_be() {
    let said = |members: Vec<(u16, usize)>, names: Option<Vec<String>>| {
        let known = |(member, cards)| MemberCards {
            member: Member(member),
            generation: Generation(1),
            cards: vec![card(Member(1)); cards],
        };
        let members: Vec<MemberCards> = members.into_iter().map(known).collect();
        let names = names.map(|names| names.iter().map(|name| name.parse().unwrap()).collect());
        let presence = Presence { incarnation: Incarnation(1), members, names, answer: true };
        let json = serde_json::to_vec(&presence).unwrap();
        serde_json::from_slice::<Presence>(&json).map(|read| assert_eq!(read, presence))
    };
    let named = |count: usize| Some((0..count).map(|n| format!("vm{n}")).collect());
    said((0..64).map(|member| (member, 14)).collect(), named(64)).unwrap();
    said(vec![(1, 0)], None).unwrap();
    for wrong in [
        said(vec![(1, 15)], named(2)),
        said(vec![(1, 1), (1, 1)], named(2)),
        said((0..65).map(|member| (member, 1)).collect(), None),
        said(vec![(1, 1)], named(65)),
        said(vec![(1, 1)], Some(vec!["db".to_owned(), "db".to_owned()])),
    ] {
        wrong.unwrap_err();
    }
}
