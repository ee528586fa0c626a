//! Tests of the bound of what was written.

use super::epochs::read_into;
use super::*;
use std::fs::File;

/// What a throttle that counts pages only where they may be too many builds on.
#[test]
fn no_more_pages_are_counted_than_there_were_faults() {
    let zeroes = File::open("/dev/zero").unwrap();
    for reprotect in [Reprotect::AtOnce, Reprotect::Runs] {
        let guest = Guest::new(8192);
        (0..4096).for_each(|page| guest.write(page, 1));
        let mut tracker = guest.track(reprotect);
        let faults = Faults::open(std::process::id()).unwrap();
        for epoch in 0..20_u64 {
            let before = faults.count().unwrap();
            scan(&mut tracker);
            for page in 0..200 + 50 * epoch {
                let page = (page * 7919 + epoch * 31) % 6000;
                match page % 4 {
                    0 => guest.read(page),
                    // By the system, as for whoever reads a disk.
                    1 => read_into(
                        &zeroes,
                        guest.view.address() + page * PAGE_SIZE as u64,
                        PAGE_SIZE,
                    ),
                    _ => guest.write(page, epoch),
                }
            }
            let (counted, faults) = (tracker.count().unwrap(), faults.count().unwrap() - before);
            assert!(counted > 50 && counted <= faults, "{counted} pages, {faults} faults");
        }
    }
}
