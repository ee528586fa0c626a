//! CLOCK, the cheap approximation of recency, for comparison.

use crate::format::Page;
use std::collections::HashMap;

/// Pages around a clock's face; the hand passes over those accessed since it was last there.
#[derive(Clone, Debug)]
pub struct Clock {
    size: usize,
    hand: usize,
    face: Vec<(Page, bool)>,
    places: HashMap<Page, usize>,
}

impl Clock {
    /// Keeps `size` pages, at least one.
    pub fn new(size: usize) -> Clock {
        assert!(size > 0, "no room for a page");
        Clock { size, hand: 0, face: Vec::new(), places: HashMap::new() }
    }

    /// The guest reads or writes a page.
    pub fn access(&mut self, page: Page) {
        if let Some(&place) = self.places.get(&page) {
            self.face[place].1 = true;
            return;
        }
        if self.face.len() < self.size {
            self.places.insert(page, self.face.len());
            self.face.push((page, true));
            return;
        }
        while std::mem::take(&mut self.face[self.hand].1) {
            self.hand = (self.hand + 1) % self.size;
        }
        self.places.remove(&self.face[self.hand].0);
        self.places.insert(page, self.hand);
        self.face[self.hand] = (page, true);
        self.hand = (self.hand + 1) % self.size;
    }

    /// The pages, those accessed since the hand passed first.
    pub fn pages(&self) -> Vec<Page> {
        let (recent, others): (Vec<_>, Vec<_>) = self.face.iter().partition(|(_, bit)| *bit);
        recent.into_iter().chain(others).map(|(page, _)| page).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::{BlockId, PageIndex};

    #[test]
    fn a_page_that_was_touched_since_gets_another_round() {
        let page = |index| Page { block: BlockId(0), index: PageIndex(index) };
        let mut clock = Clock::new(3);
        // 4 sends the hand once around, takes the place of 1; then 2 is touched, 3 is not.
        for index in [1, 2, 3, 4, 2, 5] {
            clock.access(page(index));
        }
        let mut left = clock.pages();
        left.sort();
        assert_eq!(left, [2, 4, 5].map(page));
    }
}
