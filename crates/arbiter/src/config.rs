//! Where the records are; the daemon reads it from its configuration.

use std::path::PathBuf;

/// Where the ownership of VMs is recorded.
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

/// How etcd is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdConfig {
    /// URLs of its members, without a path; at least one.
    pub endpoints: Vec<String>,
    /// What all keys begin with, so that a cluster can be shared.
    pub prefix: String,
    /// Certificates, when the endpoints speak HTTPS.
    pub tls: Option<EtcdTls>,
}

/// PEM files for etcd's mutual authentication; all absolute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdTls {
    /// Certificate authority that is trusted.
    pub ca: PathBuf,
    /// This host's certificate.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
}
