//! More guests in a scene, beside its own: members of a cluster, or of a pair.

use crate::command;
use crate::lab::GUEST_ADDRESS;
use crate::scene::Scene;
use anyhow::{Context, Result};
use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// Beginning of what the guest's kernel is told of the address of a second card.
const SECOND_CARD: &str = "us.ip2=";

/// Traits that tell a guest from the scene's own, which it is otherwise like; but it is never in
/// lockstep, and has one card.
#[derive(Clone, Copy, Debug)]
pub struct Sibling<'a> {
    /// Its name on every host.
    pub name: &'a str,
    /// Its address.
    pub address: Ipv4Addr,
    /// Its card's hardware address.
    pub mac: &'a str,
}

impl Sibling<'_> {
    /// Writes its definition, whose path it returns, and copies its disks from the scene's own
    /// guest's, which must not have been started yet.
    pub fn define(&self, scene: &Scene) -> Result<PathBuf> {
        let directory = scene.lab().directory();
        let text = fs::read_to_string(scene.definition())?;
        let table = text.parse().context("the scene's definition is no TOML")?;
        let (table, copies) = self.altered(table, directory)?;
        for (from, to) in copies {
            let paths = [&*from.to_string_lossy(), &*to.to_string_lossy()];
            command::run("cp", &[&["--sparse=always", "--reflink=auto"][..], &paths].concat())?;
        }
        let path = directory.join(format!("{}.toml", self.name));
        fs::write(&path, table.to_string())
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    }

    /// The definition, and which disks it wants copied to where.
    fn altered(
        &self,
        mut table: Table,
        directory: &Path,
    ) -> Result<(Table, Vec<(PathBuf, PathBuf)>)> {
        let append = table.get("append").and_then(Value::as_str);
        let append = append.context("the scene's guest has no kernel")?;
        let append = append.replace(&GUEST_ADDRESS.to_string(), &self.address.to_string());
        let words = append.split(' ').filter(|word| !word.starts_with(SECOND_CARD));
        let words: Vec<&str> = words.collect();
        table.insert("append".to_owned(), words.join(" ").into());
        table.insert("name".to_owned(), self.name.into());
        table.remove("lockstep");
        if let Some(cards) = table.get_mut("card").and_then(Value::as_array_mut) {
            cards.truncate(1);
        }
        let card = tables(&mut table, "card").next().context("the scene's guest has no card")?;
        card.insert("mac".to_owned(), self.mac.into());
        let mut copies = Vec::new();
        for disk in tables(&mut table, "disk") {
            let from = disk.get("path").and_then(Value::as_str).context("a disk has no path")?;
            let to = directory.join(format!("{}-{}.img", self.name, copies.len()));
            copies.push((PathBuf::from(from), to.clone()));
            disk.insert("path".to_owned(), to.display().to_string().into());
        }
        Ok((table, copies))
    }
}

fn tables<'a>(table: &'a mut Table, list: &str) -> impl Iterator<Item = &'a mut Table> {
    let list = table.get_mut(list).and_then(Value::as_array_mut);
    list.into_iter().flatten().filter_map(Value::as_table_mut)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_differs_where_two_guests_must() {
        let text = "name = \"guest\"\nmemory = \"96M\"\nlockstep = true\n\
                    append = \"us.ip=10.77.0.50/24 us.ip2=10.78.0.50/24 quiet\"\n\
                    [[disk]]\npath = \"/lab/disk.img\"\n[[card]]\nmac = \"1\"\nbridge = \"net\"\n\
                    [[card]]\nmac = \"7\"\n";
        let other = Sibling { name: "other", address: Ipv4Addr::new(10, 77, 0, 60), mac: "2" };
        let (table, copies) = other.altered(text.parse().unwrap(), Path::new("/lab")).unwrap();
        let expected = "name = \"other\"\nmemory = \"96M\"\n\
                        append = \"us.ip=10.77.0.60/24 quiet\"\n\
                        [[disk]]\npath = \"/lab/other-0.img\"\n\
                        [[card]]\nmac = \"2\"\nbridge = \"net\"\n";
        assert_eq!(table, expected.parse().unwrap());
        assert_eq!(copies, [("/lab/disk.img".into(), "/lab/other-0.img".into())]);
        let no_kernel = other.altered(Table::new(), Path::new("/lab")).unwrap_err().to_string();
        assert!(no_kernel.contains("no kernel"), "{no_kernel}");
    }
}
