//! Figures that were not measured here, to be shown beside ours.

/// Pauses against the pages written since the last one.
pub struct Pauses {
    /// Source that they are from.
    pub source: &'static str,
    /// Pages, and the least and the most milliseconds.
    pub points: &'static [(u64, f64, f64)],
}

/// QEMU's COLO, whose stock build does not run.
pub const COLO_PAUSES: Pauses = Pauses {
    source: "QEMU 10.0.2, patched, machine pc, 512 MiB, over a unix socket; an earlier \
             measurement, not this run",
    points: &[(0, 1.0, 1.2), (1_000, 2.5, 2.9), (10_000, 16.0, 17.0)],
};

impl Pauses {
    /// Words for the table: empty where nothing was measured.
    pub fn words(&self, pages: u64) -> String {
        let found = self.points.iter().find(|point| point.0 == pages);
        found.map_or_else(String::new, |(_, least, most)| format!("{least}–{most}"))
    }
}
