//! Aims: what is to be reached.

use crate::bench::suite::table::number;
use serde::Serialize;

/// One thing that is aimed at.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Aim {
    /// Words for what is aimed at.
    pub what: String,
    /// Value that was measured.
    pub measured: f64,
    /// Whether that is enough.
    pub reached: bool,
}

impl Aim {
    /// `measured` is to be `limit` at most.
    pub fn at_most(what: impl Into<String>, measured: f64, limit: f64) -> Aim {
        let what = format!("{}: at most {}", what.into(), number(limit));
        Aim { what, measured, reached: measured <= limit }
    }

    /// `measured` is to be `limit` at least.
    pub fn at_least(what: impl Into<String>, measured: f64, limit: f64) -> Aim {
        let what = format!("{}: at least {}", what.into(), number(limit));
        Aim { what, measured, reached: measured >= limit }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_itself_is_enough() {
        let reached = |aim: Aim| aim.reached;
        assert!(reached(Aim::at_most("a", 3.0, 3.0)) && !reached(Aim::at_most("a", 3.1, 3.0)));
        assert!(reached(Aim::at_least("a", 4.0, 4.0)) && !reached(Aim::at_least("a", 3.9, 4.0)));
        assert_eq!(Aim::at_most("pause, ms", 1.0, 3.0).what, "pause, ms: at most 3.00");
    }
}
