//! Storage whose answers are lost: what was asked for is done all the same.

use super::*;
use futures_util::stream::BoxStream;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    PutMultipartOptions, PutOptions, PutResult, Result,
};
use std::fmt;
use std::pin::Pin;
use std::sync::Mutex;

/// The error that is said instead of an answer.
type Instead = fn(&Path) -> Error;

/// A request was sent again, and found what the first had made.
fn already_exists(path: &Path) -> Error {
    Error::AlreadyExists { path: path.to_string(), source: "sent again".into() }
}

/// No answer came in all the time that there was.
fn unanswered(_: &Path) -> Error {
    Error::Generic { store: "S3", source: "timed out".into() }
}

#[derive(Debug)]
struct Storage {
    inner: Arc<dyn ObjectStore>,
    /// Lost answer of the next object that is made.
    lost: Mutex<Option<Instead>>,
}

impl fmt::Display for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

type Answer<'f, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'f>>;

impl ObjectStore for Storage {
    fn put_opts<'s: 'f, 'l: 'f, 'f>(
        &'s self,
        location: &'l Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> Answer<'f, PutResult> {
        Box::pin(async move {
            let creates = matches!(opts.mode, PutMode::Create);
            let answer = self.inner.put_opts(location, payload, opts).await?;
            let lost = if creates { self.lost.lock().unwrap().take() } else { None };
            lost.map_or(Ok(answer), |instead| Err(instead(location)))
        })
    }

    fn put_multipart_opts<'s: 'f, 'l: 'f, 'f>(
        &'s self,
        location: &'l Path,
        opts: PutMultipartOptions,
    ) -> Answer<'f, Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(location, opts)
    }

    fn get_opts<'s: 'f, 'l: 'f, 'f>(
        &'s self,
        location: &'l Path,
        options: GetOptions,
    ) -> Answer<'f, GetResult> {
        self.inner.get_opts(location, options)
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    fn list_with_delimiter<'s: 'f, 'l: 'f, 'f>(
        &'s self,
        prefix: Option<&'l Path>,
    ) -> Answer<'f, ListResult> {
        self.inner.list_with_delimiter(prefix)
    }

    fn copy_opts<'s: 'f, 'l: 'f, 'm: 'f, 'f>(
        &'s self,
        from: &'l Path,
        to: &'m Path,
        options: CopyOptions,
    ) -> Answer<'f, ()> {
        self.inner.copy_opts(from, to, options)
    }
}

/// A bench whose storage loses answers when it is told to.
fn lossy() -> (Bench, Arc<Storage>) {
    let mut bench = Bench::new();
    let storage = Storage { inner: bench.store.objects.clone(), lost: Mutex::new(None) };
    let storage = Arc::new(storage);
    bench.store.objects = storage.clone();
    (bench, storage)
}

/// Each of them once left a mark that was nobody's: for an hour no snapshot began, for a day no
/// chunk was removed.
#[test]
fn whoever_makes_a_mark_knows_his_own() {
    for instead in [already_exists, unanswered] {
        let (bench, storage) = lossy();
        let lose = || *storage.lost.lock().unwrap() = Some(instead);
        lose();
        let writing = bench.begin();
        assert_eq!((writing.number, bench.files("writing").len()), (SnapshotNumber(1), 1));
        let (member, map) = bench.member(&AreaMap::zeros(UNITS), &all(), 1);
        let manifest = bench.manifest(&writing, &member);
        bench.store.publish(writing, &manifest).unwrap();
        bench.take(&map, &[1, 2], 2);
        lose();
        let removed = bench.store.remove(&literal("shop"), SnapshotNumber(1), NOW).unwrap();
        assert!(matches!(removed, Swept::Removed(count) if count > 0), "{removed:?}");
        assert!(bench.files("sweeping").is_empty() && bench.files("writing").is_empty());
        assert!(!bench.directory.path().join("sweeping").exists());
        bench.begin();
        // Somebody else's is not taken for one's own.
        let writing = bench.begin();
        assert_eq!(writing.number, SnapshotNumber(4));
    }
}

#[test]
fn a_snapshot_exists_whose_manifest_was_written_without_an_answer() {
    let (bench, storage) = lossy();
    let publish = |instead: Instead| {
        let writing = bench.begin();
        let (member, _) = bench.member(&AreaMap::zeros(UNITS), &all(), 1);
        let manifest = bench.manifest(&writing, &member);
        *storage.lost.lock().unwrap() = Some(instead);
        (bench.store.publish(writing.clone(), &manifest), writing, manifest)
    };
    let (published, ..) = publish(already_exists);
    published.unwrap();
    assert!(bench.files("writing").is_empty());
    // Whoever is told of an error asks whether it is there, and then ends what is marked.
    let (published, writing, manifest) = publish(unanswered);
    assert!(matches!(published, Err(StoreError::Failed { .. })), "{published:?}");
    assert_eq!(bench.store.snapshot(&literal("shop"), None).unwrap(), manifest);
    bench.store.end_writing(&writing).unwrap();
    assert!(bench.files("writing").is_empty());
}
