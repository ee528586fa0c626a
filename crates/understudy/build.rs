//! Says to the tests whether this machine has KVM: what needs it is ignored elsewhere, so that
//! the test runner counts and names it.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(kvm)");
    if std::path::Path::new("/dev/kvm").exists() {
        println!("cargo::rustc-cfg=kvm");
    }
}
