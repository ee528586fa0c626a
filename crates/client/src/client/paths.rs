//! Paths of the API, with whatever its users called things.

use super::Subject;
use std::fmt::Write;
use understudy_snapshot::SnapshotNumber;

/// The path of a VM, whatever its user called it.
pub fn vm_path(name: &str, call: &str) -> String {
    path("/v1/vms/", name, call)
}

/// The path of a VM, or a group.
pub fn subject_path(what: &Subject, call: &str) -> String {
    match what {
        Subject::Vm(name) => vm_path(name, call),
        Subject::Cluster(name) => path("/v1/clusters/", name, call),
    }
}

/// A path that says which snapshots are meant.
pub fn which(
    call: &str,
    group: Option<&str>,
    number: Option<SnapshotNumber>,
    store: Option<&str>,
) -> String {
    let number = number.map(|number| number.to_string());
    let fields = [("group", group), ("number", number.as_deref()), ("store", store)];
    let given = fields.iter().filter_map(|(name, value)| Some((name, (*value)?)));
    let query: Vec<String> =
        given.map(|(name, value)| path(&format!("{name}="), value, "")).collect();
    format!("{call}?{}", query.join("&"))
}

/// The path of a name in a collection, whatever its user called it.
pub fn path(collection: &str, name: &str, call: &str) -> String {
    let mut path = collection.to_owned();
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_".contains(&byte) {
            path.push(byte.into());
        } else {
            // Writing to a string cannot fail.
            let _ = write!(path, "%{byte:02X}");
        }
    }
    path + call
}
