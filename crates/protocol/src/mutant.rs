//! Planted bugs: with the feature `mutants` this crate, `understudy-session` and `understudy-snapshot` can be
//! made to decide wrongly, and the simulator's checks must notice.
//!
//! Only the package `understudy-protocol-planted`, which is this source again, has the feature, and
//! only the simulator uses that package: no daemon has any of this.

use serde::Serialize;
use std::cell::Cell;

macro_rules! mutants {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// A bug that a programmer could have made.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
        #[serde(rename_all = "kebab-case")]
        pub enum Mutant {
            $($(#[$doc])* $name,)*
        }

        impl Mutant {
            /// All of them.
            pub const ALL: &[Mutant] = &[$(Mutant::$name,)*];
        }
    };
}

mutants! {
    /// The primary releases the epoch after the one that was acknowledged, too.
    ReleaseEarly,
    /// An acknowledgement that waited while the primary stood still releases output.
    ReleaseAfterStall,
    /// The primary takes each look at its epochs for a sign that they move.
    EveryLookIsHeadway,
    /// What waits for room in the queue to the backup has all the time there is.
    ForgetWhatWaits,
    /// Whoever finds room in the queue to the backup takes it, whoever else waits.
    JumpTheQueue,
    /// A write waits for room in its own epoch, which ends when the guest stands still behind its writes.
    WaitForOnesOwnEpoch,
    /// Bytes of later epochs count as headway of one that is wholly there.
    LaterBytesCount,
    /// Data stays on a path that carries heartbeats and nothing larger.
    StayInTheHole,
    /// Data stays on a path that is down.
    StayOnTheDead,
    /// The end of one of several paths is taken for the peer's.
    LostWithOnePath,
    /// A primary whose guest cannot be saved contests the VM.
    ContestWhenSick,
    /// A primary takes the silence of the arbiter for a grant.
    SilenceIsGrant,
    /// A primary that the arbiter did not answer does not ask again.
    AskOnce,
    /// A primary that lost ends its guest before the winner runs.
    HaltAtOnce,
    /// A primary that lost lets its guest run on.
    FreezeNothing,
    /// A primary goes on alone when protection is ended, before its backup has let go.
    LeaveWithoutWord,
    /// A backup that was told to forget the VM is to acknowledge epochs all the same.
    HurryTheForgetful,
    /// The primary forgets that a backup may take over with its very first epoch.
    EntitledTooLate,
    /// A planned fail-over does not wait for the last epoch.
    YieldAtOnce,
    /// The backup goes live without asking the arbiter.
    SkipArbiter,
    /// A backup takes the silence of the arbiter for a grant.
    SilenceIsGrantToBackup,
    /// A backup whose first synchronisation has not ended contests the VM.
    TakeOverWithNothing,
    /// A backup that has asked for the VM still takes epochs.
    StageOnceLive,
    /// A standby whose disk hangs contests the VM.
    ContestUnfit,
    /// A backup that contests stays in, although it cannot run the VM any more.
    ContestWhenBroken,
    /// A winner that cannot start the VM keeps it.
    KeepTheGrant,
    /// A grant that comes to a backup which has given up is kept.
    KeepLateGrant,
    /// A winner whose copy is known to be of no use lets the former primary wait for it.
    KeepTheUseless,
    /// A backup that could not start the VM keeps a grant that it has not heard of.
    KeepUnheardGrant,
    /// A winner may start what it has handed back.
    StartWhatWasReturned,
    /// A backup that waits lets go of the VM by whoever ran it, whenever that was.
    ForgetGeneration,
    /// An epoch behind one that could not be applied is applied.
    ApplyBehindGap,
    /// A winner's images are said to be valid before they are on stable storage.
    ActivateUnsettled,
    /// A winner whose record is not written keeps the VM.
    KeepUnrecorded,
    /// A winner starts the guest before it is on record that its images are valid.
    StartUnrecorded,
    /// A winner leaves the rest of its log, which was acknowledged, unexecuted.
    LeaveTheLog,
    /// The first of a log may come before the machine that it begins behind is committed.
    LogOvertakes,
    /// An answer of the backup to an order of before counts for the one of now.
    TakeAnyAnswer,
    /// A turn is asked for while the epoch of the one before is on its way.
    AskBehindTurn,
    /// A backup that does not answer whether it can turn is waited for for ever.
    WaitForTheAnswer,
    /// A turn whose commit is late is called off.
    CallOffWhatIsLate,
    /// A QEMU is prepared for a turn beside one whose place another is about to take.
    PrepareTooEarly,
    /// A backup that asks for the VM gives it up for a turn that it cannot carry out.
    GiveUpForATurn,
    /// A QEMU that was prepared for a turn stays although that was called off.
    KeepCalledOff,
    /// A backup whose QEMU did not follow the log stays one.
    StayDiverged,
    /// A winner goes on with a guest that could not be started.
    OpenWhatIsDead,
    /// A backup that gives up ends its connections before its primary has heard why.
    HangUpUntold,
    /// A standby never awaits anything of its own host for too long.
    NothingHangs,
    /// A backup's word that it could take over counts for ever.
    TrustOldWord,
    /// A VM is called protected however long its output waits.
    CallSlowProtected,
    /// A sick guest is left to a backup that could not go on with it.
    GiveToTheUnfit,
    /// A winner's word counts before the arbiter has said whose the VM is.
    WinnersWordFirst,
    /// A host returns a VM that it ran.
    ReturnWhatRan,
    /// A message of the next epoch is staged with the one that runs.
    MixEpochs,
    /// A peer is never silent for too long.
    NeverSuspect,
    /// A lease is counted from the arbiter's answer.
    LeaseFromAnswer,
    /// A lease, once renewed, does not end.
    LeaseWithoutEnd,
    /// A lease is lost to a contest that this host itself has won.
    LeaseBesideContest,
    /// A lease is lost to a backup that has won the VM, and runs nothing yet.
    LeaseBesideSession,
    /// A sole owner that stood still, and its clock with it, does not heed what others say of the time.
    SleepUnnoticed,
    /// Whoever forces the VM onto another host takes the owner's clock to be as fast as its own.
    ClocksAgree,
    /// A sole owner does not heed that the VM is another's.
    MovedIsOwn,
    /// A sole owner whose lease ran out stands still even when it is renewed.
    StayFrozen,
    /// A forced move of the VM to another host does not wait for the owner's lease to end.
    TakeAtOnce,
    /// The hosts are not asked again where none takes the VM now.
    GiveUpRepair,
    /// A backup that could not take over keeps its place for good.
    KeepTheSick,
    /// An attempt to protect the VM that failed is not followed by another.
    StayWithAttempt,
    /// An attempt to protect the VM is charged with the end of one before, and what is protected all the same is not heeded.
    ChargeTheNext,
    /// A mirror counts as an image that the guest ran on.
    MirrorCounts,
    /// A valid image is concluded although hosts are silent that may have run it.
    ConcludeFromSilence,
    /// A winner that does not answer counts as one that never ran the VM.
    SilentNeverRan,
    /// That a host claimed the VM, and started nothing, makes its images old.
    ForgetTheClaim,
    /// A host starts a VM that is another's.
    StartForeign,
    /// An epoch of a group is acknowledged although a member's part of it is missing.
    CommitWithoutAll,
    /// A member of a group runs on before all stand still.
    PassTheGate,
    /// A group is handed back as soon as one member's guest has ended.
    HandBackBesideOthers,
    /// A group is started although the record of a member is not written.
    StartWithoutOne,
    /// A member of a group is heard as soon as it runs, whatever becomes of the others.
    HearOneByOne,
    /// The members of a group end with one, wherever they are.
    EndTheOthers,
    /// A member reads at once what another has sent behind its snapshot.
    ReadFromBehind,
    /// What a member was given and has not read is in no snapshot.
    ForgetTheUnread,
    /// A member that has taken its snapshot does not say so to those to which it sends nothing.
    GiveNoSign,
    /// Members that have not taken a snapshot which was given up count on from the one before.
    ForgetWhatWasGivenUp,
    /// What members sent before a restore reaches those that were restored.
    HearAnotherLife,
    /// A VM is paused for whichever snapshot its cut has met, prepared or not.
    PauseForAny,
    /// A member waits for a snapshot that nobody prepares there.
    LetNothingPass,
    /// Members hear that a snapshot exists before its manifest is written.
    CommitUnpublished,
    /// A snapshot of which all is stored is given up for a member that is lost then.
    FailWhatIsPublished,
    /// A member waits for ever for a coordinator that is silent.
    StayArmed,
    /// Members of a restore start before it is known that all of the snapshot is there.
    StartUnchecked,
    /// It is decided that members stay, while some of them are only told to start.
    DecideEarly,
    /// A member that runs, and hears nothing from its coordinator, stops unasked.
    GiveUpUnasked,
    /// A member that runs, and hears nothing from its coordinator, runs on unasked.
    StayUndecided,
    /// A coordinator takes the arbiter's silence for its word that the members stay.
    SettleUnheard,
}

/// The schedules in which a bug shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// Those of a VM that is protected by itself.
    Vm,
    /// Those of a group of several.
    Group,
    /// Those of a cluster that is snapshotted and restored.
    Cluster,
}

impl Mutant {
    /// The schedules in which it shows.
    pub fn field(self) -> Field {
        match self as usize {
            place if place >= Mutant::ReadFromBehind as usize => Field::Cluster,
            place if place >= Mutant::CommitWithoutAll as usize => Field::Group,
            _ => Field::Vm,
        }
    }
}

thread_local! {
    static PLANTED: Cell<Option<Mutant>> = const { Cell::new(None) };
}

/// A bug is planted on this thread for as long as this lives.
#[derive(Debug)]
#[must_use]
pub struct Planting {
    before: Option<Mutant>,
}

/// Plants a bug, or none, on this thread.
pub fn plant(mutant: Option<Mutant>) -> Planting {
    Planting { before: PLANTED.replace(mutant) }
}

impl Drop for Planting {
    fn drop(&mut self) {
        PLANTED.set(self.before);
    }
}

/// Whether this is the bug that is planted here.
pub fn is_planted(mutant: Mutant) -> bool {
    PLANTED.get() == Some(mutant)
}
