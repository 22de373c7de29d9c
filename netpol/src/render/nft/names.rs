//! Names of sets and chains: a prefix, and a hash of the content. Equal content has the same name
//! in every run, so that a table that already exists needs no change.

use std::{
    collections::BTreeSet,
    hash::{Hash, Hasher},
};

/// Names that are in use.
#[derive(Debug, Default)]
pub(super) struct Names(BTreeSet<String>);

impl Names {
    /// Returns a name for content that has no name yet. If other content already has the name with
    /// this hash, another name is returned.
    pub(super) fn give(&mut self, prefix: &str, content: &impl Hash) -> String {
        let mut salt = 0;
        loop {
            let mut hasher = Fnv::default();
            hasher.write_u32(salt);
            content.hash(&mut hasher);
            let name = format!("{prefix}_{:016x}", hasher.finish());
            if self.0.insert(name.clone()) {
                return name;
            }
            salt += 1;
        }
    }

    /// Makes a name free for other content.
    pub(super) fn release(&mut self, name: &str) {
        self.0.remove(name);
    }
}

/// FNV-1a, 64 bits.
struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Hasher for Fnv {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A content of which all values have the same hash.
    struct Colliding;

    impl Hash for Colliding {
        fn hash<H: Hasher>(&self, _: &mut H) {}
    }

    #[test]
    fn content_with_the_same_hash_gets_another_name() {
        let mut names = Names::default();
        let first = names.give("i4", &Colliding);
        let second = names.give("i4", &Colliding);
        assert_ne!(first, second);
        names.release(&first);
        assert_eq!(names.give("i4", &Colliding), first);
    }

    #[test]
    fn a_name_is_the_same_in_every_run() {
        let name = Names::default().give("g4", &"app=web");
        assert_eq!(name, "g4_db880395e22f7b1c");
    }
}
