//! Names in the paths of requests.

use super::{ApiError, invalid};
use axum::extract::{FromRequestParts, Path};
use axum::http::request::Parts;
use std::str::FromStr;
use understudy_protocol::NameError;

/// The name of a VM or a group that a request is about.
pub(super) struct Name<T>(pub T);

impl<S: Send + Sync, T: FromStr<Err = NameError>> FromRequestParts<S> for Name<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Name<T>, ApiError> {
        let text = Path::<String>::from_request_parts(parts, state).await;
        let Path(text) = text.map_err(|rejection| invalid(rejection.body_text()))?;
        text.parse().map(Name).map_err(|error: NameError| invalid(error.to_string()))
    }
}
