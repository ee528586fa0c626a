//! The counts of keepers, on their daemon's page: each counts of its own VM what a daemon counts of
//! all, and says it on a page like this one.

use std::collections::BTreeMap;
use understudy_protocol::VmName;

/// One keeper's page.
pub struct KeptPage {
    /// Its VM.
    pub vm: VmName,
    /// OpenMetrics text.
    pub text: String,
}

/// Merges what was counted here and by keepers, of each family that `all` has. Of a VM that has a
/// keeper what the daemon has counted before does not count.
pub fn merge(all: &str, own: &str, kept: &[KeptPage]) -> String {
    let own = Index::of(own);
    let kept: Vec<(&VmName, Index<'_>)> =
        kept.iter().map(|page| (&page.vm, Index::of(&page.text))).collect();
    let mut merged = String::new();
    for (name, lines) in families(all) {
        let of_daemon = |line: &&str| !kept.iter().any(|(vm, _)| is_of(line, vm));
        let of_keepers =
            kept.iter().flat_map(|(vm, page)| page.values(name).filter(|line| is_of(line, vm)));
        let values: Vec<&str> = own.values(name).filter(of_daemon).chain(of_keepers).collect();
        // A family without values is not on a page.
        let heads = lines.into_iter().filter(|line| is_head(line) && !values.is_empty());
        for line in heads.chain(values.iter().copied()) {
            merged += line;
            merged.push('\n');
        }
    }
    merged
}

/// The lines of a page, by family.
struct Index<'a>(BTreeMap<&'a str, Vec<&'a str>>);

impl<'a> Index<'a> {
    fn of(page: &'a str) -> Index<'a> {
        Index(families(page).collect())
    }

    /// The values that it has of a family.
    fn values(&self, family: &str) -> impl Iterator<Item = &'a str> + use<'a, '_> {
        let lines = self.0.get(family).into_iter().flatten().copied();
        lines.filter(|line| !is_head(line))
    }
}

fn is_head(line: &str) -> bool {
    line.starts_with('#')
}

/// Whether a line is a value of a VM's.
fn is_of(line: &str, vm: &VmName) -> bool {
    line.contains(&format!("vm=\"{vm}\""))
}

/// The families of a page, each with its lines; the first of these says what it is.
fn families(page: &str) -> impl Iterator<Item = (&str, Vec<&str>)> {
    const HELP: &str = "# HELP ";
    let mut lines = page.lines().peekable();
    std::iter::from_fn(move || {
        let first = lines.find(|line| line.starts_with(HELP))?;
        let mut family = vec![first];
        while let Some(line) = lines.next_if(|line| !line.starts_with(HELP) && *line != "# EOF") {
            family.push(line);
        }
        Some((first.strip_prefix(HELP)?.split(' ').next()?, family))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::counted;
    use understudy_protocol::literal;
    use understudy_report::Meters;

    fn meters(vms: &[(&'static str, u64)]) -> String {
        let meters = Meters::default();
        for (vm, checkpoints) in vms {
            let of_vm = meters.of(&literal(vm));
            of_vm.checkpoints.inc_by(*checkpoints);
            of_vm.pauses.observe(0.001);
        }
        counted(&meters)
    }

    fn of_keeper(vm: &'static str, text: String) -> KeptPage {
        KeptPage { vm: literal(vm), text }
    }

    #[test]
    fn what_a_keeper_has_counted_is_on_its_daemons_page_once() {
        let own = meters(&[("db", 7), ("web", 3)]);
        // Another VM's figures are not a keeper's to tell, and what this daemon does not have ends nothing.
        let more = "# HELP understudy_new New.\n# TYPE understudy_new gauge\nunderstudy_new 1\n";
        let text = format!("{more}{}# EOF\n", meters(&[("db", 9), ("web", 99)]));
        let all = meters(&[("any", 0)]);
        let page =
            merge(&all, &own, &[of_keeper("db", text.clone()), of_keeper("gone", "?".into())]);
        let values = |name: &str| -> Vec<&str> {
            page.lines().filter(|line| line.starts_with(name)).collect()
        };
        let checkpoints = [
            r#"understudy_vm_checkpoints_total{vm="web"} 3"#,
            r#"understudy_vm_checkpoints_total{vm="db"} 9"#,
        ];
        assert_eq!(values("understudy_vm_checkpoints_total"), checkpoints);
        assert_eq!(values("understudy_vm_pause_seconds_count").len(), 2);
        assert_eq!(page.matches("# TYPE understudy_vm_checkpoints counter").count(), 1);
        assert!(!page.contains("understudy_new") && !page.contains("EOF"), "{page}");
        // A daemon all of whose VMs have keepers has counted nothing itself.
        let alone = merge(&all, "", &[of_keeper("db", text)]);
        assert!(alone.contains("# TYPE understudy_vm_pause_seconds histogram"), "{alone}");
        assert!(alone.contains(checkpoints[1]) && !alone.contains("any"), "{alone}");
    }

    #[test]
    fn without_keepers_the_page_is_the_daemons() {
        let own = meters(&[("db", 7)]);
        assert_eq!(merge(&own, &own, &[]), own);
        assert_eq!(merge(&own, "", &[]), "");
    }
}
