//! ADDs of the CNI plugin that failed.

use daemon::label;

label! {
    /// Why a pod did not start.
    AddFailure = "reason" {
        /// The agent is starting, is stopping, or is too busy to answer in time.
        Agent => "agent",
        /// The interface cannot be under policy: it is not a veth or netkit pair, the pod has a
        /// second interface to the outside, or an address is not the pod's.
        Interface => "interface",
        /// The agent cannot write its list of pods to disk.
        Disk => "disk",
        /// Policy was not in force in time, for example because the labels of the pod are not
        /// known.
        Policy => "policy",
    }
}
