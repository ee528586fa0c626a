//! Access to etcd: with certificates, if it has any, that are read again as soon as their files
//! change.

use crate::EtcdTls;
use anyhow::{Context, ensure};
use std::fmt;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use understudy_threads::{Mutex, lock};
use ureq::Agent;
use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem};

/// Time for one endpoint to answer one request: more than a fail-over ought to wait,
/// and less than an election of etcd's takes by default.
const REQUEST_TIMEOUT: Duration = Duration::from_millis(1_000);

/// The agent that requests are made with.
pub(super) struct Access {
    files: Option<EtcdTls>,
    state: Mutex<State>,
}

struct State {
    /// Contents that the agent was made of.
    contents: Option<Contents>,
    agent: Agent,
    /// Reason why changed files are not used.
    problem: Option<String>,
}

/// Contents of the files.
#[derive(PartialEq, Eq)]
struct Contents {
    ca: Vec<u8>,
    cert: Vec<u8>,
    key: Vec<u8>,
}

impl Access {
    /// Access with what the files hold now; an error is about these.
    pub fn new(files: Option<&EtcdTls>) -> anyhow::Result<Access> {
        let contents = files.map(Contents::read).transpose()?;
        let tls = match (&contents, files) {
            (Some(contents), Some(files)) => Some(contents.tls(files)?),
            _ => None,
        };
        let state = State { contents, agent: agent(tls), problem: None };
        Ok(Access { files: files.cloned(), state: Mutex::new(state) })
    }

    /// The agent of what the files hold by now; the former one as long as they do not fit each other.
    pub fn agent(&self) -> Agent {
        let read = self.files.as_ref().map(|files| (files, Contents::read(files)));
        let mut state = lock(&self.state);
        match read {
            None => {}
            Some((_, Err(error))) => state.note(&error),
            Some((_, Ok(contents))) if state.contents.as_ref() == Some(&contents) => {
                state.problem = None;
            }
            Some((files, Ok(contents))) => match contents.tls(files) {
                Ok(tls) => {
                    let (agent, contents) = (agent(Some(tls)), Some(contents));
                    *state = State { contents, agent, problem: None };
                }
                Err(error) => state.note(&error),
            },
        }
        state.agent.clone()
    }

    /// Reason why changed files are not used, if they are not.
    pub fn problem(&self) -> Option<String> {
        lock(&self.state).problem.clone()
    }
}

impl State {
    fn note(&mut self, error: &anyhow::Error) {
        self.problem = Some(format!("[arbiter]: changed files are not used: {error:#}"));
    }
}

/// The key is nobody's to print.
impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access").field("files", &self.files).finish_non_exhaustive()
    }
}

impl Contents {
    fn read(files: &EtcdTls) -> anyhow::Result<Contents> {
        let read =
            |path: &Path| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
        Ok(Contents { ca: read(&files.ca)?, cert: read(&files.cert)?, key: read(&files.key)? })
    }

    fn tls(&self, files: &EtcdTls) -> anyhow::Result<TlsConfig> {
        let roots = certificates(&self.ca, &files.ca)?;
        let chain = certificates(&self.cert, &files.cert)?;
        let key = PrivateKey::from_pem(&self.key)
            .with_context(|| format!("{} holds no private key", files.key.display()))?;
        Ok(TlsConfig::builder()
            .root_certs(RootCerts::Specific(Arc::new(roots)))
            .client_cert(Some(ClientCert::new_with_certs(&chain, key)))
            .build())
    }
}

fn certificates(pem: &[u8], path: &Path) -> anyhow::Result<Vec<Certificate<'static>>> {
    let mut found = Vec::new();
    for item in parse_pem(pem) {
        if let PemItem::Certificate(certificate) =
            item.with_context(|| format!("{} is not PEM", path.display()))?
        {
            found.push(certificate);
        }
    }
    ensure!(!found.is_empty(), "{} holds no certificate", path.display());
    Ok(found)
}

fn agent(tls: Option<TlsConfig>) -> Agent {
    let mut agent = Agent::config_builder()
        .timeout_global(Some(REQUEST_TIMEOUT))
        .max_idle_connections(0)
        .http_status_as_error(false)
        // etcd is on the management network: never by way of a proxy.
        .proxy(None);
    if let Some(tls) = tls {
        agent = agent.tls_config(tls);
    }
    agent.build().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hash::{DefaultHasher, Hash, Hasher};

    fn pem(label: &str, text: &str) -> String {
        use base64::Engine;
        let body = base64::prelude::BASE64_STANDARD.encode(text);
        format!("-----BEGIN {label}-----\n{body}\n-----END {label}-----\n")
    }

    /// The mark of the certificate that is shown; its text is kept secret.
    fn certificate_of(access: &Access) -> u64 {
        let mut hasher = DefaultHasher::new();
        access.agent().config().tls_config().client_cert().hash(&mut hasher);
        hasher.finish()
    }

    /// The files were read once, when the daemon began: renewed ones counted for nothing, and the expired one cut the
    /// arbiter off.
    #[test]
    fn renewed_files_are_used_once_they_can_be() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let write = |name: &str, text: &str| fs::write(path(name), text).unwrap();
        write("ca", &pem("CERTIFICATE", "ca"));
        write("cert", &pem("CERTIFICATE", "first"));
        write("key", &pem("PRIVATE KEY", "key"));
        let files = EtcdTls { ca: path("ca"), cert: path("cert"), key: path("key") };
        let access = Access::new(Some(&files)).unwrap();
        let first = certificate_of(&access);
        assert_eq!(certificate_of(&access), first);
        // Half written, or away for a moment.
        write("cert", "");
        assert_eq!(certificate_of(&access), first);
        assert!(access.problem().unwrap().contains("holds no certificate"));
        write("cert", &pem("CERTIFICATE", "second"));
        let second = certificate_of(&access);
        assert_ne!(second, first);
        assert_eq!(access.problem(), None);
        fs::remove_file(path("key")).unwrap();
        assert_eq!(certificate_of(&access), second);
        assert!(access.problem().unwrap().contains("cannot read"));
    }
}
