//! The daemon's API: HTTP/1 and JSON.
//!
//! [`calls`] is the list of all calls: the routes, the rights that they take, and docs/openapi.json are made of it. On the
//! unix socket whoever may open it may do all; over the network, [`access`] asks for a token or a certificate.
//!
//! | module | is |
//! |--------|----|
//! | [`calls`] | every call: path, right, what it takes and answers |
//! | [`access`] | who may do what |
//! | [`operators`] | whom the unix socket answers |
//! | [`remote`] | the API over TLS |
//! | [`idle`] | connections on which nothing happens |
//! | [`guesses`] | wrong tokens |
//! | [`kept`] | VMs that have a keeper: what is asked of them goes there |
//! | [`jobs`] | work that takes long, to be watched and cancelled |
//! | [`events`] | what happened, as a list and a stream |
//! | [`snapshots`] | snapshots and restores |
//! | [`openapi`] | the description for machines |
//! | [`page`] | the dashboard |
//!
//! An error is `{"error": {"kind", "message"}}`, with a status that fits.

mod access;
mod calls;
mod control;
pub mod events;
mod guesses;
mod jobs;
mod kept;
mod name;
mod openapi;
pub mod operators;
mod page;
pub mod remote;
pub mod room;
mod snapshots;

pub use access::Guard;
pub use control::Control;
pub use kept::{Routed, follow};

use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, QueryRejection};
use axum::extract::{DefaultBodyLimit, FromRef, Query, State};
use axum::http::{StatusCode, Uri};
use axum::middleware;
use axum::response::{IntoResponse, Json, Response};
use jobs::{Jobs, Waiting};
use name::Name;
use room::{AtStore, StoreRoom};
use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::sync::Arc;
use tokio::sync::watch;
use understudy_client::{ErrorBody, Subject};
use understudy_daemon::containment;
use understudy_protocol::{GroupName, VmName};
use understudy_qemu::{CheckedDefinition, VmDefinition};
use understudy_report::upgrade::{KeeperReplacement, UpgradePlan};
use understudy_report::{
    CheckpointTiming, ComparisonReport, HostStatus, RecoverReport, StartRequest, VmStatus,
};
use understudy_report::{ErrorKind, HostError};

/// The longest request body: far more than any VM definition needs.
pub const MAX_REQUEST_BYTES: usize = 256 * 1024;

type Shared = State<Arc<dyn Control>>;
type Body = Result<Bytes, BytesRejection>;
type Answer<T> = Result<Json<T>, ApiError>;

/// The API of a host, whichever way it is reached.
#[derive(Clone)]
pub struct Api {
    host: Arc<dyn Control>,
    jobs: Arc<Jobs>,
    stores: StoreRoom,
    ending: Ending,
}

/// Whether whoever waits for something to happen is to be answered now, since the API ends.
#[derive(Clone, Default)]
struct Ending(Arc<watch::Sender<bool>>);

impl Ending {
    fn begin(&self) {
        self.0.send_replace(true);
    }

    fn has_begun(&self) -> bool {
        *self.0.borrow()
    }

    /// Waits until it has begun.
    async fn begins(&self) {
        // Its sender is this.
        let _ = self.0.subscribe().wait_for(|begun| *begun).await;
    }
}

impl FromRef<Api> for Arc<dyn Control> {
    fn from_ref(api: &Api) -> Arc<dyn Control> {
        api.host.clone()
    }
}

impl FromRef<Api> for Arc<Jobs> {
    fn from_ref(api: &Api) -> Arc<Jobs> {
        api.jobs.clone()
    }
}

impl FromRef<Api> for StoreRoom {
    fn from_ref(api: &Api) -> StoreRoom {
        api.stores.clone()
    }
}

impl FromRef<Api> for Ending {
    fn from_ref(api: &Api) -> Ending {
        api.ending.clone()
    }
}

impl Api {
    /// The API of this host.
    pub fn new(host: Arc<dyn Control>) -> Api {
        let (stores, ending) = (StoreRoom::default(), Ending::default());
        Api { host, jobs: Arc::default(), stores, ending }
    }

    /// Answers those who wait for events: it ends.
    pub fn end_waits(&self) {
        self.ending.begin();
    }

    /// Its routes, behind this guard.
    pub fn router(&self, guard: &Guard) -> Router {
        let mut router = Router::new();
        for call in calls::all() {
            let asked = (guard.clone(), call.access);
            let checked = middleware::from_fn_with_state(asked, access::check);
            router = router.route(call.path, call.handler.route_layer(checked));
        }
        router
            .merge(page::routes())
            .fallback(no_such_route)
            .method_not_allowed_fallback(wrong_method)
            .layer(DefaultBodyLimit::max(MAX_REQUEST_BYTES))
            .with_state(self.clone())
    }
}

async fn status(State(host): Shared) -> Answer<HostStatus> {
    blocking(move || Ok(host.status())).await.map(Json)
}

async fn upgrade_plan(State(host): Shared) -> Answer<UpgradePlan> {
    blocking(move || Ok(host.upgrade_plan())).await.map(Json)
}

async fn vm_start(
    State(host): Shared,
    query: Result<Query<StartRequest>, QueryRejection>,
    body: Body,
) -> Answer<VmStatus> {
    let Query(request) = query.map_err(|rejection| invalid(rejection.body_text()))?;
    let definition: CheckedDefinition = read(body)?;
    blocking(move || host.vm_start(definition, request)).await.map(Json)
}

async fn vm_start_recorded(State(host): Shared, Name(name): Name<VmName>) -> Answer<VmStatus> {
    blocking(move || host.vm_start_recorded(&name)).await.map(Json)
}

async fn definition(State(host): Shared, Name(name): Name<VmName>) -> Answer<VmDefinition> {
    blocking(move || host.definition(&name)).await.map(Json)
}

async fn vm_status(State(host): Shared, Name(name): Name<VmName>) -> Answer<VmStatus> {
    blocking(move || host.vm_status(&name)).await.map(Json)
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct StopQuery {
    /// Whether to cut its power at once.
    #[serde(default)]
    force: bool,
}

async fn vm_stop(
    State(host): Shared,
    Name(name): Name<VmName>,
    query: Result<Query<StopQuery>, QueryRejection>,
) -> Result<StatusCode, ApiError> {
    let Query(query) = query.map_err(|rejection| invalid(rejection.body_text()))?;
    blocking(move || host.vm_stop(&name, query.force)).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn protect(
    State(host): Shared,
    State(jobs): State<Arc<Jobs>>,
    Name(name): Name<VmName>,
    waiting: Waiting,
    body: Body,
) -> Result<Response, ApiError> {
    protect_with(host, &jobs, name, waiting, body, |host, name, request| {
        host.protect(name, request)
    })
    .await
}

async fn protect_again(
    State(host): Shared,
    State(jobs): State<Arc<Jobs>>,
    Name(name): Name<VmName>,
    waiting: Waiting,
    body: Body,
) -> Result<Response, ApiError> {
    protect_with(host, &jobs, name, waiting, body, |host, name, request| {
        host.protect_again(name, request)
    })
    .await
}

/// Begins a protection, and answers that it has begun or with the job that it is.
async fn protect_with<T: DeserializeOwned + Send + 'static>(
    host: Arc<dyn Control>,
    jobs: &Jobs,
    name: VmName,
    waiting: Waiting,
    body: Body,
    begin: impl FnOnce(&dyn Control, &VmName, T) -> Result<VmStatus, HostError> + Send + 'static,
) -> Result<Response, ApiError> {
    let request = read(body)?;
    if jobs::is_waited_for(waiting)? {
        let status = blocking(move || begin(&*host, &name, request)).await?;
        return Ok(Json(status).into_response());
    }
    let subject = name.to_string();
    let work = move |job: &jobs::Running| {
        let begun = begin(&*host, &name, request)?;
        jobs::follow_protection(&*host, begun, job)
    };
    jobs.begin(jobs::JobKind::Protect, subject, None, work)
}

async fn protect_group(
    State(host): Shared,
    Name(name): Name<GroupName>,
    body: Body,
) -> Answer<Vec<VmStatus>> {
    let request = read(body)?;
    blocking(move || host.protect_group(&name, request)).await.map(Json)
}

async fn unprotect(State(host): Shared, Name(name): Name<VmName>) -> Answer<VmStatus> {
    blocking(move || host.unprotect(&name)).await.map(Json)
}

async fn failover(State(host): Shared, Name(name): Name<VmName>) -> Result<StatusCode, ApiError> {
    blocking(move || host.failover(&name)).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn replace_keeper(
    State(host): Shared,
    Name(name): Name<VmName>,
) -> Answer<KeeperReplacement> {
    blocking(move || host.replace_keeper(&name)).await.map(Json)
}

async fn change_medium(
    State(host): Shared,
    Name(name): Name<VmName>,
    body: Body,
) -> Answer<VmStatus> {
    let request = read(body)?;
    blocking(move || host.change_medium(&name, request)).await.map(Json)
}

async fn recover(
    State(host): Shared,
    Name(name): Name<VmName>,
    body: Body,
) -> Answer<RecoverReport> {
    let request = read(body)?;
    blocking(move || host.recover(&name, request)).await.map(Json)
}

async fn timings(State(host): Shared, Name(name): Name<VmName>) -> Answer<Vec<CheckpointTiming>> {
    blocking(move || host.timings(&name)).await.map(Json)
}

async fn verify_lockstep(
    State(host): Shared,
    Name(name): Name<VmName>,
) -> Answer<ComparisonReport> {
    blocking(move || host.verify_lockstep(&name)).await.map(Json)
}

async fn no_such_route(uri: Uri) -> ApiError {
    let message = format!("the API has no {}", uri.path());
    HostError::new(ErrorKind::NotFound, message).into()
}

async fn wrong_method(uri: Uri) -> ApiError {
    let error = HostError::new(ErrorKind::Invalid, format!("wrong method for {}", uri.path()));
    ApiError { status: StatusCode::METHOD_NOT_ALLOWED, error }
}

/// Calls the host off the async threads.
async fn blocking<T, F>(call: F) -> Result<T, ApiError>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T, HostError> + Send + 'static,
{
    answered(room::call(move || containment::request(call)).await)
}

/// Calls the host off the async threads, in a place that it has.
async fn blocking_in<T, F>(place: AtStore, call: F) -> Result<T, ApiError>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T, HostError> + Send + 'static,
{
    answered(room::call_in(place, move || containment::request(call)).await)
}

fn answered<T>(
    called: Result<Option<Result<T, HostError>>, tokio::task::JoinError>,
) -> Result<T, ApiError> {
    match called {
        Ok(Some(result)) => Ok(result?),
        Ok(None) | Err(_) => {
            let message = "the daemon failed on this request: its log says where, please report it";
            Err(HostError::new(ErrorKind::Internal, message.to_owned()).into())
        }
    }
}

fn read<T: DeserializeOwned>(body: Body) -> Result<T, ApiError> {
    let bytes = body.map_err(|rejection| ApiError {
        status: rejection.status(),
        error: HostError::new(ErrorKind::Invalid, rejection.body_text()),
    })?;
    serde_json::from_slice(&bytes).map_err(|error| invalid(format!("request body: {error}")))
}

fn invalid(message: String) -> ApiError {
    HostError::new(ErrorKind::Invalid, message).into()
}

/// An error as it goes over the wire.
struct ApiError {
    status: StatusCode,
    error: HostError,
}

impl From<HostError> for ApiError {
    fn from(error: HostError) -> ApiError {
        let status = match error.kind {
            ErrorKind::Invalid => StatusCode::BAD_REQUEST,
            ErrorKind::NotFound => StatusCode::NOT_FOUND,
            ErrorKind::Conflict => StatusCode::CONFLICT,
            ErrorKind::Refused => StatusCode::BAD_GATEWAY,
            ErrorKind::Unreachable => StatusCode::SERVICE_UNAVAILABLE,
            ErrorKind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        };
        ApiError { status, error }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.status, Json(ErrorBody { error: self.error })).into_response()
    }
}

#[cfg(test)]
mod tests;
