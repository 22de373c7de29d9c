//! The tier `cri`: pods that Debian's containerd starts through the CNI plugin. Needs root.

mod agent_away;
mod bridge;
mod configuration;
mod netpol;
mod starts;
