//! The grammar of what is watched: `top` and `events`.

use clap::Args;

pub(super) const TOP_HELP: &str = "\
Drawn anew every second; `q` ends it. Behind a pipe it is one page, with --json the
status. Two figures with a stroke are the median and the 99th percentile, a third
is the longest. The dashboard shows the same in a browser, where the host's
configuration has [api].";

pub(super) const EVENTS_HELP: &str = "\
What this host's daemon has seen since its start: protection that begins, is lost
and comes back, take-overs with their phases, disk errors, snapshots, the arbiter.
It keeps the last 2048. Numbers grow, over restarts too. With --json and --follow
each event is one line of JSON.

Examples:
  understudy events
  understudy events --follow --vm db
  understudy events --json --after 1795000000123";

/// `events`
#[derive(Debug, Args)]
pub struct EventsArgs {
    /// Go on with what happens next, until interrupted.
    #[arg(long, short)]
    pub follow: bool,
    /// Only those about this VM.
    #[arg(long, value_name = "NAME")]
    pub vm: Option<String>,
    /// Only those after the event of this number.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub after: u64,
}
