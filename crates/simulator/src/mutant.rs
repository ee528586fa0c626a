//! Planted bugs, which the checks must notice: in the product's own code
//! ([`understudy_protocol::mutant`]), and in the drivers where a driver does what in the daemon is
//! not the core's.

use serde::Serialize;
use std::fmt;
use understudy_protocol::mutant::Field;
pub use understudy_protocol::mutant::Mutant as CoreMutant;

/// A planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Mutant {
    /// A bug of the product: the core decides wrongly.
    Core(CoreMutant),
    /// A bug of the simulated host: it does not do what the core told it.
    Driver(DriverMutant),
}

/// A driver does what it must not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DriverMutant {
    /// The backup acknowledges an epoch whose end has not arrived.
    AckBeforeStaged,
    /// The backup applies data as it arrives, not when the epoch is whole.
    ApplyPartialEpoch,
    /// The last of a log does not go with the checkpoint that ends it.
    LeaveOutTheRest,
    /// A checkpoint closes its epoch without a barrier in the output.
    LoseBarrier,
    /// A copy that was handed back lets output out before that is on record.
    OpenBeforeRecord,
    /// A mirror that was won and given back counts as one that the guest ran on.
    ReturnedMirrorRan,
    /// The clock of a primary stands still while its host sleeps.
    SleepUncounted,
}

impl DriverMutant {
    const ALL: [DriverMutant; 7] = [
        DriverMutant::AckBeforeStaged,
        DriverMutant::ApplyPartialEpoch,
        DriverMutant::LeaveOutTheRest,
        DriverMutant::LoseBarrier,
        DriverMutant::OpenBeforeRecord,
        DriverMutant::ReturnedMirrorRan,
        DriverMutant::SleepUncounted,
    ];
}

impl fmt::Display for Mutant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mutant::Core(mutant) => write!(f, "{mutant:?}"),
            Mutant::Driver(mutant) => write!(f, "{mutant:?}, in the driver"),
        }
    }
}

impl Mutant {
    /// All of them.
    pub fn all() -> Vec<Mutant> {
        let core = CoreMutant::ALL.iter().copied().map(Mutant::Core);
        core.chain(DriverMutant::ALL.map(Mutant::Driver)).collect()
    }

    /// A seed that has shown it, where the first that does is far from 0: it is tried before all others.
    /// After a change of schedules it may show it no more, which costs nothing but time.
    pub(crate) fn shown_by(self) -> Option<u64> {
        use CoreMutant::*;
        let mutant = match self {
            Mutant::Core(mutant) => mutant,
            Mutant::Driver(DriverMutant::SleepUncounted) => return Some(520),
            Mutant::Driver(_) => return None,
        };
        Some(match mutant {
            ClocksAgree => 8219,
            LeaseBesideSession => 3989,
            KeepUnheardGrant => 3728,
            EndTheOthers => 2951,
            PrepareTooEarly => 2823,
            TakeAnyAnswer => 2544,
            WinnersWordFirst => 2487,
            KeepLateGrant => 2282,
            AskBehindTurn => 2043,
            ContestWhenSick => 1907,
            KeepCalledOff => 1693,
            GiveUpUnasked => 1622,
            ForgetTheClaim => 1544,
            KeepTheSick => 897,
            StayInTheHole => 834,
            JumpTheQueue => 710,
            LostWithOnePath => 620,
            NeverSuspect => 580,
            ForgetWhatWaits => 574,
            GiveToTheUnfit => 461,
            ApplyBehindGap => 418,
            StayOnTheDead => 380,
            NothingHangs | ContestUnfit => 373,
            ReturnWhatRan => 251,
            _ => return None,
        })
    }

    /// The schedules in which it shows.
    pub(crate) fn field(self) -> Field {
        self.core().map_or(Field::Vm, CoreMutant::field)
    }

    /// The one that is planted in the core, if it is there.
    pub(crate) fn core(self) -> Option<CoreMutant> {
        match self {
            Mutant::Core(mutant) => Some(mutant),
            Mutant::Driver(_) => None,
        }
    }
}
