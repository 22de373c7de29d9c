//! `--standby`: a second agent that takes over.

use clap::{Args, ValueEnum};

/// Flags of a second agent.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct StandbyArgs {
    /// If another agent owns this node, wait until it ends, and take its place. Give the flag to both agents: an owner
    /// that has it ends itself when it hangs for 10 s. They need the same --bpf-root, --state-dir and node name.
    /// "same": and the same settings, else the second one does not start; "other": it takes over with its own settings
    #[arg(long, value_name = "SETTINGS", value_enum, num_args = 0..=1, require_equals = true, default_missing_value = "same")]
    pub standby: Option<Standby>,
}

/// With which settings a standby takes over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Standby {
    /// Those of the owner.
    Same,
    /// Its own, for an upgrade.
    Other,
}
