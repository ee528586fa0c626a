//! Snapshots and restores in the API.

use super::jobs::{self, JobKind, Jobs, Waiting};
use super::{Answer, Api, ApiError, Body, Name, Shared, Subject, blocking, invalid, read};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Json, Response};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use understudy_daemon::HostError;
use understudy_daemon::snapshot::report::{DeleteReport, SnapshotReport, VerifyReport};
use understudy_protocol::{GroupName, VmName};
use understudy_snapshot::SnapshotNumber;

pub(super) async fn snapshot_vm(
    api: State<Api>,
    Name(name): Name<VmName>,
    waiting: Waiting,
    body: Body,
) -> Result<Response, ApiError> {
    snapshot(api, Subject::Vm(name), waiting, body).await
}

pub(super) async fn snapshot_cluster(
    api: State<Api>,
    Name(name): Name<GroupName>,
    waiting: Waiting,
    body: Body,
) -> Result<Response, ApiError> {
    snapshot(api, Subject::Cluster(name), waiting, body).await
}

async fn snapshot(
    State(api): State<Api>,
    what: Subject,
    waiting: Waiting,
    body: Body,
) -> Result<Response, ApiError> {
    let (request, subject) = (read(body)?, what.name().to_owned());
    let host = api.host;
    let work = move || host.snapshot(&what, &request);
    carry_out(&api.jobs, JobKind::Snapshot, subject, waiting, work).await
}

pub(super) async fn restore_vm(
    api: State<Api>,
    Name(name): Name<VmName>,
    waiting: Waiting,
    body: Body,
) -> Result<Response, ApiError> {
    restore(api, Subject::Vm(name), waiting, body).await
}

pub(super) async fn restore_cluster(
    api: State<Api>,
    Name(name): Name<GroupName>,
    waiting: Waiting,
    body: Body,
) -> Result<Response, ApiError> {
    restore(api, Subject::Cluster(name), waiting, body).await
}

async fn restore(
    State(api): State<Api>,
    what: Subject,
    waiting: Waiting,
    body: Body,
) -> Result<Response, ApiError> {
    let (request, subject) = (read(body)?, what.name().to_owned());
    let host = api.host;
    let work = move || host.restore(&what, &request);
    carry_out(&api.jobs, JobKind::Restore, subject, waiting, work).await
}

/// Answers with what came of it, or at once with a job.
async fn carry_out<T: Serialize + Send + 'static>(
    jobs: &Jobs,
    kind: JobKind,
    subject: String,
    waiting: Waiting,
    work: impl FnOnce() -> Result<T, HostError> + Send + 'static,
) -> Result<Response, ApiError> {
    if jobs::is_waited_for(waiting)? {
        return Ok(Json(blocking(work).await?).into_response());
    }
    jobs.begin(kind, subject, move |_| jobs::outcome(&work()?))
}

/// Which snapshots are meant.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Which {
    /// The VM or group; all that the host knows without.
    group: Option<GroupName>,
    /// The snapshot.
    number: Option<SnapshotNumber>,
    /// Where it is; the group's own store without.
    store: Option<String>,
}

type Asked = Result<Query<Which>, QueryRejection>;

impl Which {
    fn group(&self) -> Result<&GroupName, super::ApiError> {
        self.group.as_ref().ok_or_else(|| invalid("name the group: group=NAME".to_owned()))
    }
}

pub(super) async fn list(State(host): Shared, asked: Asked) -> Answer<Vec<SnapshotReport>> {
    let Query(which) = asked.map_err(|rejection| invalid(rejection.body_text()))?;
    blocking(move || host.snapshots(which.group.as_ref(), which.store.as_deref())).await.map(Json)
}

pub(super) async fn delete(State(host): Shared, asked: Asked) -> Answer<DeleteReport> {
    let Query(which) = asked.map_err(|rejection| invalid(rejection.body_text()))?;
    let group = which.group()?.to_owned();
    let number = which.number.ok_or_else(|| invalid("name the snapshot: number=N".to_owned()))?;
    blocking(move || host.delete_snapshot(&group, number, which.store.as_deref())).await.map(Json)
}

pub(super) async fn verify(State(host): Shared, asked: Asked) -> Answer<VerifyReport> {
    let Query(which) = asked.map_err(|rejection| invalid(rejection.body_text()))?;
    let group = which.group()?.to_owned();
    blocking(move || host.verify_snapshot(&group, which.number, which.store.as_deref()))
        .await
        .map(Json)
}
