//! Records of another host in this host's state directory: it had another name, or the directory is not its own.
//! Nothing of them is taken for this host's; here its operator is told of it.

use tracing::warn;
use understudy_protocol::{HostName, VmName};
use understudy_replication::records::Record;

/// Says in the log what is of another host.
pub(crate) fn tell(records: &[Record], own: &HostName) {
    if let Some(words) = told(records, own) {
        warn!("{words}");
    }
}

fn told(records: &[Record], own: &HostName) -> Option<String> {
    let strangers = || records.iter().filter(|record| record.image.host != *own);
    let theirs = &strangers().next()?.image.host;
    let vms: Vec<&str> =
        strangers().map(|record| VmName::as_str(&record.definition.name)).collect();
    Some(format!(
        "the records of {} are of host {theirs}, and this is host {own}: if it had that name, `understudy recover VM \
         --force` brings back what ran here alone; else correct `name` or `state_dir` in the configuration",
        vms.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::validity::ImageRole;
    use understudy_protocol::{Generation, literal};
    use understudy_qemu::VmDefinition;
    use understudy_replication::records::Records;

    #[test]
    fn what_is_on_record_of_another_host_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let definition = |vm: &str| -> VmDefinition {
            let disk = serde_json::json!([{ "path": "/d.img", "format": "raw" }]);
            let text = serde_json::json!({ "name": vm, "memory": "64M", "vcpus": 1, "disk": disk });
            serde_json::from_value(text).unwrap()
        };
        let write = |host: &str, vm: &str| {
            let records = Records::new(directory.path(), &host.parse().unwrap());
            std::fs::create_dir(directory.path().join(vm)).unwrap();
            let record = records.of(ImageRole::Active, Generation(1), &definition(vm));
            records.write(&record).unwrap();
        };
        let own: HostName = literal("a");
        let all = || Records::new(directory.path(), &own).all();
        assert_eq!(told(&all(), &own), None);
        write("a", "db");
        assert_eq!(told(&all(), &own), None);
        write("z", "web");
        let words = told(&all(), &own).unwrap();
        assert!(words.contains("the records of web are of host z, and this is host a"), "{words}");
    }
}
