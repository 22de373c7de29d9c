//! Blocks of addresses outside of the cluster, to which nothing is wrapped.

use std::{collections::BTreeSet, net::Ipv4Addr};

use shared_maps::{
    user::{Map, MapError},
    world::{MAX_ENTRIES, PRESENT, WorldKey},
};

/// Blocks outside of the cluster, at most as many as the map holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Blocks(BTreeSet<WorldKey>);

impl Blocks {
    /// Of addresses and prefix lengths. `None`: too many, or a prefix length above 32; then no block
    /// is taken.
    pub fn of(blocks: impl IntoIterator<Item = (Ipv4Addr, u8)>) -> Option<Self> {
        let keys = blocks.into_iter();
        let keys = keys.map(|(ip, len)| WorldKey::new(ip.octets(), len));
        let keys: BTreeSet<WorldKey> = keys.collect::<Option<_>>()?;
        let fits = u32::try_from(keys.len()).is_ok_and(|count| count <= MAX_ENTRIES);
        fits.then_some(Self(keys))
    }

    /// Makes the map have these blocks and no others. New ones are added before old ones are removed,
    /// so that no address is outside of both.
    pub(super) fn write(&self, map: &Map<WorldKey, u8>) -> Result<(), MapError> {
        let there: BTreeSet<WorldKey> = map
            .entries()?
            .found
            .into_iter()
            .map(|(key, _)| key)
            .collect();
        let old = there.difference(&self.0);
        let too_many = there.union(&self.0).count();
        let mut old: Vec<&WorldKey> = old.collect();
        // Where not all of them fit together, some old ones make room first.
        let excess =
            too_many.saturating_sub(usize::try_from(map.max_entries()).unwrap_or(usize::MAX));
        for key in old.drain(..excess.min(old.len())) {
            map.remove(key)?;
        }
        for key in self.0.difference(&there) {
            map.set(key, &PRESENT)?;
        }
        for key in old {
            map.remove(key)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(number: u32, len: u8) -> (Ipv4Addr, u8) {
        (Ipv4Addr::from_bits(number << 8), len)
    }

    #[test]
    fn high_scale_blocks_are_taken_whole_or_not_at_all() {
        let most = |count| Blocks::of((0..count).map(|number| block(number, 24)));
        assert!(most(MAX_ENTRIES).is_some());
        assert_eq!(most(MAX_ENTRIES + 1), None);
        assert_eq!(Blocks::of([block(1, 24), block(2, 33)]), None);
        // crd-7 and crd-8
        let twice = Blocks::of([block(1, 24), block(1, 24)]);
        assert_eq!(twice, Blocks::of([block(1, 24)]));
        assert_eq!(Blocks::of([]), Some(Blocks::default()));
    }
}
