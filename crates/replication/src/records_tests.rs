use super::*;
use understudy_protocol::validity::{ArbiterWord, Evidence, Finding, judge};
use understudy_protocol::{Ownership, literal};

fn s1() -> SessionName {
    SessionName::try_from("s1".to_owned()).unwrap()
}

fn definition() -> VmDefinition {
    let text =
        "name = 'db'\nmemory = '64M'\nvcpus = 1\n[[disk]]\npath = '/dev/zero'\nformat = 'raw'";
    VmDefinition::from_toml(text, Path::new("/vm.toml")).unwrap()
}

#[test]
fn a_record_comes_back_as_it_was_written_and_changes() {
    let directory = tempfile::tempdir().unwrap();
    let records = Records::new(directory.path(), &literal("a"));
    assert_eq!(records.read(&literal("db")).unwrap(), None);
    fs::create_dir(directory.path().join("db")).unwrap();
    let peer = Some(literal("b"));
    let mirror = records.of(ImageRole::Mirror, Generation(1), &definition());
    records.write(&Record { peer: peer.clone(), ..mirror }).unwrap();
    records.change(&literal("db"), |record| record.image.generation = Generation(2)).unwrap();
    let record = records.read(&literal("db")).unwrap().unwrap();
    assert_eq!(record.image.role, ImageRole::Mirror);
    assert_eq!(record.image.generation, Generation(2));
    assert_eq!((record.peer, record.definition), (peer, definition()));
    let left = fs::read_dir(directory.path().join("db")).unwrap();
    let mut left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["record.json", "record.json.new"], "the record, and room for the next");
    assert_eq!(records.all().len(), 1);
    records.forget(&literal("db")).unwrap();
    assert_eq!(records.read(&literal("db")).unwrap(), None);
}

// The record was another session's, whose VM had fewer disks: the daemon ended.
#[test]
fn a_medium_is_noted_of_a_drive_that_is_on_record() {
    let directory = tempfile::tempdir().unwrap();
    let (records, vm) = (Records::new(directory.path(), &literal("b")), literal("db"));
    let mut now = definition().disks.remove(0);
    now.ejected = true;
    records.note_medium(&vm, DiskIndex(1), now.clone()).unwrap();
    fs::create_dir(directory.path().join("db")).unwrap();
    let record = records.of(ImageRole::Mirror, Generation(1), &definition());
    records.write(&record).unwrap();
    let error = records.note_medium(&vm, DiskIndex(1), now.clone()).unwrap_err();
    assert!(error.to_string().contains("no disk1 on record"), "{error}");
    assert_eq!(records.read(&vm).unwrap(), Some(record));
    records.note_medium(&vm, DiskIndex(0), now.clone()).unwrap();
    assert_eq!(records.read(&vm).unwrap().unwrap().definition.disks, [now]);
}

#[test]
fn a_restore_that_comes_to_nothing_leaves_what_was_before() {
    let directory = tempfile::tempdir().unwrap();
    let records = Records::new(directory.path(), &literal("a"));
    fs::create_dir(directory.path().join("db")).unwrap();
    let (vm, former) = (literal("db"), records.of(ImageRole::Cut, Generation(3), &definition()));
    let restored = |id: &str, former: Option<Record>| {
        let former = former.map(Box::new);
        let restoring = Some(Restoring { id: id.to_owned(), settled: false, life: None, former });
        Record { restoring, ..records.of(ImageRole::Active, Generation(5), &definition()) }
    };
    let second = restored("2-1", Some(former.clone()));
    records.write(&second).unwrap();
    assert_eq!(records.undo_restore(&vm, "1-1").unwrap(), None, "another one");
    assert_eq!(records.read(&vm).unwrap().as_ref(), Some(&second));
    assert_eq!(records.undo_restore(&vm, "2-1").unwrap(), Some(second.clone()));
    assert_eq!(records.read(&vm).unwrap().as_ref(), Some(&former));
    assert_eq!(records.undo_restore(&vm, "2-1").unwrap(), None, "it is undone already");
    // The next one begins where one has died: what was before both counts.
    assert_eq!(second.before_restore(), Some(former));
    records.write(&restored("3-1", None)).unwrap();
    assert!(records.undo_restore(&vm, "3-1").unwrap().is_some());
    assert_eq!(records.read(&vm).unwrap(), None);
}

// Before, what was on record was forgotten if the daemon ended while it waited for another host's lease.
#[test]
fn images_that_the_guest_never_ran_on_leave_what_was_before() {
    let directory = tempfile::tempdir().unwrap();
    let records = Records::new(directory.path(), &literal("a"));
    fs::create_dir(directory.path().join("db")).unwrap();
    let (vm, former) = (literal("db"), records.of(ImageRole::Cut, Generation(3), &definition()));
    let named = |former: Option<Record>| {
        let instead_of = Some(InsteadOf { former: former.map(Box::new) });
        Record { instead_of, ..records.of(ImageRole::Stale, Generation(0), &definition()) }
    };
    records.write(&named(Some(former.clone()))).unwrap();
    // Named again, by an operator who has lost patience.
    let again = records.read(&vm).unwrap().and_then(Record::before_insistence);
    assert_eq!(again.as_ref(), Some(&former));
    records.write(&named(again)).unwrap();
    assert!(records.undo_insistence(&vm).unwrap());
    assert_eq!(records.read(&vm).unwrap().as_ref(), Some(&former));
    assert!(!records.undo_insistence(&vm).unwrap(), "it is undone already");
    records.write(&named(None)).unwrap();
    assert!(records.undo_insistence(&vm).unwrap());
    assert_eq!(records.read(&vm).unwrap(), None);
}

#[test]
fn an_activation_counts_for_its_own_session_only() {
    let directory = tempfile::tempdir().unwrap();
    let records = Records::new(directory.path(), &literal("b"));
    fs::create_dir(directory.path().join("db")).unwrap();
    let role = |records: &Records| {
        let image = records.read(&literal("db")).unwrap().unwrap().image;
        (image.role, image.generation)
    };
    let mirror = records.of(ImageRole::Mirror, Generation(1), &definition());
    let of_session =
        |session: &str| Record { sessions: Sessions::since(session.into()), ..mirror.clone() };
    records.write(&of_session("s1")).unwrap();
    let activation = records.prepare_activation(&literal("db"), &s1()).unwrap();
    assert_eq!(role(&records), (ImageRole::Mirror, Generation(1)));
    activation.write(Generation(2)).unwrap();
    assert_eq!(role(&records), (ImageRole::Active, Generation(2)));
    // A later mirror is not activated by it, however often its record is changed.
    records.write(&of_session("s2")).unwrap();
    records.change(&literal("db"), |_| ()).unwrap();
    assert_eq!(role(&records), (ImageRole::Mirror, Generation(1)));
}

// A backup said that it could take over, and found that the sector was too small once it had won the VM.
#[test]
fn any_sessions_activation_fits_into_the_sector() {
    let directory = tempfile::tempdir().unwrap();
    let records = Records::new(directory.path(), &literal("b"));
    fs::create_dir(directory.path().join("db")).unwrap();
    let longest = "/".repeat(SessionName::MOST_BYTES);
    let mirror = records.of(ImageRole::Mirror, Generation(1), &definition());
    records.write(&Record { mirror_of: Some(longest.clone()), ..mirror }).unwrap();
    let session = SessionName::try_from(longest).unwrap();
    let activation = records.prepare_activation(&literal("db"), &session).unwrap();
    activation.write(Generation(1 << 40)).unwrap();
    let image = records.read(&literal("db")).unwrap().unwrap().image;
    assert_eq!((image.role, image.generation), (ImageRole::Active, Generation(1 << 40)));
    assert_eq!(fs::metadata(directory.path().join("db/activation")).unwrap().len(), 1024);
}

// A mirror failed while its guest was taken over: when that host had died, too, older images were called valid, for
// nothing said that a guest had run on these.
#[test]
fn an_activation_counts_although_the_mirror_is_no_base_for_a_resync() {
    let directory = tempfile::tempdir().unwrap();
    let (records, vm) = (Records::new(directory.path(), &literal("b")), literal("db"));
    fs::create_dir(directory.path().join("db")).unwrap();
    for (mirror_of, role) in [(Some("s1".to_owned()), ImageRole::Active), (None, ImageRole::Mirror)]
    {
        let mirror = records.of(ImageRole::Mirror, Generation(1), &definition());
        records
            .write(&Record { sessions: Sessions::since("s1".into()), mirror_of, ..mirror })
            .unwrap();
        let activation = records.prepare_activation(&vm, &s1()).unwrap();
        records.change(&vm, |record| record.sessions.clear()).unwrap();
        activation.write(Generation(2)).unwrap();
        assert_eq!(records.read(&vm).unwrap().unwrap().image.role, role);
    }
    // Nor does it count for another session that bears the same one in its list.
    let mirror = records.of(ImageRole::Mirror, Generation(1), &definition());
    let (sessions, mirror_of) = (Sessions::since("s1".to_owned()), Some("s2".to_owned()));
    records.write(&Record { sessions, mirror_of, ..mirror }).unwrap();
    assert_eq!(records.read(&vm).unwrap().unwrap().image.role, ImageRole::Mirror);
}

// Before, it counted as images that the guest had run on at the same generation as its primary's: nobody could
// tell which were valid.
#[test]
fn a_mirror_that_was_won_and_given_back_is_valid_only_if_it_was_activated() {
    for activated in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let records = Records::new(directory.path(), &literal("b"));
        fs::create_dir(directory.path().join("db")).unwrap();
        let mirror = records.of(ImageRole::Mirror, Generation(1), &definition());
        records.write(&Record { sessions: Sessions::since("s1".into()), ..mirror }).unwrap();
        let activation = records.prepare_activation(&literal("db"), &s1()).unwrap();
        if activated {
            activation.write(Generation(2)).unwrap();
        }
        records.note_returned(&literal("db")).unwrap();
        let own = records.read(&literal("db")).unwrap().unwrap().image;
        let primarys = ImageRecord {
            host: literal("a"),
            role: ImageRole::Active,
            generation: Generation(1),
            claimed_from: None,
        };
        let owner = Ownership { host: Some(literal("a")), generation: Generation(3) };
        let finding = judge(&Evidence {
            records: vec![primarys, own],
            without: Vec::new(),
            silent: Vec::new(),
            arbiter: ArbiterWord::Says(Some(owner)),
        });
        let Finding::Valid { host, .. } = finding else { panic!("{finding:?}") };
        assert_eq!(host, if activated { "b" } else { "a" });
    }
}

#[test]
fn a_damaged_record_is_an_error_that_names_it() {
    let directory = tempfile::tempdir().unwrap();
    let records = Records::new(directory.path(), &literal("a"));
    fs::create_dir(directory.path().join("db")).unwrap();
    fs::write(directory.path().join("db/record.json"), b"{").unwrap();
    let words = records.read(&literal("db")).unwrap_err().to_string();
    assert!(words.contains("db/record.json"), "{words}");
}
