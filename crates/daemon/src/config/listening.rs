//! The addresses at which this host listens: each is for one thing.

use super::source::Source;
use std::net::SocketAddr;
use toml::Spanned;
use understudy_report::error::HostError;

/// Addresses that fields of the configuration have taken.
#[derive(Default)]
pub(super) struct Listening(Vec<(&'static str, SocketAddr)>);

impl Listening {
    /// Takes the addresses of a field; an error if one cannot be listened at beside another.
    pub(super) fn take(
        &mut self,
        source: &Source<'_>,
        field: &'static str,
        raw: &Spanned<toml::Value>,
    ) -> Result<Vec<SocketAddr>, HostError> {
        let addresses = source.addresses(field, raw)?;
        for address in &addresses {
            if let Some((other, taken)) = self.0.iter().find(|(_, taken)| meet(taken, address)) {
                let message = format!("{address} is taken: {other} has {taken}; use another port");
                return Err(source.wrong(field, raw.span(), &message));
            }
            self.0.push((field, *address));
        }
        Ok(addresses)
    }
}

/// Whether the system lets only one of them be listened at.
fn meet(one: &SocketAddr, other: &SocketAddr) -> bool {
    let any = one.ip().is_unspecified() || other.ip().is_unspecified();
    one == other || (any && one.port() == other.port() && one.is_ipv4() == other.is_ipv4())
}
