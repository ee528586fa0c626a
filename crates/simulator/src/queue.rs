//! The queue of what is to happen, in order of time.

use std::time::Duration;
use understudy_protocol::Time;

/// Things to come. Of those at one time, what was put first comes first.
#[derive(Debug)]
pub struct Queue<T> {
    /// Keys of when, and which was put first; and where the thing is. The last comes next: few wait
    /// at a time, and most are put near the end.
    order: Vec<(u128, usize)>,
    /// Things lie still here, however the order changes.
    things: Vec<Option<T>>,
    free: Vec<usize>,
    puts: u64,
}

impl<T> Queue<T> {
    /// A queue without anything to come.
    pub fn new() -> Queue<T> {
        Queue { order: Vec::new(), things: Vec::new(), free: Vec::new(), puts: 0 }
    }

    /// `thing` is to come at `time`.
    pub fn put(&mut self, time: Time, thing: T) {
        self.puts += 1;
        let key = time.0.as_nanos() << 64 | u128::from(self.puts);
        let place = self.free.pop().unwrap_or_else(|| {
            self.things.push(None);
            self.things.len() - 1
        });
        self.things[place] = Some(thing);
        let later = self.order.iter().rposition(|(other, _)| *other > key);
        self.order.insert(later.map_or(0, |at| at + 1), (key, place));
    }

    /// Takes what comes next.
    pub fn next(&mut self) -> Option<(Time, T)> {
        let (key, place) = self.order.pop()?;
        self.free.push(place);
        let thing = self.things[place].take().expect("it was put there");
        Some((Time(Duration::from_nanos((key >> 64) as u64)), thing))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earliest_comes_first_and_of_two_the_one_that_was_put_first() {
        let mut queue = Queue::new();
        let at = |ms| Time(Duration::from_millis(ms));
        for (ms, thing) in [(5, 'c'), (3, 'a'), (5, 'd'), (3, 'b')] {
            queue.put(at(ms), thing);
        }
        assert_eq!(queue.next(), Some((at(3), 'a')));
        queue.put(at(4), 'x');
        let rest: String = std::iter::from_fn(|| queue.next()).map(|(_, thing)| thing).collect();
        assert_eq!(rest, "bxcd");
    }
}
