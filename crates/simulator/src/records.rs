//! The valid image's host: the decision of `understudy recover`, checked
//! against the truth.

use crate::host::{HostId, Image};
use crate::mutant::DriverMutant;
use crate::world::World;
use understudy_protocol::validity::{
    ArbiterWord, Evidence, Finding, ImageRecord, ImageRole, judge, may_start,
};
use understudy_protocol::{Generation, Ownership, Time};

impl World {
    /// Writes a host's record of its image, unless that fails in the midst of it: then the record is there, or
    /// what was before, and nothing that comes behind it.
    pub(crate) fn set_record(&mut self, host: HostId, role: ImageRole, generation: Generation) {
        let (is_written, fails) = self.how_it_is_written();
        if is_written {
            self.put_record(host, role, generation);
        }
        if fails {
            self.fail_in_a_write(host);
        }
    }

    /// The same of the note that this host is about to claim the VM for a start.
    pub(crate) fn note_claim(&mut self, host: HostId, from: Generation) {
        let (is_written, fails) = self.how_it_is_written();
        if is_written {
            self.hosts[host.0].image.claimed_from = Some(from);
            self.check_records();
        }
        if fails {
            self.fail_in_a_write(host);
        }
    }

    /// Whether what is written is there, and whether its host fails meanwhile.
    fn how_it_is_written(&mut self) -> (bool, bool) {
        let may_fail = self.now > Time::default() && self.now < self.schedule.calm_from;
        let fails = may_fail && self.record_random.percent(self.schedule.torn_records);
        (!fails || self.record_random.percent(50), fails)
    }

    fn fail_in_a_write(&mut self, host: HostId) {
        self.coverage.records_torn += 1;
        self.excuse("its host failed as it wrote a record");
        self.note(host, || "fails as it writes a record".to_owned());
        let span = self.record_random.millis(50, 800);
        match self.record_random.percent(50) {
            true => self.power_off(host, span),
            false => self.daemon_dies(host, span, true),
        }
    }

    /// A record is on stable storage.
    pub(crate) fn put_record(&mut self, host: HostId, role: ImageRole, generation: Generation) {
        let image = &mut self.hosts[host.0].image;
        (image.record, image.claimed_from) = (Some((role, generation)), None);
        if role == ImageRole::Active {
            self.oracle.activate(host);
        }
        self.check_records();
    }

    /// Notes that this host has given back the VM that it had won: a mirror stays one.
    pub(crate) fn note_returned(&mut self, host: HostId) {
        let counts = self.has(DriverMutant::ReturnedMirrorRan);
        let Some((role, _)) = &mut self.hosts[host.0].image.record else { return };
        match role {
            ImageRole::Active => *role = ImageRole::Cut,
            _ if counts => *role = ImageRole::Stale,
            _ => {}
        }
        self.check_records();
    }

    /// Checks that, if all power failed now, what clients were told is safe would be on the image
    /// that the guest ran on last.
    pub(crate) fn check_image(&mut self) {
        let host = self.oracle.ran_last();
        let image: &Image = &self.hosts[host.0].image;
        if let Some(lack) = self.oracle.lacks(image) {
            self.violation(format!("{host}'s image is the valid one, but {lack}"));
        }
    }

    /// The records name the valid image when everybody answers, and no other
    /// whoever does not.
    pub(crate) fn check_records(&mut self) {
        let truth = self.oracle.ran_last();
        match self.valid_image(|_| false) {
            Some(named) if named == truth => {}
            named => {
                return self.violation(format!("{truth}'s image is valid, named is {named:?}"));
            }
        }
        let silent = self.random.index(1 << self.hosts.len());
        let is_silent = |host: &HostId| silent >> host.0 & 1 == 1;
        let arbiter = self.random.percent(50);
        let finding = judge(&self.evidence(is_silent, arbiter));
        if let Finding::Valid { host, why, .. } = finding {
            if host != truth.name() {
                self.violation(format!("{truth}'s image is valid, named is {host}: {why}"));
            }
        }
        self.check_starts(truth);
    }

    /// No host may start the VM afresh on an image that is not the valid one.
    fn check_starts(&mut self, truth: HostId) {
        let ownership = self.ownership();
        let word = ArbiterWord::Says(Some(ownership.clone()));
        for host in (0..self.hosts.len()).map(HostId).filter(|host| *host != truth) {
            let record = self.hosts[host.0].image.record_of(host);
            let may = may_start(&host.name(), record.as_ref(), &word);
            if record.is_some() && may.is_ok() {
                self.violation(format!("{host} may start the VM, the valid image is {truth}'s"));
            }
        }
        // One that gave it up, or was held to have lost it, starts it by `recover`, which asks the others.
        let record = self.hosts[truth.0].image.record_of(truth);
        let until = |it: &ImageRecord| match it.role {
            ImageRole::Stale => it.generation,
            _ => it.claimed_from.unwrap_or_default().max(it.generation),
        };
        let goes_on = record.as_ref().is_some_and(|it| until(it).next() == ownership.generation);
        let owns = goes_on && ownership.host == Some(truth.name());
        if let (true, Err(why)) = (owns, may_start(&truth.name(), record.as_ref(), &word)) {
            self.violation(format!(
                "{truth} owns the VM, has its image, and may not start it: {why}"
            ));
        }
    }

    /// The image that the arbiter and the records of the hosts that answer name.
    pub(crate) fn valid_image(&self, is_silent: impl Fn(&HostId) -> bool) -> Option<HostId> {
        match judge(&self.evidence(is_silent, true)) {
            Finding::Valid { host, .. } => {
                (0..self.hosts.len()).map(HostId).find(|id| id.name() == host)
            }
            Finding::Undecided(_) => None,
        }
    }

    fn evidence(&self, is_silent: impl Fn(&HostId) -> bool, arbiter: bool) -> Evidence {
        let (silent, answering): (Vec<HostId>, Vec<HostId>) =
            (0..self.hosts.len()).map(HostId).partition(is_silent);
        let record = |host: &HostId| self.hosts[host.0].image.record_of(*host);
        let blank = answering.iter().filter(|host| record(host).is_none());
        Evidence {
            records: answering.iter().filter_map(record).collect(),
            without: blank.map(|host| host.name()).collect(),
            silent: silent.iter().map(|host| host.name()).collect(),
            arbiter: match arbiter {
                true => ArbiterWord::Says(Some(self.ownership())),
                false => ArbiterWord::Silent,
            },
        }
    }

    fn ownership(&self) -> Ownership {
        let (owner, generation) = (self.arbiter.owner, self.arbiter.generation);
        Ownership { host: Some(owner.name()), generation }
    }
}
