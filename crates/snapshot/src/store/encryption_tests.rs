use super::super::Store;
use super::*;
use crate::format::{BadChunk, Blob, Compression, Manifest};
use crate::{Incarnation, SnapshotNumber};
use std::collections::BTreeMap;
use tempfile::TempDir;
use understudy_protocol::literal;

const NOW: u64 = 1_790_000_000;
const SECRET: &[u8] = b"the guest's password is hunter2";

struct Bench {
    directory: TempDir,
    key: StoreKey,
    store: Store,
}

fn content(n: u8) -> Vec<u8> {
    [SECRET, &[n]].concat().repeat(100)
}

fn manifest(number: SnapshotNumber) -> Manifest {
    Manifest {
        group: literal("shop"),
        number,
        incarnation: Incarnation(1),
        taken_at: NOW,
        label: None,
        compression: Compression::None,
        members: Vec::new(),
        crossings: Vec::new(),
    }
}

impl Bench {
    fn new() -> Bench {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("key");
        StoreKey::make(&file).unwrap();
        let key = StoreKey::read(&file).unwrap();
        let store = Store::create_with(&Bench::location(&directory), Some(&key)).unwrap();
        Bench { directory, key, store }
    }

    fn location(directory: &TempDir) -> String {
        directory.path().join("store").display().to_string()
    }

    fn put(&self, n: u8) -> Blob {
        self.store.put_blob(&content(n), Compression::None).unwrap()
    }

    /// All files below the store, with their content.
    fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut found = BTreeMap::new();
        let mut folders = vec![self.directory.path().join("store")];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                match entry.unwrap().path() {
                    path if path.is_dir() => folders.push(path),
                    path => drop(found.insert(path.clone(), fs::read(path).unwrap())),
                }
            }
        }
        found
    }

    fn chunk_files(&self) -> Vec<PathBuf> {
        let chunks = self.directory.path().join("store/chunks");
        self.files().into_keys().filter(|path| path.starts_with(&chunks)).collect()
    }
}

#[test]
fn what_is_stored_says_nothing_and_comes_back() {
    let bench = Bench::new();
    let blob = bench.put(1);
    assert_eq!(bench.store.blob(&blob).unwrap(), content(1));
    let again = Store::open_with(&Bench::location(&bench.directory), Some(&bench.key)).unwrap();
    assert_eq!(again.blob(&blob).unwrap(), content(1));
    assert_eq!(again.put_blob(&content(1), Compression::None).unwrap(), blob);
    assert_eq!(bench.chunk_files().len(), 1, "the same content is stored once");

    let number = bench.store.begin(&literal("shop"), SnapshotNumber(0), NOW).unwrap();
    let manifest = manifest(number.number);
    bench.store.publish(number, &manifest).unwrap();
    assert_eq!(again.snapshot(&literal("shop"), None).unwrap(), manifest);
    let id = blob.chunks[0].to_string();
    for (path, bytes) in bench.files() {
        let holds = |part: &[u8]| bytes.windows(part.len()).any(|window| window == part);
        assert!(!holds(SECRET) && !holds(b"taken_at"), "{}", path.display());
        assert!(!path.display().to_string().contains(&id), "a plain hash is a name");
    }
    // The names are those that sweeping goes by.
    assert_eq!(again.sweep(NOW).unwrap(), crate::Swept::Removed(1));
    assert_eq!(bench.chunk_files(), Vec::<PathBuf>::new());
}

#[test]
fn only_the_stores_own_key_opens_it() {
    let bench = Bench::new();
    let location = Bench::location(&bench.directory);
    assert!(matches!(Store::open(&location), Err(StoreError::Encrypted(_))));
    assert!(matches!(Store::create(&location), Err(StoreError::Encrypted(_))));
    let other = bench.directory.path().join("other");
    StoreKey::make(&other).unwrap();
    let other = StoreKey::read(&other).unwrap();
    for opened in [Store::open_with, Store::create_with] {
        assert!(matches!(opened(&location, Some(&other)), Err(StoreError::WrongKey(_))));
    }
    let plain = bench.directory.path().join("plain").display().to_string();
    Store::create(&plain).unwrap();
    let opened = Store::create_with(&plain, Some(&other));
    assert!(matches!(opened, Err(StoreError::NotEncrypted(_))), "nothing goes there in the clear");
}

#[test]
fn every_change_of_a_chunk_is_found_and_named() {
    let bench = Bench::new();
    let blob = bench.put(1);
    let [path] = &bench.chunk_files()[..] else { panic!("one chunk") };
    let whole = fs::read(path).unwrap();
    let mut wrong: Vec<Vec<u8>> = (0..whole.len())
        .step_by(7)
        .map(|at| {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            changed
        })
        .collect();
    wrong.extend([0, 7, 8, 39, 40, 55, whole.len() - 1].map(|bytes| whole[..bytes].to_vec()));
    // As a store without encryption has it.
    wrong.push(crate::format::encode_chunk(&content(1), Compression::None));
    for bytes in wrong {
        fs::write(path, bytes).unwrap();
        let error = bench.store.blob(&blob).unwrap_err();
        assert!(matches!(error, StoreError::BadChunk { why: BadChunk::Forged, .. }), "{error}");
        let name = path.file_name().unwrap().to_str().unwrap();
        assert!(error.to_string().contains(name), "{error}");
    }
    assert_eq!(bench.put(1), blob, "it is written anew");
    assert_eq!(bench.store.blob(&blob).unwrap(), content(1));
}

#[test]
fn nothing_can_stand_in_anothers_place() {
    let bench = Bench::new();
    let blobs = [bench.put(1), bench.put(2)];
    let [one, two] = &bench.chunk_files()[..] else { panic!("two chunks") };
    let (former, latter) = (fs::read(one).unwrap(), fs::read(two).unwrap());
    fs::write(one, latter).unwrap();
    fs::write(two, former).unwrap();
    for blob in &blobs {
        let error = bench.store.blob(blob).unwrap_err();
        assert!(matches!(error, StoreError::BadChunk { why: BadChunk::Forged, .. }), "{error}");
    }

    let numbers = [(); 2].map(|()| {
        let writing = bench.store.begin(&literal("shop"), SnapshotNumber(0), NOW).unwrap();
        let number = writing.number;
        bench.store.publish(writing, &manifest(number)).unwrap();
        number
    });
    let path = |number| bench.directory.path().join(format!("store/snapshots/shop/{number}.json"));
    fs::copy(path(numbers[0]), path(numbers[1])).unwrap();
    assert!(bench.store.snapshot(&literal("shop"), Some(numbers[0])).is_ok());
    let error = bench.store.snapshot(&literal("shop"), Some(numbers[1])).unwrap_err().to_string();
    assert!(error.contains(&format!("snapshot {} of shop is damaged", numbers[1])), "{error}");
    assert!(error.contains("another's place"), "{error}");

    // Another store with the same key is another store.
    let place = bench.directory.path().join("beside").display().to_string();
    let beside = Store::create_with(&place, Some(&bench.key)).unwrap();
    let writing = beside.begin(&literal("shop"), SnapshotNumber(0), NOW).unwrap();
    let number = writing.number;
    beside.publish(writing, &manifest(number)).unwrap();
    fs::copy(path(numbers[0]), format!("{place}/snapshots/shop/{number}.json")).unwrap();
    assert!(beside.snapshot(&literal("shop"), Some(number)).is_err());
}

#[test]
fn the_same_content_is_sealed_otherwise_each_time() {
    let bench = Bench::new();
    let sealer = bench.store.sealer().unwrap();
    let [one, two] = [(); 2].map(|()| sealer.seal("place", b"content".to_vec()).unwrap());
    assert_ne!(one[8..], two[8..]);
    for sealed in [one, two] {
        assert_eq!(sealer.open("elsewhere", sealed.clone()), None);
        assert_eq!(sealer.open("place", sealed).unwrap(), b"content");
    }
}

#[test]
fn a_key_file_is_private_and_never_overwritten() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("snapshots.key");
    StoreKey::make(&path).unwrap();
    let text = fs::read_to_string(&path).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(matches!(StoreKey::make(&path), Err(KeyError::Exists(_))));
    assert_eq!(fs::read_to_string(&path).unwrap(), text);
    assert!(!format!("{:?}", StoreKey::read(&path).unwrap()).contains(&text[26..40]));

    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    let error = StoreKey::read(&path).unwrap_err().to_string();
    assert!(error.contains("mode 0640") && error.contains("chmod 600"), "{error}");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    for wrong in ["", "understudy snapshot key 1 abc\n", &text[26..]] {
        fs::write(&path, wrong).unwrap();
        assert!(matches!(StoreKey::read(&path), Err(KeyError::Foreign(_))), "{wrong:?}");
    }
    let missing = StoreKey::read(&directory.path().join("none")).unwrap_err().to_string();
    assert!(missing.contains("none"), "{missing}");
}
