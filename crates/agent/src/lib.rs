//! The library preloaded into QEMU: creates userfaultfds, ends QEMU with its daemon
