//! Understudy: a virtual machine survives the death of its host.

fn main() {}
