//! Label sets by owner: of nearly all prefixes there is one, of a shared address thousands.

use foldhash::HashMap;

use super::metadata::Owner;
use crate::labels::LabelSet;

/// More owners than these are kept in a table.
const FEW: usize = 8;

/// Label sets by owner.
#[derive(Clone, Debug)]
pub(super) enum ByOwner {
    Few(Vec<(Owner, LabelSet)>),
    Many(HashMap<Owner, LabelSet>),
}

impl Default for ByOwner {
    fn default() -> Self {
        Self::Few(Vec::new())
    }
}

impl ByOwner {
    /// Sets what an owner says; gives what it said before.
    pub(super) fn insert(&mut self, owner: Owner, labels: LabelSet) -> Option<LabelSet> {
        match self {
            Self::Few(list) => {
                if let Some((_, old)) = list.iter_mut().find(|(known, _)| *known == owner) {
                    return Some(std::mem::replace(old, labels));
                }
                if list.len() < FEW {
                    if list.is_empty() {
                        list.reserve_exact(1);
                    }
                    list.push((owner, labels));
                } else {
                    let mut table: HashMap<_, _> = std::mem::take(list).into_iter().collect();
                    table.insert(owner, labels);
                    *self = Self::Many(table);
                }
                None
            }
            Self::Many(table) => table.insert(owner, labels),
        }
    }

    /// An owner says nothing any more; gives what it said.
    pub(super) fn remove(&mut self, owner: &Owner) -> Option<LabelSet> {
        match self {
            Self::Few(list) => {
                let at = list.iter().position(|(known, _)| known == owner)?;
                Some(list.swap_remove(at).1)
            }
            Self::Many(table) => {
                let old = table.remove(owner);
                // Not at FEW: an owner that is added and removed repeatedly must not copy the table each time.
                if table.len() <= FEW / 2 {
                    *self = Self::Few(std::mem::take(table).into_iter().collect());
                }
                old
            }
        }
    }

    /// What an owner says.
    pub(super) fn get(&self, owner: &Owner) -> Option<&LabelSet> {
        match self {
            Self::Few(list) => {
                let found = list.iter().find(|(known, _)| known == owner);
                found.map(|(_, labels)| labels)
            }
            Self::Many(table) => table.get(owner),
        }
    }

    /// All owners, in no order.
    pub(super) fn owners(&self) -> impl Iterator<Item = &Owner> {
        let (list, table) = match self {
            Self::Few(list) => (Some(list), None),
            Self::Many(table) => (None, Some(table)),
        };
        let list = list.into_iter().flatten().map(|(owner, _)| owner);
        list.chain(table.into_iter().flat_map(HashMap::keys))
    }

    /// Whether no owner has an entry.
    pub(super) fn is_empty(&self) -> bool {
        match self {
            Self::Few(list) => list.is_empty(),
            Self::Many(table) => table.is_empty(),
        }
    }
}
