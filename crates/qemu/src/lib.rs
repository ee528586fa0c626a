//! Stock QEMU: VM definitions, command line, QMP, capabilities of the installed build
