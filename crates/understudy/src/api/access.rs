//! The rules of who may do what. Nothing is open over the network but the dashboard's page, which
//! holds no data.

use super::ApiError;
use super::guesses::{self, Guesses};
use crate::door::patient::Answering;
use crate::door::{Caller, Connected};
use axum::body::{Body, Bytes};
use axum::extract::{ConnectInfo, FromRequest, Request, State};
use axum::http::header::{AUTHORIZATION, HOST, ORIGIN, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::timeout;
use understudy_daemon::config::{Access, ApiConfig};
use understudy_report::events::Journal;
use understudy_report::{ErrorKind, HostError};

/// Time for a request's body to come, of which none is large.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// The guard before the API.
#[derive(Clone)]
pub enum Guard {
    /// The unix socket: whoever may open it may do all.
    Local,
    /// The network.
    Remote(Arc<Tokens>),
}

/// Names by which this machine calls itself: what a tunnel to the socket is asked by.
const OWN_NAMES: [&str; 4] = ["understudy", "localhost", "127.0.0.1", "[::1]"];

/// The tokens that the configuration names, and who guesses at them.
pub struct Tokens {
    config: ApiConfig,
    guesses: Guesses,
    journal: Journal,
}

impl Tokens {
    /// Those of this configuration, whose files are read each time somebody shows one. Who shows many wrong ones is told
    /// of in the journal.
    pub fn new(config: ApiConfig, journal: Journal) -> Tokens {
        Tokens { config, guesses: Guesses::default(), journal }
    }

    /// The access to which a token from this address entitles.
    fn admit(&self, token: &str, from: Option<IpAddr>) -> Result<Access, ApiError> {
        let now = Instant::now();
        if let Some(left) = from.and_then(|from| self.guesses.shut_out(from, now)) {
            let message = format!(
                "too many wrong tokens have come from your address: none counts from there for \
                 {} s; a client certificate does",
                left.as_secs() + 1
            );
            return Err(refusal(StatusCode::TOO_MANY_REQUESTS, message));
        }
        if let Some(access) = self.config.access_of(token) {
            return Ok(access);
        }
        // A token whose file cannot be used is no guess.
        let all_count = || self.config.problems_of_tokens().is_empty();
        if let Some(from) = from.filter(|from| all_count() && self.guesses.note(*from, now)) {
            self.journal.wrong_tokens(from);
        }
        let message = "this token is in no file of [api.tokens] of the host's configuration";
        Err(refusal(StatusCode::UNAUTHORIZED, message.to_owned()))
    }
}

/// Lets a request through that may be made.
pub(super) async fn check(
    State((guard, needed)): State<(Guard, Access)>,
    mut request: Request,
    next: Next,
) -> Response {
    let allowed = refuse_other_sites(&request).and_then(|()| match &guard {
        Guard::Local => refuse_other_names(&request).map(|()| Access::Admin),
        Guard::Remote(tokens) => admit(tokens, needed, &request),
    });
    match allowed {
        Ok(access) => {
            // For calls in which it matters what is named.
            request.extensions_mut().insert(access);
            let admitted = Admitted::new(guard, needed, &request);
            request.extensions_mut().insert(admitted);
            match whole(request, BODY_TIMEOUT).await {
                Ok(request) => next.run(request).await,
                Err(error) => error.into_response(),
            }
        }
        Err(error) if error.status == StatusCode::UNAUTHORIZED => {
            if token(request.headers()).is_some() {
                tokio::time::sleep(guesses::DELAY).await;
            }
            ([(WWW_AUTHENTICATE, "Bearer")], error).into_response()
        }
        Err(error) => error.into_response(),
    }
}

/// The grounds that have let a request in: to be asked again by an answer that goes on.
#[derive(Clone)]
pub(super) struct Admitted {
    guard: Guard,
    needed: Access,
    token: Option<String>,
    connected: Option<Connected>,
}

impl Admitted {
    fn new(guard: Guard, needed: Access, request: &Request) -> Admitted {
        let token = token(request.headers()).map(str::to_owned);
        Admitted { guard, needed, token, connected: connected(request).cloned() }
    }

    /// Whether the request would be let in now: its token may have been taken away since, or its certificate revoked.
    pub(super) fn still_counts(&self) -> bool {
        let Guard::Remote(tokens) = &self.guard else { return true };
        let access = match &self.token {
            Some(token) => tokens.config.access_of(token),
            None => match self.connected.as_ref().map(|connected| (connected.caller)()) {
                Some(Caller::Known(_, access)) => Some(access),
                Some(Caller::Unknown(_) | Caller::Nameless) | None => None,
            },
        };
        access.is_some_and(|access| access >= self.needed)
    }

    /// The answer goes on until what is returned is dropped.
    pub(super) fn go_on(&self) -> Option<Answering> {
        self.connected.as_ref().map(|connected| connected.requests.begin())
    }
}

/// A request whose body is there: whoever sends it byte by byte is not waited for.
async fn whole(request: Request, patience: Duration) -> Result<Request, ApiError> {
    let (parts, body) = request.into_parts();
    let mut sent = Request::new(body);
    // The bound of its length is among them.
    *sent.extensions_mut() = parts.extensions.clone();
    match timeout(patience, Bytes::from_request(sent, &())).await {
        Ok(Ok(bytes)) => Ok(Request::from_parts(parts, Body::from(bytes))),
        Ok(Err(rejection)) => Err(ApiError {
            status: rejection.status(),
            error: HostError::new(ErrorKind::Invalid, rejection.body_text()),
        }),
        Err(_) => {
            let message = format!("the request was not whole after {} s", patience.as_secs());
            let error = HostError::new(ErrorKind::Invalid, message);
            Err(ApiError { status: StatusCode::REQUEST_TIMEOUT, error })
        }
    }
}

fn connected(request: &Request) -> Option<&Connected> {
    let connected = request.extensions().get::<ConnectInfo<Connected>>();
    connected.map(|ConnectInfo(connected)| connected)
}

fn admit(tokens: &Tokens, needed: Access, request: &Request) -> Result<Access, ApiError> {
    let (who, access) = identify(tokens, request)?;
    if access < needed {
        let message = format!(
            "this takes the role {needed}, and {who} has the role {access}: [api] of the host's \
             configuration says who has which"
        );
        return Err(refusal(StatusCode::FORBIDDEN, message));
    }
    if request.method() != Method::GET {
        tracing::info!("API: {who} ({access}): {} {}", request.method(), request.uri().path());
    }
    Ok(access)
}

/// Identifies who calls, for people, and what they may do. A token counts more than a certificate.
fn identify(tokens: &Tokens, request: &Request) -> Result<(String, Access), ApiError> {
    let connected = connected(request);
    if let Some(token) = token(request.headers()) {
        return tokens
            .admit(token, connected.map(|connected| connected.address))
            .map(|access| ("a token".to_owned(), access));
    }
    match connected.map(|connected| (connected.caller)()) {
        Some(Caller::Known(name, access)) => Ok((name.to_string(), access)),
        Some(Caller::Unknown(why)) => Err(refusal(StatusCode::FORBIDDEN, why)),
        Some(Caller::Nameless) | None => Err(refusal(
            StatusCode::UNAUTHORIZED,
            "say who you are: with `Authorization: Bearer TOKEN` and a token of [api.tokens], or \
             with a client certificate that [api.certificates] names"
                .to_owned(),
        )),
    }
}

fn token(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

/// A browser shows its certificate to whatever page asks: what changes something must come from
/// the dashboard's own.
fn refuse_other_sites(request: &Request) -> Result<(), ApiError> {
    let header = |name| request.headers().get(name).and_then(|value| value.to_str().ok());
    let Some(origin) = header(ORIGIN).filter(|_| request.method() != Method::GET) else {
        return Ok(());
    };
    let site = origin.split_once("://").map(|(_, site)| site);
    if site.is_some() && site == header(HOST) {
        return Ok(());
    }
    let message = format!("a page of {origin} may change nothing here");
    Err(refusal(StatusCode::FORBIDDEN, message))
}

/// Refuses other names: whoever reaches the socket by a tunnel does so with a browser as well,
/// which takes a page for this site's if only its name leads here. Names that are none of this
/// machine's are refused, whatever is asked.
fn refuse_other_names(request: &Request) -> Result<(), ApiError> {
    let Some(host) = request.headers().get(HOST) else { return Ok(()) };
    let host = host.to_str().unwrap_or_default();
    let port_at = host.rfind(':').filter(|at| !host[*at..].contains(']'));
    let name = &host[..port_at.unwrap_or(host.len())];
    if OWN_NAMES.iter().any(|own| own.eq_ignore_ascii_case(name)) {
        return Ok(());
    }
    let message = format!(
        "this is the socket of this machine, and {name:?} is no name of it: ask by `localhost`, or over the \
         network by [api] of the host's configuration"
    );
    Err(refusal(StatusCode::FORBIDDEN, message))
}

fn refusal(status: StatusCode, message: String) -> ApiError {
    ApiError { status, error: HostError::new(ErrorKind::Refused, message) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::door::Asked;
    use crate::door::patient::Requests;
    use futures_util::stream;
    use std::collections::BTreeMap;
    use std::convert::Infallible;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// The file of the role `operate`, with a token.
    fn tokens(directory: &Path) -> Tokens {
        let path = directory.join("tokens");
        fs::write(&path, "0123456789abcdef0123\n").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        let tokens = BTreeMap::from([(Access::Operate, path)]);
        let config = ApiConfig { listen: Vec::new(), tokens, certificates: BTreeMap::new() };
        Tokens::new(config, Journal::default())
    }

    fn request(method: Method, headers: &[(&str, &str)], caller: Option<Caller>) -> Request {
        let mut request = Request::builder().method(method).uri("/v1/status");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let mut request = request.body(Body::empty()).unwrap();
        if let Some(caller) = caller {
            let (address, requests) = (IpAddr::from([10, 0, 0, 1]), Requests::default());
            let caller: Asked = Arc::new(move || caller.clone());
            let connected = Connected { address, caller, requests };
            request.extensions_mut().insert(ConnectInfo(connected));
        }
        request
    }

    #[test]
    fn everybody_gets_their_role_or_an_answer_that_says_what_to_do() {
        let directory = tempfile::tempdir().unwrap();
        let tokens = tokens(directory.path());
        let ask = |needed, headers: &[(&str, &str)], caller| {
            let result = admit(&tokens, needed, &request(Method::GET, headers, caller));
            result.map_err(|error| (error.status.as_u16(), error.error.message))
        };
        let right = [("authorization", "Bearer 0123456789abcdef0123")];
        ask(Access::Operate, &right, None).unwrap();
        ask(Access::Read, &right, Some(Caller::Unknown("x".into()))).unwrap();
        let (status, words) = ask(Access::Admin, &right, None).unwrap_err();
        assert!(status == 403 && words.contains("takes the role admin"), "{status} {words}");
        let wrong = [("authorization", "Bearer 0123456789abcdef0124")];
        let (status, words) = ask(Access::Read, &wrong, None).unwrap_err();
        assert!(status == 401 && words.contains("in no file"), "{status} {words}");
        let (status, words) = ask(Access::Read, &[], Some(Caller::Nameless)).unwrap_err();
        assert!(status == 401 && words.contains("Authorization: Bearer"), "{status} {words}");
        let unknown = Some(Caller::Unknown("it is from another CA".into()));
        let (status, words) = ask(Access::Read, &[], unknown).unwrap_err();
        assert!(status == 403 && words.contains("another CA"), "{status} {words}");
        let alice = "alice".parse().unwrap();
        ask(Access::Read, &[], Some(Caller::Known(alice, Access::Read))).unwrap();
    }

    #[test]
    fn who_guesses_tokens_is_told_of_and_not_heard_any_more() {
        let directory = tempfile::tempdir().unwrap();
        let tokens = tokens(directory.path());
        let ask = |token: &str| {
            let headers = [("authorization", &*format!("Bearer {token}"))];
            let request = request(Method::GET, &headers, Some(Caller::Nameless));
            let said = admit(&tokens, Access::Read, &request);
            said.map(drop).map_err(|error| error.status.as_u16())
        };
        for n in 0..10 {
            assert_eq!(ask(&format!("guess-{n}-0123456789")), Err(401), "{n}");
        }
        assert_eq!(ask("0123456789abcdef0123"), Err(429), "the right one, from that address");
        let told = tokens.journal.after(0, None).events;
        assert_eq!(told.len(), 1, "{told:?}");
        assert!(told[0].text.contains("10.0.0.1"), "{told:?}");
    }

    #[test]
    fn a_site_whose_name_leads_here_is_not_this_machine() {
        let named = |host: &str| {
            let headers = [("host", host), ("origin", "http://evil.example:8080")];
            refuse_other_names(&request(Method::GET, &headers, None)).is_ok()
        };
        for own in
            ["understudy", "localhost:8080", "LOCALHOST", "127.0.0.1:80", "[::1]:8080", "[::1]"]
        {
            assert!(named(own), "{own}");
        }
        for other in
            ["evil.example:8080", "evil.example", "localhost.evil.example", "[::2]", "", ":80"]
        {
            assert!(!named(other), "{other}");
        }
        assert!(refuse_other_names(&request(Method::GET, &[], None)).is_ok(), "no browser");
    }

    #[test]
    fn a_certificate_counts_for_as_long_as_it_is_one() {
        let directory = tempfile::tempdir().unwrap();
        let tokens = tokens(directory.path());
        let revoked = Arc::new(AtomicBool::new(false));
        let mut request = request(Method::GET, &[], Some(Caller::Nameless));
        let connected = request.extensions_mut().get_mut::<ConnectInfo<Connected>>().unwrap();
        let seen = revoked.clone();
        connected.0.caller = Arc::new(move || match seen.load(Ordering::Relaxed) {
            true => Caller::Unknown("it was revoked".into()),
            false => Caller::Known("alice".parse().unwrap(), Access::Admin),
        });
        assert!(admit(&tokens, Access::Admin, &request).is_ok());
        let admitted = Admitted::new(Guard::Remote(Arc::new(tokens)), Access::Read, &request);
        assert!(admitted.still_counts());
        revoked.store(true, Ordering::Relaxed);
        assert!(!admitted.still_counts(), "for an answer that goes on");
        let Guard::Remote(tokens) = &admitted.guard else { panic!("over the network") };
        let error = admit(tokens, Access::Read, &request).err().unwrap();
        assert!(error.error.message.contains("revoked"), "on the same connection");
    }

    #[test]
    fn an_answer_goes_on_for_as_long_as_its_token_counts() {
        let directory = tempfile::tempdir().unwrap();
        let tokens = tokens(directory.path());
        let guard = Guard::Remote(Arc::new(tokens));
        let right = [("authorization", "Bearer 0123456789abcdef0123")];
        let request = request(Method::GET, &right, Some(Caller::Nameless));
        let counts = |needed| Admitted::new(guard.clone(), needed, &request).still_counts();
        assert!(counts(Access::Read) && counts(Access::Operate) && !counts(Access::Admin));
        fs::write(directory.path().join("tokens"), "another-0123456789abcdef\n").unwrap();
        assert!(!counts(Access::Read), "it was taken away");
        fs::remove_file(directory.path().join("tokens")).unwrap();
        assert!(!counts(Access::Read), "it cannot be looked up");
    }

    #[tokio::test]
    async fn a_request_that_is_never_whole_is_not_waited_for() {
        let never = Body::from_stream(stream::pending::<Result<Bytes, Infallible>>());
        let short = Duration::from_millis(10);
        let error = whole(Request::new(never), short).await.err().unwrap();
        assert_eq!(error.status, StatusCode::REQUEST_TIMEOUT);
        let there = Request::builder().uri("/x").body(Body::from("text")).unwrap();
        let request = whole(there, Duration::from_secs(60)).await.unwrap_or_else(|_| panic!("no"));
        assert_eq!(request.uri().path(), "/x");
        let bytes = Bytes::from_request(request, &()).await.unwrap();
        assert_eq!(&bytes[..], b"text");
    }

    #[test]
    fn a_page_of_another_site_changes_nothing() {
        let from = |method, origin| {
            let headers = [("host", "a:7780"), ("origin", origin)];
            refuse_other_sites(&request(method, &headers, None)).is_ok()
        };
        assert!(from(Method::POST, "https://a:7780"));
        assert!(!from(Method::POST, "https://evil.example"));
        assert!(!from(Method::DELETE, "null"));
        assert!(
            from(Method::GET, "https://evil.example"),
            "what a browser lets it read is its affair"
        );
        assert!(refuse_other_sites(&request(Method::POST, &[], None)).is_ok(), "no browser");
    }
}
