//! The map of blocks outside of the cluster.

use std::collections::BTreeSet;

use agent_core::high_scale::blocks::Blocks;
use shared_maps::{
    user::{Map, MapError},
    world::{PRESENT, WorldKey},
};

/// Makes the map have these blocks and no others. New ones are added before old ones are removed, so
/// that no address is outside of both.
pub(super) fn write(blocks: &Blocks, map: &Map<WorldKey, u8>) -> Result<(), MapError> {
    let wanted = blocks.keys();
    let there = map.entries()?.found.into_iter();
    let there: BTreeSet<WorldKey> = there.map(|(key, _)| key).collect();
    let mut old: Vec<&WorldKey> = there.difference(wanted).collect();
    // Where not all of them fit together, some old ones make room first.
    let most = usize::try_from(map.max_entries()).unwrap_or(usize::MAX);
    let excess = there.union(wanted).count().saturating_sub(most);
    for key in old.drain(..excess.min(old.len())) {
        map.remove(key)?;
    }
    for key in wanted.difference(&there) {
        map.set(key, &PRESENT)?;
    }
    for key in old {
        map.remove(key)?;
    }
    Ok(())
}
