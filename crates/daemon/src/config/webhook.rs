//! `[webhook]`: where this host's events are posted.

use super::source::Source;
use serde::Deserialize;
use toml::Spanned;
use understudy_report::error::HostError;

/// An address that takes events by POST.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebhookUrl(String);

impl WebhookUrl {
    /// An address that a test listens on.
    #[cfg(test)]
    pub(crate) fn of(url: &str) -> WebhookUrl {
        WebhookUrl(url.to_owned())
    }

    /// The address.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The address without what may be secret in it, for messages.
    pub fn shown(&self) -> String {
        shown(&self.0)
    }
}

/// An address of the web without what may be secret in it, for messages.
pub(crate) fn shown(url: &str) -> String {
    let uri = url.parse::<ureq::http::Uri>().ok();
    let host = uri.as_ref().and_then(ureq::http::Uri::host).unwrap_or("?");
    let scheme = url.split_once("://").map_or("?", |(scheme, _)| scheme);
    format!("{scheme}://{host}/…")
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawWebhook {
    url: Spanned<String>,
}

impl RawWebhook {
    pub(super) fn check(self, source: &Source<'_>) -> Result<WebhookUrl, HostError> {
        let url = self.url.get_ref();
        let uri = url.parse::<ureq::http::Uri>().ok();
        let known = uri.is_some_and(|uri| {
            matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some()
        });
        if known {
            return Ok(WebhookUrl(self.url.into_inner()));
        }
        let message = format!(
            "{url:?} is not the address of a web server; write for example \
             \"https://alerts.example.org/understudy\""
        );
        Err(source.wrong("webhook.url", self.url.span(), &message))
    }
}
