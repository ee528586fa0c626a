//! Map of the parts of an image that may differ from another host's copy of it: a bitmap that
//! outlives the daemon.
//!
//! A bit stands for [`GRANULE_BYTES`] of the disk. It is in the file before the image is
//! written, so that a killed daemon leaves no change unrecorded. The file lives in the
//! page cache like the image itself, which outlives processes but not the power: after a
//! restart of the host it is not believed (it holds the kernel's boot id), unless it was
//! sealed after the last write ([`Stamp`]).
//!
//! Bits are cleared in rounds: [`ChangeMap::begin_round`] sets aside what was marked until
//! then, and [`ChangeMap::end_round`] forgets it, once the other host has it on its disk. What the
//! other host has is a session's to say, for as long as no later one has begun ([`Rounds`]).

use crate::durable::Durable;
use crate::error::DiskError;
use crate::image::is_in_use;
use crate::stamp::{self, Stamp};
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use understudy_threads::{Mutex, MutexGuard};

/// Bytes of the disk that one bit stands for.
pub const GRANULE_BYTES: u64 = 64 * 1024;

const MAGIC: &[u8; 8] = b"USCHNG1\n";
/// Magic, bytes of the disk, seal, boot id, stamp; the bits begin at the next page.
const BITS_AT: u64 = 4096;
const DISK_BYTES_AT: u64 = 8;
const SEAL_AT: u64 = 16;
const BOOT_ID_AT: u64 = 32;
const STAMP_AT: u64 = 72;
/// Mark of a map that is not sealed: the image may have been written since.
const OPEN: i64 = 0;

/// Owner of rounds: they are those of one session, of all its disks. Once the next one's are begun
/// they forget nothing any more, however late a thread of the former session comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rounds(u64);

impl Rounds {
    /// Rounds of a new session.
    pub fn of_new_session() -> Rounds {
        static LAST: AtomicU64 = AtomicU64::new(0);
        Rounds(LAST.fetch_add(1, Ordering::Relaxed))
    }
}

/// What a map is worth if nothing tells whether its image is what it was.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Untold {
    /// Its last bits may not have reached the disk, and an operator may have had the image in hand.
    Doubted,
    /// What a mirror lost is in its primary's map, and nobody has anything to do with it.
    Believed,
}

/// The persistent bitmap of one disk.
#[derive(Debug)]
pub struct ChangeMap {
    granules: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    file: Durable,
    /// Any block may differ, until a map is made anew: no round forgets anything.
    all: bool,
    /// The file may lack what is marked here: the next that goes there is all of it.
    unwritten: bool,
    /// Granules marked since the round began.
    current: Vec<u8>,
    /// Granules marked before.
    closing: Vec<u8>,
    /// The only ones that forget anything.
    rounds: Option<Rounds>,
    /// Granules that no round forgets.
    kept: BTreeSet<u64>,
}

impl ChangeMap {
    /// An empty map for a disk of `disk_bytes`, in place of a former one. It is sealed for
    /// `image` until [`ChangeMap::unseal`].
    pub fn create(path: &Path, disk_bytes: u64, image: &Path) -> Result<ChangeMap, DiskError> {
        let error = DiskError::io("create the list of changed blocks", path);
        Self::try_create(path, disk_bytes, image).map_err(error)
    }

    fn try_create(path: &Path, disk_bytes: u64, image: &Path) -> io::Result<ChangeMap> {
        // Not in place: a crash must not leave half of the one and half of the other.
        let fresh = path.with_extension("new");
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(true).mode(0o600);
        let file = file.open(&fresh)?;
        let granules = disk_bytes.div_ceil(GRANULE_BYTES);
        let bits = vec![0; bitmap_bytes(disk_bytes)];
        file.write_all_at(MAGIC, 0)?;
        file.write_all_at(&disk_bytes.to_le_bytes(), DISK_BYTES_AT)?;
        // Written, not left as holes: marking must not fail for want of space.
        file.write_all_at(&bits, BITS_AT)?;
        let mut state = State::new(file, bits);
        state.seal(image)?;
        fs::rename(&fresh, path)?;
        Ok(ChangeMap { granules, state: Mutex::new(state) })
    }

    /// The map at `path`, if it tells all changes of `image`; else why it does not. It may be of a smaller disk, if the
    /// image has not outgrown that: a qcow2 image is shown with more room each time than what it holds.
    pub fn open(
        path: &Path,
        disk_bytes: u64,
        image: &Path,
    ) -> io::Result<Result<ChangeMap, String>> {
        Self::open_with(path, disk_bytes, image, Untold::Doubted)
    }

    /// The same of a mirror that no guest ran on, which is believed unless something speaks against it.
    pub fn open_of_mirror(
        path: &Path,
        disk_bytes: u64,
        image: &Path,
    ) -> io::Result<Result<ChangeMap, String>> {
        Self::open_with(path, disk_bytes, image, Untold::Believed)
    }

    /// Whether there is a map that is not sealed.
    pub fn is_open_at(path: &Path) -> bool {
        File::open(path).is_ok_and(|file| {
            known_bytes(&file).is_some() && seal_in(&file).is_ok_and(|seal| seal == OPEN)
        })
    }

    /// Seals a map that a process left open which is no more, so that what is changed from here on is found out. Returns
    /// whether it did: not if somebody has the image, or if the map is in doubt already.
    pub fn seal_left(path: &Path, image: &Path) -> io::Result<bool> {
        let (list, disk) =
            (OpenOptions::new().read(true).write(true).open(path)?, File::open(image)?);
        let is_left = || -> io::Result<bool> {
            let is_same = !is_of_another(stamp_in(&list)?, Stamp::of(image)?, false);
            Ok(is_same && seal_in(&list)? == OPEN && is_of_this_boot(&list)? && !is_in_use(&disk)?)
        };
        if !is_left()? {
            return Ok(false);
        }
        disk.sync_data()?;
        if !is_left()? {
            return Ok(false);
        }
        let mut state = State::new(list, Vec::new());
        state.seal(image)?;
        // Whoever has it by now may have unsealed the map before that.
        let is_taken = is_in_use(&disk)?;
        if is_taken {
            state.unseal()?;
        }
        Ok(!is_taken)
    }

    /// The bytes of the disk whose map is at `path`, if there is one.
    pub fn disk_bytes_at(path: &Path) -> Option<u64> {
        known_bytes(&File::open(path).ok()?)
    }

    fn open_with(
        path: &Path,
        disk_bytes: u64,
        image: &Path,
        untold: Untold,
    ) -> io::Result<Result<ChangeMap, String>> {
        let file = match OpenOptions::new().read(true).write(true).open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Err("there is no list of changed blocks".to_owned()));
            }
            Err(error) => return Err(error),
        };
        // Not the metadata's length, which is 0 for a block device.
        let image_bytes = File::open(image)?.seek(SeekFrom::End(0))?;
        let listed = listed_bytes(&file)?.filter(|it| (image_bytes..=disk_bytes).contains(it));
        // A list of the version before may have been refused for its size, and not noted in since.
        let Some(listed) = listed.filter(|&it| it == disk_bytes || is_stamped(&file)) else {
            return Ok(Err("the disk's size has changed".to_owned()));
        };
        if let Some(doubt) = doubt(&file, image, untold)? {
            return Ok(Err(doubt));
        }
        let mut current = vec![0; bitmap_bytes(disk_bytes)];
        let (known, new) = current.split_at_mut(bitmap_bytes(listed));
        file.read_exact_at(known, BITS_AT)?;
        if listed < disk_bytes {
            file.write_all_at(new, BITS_AT + known.len() as u64)?;
            file.write_all_at(&disk_bytes.to_le_bytes(), DISK_BYTES_AT)?;
        }
        let granules = disk_bytes.div_ceil(GRANULE_BYTES);
        Ok(Ok(ChangeMap { granules, state: Mutex::new(State::new(file, current)) }))
    }

    /// Unseals the map, before the image is written: it tells its changes from now on,
    /// for as long as the host's kernel runs.
    pub fn unseal(&self) -> io::Result<()> {
        let state = self.lock();
        state.file.write_all_at(&boot_id()?, BOOT_ID_AT)?;
        state.unseal()
    }

    /// Seals the map, when nobody writes the image any more, after it was synced: it
    /// will be believed whatever happens to the host, unless the image changes.
    pub fn seal(&self, image: &Path) -> io::Result<()> {
        self.lock().seal(image)
    }

    /// Notes that a range is about to change.
    pub(crate) fn mark(&self, offset: u64, len: u64) -> io::Result<()> {
        self.lock().mark(self.touched(offset, len))
    }

    /// Notes that a marked range did not change as a whole: it goes to no sink, and so no round that
    /// ends says that the other host has what it holds now.
    pub(crate) fn keep(&self, offset: u64, len: u64) {
        self.lock().kept.extend(self.touched(offset, len));
    }

    fn touched(&self, offset: u64, len: u64) -> Range<u64> {
        let end = (offset + len).div_ceil(GRANULE_BYTES).min(self.granules);
        if len == 0 { 0..0 } else { offset / GRANULE_BYTES..end }
    }

    /// Notes that any block may differ, for good: what was written to the image may be lost.
    pub(crate) fn mark_all(&self) -> io::Result<()> {
        let mut state = self.lock();
        if state.all && !state.unwritten {
            return Ok(());
        }
        state.all = true;
        state.mark(0..self.granules)
    }

    /// Marks runs of granules that changed on the other host. The guest's writes wait for one at a time.
    pub fn merge(&self, runs: &[Range<u64>]) -> io::Result<()> {
        for run in runs {
            if run.start >= run.end || run.end > self.granules {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidInput,
                    format!("blocks {run:?} are not part of the disk's {}", self.granules),
                ));
            }
            self.lock().mark(run.clone())?;
        }
        Ok(())
    }

    /// Begins these rounds: from here on they count, and none of an earlier session.
    pub(crate) fn begin_rounds(&self, rounds: Rounds) {
        self.lock().rounds = Some(rounds);
    }

    /// Whether rounds count that are none of these.
    pub fn has_other_rounds(&self, rounds: Rounds) -> bool {
        self.lock().rounds.is_some_and(|counting| counting != rounds)
    }

    /// Sets aside what was marked so far; [`ChangeMap::end_round`] forgets just that. The
    /// caller makes sure that no write is between its mark and its way to the sink.
    pub(crate) fn begin_round(&self, rounds: Rounds) {
        let state = &mut *self.lock();
        if state.all || state.rounds != Some(rounds) {
            return;
        }
        for (closing, current) in state.closing.iter_mut().zip(&mut state.current) {
            *closing |= std::mem::take(current);
        }
        for &granule in &state.kept {
            let (byte, bit) = place(granule);
            state.current[byte] |= bit;
        }
    }

    /// The other host has what was set aside on its disk.
    pub fn end_round(&self, rounds: Rounds) -> io::Result<()> {
        let mut state = self.lock();
        if state.all || state.rounds != Some(rounds) {
            return Ok(());
        }
        // Of an idle disk nothing was set aside, and the file has no more bits than `current`.
        if state.closing.iter().all(|&byte| byte == 0) {
            return Ok(());
        }
        state.closing.fill(0);
        // Whatever part of it reaches the file, every bit of `current` stays set.
        state.write_all()
    }

    /// The changed granules, as runs in ascending order.
    pub fn runs(&self) -> Vec<Range<u64>> {
        let state = self.lock();
        let mut runs: Vec<Range<u64>> = Vec::new();
        for granule in (0..self.granules).filter(|&granule| state.is_marked(granule)) {
            match runs.last_mut() {
                Some(run) if run.end == granule => run.end += 1,
                _ => runs.push(granule..granule + 1),
            }
        }
        runs
    }

    /// Bytes of the changed granules. Quick, for reports.
    pub fn changed_bytes(&self) -> u64 {
        let state = self.lock();
        let both = state.current.iter().zip(&state.closing).map(|(a, b)| a | b);
        both.map(|byte| u64::from(byte.count_ones())).sum::<u64>() * GRANULE_BYTES
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(understudy_threads::poisoned)
    }
}

impl State {
    fn new(file: File, current: Vec<u8>) -> State {
        let closing = vec![0; current.len()];
        let (file, kept) = (Durable::new(file), BTreeSet::new());
        State { file, all: false, unwritten: false, current, closing, rounds: None, kept }
    }

    fn unseal(&self) -> io::Result<()> {
        self.file.write_all_at(&OPEN.to_le_bytes(), SEAL_AT)?;
        self.file.sync()
    }

    fn is_marked(&self, granule: u64) -> bool {
        let (byte, bit) = place(granule);
        (self.current[byte] | self.closing[byte]) & bit != 0
    }

    fn mark(&mut self, granules: Range<u64>) -> io::Result<()> {
        if granules.is_empty() {
            return Ok(());
        }
        let (first, last) = (place(granules.start).0, place(granules.end - 1).0);
        let mut is_new = false;
        for granule in granules {
            let (byte, bit) = place(granule);
            is_new |= (self.current[byte] | self.closing[byte]) & bit == 0;
            self.current[byte] |= bit;
        }
        match (self.unwritten, is_new) {
            (true, _) => self.write_all(),
            (false, true) => self.write(first..last + 1),
            (false, false) => Ok(()),
        }
    }

    fn write_all(&mut self) -> io::Result<()> {
        self.write(0..self.current.len())?;
        self.unwritten = false;
        Ok(())
    }

    /// Writes so many bytes of the map. What may not have got there is not taken for marked by
    /// whoever tries again.
    fn write(&mut self, bytes: Range<usize>) -> io::Result<()> {
        let at = BITS_AT + bytes.start as u64;
        let marks = self.current[bytes.clone()].iter().zip(&self.closing[bytes]);
        let marks: Vec<u8> = marks.map(|(current, closing)| current | closing).collect();
        self.file.write_all_at(&marks, at).inspect_err(|_| self.unwritten = true)
    }

    fn seal(&mut self, image: &Path) -> io::Result<()> {
        if self.unwritten {
            self.write_all()?;
        }
        self.file.write_all_at(&boot_id()?, BOOT_ID_AT)?;
        self.file.write_all_at(&Stamp::of(image)?.encode(), STAMP_AT)?;
        self.file.sync()?;
        self.file.write_all_at(&modified_at(image)?.to_le_bytes(), SEAL_AT)?;
        self.file.sync()
    }
}

/// Byte and bit of a granule.
fn place(granule: u64) -> (usize, u8) {
    ((granule / 8) as usize, 1 << (granule % 8))
}

fn bitmap_bytes(disk_bytes: u64) -> usize {
    disk_bytes.div_ceil(GRANULE_BYTES).div_ceil(8) as usize
}

/// Bytes of the disk that a whole map of a known kind is of.
fn known_bytes(file: &File) -> Option<u64> {
    listed_bytes(file).ok()?.filter(|_| is_stamped(file))
}

/// Bytes of the disk that a whole map is of.
fn listed_bytes(file: &File) -> io::Result<Option<u64>> {
    let mut header = [0; 16];
    if file.metadata()?.len() < BITS_AT {
        return Ok(None);
    }
    file.read_exact_at(&mut header, 0)?;
    let (magic, bytes) = header.split_at(MAGIC.len());
    let listed = u64::from_le_bytes(bytes.try_into().expect("eight are left"));
    let length = BITS_AT + bitmap_bytes(listed) as u64;
    Ok((magic == MAGIC && file.metadata()?.len() == length).then_some(listed))
}

/// Whether this version made the list.
fn is_stamped(file: &File) -> bool {
    stamp_in(file).is_ok_and(|stamp| stamp != Some(Stamp::Time))
}

/// Stamp of the list; none if it is of no kind that this release knows.
fn stamp_in(file: &File) -> io::Result<Option<Stamp>> {
    let mut stamp = [0; stamp::BYTES];
    file.read_exact_at(&mut stamp, STAMP_AT)?;
    Ok(Stamp::decode(&stamp))
}

/// The image's time of modification when the list was sealed, or [`OPEN`].
fn seal_in(file: &File) -> io::Result<i64> {
    let mut seal = [0; 8];
    file.read_exact_at(&mut seal, SEAL_AT)?;
    Ok(i64::from_le_bytes(seal))
}

fn is_of_this_boot(file: &File) -> io::Result<bool> {
    let mut written_in = [0; 36];
    file.read_exact_at(&mut written_in, BOOT_ID_AT)?;
    Ok(written_in == boot_id()?)
}

/// Reason why the map may not tell all changes of the image.
fn doubt(file: &File, image: &Path, untold: Untold) -> io::Result<Option<String>> {
    let (seal, restarted) = (seal_in(file)?, !is_of_this_boot(file)?);
    let doubted = |words: String| (untold == Untold::Doubted).then_some(words);
    let stamp = stamp_in(file)?;
    if seal == OPEN {
        if is_of_another(stamp, Stamp::of(image)?, restarted) {
            let image = image.display();
            return Ok(Some(format!("another image has taken the place of {image}")));
        }
        let words = "the host was restarted without an orderly end of the VM";
        return Ok(doubted(words.to_owned()).filter(|_| restarted));
    }
    let in_time = seal == modified_at(image)?;
    let uncounted = |because: &str| {
        let image = image.display();
        let words = "nothing tells whether the block device";
        Ok(doubted(format!("{words} {image} was written meanwhile: {because}")))
    };
    let same = match stamp {
        Some(Stamp::Uncounted) => return uncounted("the kernel does not count that"),
        Some(Stamp::Device { .. }) if restarted => return uncounted("the host was restarted"),
        Some(Stamp::Device { .. }) => stamp == Some(Stamp::of(image)?),
        Some(Stamp::File { .. }) => in_time && stamp == Some(Stamp::of(image)?),
        Some(Stamp::Time) => in_time,
        None => false,
    };
    Ok((!same).then(|| format!("{} was changed by other means", image.display())))
}

/// Whether an open list is of another image than the one that is there. A restart gives devices other numbers.
fn is_of_another(listed: Option<Stamp>, found: Stamp, restarted: bool) -> bool {
    match listed {
        Some(Stamp::Device { .. }) if restarted => matches!(found, Stamp::File { .. }),
        Some(listed) => !listed.may_name_same(found),
        None => true,
    }
}

/// Nanoseconds; never [`OPEN`].
fn modified_at(image: &Path) -> io::Result<i64> {
    let metadata = fs::metadata(image)?;
    let nanoseconds = metadata.mtime().wrapping_mul(1_000_000_000) + metadata.mtime_nsec();
    Ok(nanoseconds.max(1))
}

/// Names this run of the kernel.
fn boot_id() -> io::Result<[u8; 36]> {
    let text = fs::read("/proc/sys/kernel/random/boot_id")?;
    text.first_chunk().copied().ok_or_else(|| io::Error::other("the kernel's boot id is too short"))
}

#[cfg(test)]
#[path = "changes_tests.rs"]
mod tests;
