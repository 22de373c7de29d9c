//! Tests of the tier `netns` that count lost queries: at most two of them may run at the same time.
//! Needs root.

mod ha_promises;
mod restart_storm;
mod under_cilium_restart;
