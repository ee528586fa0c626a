//! Snapshots and restores in the API.

use super::jobs::{self, JobKind, Jobs, Waiting};
use super::room::{AtStore, StoreRoom};
use super::{Answer, Api, ApiError, Body, Control, Name, Shared, Subject};
use super::{blocking_in, invalid, read};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Extension, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Json, Response};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use understudy_daemon::config::Access;
use understudy_protocol::{GroupName, VmName};
use understudy_report::HostError;
use understudy_report::cluster::{
    DeleteReport, RestoreRequest, SnapshotReport, SnapshotRequest, VerifyReport,
};
use understudy_snapshot::SnapshotNumber;

pub(super) async fn snapshot_vm(
    api: State<Api>,
    Name(name): Name<VmName>,
    access: Extension<Access>,
    waiting: Waiting,
    body: Body,
) -> Result<Response, ApiError> {
    snapshot(api, access, Subject::Vm(name), waiting, body).await
}

pub(super) async fn snapshot_cluster(
    api: State<Api>,
    Name(name): Name<GroupName>,
    access: Extension<Access>,
    waiting: Waiting,
    body: Body,
) -> Result<Response, ApiError> {
    snapshot(api, access, Subject::Cluster(name), waiting, body).await
}

async fn snapshot(
    State(api): State<Api>,
    Extension(access): Extension<Access>,
    what: Subject,
    waiting: Waiting,
    body: Body,
) -> Result<Response, ApiError> {
    let (request, subject): (SnapshotRequest, _) = (read(body)?, what.name().to_owned());
    let host = api.host;
    may_name(&*host, access, request.store.as_deref())?;
    let place = place_at(&api.stores, request.store.as_deref(), Some(&subject))?;
    let work = move || host.snapshot(&what, &request);
    carry_out(&api.jobs, JobKind::Snapshot, (subject, place), waiting, work).await
}

pub(super) async fn restore_vm(
    api: State<Api>,
    Name(name): Name<VmName>,
    access: Extension<Access>,
    waiting: Waiting,
    body: Body,
) -> Result<Response, ApiError> {
    restore(api, access, Subject::Vm(name), waiting, body).await
}

pub(super) async fn restore_cluster(
    api: State<Api>,
    Name(name): Name<GroupName>,
    access: Extension<Access>,
    waiting: Waiting,
    body: Body,
) -> Result<Response, ApiError> {
    restore(api, access, Subject::Cluster(name), waiting, body).await
}

async fn restore(
    State(api): State<Api>,
    Extension(access): Extension<Access>,
    what: Subject,
    waiting: Waiting,
    body: Body,
) -> Result<Response, ApiError> {
    let (request, subject): (RestoreRequest, _) = (read(body)?, what.name().to_owned());
    let host = api.host;
    may_name(&*host, access, request.store.as_deref())?;
    let place = place_at(&api.stores, request.store.as_deref(), Some(&subject))?;
    let work = move || host.restore(&what, &request);
    carry_out(&api.jobs, JobKind::Restore, (subject, place), waiting, work).await
}

/// A store is a path that the daemon reads and writes as root: whoever may not do all names only
/// those of the host's configuration.
fn may_name(host: &dyn Control, access: Access, store: Option<&str>) -> Result<(), ApiError> {
    match store {
        Some(store) if access < Access::Admin => host.may_name_store(store).map_err(|error| {
            let error = ApiError::from(error);
            ApiError { status: StatusCode::FORBIDDEN, ..error }
        }),
        _ => Ok(()),
    }
}

/// Answers with what came of it, or at once with a job.
async fn carry_out<T: Serialize + Send + 'static>(
    jobs: &Jobs,
    kind: JobKind,
    (subject, place): (String, AtStore),
    waiting: Waiting,
    work: impl FnOnce() -> Result<T, HostError> + Send + 'static,
) -> Result<Response, ApiError> {
    if jobs::is_waited_for(waiting)? {
        return Ok(Json(blocking_in(place, work).await?).into_response());
    }
    jobs.begin(kind, subject, Some(place), move |_| jobs::outcome(&work()?))
}

/// A place for a call at a store: the named one, else the group's own.
fn place_at(
    stores: &StoreRoom,
    store: Option<&str>,
    group: Option<&str>,
) -> Result<AtStore, ApiError> {
    let named = store.map(str::to_owned);
    let of_group = || group.map(|group| format!("the store of {group}"));
    let store = named.or_else(of_group).unwrap_or_else(|| "each group's store".to_owned());
    Ok(stores.take(&store)?)
}

/// The snapshots that are meant.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Which {
    /// The VM or group; all that the host knows without.
    group: Option<GroupName>,
    /// The snapshot.
    number: Option<SnapshotNumber>,
    /// The store where it is; the group's own store without.
    store: Option<String>,
}

/// The snapshot that is to be deleted.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Doomed {
    /// The VM or group.
    group: GroupName,
    /// The snapshot.
    number: SnapshotNumber,
    /// The store where it is; the group's own store without.
    store: Option<String>,
    /// Whether to delete it even while it is being restored, so far as its store knows.
    #[serde(default)]
    force: bool,
}

type Asked = Result<Query<Which>, QueryRejection>;

impl Which {
    fn group(&self) -> Result<&GroupName, super::ApiError> {
        self.group.as_ref().ok_or_else(|| invalid("name the group: group=NAME".to_owned()))
    }
}

pub(super) async fn list(
    State(host): Shared,
    State(stores): State<StoreRoom>,
    Extension(access): Extension<Access>,
    asked: Asked,
) -> Answer<Vec<SnapshotReport>> {
    let Query(which) = asked.map_err(|rejection| invalid(rejection.body_text()))?;
    may_name(&*host, access, which.store.as_deref())?;
    let place = place_at(&stores, which.store.as_deref(), which.group.as_deref())?;
    let list = move || host.snapshots(which.group.as_ref(), which.store.as_deref());
    blocking_in(place, list).await.map(Json)
}

pub(super) async fn delete(
    State(host): Shared,
    State(stores): State<StoreRoom>,
    Extension(access): Extension<Access>,
    asked: Result<Query<Doomed>, QueryRejection>,
) -> Answer<DeleteReport> {
    let Query(doomed) = asked.map_err(|rejection| invalid(rejection.body_text()))?;
    let Doomed { group, number, store, force } = doomed;
    may_name(&*host, access, store.as_deref())?;
    let place = place_at(&stores, store.as_deref(), Some(&group))?;
    let delete = move || host.delete_snapshot(&group, number, store.as_deref(), force);
    blocking_in(place, delete).await.map(Json)
}

pub(super) async fn verify(
    State(host): Shared,
    State(stores): State<StoreRoom>,
    Extension(access): Extension<Access>,
    asked: Asked,
) -> Answer<VerifyReport> {
    let Query(which) = asked.map_err(|rejection| invalid(rejection.body_text()))?;
    may_name(&*host, access, which.store.as_deref())?;
    let group = which.group()?.to_owned();
    let place = place_at(&stores, which.store.as_deref(), Some(&group))?;
    let verify = move || host.verify_snapshot(&group, which.number, which.store.as_deref());
    blocking_in(place, verify).await.map(Json)
}
