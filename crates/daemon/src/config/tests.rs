//! Tests of what is accepted, what is refused and how.

use super::*;
use understudy_cluster::store_keys::KeyOfStores;
use understudy_protocol::literal;

const GOOD: &str = r#"
name = "a"
listen = "10.0.0.1:7700"
state_dir = "/srv/state"
socket = "/run/a.sock"
qemu = "/opt/qemu"
agent = "/opt/agent.so"

[arbiter]
kind = "file"
path = "/srv/arbiter"

[peers]
b = "10.0.0.2:7700"
c-2 = "[fe80::1]:7700"

[detection]
timeout_ms = 250

[tls]
ca = "/etc/ca.pem"
cert = "/etc/a.pem"
key = "/etc/a.key"
"#;

/// The error that `GOOD` gives once `from` in it has become `to`.
fn broken(from: &str, to: &str) -> String {
    assert!(GOOD.contains(from), "{from} is not in the good text");
    let text = GOOD.replacen(from, to, 1);
    let error = HostConfig::from_toml(&text, Path::new("host.toml")).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Invalid);
    error.message
}

fn read(text: &str) -> Result<HostConfig, HostError> {
    HostConfig::from_toml(text, Path::new("host.toml"))
}

fn assert_says(message: &str, place: &str, words: &[&str]) {
    assert!(message.starts_with(place), "{message:?} does not start with {place:?}");
    for word in words {
        assert!(message.contains(word), "{message:?} does not say {word:?}");
    }
}

#[test]
fn a_full_file_is_read() {
    let config = HostConfig::from_toml(GOOD, Path::new("host.toml")).unwrap();
    assert_eq!(config.name, "a");
    assert_eq!(config.listen, ["10.0.0.1:7700".parse().unwrap()]);
    assert_eq!(config.state_dir, Path::new("/srv/state"));
    assert_eq!(config.socket, Path::new("/run/a.sock"));
    assert_eq!(config.arbiter, Some(ArbiterConfig::File { path: "/srv/arbiter".into() }));
    assert_eq!(config.peers["b"], ["10.0.0.2:7700".parse().unwrap()]);
    assert_eq!(config.peers["c-2"], ["[fe80::1]:7700".parse().unwrap()]);
    assert_eq!(config.qemu.as_deref(), Some(Path::new("/opt/qemu")));
    assert_eq!(config.agent.as_deref(), Some(Path::new("/opt/agent.so")));
    assert_eq!(config.detection.peer, Duration::from_millis(250));
}

#[test]
fn what_is_left_out_has_its_default() {
    let text = "name = 'a'\nlisten = '127.0.0.1:7700'";
    let config = HostConfig::from_toml(text, Path::new("host.toml")).unwrap();
    assert_eq!(config.state_dir, Path::new("/var/lib/understudy"));
    assert_eq!(config.socket, Path::new(DEFAULT_SOCKET));
    assert_eq!(config.detection.peer, Duration::from_millis(100));
    assert_eq!(config.detection.qemu, Duration::from_millis(1_000));
    assert_eq!(config.detection.epoch, Duration::from_millis(1_000));
    assert_eq!((config.lease, config.watchdog), (Duration::from_secs(15), None));
    assert_eq!((config.arbiter, config.qemu, config.agent), (None, None, None));
    assert!(config.peers.is_empty());
}

#[test]
fn output_is_held_unless_the_operator_allows_otherwise() {
    assert!(!read(GOOD).unwrap().allow_unheld_output);
    let text = format!("{GOOD}[experiments]\nallow_unheld_output = true\n");
    assert!(read(&text).unwrap().allow_unheld_output);
    let text = format!("{GOOD}[experiments]\nunheld = true\n");
    assert_says(&read(&text).unwrap_err().message, "host.toml:", &["allow_unheld_output"]);
}

#[test]
fn keepers_are_asked_for_and_not_beside_a_watchdog() {
    assert!(!read(GOOD).unwrap().keepers);
    let text = format!("keepers = true\n{GOOD}");
    assert!(read(&text).unwrap().keepers);
    let text = text.replace("timeout_ms = 250", "watchdog = \"/dev/watchdog\"");
    assert_says(&read(&text).unwrap_err().message, "host.toml:1: keepers:", &["watchdog"]);
}

#[test]
fn a_field_of_the_wrong_kind_or_unknown_is_named() {
    assert_says(&broken("name = \"a\"", "name = 5"), "host.toml:2: name:", &["string"]);
    assert_says(&broken("state_dir", "statedir"), "host.toml:4:", &["statedir", "state_dir"]);
    assert_says(&broken("250", "\"x\""), "host.toml:18: timeout_ms:", &["whole number"]);
    assert_says(&broken("timeout_ms", "timeout"), "host.toml:18:", &["timeout", "timeout_ms"]);
    assert_says(&broken("path = \"/srv/arbiter\"", ""), "host.toml:", &["`path`", "path ="]);
}

#[test]
fn a_missing_field_is_named() {
    assert_says(&broken("name = \"a\"", ""), "host.toml:", &["missing", "`name`", "name ="]);
    assert_says(&broken("listen = \"10.0.0.1:7700\"", ""), "host.toml:", &["`listen`", "listen ="]);
}

#[test]
fn broken_toml_is_placed() {
    assert_says(&broken("socket = \"/run/a.sock\"", "socket = \"/run"), "host.toml:5:", &[]);
}

#[test]
fn a_bad_name_says_what_is_allowed() {
    for name in ["", "a b", "-a", "host.example", &"x".repeat(64)] {
        let message = broken("name = \"a\"", &format!("name = \"{name}\""));
        assert_says(&message, "host.toml:2: name:", &[name, "63 letters"]);
    }
    assert_says(&broken("c-2 =", "\"c_2\" ="), "host.toml:15: peers.c_2:", &["letters"]);
}

#[test]
fn capitals_of_hosts_names_are_read_as_small_letters() {
    let text = GOOD.replacen("name = \"a\"", "name = \"A\"", 1).replacen("\nb =", "\nB =", 1);
    let config = read(&text).unwrap();
    assert_eq!(config.name, "a");
    assert!(config.peers.contains_key("b"));
    assert_says(
        &broken("c-2 =", "B-2 = \"10.0.0.3:7700\"\nb-2 ="),
        "host.toml:",
        &["host b-2 is listed twice"],
    );
}

#[test]
fn a_bad_address_says_how_to_write_it() {
    for address in ["10.0.0.1", "host:7700", "10.0.0.1:0", "10.0.0.1:70000"] {
        let message = broken("10.0.0.1:7700", address);
        assert_says(&message, "host.toml:3: listen:", &[address, "IP:port"]);
    }
    assert_says(&broken("10.0.0.2:7700", "b"), "host.toml:14: peers.b:", &["IP:port"]);
    assert_says(&broken("10.0.0.2", "0.0.0.0"), "host.toml:14: peers.b:", &["no host"]);
}

#[test]
fn peers_differ_from_each_other_and_from_this_host() {
    assert_says(&broken("b = ", "a = "), "host.toml:14: peers.a:", &["own name"]);
    assert_says(&broken("10.0.0.2", "10.0.0.1"), "host.toml:14: peers.b:", &["`listen`"]);
    let twice = broken("[fe80::1]", "10.0.0.2");
    assert_says(&twice, "host.toml:15: peers.c-2:", &["10.0.0.2:7700", "\"b\""]);
}

#[test]
fn a_host_may_have_several_addresses() {
    let (one, two) = ("\"10.0.0.2:7700\"", "\"10.1.0.2:7700\"");
    let text = GOOD.replace(one, &format!("[{one}, {two}]"));
    let text = text.replace("\"10.0.0.1:7700\"", "[\"10.0.0.1:7700\", \"10.1.0.1:7700\"]");
    let config = HostConfig::from_toml(&text, Path::new("host.toml")).unwrap();
    assert_eq!(config.listen.len(), 2);
    let expected: [SocketAddr; 2] =
        ["10.0.0.2:7700".parse().unwrap(), "10.1.0.2:7700".parse().unwrap()];
    assert_eq!(config.peers["b"], expected);
    let place = "host.toml:14: peers.b:";
    assert_says(&broken(one, "[]"), place, &["0 addresses", "1 to 8"]);
    assert_says(&broken(one, &format!("[{one}, {one}]")), place, &["twice"]);
    assert_says(&broken(one, &format!("[{one}, 7]")), place, &["7 is not an address"]);
    assert_says(&broken(one, "7700"), place, &["7700 is not an address"]);
}

#[test]
fn the_memory_limit_is_a_memory_size() {
    let with = |line: &str| {
        let text = GOOD.replacen("\n[arbiter]", &format!("{line}\n[arbiter]"), 1);
        HostConfig::from_toml(&text, Path::new("host.toml"))
    };
    assert_eq!(with("").unwrap().memory_limit, None);
    assert_eq!(with("memory = \"2G\"\n").unwrap().memory_limit, Some(2 << 30));
    let message = with("memory = \"lots\"\n").unwrap_err().message;
    assert!(message.contains("memory") && message.contains("lots"), "{message}");
}

#[test]
fn strangers_are_kept_out_unless_the_operator_says_so() {
    let (open, tls) = GOOD.split_once("[tls]").unwrap();
    let read = |text: &str| HostConfig::from_toml(text, Path::new("host.toml"));
    let refused = |text: &str| read(text).unwrap_err().message;
    let words = ["10.0.0.1:7700", "[tls]", "understudy pki", "insecure = true"];
    assert_says(&refused(open), "host.toml:3: listen:", &words);
    // Loopback is this machine's own, but the way to the peers is not.
    let local = open.replace("10.0.0.1", "127.0.0.1");
    assert_says(&refused(&local), "host.toml:14: peers.b:", &["10.0.0.2:7700"]);
    assert!(read(&format!("insecure = true\n{open}")).unwrap().insecure);
    let both = format!("insecure = true\n{open}[tls]{tls}");
    assert_says(&refused(&both), "host.toml:1: insecure:", &["[tls]"]);
    let config = read(GOOD).unwrap();
    assert_eq!(config.tls.unwrap().cert, Path::new("/etc/a.pem"));
    assert_says(&broken("/etc/a.key", "a.key"), "host.toml:23: tls.key:", &["absolute"]);
}

#[test]
fn qemus_user_must_exist_and_not_be_root() {
    let with = |user: &str| {
        let text = format!("{GOOD}[qemu_process]\nuser = \"{user}\"\n");
        HostConfig::from_toml(&text, Path::new("host.toml")).unwrap_err().message
    };
    let place = format!("host.toml:{}: qemu_process.user:", GOOD.lines().count() + 2);
    assert_says(&with("no-such-user"), &place, &["useradd"]);
    assert_says(&with("root"), &place, &["root"]);
}

#[test]
fn a_qemus_limits_have_defaults_and_bounds() {
    use understudy_machine::cgroup::Limits;
    let with = |line: &str| read(&format!("{GOOD}[qemu_process]\n{line}\n"));
    assert_eq!(with("").unwrap().limits, Limits::default());
    let given = "memory_beside = \"128M\"\ndescriptors = 512\nthreads = 100";
    let limits = Limits { memory_beside: Some(128 << 20), descriptors: 512, threads: 100 };
    assert_eq!(with(given).unwrap().limits, limits);
    let place = |field: &str| format!("host.toml:{}: {field}", GOOD.lines().count() + 2);
    for (line, field, words) in [
        ("descriptors = 10", "qemu_process.descriptors:", "256 to 1048576"),
        ("threads = 1", "qemu_process.threads:", "96 to 32768"),
        ("memory_beside = \"1K\"", "", "no memory size"),
    ] {
        assert_says(&with(line).unwrap_err().message, &place(field), &[words]);
    }
}

#[test]
fn relative_paths_are_refused() {
    let cases = [
        ("/srv/state", "host.toml:4: state_dir:"),
        ("/run/a.sock", "host.toml:5: socket:"),
        ("/opt/qemu", "host.toml:6: qemu:"),
        ("/opt/agent.so", "host.toml:7: agent:"),
        ("/srv/arbiter", "host.toml:11: arbiter.path:"),
    ];
    for (path, place) in cases {
        assert_says(&broken(path, &path[1..]), place, &[&path[1..], "absolute"]);
    }
}

#[test]
fn a_socket_path_fits_into_an_address() {
    let long = format!("/{}", "s".repeat(107));
    assert_says(&broken("/run/a.sock", &long), "host.toml:5: socket:", &["108", "107"]);
}

#[test]
fn the_arbiter_and_the_time_out_are_checked() {
    assert_says(&broken("\"file\"", "\"disk\""), "host.toml:10: arbiter.kind:", &["\"file\""]);
    for value in ["49", "10001", "-1"] {
        let message = broken("250", value);
        assert_says(&message, "host.toml:18: detection.timeout_ms:", &[value, "50 to 10000"]);
    }
    for value in ["3", "601", "-1"] {
        let message = broken("250", &format!("250\nlease_seconds = {value}"));
        assert_says(&message, "host.toml:19: detection.lease_seconds:", &[value, "4 to 600"]);
    }
    let message = broken("250", "250\nlease_seconds = 0\nwatchdog = '/dev/watchdog'");
    assert_says(&message, "host.toml:20: detection.watchdog:", &["lease_seconds is 0"]);
    let message = broken("250", "250\nwatchdog = 'watchdog'");
    assert_says(&message, "host.toml:19: detection.watchdog:", &["absolute"]);
    for value in ["199", "15001"] {
        let message = broken("250", &format!("250\nqemu_timeout_ms = {value}"));
        assert_says(&message, "host.toml:19: detection.qemu_timeout_ms:", &[value, "200 to 15000"]);
    }
    let message = broken("250", "250\nepoch_timeout_ms = 99");
    assert_says(&message, "host.toml:19: detection.epoch_timeout_ms:", &["99", "100 to 60000"]);
    // Patience with a peer is patience with its work, unless something else is said.
    for (text, epoch) in [("5000", 15_000), ("5000\nepoch_timeout_ms = 900", 900)] {
        let config = read(&GOOD.replacen("250", text, 1)).unwrap();
        assert_eq!(config.detection.epoch, Duration::from_millis(epoch));
    }
}

#[test]
fn a_file_that_is_not_there_is_not_found() {
    let error = HostConfig::load(Path::new("/nonexistent/host.toml")).unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotFound);
    assert!(error.message.contains("/nonexistent/host.toml"));
}

#[test]
fn configured_programs_must_be_there() {
    let config = HostConfig::from_toml(GOOD, Path::new("host.toml")).unwrap();
    assert!(config.qemu_path().unwrap_err().0.contains("/opt/qemu"));
    assert!(config.agent_path().unwrap_err().0.contains("/opt/agent.so"));
}

#[test]
fn metrics_have_one_address() {
    assert_eq!(read(GOOD).unwrap().metrics, None);
    let with = |listen: &str| read(&format!("{GOOD}[metrics]\nlisten = {listen}\n"));
    let address = "10.0.0.1:9177".parse().unwrap();
    assert_eq!(with("\"10.0.0.1:9177\"").unwrap().metrics, Some(address));
    for wrong in ["\"here\"", "[\"10.0.0.1:1\", \"10.0.0.1:2\"]", "9177"] {
        assert_says(&with(wrong).unwrap_err().message, "host.toml:", &["metrics.listen"]);
    }
}

#[test]
fn groups_are_read_and_wrong_ones_named() {
    let with = |groups: &str| read(&format!("keepers = true\n{GOOD}{CLUSTER}[groups]\n{groups}\n"));
    let config = with("shop = ['x', 'y']\nbank = ['z', 'v']").unwrap();
    let shop: Vec<&str> = config.groups["shop"].iter().map(|vm| vm.as_str()).collect();
    assert_eq!((shop, config.groups.len()), (vec!["x", "y"], 2));
    for (wrong, words) in [
        ("shop = ['x']", "at least two"),
        ("shop = ['x', 'x']", "each once"),
        ("shop = ['x', '../y']", "no name for a VM"),
        ("'a/b' = ['x', 'y']", "name of a group"),
        ("shop = ['x', 'y']\nbank = ['y', 'z']", "y is in bank already"),
        ("shop = ['x', 'web']", "[cluster.shop]"),
    ] {
        let message = with(wrong).unwrap_err().message;
        assert!(message.contains(words), "{wrong}: {message}");
    }
    let message = read(&format!("{GOOD}[groups]\nshop = ['x', 'y']\n")).unwrap_err().message;
    assert_says(&message, "host.toml:", &["groups.shop", "keepers = true"]);
}

const CLUSTER: &str = "[cluster.shop]\nmembers = { web = 'a', db = 'b-1' }\nstore = '/srv/s'\n";

#[test]
fn a_cluster_is_read() {
    let text = format!("{GOOD}{CLUSTER}every_minutes = 60\nkeep = 3\nkeep_hours = 2\n");
    let config = read(&text).unwrap();
    let shop = &config.clusters["shop"];
    let members: Vec<_> = shop.members.iter().map(|(vm, host)| (&vm[..], &host[..])).collect();
    assert_eq!(members, [("db", "b-1"), ("web", "a")]);
    let schedule = shop.schedule.unwrap();
    assert_eq!(schedule.every, Duration::from_secs(3600));
    assert_eq!((schedule.retention.newest, schedule.retention.seconds), (3, 7200));
    assert_eq!(read(&format!("{GOOD}{CLUSTER}")).unwrap().clusters["shop"].schedule, None);
}

#[test]
fn a_wrong_cluster_is_named() {
    let wrong = |right: &str, wrong: &str| {
        let cluster = format!("{CLUSTER}every_minutes = 60\n");
        assert!(cluster.contains(right));
        let message =
            read(&format!("{GOOD}{}", cluster.replace(right, wrong))).unwrap_err().message;
        assert!(message.starts_with("host.toml:"), "{message}");
        message
    };
    let cases = [
        ("cluster.shop", "cluster.'../x'", "cannot be the name of a group"),
        ("{ web = 'a', db = 'b-1' }", "{}", "0 members; 1 to 64"),
        ("'b-1'", "'b 1'", "is not a host name"),
        ("'/srv/s'", "'srv'", "is no store's address"),
        ("60", "0", "out of range; allowed is 1 to"),
        ("store = '/srv/s'\n", "", "name the store"),
        ("every_minutes", "every", "every_minutes"),
    ];
    for (right, replaced, says) in cases {
        let message = wrong(right, replaced);
        assert!(message.contains(says), "{says:?} is not in: {message}");
    }
    let twice = format!("{GOOD}{CLUSTER}[cluster.also]\nmembers = {{ db = 'a' }}\n");
    let message = read(&twice).unwrap_err().message;
    assert!(message.contains("db is in [cluster.also] already"), "{message}");
}

/// It was let pass: the host must start with it. Snapshots of the VM are refused where they are asked for.
#[test]
fn a_cluster_may_have_a_vms_name() {
    let with = |clusters: &str| read(&format!("{GOOD}{clusters}"));
    let of_its_own = "[cluster.db]\nmembers = { web = 'a', db = 'b-1' }\n";
    let of_anothers =
        "[cluster.db]\nmembers = { web = 'a' }\n[cluster.shop]\nmembers = { db = 'a' }\n";
    for clusters in [of_its_own, of_anothers] {
        let config = with(clusters).unwrap();
        assert!(!config.clusters["db"].is_only(&literal("db")));
    }
    let config = with("[cluster.db]\nmembers = { db = 'a' }\n").unwrap();
    assert!(config.clusters["db"].is_only(&literal("db")));
}

#[test]
fn stores_that_peers_may_name_are_the_configurations() {
    let good = format!("snapshot_stores = ['/srv/named']\n{GOOD}{CLUSTER}");
    let stores = read(&good).unwrap().stores;
    let may = |store: &str| stores.check(&store.parse().unwrap()).is_ok();
    assert!(may("/srv/named/below") && may("/srv/s"));
    assert!(!may("/srv") && !may("/srv/other"));
    let error = read(&good.replace("/srv/named", "/srv/../etc")).unwrap_err().message;
    assert_says(&error, "host.toml:", &["snapshot_stores", "/srv/../etc"]);
}

#[test]
fn keys_of_stores_are_named_by_store_and_file() {
    let keys = |line: &str| read(&format!("{GOOD}[snapshot_keys]\n{line}\n"));
    assert_eq!(read(GOOD).unwrap().store_keys, StoreKeys::default());
    let config = keys("'/srv/snapshots' = '/etc/key'\n's3://b/x' = '/etc/s3'").unwrap();
    let files = [("/srv/snapshots", "/etc/key"), ("s3://b/x", "/etc/s3")];
    let file = |(store, file): (&str, &str)| {
        (store.parse().unwrap(), KeyOfStores::File(PathBuf::from(file)))
    };
    assert_eq!(config.store_keys, StoreKeys::new(files.map(file)));
    let config = keys("'/srv/snapshots' = 'plain'").unwrap();
    let plain = ("/srv/snapshots".parse().unwrap(), KeyOfStores::Plain);
    assert_eq!(config.store_keys, StoreKeys::new([plain]));
    assert!(config.stores.check(&"/srv/snapshots/shop".parse().unwrap()).is_ok());
    let error = keys("'snapshots' = '/etc/key'").unwrap_err().message;
    assert_says(&error, "host.toml:", &["snapshot_keys", "is no store's address"]);
    let error = keys("'/srv/snapshots' = 'key'").unwrap_err().message;
    assert_says(&error, "host.toml:", &["snapshot_keys", "/srv/snapshots"]);
}

#[test]
fn the_time_to_power_off_is_checked() {
    assert_eq!(read(GOOD).unwrap().power_off_timeout, Duration::from_secs(60));
    let with = |seconds: &str| read(&format!("{GOOD}[shutdown]\npower_off_seconds = {seconds}\n"));
    for (seconds, expected) in [("0", 0), ("90", 90), ("3600", 3600)] {
        let timeout = with(seconds).unwrap().power_off_timeout;
        assert_eq!(timeout, Duration::from_secs(expected));
    }
    for seconds in ["-1", "3601"] {
        let words = with(seconds).unwrap_err().message;
        assert_says(&words, "host.toml:", &["shutdown.power_off_seconds", seconds, "0 to 3600"]);
    }
}

#[test]
fn a_webhook_is_the_address_of_a_web_server() {
    let with = |url: &str| GOOD.to_owned() + &format!("[webhook]\nurl = \"{url}\"\n");
    let config = read(&with("https://alerts.example.org/hook/s3cret")).unwrap();
    let webhook = config.webhook.unwrap();
    assert_eq!(webhook.as_str(), "https://alerts.example.org/hook/s3cret");
    assert_eq!(webhook.shown(), "https://alerts.example.org/…", "the path may be secret");
    for url in ["alerts.example.org", "ftp://alerts.example.org", "https://", ""] {
        let error = read(&with(url)).unwrap_err();
        assert_says(&error.message, "host.toml:", &["webhook.url", "for example"]);
    }
}

#[test]
fn the_api_is_served_to_those_who_are_named_and_over_tls_only() {
    let with = |api: &str| GOOD.to_owned() + "[api]\nlisten = \"10.0.0.1:7780\"\n" + api;
    let both = "tokens = { admin = \"/etc/t\" }\ncertificates = { alice = \"read\" }\n";
    let api = read(&with(both)).unwrap().api.unwrap();
    assert_eq!(api.tokens[&Access::Admin], Path::new("/etc/t"));
    assert_eq!(api.certificates["alice"], Access::Read);
    assert!(Access::Read < Access::Operate && Access::Operate < Access::Admin);
    let cases = [
        ("", "nobody could use it"),
        ("tokens = { root = \"/etc/t\" }", "there are read, operate and admin"),
        ("tokens = { read = \"t\" }", "not an absolute path"),
        ("certificates = { alice = \"all\" }", "there is no role \"all\""),
        ("certificates = { \"a b\" = \"read\" }", "api.certificates.a b"),
    ];
    for (api, words) in cases {
        assert_says(&read(&with(api)).unwrap_err().message, "host.toml:", &[words]);
    }
    let plain = "name = \"a\"\nlisten = \"127.0.0.1:7700\"\n[api]\nlisten = \"127.0.0.1:7780\"\n";
    let error = read(&(plain.to_owned() + both)).unwrap_err();
    assert_says(&error.message, "host.toml:4: api.listen", &["no [tls]", "understudy pki"]);
}

/// The daemon waited for its own address, and ended after its guests had started.
#[test]
fn an_address_is_for_one_thing() {
    let with = |listen: &str, metrics: &str, api: &str| {
        let text = GOOD.replace("\"10.0.0.1:7700\"", listen);
        read(&format!(
            "{text}[metrics]\nlisten = \"{metrics}\"\n[api]\nlisten = \"{api}\"\ncertificates = {{ c = \"read\" }}\n"
        ))
    };
    let own = "\"10.0.0.1:7700\"";
    assert!(with(own, "10.0.0.1:9177", "10.0.0.1:7780").is_ok());
    assert!(with(own, "10.1.0.1:7700", "0.0.0.0:7780").is_ok());
    assert!(with(own, "[::]:7700", "[fe80::1]:7780").is_ok());
    for (listen, metrics, api, field, words) in [
        (own, "10.0.0.1:7700", "10.0.0.1:7780", "metrics.listen", "listen has 10.0.0.1:7700"),
        (own, "10.0.0.1:9177", "0.0.0.0:7700", "api.listen", "listen has 10.0.0.1:7700"),
        (own, "0.0.0.0:80", "10.0.0.1:80", "api.listen", "metrics.listen has 0.0.0.0:80"),
        (
            "['0.0.0.0:1', '10.0.0.1:1']",
            "10.0.0.1:2",
            "10.0.0.1:3",
            "listen",
            "listen has 0.0.0.0:1",
        ),
    ] {
        let error = with(listen, metrics, api).unwrap_err().message;
        assert_says(&error, "host.toml:", &[field, words, "use another port"]);
    }
}
