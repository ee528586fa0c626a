//! Snapshots and restores in the API.

use super::{Answer, Body, Control, Name, Shared, Subject, blocking, invalid, read};
use axum::Router;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::Json;
use axum::routing::{get, post};
use serde::Deserialize;
use std::sync::Arc;
use understudy_daemon::snapshot::report::{
    DeleteReport, RestoreReport, SnapshotReport, VerifyReport,
};
use understudy_protocol::{GroupName, VmName};
use understudy_snapshot::SnapshotNumber;

pub(super) fn routes() -> Router<Arc<dyn Control>> {
    Router::new()
        .route("/v1/vms/{name}/snapshot", post(snapshot_vm))
        .route("/v1/vms/{name}/restore", post(restore_vm))
        .route("/v1/clusters/{name}/snapshot", post(snapshot_cluster))
        .route("/v1/clusters/{name}/restore", post(restore_cluster))
        .route("/v1/snapshots", get(list).delete(delete))
        .route("/v1/snapshots/verify", post(verify))
}

async fn snapshot_vm(host: Shared, Name(name): Name<VmName>, body: Body) -> Answer<SnapshotReport> {
    snapshot(host, Subject::Vm(name), body).await
}

async fn snapshot_cluster(
    host: Shared,
    Name(name): Name<GroupName>,
    body: Body,
) -> Answer<SnapshotReport> {
    snapshot(host, Subject::Cluster(name), body).await
}

async fn snapshot(State(host): Shared, what: Subject, body: Body) -> Answer<SnapshotReport> {
    let request = read(body)?;
    blocking(move || host.snapshot(&what, &request)).await.map(Json)
}

async fn restore_vm(host: Shared, Name(name): Name<VmName>, body: Body) -> Answer<RestoreReport> {
    restore(host, Subject::Vm(name), body).await
}

async fn restore_cluster(
    host: Shared,
    Name(name): Name<GroupName>,
    body: Body,
) -> Answer<RestoreReport> {
    restore(host, Subject::Cluster(name), body).await
}

async fn restore(State(host): Shared, what: Subject, body: Body) -> Answer<RestoreReport> {
    let request = read(body)?;
    blocking(move || host.restore(&what, &request)).await.map(Json)
}

/// Which snapshots are meant.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Which {
    group: Option<GroupName>,
    number: Option<SnapshotNumber>,
    store: Option<String>,
}

type Asked = Result<Query<Which>, QueryRejection>;

impl Which {
    fn group(&self) -> Result<&GroupName, super::ApiError> {
        self.group.as_ref().ok_or_else(|| invalid("name the group: group=NAME".to_owned()))
    }
}

async fn list(State(host): Shared, asked: Asked) -> Answer<Vec<SnapshotReport>> {
    let Query(which) = asked.map_err(|rejection| invalid(rejection.body_text()))?;
    blocking(move || host.snapshots(which.group.as_ref(), which.store.as_deref())).await.map(Json)
}

async fn delete(State(host): Shared, asked: Asked) -> Answer<DeleteReport> {
    let Query(which) = asked.map_err(|rejection| invalid(rejection.body_text()))?;
    let group = which.group()?.to_owned();
    let number = which.number.ok_or_else(|| invalid("name the snapshot: number=N".to_owned()))?;
    blocking(move || host.delete_snapshot(&group, number, which.store.as_deref())).await.map(Json)
}

async fn verify(State(host): Shared, asked: Asked) -> Answer<VerifyReport> {
    let Query(which) = asked.map_err(|rejection| invalid(rejection.body_text()))?;
    let group = which.group()?.to_owned();
    blocking(move || host.verify_snapshot(&group, which.number, which.store.as_deref()))
        .await
        .map(Json)
}
