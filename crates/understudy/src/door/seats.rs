//! The connections that there may be, and those that there are.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};

/// Connections at a time, so that strangers leave descriptors for the hosts.
const MOST_CONNECTIONS: usize = 128;
/// Connections of one address among them, so that no other goes without: a browser has six.
const MOST_OF_ONE: usize = 32;

/// The connections that there may be.
#[derive(Clone)]
pub struct Seats {
    free: Arc<Semaphore>,
    most_of_one: usize,
    taken: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

/// A connection's place, until it is dropped.
pub(super) struct Seat {
    _free: OwnedSemaphorePermit,
    pub(super) address: IpAddr,
    seats: Seats,
}

impl Default for Seats {
    fn default() -> Seats {
        Seats::new(MOST_CONNECTIONS, MOST_OF_ONE)
    }
}

impl Seats {
    /// Makes so many seats, and so many for one address.
    pub(super) fn new(most: usize, most_of_one: usize) -> Seats {
        Seats { free: Arc::new(Semaphore::new(most)), most_of_one, taken: Arc::default() }
    }

    /// Waits for one that is free.
    pub(super) async fn one(&self) -> Result<OwnedSemaphorePermit, AcquireError> {
        self.free.clone().acquire_owned().await
    }

    /// A place for a connection from this address, if it has not all of its own.
    pub(super) fn take(&self, free: OwnedSemaphorePermit, address: IpAddr) -> Option<Seat> {
        let mut taken = self.taken();
        let of_one = taken.entry(address).or_default();
        if *of_one >= self.most_of_one {
            return None;
        }
        *of_one += 1;
        Some(Seat { _free: free, address, seats: self.clone() })
    }

    fn taken(&self) -> MutexGuard<'_, HashMap<IpAddr, usize>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut taken = self.seats.taken();
        if let Some(of_one) = taken.get_mut(&self.address) {
            *of_one -= 1;
            if *of_one == 0 {
                taken.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_address_leaves_room_for_others() {
        let seats = Seats::default();
        let take = async |last: u8| {
            let free = seats.one().await.unwrap();
            seats.take(free, IpAddr::from([10, 0, 0, last]))
        };
        let mut taken = Vec::new();
        for _ in 0..MOST_OF_ONE {
            taken.push(take(1).await.expect("there is room"));
        }
        assert!(take(1).await.is_none(), "it has all of its own");
        assert_eq!(seats.free.available_permits(), MOST_CONNECTIONS - MOST_OF_ONE);
        assert!(take(2).await.is_some());
        taken.pop();
        assert!(take(1).await.is_some());
        taken.clear();
        assert!(seats.taken().is_empty());
    }
}
