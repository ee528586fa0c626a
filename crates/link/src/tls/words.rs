//! Words on what went wrong with a certificate, for people.

use rustls::{AlertDescription, CertificateError, Error};
use std::io;

/// The words for an error of a TLS connection; none if it is not TLS's.
pub fn explain(error: &io::Error) -> Option<String> {
    let error = error.get_ref()?.downcast_ref::<Error>()?;
    Some(match error {
        Error::InvalidCertificate(problem) => {
            format!("the peer's certificate is not accepted: {}", certificate(problem))
        }
        Error::AlertReceived(alert) => {
            format!("the peer refuses this host's connection: {}", refusal(*alert))
        }
        Error::NoCertificatesPresented => {
            "the peer shows no certificate: does its configuration have [tls]?".to_owned()
        }
        Error::PeerIncompatible(problem) => format!("the peer cannot do TLS 1.3: {problem:?}"),
        other => format!("TLS: {other}"),
    })
}

/// The words for a problem with this host's own certificate.
pub fn local(error: &Error) -> anyhow::Error {
    match error {
        Error::InvalidCertificate(problem) => anyhow::anyhow!(certificate(problem)),
        other => anyhow::anyhow!("{other}"),
    }
}

fn certificate(problem: &CertificateError) -> String {
    use CertificateError::*;
    match problem {
        Expired | ExpiredContext { .. } => {
            "it has expired: issue a new one (`understudy pki issue`)".to_owned()
        }
        NotValidYet | NotValidYetContext { .. } => {
            "it is not valid yet: do the hosts' clocks agree?".to_owned()
        }
        UnknownIssuer | BadSignature => {
            "it is from another CA than the one in this host's [tls]".to_owned()
        }
        NotValidForName => "it is for another host".to_owned(),
        NotValidForNameContext { presented, .. } => {
            format!("it is for another host: {}", presented.join(", "))
        }
        Revoked => "it has been revoked (`understudy pki revoke`)".to_owned(),
        other => format!("{other:?}"),
    }
}

fn refusal(alert: AlertDescription) -> String {
    match alert {
        AlertDescription::CertificateExpired => {
            "this host's certificate has expired: issue a new one (`understudy pki issue`)".into()
        }
        AlertDescription::UnknownCA | AlertDescription::DecryptError => {
            "this host's certificate is from another CA than the one in the peer's [tls]".into()
        }
        AlertDescription::BadCertificate | AlertDescription::CertificateUnknown => {
            "it does not accept this host's certificate; its log says why".into()
        }
        AlertDescription::CertificateRevoked => "this host's certificate has been revoked".into(),
        AlertDescription::CertificateRequired => "it wants a certificate".into(),
        AlertDescription::ProtocolVersion => "it cannot do TLS 1.3".into(),
        other => format!("{other:?}"),
    }
}
