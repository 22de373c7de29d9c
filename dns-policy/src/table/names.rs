//! Numbers for the names that occur in rules, so that many rule sets can hold them cheaply.
//!
//! A snapshot consists of shards that are shared until they change: adding one
//! name copies one shard, not the whole.

use std::{collections::HashMap, hash::BuildHasher, sync::Arc};

use foldhash::quality::RandomState;

/// Number of a name in one snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct NameId(u32);

const SHARDS: usize = 256;

type Shard = HashMap<Arc<str>, NameId, RandomState>;

/// An immutable snapshot of the names' numbers.
#[derive(Clone, Debug)]
pub(super) struct Names {
    hasher: RandomState,
    shards: Vec<Arc<Shard>>,
}

impl Default for Names {
    fn default() -> Self {
        let empty = Arc::new(Shard::default());
        Self {
            hasher: RandomState::default(),
            shards: vec![empty; SHARDS],
        }
    }
}

impl Names {
    /// Number of `name`, if it occurs in any rule.
    pub(super) fn get(&self, name: &str) -> Option<NameId> {
        self.shards.get(self.shard_of(name))?.get(name).copied()
    }

    /// All names with their numbers.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&Arc<str>, NameId)> {
        self.shards
            .iter()
            .flat_map(|s| s.iter())
            .map(|(name, id)| (name, *id))
    }

    fn shard_of(&self, name: &str) -> usize {
        usize::try_from(self.hasher.hash_one(name) % SHARDS as u64).unwrap_or_default()
    }

    fn edit(&mut self, name: &str) -> Option<&mut Shard> {
        let shard = self.shard_of(name);
        self.shards.get_mut(shard).map(Arc::make_mut)
    }
}

/// The writer's side: counts uses and gives numbers out.
#[derive(Debug, Default)]
pub(super) struct Dictionary {
    names: Names,
    used: HashMap<Arc<str>, (NameId, usize)>,
    text: HashMap<NameId, Arc<str>>,
    free: Vec<NameId>,
    next: u32,
}

impl Dictionary {
    pub(super) fn snapshot(&self) -> Names {
        self.names.clone()
    }

    /// Number of `name`, counting one more use.
    pub(super) fn take(&mut self, name: &str) -> NameId {
        if let Some((id, uses)) = self.used.get_mut(name) {
            *uses += 1;
            return *id;
        }
        let id = self.free.pop().unwrap_or_else(|| {
            let id = NameId(self.next);
            self.next += 1;
            id
        });
        let name: Arc<str> = name.into();
        if let Some(shard) = self.names.edit(&name) {
            shard.insert(Arc::clone(&name), id);
        }
        self.text.insert(id, Arc::clone(&name));
        self.used.insert(name, (id, 1));
        id
    }

    /// Removes one use. The number of a name without uses may go to another name.
    pub(super) fn release(&mut self, id: NameId) {
        let Some(name) = self.text.get(&id).cloned() else {
            return;
        };
        let Some((_, uses)) = self.used.get_mut(&name) else {
            return;
        };
        *uses -= 1;
        if *uses == 0 {
            self.used.remove(&name);
            self.text.remove(&id);
            if let Some(shard) = self.names.edit(&name) {
                shard.remove(&name);
            }
            self.free.push(id);
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.used.len()
    }
}
