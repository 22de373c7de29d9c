//! Blocks of addresses outside of the cluster, to which nothing is wrapped.

use std::collections::BTreeSet;

use ipnet::Ipv4Net;
use shared_maps::world::{MAX_ENTRIES, WorldKey};

/// Blocks outside of the cluster, at most as many as the map holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Blocks(BTreeSet<WorldKey>);

/// More blocks than the map holds: none of them is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} blocks are more than {MAX_ENTRIES}, so that none of them is used")]
pub struct TooMany(pub usize);

impl Blocks {
    /// The blocks of all objects together. A block that several name counts once.
    pub fn of<'b>(blocks: impl IntoIterator<Item = &'b Ipv4Net>) -> Result<Self, TooMany> {
        let keys = blocks.into_iter();
        let keys =
            keys.filter_map(|block| WorldKey::new(block.network().octets(), block.prefix_len()));
        let keys: BTreeSet<WorldKey> = keys.collect();
        match u32::try_from(keys.len()) {
            Ok(count) if count <= MAX_ENTRIES => Ok(Self(keys)),
            _ => Err(TooMany(keys.len())),
        }
    }

    /// The keys of the map.
    pub fn keys(&self) -> &BTreeSet<WorldKey> {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn high_scale_blocks_are_taken_whole_or_not_at_all() {
        let block = |number: u32| Ipv4Net::new((number << 8).into(), 24).unwrap();
        let most = |count: u32| {
            let blocks: Vec<Ipv4Net> = (0..count).map(block).collect();
            Blocks::of(&blocks).map(|blocks| blocks.keys().len())
        };
        assert_eq!(most(MAX_ENTRIES), Ok(16_384));
        assert_eq!(most(MAX_ENTRIES + 1), Err(TooMany(16_385)));
        // crd-7 and crd-8
        assert_eq!(Blocks::of(&[block(1), block(1)]), Blocks::of(&[block(1)]));
        assert_eq!(Blocks::of(&[]), Ok(Blocks::default()));
    }
}
