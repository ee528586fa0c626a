//! Moments at which a test has the daemon die, or stand still.

use understudy_protocol::VmName;

/// Panics, once, with `strike=return(FILE)`, in the thread whose role and VM that file names.
pub fn strike(_role: &str, _vm: &VmName) {
    fail::fail_point!("strike", |file| {
        let file = std::path::PathBuf::from(file.expect("return(FILE)"));
        let this = format!("{_role} of {_vm}");
        let wanted = std::fs::read_to_string(&file).is_ok_and(|wanted| wanted == this);
        if wanted && std::fs::remove_file(&file).is_ok() {
            panic!("a test strikes {this}");
        }
    });
}

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

/// The fail point of that name: with `NAME=return(FILE)` the thread stands still for as long as the test has that
/// file there.
pub fn stand_still(_moment: &str) {
    fail::fail_point!(_moment, |file| {
        let file = std::path::PathBuf::from(file.expect("return(FILE)"));
        while file.exists() {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    });
}
