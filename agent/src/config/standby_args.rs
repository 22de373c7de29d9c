//! `--standby`: a second agent that takes over.

use std::time::Duration;

use clap::{Args, ValueEnum};
use dns_policy::duration;

/// Flags of a second agent.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct StandbyArgs {
    /// If another agent owns this node, wait until it ends, and take its place. Give the flag to both agents: an owner
    /// that has it ends itself when it hangs for 10 s. They need the same --bpf-root, --state-dir and node name.
    /// "same": and the same settings, else the second one does not start; "other": it takes over with its own settings
    #[arg(long, value_name = "SETTINGS", value_enum, num_args = 0..=1, require_equals = true, default_missing_value = "same")]
    pub standby: Option<Standby>,
    /// Another agent should stand by beside this one all the time: if none does, `status` and the alert
    /// HoldfastStandbyMissing say so
    #[arg(long, requires = "standby")]
    pub standby_expected: bool,
    /// Longest time that a standby waits before it takes over, if several owners in a row died: the fourth takeover
    /// within 10 minutes waits 1 s, and each further one twice as long as the one before. An owner that was asked to end
    /// is followed at once. "0s": no takeover waits
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "30s")]
    pub standby_max_delay: Duration,
}

/// With which settings a standby takes over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Standby {
    /// Those of the owner.
    Same,
    /// Its own, for an upgrade.
    Other,
}
