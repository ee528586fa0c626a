//! The way from TOML to a [`VmDefinition`], with errors that say where.

use super::{Problem, VmDefinition};
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use toml::de::{DeTable, DeValue};

/// All that is wrong with a definition file.
#[derive(Clone, Debug)]
pub struct DefinitionError {
    /// The file.
    pub file: PathBuf,
    /// The problems; at least one entry.
    pub problems: Vec<LocatedProblem>,
}

/// One thing that is wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocatedProblem {
    /// Line in the file, from 1.
    pub line: Option<usize>,
    /// The problem.
    pub problem: Problem,
}

impl std::error::Error for DefinitionError {}

impl fmt::Display for DefinitionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, LocatedProblem { line, problem }) in self.problems.iter().enumerate() {
            if n > 0 {
                writeln!(f)?;
            }
            write!(f, "{}:", self.file.display())?;
            if let Some(line) = line {
                write!(f, "{line}:")?;
            }
            write!(f, " {problem}")?;
        }
        Ok(())
    }
}

impl VmDefinition {
    /// Reads a definition. `file` is where `text` is from: it names the place in
    /// errors, and relative paths count from its folder. All files that the
    /// definition names must exist.
    pub fn from_toml(text: &str, file: &Path) -> Result<VmDefinition, DefinitionError> {
        VmDefinition::read(text, file, |definition| {
            let mut missing = definition.missing_boot_files();
            missing.extend(definition.missing_disk_images());
            missing
        })
    }

    /// The same for another machine, whose files cannot be looked for.
    pub fn from_toml_elsewhere(text: &str, file: &Path) -> Result<VmDefinition, DefinitionError> {
        VmDefinition::read(text, file, |_| Vec::new())
    }

    fn read(
        text: &str,
        file: &Path,
        missing: impl Fn(&VmDefinition) -> Vec<Problem>,
    ) -> Result<VmDefinition, DefinitionError> {
        let fail = |problems| DefinitionError { file: file.to_owned(), problems };
        let table = DeTable::parse(text).map_err(|e| fail(vec![located(text, None, &e)]))?;
        let table = table.get_ref();
        let mut definition: VmDefinition =
            toml::from_str(text).map_err(|e| fail(vec![located(text, Some(table), &e)]))?;
        definition.resolve_paths(file);
        let mut problems = definition.validate();
        problems.extend(missing(&definition));
        if problems.is_empty() {
            return Ok(definition);
        }
        let locate = |problem: Problem| LocatedProblem {
            line: offset_of(table, &problem.field).map(|offset| line_of(text, offset)),
            problem,
        };
        Err(fail(problems.into_iter().map(locate).collect()))
    }

    fn resolve_paths(&mut self, file: &Path) {
        let folder = file.parent().unwrap_or(Path::new(""));
        let boot = [&mut self.firmware, &mut self.tpm_state, &mut self.kernel, &mut self.initrd];
        let paths = boot.into_iter().flatten();
        for path in paths.chain(self.disks.iter_mut().map(|disk| &mut disk.path)) {
            let joined = folder.join(&*path);
            // Without a current directory the path stays as it is, and is reported as missing.
            *path = std::path::absolute(&joined).unwrap_or(joined);
        }
    }
}

fn located(text: &str, table: Option<&DeTable<'_>>, error: &toml::de::Error) -> LocatedProblem {
    let span = error.span();
    // The span of a missing field at the top is empty, and is no field's.
    let part = span.as_ref().filter(|span| !span.is_empty());
    let field = table.zip(part).and_then(|(table, part)| field_at(table, part));
    LocatedProblem {
        line: span.map(|span| line_of(text, span.start)),
        problem: Problem {
            field: field.unwrap_or_default(),
            message: error.message().trim_end().replace('\n', ", "),
        },
    }
}

fn line_of(text: &str, offset: usize) -> usize {
    let before = &text.as_bytes()[..offset.min(text.len())];
    1 + before.iter().filter(|&&byte| byte == b'\n').count()
}

/// The field, like `disk[0].path`, whose key or value holds this part of the text.
fn field_at(table: &DeTable<'_>, part: &Range<usize>) -> Option<String> {
    let within = |span: Range<usize>| span.start <= part.start && part.end <= span.end;
    for (key, value) in table {
        let name = key.get_ref();
        // A table's own span is its header's, so look inside first.
        let inner = match value.get_ref() {
            DeValue::Table(inner) => field_at(inner, part).map(|rest| format!("{name}.{rest}")),
            DeValue::Array(items) => items.iter().enumerate().find_map(|(n, item)| {
                let inner = item.get_ref().as_table().and_then(|inner| field_at(inner, part));
                match inner {
                    Some(rest) => Some(format!("{name}[{n}].{rest}")),
                    None => within(item.span()).then(|| format!("{name}[{n}]")),
                }
            }),
            _ => None,
        };
        if inner.is_some() {
            return inner;
        }
        if within(key.span()) || within(value.span()) {
            return Some(name.to_string());
        }
    }
    None
}

/// The offset at which a field like `disk[0].path` is; where its table is, if the field is absent.
fn offset_of(table: &DeTable<'_>, field: &str) -> Option<usize> {
    let (first, rest) = field.split_once('.').unwrap_or((field, ""));
    let (name, index) = match first.strip_suffix(']').and_then(|f| f.split_once('[')) {
        Some((name, index)) => (name, index.parse::<usize>().ok()),
        None => (first, None),
    };
    let (key, value) = table.iter().find(|(key, _)| key.get_ref() == name)?;
    let value = match (index, value.get_ref()) {
        (Some(index), DeValue::Array(items)) => items.get(index)?,
        (Some(_), _) => return None,
        (None, DeValue::Table(_)) => value,
        (None, _) => return Some(key.span().start),
    };
    let inner = value.get_ref().as_table().and_then(|inner| offset_of(inner, rest));
    Some(inner.unwrap_or(value.span().start))
}
