//! Records of another host in this host's state directory: it had another name, or the directory is not its own.
//! Nothing of them is taken for this host's; here its operator is told of it.

use tracing::warn;
use understudy_protocol::HostName;
use understudy_replication::records::Record;

/// Says in the log what is of another host.
pub(crate) fn tell(records: &[Record], own: &HostName) {
    if let Some(words) = told(records, own) {
        warn!("{words}");
    }
}

fn told(records: &[Record], own: &HostName) -> Option<String> {
    let strangers = records.iter().filter(|record| record.image.host != *own);
    let named =
        |record: &Record| format!("{} (of host {})", record.definition.name, record.image.host);
    let vms: Vec<String> = strangers.map(named).collect();
    (!vms.is_empty()).then(|| {
        format!(
            "there are records of other hosts: {}; this is host {own}: if it had such a name, `understudy recover VM \
             --force` brings back what ran here alone; else correct `name` or `state_dir` in the configuration",
            vms.join(", ")
        )
    })
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
        assert!(words.contains(": web (of host z); this is host a"), "{words}");
        write("y", "mail");
        let words = told(&all(), &own).unwrap();
        assert!(words.contains("mail (of host y)") && words.contains("web (of host z)"), "{words}");
    }
}
