// SPDX-License-Identifier: GPL-2.0-or-later
//! Questions that a backup's QEMU asks its log when there is no more of it.
//!
//! Of a few instructions QEMU logs not only that they were executed but, as an event of its own
//! behind that, how they ended: how much a character device took, or what is random. A primary's
//! log may end between the two. Its backup then has executed the instruction, asks how it ended,
//! and would end with an error ("Missing character write event"), after the primary. So the agent
//! answers as the device might have: what the primary's answer was nobody has seen, because all
//! that could show it comes later in the log than the answer, and leaves the primary after it.
//!
//! QEMU asks when it looks for the event behind the instruction, so that who calls shows what it
//! asks. It is looked at when there is no log only: once at the log's end, and when a machine that
//! is about to stop finds no more for the moment.

use crate::qemu_symbols::place;
use std::ffi::c_int;
use std::ops::Range;
use std::ptr;

/// Something was written to a character device: the result, and how many bytes. A serial port
/// writes them one by one; to any other that is a part of what it has.
const WRITTEN: [u8; 9] = [22, 0, 0, 0, 1, 0, 0, 0, 1];

/// Random bytes: the result, which is good, their number, and they. The processor's instructions
/// ask for so many.
const RANDOM: [u8; 9] = [27, 0, 0, 0, 0, 0, 0, 0, RANDOM_BYTES as u8];
const RANDOM_BYTES: usize = 8;

/// Callers that are looked at: QEMU's question is some ten calls away.
const CALLERS: usize = 24;

/// Question that QEMU asks.
enum Question {
    Written,
    Random,
}

/// The code of the functions of QEMU that tell what it asks.
pub struct Questions {
    /// Looks for the next event because all instructions up to here are executed.
    executed: Range<usize>,
    /// Asks how much was written.
    written: Range<usize>,
    /// Asks for random bytes.
    random: Range<usize>,
}

impl Questions {
    /// Finds these functions, or says what is missing.
    pub fn find() -> Result<Questions, String> {
        Ok(Questions {
            executed: place(c"replay_advance_current_icount")?,
            written: place(c"replay_char_write_event_load")?,
            random: place(c"replay_read_random")?,
        })
    }

    /// Whether QEMU, which looks for an event on this thread, asks something.
    pub fn is_asked(&self) -> bool {
        self.asked().is_some()
    }

    /// The event that answers QEMU, which looks for one on this thread; none if it asks nothing.
    pub fn answer(&self) -> Option<Vec<u8>> {
        match self.asked()? {
            Question::Written => Some(WRITTEN.to_vec()),
            Question::Random => random(),
        }
    }

    fn asked(&self) -> Option<Question> {
        let callers = callers();
        let by = |code: &Range<usize>| callers.iter().any(|caller| code.contains(caller));
        // Else the question was answered, and QEMU looks what comes next.
        if !by(&self.executed) {
            return None;
        }
        if by(&self.written) {
            return Some(Question::Written);
        }
        by(&self.random).then_some(Question::Random)
    }
}

/// Addresses that this thread returns to, the last call first.
fn callers() -> Vec<usize> {
    let mut callers = [ptr::null_mut(); CALLERS];
    // SAFETY: fills an array of that length at most.
    let count = unsafe { libc::backtrace(callers.as_mut_ptr(), CALLERS as c_int) };
    callers.iter().take(count as usize).map(|caller| caller.addr()).collect()
}

fn random() -> Option<Vec<u8>> {
    let mut bytes = [0_u8; RANDOM_BYTES];
    // SAFETY: fills an array of that length.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), RANDOM_BYTES, 0) };
    (got == RANDOM_BYTES as isize).then(|| [&RANDOM[..], &bytes].concat())
}
