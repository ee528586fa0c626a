//! `understudy pki` and `understudy snapshot-key`.

use crate::cli::PkiCommand;
use std::path::Path;
use understudy_client::{Exit, Failure, output};
use understudy_daemon::pki::{self, Revoked, Written};
use understudy_daemon::snapshot::make_key;

/// Makes an authority or a host's certificate, and says where they are.
pub fn run(command: &PkiCommand, json: bool) -> Result<Exit, Failure> {
    let (written, advice) = match command {
        PkiCommand::Init { dir } => (pki::init(dir)?, "keep the key safe: it belongs on no host"),
        PkiCommand::Issue { name, dir, days, out } => {
            let issued = match out {
                Some(out) => pki::issue_into(dir, name, *days, out)?,
                None => pki::issue(dir, name, *days)?,
            };
            (issued, "move both to the host, and name them in its [tls]")
        }
        PkiCommand::Revoke { which, dir } => {
            output::show(json, &pki::revoke(dir, which)?, |it| describe_list(which, it))?;
            return Ok(Exit::Ok);
        }
    };
    output::show(json, &written, |written| describe(written, advice))?;
    Ok(Exit::Ok)
}

/// Makes the key of a snapshot store.
pub fn snapshot_key(file: &Path, json: bool) -> Result<Exit, Failure> {
    make_key(file)?;
    output::show(json, &serde_json::json!({ "key": file }), |_| {
        format!(
            "snapshot key  {}\ncopy it to every host that uses the store, name it in their \
             [snapshot_keys], and keep a copy elsewhere: without it no snapshot can be read\n",
            file.display()
        )
    })?;
    Ok(Exit::Ok)
}

fn describe_list(which: &str, revoked: &Revoked) -> String {
    format!(
        "list  {}\ncertificates on it  {}\nof {which}, by number  {}\n\
         copy it to every host, where [tls] names it as `revoked`; a certificate of another number, which a copy of \
         this authority issued, is not on it: `understudy pki revoke ./FILE.pem` revokes it by its file\n",
        revoked.list.display(),
        revoked.certificates,
        revoked.numbers.join(", ")
    )
}

fn describe(written: &Written, advice: &str) -> String {
    let (cert, key) = (written.cert.display(), written.key.display());
    format!("certificate  {cert}\nprivate key  {key}\n{advice}\n")
}
