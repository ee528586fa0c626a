//! The `[arbiter]` section.
//!
//! ```toml
//! [arbiter]                                  # [arbiter]
//! kind = "file"                              # kind = "etcd"
//! path = "/srv/arbiter"                      # endpoints = ["http://10.0.0.9:2379"]
//! ```

use super::Source;
use serde::Deserialize;
use std::path::PathBuf;
use toml::Spanned;
pub use understudy_arbiter::{ArbiterConfig, EtcdConfig, EtcdEndpoints, EtcdTls};
use understudy_report::error::HostError;

const DEFAULT_PREFIX: &str = "/understudy";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawArbiter {
    kind: Spanned<String>,
    path: Option<Spanned<PathBuf>>,
    endpoints: Option<Spanned<Vec<String>>>,
    prefix: Option<Spanned<String>>,
    ca: Option<Spanned<PathBuf>>,
    cert: Option<Spanned<PathBuf>>,
    key: Option<Spanned<PathBuf>>,
}

impl RawArbiter {
    pub(super) fn check(self, source: &Source<'_>) -> Result<ArbiterConfig, HostError> {
        let kind = self.kind.span();
        let missing = |what: &str| Err(source.wrong("arbiter", kind.clone(), what));
        match self.kind.get_ref().as_str() {
            "file" => {
                if self.endpoints.is_some() || self.prefix.is_some() || self.ca.is_some() {
                    return missing("only kind \"etcd\" has endpoints, a prefix or certificates");
                }
                let Some(path) = self.path else {
                    return missing(
                        "missing field `path`; write for example path = \"/srv/understudy/arbiter\"",
                    );
                };
                Ok(ArbiterConfig::File { path: source.absolute("arbiter.path", path)? })
            }
            "etcd" => {
                if self.path.is_some() {
                    return missing("only kind \"file\" has a path");
                }
                if self.endpoints.is_none() {
                    return missing(
                        "missing field `endpoints`; write for example \
                         endpoints = [\"http://10.0.0.9:2379\"]",
                    );
                }
                self.check_etcd(source).map(ArbiterConfig::Etcd)
            }
            other => {
                let message =
                    format!("\"{other}\" is not a kind of arbiter; write \"file\" or \"etcd\"");
                Err(source.wrong("arbiter.kind", kind, &message))
            }
        }
    }

    fn check_etcd(self, source: &Source<'_>) -> Result<EtcdConfig, HostError> {
        let raw = self.endpoints.expect("looked at before");
        let prefix = match self.prefix {
            Some(prefix) if !prefix.get_ref().starts_with('/') => {
                let message = format!("\"{}\" must begin with /", prefix.get_ref());
                return Err(source.wrong("arbiter.prefix", prefix.span(), &message));
            }
            Some(prefix) => prefix.into_inner().trim_end_matches('/').to_owned(),
            None => DEFAULT_PREFIX.to_owned(),
        };
        let tls = match (self.ca, self.cert, self.key) {
            (None, None, None) => None,
            (Some(ca), Some(cert), Some(key)) => Some(EtcdTls {
                ca: source.absolute("arbiter.ca", ca)?,
                cert: source.absolute("arbiter.cert", cert)?,
                key: source.absolute("arbiter.key", key)?,
            }),
            _ => {
                let message = "`ca`, `cert` and `key` belong together: write all or none";
                return Err(source.wrong("arbiter", self.kind.span(), message));
            }
        };
        let endpoints = EtcdEndpoints::new(raw.get_ref(), tls)
            .map_err(|why| source.wrong("arbiter.endpoints", raw.span(), &why))?;
        Ok(EtcdConfig { endpoints, prefix })
    }
}

#[cfg(test)]
mod tests {
    use super::super::HostConfig;
    use super::*;
    use std::path::Path;

    fn load(section: &str) -> Result<Option<ArbiterConfig>, String> {
        let text = format!("name = 'a'\nlisten = '127.0.0.1:7700'\n[arbiter]\n{section}");
        HostConfig::from_toml(&text, Path::new("host.toml"))
            .map(|config| config.arbiter)
            .map_err(|error| error.message)
    }

    #[test]
    fn an_etcd_cluster_is_named_by_its_endpoints() {
        let section = "kind = 'etcd'\nendpoints = ['https://10.0.0.9:2379', 'https://e:2379']\n\
                       prefix = '/site/'\nca = '/ca'\ncert = '/cert'\nkey = '/key'";
        let Ok(Some(ArbiterConfig::Etcd(config))) = load(section) else { panic!("no etcd") };
        assert_eq!(config.endpoints.to_string(), "https://10.0.0.9:2379,https://e:2379");
        assert_eq!(config.prefix, "/site");
        assert_eq!(config.endpoints.tls().unwrap().key, Path::new("/key"));
    }

    #[test]
    fn what_is_wrong_is_said_with_its_place() {
        let cases = [
            ("kind = 'etcd'", "endpoints = ["),
            ("kind = 'etcd'\nendpoints = []", "host.toml:5: arbiter.endpoints: the list is empty"),
            ("kind = 'etcd'\nendpoints = ['10.0.0.9:2379']", "http://"),
            (
                "kind = 'etcd'\nendpoints = ['https://e:1', 'http://e:1']\nca = '/ca'\n\
                 cert = '/cert'\nkey = '/key'",
                "host.toml:5: arbiter.endpoints: \"http://e:1\": with `ca`",
            ),
            ("kind = 'etcd'\npath = '/x'", "only kind \"file\""),
            ("kind = 'file'\nendpoints = ['http://e:1']", "only kind \"etcd\""),
            ("kind = 'etcd'\nendpoints = ['http://e:1']\nca = '/ca'", "all or none"),
            ("kind = 'etcd'\nendpoints = ['http://e:1']\nprefix = 'x'", "begin with /"),
            ("kind = 'disk'", "\"file\" or \"etcd\""),
            ("kind = 'file'", "missing field `path`"),
        ];
        for (section, words) in cases {
            let message = load(section).unwrap_err();
            assert!(message.contains(words), "{section}: {message}");
        }
    }
}
