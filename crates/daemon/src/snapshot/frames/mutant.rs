//! Mistakes that a test has the daemon make, to prove that it would notice them.

/// Whether the daemon is to make this mistake: with the fail point `frames-mutant=return(FILE)`
/// while that file holds its name.
pub(super) fn is(_mistake: &str) -> bool {
    fail::fail_point!("frames-mutant", |file| {
        let file = file.expect("return(FILE)");
        std::fs::read_to_string(file).is_ok_and(|name| name == _mistake)
    });
    false
}
