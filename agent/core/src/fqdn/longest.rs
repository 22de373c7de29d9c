//! The longest time for which a learned address counts.

/// Longest TTL that is accepted, in seconds: a week (RFC 8767, 4).
pub(crate) const MAX_TTL: u32 = 604_800;
