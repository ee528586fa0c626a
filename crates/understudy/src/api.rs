//! The daemon's local API: HTTP/1 and JSON.
//!
//! | request                            | answers |
//! |------------------------------------|---------|
//! | `GET /v1/status`                   | [`HostStatus`] |
//! | `POST /v1/vms` ([`VmDefinition`])  | [`VmStatus`] |
//! | `GET /v1/vms/NAME`                 | [`VmStatus`] |
//! | `DELETE /v1/vms/NAME?force=BOOL`   | nothing (204) |
//! | `POST /v1/vms/NAME/start`          | [`VmStatus`] |
//! | `GET /v1/vms/NAME/definition`      | [`VmDefinition`] |
//! | `POST /v1/vms/NAME/protect` ([`ProtectRequest`]) | [`VmStatus`] |
//! | `POST /v1/groups/NAME/protect` ([`GroupRequest`]) | a list of [`VmStatus`] |
//! | `POST /v1/vms/NAME/unprotect`      | [`VmStatus`] |
//! | `POST /v1/vms/NAME/failover`       | nothing (204) |
//! | `POST /v1/vms/NAME/recover` ([`RecoverRequest`]) | [`RecoverReport`] |
//! | `POST /v1/vms/NAME/lockstep/verify` | [`ComparisonReport`] |
//! | `GET /v1/vms/NAME/timings`         | a list of [`CheckpointTiming`] |
//! | `POST /v1/vms/NAME/snapshot`, `/v1/clusters/NAME/snapshot` ([`SnapshotRequest`]) | [`SnapshotReport`] |
//! | `POST /v1/vms/NAME/restore`, `/v1/clusters/NAME/restore` ([`RestoreRequest`]) | [`RestoreReport`] |
//! | `GET /v1/snapshots?group=NAME&store=URL` | a list of [`SnapshotReport`] |
//! | `DELETE /v1/snapshots?group=NAME&number=N&store=URL` | [`DeleteReport`] |
//! | `POST /v1/snapshots/verify?group=NAME&number=N&store=URL` | [`VerifyReport`] |
//! | `GET /v1/events?after=N&vm=NAME&wait_ms=N` | [`EventList`](understudy_daemon::events::EventList) |
//! | `GET /v1/events/stream?after=N&vm=NAME` | the same as server-sent events |
//! | `GET /metrics`                     | OpenMetrics text |
//!
//! An error is `{"error": {"kind", "message"}}`, with a status that fits.

pub mod events;
mod name;
mod snapshots;

use crate::failure::ErrorBody;
use crate::metrics;
use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, QueryRejection};
use axum::extract::{DefaultBodyLimit, Query, State};
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Json, Response};
use axum::routing::{get, post};
use name::Name;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::sync::Arc;
use tokio::task::spawn_blocking;
use understudy_daemon::events::Journal;
use understudy_daemon::report::{
    CheckpointTiming, ComparisonReport, GroupRequest, HostStatus, ProtectRequest, RecoverReport,
    RecoverRequest, VmStatus,
};
use understudy_daemon::snapshot::report::{
    DeleteReport, RestoreReport, RestoreRequest, SnapshotReport, SnapshotRequest, VerifyReport,
};
use understudy_daemon::{ErrorKind, Host, HostError, Meters, containment};
use understudy_protocol::{GroupName, VmName};
use understudy_qemu::VmDefinition;
use understudy_snapshot::SnapshotNumber;

/// The longest request body: far more than any VM definition needs.
pub const MAX_REQUEST_BYTES: usize = 256 * 1024;

/// What is snapshotted, or restored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    /// A VM by itself.
    Vm(VmName),
    /// A group.
    Cluster(GroupName),
}

/// What the API asks of a host; all calls block. [`Host`] outside of tests.
pub trait Control: Send + Sync + 'static {
    /// See [`Host::status`].
    fn status(&self) -> HostStatus;
    /// See [`Host::events`].
    fn events(&self) -> Journal;
    /// See [`Host::meters`].
    fn meters(&self) -> Meters;
    /// See [`Host::vm_start`].
    fn vm_start(&self, definition: VmDefinition) -> Result<VmStatus, HostError>;
    /// See [`Host::vm_start_recorded`].
    fn vm_start_recorded(&self, name: &VmName) -> Result<VmStatus, HostError>;
    /// See [`Host::definition`].
    fn definition(&self, name: &VmName) -> Result<VmDefinition, HostError>;
    /// See [`Host::vm_stop`].
    fn vm_stop(&self, name: &VmName, force: bool) -> Result<(), HostError>;
    /// See [`Host::vm_status`].
    fn vm_status(&self, name: &VmName) -> Result<VmStatus, HostError>;
    /// See [`Host::protect`].
    fn protect(&self, name: &VmName, request: ProtectRequest) -> Result<VmStatus, HostError>;
    /// See [`Host::protect_group`].
    fn protect_group(
        &self,
        name: &GroupName,
        request: GroupRequest,
    ) -> Result<Vec<VmStatus>, HostError>;
    /// See [`Host::unprotect`].
    fn unprotect(&self, name: &VmName) -> Result<VmStatus, HostError>;
    /// See [`Host::failover`].
    fn failover(&self, name: &VmName) -> Result<(), HostError>;
    /// See [`Host::recover`].
    fn recover(&self, name: &VmName, request: RecoverRequest) -> Result<RecoverReport, HostError>;
    /// See [`Host::timings`].
    fn timings(&self, name: &VmName) -> Result<Vec<CheckpointTiming>, HostError>;
    /// See [`Host::verify_lockstep`].
    fn verify_lockstep(&self, name: &VmName) -> Result<ComparisonReport, HostError>;
    /// See [`Host::snapshot_vm`] and [`Host::snapshot_cluster`].
    fn snapshot(
        &self,
        what: &Subject,
        asked: &SnapshotRequest,
    ) -> Result<SnapshotReport, HostError>;
    /// See [`Host::restore_vm`] and [`Host::restore_cluster`].
    fn restore(&self, what: &Subject, asked: &RestoreRequest) -> Result<RestoreReport, HostError>;
    /// See [`Host::snapshots_of`]; without a group those of all that the host knows.
    fn snapshots(
        &self,
        group: Option<&GroupName>,
        store: Option<&str>,
    ) -> Result<Vec<SnapshotReport>, HostError>;
    /// See [`Host::delete_snapshot`].
    fn delete_snapshot(
        &self,
        group: &GroupName,
        number: SnapshotNumber,
        store: Option<&str>,
    ) -> Result<DeleteReport, HostError>;
    /// See [`Host::verify_snapshot`].
    fn verify_snapshot(
        &self,
        group: &GroupName,
        number: Option<SnapshotNumber>,
        store: Option<&str>,
    ) -> Result<VerifyReport, HostError>;
}

impl Control for Arc<Host> {
    fn status(&self) -> HostStatus {
        Host::status(self)
    }
    fn events(&self) -> Journal {
        Host::events(self)
    }
    fn meters(&self) -> Meters {
        Host::meters(self)
    }
    fn vm_start(&self, definition: VmDefinition) -> Result<VmStatus, HostError> {
        Host::vm_start(self, definition)
    }
    fn vm_start_recorded(&self, name: &VmName) -> Result<VmStatus, HostError> {
        Host::vm_start_recorded(self, name)
    }
    fn definition(&self, name: &VmName) -> Result<VmDefinition, HostError> {
        Host::definition(self, name)
    }
    fn vm_stop(&self, name: &VmName, force: bool) -> Result<(), HostError> {
        Host::vm_stop(self, name, force)
    }
    fn vm_status(&self, name: &VmName) -> Result<VmStatus, HostError> {
        Host::vm_status(self, name)
    }
    fn protect(&self, name: &VmName, request: ProtectRequest) -> Result<VmStatus, HostError> {
        Host::protect(self, name, request)
    }
    fn protect_group(
        &self,
        name: &GroupName,
        request: GroupRequest,
    ) -> Result<Vec<VmStatus>, HostError> {
        Host::protect_group(self, name, request)
    }
    fn unprotect(&self, name: &VmName) -> Result<VmStatus, HostError> {
        Host::unprotect(self, name)
    }
    fn failover(&self, name: &VmName) -> Result<(), HostError> {
        Host::failover(self, name)
    }
    fn recover(&self, name: &VmName, request: RecoverRequest) -> Result<RecoverReport, HostError> {
        Host::recover(self, name, request)
    }
    fn timings(&self, name: &VmName) -> Result<Vec<CheckpointTiming>, HostError> {
        Host::timings(self, name)
    }
    fn verify_lockstep(&self, name: &VmName) -> Result<ComparisonReport, HostError> {
        Host::verify_lockstep(self, name)
    }
    fn snapshot(
        &self,
        what: &Subject,
        asked: &SnapshotRequest,
    ) -> Result<SnapshotReport, HostError> {
        match what {
            Subject::Vm(name) => self.snapshot_vm(name, asked),
            Subject::Cluster(name) => self.snapshot_cluster(name, asked),
        }
    }
    fn restore(&self, what: &Subject, asked: &RestoreRequest) -> Result<RestoreReport, HostError> {
        match what {
            Subject::Vm(name) => self.restore_vm(name, asked),
            Subject::Cluster(name) => self.restore_cluster(name, asked),
        }
    }
    fn snapshots(
        &self,
        group: Option<&GroupName>,
        store: Option<&str>,
    ) -> Result<Vec<SnapshotReport>, HostError> {
        match group {
            Some(group) => self.snapshots_of(group, store),
            None => self.all_snapshots(store),
        }
    }
    fn delete_snapshot(
        &self,
        group: &GroupName,
        number: SnapshotNumber,
        store: Option<&str>,
    ) -> Result<DeleteReport, HostError> {
        Host::delete_snapshot(self, group, number, store)
    }
    fn verify_snapshot(
        &self,
        group: &GroupName,
        number: Option<SnapshotNumber>,
        store: Option<&str>,
    ) -> Result<VerifyReport, HostError> {
        Host::verify_snapshot(self, group, number, store)
    }
}

type Shared = State<Arc<dyn Control>>;
type Body = Result<Bytes, BytesRejection>;
type Answer<T> = Result<Json<T>, ApiError>;

/// The routes of the API.
pub fn router(host: Arc<dyn Control>) -> Router {
    Router::new()
        .route("/v1/status", get(status))
        .route("/v1/vms", post(vm_start))
        .route("/v1/vms/{name}", get(vm_status).delete(vm_stop))
        .route("/v1/vms/{name}/start", post(vm_start_recorded))
        .route("/v1/vms/{name}/definition", get(definition))
        .route("/v1/vms/{name}/protect", post(protect))
        .route("/v1/groups/{name}/protect", post(protect_group))
        .route("/v1/vms/{name}/unprotect", post(unprotect))
        .route("/v1/vms/{name}/failover", post(failover))
        .route("/v1/vms/{name}/recover", post(recover))
        .route("/v1/vms/{name}/timings", get(timings))
        .route("/v1/vms/{name}/lockstep/verify", post(verify_lockstep))
        .merge(snapshots::routes())
        .merge(events::routes())
        .fallback(no_such_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(DefaultBodyLimit::max(MAX_REQUEST_BYTES))
        .with_state(host.clone())
        .merge(metrics::router(host))
}

async fn status(State(host): Shared) -> Answer<HostStatus> {
    blocking(move || Ok(host.status())).await.map(Json)
}

async fn vm_start(State(host): Shared, body: Body) -> Answer<VmStatus> {
    let definition = read(body)?;
    blocking(move || host.vm_start(definition)).await.map(Json)
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

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StopQuery {
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

async fn protect(State(host): Shared, Name(name): Name<VmName>, body: Body) -> Answer<VmStatus> {
    let request = read(body)?;
    blocking(move || host.protect(&name, request)).await.map(Json)
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
    match spawn_blocking(move || containment::request(call)).await {
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
