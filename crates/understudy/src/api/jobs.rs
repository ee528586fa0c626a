//! Work that takes long: begun by one call, watched by others, and cancelled where that is possible.
//!
//! A job lives in the daemon's memory alone. What it does is what the same call does that waits; only who waits differs.

use super::{Answer, ApiError, Control, invalid, room};
use crate::commands::lapse::{Lapse, Silence};
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::http::header::LOCATION;
use axum::response::{IntoResponse, Json, Response};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use understudy_daemon::containment;
use understudy_report::events::now_ms;
use understudy_report::{ErrorKind, HostError};
use understudy_report::{Protection, VmStatus};

/// Jobs that are kept, the running ones among them.
const KEPT: usize = 64;
/// Time between two looks at a synchronisation.
const LOOK: Duration = Duration::from_millis(200);

/// The kind of a job: what it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum JobKind {
    /// Protects a VM; done when it is protected.
    Protect,
    /// Takes a snapshot.
    Snapshot,
    /// Restores one.
    Restore,
}

/// The state of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum JobState {
    /// The job is under way.
    Running,
    /// The job did what it should.
    Done,
    /// The job did not do what it should: `error` says why.
    Failed,
    /// The job was cancelled.
    Cancelled,
}

/// The progress of a job.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct JobProgress {
    /// Bytes done.
    pub done_bytes: u64,
    /// Bytes in all, as known now.
    pub total_bytes: u64,
    /// Seconds left, if that can be told.
    pub remaining_seconds: Option<f64>,
}

/// A job.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct JobReport {
    /// Names it.
    pub id: u64,
    /// The kind of the job.
    pub kind: JobKind,
    /// The VM or group that it is about.
    pub subject: String,
    /// The state of the job.
    pub state: JobState,
    /// The progress of the job, if that can be told.
    pub progress: Option<JobProgress>,
    /// Time at which it began, in milliseconds since 1970.
    pub begun_ms: u64,
    /// Time at which it ended, in milliseconds since 1970.
    pub ended_ms: Option<u64>,
    /// Answer that the call would have given if it had waited.
    pub answer: Option<Value>,
    /// The reason why it failed.
    pub error: Option<HostError>,
}

/// The jobs of a daemon.
#[derive(Default)]
pub struct Jobs {
    next: AtomicU64,
    known: Mutex<VecDeque<Arc<Running>>>,
}

/// A job, from the side of its work.
pub(super) struct Running {
    cancelled: AtomicBool,
    report: Mutex<JobReport>,
}

/// The outcome of a job that did not fail.
pub(super) enum Outcome {
    /// The job ended with this answer.
    Done(Value),
    /// The job was cancelled, as somebody wanted.
    Cancelled,
}

impl Running {
    fn report(&self) -> MutexGuard<'_, JobReport> {
        self.report.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, outcome: Result<Outcome, HostError>) {
        let mut report = self.report();
        report.ended_ms = Some(now_ms());
        match outcome {
            Ok(Outcome::Done(answer)) => {
                (report.state, report.answer) = (JobState::Done, Some(answer));
            }
            Ok(Outcome::Cancelled) => report.state = JobState::Cancelled,
            Err(error) => (report.state, report.error) = (JobState::Failed, Some(error)),
        }
    }
}

impl Jobs {
    /// Begins a job, and answers with it. It has this place, or one among all calls.
    pub(super) fn begin(
        &self,
        kind: JobKind,
        subject: String,
        place: Option<room::AtStore>,
        work: impl FnOnce(&Running) -> Result<Outcome, HostError> + Send + 'static,
    ) -> Result<Response, ApiError> {
        let job = self.add(kind, subject)?;
        let report = job.report().clone();
        let work = move || {
            let outcome = containment::request(|| work(&job)).unwrap_or_else(|| {
                let message = "the daemon failed on this job: its log says where, please report it";
                Err(HostError::new(ErrorKind::Internal, message))
            });
            job.end(outcome);
        };
        match place {
            Some(place) => drop(tokio::spawn(room::call_in(place, work))),
            None => drop(tokio::spawn(room::call(work))),
        }
        let place = format!("/v1/jobs/{}", report.id);
        Ok((StatusCode::ACCEPTED, [(LOCATION, place)], Json(report)).into_response())
    }

    fn add(&self, kind: JobKind, subject: String) -> Result<Arc<Running>, HostError> {
        let mut known = self.known();
        if known.len() >= KEPT {
            let ended = known.iter().position(|job| job.report().state != JobState::Running);
            let Some(ended) = ended else {
                let message = format!("{KEPT} jobs are under way: wait until one has ended");
                return Err(HostError::new(ErrorKind::Conflict, message));
            };
            known.remove(ended);
        }
        let id = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        let report = JobReport {
            id,
            kind,
            subject,
            state: JobState::Running,
            progress: None,
            begun_ms: now_ms(),
            ended_ms: None,
            answer: None,
            error: None,
        };
        let job = Running { cancelled: AtomicBool::new(false), report: Mutex::new(report) };
        let job = Arc::new(job);
        known.push_back(job.clone());
        Ok(job)
    }

    fn known(&self) -> MutexGuard<'_, VecDeque<Arc<Running>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, id: Result<Path<u64>, PathRejection>) -> Result<Arc<Running>, ApiError> {
        let Path(id) = id.map_err(|rejection| invalid(rejection.body_text()))?;
        let found = self.known().iter().find(|job| job.report().id == id).cloned();
        found.ok_or_else(|| {
            let message = format!("there is no job {id}; the last {KEPT} are kept");
            HostError::new(ErrorKind::NotFound, message).into()
        })
    }
}

/// The client's word about waiting: `?wait=false` makes a job of a call.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct WaitQuery {
    /// Whether to wait until all is done; else a job is the answer, at once.
    #[serde(default = "waits")]
    wait: bool,
}

fn waits() -> bool {
    true
}

/// The same as it comes.
pub(super) type Waiting = Result<Query<WaitQuery>, QueryRejection>;

/// Whether the client waits for the end.
pub(super) fn is_waited_for(waiting: Waiting) -> Result<bool, ApiError> {
    let Query(query) = waiting.map_err(|rejection| invalid(rejection.body_text()))?;
    Ok(query.wait)
}

/// The end of work that has given this.
pub(super) fn outcome(answer: &impl Serialize) -> Result<Outcome, HostError> {
    let json = serde_json::to_value(answer);
    json.map(Outcome::Done).map_err(|error| HostError::new(ErrorKind::Internal, error.to_string()))
}

/// Follows a protection that has begun until the VM is protected.
pub(super) fn follow_protection(
    host: &dyn Control,
    mut status: VmStatus,
    job: &Running,
) -> Result<Outcome, HostError> {
    let vm = &status.name.clone();
    let (mut lapse, mut silence) = (Lapse::new(true), Silence::new());
    loop {
        let lapses = lapse.is_worth_waiting(&status) | silence.is_worth_waiting(&status);
        let reason = match status.protection {
            Protection::Protected { .. } | Protection::Unheld { .. } => return outcome(&status),
            Protection::Syncing { done_bytes, total_bytes, remaining_seconds, .. } => {
                job.report().progress =
                    Some(JobProgress { done_bytes, total_bytes, remaining_seconds });
                None
            }
            Protection::Degraded { .. } if lapses => None,
            Protection::Off => Some("its protection was ended".to_owned()),
            Protection::Degraded { reason } => Some(reason),
        };
        if let Some(reason) = reason {
            let message = format!("{vm} is not protected: {reason}");
            return Err(HostError::new(ErrorKind::Unreachable, message));
        }
        if job.cancelled.load(Ordering::Acquire) {
            host.unprotect(vm)?;
            return Ok(Outcome::Cancelled);
        }
        std::thread::sleep(LOOK);
        status = host.vm_status(vm)?;
    }
}

pub(super) async fn list(State(jobs): State<Arc<Jobs>>) -> Json<Vec<JobReport>> {
    Json(jobs.known().iter().map(|job| job.report().clone()).collect())
}

pub(super) async fn show(
    State(jobs): State<Arc<Jobs>>,
    id: Result<Path<u64>, PathRejection>,
) -> Answer<JobReport> {
    Ok(Json(jobs.find(id)?.report().clone()))
}

/// Cancels a job that runs, or forgets one that has ended.
pub(super) async fn cancel(
    State(jobs): State<Arc<Jobs>>,
    id: Result<Path<u64>, PathRejection>,
) -> Answer<JobReport> {
    let job = jobs.find(id)?;
    let report = job.report().clone();
    match (report.state, report.kind) {
        (JobState::Running, JobKind::Protect) => job.cancelled.store(true, Ordering::Release),
        (JobState::Running, JobKind::Snapshot | JobKind::Restore) => {
            let message = format!(
                "job {} goes on to its end: a snapshot or restore is given up as a whole or not at \
                 all; undo it when it has ended",
                report.id
            );
            return Err(HostError::new(ErrorKind::Conflict, message).into());
        }
        _ => jobs.known().retain(|other| !Arc::ptr_eq(other, &job)),
    }
    Ok(Json(report))
}
