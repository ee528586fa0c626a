//! Work that may hang, on storage say, holds the thread that does it, and whoever waits for it no longer than a bound.

use std::io;
use std::time::Instant;
use understudy_threads::spawn;

/// Does work in a thread of this name; returns what came of it, if that is there by then. It goes on in any case.
pub(crate) fn by<T: Send + 'static>(
    until: Instant,
    thread: String,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<Option<T>> {
    let (result, done) = crossbeam_channel::bounded(1);
    // Nobody waits any more if it took too long.
    spawn(thread, move || drop(result.send(work())))?;
    Ok(done.recv_deadline(until).ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn what_hangs_is_not_waited_for() {
        let after = |time| Instant::now() + time;
        let (let_go, hangs) = mpsc::channel::<()>();
        let hang = move || hangs.recv().is_ok();
        let hung = by(after(Duration::from_millis(20)), "hang".to_owned(), hang).unwrap();
        assert_eq!(hung, None);
        drop(let_go);
        let done = by(after(Duration::from_secs(60)), "work".to_owned(), || 7).unwrap();
        assert_eq!(done, Some(7));
    }
}
