//! Whom the daemon's unix socket answers: who may open it, but no keeper, and nothing that one has started.

use super::ApiError;
use axum::Router;
use axum::extract::connect_info::{ConnectInfo, Connected};
use axum::extract::{Extension, Request};
use axum::http::StatusCode;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::serve::IncomingStream;
use tokio::net::UnixListener;
use understudy_daemon::keeper::rights;
use understudy_report::{ErrorKind, HostError};

/// Who is at the other end of a connection.
#[derive(Clone, Copy)]
pub struct Asking {
    has_only_a_keepers_rights: bool,
}

impl Connected<IncomingStream<'_, UnixListener>> for Asking {
    fn connect_info(stream: IncomingStream<'_, UnixListener>) -> Asking {
        Asking { has_only_a_keepers_rights: rights::are_only_a_keepers(stream.io()) }
    }
}

/// Refuses keepers whatever they ask.
pub fn only(router: Router) -> Router {
    router.layer(middleware::from_fn(check))
}

async fn check(
    Extension(ConnectInfo(asking)): Extension<ConnectInfo<Asking>>,
    request: Request,
    next: Next,
) -> Response {
    if !asking.has_only_a_keepers_rights {
        return next.run(request).await;
    }
    let message = "whoever has no more of root's capabilities than a keeper of a VM is no operator of this host: \
                   ask from a process that keeps a further one, CAP_SYS_ADMIN say"
        .to_owned();
    tracing::warn!(asked = %request.uri().path(), "refused on the API's socket: {message}");
    let error = HostError::new(ErrorKind::Refused, message);
    ApiError { status: StatusCode::FORBIDDEN, error }.into_response()
}
