//! The QEMU arguments that a user may add.
//!
//! A list of what is allowed, not of what is refused: a disk, card or character
//! device that Understudy does not know of would be lost at a fail-over, or
//! would send output before it is committed.

use super::Problem;

/// Options that may be added; those without a value are marked.
const ALLOWED: &[(&str, Value)] = &[
    ("-D", Value::Any),
    ("-acpitable", Value::Any),
    ("-bios", Value::Any),
    ("-boot", Value::Any),
    ("-d", Value::Any),
    ("-device", Value::Device),
    ("-fw_cfg", Value::Any),
    ("-global", Value::Global),
    ("-k", Value::Any),
    ("-object", Value::Object),
    ("-rtc", Value::Any),
    ("-smbios", Value::Any),
    ("-trace", Value::Any),
    ("-usb", Value::None),
    ("-uuid", Value::Any),
    ("-vnc", Value::Any),
];

#[derive(Clone, Copy)]
enum Value {
    None,
    Any,
    Device,
    Global,
    Object,
}

/// Devices tied to the host's hardware: QEMU cannot save them.
const HOST_DEVICES: &[&str] = &["ivshmem", "pvrdma", "usb-host", "vfio", "vhost"];

/// Objects that hold no state of the guest.
const OBJECTS: &[&str] = &["iothread", "rng-builtin", "rng-random"];

/// Drivers of PCI bridges and ports.
const BRIDGES: &[&str] =
    &["i82801b11-bridge", "ioh3420", "pci-bridge", "pcie-pci-bridge", "pcie-root-port"];

/// The user's arguments for PCI bridges, and all others.
pub(super) fn split(args: &[String]) -> (Vec<&String>, Vec<&String>) {
    let (mut bridges, mut others) = (Vec::new(), Vec::new());
    let mut args = args.iter().peekable();
    while let Some(arg) = args.next() {
        let device = arg.trim_start_matches('-') == "device";
        let driver = |value: &&String| value.split(',').next().unwrap_or_default().to_owned();
        match args.peek().filter(|value| device && BRIDGES.contains(&&*driver(value))) {
            Some(_) => bridges.extend([Some(arg), args.next()].into_iter().flatten()),
            None => others.push(arg),
        }
    }
    (bridges, others)
}

/// The devices among the user's arguments, with their options.
pub(super) fn devices(args: &[String]) -> impl Iterator<Item = &str> {
    let pairs = args.iter().zip(args.iter().skip(1));
    let devices = pairs.filter(|(option, _)| option.trim_start_matches('-') == "device");
    devices.map(|(_, value)| value.as_str())
}

/// Whether somebody can look at the guest's screen: VNC is the only way that is allowed.
pub(super) fn has_display(args: &[String]) -> bool {
    args.iter().any(|arg| matches!(&arg[..], "-vnc" | "--vnc"))
}

/// Says what is wrong with the user's arguments.
pub(super) fn check_extra_args(args: &[String]) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        if let Err(message) = check_option(arg, &mut args) {
            problems.push(Problem::new("qemu_args", message));
        }
    }
    problems
}

fn check_option<'a>(arg: &str, rest: &mut impl Iterator<Item = &'a String>) -> Result<(), String> {
    // QEMU takes two dashes for one.
    let option = arg.strip_prefix('-').filter(|a| a.starts_with('-')).unwrap_or(arg);
    let Some(&(_, kind)) = ALLOWED.iter().find(|(allowed, _)| *allowed == option) else {
        return Err(refusal(arg, option));
    };
    if matches!(kind, Value::None) {
        return Ok(());
    }
    let value = rest.next().ok_or_else(|| format!("\"{arg}\" needs a value after it"))?;
    check_value(kind, value).map_err(|why| format!("\"{arg} {value}\": {why}"))
}

fn refusal(arg: &str, option: &str) -> String {
    let instead = match option {
        "-m" | "-mem-path" | "-mem-prealloc" => "use the field \"memory\"",
        "-smp" => "use the field \"vcpus\"",
        "-cpu" => "use the field \"cpu\"",
        "-machine" | "-M" => "use the field \"machine\"",
        "-accel" | "-enable-kvm" => "use the field \"accel\"",
        "-kernel" | "-initrd" | "-append" => "use the fields \"kernel\", \"initrd\", \"append\"",
        "-name" => "use the field \"name\"",
        "-vga" => "use the field \"vga\"",
        "-serial" => "use the field \"console\"",
        "-pflash" => "use the field \"firmware\" and a [[disk]] on \"pflash\"",
        "-drive" | "-blockdev" | "-hda" | "-hdb" | "-hdc" | "-hdd" | "-cdrom" | "-fda" | "-fdb"
        | "-sd" | "-mtdblock" => "only disks in [[disk]] are replicated",
        "-net" | "-netdev" | "-nic" => "only cards in [[card]] have their output held",
        "-qmp" | "-qmp-pretty" | "-monitor" | "-mon" | "-S" | "-incoming" | "-daemonize"
        | "-chardev" | "-loadvm" | "-gdb" | "-s" | "-no-shutdown" | "-no-reboot" | "-action" => {
            "Understudy itself controls QEMU"
        }
        _ => "it is not known to keep the VM protectable",
    };
    let allowed: Vec<_> = ALLOWED.iter().map(|(option, _)| *option).collect();
    format!("\"{arg}\" is refused: {instead}; allowed are {}", allowed.join(" "))
}

fn check_value(kind: Value, value: &str) -> Result<(), String> {
    if value.trim_start().starts_with('{') && !matches!(kind, Value::Any) {
        return Err("write it as name,key=value, not as JSON".to_owned());
    }
    match kind {
        Value::None | Value::Any => Ok(()),
        Value::Device => {
            let tied = |name: &&str| HOST_DEVICES.iter().any(|device| name.starts_with(device));
            if let Some(name) = named(value, "driver").find(tied) {
                return Err(format!("{name} is tied to this host and cannot move to another"));
            }
            check_ids(value)
        }
        Value::Object => {
            let known = |name: &str| OBJECTS.contains(&name);
            if named(value, "qom-type").next().is_none() || !named(value, "qom-type").all(known) {
                return Err(format!("allowed objects are {}", OBJECTS.join(", ")));
            }
            check_ids(value)
        }
        Value::Global if value.starts_with("migration.") || value.contains("driver=migration") => {
            Err("Understudy itself controls migration".to_owned())
        }
        Value::Global if value.contains("disable_s3") && !value.ends_with("=1") => {
            Err("a guest that suspends to memory is not protected, so that is not offered"
                .to_owned())
        }
        Value::Global => Ok(()),
    }
}

/// All that QEMU could take for the value of a key: its first word may do without the key, and of
/// several it takes the last.
fn named<'a>(value: &'a str, key: &str) -> impl Iterator<Item = &'a str> {
    value.split(',').enumerate().filter_map(move |(at, word)| match word.split_once('=') {
        Some((found, name)) => (found == key).then_some(name),
        None => (at == 0).then_some(word),
    })
}

/// Refuses the ids that Understudy uses.
fn check_ids(value: &str) -> Result<(), String> {
    let mut ids = value.split(',').filter_map(|part| part.strip_prefix("id="));
    match ids.find(|id| is_own_id(id)) {
        Some(id) => Err(format!("the id \"{id}\" is Understudy's own; choose another")),
        None => Ok(()),
    }
}

fn is_own_id(id: &str) -> bool {
    let numbered = |prefix: &str| {
        id.strip_prefix(prefix).is_some_and(|n: &str| n.starts_with(|c: char| c.is_ascii_digit()))
    };
    ["ram", "console", "firmware", "scsi", "sata", "serial", "guest-agent", "tpm"].contains(&id)
        || ["disk", "card", "nic", "cdrom", "qmp"].into_iter().any(numbered)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(args: &[&str]) -> Vec<String> {
        let args: Vec<_> = args.iter().map(|arg| (*arg).to_owned()).collect();
        check_extra_args(&args).into_iter().map(|problem| problem.message).collect()
    }

    #[test]
    fn harmless_arguments_pass() {
        let args = ["-device", "virtio-rng-pci,id=entropy", "-usb", "--uuid", "1-2", "-D", "/x"];
        assert_eq!(check(&args), Vec::<String>::new());
        assert_eq!(check(&["-global", "ICH9-LPC.disable_s3=1"]), [""; 0], "as it is anyway");
        let args =
            ["-device", "id=e,driver=virtio-rng-pci,rng=r", "-object", "qom-type=rng-random,id=r"];
        assert_eq!(check(&args), Vec::<String>::new());
    }

    #[test]
    fn bridges_come_before_what_is_behind_them() {
        let args = ["-device", "usb-tablet", "-device", "pcie-root-port,id=pci.1", "-usb"];
        let args = args.map(str::to_owned);
        let (bridges, others) = split(&args);
        assert_eq!(bridges, ["-device", "pcie-root-port,id=pci.1"]);
        assert_eq!(others, ["-device", "usb-tablet", "-usb"]);
    }

    #[test]
    fn vnc_is_the_one_display_that_there_can_be() {
        let vnc = |args: &[&str]| {
            has_display(&args.iter().map(|&arg| arg.to_owned()).collect::<Vec<_>>())
        };
        assert!(vnc(&["-usb", "-vnc", ":1"]) && vnc(&["--vnc", "unix:/x"]));
        assert!(!vnc(&["-usb", "-device", "VGA"]));
        for other in ["-display", "-spice", "-sdl", "-curses", "-nographic"] {
            assert_eq!(check(&[other, "x"]).len(), 2, "{other}");
        }
    }

    #[test]
    fn whatever_evades_replication_is_refused() {
        for (args, why) in [
            (&["-incoming", "defer"][..], "controls QEMU"),
            (&["--incoming"], "controls QEMU"),
            (&["-drive"], "[[disk]]"),
            (&["-nic"], "[[card]]"),
            (&["-machine"], "\"machine\""),
            (&["-m"], "\"memory\""),
            (&["-fsdev"], "not known"),
            (&["stray"], "not known"),
            (&["-uuid"], "needs a value"),
            (&["-device", "vfio-pci,host=1:0.0"], "tied to this host"),
            (&["-device", "id=x,driver=vfio-pci,host=1:0.0"], "tied to this host"),
            (&["-device", "virtio-rng-pci,driver=vhost-vsock-pci"], "tied to this host"),
            (&["-device", "{\"driver\":\"vfio-pci\"}"], "not as JSON"),
            (&["-device", "virtio-rng-pci,id=disk0"], "Understudy's own"),
            (&["-object", "memory-backend-ram,id=x,size=1M"], "allowed objects"),
            (&["-object", "id=x"], "allowed objects"),
            (&["-object", "rng-random,id=x,qom-type=secret"], "allowed objects"),
            (&["-object", "rng-random,id=ram"], "Understudy's own"),
            (&["-object", "rng-random,id=x,id=ram"], "Understudy's own"),
            (&["-global", "migration.send-configuration=on"], "controls migration"),
            (&["-global", "ICH9-LPC.disable_s3=0"], "not offered"),
            (&["-global", "driver=PIIX4_PM,property=disable_s3,value=0"], "not offered"),
        ] {
            let found = check(args);
            assert!(found.iter().any(|message| message.contains(why)), "{args:?}: {found:?}");
        }
    }
}
