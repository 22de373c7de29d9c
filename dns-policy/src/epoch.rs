//! Runs of an agent, which leases and revocations belong to.

/// One run of an agent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Epoch {
    /// The kernel's boot id (`/proc/sys/kernel/random/boot_id`).
    pub boot_id: String,
    /// Starts of the agent since boot, this one included; 0 for an agent that has no epochs.
    pub start: u64,
}
