//! How many users a key has. A key without users is not in the map.

use std::{borrow::Borrow, collections::BTreeMap};

/// Takes one user away. True if it was the last.
pub(crate) fn release<K: Ord + Borrow<Q>, Q: Ord + ?Sized>(
    users: &mut BTreeMap<K, usize>,
    key: &Q,
) -> bool {
    let Some(left) = users.get_mut(key) else {
        return false;
    };
    *left -= 1;
    let is_unused = *left == 0;
    if is_unused {
        users.remove(key);
    }
    is_unused
}
