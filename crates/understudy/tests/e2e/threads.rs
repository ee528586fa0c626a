//! The threads of a protected VM are those of the table (docs/threads.md), and no others.

use crate::lockstep::lockstep;
use crate::stage::{Calm, LIMIT, options, play, repairing_daemon};
use anyhow::{Result, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use understudy_lab::scene::VM;
use understudy_lab::{HostProcess, SceneOptions, wait_for};

/// A VM of one disk and one card takes no more than this of either host, while nothing happens.
const MOST: usize = 10;
/// The backup of one in lockstep has 11, two of which feed its log and look how far that is executed, and another at times.
const MOST_IN_LOCKSTEP: usize = 12;
/// The threads that there are not in lockstep: the log has what the guest receives, and its reads
/// go to this host's own disk unless it is told otherwise.
const NOT_IN_LOCKSTEP: [&str; 2] = ["inbound", "reads"];

/// The table: names of threads by the group that they are of; `N` is a number.
fn map() -> Result<BTreeMap<String, BTreeSet<String>>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/threads.md");
    let text = fs::read_to_string(&path)?;
    let (mut map, mut group) = (BTreeMap::<_, BTreeSet<_>>::new(), String::new());
    for row in text.lines().filter(|line| line.starts_with('|')).skip(2) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let [_, of, threads, ..] = cells[..] else { continue };
        if !of.is_empty() {
            group = of.to_owned();
        }
        let names = threads.split('`').skip(1).step_by(2).map(str::to_owned);
        map.entry(group.clone()).or_default().extend(names);
    }
    ensure!(!map.is_empty(), "{} has no table", path.display());
    Ok(map)
}

/// The host's threads, by number; each by the name that the map has for it.
fn threads(host: &HostProcess) -> Result<BTreeMap<String, String>> {
    let mut threads = BTreeMap::new();
    for task in fs::read_dir(format!("/proc/{}/task", host.pid()))? {
        let task = task?;
        // One that has just ended has no name.
        let Ok(name) = fs::read_to_string(task.path().join("comm")) else { continue };
        threads.insert(task.file_name().to_string_lossy().into_owned(), in_map(name.trim()));
    }
    Ok(threads)
}

/// The system shows 15 characters of a name.
fn in_map(name: &str) -> String {
    let role = match name.rsplit_once('-') {
        Some((role, vm)) if !vm.is_empty() && VM.starts_with(vm) => role,
        _ => name,
    };
    role.replace(|letter: char| letter.is_ascii_digit(), "N")
}

/// Plays one with a guest that is protected, and counts what it took.
fn has_the_threads_of_the_map(options: SceneOptions, follows: &[&str], most: usize) {
    let in_lockstep = options.lockstep;
    play(options, |scene| {
        let map = map()?;
        let of = |groups: &[&str]| -> BTreeSet<String> {
            groups.iter().filter_map(|group| map.get(*group)).flatten().cloned().collect()
        };
        let (at_times, of_host) = (of(&["at times"]), of(&["host"]));
        let before = [threads(scene.host("a")?)?, threads(scene.host("b")?)?];
        scene.start_guest("a")?;
        scene.await_guest()?;
        let unprotected = threads(scene.host("a")?)?;
        ensure!(unprotected.values().any(|name| name == "repair"), "nobody looks for a backup");
        scene.protect("a", "b")?;
        scene.await_protected("a", |_| ())?;
        let sides = [("a", ["primary"].as_slice()), ("b", follows)];
        for (index, (host, side)) in sides.into_iter().enumerate() {
            let always = of(&[side, &["machine"]].concat());
            ensure!(always.len() > 5, "the map has only {always:?} of {side:?}");
            wait_for(&format!("host {host} to have the map's threads alone"), LIMIT, || {
                let mut now = threads(scene.host(host)?)?;
                now.retain(|number, name| {
                    !before[index].contains_key(number) && !of_host.contains(name)
                });
                let names: BTreeSet<String> = now.values().cloned().collect();
                let others: Vec<_> = names.difference(&always).collect();
                let mut missing: Vec<_> = always.difference(&names).collect();
                missing.retain(|name| !in_lockstep || !NOT_IN_LOCKSTEP.contains(&name.as_str()));
                let unknown = others.iter().any(|name| !at_times.contains(*name));
                println!("{host}: {} threads; besides {others:?}, without {missing:?}", now.len());
                Ok((!unknown && missing.is_empty() && now.len() <= most).then_some(()))
            })?;
        }
        Ok(())
    });
}

fn repairing(mut options: SceneOptions) -> SceneOptions {
    for daemon in options.daemons.values_mut() {
        *daemon = repairing_daemon().calm();
    }
    options
}

#[test]
fn a_protected_vm_has_the_threads_of_the_map() {
    has_the_threads_of_the_map(repairing(options()), &["backup"], MOST);
}

#[test]
fn a_vm_in_lockstep_has_the_threads_of_the_map() {
    let follows = ["backup", "backup in lockstep"];
    has_the_threads_of_the_map(repairing(lockstep()), &follows, MOST_IN_LOCKSTEP);
}
