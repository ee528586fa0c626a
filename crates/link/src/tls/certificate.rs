//! Fields of a certificate that rustls does not tell.

use rustls::pki_types::CertificateDer;
use yasna::tags::TAG_UTCTIME;
use yasna::{ASN1Result, BERReader, Tag};

/// A certificate's number, time and name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The number that its authority gave it, big-endian.
    pub serial: Vec<u8>,
    /// Time at which it expires, in seconds since 1970.
    pub not_after: i64,
    /// The common name of whom it is for, if it has one.
    pub name: Option<String>,
}

/// Parses a certificate.
pub fn parse(certificate: &CertificateDer<'_>) -> anyhow::Result<Facts> {
    yasna::parse_der(certificate, read)
        .map_err(|error| anyhow::anyhow!("it is not a certificate: {error}"))
}

/// `Certificate` of RFC 5280, section 4.1.
fn read(reader: BERReader<'_, '_>) -> ASN1Result<Facts> {
    reader.read_sequence(|certificate| {
        let facts = certificate.next().read_sequence(|fields| {
            let version = Tag::context(0);
            fields.read_optional(|field| field.read_tagged(version, |field| field.read_der()))?;
            let (serial, _) = fields.next().read_bigint_bytes()?;
            let _algorithm = fields.next().read_der()?;
            let _issuer = fields.next().read_der()?;
            let not_after = fields.next().read_sequence(|validity| {
                let _not_before = validity.next().read_der()?;
                read_time(validity.next())
            })?;
            // Other authorities' may have names of any kind.
            let name = yasna::parse_der(&fields.next().read_der()?, common_name).ok().flatten();
            let _key = fields.next().read_der()?;
            let rest = |field: BERReader<'_, '_>| field.read_der();
            while fields.read_optional(rest)?.is_some() {}
            Ok(Facts { serial, not_after, name })
        })?;
        let _algorithm = certificate.next().read_der()?;
        let _signature = certificate.next().read_der()?;
        Ok(facts)
    })
}

/// `id-at-commonName` of a `Name`.
fn common_name(reader: BERReader<'_, '_>) -> ASN1Result<Option<String>> {
    const COMMON_NAME: [u64; 4] = [2, 5, 4, 3];
    let mut found = None;
    reader.read_sequence_of(|part| {
        part.read_set_of(|attribute| {
            attribute.read_sequence(|fields| {
                let kind = fields.next().read_oid()?;
                let value = fields.next();
                match kind.components()[..] == COMMON_NAME {
                    true => found = Some(value.read_utf8string()?),
                    false => drop(value.read_der()?),
                }
                Ok(())
            })
        })
    })?;
    Ok(found)
}

fn read_time(reader: BERReader<'_, '_>) -> ASN1Result<i64> {
    match reader.lookahead_tag()? == TAG_UTCTIME {
        true => Ok(reader.read_utctime()?.datetime().unix_timestamp()),
        false => Ok(reader.read_generalized_time()?.datetime().unix_timestamp()),
    }
}
