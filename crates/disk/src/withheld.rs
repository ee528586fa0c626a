//! Errors of requests, and those of which QEMU does not learn for now.
//!
//! At an error of a disk QEMU stops the machine, and where is no part of its log: in lockstep the
//! backup's would stop elsewhere, with log before it that it never executes. So there the request
//! stays unanswered, as one of a disk that takes its time, and the guest goes on.

use std::fmt;
use std::io;
use std::mem;
use std::sync::Arc;
use understudy_threads::{Mutex, MutexGuard};

/// Gives QEMU its answer.
pub(crate) type Answer = Box<dyn FnOnce() + Send>;

/// Callback for each error that is withheld.
pub type OnError = Arc<dyn Fn(&io::Error) + Send + Sync>;

/// The errors of one disk's requests.
#[derive(Default)]
pub(crate) struct Withheld(Mutex<State>);

#[derive(Default)]
struct State {
    /// Callback that learns of errors; none: QEMU learns of them.
    told: Option<OnError>,
    answers: Vec<Answer>,
    /// First error, since QEMU tells of not every one.
    first: Option<String>,
}

impl Withheld {
    /// Begins to withhold: from now on QEMU does not learn of errors.
    pub(crate) fn begin(&self, told: OnError) {
        self.lock().told = Some(told);
    }

    /// QEMU learns of errors again, of those first that were withheld.
    pub(crate) fn end(&self) {
        let mut state = self.lock();
        state.told = None;
        let answers = mem::take(&mut state.answers);
        drop(state);
        answers.into_iter().for_each(|answer| answer());
    }

    /// A request failed: its answer is given now, or at the end.
    pub(crate) fn answer(&self, error: &io::Error, answer: Answer) {
        let mut state = self.lock();
        state.first.get_or_insert_with(|| error.to_string());
        let Some(told) = state.told.clone() else {
            drop(state);
            return answer();
        };
        state.answers.push(answer);
        drop(state);
        told(error);
    }

    /// First error, if there was any.
    pub(crate) fn first(&self) -> Option<String> {
        self.lock().first.clone()
    }

    /// Whether requests wait for the end.
    pub(crate) fn is_any(&self) -> bool {
        !self.lock().answers.is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(understudy_threads::poisoned)
    }
}

impl fmt::Debug for Withheld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Withheld").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn an_error_waits_for_the_end() {
        let withheld = Withheld::default();
        let (answers, answered) = channel();
        let (told, tellings) = channel();
        let told = Mutex::new(told);
        let fail = |number: i32| {
            let answers = answers.clone();
            let answer = Box::new(move || answers.send(number).unwrap());
            withheld.answer(&io::Error::from_raw_os_error(5), answer);
        };
        fail(0);
        assert_eq!(answered.try_recv(), Ok(0), "QEMU learns of errors");
        let first = withheld.first();
        assert!(first.is_some(), "it is remembered, whatever QEMU makes of it");
        withheld.begin(Arc::new(move |error| told.lock().unwrap().send(error.kind()).unwrap()));
        fail(1);
        fail(2);
        assert!(answered.try_recv().is_err() && withheld.is_any(), "QEMU has learned of an error");
        assert_eq!(tellings.try_iter().count(), 2);
        withheld.end();
        assert_eq!(answered.try_iter().collect::<Vec<_>>(), [1, 2]);
        assert!(!withheld.is_any());
        assert_eq!(withheld.first(), first);
        fail(3);
        assert_eq!(answered.try_recv(), Ok(3), "QEMU learns of errors again");
    }
}
