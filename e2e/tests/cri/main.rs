//! The tier `cri`: pods that Debian's containerd starts through the CNI plugin, and
//! containers of Debian's podman. Needs root.

mod agent_away;
mod bridge;
mod configuration;
mod container_attacks;
mod containers;
mod netpol;
mod starts;
