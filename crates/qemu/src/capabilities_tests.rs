use super::*;
use serde_json::json;

fn answers(version: (u32, u32), loads_from_file: bool) -> Answers {
    let named = |names: &[&str]| names.iter().map(|&n| Named { name: n.to_owned() }).collect();
    Answers {
        version: QemuVersion { major: version.0, minor: version.1, micro: 0 },
        machines: vec![
            Machine { name: "pc-q35-10.0".to_owned(), alias: Some("q35".to_owned()) },
            Machine { name: "pc-q35-9.2".to_owned(), alias: None },
        ],
        cpus: named(&["qemu64", "Haswell", "Haswell-v4"]),
        accelerators: named(&["tcg-accel", "qtest-accel"]),
        commands: named(COMMANDS),
        loads_from_file,
        processor: None,
    }
}

#[test]
fn aliases_become_versions() {
    let qemu = answers((10, 0), true).judge(Path::new("qemu")).unwrap();
    assert_eq!(qemu.machine_type("q35").unwrap(), "pc-q35-10.0");
    assert_eq!(qemu.machine_type("pc-q35-9.2").unwrap(), "pc-q35-9.2");
    let error = qemu.machine_type("pc-q35-11.0").unwrap_err().to_string();
    assert!(error.contains("pc-q35-11.0") && error.contains("pc-q35-9.2"), "{error}");
}

#[test]
fn an_unknown_cpu_model_is_refused_with_those_that_there_are() {
    let qemu = answers((10, 0), true).judge(Path::new("qemu")).unwrap();
    for known in [None, Some("qemu64"), Some("Haswell,+aes,-sse4.2")] {
        qemu.check_cpu(known).unwrap();
    }
    let error = qemu.check_cpu(Some("Z80,+aes")).unwrap_err().to_string();
    assert!(error.contains("no model \"Z80\"") && error.contains("Haswell, Haswell-v4"), "{error}");
}

#[test]
fn what_is_missing_is_named() {
    let error = answers((8, 1), true).judge(Path::new("qemu")).unwrap_err().to_string();
    assert!(error.contains("8.1.0") && error.contains("8.2.0"), "{error}");
    let error = answers((10, 0), false).judge(Path::new("qemu")).unwrap_err().to_string();
    assert!(error.contains("migration from a file"), "{error}");
    let mut lacking = answers((10, 0), true);
    lacking.commands.retain(|command| command.name != "xen-save-devices-state");
    let error = lacking.judge(Path::new("qemu")).unwrap_err().to_string();
    assert!(error.contains("xen-save-devices-state"), "{error}");
}

#[test]
fn kvm_by_name_needs_a_qemu_with_kvm() {
    let qemu = answers((10, 0), true).judge(Path::new("qemu")).unwrap();
    assert_eq!(qemu.accelerator(AcceleratorChoice::Auto).unwrap(), Accelerator::Tcg);
    let error = qemu.accelerator(AcceleratorChoice::Kvm).unwrap_err().to_string();
    assert!(error.contains("without KVM"), "{error}");
}

#[test]
fn the_transports_are_known_by_their_members() {
    let entity = |names: &[&str]| {
        let members: Vec<_> = names.iter().map(|n| json!({"name": n})).collect();
        json!({"name": "1", "meta-type": "enum", "members": members})
    };
    assert!(loads_from_file(&[entity(&["x"]), entity(&["socket", "exec", "rdma", "file"])]));
    assert!(!loads_from_file(&[entity(&["socket", "exec", "rdma"]), entity(&["file", "pipe"])]));
}

/// QEMU says no more than a line in its log, and the guest's clocks go wrong.
#[test]
fn a_guest_with_another_time_stamp_counter_is_refused() {
    let needs = |accelerator, rate| {
        let tsc = Some(TscRate(rate));
        CpuNeeds { accelerator, model: None, tsc, vendor: None }
    };
    Capabilities::check_tsc(&needs(Accelerator::Tcg, 1)).unwrap();
    let refused = Capabilities::check_tsc(&needs(Accelerator::Kvm, 1));
    match HostTsc::of_this_machine() {
        Err(_) => assert!(matches!(refused, Err(CapabilityError::UnknownTsc(_))), "{refused:?}"),
        Ok(host) if host.gives(TscRate(1)) => refused.unwrap(),
        Ok(host) => {
            let words = refused.unwrap_err().to_string();
            assert!(words.contains("1 kHz") && words.contains(&host.rate.to_string()), "{words}");
            Capabilities::check_tsc(&needs(Accelerator::Kvm, host.rate.0)).unwrap();
        }
    }
}

/// Its kernel has patched itself for the maker that it found when it booted.
#[test]
fn a_guest_from_a_processor_of_another_maker_is_refused() {
    let qemu = answers((10, 0), true).judge(Path::new("qemu")).unwrap();
    let check = |accelerator, model: &str, vendor: &str| {
        let (model, vendor) = (Some(model.to_owned()), vendor.to_owned().try_into().ok());
        let needs = CpuNeeds { accelerator, model, tsc: None, vendor };
        qemu.check_processor(&needs).map_err(|error| error.to_string())
    };
    let words = check(Accelerator::Kvm, "Haswell", "CentaurHauls").unwrap_err();
    assert!(words.contains("CentaurHauls") && words.contains("same maker"), "{words}");
    check(Accelerator::Tcg, "Haswell", "CentaurHauls").unwrap();
    check(Accelerator::Kvm, "Haswell,vendor=CentaurHauls", "CentaurHauls").unwrap();
    check(Accelerator::Kvm, "Haswell", "none: a host of an older version").unwrap();
    let own = Vendor::of_this_machine().expect("the processor has a maker");
    check(Accelerator::Kvm, "Haswell", &String::from(own)).unwrap();
}

#[test]
fn a_guest_that_sees_something_of_the_hosts_own_processor_starts_and_is_not_portable() {
    let qemu = answers((10, 0), true).judge(Path::new("qemu")).unwrap();
    let needs = |accelerator| {
        let model = Some("Haswell,pmu=on".to_owned());
        CpuNeeds { accelerator, model, tsc: None, vendor: None }
    };
    let words = Capabilities::check_portable(&needs(Accelerator::Kvm)).unwrap_err().to_string();
    assert!(words.contains("pmu") && words.contains("remove it"), "{words}");
    qemu.check_processor(&needs(Accelerator::Kvm)).unwrap();
    Capabilities::check_portable(&needs(Accelerator::Tcg)).unwrap();
}
