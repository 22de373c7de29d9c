//! Tests of the tier `netns` that keep both CPUs busy: no other test may run at the same time. Needs root.

mod dns_quota;
mod hostile;
