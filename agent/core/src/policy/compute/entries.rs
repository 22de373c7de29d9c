//! Entries of a policy map, as policy makes them.

use std::collections::BTreeMap;

use shared_maps::policy::{PolicyKey, PolicyValue};

/// Entries of a policy map about one identity.
pub(crate) type Entries = BTreeMap<PolicyKey, PolicyValue>;

/// Splits a range of ports into aligned blocks: (first port, bits that count).
pub(crate) fn blocks(first: u16, last: u16) -> Vec<(u16, u8)> {
    let mut found = Vec::new();
    let (mut at, end) = (u32::from(first), u32::from(last) + 1);
    while at < end {
        let aligned = if at == 0 {
            16
        } else {
            at.trailing_zeros().min(16)
        };
        let fits = (end - at).ilog2();
        let wild = aligned.min(fits);
        let port = u16::try_from(at).expect("below 65536: the range ends there");
        found.push((port, u8::try_from(16 - wild).expect("at most 16")));
        at += 1 << wild;
    }
    found
}
