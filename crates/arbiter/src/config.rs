//! Configuration of where the records are; the daemon reads it from its configuration.

use std::path::PathBuf;

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
    /// URLs of its members, without a path; at least one.
    pub endpoints: Vec<String>,
    /// Beginning of all keys, so that a cluster can be shared.
    pub prefix: String,
    /// Certificates, when the endpoints speak HTTPS.
    pub tls: Option<EtcdTls>,
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
