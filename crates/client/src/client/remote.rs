//! The API of a daemon on another machine, over TLS.

use crate::failure::{Failure, FailureKind};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto};
use understudy_report::ErrorKind;

/// Time for a host to answer, and to prove that it is the one that is meant.
const PATIENCE: Duration = Duration::from_secs(10);

/// A host's API: `https://NAME:PORT`, or `NAME=ADDRESS:PORT` where the name is not to be looked up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostUrl {
    /// The host's name, for which its certificate is.
    pub name: String,
    /// Address of the host.
    pub address: String,
}

impl FromStr for HostUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<HostUrl, String> {
        let wrong = || "a host is https://NAME:PORT, or NAME=ADDRESS:PORT".to_owned();
        let port = |address: &str| address.rsplit_once(':').map(|(_, port)| port.parse::<u16>());
        let parsed = match text.strip_prefix("https://") {
            Some(address) => {
                let address = address.trim_end_matches('/');
                let name = address.rsplit_once(':').map(|(name, _)| name);
                name.map(|name| (name, address))
            }
            None => text.split_once('='),
        };
        let (name, address) = parsed.ok_or_else(wrong)?;
        let is_name = !name.is_empty() && !name.contains(['/', ':', '@']);
        if !is_name || !matches!(port(address), Some(Ok(_))) || address.contains('/') {
            return Err(wrong());
        }
        Ok(HostUrl { name: name.to_owned(), address: address.to_owned() })
    }
}

/// Credentials that are needed to speak with another host's daemon.
#[derive(Clone, Debug, Default)]
pub struct Credentials {
    /// Certificates of the authority that the host's own is of.
    pub ca: Option<PathBuf>,
    /// File with the token to be shown.
    pub token_file: Option<PathBuf>,
    /// The caller's certificate and key.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// A host that can be called.
pub(super) struct Remote {
    pub host: HostUrl,
    pub token: Option<String>,
    connector: TlsConnector,
    server: ServerName<'static>,
}

impl std::fmt::Debug for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Not the token.
        f.debug_struct("Remote").field("host", &self.host).finish_non_exhaustive()
    }
}

fn invalid(message: impl Into<String>) -> Failure {
    Failure::new(FailureKind::Host(ErrorKind::Invalid), message.into())
}

impl Remote {
    pub(super) fn new(host: HostUrl, credentials: &Credentials) -> Result<Remote, Failure> {
        let Some(ca) = &credentials.ca else {
            return Err(invalid(
                "--host needs --ca FILE (or UNDERSTUDY_CA): the ca.pem of the authority that the \
                 host's certificate is of",
            ));
        };
        if credentials.token_file.is_none() && credentials.identity.is_none() {
            return Err(invalid(
                "--host needs --token-file FILE (or UNDERSTUDY_TOKEN_FILE), or --cert FILE and \
                 --key FILE: [api] of the host's configuration says who may do what",
            ));
        }
        let mut roots = RootCertStore::empty();
        for certificate in certificates(ca)? {
            roots.add(certificate).map_err(|error| unusable(ca, &error.to_string()))?;
        }
        let builder = ClientConfig::builder_with_provider(crypto::ring::default_provider().into())
            .with_safe_default_protocol_versions()
            .map_err(|error| Failure::internal(format!("TLS: {error}")))?
            .with_root_certificates(roots);
        let config = match &credentials.identity {
            None => builder.with_no_client_auth(),
            Some((cert, key)) => {
                let chain = certificates(cert)?;
                let private = PrivateKeyDer::from_pem_file(key)
                    .map_err(|error| unusable(key, &error.to_string()))?;
                builder
                    .with_client_auth_cert(chain, private)
                    .map_err(|error| unusable(cert, &error.to_string()))?
            }
        };
        let server = ServerName::try_from(host.name.clone())
            .map_err(|_| invalid(format!("{:?} is no name of a host", host.name)))?;
        let token = credentials.token_file.as_deref().map(token).transpose()?;
        Ok(Remote { host, token, connector: TlsConnector::from(Arc::new(config)), server })
    }

    pub(super) async fn connect(&self) -> Result<TlsStream<TcpStream>, Failure> {
        let HostUrl { name, address } = &self.host;
        let failed = |error: &dyn std::fmt::Display, advice: &str| {
            let message = format!("cannot reach the API of {name} at {address}: {error}; {advice}");
            Failure::new(FailureKind::DaemonUnreachable, message)
        };
        let silent = |_| failed(&"it does not answer", "is its daemon running?");
        let socket = timeout(PATIENCE, TcpStream::connect(address)).await.map_err(silent)?;
        let socket = socket.map_err(|error| {
            failed(&error, "is its daemon running, with [api] in its configuration?")
        })?;
        let greeted = self.connector.connect(self.server.clone(), socket);
        let greeted = timeout(PATIENCE, greeted).await.map_err(silent)?;
        greeted.map_err(|error| {
            failed(&error, "is the address right, and --ca its authority, and NAME its name?")
        })
    }
}

fn unusable(file: &Path, why: &str) -> Failure {
    invalid(format!("{} cannot be used: {why}", file.display()))
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, Failure> {
    let read = CertificateDer::pem_file_iter(file).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(found) if found.is_empty() => Err(unusable(file, "it holds no certificate")),
        Ok(found) => Ok(found),
        Err(error) => Err(unusable(file, &error.to_string())),
    }
}

/// The first line of a file that nobody else may read.
fn token(file: &Path) -> Result<String, Failure> {
    let read = || -> std::io::Result<(u32, String)> {
        let mode = fs::metadata(file)?.permissions().mode() & 0o777;
        Ok((mode, fs::read_to_string(file)?))
    };
    let (mode, text) = read().map_err(|error| unusable(file, &error.to_string()))?;
    if mode & 0o077 != 0 {
        return Err(unusable(
            file,
            &format!("others may read it (mode {mode:04o}): `chmod 600` it"),
        ));
    }
    let line = text.lines().next().unwrap_or_default().trim();
    let fits = !line.is_empty() && line.bytes().all(|byte| byte.is_ascii_graphic());
    if fits { Ok(line.to_owned()) } else { Err(unusable(file, "its first line is no token")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_named_and_where_it_is() {
        for (text, name, address) in [
            ("https://host-a:7780", "host-a", "host-a:7780"),
            ("https://host-a:7780/", "host-a", "host-a:7780"),
            ("host-a=10.0.0.1:7780", "host-a", "10.0.0.1:7780"),
            ("host-a=[fd00::1]:7780", "host-a", "[fd00::1]:7780"),
        ] {
            let url: HostUrl = text.parse().unwrap();
            assert_eq!((&url.name[..], &url.address[..]), (name, address), "{text}");
        }
        for text in
            ["host-a", "http://host-a:7780", "https://host-a", "=10.0.0.1:1", "a=b", "a=b:x"]
        {
            assert!(text.parse::<HostUrl>().unwrap_err().contains("NAME=ADDRESS:PORT"), "{text}");
        }
    }

    #[test]
    fn what_is_missing_or_open_to_others_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let host = || "a=127.0.0.1:1".parse::<HostUrl>().unwrap();
        let words =
            |credentials: &Credentials| Remote::new(host(), credentials).unwrap_err().message;
        assert!(words(&Credentials::default()).contains("--ca FILE"));
        let ca = Some(directory.path().join("ca.pem"));
        let lone = Credentials { ca: ca.clone(), ..Default::default() };
        assert!(words(&lone).contains("--token-file"));
        let token_file = Some(directory.path().join("token"));
        let with = Credentials { ca, token_file, ..Default::default() };
        assert!(words(&with).contains("ca.pem cannot be used"));
        let path = directory.path().join("token");
        fs::write(&path, "0123456789abcdef0123\n").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(token(&path).unwrap_err().message.contains("chmod 600"));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(token(&path).unwrap(), "0123456789abcdef0123");
    }
}
