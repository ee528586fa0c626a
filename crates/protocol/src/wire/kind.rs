//! The kind of a message: its number in the header (docs/WIRE.md).

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// JSON: the primary's offer, first on every connection.
    Hello = 1,
    /// JSON: the backup accepts.
    Welcome = 2,
    /// Text: the sender refuses or gives up, and why.
    Refuse = 3,
    /// A piece of a file that the backup needs (kernel, initial RAM disk).
    File = 4,
    /// All that precedes the first synchronisation has been sent.
    Prepare = 5,
    /// JSON: the backup's QEMU stands ready.
    Ready = 6,
    /// Pages of guest memory (crate `understudy-encoding`).
    Pages = 10,
    /// Bytes written to a disk.
    DiskWrite = 11,
    /// A range of a disk that reads as zeroes now.
    DiskZero = 12,
    /// The device state, or the last of it.
    DeviceState = 13,
    /// The epoch is whole: counts and digest of its messages.
    EpochEnd = 14,
    /// The backup holds the whole epoch.
    Acknowledge = 20,
    /// A sign of life.
    Heartbeat = 21,
    /// The primary wants the backup to take over.
    TakeOver = 22,
    /// The primary ends protection.
    StandDown = 23,
    /// The backup forgot the VM.
    StoodDown = 24,
    /// The backup runs the VM; the epoch field holds its generation.
    Live = 25,
    /// The sender got as many messages of the session as the epoch field says.
    /// Only where there are several paths; not counted itself.
    Received = 26,
    /// The backup has the disk writes up to this epoch on stable storage.
    Settled = 27,
    /// Copies of frames that the primary's guest receives in this epoch
    /// ([`CardFrames`](crate::CardFrames)).
    Inbound = 28,
    /// Frames that the guest sent in this epoch, and that wait for its commit
    /// ([`CardFrames`](crate::CardFrames)).
    Outbound = 29,
    /// A batch of QEMU's log, which is an epoch of lockstep mode
    /// (crate `understudy-encoding`).
    Log = 30,
    /// The progress of the backup with the log ([`LogProgress`]). Lockstep mode.
    Progress = 31,
    /// The backup's QEMU does not follow the log any more: text, why. Lockstep mode.
    Diverged = 32,
    /// The results of disk reads of which the log of this epoch, or of a later one, tells the ends
    /// of (crate `understudy-lockstep`). Lockstep mode, before the epoch's [`Kind::Log`].
    DiskReads = 33,
    /// The number of writes of the guest, since its log began, that each disk of the sender has; of
    /// the backup's, on stable storage (crate `understudy-lockstep`). Lockstep mode.
    Written = 34,
    /// JSON: the primary is about to turn to the other way of keeping up, or is not after all.
    Turn = 35,
    /// JSON: whether the backup is ready for it.
    TurnAnswer = 36,
    /// The log begins where this epoch, a checkpoint, ends. A part of it.
    LogBegins = 37,
    /// The last of the log, up to this epoch, which is a checkpoint again (crate
    /// `understudy-encoding`). A part of it.
    LogEnds = 38,
    /// A place of the log, and what the primary has there
    /// (crate `understudy-lockstep`). Lockstep mode, before log from behind that place.
    Compare = 40,
    /// The spots that differed there (crate `understudy-lockstep`). Lockstep mode.
    Compared = 41,
    /// The backup has diverged, as comparisons show: text, why. Lockstep mode.
    Condemn = 42,
    /// Text: why the backup could not take over now; empty if it could.
    MayTakeOver = 43,
    /// JSON: an order about a snapshot of a group, or a report.
    Snapshot = 45,
    /// JSON: an order about the restore of a group, or a report.
    Restore = 46,
    /// JSON: the backup is to keep what it has at the end of this epoch, for a snapshot. Part of
    /// the epoch.
    Keep = 47,
    /// JSON: what became of it.
    Kept = 48,
    /// The snapshot, whose number is in the epoch field, is given up: nothing is to be kept for it.
    LetGo = 49,
    /// Frames between the members of a cluster, each with its length and its envelope before
    /// it (crate `understudy-snapshot`). On a connection of their own.
    Frames = 50,
    /// JSON: which members of a cluster run on the sender's host, with their cards.
    Presence = 51,
    /// The words of the guest on its console in this epoch that wait for its commit. Only
    /// where that was asked for; in lockstep the backup's guest says it itself.
    Console = 52,
    /// JSON: a medium that is about to be put into a CD-ROM drive of the VM; the backup looks
    /// whether it has the same.
    MediumAsked = 53,
    /// JSON: whether it has.
    MediumAnswer = 54,
    /// JSON: the medium that a CD-ROM drive has from this epoch on. A part of it.
    Medium = 55,
    /// The backup reads nothing at present and works: the epoch field says how many bytes it has
    /// applied.
    Works = 56,
    /// The VM has a process of its own at this end, which has the connection from here on: TLS and
    /// [`Kind::Hello`] once more. To those alone who have said that they can.
    BeginAnew = 57,
    /// A part of a device state that is too large for one message, before [`Kind::DeviceState`].
    DeviceStatePart = 58,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Kind; 48] = [
        Kind::Hello,
        Kind::Welcome,
        Kind::Refuse,
        Kind::File,
        Kind::Prepare,
        Kind::Ready,
        Kind::Pages,
        Kind::DiskWrite,
        Kind::DiskZero,
        Kind::DeviceState,
        Kind::EpochEnd,
        Kind::Acknowledge,
        Kind::Heartbeat,
        Kind::TakeOver,
        Kind::StandDown,
        Kind::StoodDown,
        Kind::Live,
        Kind::Received,
        Kind::Settled,
        Kind::Inbound,
        Kind::Outbound,
        Kind::Log,
        Kind::Progress,
        Kind::Diverged,
        Kind::DiskReads,
        Kind::Written,
        Kind::Turn,
        Kind::TurnAnswer,
        Kind::LogBegins,
        Kind::LogEnds,
        Kind::Compare,
        Kind::Compared,
        Kind::Condemn,
        Kind::MayTakeOver,
        Kind::Snapshot,
        Kind::Restore,
        Kind::Keep,
        Kind::Kept,
        Kind::LetGo,
        Kind::Frames,
        Kind::Presence,
        Kind::Console,
        Kind::MediumAsked,
        Kind::MediumAnswer,
        Kind::Medium,
        Kind::Works,
        Kind::BeginAnew,
        Kind::DeviceStatePart,
    ];

    /// The kind of this number, if there is one.
    pub(super) fn from_byte(byte: u8) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| *kind as u8 == byte)
    }
}
