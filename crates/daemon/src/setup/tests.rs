//! Hosts that join, over loopback: what both have afterwards, and tokens that are of no use.

use super::*;
use std::os::unix::fs::PermissionsExt;
use std::thread::{self, JoinHandle};
use std::time::Duration;
use understudy_link::tls::Tls;
use understudy_protocol::literal;

const LIFETIME: Duration = Duration::from_secs(60);

/// A directory for all hosts of a test, and the arbiter's.
struct Site(tempfile::TempDir);

impl Site {
    fn new() -> Site {
        Site(tempfile::tempdir().unwrap())
    }

    fn plan(&self, name: &str) -> Plan {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        Plan { directory: self.0.path().join(name), name: literal_name(name), address }
    }

    fn init(&self, name: &str) -> Plan {
        self.init_with(name, ArbiterSettings::File { path: self.0.path().join("arbiter") })
    }

    fn init_with(&self, name: &str, arbiter: ArbiterSettings) -> Plan {
        let plan = self.plan(name);
        init(&plan, arbiter).unwrap();
        plan
    }
}

fn literal_name(name: &str) -> HostName {
    name.parse().unwrap()
}

/// An invitation at a free port, and the token as the operator sees it.
fn invite(plan: &Plan) -> (String, JoinHandle<Result<Joined, HostError>>) {
    invite_for(plan, LIFETIME)
}

fn invite_for(plan: &Plan, life: Duration) -> (String, JoinHandle<Result<Joined, HostError>>) {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let invitation = Invitation::open(&plan.directory, Some(free), life).unwrap();
    let token = invitation.token().to_string();
    (token, thread::spawn(|| invitation.wait()))
}

fn join_by(plan: &Plan, token: &str) -> Result<Membership, String> {
    join(plan, &token.parse().unwrap()).map_err(|error| error.message)
}

fn config(plan: &Plan) -> HostConfig {
    HostConfig::load(&plan.config()).unwrap()
}

fn tls(plan: &Plan) -> Tls {
    Tls::load(config(plan).tls.as_ref().unwrap(), &plan.name).unwrap()
}

#[test]
fn a_host_joins_and_both_know_each_other() {
    let site = Site::new();
    let (a, b) = (site.init("a"), site.plan("b"));
    assert!(site.0.path().join("arbiter").is_dir());
    let (token, waiting) = invite(&a);
    let joined = join_by(&b, &token).unwrap();
    assert_eq!((joined.invited_by, joined.made.notes), (literal("a"), vec![]));
    let told = waiting.join().unwrap().unwrap();
    assert_eq!((told.name, told.addresses), (literal("b"), vec![b.address]));
    let (ours, theirs) = (config(&a), config(&b));
    assert_eq!((&ours.peers["b"], &theirs.peers["a"]), (&vec![b.address], &vec![a.address]));
    assert_eq!(ours.arbiter, theirs.arbiter);
    drop((tls(&a), tls(&b)));
    // The authority can revoke what it has certified.
    assert_eq!(pki::revoke(&a.pki(), "b").unwrap().certificates, 1);
    assert!(!b.pki().join(pki::CA_KEY).exists(), "the authority's key has travelled");
    let key = fs::metadata(b.pki().join("b.key")).unwrap().permissions().mode();
    assert_eq!(key & 0o777, 0o600);
    let again = join_by(&b, &token).unwrap_err();
    assert!(again.contains("set up already"), "{again}");
}

/// The other's certificate came to lie beside its key.
#[test]
fn a_host_with_an_authority_of_its_own_does_not_join_another() {
    let site = Site::new();
    let (a, b) = (site.init("a"), site.plan("b"));
    fs::create_dir_all(&b.directory).unwrap();
    pki::init(&b.pki()).unwrap();
    let own = fs::read(b.pki().join(pki::CA_CERT)).unwrap();
    let (token, waiting) = invite(&a);
    let refused = join_by(&b, &token).unwrap_err();
    assert!(refused.contains("an authority of its own"), "{refused}");
    assert_eq!(fs::read(b.pki().join(pki::CA_CERT)).unwrap(), own);
    fs::rename(b.pki(), b.directory.join("pki-of-b")).unwrap();
    join_by(&b, &token).expect("the token is not used up");
    waiting.join().unwrap().unwrap();
}

#[test]
fn a_third_host_is_told_of_all_and_who_does_not_know_it_is_told() {
    let site = Site::new();
    let a = site.init("a");
    tell_of_a_third_host(&site, &a);
}

/// etcd forgets a host that is down.
#[test]
fn with_etcd_too_who_does_not_know_a_third_host_is_told() {
    let site = Site::new();
    let a = site.init_with("a", "http://127.0.0.1:9".parse().unwrap());
    tell_of_a_third_host(&site, &a);
}

fn tell_of_a_third_host(site: &Site, a: &Plan) {
    for name in ["b", "c"] {
        let (token, waiting) = invite(a);
        join_by(&site.plan(name), &token).unwrap();
        let told = waiting.join().unwrap().unwrap();
        let strangers = if name == "c" { vec![literal_name("b")] } else { vec![] };
        assert_eq!(told.unknown_to, strangers);
    }
    let c = HostConfig::load(&site.0.path().join("c/host.toml")).unwrap();
    assert_eq!(c.peers.keys().map(|name| &**name).collect::<Vec<_>>(), ["a", "b"]);
}

#[test]
fn a_token_is_good_once() {
    let site = Site::new();
    let a = site.init("a");
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let invitation = Invitation::open(&a.directory, Some(free), LIFETIME).unwrap();
    let token = invitation.token().to_string();
    // Both ask before the invitation has noticed that one of them was let in.
    let results: Vec<Result<Membership, String>> = thread::scope(|scope| {
        let joining = ["b", "c"].map(|name| {
            let plan = site.plan(name);
            let token = &token;
            scope.spawn(move || join_by(&plan, token))
        });
        scope.spawn(|| invitation.wait().unwrap());
        joining.map(|one| one.join().unwrap()).into()
    });
    let refused: Vec<&String> = results.iter().filter_map(|one| one.as_ref().err()).collect();
    assert_eq!(refused.len(), 1, "{results:?}");
    assert!(refused[0].contains("used"), "{refused:?}");
    assert_eq!(config(&a).peers.len(), 1);
    let late = join_by(&site.plan("d"), &token).unwrap_err();
    assert!(late.contains("it was used, it has expired"), "{late}");
}

#[test]
fn a_token_expires() {
    let site = Site::new();
    let a = site.init("a");
    let (token, waiting) = invite_for(&a, Duration::ZERO);
    let expired = waiting.join().unwrap().unwrap_err().message;
    assert!(expired.contains("nobody has joined within"), "{expired}");
    let late = join_by(&site.plan("b"), &token).unwrap_err();
    assert!(late.contains("has expired") && late.contains("understudy invite"), "{late}");
    assert!(config(&a).peers.is_empty());
}

/// The port is the same, the host's answer is not what the token promises.
#[test]
fn tokens_of_other_invitations_and_authorities_are_told_apart() {
    let site = Site::new();
    let (a, other) = (site.init("a"), site.init("other"));
    let (token, waiting) = invite(&a);
    let good: Token = token.parse().unwrap();
    let foreign = {
        let (token, waiting) = invite_for(&other, Duration::ZERO);
        assert!(waiting.join().unwrap().is_err());
        token.parse::<Token>().unwrap()
    };
    let wrong_secret = Token { secret: foreign.secret, ..good.clone() };
    let wrong_authority = Token { authority: foreign.authority, ..good.clone() };
    let b = site.plan("b");
    for (token, words) in
        [(wrong_secret, "waits for another token"), (wrong_authority, "another authority")]
    {
        let refused = join(&b, &token).unwrap_err().message;
        assert!(refused.contains(words), "{words}: {refused}");
        assert!(!b.config().exists() && config(&a).peers.is_empty());
    }
    // The invitation is none the worse for it.
    join(&b, &good).unwrap();
    waiting.join().unwrap().unwrap();
}

#[test]
fn names_and_addresses_that_are_taken_are_refused_and_the_token_stays_good() {
    let site = Site::new();
    let a = site.init("a");
    let (token, waiting) = invite(&a);
    let namesake = Plan { directory: site.0.path().join("x"), ..site.plan("a") };
    let refused = join_by(&namesake, &token).unwrap_err();
    assert!(refused.contains("inviting host's own name"), "{refused}");
    let squatter = Plan { address: a.address, ..site.plan("b") };
    let refused = join_by(&squatter, &token).unwrap_err();
    assert!(refused.contains("`listen`"), "{refused}");
    join_by(&site.plan("b"), &token).unwrap();
    waiting.join().unwrap().unwrap();
    // The same host once more, whose files were lost: at its place it is let in.
    let (token, waiting) = invite(&a);
    let refused = join_by(&Plan { directory: site.0.path().join("y"), ..site.plan("b") }, &token);
    assert!(refused.unwrap_err().contains("has a peer b already"));
    let address = config(&a).peers["b"][0];
    let back = Plan { directory: site.0.path().join("z"), address, ..site.plan("b") };
    join_by(&back, &token).unwrap();
    waiting.join().unwrap().unwrap();
}

/// The host that joined could do over the API whatever the namesake may.
#[test]
fn names_that_mean_somebody_else_are_refused() {
    let site = Site::new();
    let a = site.init("a");
    let api = "[api]\nlisten = \"127.0.0.1:7780\"\n[api.certificates]\nalice = \"admin\"\n";
    fs::write(a.config(), fs::read_to_string(a.config()).unwrap() + api).unwrap();
    pki::issue(&a.pki(), "b", 1).unwrap();
    let (token, waiting) = invite(&a);
    let refused = join_by(&site.plan("alice"), &token).unwrap_err();
    assert!(refused.contains("in [api.certificates]"), "{refused}");
    let refused = join_by(&site.plan("b"), &token).unwrap_err();
    assert!(refused.contains("there is a certificate for b"), "{refused}");
    pki::revoke(&a.pki(), "b").unwrap();
    join_by(&site.plan("b"), &token).unwrap();
    assert_eq!(waiting.join().unwrap().unwrap().name, "b");
}

#[test]
fn nothing_is_overwritten_and_what_is_missing_is_named() {
    let site = Site::new();
    let a = site.init("a");
    let before = fs::read_to_string(a.config()).unwrap();
    let path = site.0.path().join("arbiter");
    let again = init(&a, ArbiterSettings::File { path }).unwrap_err();
    assert_eq!(again.kind, ErrorKind::Conflict);
    assert_eq!(fs::read_to_string(a.config()).unwrap(), before);
    let unmounted = ArbiterSettings::File { path: site.0.path().join("mnt/arbiter") };
    let b = site.plan("b");
    let error = init(&b, unmounted).unwrap_err().message;
    assert!(error.contains("mounted?") && !b.directory.exists(), "{error}");
    let elsewhere = Plan { address: "192.0.2.1:7700".parse().unwrap(), ..site.plan("b") };
    let path = site.0.path().join("arbiter");
    let error = init(&elsewhere, ArbiterSettings::File { path }).unwrap_err().message;
    assert!(error.contains("not an address of this host"), "{error}");
    let error = Invitation::open(&b.directory, None, LIFETIME).err().unwrap().message;
    assert!(error.contains("understudy init"), "{error}");
}
