//! `understudy pki`.

use crate::cli::PkiCommand;
use crate::failure::{Exit, Failure};
use crate::output;
use understudy_daemon::pki::{self, Written};

/// Makes an authority or a host's certificate, and says where they are.
pub fn run(command: &PkiCommand, json: bool) -> Result<Exit, Failure> {
    let (written, advice) = match command {
        PkiCommand::Init { dir } => (pki::init(dir)?, "keep the key safe: it belongs on no host"),
        PkiCommand::Issue { name, dir, days } => {
            (pki::issue(dir, name, *days)?, "move both to the host, and name them in its [tls]")
        }
    };
    output::show(json, &written, |written| describe(written, advice))?;
    Ok(Exit::Ok)
}

fn describe(written: &Written, advice: &str) -> String {
    let (cert, key) = (written.cert.display(), written.key.display());
    format!("certificate  {cert}\nprivate key  {key}\n{advice}\n")
}
