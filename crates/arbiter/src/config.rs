//! Configuration of where the records are; the daemon reads it from its configuration.

use std::fmt;
use std::path::PathBuf;
use ureq::http::uri::Authority;

/// Place where the ownership of VMs is recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ArbiterConfig {
    /// A directory that every host reaches.
    File {
        /// The directory; absolute.
        path: PathBuf,
    },
    /// An etcd cluster.
    Etcd(EtcdConfig),
}

/// Access to etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdConfig {
    /// Its members.
    pub endpoints: EtcdEndpoints,
    /// Beginning of all keys, so that a cluster can be shared.
    pub prefix: String,
}

/// The members of an etcd cluster, at least one: all are spoken to with certificates, or all in the clear.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdEndpoints {
    members: Vec<Authority>,
    tls: Option<EtcdTls>,
}

/// PEM files for etcd's mutual authentication; all absolute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdTls {
    /// Certificate authority that is trusted.
    pub ca: PathBuf,
    /// Certificate of this host.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
}

impl EtcdEndpoints {
    /// The members with these URLs, without a path; with certificates if they are `https` ones.
    ///
    /// # Errors
    /// What is wrong with them, for people.
    pub fn new(urls: &[String], tls: Option<EtcdTls>) -> Result<EtcdEndpoints, String> {
        if urls.is_empty() {
            return Err("the list is empty; name at least one member of the cluster".to_owned());
        }
        let members =
            urls.iter().map(|url| member(url, tls.is_some())).collect::<Result<_, _>>()?;
        Ok(EtcdEndpoints { members, tls })
    }

    /// The URLs of the members.
    pub fn urls(&self) -> impl Iterator<Item = String> {
        let scheme = scheme(self.tls.is_some());
        self.members.iter().map(move |member| format!("{scheme}{member}"))
    }

    /// The certificates, if there are any.
    pub fn tls(&self) -> Option<&EtcdTls> {
        self.tls.as_ref()
    }

    /// Each member alone.
    pub fn each(&self) -> impl Iterator<Item = EtcdEndpoints> {
        let alone = |member: &Authority| vec![member.clone()];
        self.members
            .iter()
            .map(move |it| EtcdEndpoints { members: alone(it), tls: self.tls.clone() })
    }
}

impl fmt::Display for EtcdEndpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.urls().collect::<Vec<_>>().join(","))
    }
}

fn scheme(secure: bool) -> &'static str {
    if secure { "https://" } else { "http://" }
}

/// The host and port in a URL: one with a user's name and password is not repeated.
fn member(url: &str, secure: bool) -> Result<Authority, String> {
    if url.contains('@') {
        let words = "an endpoint has no user and no password: etcd knows hosts by `cert` and `key`";
        return Err(words.to_owned());
    }
    let other = if secure {
        "with `ca`, `cert` and `key` all endpoints must be https ones"
    } else {
        "an https endpoint needs `ca`, `cert` and `key`"
    };
    if url.starts_with(scheme(!secure)) {
        return Err(format!("\"{url}\": {other}"));
    }
    let authority = url.strip_prefix(scheme(secure)).and_then(|rest| rest.parse().ok());
    authority.filter(is_host_and_port).ok_or_else(|| {
        let example = format!("{}10.0.0.9:2379", scheme(secure));
        format!("\"{url}\" is not an endpoint; write for example \"{example}\"")
    })
}

fn is_host_and_port(authority: &Authority) -> bool {
    let (host, port) = (authority.host(), authority.port_u16());
    let port = port.map_or_else(String::new, |port| format!(":{port}"));
    !host.is_empty() && authority.as_str() == format!("{host}{port}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tls() -> EtcdTls {
        EtcdTls { ca: "/ca".into(), cert: "/cert".into(), key: "/key".into() }
    }

    fn parse(urls: &[&str], tls: Option<EtcdTls>) -> Result<EtcdEndpoints, String> {
        EtcdEndpoints::new(&urls.iter().map(|url| (*url).to_owned()).collect::<Vec<_>>(), tls)
    }

    /// With certificates, records went to `http` endpoints in the clear: to all, or to those of a mixed list once the others
    /// were cut off.
    #[test]
    fn all_endpoints_are_spoken_to_with_certificates_or_none() {
        let secure = parse(&["https://e:1", "https://[::1]:2"], Some(tls())).unwrap();
        assert_eq!(secure.to_string(), "https://e:1,https://[::1]:2");
        assert!(secure.each().all(|one| one.tls() == Some(&tls())));
        assert_eq!(parse(&["http://e"], None).unwrap().urls().collect::<Vec<_>>(), ["http://e"]);
        for (urls, tls, words) in [
            (&["http://e:1"][..], Some(tls()), "must be https"),
            (&["https://e:1", "http://e:1"], Some(tls()), "must be https"),
            (&["https://e:1"], None, "needs `ca`"),
            (&["http://e:1", "https://e:1"], None, "needs `ca`"),
            (&[], None, "empty"),
        ] {
            let why = parse(urls, tls).unwrap_err();
            assert!(why.contains(words), "{urls:?}: {why}");
        }
    }

    #[test]
    fn an_endpoint_is_a_host_and_a_port() {
        for url in ["e:1", "http://", "http://e:", "http://e:99999", "http://e:1/v3", "http://e?x"]
        {
            assert!(parse(&[url], None).unwrap_err().contains("is not an endpoint"), "{url}");
        }
        // They were sent, and shown to whoever reads logs, and to peers.
        let why = parse(&["http://root:hunter2@e:1"], None).unwrap_err();
        assert!(why.contains("no password") && !why.contains("hunter2"), "{why}");
    }
}
