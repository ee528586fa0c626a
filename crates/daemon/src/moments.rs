//! Moments at which a test has the daemon die, or stand still until its host dies.

/// The fail point of that name: with `NAME=panic` the daemon dies there. With `NAME=return(FILE)`
/// the thread makes that file, so that the test knows, and stands still for as long as it is there.
pub fn pass(_moment: &str) {
    fail::fail_point!(_moment, |file| {
        let file = std::path::PathBuf::from(file.expect("return(FILE)"));
        std::fs::write(&file, "").expect("the fail point's file can be made");
        while file.exists() {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    });
}
