//! `[api]`: who may use this host's API over the network, and for what.

use super::listening::Listening;
use super::source::Source;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use toml::Spanned;
use understudy_protocol::HostName;
use understudy_report::error::HostError;

/// Access of a caller of the API; each includes those before.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Access {
    /// Sees everything.
    Read,
    /// Protects, fails over, starts and stops VMs, takes snapshots.
    Operate,
    /// Defines VMs, restores them, deletes snapshots.
    Admin,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Access::Read => "read",
            Access::Operate => "operate",
            Access::Admin => "admin",
        })
    }
}

impl FromStr for Access {
    type Err = String;

    fn from_str(text: &str) -> Result<Access, String> {
        match text {
            "read" => Ok(Access::Read),
            "operate" => Ok(Access::Operate),
            "admin" => Ok(Access::Admin),
            _ => Err(format!("there is no role {text:?}; there are read, operate and admin")),
        }
    }
}

/// The API over the network; always with this host's certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiConfig {
    /// Addresses where it listens.
    pub listen: Vec<SocketAddr>,
    /// Files that hold the tokens of a role, one a line.
    pub tokens: BTreeMap<Access, PathBuf>,
    /// Access of whoever shows a certificate of this name.
    pub certificates: BTreeMap<HostName, Access>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawApi {
    listen: Spanned<toml::Value>,
    #[serde(default)]
    tokens: BTreeMap<Spanned<String>, Spanned<PathBuf>>,
    #[serde(default)]
    certificates: BTreeMap<Spanned<String>, Spanned<String>>,
}

impl RawApi {
    pub(super) fn check(
        self,
        source: &Source<'_>,
        has_tls: bool,
        listening: &mut Listening,
    ) -> Result<ApiConfig, HostError> {
        let span = self.listen.span();
        if !has_tls {
            let message = "there is no [tls], without which the API is not served over the \
                           network: make certificates with `understudy pki` and name them there";
            return Err(source.wrong("api.listen", span, message));
        }
        if self.tokens.is_empty() && self.certificates.is_empty() {
            let message = "nobody could use it: name files with tokens in [api.tokens], or client \
                           certificates in [api.certificates]";
            return Err(source.wrong("api.listen", span, message));
        }
        let role = |field: &str, text: &Spanned<String>| {
            let parsed = text.get_ref().parse::<Access>();
            parsed.map_err(|message| source.wrong(field, text.span(), &message))
        };
        let mut tokens = BTreeMap::new();
        for (name, file) in self.tokens {
            let access = role("api.tokens", &name)?;
            tokens.insert(access, source.absolute(&format!("api.tokens.{access}"), file)?);
        }
        let mut certificates = BTreeMap::new();
        for (name, access) in self.certificates {
            let field = format!("api.certificates.{}", name.get_ref());
            let of_name = certificates.insert(source.name(&field, &name)?, role(&field, &access)?);
            if of_name.is_some() {
                let message = "it is listed twice: capitals are read as small letters";
                return Err(source.wrong(&field, name.span(), message));
            }
        }
        Ok(ApiConfig {
            listen: listening.take(source, "api.listen", &self.listen)?,
            tokens,
            certificates,
        })
    }
}
