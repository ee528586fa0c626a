//! The grammar of `pki`.

use clap::Subcommand;
use std::path::PathBuf;
use understudy_daemon::pki::HOST_DAYS;

/// Work on certificates.
#[derive(Debug, Subcommand)]
pub enum PkiCommand {
    /// Make a certificate authority: DIR/ca.pem and DIR/ca.key.
    Init {
        /// Where it is kept.
        #[arg(long, value_name = "DIR", default_value = ".")]
        dir: PathBuf,
    },
    /// Issue a certificate for a host, the first or a newer one: NAME.pem and NAME.key.
    Issue {
        /// The host's name, as in its configuration and its peers'.
        name: String,
        /// Where the authority is kept.
        #[arg(long, value_name = "DIR", default_value = ".")]
        dir: PathBuf,
        /// For how many days it is valid.
        #[arg(long, value_name = "N", default_value_t = HOST_DAYS, value_parser = clap::value_parser!(u32).range(1..=36500))]
        days: u32,
        /// Where both are put [default: beside the authority].
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
    /// Revoke certificates: puts them on the list DIR/revoked.pem.
    Revoke {
        /// The host's name, for all that were issued for it; or a file that holds the certificate.
        #[arg(value_name = "NAME|FILE")]
        which: String,
        /// Where the authority is kept.
        #[arg(long, value_name = "DIR", default_value = ".")]
        dir: PathBuf,
    },
}

pub(super) const PKI_HELP: &str = "\
Example, for hosts a and b, on any machine that is kept safe:

  understudy pki init
  understudy pki issue a
  understudy pki issue b

Each host gets ca.pem and its own two files, and names them in its configuration:

  [tls]
  ca = \"/etc/understudy/ca.pem\"
  cert = \"/etc/understudy/a.pem\"
  key = \"/etc/understudy/a.key\"        # mode 0600
  revoked = \"/etc/understudy/revoked.pem\"

A certificate is renewed with --out, `understudy pki issue a --out new`, and both
files put in the place of the old ones. A daemon notices new files by itself. After `understudy pki revoke a`, copy
revoked.pem to every host.

ca.key belongs on no host: whoever has it can be any host. Nothing that exists
is overwritten.";
