//! A few pages are watched in normal running: which of them are accessed?

use super::{Guard, Shared};
use crate::MemoryError;
use crate::fault::Told;
use std::collections::HashSet;
use std::sync::Arc;
use understudy_protocol::PageIndex;

/// Watched pages, and those accessed.
#[derive(Debug)]
pub(super) struct Watched {
    pages: HashSet<PageIndex>,
    accessed: Vec<PageIndex>,
}

impl Watched {
    pub fn access(&mut self, page: PageIndex) {
        if self.pages.remove(&page) {
            self.accessed.push(page);
        }
    }
}

/// Pages that are watched while this lives.
#[derive(Debug)]
pub struct Sample {
    guard: Arc<Guard>,
}

impl Sample {
    pub(super) fn begin(guard: &Arc<Guard>, pages: &[PageIndex]) -> Result<Sample, MemoryError> {
        let shared = &guard.shared;
        {
            let mut state = shared.lock();
            if state.has_cut || state.sample.is_some() {
                return Err(MemoryError::FaultsTaken);
            }
            let watched = pages.iter().copied().collect();
            state.sample = Some(Watched { pages: watched, accessed: Vec::new() });
        }
        let sample = Sample { guard: Arc::clone(guard) };
        shared.register(Told::WritesAndAccesses)?;
        let adjoin = |a: &PageIndex, b: &PageIndex| a.0 + 1 == b.0;
        let runs = pages.chunk_by(adjoin).map(|run| shared.pages(run[0].0, run.len() as u64));
        let ranges: Vec<_> = runs.collect();
        shared.mappings.drop_ranges(&ranges)?;
        Ok(sample)
    }

    /// Ends it. Which pages were accessed, each once, in the order of their first access.
    pub fn end(self) -> Vec<PageIndex> {
        self.shared().lock().sample.take().map(|watched| watched.accessed).unwrap_or_default()
    }

    fn shared(&self) -> &Shared {
        &self.guard.shared
    }
}

impl Drop for Sample {
    fn drop(&mut self) {
        self.shared().lock().sample = None;
        self.shared().stop_accesses();
    }
}
