//! Connections from other hosts.

use crate::containment::of_vm;
use crate::gate::authorize::{Asker, authorize};
use crate::gate::lobby::Place;
use crate::host::Host;
use crate::keeper::Passed;
use crate::offer;
use crate::snapshot::frames;
use crate::survey::Needs;
use crate::vm::Vm;
use anyhow::anyhow;
use std::net::TcpStream;
use std::sync::Arc;
use tracing::warn;
use understudy_link::link::Link;
use understudy_protocol::VmName;
use understudy_protocol::wire::Kind;
use understudy_replication::backup;
use understudy_replication::handshake::{Purpose, Welcome, answer};
use understudy_threads::within;

/// Answers one connection, which has `place` until it is known whose it is, and in a keeper is for what its daemon has
/// `passed` it on.
pub fn serve(host: &Arc<Host>, stream: TcpStream, place: Place, passed: Option<Passed>) {
    let peer = stream.peer_addr();
    let _following = match &passed {
        Some(Passed::Offer(offer)) => host.begin_in_place(&offer.definition.name),
        Some(Passed::About(_)) | None => None,
    };
    let served = Link::accepted(stream, host.identity.tls.as_deref()).and_then(|link| {
        let Some(hello) = answer(&link)? else { return Ok(()) };
        let _request = place.authenticated(&hello.host).inspect_err(|error| {
            link.refuse(&error.to_string());
        })?;
        if let Some(keeper) = host.keeper_for(&hello) {
            // What fails here may succeed in a moment: the peer hears that it may try again.
            return keeper.take(&link, None);
        }
        if let Some(passed) = &passed {
            let vm_of = |session: &str| Some(host.backup_session(session)?.vm.clone());
            passed.check(&hello.purpose, vm_of).inspect_err(|error| {
                link.refuse(&error.to_string());
            })?;
        }
        let asker = Asker { host: &hello.host, known: host.is_known(&hello.host) };
        authorize(asker, &hello.purpose, |session| host.primary_of(session)).inspect_err(
            |denied| link.refuse(&format!("host {} refuses: {denied}", host.config.name)),
        )?;
        match hello.purpose.clone() {
            Purpose::Protect(offer) => offer::take(host, link, &hello, &offer),
            Purpose::Survey { vm, memory, cpu, cards, offered } => {
                let needs = Needs { memory, cpu, cards, offered };
                link.send_json(Kind::Welcome, &host.survey_answer(&vm, &needs))
            }
            Purpose::MayFollow { build } => answer_may_follow(host, &link, build.as_deref()),
            Purpose::Images { vm } => answer_images(host, &link, &vm),
            Purpose::Kept { membership, from } => {
                host.answer_kept(&link, &hello.host, &membership, from)
            }
            Purpose::Probe => host.answer_probe(&link, &hello.host),
            Purpose::Clock => host.answer_clock(&link),
            Purpose::Group => crate::snapshot::serve(host, &link),
            Purpose::MayRestore(question) => {
                match host.may_be_told(&question.store).and_then(|()| host.may_restore(&question)) {
                    Ok(answer) => link.send_json(Kind::Welcome, &answer),
                    Err(error) => {
                        link.refuse(&error.to_string());
                        Err(error.into())
                    }
                }
            }
            Purpose::Heartbeat { session, path } => {
                let session = session_of(host, &link, &session)?;
                link.send_json(Kind::Welcome, &Welcome::of(&host.config.name))?;
                backup::attach_heartbeat(&session, path, link);
                Ok(())
            }
            Purpose::Inbound { session } => {
                let session = session_of(host, &link, &session)?;
                link.send_json(Kind::Welcome, &Welcome::of(&host.config.name))?;
                within(&of_vm(host, &session.vm), || backup::attach_inbound(&session, link))
            }
            Purpose::Frames { cluster } => {
                let network = host.snapshots.network(&cluster);
                frames::serve(host, &network, &hello.host, &link)
            }
            Purpose::Resume { session, path, received } => {
                let session = session_of(host, &link, &session)?;
                within(&of_vm(host, &session.vm), || {
                    backup::resume(&session, path, &link, received)
                })
            }
        }
    });
    if let Err(error) = served
        && host.lobby.may_complain()
    {
        warn!("connection from {peer:?} ended: {error:#}");
    }
}

fn answer_may_follow(host: &Host, link: &Link, build: Option<&str>) -> anyhow::Result<()> {
    let name = &host.config.name;
    match host.check_build(build) {
        Ok(()) => link.send_json(Kind::Welcome, &Welcome::of(name)),
        Err(error) => {
            link.refuse(&format!("host {name} refuses: {error}"));
            Err(error.into())
        }
    }
}

fn answer_images(host: &Host, link: &Link, vm: &VmName) -> anyhow::Result<()> {
    match host.images_answer(vm) {
        Ok(answer) => link.send_json(Kind::Welcome, &answer),
        Err(error) => {
            link.refuse(&error.to_string());
            Err(error.into())
        }
    }
}

/// The session that a further connection belongs to, which [`authorize`] has let in.
fn session_of(host: &Host, link: &Link, id: &str) -> anyhow::Result<Arc<backup::Session>> {
    host.backup_session(id).ok_or_else(|| {
        let reason = format!("session {id:?} has ended here");
        link.refuse(&reason);
        anyhow!(reason)
    })
}

impl Host {
    fn backup_session(&self, id: &str) -> Option<Arc<backup::Session>> {
        let is_meant = |vm: &Vm| match vm {
            Vm::Backup(session) if *session.id == *id => Some(session.clone()),
            _ => None,
        };
        self.vms.look_at_all(|vms| vms.values().find_map(is_meant))
    }

    fn primary_of(&self, session: &str) -> Option<String> {
        self.backup_session(session).map(|session| session.primary.to_string())
    }
}
