//! ADDs of the CNI plugin that failed.

use daemon::label;

label! {
    /// Why a pod did not start.
    AddFailure = "reason" {
        /// The agent is starting, stopping, or too busy to answer in time.
        Agent => "agent",
        /// The interface cannot be under policy: not a veth or netkit pair, a second way out, or an
        /// address that is not the pod's.
        Interface => "interface",
        /// The list of pods cannot be written.
        Disk => "disk",
        /// Policy was not in force in time; the labels of the pod are not known, for example.
        Policy => "policy",
    }
}
