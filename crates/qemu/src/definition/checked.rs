//! Definitions in which nothing is wrong that can be told without looking at this host.

use super::{Problem, VmDefinition};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Deref;

/// A definition that [`VmDefinition::validate`] finds nothing wrong with: what a VM is started by.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "VmDefinition", into = "VmDefinition")]
pub struct CheckedDefinition(VmDefinition);

/// All that is wrong with a definition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problems(Vec<Problem>);

impl std::error::Error for Problems {}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, problem) in self.0.iter().enumerate() {
            let between = if n > 0 { "; " } else { "" };
            write!(f, "{between}{problem}")?;
        }
        Ok(())
    }
}

impl TryFrom<VmDefinition> for CheckedDefinition {
    type Error = Problems;

    fn try_from(definition: VmDefinition) -> Result<CheckedDefinition, Problems> {
        let problems = definition.validate();
        match problems.is_empty() {
            true => Ok(CheckedDefinition(definition)),
            false => Err(Problems(problems)),
        }
    }
}

impl From<CheckedDefinition> for VmDefinition {
    fn from(checked: CheckedDefinition) -> VmDefinition {
        checked.0
    }
}

impl Deref for CheckedDefinition {
    type Target = VmDefinition;

    fn deref(&self) -> &VmDefinition {
        &self.0
    }
}
