//! The dashboard: three files, built into the binary. They hold no data, so that whoever has no token yet can be asked
//! for one; all that they show comes from the API.

use super::Api;
use axum::Router;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
    X_FRAME_OPTIONS,
};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

const HTML: &str = include_str!("../page/index.html");
const STYLE: &str = include_str!("../page/page.css");

/// The page's modules, by the names that they import each other by.
const MODULES: [(&str, &str); 5] = [
    ("/page/main.js", include_str!("../page/main.js")),
    ("/page/api.js", include_str!("../page/api.js")),
    ("/page/words.js", include_str!("../page/words.js")),
    ("/page/drawing.js", include_str!("../page/drawing.js")),
    ("/page/dialogs.js", include_str!("../page/dialogs.js")),
];

/// The policy: nothing from elsewhere, nothing in line, in nobody's frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src 'self' data:; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'";

pub(super) fn routes() -> Router<Api> {
    let file =
        |kind: &'static str, text: &'static str| get(move || async move { page(kind, text) });
    let routes = Router::new()
        .route("/", file("text/html; charset=utf-8", HTML))
        .route("/page/page.css", file("text/css; charset=utf-8", STYLE));
    let module = |routes: Router<Api>, (path, text)| {
        routes.route(path, file("text/javascript; charset=utf-8", text))
    };
    MODULES.into_iter().fold(routes, module)
}

fn page(kind: &'static str, text: &'static str) -> Response {
    let headers = [
        (CONTENT_TYPE, kind),
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (X_FRAME_OPTIONS, "DENY"),
        (REFERRER_POLICY, "no-referrer"),
        // A daemon that was upgraded has another page.
        (CACHE_CONTROL, "no-cache"),
    ];
    (headers, text).into_response()
}
