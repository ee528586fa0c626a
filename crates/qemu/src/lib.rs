//! Stock QEMU: VM definitions, command line, QMP, capabilities of the installed build.

/// A VM as its user defines it.
#[derive(Clone, Debug)]
pub struct VmDefinition {}
