//! Every call of the API: where it is, the right that it takes, what it takes and answers. Routes and docs/openapi.json
//! are both made of this list, so that neither has a call that the other lacks.

use super::jobs::{JobReport, WaitQuery};
use super::openapi::Document;
use super::snapshots::{self, Doomed, Which};
use super::{Api, StopQuery, events, jobs, openapi};
use crate::metrics;
use axum::handler::Handler;
use axum::routing::{MethodFilter, MethodRouter, on};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use understudy_daemon::config::Access;
use understudy_qemu::VmDefinition;
use understudy_report::cluster::{
    DeleteReport, RestoreReport, RestoreRequest, SnapshotReport, SnapshotRequest, VerifyReport,
};
use understudy_report::events::EventList;
use understudy_report::upgrade::{KeeperReplacement, UpgradePlan};
use understudy_report::{
    AgainRequest, CheckpointTiming, ComparisonReport, GroupRequest, HostStatus, MediumRequest,
    ProtectRequest, RecoverReport, RecoverRequest, StartRequest, VmStatus,
};

/// Makes the schema of a type.
pub(super) type SchemaOf = fn(&mut SchemaGenerator) -> Schema;

/// The answer of a call that succeeds.
pub(super) struct Success {
    /// The status.
    pub status: u16,
    /// The type of the body.
    pub media: &'static str,
    /// The body; none if it is empty, or text.
    pub schema: Option<SchemaOf>,
}

/// One call.
pub(super) struct Call {
    /// Path of it; what is in braces is a name.
    pub path: &'static str,
    /// Method of it.
    pub method: &'static str,
    /// The least right that it takes.
    pub access: Access,
    /// Summary of what it does.
    pub summary: &'static str,
    /// The parameters behind the `?`.
    pub query: Option<SchemaOf>,
    /// The body that it takes.
    pub takes: Option<SchemaOf>,
    /// Answers that it may give.
    pub answers: Vec<Success>,
    /// Handler that does it.
    pub handler: MethodRouter<Api>,
}

impl Call {
    fn new<H: Handler<T, Api>, T: 'static>(
        (method, filter): (&'static str, MethodFilter),
        path: &'static str,
        access: Access,
        summary: &'static str,
        handler: H,
    ) -> Call {
        Call {
            path,
            method,
            access,
            summary,
            query: None,
            takes: None,
            answers: Vec::new(),
            handler: on(filter, handler),
        }
    }

    fn query<T: JsonSchema>(mut self) -> Call {
        self.query = Some(<T as JsonSchema>::json_schema);
        self
    }

    fn takes<T: JsonSchema>(mut self) -> Call {
        self.takes = Some(SchemaGenerator::subschema_for::<T>);
        self
    }

    fn answers<T: JsonSchema>(self) -> Call {
        self.answers_with(200, Some(SchemaGenerator::subschema_for::<T>))
    }

    /// Makes it answer 204.
    fn answers_nothing(self) -> Call {
        self.answers_with(204, None)
    }

    /// Makes it answer with a job if its client does not wait.
    fn may_be_a_job(self) -> Call {
        let job: SchemaOf = SchemaGenerator::subschema_for::<JobReport>;
        self.query::<WaitQuery>().answers_with(202, Some(job))
    }

    fn answers_text(mut self, media: &'static str) -> Call {
        self.answers.push(Success { status: 200, media, schema: None });
        self
    }

    fn answers_with(mut self, status: u16, schema: Option<SchemaOf>) -> Call {
        self.answers.push(Success { status, media: "application/json", schema });
        self
    }
}

const GET: (&str, MethodFilter) = ("get", MethodFilter::GET);
const POST: (&str, MethodFilter) = ("post", MethodFilter::POST);
const DELETE: (&str, MethodFilter) = ("delete", MethodFilter::DELETE);

/// All calls, in the order of the description.
pub(super) fn all() -> Vec<Call> {
    [seen(), of_vms(), of_snapshots(), of_jobs()].into_iter().flatten().collect()
}

fn seen() -> Vec<Call> {
    use Access::Read;
    vec![
        Call::new(GET, "/v1/status", Read, "Everything on this host", super::status)
            .answers::<HostStatus>(),
        Call::new(
            GET,
            "/v1/upgrade",
            Read,
            "What a restart of the daemon for an upgrade would do to each VM",
            super::upgrade_plan,
        )
        .answers::<UpgradePlan>(),
        Call::new(GET, "/v1/events", Read, "What has happened on this host", events::list)
            .query::<events::Which>()
            .answers::<EventList>(),
        Call::new(
            GET,
            "/v1/events/stream",
            Read,
            "The same as it happens, as server-sent events: each one's data is an Event",
            events::stream,
        )
        .query::<events::Which>()
        .answers_text("text/event-stream"),
        Call::new(GET, "/metrics", Read, "Figures for a monitoring system", metrics::answer)
            .answers_text("application/openmetrics-text"),
        Call::new(GET, "/openapi.json", Read, "This description", openapi::answer)
            .answers::<Document>(),
    ]
}

fn of_vms() -> Vec<Call> {
    use Access::{Admin, Operate, Read};
    vec![
        Call::new(POST, "/v1/vms", Admin, "Starts a VM, unprotected", super::vm_start)
            .query::<StartRequest>()
            .takes::<VmDefinition>()
            .answers::<VmStatus>(),
        Call::new(GET, "/v1/vms/{name}", Read, "One VM", super::vm_status).answers::<VmStatus>(),
        Call::new(DELETE, "/v1/vms/{name}", Operate, "Stops a VM", super::vm_stop)
            .query::<StopQuery>()
            .answers_nothing(),
        Call::new(
            POST,
            "/v1/vms/{name}/start",
            Operate,
            "Starts a VM as this host's record says, unprotected",
            super::vm_start_recorded,
        )
        .answers::<VmStatus>(),
        Call::new(GET, "/v1/vms/{name}/definition", Read, "How it is defined", super::definition)
            .answers::<VmDefinition>(),
        Call::new(POST, "/v1/vms/{name}/protect", Operate, "Protects a VM", super::protect)
            .takes::<ProtectRequest>()
            .answers::<VmStatus>()
            .may_be_a_job(),
        Call::new(
            POST,
            "/v1/vms/{name}/protect-again",
            Operate,
            "Protects a VM whose protection is lost, and its group, as it was asked for last, to a host",
            super::protect_again,
        )
        .takes::<AgainRequest>()
        .answers::<VmStatus>()
        .may_be_a_job(),
        Call::new(
            POST,
            "/v1/groups/{name}/protect",
            Operate,
            "Protects VMs as one group",
            super::protect_group,
        )
        .takes::<GroupRequest>()
        .answers::<Vec<VmStatus>>(),
        Call::new(POST, "/v1/vms/{name}/unprotect", Operate, "Ends protection", super::unprotect)
            .answers::<VmStatus>(),
        Call::new(
            POST,
            "/v1/vms/{name}/failover",
            Operate,
            "Hands a VM over to its backup, without losing anything",
            super::failover,
        )
        .answers_nothing(),
        Call::new(
            POST,
            "/v1/vms/{name}/keeper",
            Admin,
            "Replaces a VM's keeper by a process of the daemon's program, while its guest runs",
            super::replace_keeper,
        )
        .answers::<KeeperReplacement>(),
        Call::new(
            POST,
            "/v1/vms/{name}/medium",
            Admin,
            "Puts another medium into a CD-ROM drive, or takes it out",
            super::change_medium,
        )
        .takes::<MediumRequest>()
        .answers::<VmStatus>(),
        Call::new(
            POST,
            "/v1/vms/{name}/recover",
            Admin,
            "Names a VM's valid images after the loss of its hosts, and starts it on them",
            super::recover,
        )
        .takes::<RecoverRequest>()
        .answers::<RecoverReport>(),
        Call::new(
            POST,
            "/v1/vms/{name}/lockstep/verify",
            Operate,
            "Compares a VM in lockstep with its backup",
            super::verify_lockstep,
        )
        .answers::<ComparisonReport>(),
        Call::new(
            GET,
            "/v1/vms/{name}/timings",
            Read,
            "Where the pauses of the last checkpoints went, oldest first",
            super::timings,
        )
        .answers::<Vec<CheckpointTiming>>(),
    ]
}

fn of_snapshots() -> Vec<Call> {
    use Access::{Admin, Operate, Read};
    let snapshot =
        |call: Call| call.takes::<SnapshotRequest>().answers::<SnapshotReport>().may_be_a_job();
    let restore =
        |call: Call| call.takes::<RestoreRequest>().answers::<RestoreReport>().may_be_a_job();
    vec![
        snapshot(Call::new(
            POST,
            "/v1/vms/{name}/snapshot",
            Operate,
            "Takes a snapshot of a VM",
            snapshots::snapshot_vm,
        )),
        snapshot(Call::new(
            POST,
            "/v1/clusters/{name}/snapshot",
            Operate,
            "Takes a snapshot of a group",
            snapshots::snapshot_cluster,
        )),
        restore(Call::new(
            POST,
            "/v1/vms/{name}/restore",
            Admin,
            "Restores a VM",
            snapshots::restore_vm,
        )),
        restore(Call::new(
            POST,
            "/v1/clusters/{name}/restore",
            Admin,
            "Restores a group",
            snapshots::restore_cluster,
        )),
        Call::new(GET, "/v1/snapshots", Read, "Snapshots that there are", snapshots::list)
            .query::<Which>()
            .answers::<Vec<SnapshotReport>>(),
        Call::new(DELETE, "/v1/snapshots", Admin, "Deletes a snapshot", snapshots::delete)
            .query::<Doomed>()
            .answers::<DeleteReport>(),
        Call::new(POST, "/v1/snapshots/verify", Operate, "Checks a snapshot", snapshots::verify)
            .query::<Which>()
            .answers::<VerifyReport>(),
    ]
}

fn of_jobs() -> Vec<Call> {
    use Access::{Operate, Read};
    vec![
        Call::new(GET, "/v1/jobs", Read, "Jobs that run, and the last that have ended", jobs::list)
            .answers::<Vec<JobReport>>(),
        Call::new(GET, "/v1/jobs/{id}", Read, "One job", jobs::show).answers::<JobReport>(),
        Call::new(
            DELETE,
            "/v1/jobs/{id}",
            Operate,
            "Cancels a job that runs, or forgets one that has ended",
            jobs::cancel,
        )
        .answers::<JobReport>(),
    ]
}
