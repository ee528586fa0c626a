//! Tests of which versions of the wire format are spoken with whom.

use super::*;
use serde_json::{Value, json};
use understudy_qemu::VmDefinition;

fn hello(purpose: Value) -> Value {
    json!({"wire_version": 17, "product_version": "0.1.0", "host": "a", "purpose": purpose})
}

#[test]
fn the_version_before_this_one_is_answered() {
    let old = hello(json!({"purpose": "probe"}));
    assert_eq!(unspoken(&old), None);
    let old: Hello = serde_json::from_value(old).unwrap();
    assert_eq!(old.agreed(), Some(17));
}

#[test]
fn the_next_version_is_answered_if_it_speaks_this_one() {
    let mut next = hello(json!({"purpose": "probe"}));
    next["wire_version"] = json!(18);
    next["wire_highest"] = json!(19);
    assert_eq!(unspoken(&next), None);
    let next: Hello = serde_json::from_value(next).unwrap();
    assert_eq!(next.agreed(), Some(18));
}

#[test]
fn unknown_versions_are_refused_with_what_to_do() {
    for (least, highest, words) in [
        (json!(19), json!(20), "speaks wire versions 19 to 20, Understudy"),
        (json!(19), json!(20), "wire versions 17 to 18: upgrade this host first"),
        (json!(16), Value::Null, "upgrade host a first"),
        (json!("x"), Value::Null, "names no wire version"),
        (json!(u64::MAX), Value::Null, "names no wire version"),
    ] {
        let mut other = hello(json!({"purpose": "of a later version"}));
        (other["wire_version"], other["wire_highest"]) = (least, highest);
        let reason = unspoken(&other).expect("a reason");
        assert!(reason.contains(words), "{reason}");
    }
}

/// Version 17 refuses what it does not know as malformed; so it is told a version that it does not
/// speak instead, and says what to do.
#[test]
fn what_is_new_is_not_said_in_the_version_before() {
    assert_eq!(Purpose::Probe.first_version(), 17);
    assert_eq!(Purpose::Clock.first_version(), 18);
    let mut offer = offer();
    assert_eq!(Purpose::Protect(Box::new(offer.clone())).first_version(), 17);
    offer.definition = VmDefinition { autostart: true, ..offer.definition.into() }.into();
    assert_eq!(Purpose::Protect(Box::new(offer)).first_version(), 18);
}

fn offer() -> Offer {
    serde_json::from_value(json!({
        "session": "s",
        "definition": {"name": "db", "memory": "64M", "vcpus": 1},
        "machine_type": "pc-i440fx-10.0",
        "accelerator": "tcg",
        "qemu_version": "10.0.2",
        "generation": 1,
        "arbiter": {"id": "00112233445566778899aabbccddeeff", "place": "p"},
        "disk_bytes": [],
        "files": [],
        "paths": [],
        "path": 0
    }))
    .unwrap()
}

/// The backup's list of changes would have taken 8 TiB of memory: a known peer could end its daemon, with all VMs on it.
#[test]
fn a_disk_has_no_more_bytes_than_a_list_can_be_kept_of() {
    let of = |bytes: u64| {
        let mut offer = serde_json::to_value(offer()).unwrap();
        offer["disk_bytes"] = json!([bytes]);
        serde_json::from_value::<Offer>(offer)
    };
    assert_eq!(of(64 << 40).unwrap().disk_bytes, [ExportBytes::try_from(64 << 40).unwrap()]);
    for bytes in [(64 << 40) + 1, 1 << 62, u64::MAX] {
        let words = of(bytes).unwrap_err().to_string();
        assert!(words.contains(&bytes.to_string()) && words.contains("70368744177664"), "{words}");
    }
}

/// What a take-over writes has room for so much: with more it was noticed only once the backup had won the VM.
#[test]
fn a_session_has_a_name_that_its_record_has_room_for() {
    let of = |session: String| {
        let mut offer = serde_json::to_value(offer()).unwrap();
        offer["session"] = json!(session);
        serde_json::from_value::<Offer>(offer)
    };
    let honest = format!("{}/{}/{}", "h".repeat(63), "v".repeat(32), "u".repeat(36));
    assert_eq!(*of(honest.clone()).unwrap().session, honest);
    for session in ["x".repeat(600), "\"".repeat(100), String::new()] {
        let words = of(session).unwrap_err().to_string();
        assert!(words.contains("a session's name"), "{words}");
    }
}

#[test]
fn an_answer_names_a_version_that_was_offered() {
    assert_eq!(agreed(None).unwrap(), 17);
    assert_eq!(agreed(Some(18)).unwrap(), 18);
    assert!(agreed(Some(19)).unwrap_err().to_string().contains("17 to 18"));
}

#[test]
fn who_asks_for_its_vm_names_a_generation_with_which_others_can_count() {
    let purpose = |from: u64| {
        let membership = json!({ "name": null, "members": [{ "vm": "db", "generation": 1 }] });
        let kept = json!({ "purpose": "kept", "membership": membership, "from": from });
        serde_json::from_value::<Purpose>(kept)
    };
    assert!(purpose(7).is_ok());
    assert!(purpose(u64::MAX).unwrap_err().to_string().contains("more than can be counted"));
}
