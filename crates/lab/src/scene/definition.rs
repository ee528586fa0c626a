//! The VM's definition file, and the disks that it names.

use super::VM;
use super::guest::{GuestKind, INITRD, KERNEL, append, mac};
use super::options::SceneOptions;
use crate::bench_guest;
use crate::command;
use crate::lab::{BRIDGE, GUEST_ADDRESS, Lab};
use anyhow::{Context, Result};
use serde::Serialize;
use std::fs;
use std::path::PathBuf;
use understudy_protocol::Policy;

/// The definition file of the scene's VM.
#[derive(Serialize)]
struct VmToml {
    name: &'static str,
    memory: String,
    vcpus: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    accel: Option<String>,
    lockstep: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    kernel: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    initrd: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    append: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    policy: Option<Policy>,
    disk: Vec<DiskToml>,
    card: Vec<CardToml>,
}

#[derive(Serialize)]
struct DiskToml {
    path: PathBuf,
    format: &'static str,
}

#[derive(Serialize)]
struct CardToml {
    mac: String,
    bridge: &'static str,
}

fn linux_arguments(options: &SceneOptions) -> String {
    let arguments = append(GUEST_ADDRESS, options.cards);
    match options.kernel_arguments {
        "" => arguments,
        further => format!("{arguments} {further}"),
    }
}

/// Copies the disks and writes the definition; returns its path.
pub(super) fn write_definition(lab: &Lab, options: &SceneOptions) -> Result<PathBuf> {
    let linux = options.kind.is_linux();
    let file = |name| options.kind.has_kernel().then(|| options.guest_files.join(name));
    let cards = if linux { options.cards } else { 0 };
    let card = |index| CardToml { mac: mac(index), bridge: BRIDGE };
    let definition = VmToml {
        name: VM,
        memory: format!("{}M", options.memory_mib),
        vcpus: options.vcpus,
        accel: options.accel.clone(),
        lockstep: options.lockstep,
        kernel: file(KERNEL),
        initrd: file(INITRD),
        append: match options.kind {
            GuestKind::BootSector | GuestKind::Installed => None,
            GuestKind::Linux => Some(linux_arguments(options)),
            GuestKind::Bench => Some(bench_guest::append(GUEST_ADDRESS)),
        },
        policy: options.policy,
        disk: copy_disks(lab, options)?,
        card: (0..cards).map(card).collect(),
    };
    let path = lab.directory().join("vm.toml");
    let text = toml::to_string(&definition).context("cannot write the definition as TOML")?;
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

/// An image's name among the scene's disks.
fn disk_name(image: &str) -> String {
    image.replace('/', "-")
}

fn copy_disks(lab: &Lab, options: &SceneOptions) -> Result<Vec<DiskToml>> {
    let images = options.sources().into_iter().filter(|name| name.ends_with(".img"));
    let copy = |(index, image): (usize, &str)| {
        let from = options.guest_files.join(image);
        let path = lab.directory().join(disk_name(image));
        let paths = [&*from.to_string_lossy(), &*path.to_string_lossy()];
        if index == 1 && options.second_disk_is_qcow2 {
            let convert = ["convert", "-f", "raw", "-O", "qcow2"];
            command::run("qemu-img", &[&convert[..], &paths].concat())?;
            return Ok(DiskToml { path, format: "qcow2" });
        }
        let sparse = ["--sparse=always", "--reflink=auto"];
        command::run("cp", &[&sparse[..], &paths].concat())?;
        Ok(DiskToml { path, format: "raw" })
    };
    images.enumerate().map(copy).collect()
}
