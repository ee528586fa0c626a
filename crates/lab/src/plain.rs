//! A guest on QEMU as anybody would start it, without the product: what the
//! product's guests are compared with.
//!
//! It is the machine that the product makes of the same definition (type, devices,
//! places, accelerator, sandbox), but its card is QEMU's own tap, its disks are
//! local raw files in the host's page cache (see [`PlainOptions::disks`]), and
//! its memory is QEMU's ordinary memory.

use crate::bench_guest::BenchGuest;
use crate::command;
use crate::emulator::{Blueprint, Emulator, Parts, check_tap, raw_disk};
use crate::lab::Lab;
use crate::wait::await_servers;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;
use understudy_qemu::definition::{
    AcceleratorChoice, CardDefinition, CardModel, DiskBus, DiskDefinition, DiskFormat,
};
use understudy_qemu::{Capabilities, VmDefinition};

/// The address of a plain guest, unless its options say another.
pub const PLAIN_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 60);
const MAC: &str = "52:54:00:75:75:01";
const QEMU: &str = "qemu-system-x86_64";

/// Options that a plain guest is made of.
#[derive(Clone, Debug)]
pub struct PlainOptions {
    /// Its name on its host, and its tap's: at most 15 letters, digits and `-`.
    pub name: String,
    /// Its kernel.
    pub kernel: PathBuf,
    /// The kernel's initial RAM disk.
    pub initrd: PathBuf,
    /// The kernel's command line, which gives it `address`.
    pub append: String,
    /// Raw images; the guest gets copies. They are read and written through the
    /// host's page cache, and a flush of the guest's is an fdatasync: the same that
    /// the product's NBD server does and promises.
    pub disks: Vec<PathBuf>,
    /// Its memory in MiB.
    pub memory_mib: u32,
    /// Its virtual CPUs.
    pub vcpus: u32,
    /// Accelerator that executes its instructions.
    pub accel: AcceleratorChoice,
    /// Whether its time is counted in its instructions, with all that the product changes of
    /// a machine for lockstep but the log.
    pub counted: bool,
    /// Its card's hardware address.
    pub mac: String,
    /// Its address.
    pub address: Ipv4Addr,
    /// QEMU's program.
    pub qemu: PathBuf,
}

impl PlainOptions {
    /// The test guest of `guests/build`: 512 MiB, one vCPU, one disk, one card.
    pub fn test_guest(guest_files: &Path) -> PlainOptions {
        PlainOptions {
            name: "plain".to_owned(),
            kernel: guest_files.join("vmlinuz"),
            initrd: guest_files.join("initrd.gz"),
            append: crate::scene::append(PLAIN_ADDRESS, 1),
            disks: vec![guest_files.join("disk.img")],
            memory_mib: 512,
            vcpus: 1,
            accel: AcceleratorChoice::Auto,
            counted: false,
            mac: MAC.to_owned(),
            address: PLAIN_ADDRESS,
            qemu: QEMU.into(),
        }
    }

    /// The guest of the benchmark suite, with the shape of the test guest.
    pub fn bench_guest(guest_files: &Path) -> Result<PlainOptions> {
        let BenchGuest { kernel, initrd, append, image } =
            BenchGuest::files(guest_files, PLAIN_ADDRESS)?;
        let (disks, shape) = (vec![image], PlainOptions::test_guest(guest_files));
        Ok(PlainOptions { kernel, initrd, append, disks, ..shape })
    }

    /// The same, beside it: as the product's lockstep would run it, but without a log. There
    /// may be several, with numbers from 1 to 9.
    pub fn counted_bench_guest(guest_files: &Path, number: u8) -> Result<PlainOptions> {
        let address = Ipv4Addr::from(u32::from(PLAIN_ADDRESS) + u32::from(number));
        let append = BenchGuest::files(guest_files, address)?.append;
        let plain = PlainOptions::bench_guest(guest_files)?;
        Ok(PlainOptions {
            name: format!("counted{number}"),
            append,
            accel: AcceleratorChoice::Tcg,
            counted: true,
            mac: format!("52:54:00:75:76:{number:02}"),
            address,
            ..plain
        })
    }

    /// Definition as a user of the product would write it.
    pub(crate) fn definition(&self, disks: &[PathBuf]) -> Result<VmDefinition> {
        let disk = |path: &PathBuf| DiskDefinition::new(path, DiskFormat::Raw, DiskBus::Virtio);
        let name = self.name.parse().expect("variants have names of VMs");
        let memory = format!("{}M", self.memory_mib).parse()?;
        let definition = VmDefinition {
            accel: self.accel,
            kernel: Some(self.kernel.clone()),
            initrd: Some(self.initrd.clone()),
            append: Some(self.append.clone()),
            disks: disks.iter().map(disk).collect(),
            cards: vec![CardDefinition::new(
                self.mac.parse()?,
                crate::lab::BRIDGE,
                CardModel::VirtioNet,
            )],
            ..VmDefinition::new(name, memory, self.vcpus)
        };
        let problems = definition.validate().into_iter().chain(definition.missing_boot_files());
        let problems: Vec<String> = problems.map(|problem| problem.to_string()).collect();
        ensure!(problems.is_empty(), "{}", problems.join("; "));
        Ok(definition)
    }
}

/// Home of a plain guest: what each QEMU that runs it is started with.
pub(crate) struct Home {
    pub(crate) options: PlainOptions,
    pub(crate) host: String,
    qemu: Capabilities,
    /// Directory that is removed with everything in it.
    pub(crate) directory: TempDir,
    pub(crate) disks: Vec<PathBuf>,
}

impl Home {
    pub(crate) fn make(lab: &Lab, host: &str, options: &PlainOptions) -> Result<Home> {
        let qemu = Capabilities::probe(&options.qemu)?;
        let directory = tempfile::Builder::new()
            .prefix(&format!("{}-", options.name))
            .tempdir_in(lab.host_directory(host)?)?;
        let disks = copy_disks(&options.disks, directory.path())?;
        Ok(Home { options: options.clone(), host: host.to_owned(), qemu, directory, disks })
    }

    /// QEMU's version.
    pub(crate) fn version(&self) -> String {
        self.qemu.version.to_string()
    }

    /// Starts a QEMU with this tap and the raw disks.
    pub(crate) fn start_plain(&self, lab: &Lab, tap: &str, incoming: bool) -> Result<Emulator> {
        let nodes = self.disks.iter().enumerate().map(|(n, image)| raw_disk(n, image));
        self.start(lab, tap, Parts { disks: nodes.collect::<Result<_>>()?, incoming, more: vec![] })
    }

    /// Starts a QEMU with this tap and these parts.
    pub(crate) fn start(&self, lab: &Lab, tap: &str, parts: Parts) -> Result<Emulator> {
        check_tap(lab, &self.host, tap)?;
        let directory = self.directory.path().join(tap);
        fs::create_dir(&directory)?;
        let definition = &self.options.definition(&self.disks)?;
        let (qemu, counted) = (&self.qemu, self.options.counted);
        let blueprint = Blueprint { qemu, definition, counted, tap, parts, directory: &directory };
        Emulator::start(lab, &self.host, &blueprint)
    }
}

/// Copies of the images in `directory`.
pub(crate) fn copy_disks(images: &[PathBuf], directory: &Path) -> Result<Vec<PathBuf>> {
    let copy = |(n, image): (usize, &PathBuf)| {
        let copy = directory.join(format!("disk{n}.img"));
        let paths = [&*image.to_string_lossy(), &*copy.to_string_lossy()];
        command::run("cp", &[&["--sparse=always", "--reflink=auto"][..], &paths].concat())?;
        Ok(copy)
    };
    images.iter().enumerate().map(copy).collect()
}

/// A running guest without the product. Dropping it ends its QEMU, and removes its
/// tap, its disks and its directory.
pub struct PlainGuest {
    // Fields are dropped in order: QEMU first, then what it uses.
    pub(crate) emulator: Emulator,
    pub(crate) home: Home,
    /// Number of times that it was migrated, or was to be.
    pub(crate) hops: u32,
}

impl PlainGuest {
    /// Starts it on a host, and returns while it boots.
    pub fn start(lab: &Lab, host: &str, options: &PlainOptions) -> Result<PlainGuest> {
        let started = || {
            let home = Home::make(lab, host, options)?;
            let emulator = home.start_plain(lab, &options.name, false)?;
            emulator.cont()?;
            Ok(PlainGuest { emulator, home, hops: 0 })
        };
        let started: Result<PlainGuest> = started();
        started.with_context(|| format!("cannot start the plain guest `{}`", options.name))
    }

    /// Waits until its servers on these ports answer the laboratory's client.
    pub fn await_boot(&self, lab: &Lab, ports: &[u16]) -> Result<()> {
        let servers: Vec<SocketAddr> = ports.iter().map(|&port| self.server(port)).collect();
        await_servers(lab, "the plain guest", &servers)
    }

    /// One of its servers.
    pub fn server(&self, port: u16) -> SocketAddr {
        SocketAddr::from((self.home.options.address, port))
    }

    /// Its address.
    pub fn address(&self) -> Ipv4Addr {
        self.home.options.address
    }

    /// The unix socket of its console.
    pub fn console(&self) -> &Path {
        self.emulator.console()
    }

    /// QEMU's version.
    pub fn qemu_version(&self) -> String {
        self.home.version()
    }

    /// QEMU's process id.
    pub fn qemu_pid(&self) -> u32 {
        self.emulator.pid()
    }

    /// Makes it stand still (QMP `stop`).
    pub fn pause(&self) -> Result<()> {
        self.emulator.stop()
    }

    /// Lets it run on (QMP `cont`).
    pub fn resume(&self) -> Result<()> {
        self.emulator.cont()
    }

    /// Times that it stood still, each time that it did and ran on.
    pub fn pauses(&self) -> Vec<Duration> {
        self.emulator.events().pauses()
    }
}
