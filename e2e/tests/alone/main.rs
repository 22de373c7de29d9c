//! Tests of the tier `netns` that keep both CPUs busy or count lost queries: no other test may run
//! beside them. Needs root.

mod dns_quota;
mod ha_promises;
mod hostile;
mod restart_storm;
mod under_cilium_restart;
