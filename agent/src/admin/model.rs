//! What the admin interface gives beyond the core's snapshot. The CLI reads the same types.

use serde::{Deserialize, Serialize};

use crate::{
    core::snapshot::{PolicyView, RejectedView, Summary},
    endpoint::source::Unresolved,
    proxies::ProxyView,
};

/// `/v1/status`
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct Status {
    /// Version of the agent.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// Boot id and start count of this run.
    pub epoch: EpochView,
    /// Sources are synced and rules are given to proxies.
    pub ready: bool,
    /// Counts of the core.
    pub summary: Summary,
    /// Connected proxies.
    pub proxies: Vec<ProxyView>,
    /// `running`, `disabled`, or why it does not run.
    pub builtin_dns_proxy: String,
    /// Endpoint documents that are not in force.
    pub endpoints_unresolved: Vec<Unresolved>,
    /// Files found damaged at the start.
    pub damaged_files: Vec<String>,
    /// What somebody should look at, in words; empty if all is well.
    pub problems: Vec<String>,
}

/// One run of the agent.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct EpochView {
    /// The kernel's boot id.
    pub boot_id: String,
    /// Starts since boot.
    pub start: u64,
}

/// `/v1/policies`
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct Policies {
    /// In force.
    pub policies: Vec<PolicyView>,
    /// Refused.
    pub rejected: Vec<RejectedView>,
}

/// Answer to a change.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Done {
    /// What was done, in words.
    pub message: String,
}

/// Answer to what went wrong.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Failed {
    /// Why, with the remedy.
    pub error: String,
}
