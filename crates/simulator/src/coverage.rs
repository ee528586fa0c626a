//! The coverage of the schedules: a simulator that never gets into trouble proves
//! nothing.

use serde::Serialize;

macro_rules! coverage {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The number of times that each interesting thing happened.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
        pub struct Coverage {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Coverage {
            /// Adds what another schedule reached.
            pub fn add(&mut self, other: &Coverage) {
                $(self.$name += other.$name;)*
            }

            /// Every counter by name.
            pub fn counts(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)*]
            }
        }
    };
}

coverage! {
    /// Epochs that were committed.
    commits,
    /// Frames that left.
    frames,
    /// A backup went live.
    takeovers,
    /// A backup went live from the end of its log.
    takeovers_in_lockstep,
    /// A VM turned to lockstep while it was protected.
    turns_to_lockstep,
    /// A VM turned to checkpoints while it was protected.
    turns_to_checkpoints,
    /// A backup carried a turn out.
    turns_applied,
    /// For a turn a guest went on in another QEMU.
    guests_moved,
    /// A turn was not begun: something of another was on its way.
    turns_refused_at_once,
    /// A backup refused a turn.
    turns_refused,
    /// A backup did not answer in time whether it can turn.
    turns_unanswered,
    /// A primary could not do its part of a turn.
    turns_failed,
    /// No epoch ended in time for a turn to be its end.
    turns_not_captured,
    /// The commit of a turn did not come in time, or not any more.
    turns_uncommitted,
    /// A backup heard that a turn is called off.
    turns_called_off,
    /// The QEMU that a backup had prepared for a turn died.
    others_died,
    /// A backup went live that had been told of a turn which it had not committed.
    takeovers_before_turn,
    /// A backup contested the VM with a turn that it had committed, and not carried out.
    contests_in_turn,
    /// In a turn a host lost its power.
    powerless_in_turn,
    /// In a turn a daemon died.
    daemons_died_in_turn,
    /// In a turn a QEMU died, hung or did nothing any more.
    qemus_failed_in_turn,
    /// In a turn a host was cut off from another.
    cut_in_turn,
    /// In a turn the arbiter was away.
    arbiter_away_in_turn,
    /// In a turn a connection broke.
    connections_broken_in_turn,
    /// In a turn a host stood still.
    stalled_in_turn,
    /// In a turn a disk hung or failed.
    disks_failed_in_turn,
    /// In a turn a backup did not follow its log.
    diverged_in_turn,
    /// In a turn the epochs and the log came late or not.
    data_late_in_turn,
    /// In a turn a path failed.
    paths_failed_in_turn,
    /// In a turn a planned fail-over was asked for.
    handed_over_in_turn,
    /// In a turn the operator ended protection.
    unprotected_in_turn,
    /// In a turn a part failed for good.
    lost_for_good_in_turn,
    /// Batches of log that came to a backup.
    batches,
    /// A backup's QEMU did not follow its log.
    diverged,
    /// A primary won the arbiter and went on alone.
    primaries_alone,
    /// Both sides of a session asked the arbiter.
    contested_by_both,
    /// A host that ran the VM was told that another has it.
    primaries_halted,
    /// A loser kept its guest.
    frozen,
    /// A loser that kept its guest got the VM back.
    handed_back,
    /// A winner that had nothing of the VM, and knew of no grant, returned it when it was asked.
    grants_returned,
    /// A winner wrote its record after it had handed the VM back.
    late_records,
    /// A winner's record was being written when its disk, its daemon or its power failed.
    records_uncertain,
    /// It was there all the same.
    records_unheard,
    /// A host failed as it wrote a record.
    records_torn,
    /// A host that had claimed the VM failed before its guest was started.
    starts_in_vain,
    /// A grant that came too late was returned.
    late_grants_returned,
    /// The arbiter did not answer a primary.
    unreachable_to_primary,
    /// The arbiter did not answer a backup.
    unreachable_to_backup,
    /// The arbiter granted, and the answer was lost.
    grant_unheard,
    /// An acknowledgement came to a primary that contested already.
    released_while_contesting,
    /// A late acknowledgement released output although the backup was live: the
    /// same bytes, from two hosts.
    released_after_takeover,
    /// A planned fail-over began.
    hand_overs,
    /// A planned fail-over failed and the guest ran on where it was.
    hand_overs_undone,
    /// A backup forgot the VM because the operator ended protection.
    stood_down,
    /// Ending protection turned into a contest.
    stand_downs_contested,
    /// The end of a session was heard of when another one was under way.
    late_losses,
    /// A backup took its time to forget the VM.
    long_forgettings,
    /// A QEMU died under a host that lives.
    guest_deaths,
    /// A QEMU that seemed to hang was to be taken over.
    guest_hangs,
    /// A sick guest stayed where it was: its backup could not go on with it.
    sick_held_back,
    /// A backup said that it could not take over.
    backups_unfit,
    /// A backup that could not take over for long was given up for another host.
    backups_replaced,
    /// A backup that waited for the arbiter let go by its former primary's word.
    let_go,
    /// A standby could not serve any more.
    standbys_failed,
    /// A host came back to its senses after a stall.
    stalls,
    /// A guest did nothing any more, and could not be saved.
    sick_guests,
    /// A backup's disk answered nothing for a while.
    hung_disks,
    /// The disk of a backup's records answered nothing for a while.
    hung_records,
    /// A backup's disk failed what was written to it.
    failed_writes,
    /// An epoch behind one that could not be applied was dropped.
    skipped_epochs,
    /// The data of a session did not get through, or was not read, and its heartbeats were.
    data_stalls,
    /// A backup that was heard, and acknowledged nothing, was given up.
    backups_useless,
    /// A write of the guest waited for room on its way to the backup.
    writes_held_up,
    /// A backup had so much to apply that it read nothing.
    backups_full,
    /// Output waited, and nothing was captured, for want of room on the way.
    outputs_held_up,
    /// A part failed for good.
    lasting_faults,
    /// A look at a VM whose output waited for longer than an epoch may take on which nothing moves.
    slow_epochs,
    /// Hosts that lost their power.
    power_losses,
    /// All hosts had lost their power.
    all_powerless,
    /// No host could go on with the VM any more.
    losses,
    /// The VM was brought up again from the image named valid.
    recoveries,
    /// The image named valid had been a mirror.
    recoveries_from_mirror,
    /// A message was damaged on its way.
    damaged,
    /// A disk write came before the end of the epoch before its own.
    overlaps,
    /// A backup went live and dropped what it had of an epoch that was not whole.
    partial_epochs_dropped,
    /// A backup that went live sent a frame of a committed epoch.
    frames_resent,
    /// A frame that was sent again was one that the outside had not seen.
    frames_rescued,
    /// The VM was protected again after it had lost its protection.
    reprotections,
    /// Three hosts ran the VM, one after the other.
    ran_on_three_hosts,
    /// A sole owner's lease ran out.
    leases_run_out,
    /// A sole owner whose lease ran out went on: the VM was still its own.
    leases_renewed_late,
    /// Output waited for a lease for good.
    frames_without_lease,
    /// The VM was forced onto a host while its owner was silent.
    forced,
    /// Its owner's clock was not as fast as that of the host that waited for its lease to end.
    forced_by_another_clock,
    /// It was not forced there, for its owner lived.
    forces_refused,
    /// One of several paths failed.
    paths_failed,
    /// A host found that a path was down.
    paths_down,
    /// The data went on over another path.
    data_moved,
    /// Work that took several times as long, for its host's processors are slow.
    slowed,
    /// A sole owner stood still, and its clock with it.
    clocks_stopped,
    /// A sole owner was told that another host has the VM.
    sole_owners_halted,
    /// Faults that struck.
    faults,
    /// Epochs of a group of several VMs that were closed.
    group_epochs,
    /// Faults that struck a group.
    group_faults,
    /// The backup of a group asked for it.
    group_contests,
    /// The primary of a group went on alone.
    groups_alone,
    /// A group that was lost was kept.
    groups_frozen,
    /// A member's QEMU died on the primary.
    group_qemus_died,
    /// A member's errand failed, and no other's.
    group_errands_failed,
    /// Members that went on, on the backup.
    group_members_live,
    /// A member that could not be started, while the others went on as their former host was dead.
    group_members_left_out,
    /// Members whose copy was forgotten.
    group_members_forgotten,
    /// Members that were won, and returned with their group.
    group_members_returned,
    /// Groups that were handed back.
    groups_handed_back,
    /// The arbiter did not answer about a group.
    group_arbiter_silent,
    /// Snapshots of a cluster that came to exist.
    snapshots_complete,
    /// Snapshots that were given up.
    snapshots_given_up,
    /// A store never said whether a snapshot was there.
    snapshots_unknown,
    /// Snapshots that were ordered while another one was taken.
    snapshots_at_once,
    /// Frames in flight across a cut, which were logged.
    frames_in_flight,
    /// Frames from behind a cut that waited for their receiver's snapshot.
    frames_held_for_a_cut,
    /// A member was paused since another's frame was faster than the coordinator.
    cuts_before_the_coordinator,
    /// A member let a snapshot pass that nobody had prepared there.
    snapshots_passed,
    /// A member had met a later snapshot than the one that it was told to take.
    snapshots_missed,
    /// Frames of a life of the cluster that is over.
    frames_of_another_life,
    /// A member gave a snapshot up since its coordinator was silent.
    cohorts_without_coordinator,
    /// A manifest was written, and whoever wrote it did not hear so.
    manifests_unheard,
    /// The daemon of a coordinator died.
    coordinators_died,
    /// Restores that were done.
    restores_done,
    /// Restores that failed.
    restores_failed,
    /// The snapshot was found not to be whole while members loaded.
    restores_refused,
    /// A restore was not begun: a member ran somewhere, or its owner did not answer.
    restores_not_begun,
    /// A restore had failed while a host that was not heard still ran its member.
    restores_failed_beside_a_member,
    /// It was decided that the members of a restore stay.
    restores_settled,
    /// A member whose coordinator was silent gave the restore up for all.
    restores_given_up_by_a_member,
    /// A member that ran was stopped for its restore's sake.
    restored_stopped_again,
    /// A restored VM outlived its daemon, and went on.
    restored_outlived_daemon,
    /// A member whose coordinator was silent asked whether it stays.
    members_asked,
    /// It was told that it does.
    members_settled_by_arbiter,
    /// It was told that it does not.
    members_given_up_by_arbiter,
    /// Members had no network any more, since one was started in a later life of the cluster.
    members_without_network,
    /// An operator did something else before what was ordered had ended.
    operators_impatient,
    /// Orders and reports that came after those of the next connection.
    cluster_messages_late,
    /// Orders and reports that were lost with a connection.
    cluster_messages_lost,
    /// The arbiter answered nothing about a cluster.
    cluster_arbiter_silent,
    /// It did as it was asked, and the answer was lost.
    cluster_answers_lost,
    /// Faults that struck a cluster.
    cluster_faults,
    /// Faults of a cluster that stayed.
    cluster_faults_that_stay,
}
