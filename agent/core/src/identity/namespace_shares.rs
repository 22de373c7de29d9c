//! How many numbers of the cluster each namespace may have: a tenant that changes the labels of its pods all the time
//! cannot use up the range.

use std::collections::BTreeMap;

use crate::labels::LabelSet;

/// How many numbers a namespace may have in any case.
const FLOOR: u64 = 64;

/// Objects by the namespace of their labels.
#[derive(Debug, Default)]
pub(crate) struct NamespaceShares {
    objects: BTreeMap<String, u64>,
    total: u64,
}

fn namespace(labels: &LabelSet) -> &str {
    labels.namespace().unwrap_or_default()
}

impl NamespaceShares {
    pub(crate) fn add(&mut self, labels: &LabelSet) {
        let objects = self.objects.entry(namespace(labels).to_owned());
        *objects.or_default() += 1;
        self.total += 1;
    }

    pub(crate) fn remove(&mut self, labels: &LabelSet) {
        let name = namespace(labels);
        if let Some(objects) = self.objects.get_mut(name) {
            *objects -= 1;
            self.total -= 1;
            if *objects == 0 {
                self.objects.remove(name);
            }
        }
    }

    /// Whether the namespace of these labels may have one more of `size` numbers: it must have fewer than are free.
    /// So one namespace gets at most half of the numbers, and each further namespace at most half of the rest.
    pub(crate) fn has_room(&self, labels: &LabelSet, size: u64) -> bool {
        let own = self.objects.get(namespace(labels)).copied().unwrap_or(0);
        own < size.saturating_sub(self.total).max(FLOOR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(namespace: &str, app: u64) -> LabelSet {
        LabelSet::parse(&[
            &format!("k8s:app={app}"),
            &format!("k8s:io.kubernetes.pod.namespace={namespace}"),
        ])
        .unwrap()
    }

    /// Adds as many objects as the namespace may have.
    fn fill(shares: &mut NamespaceShares, namespace: &str, size: u64) -> u64 {
        let mut added = 0;
        while shares.has_room(&set(namespace, added), size) {
            shares.add(&set(namespace, added));
            added += 1;
        }
        added
    }

    #[test]
    fn namespaces_that_take_all_they_get_leave_room_for_the_next_one() {
        let mut shares = NamespaceShares::default();
        assert_eq!(fill(&mut shares, "a", 1000), 500);
        assert_eq!(fill(&mut shares, "b", 1000), 250);
        assert_eq!(fill(&mut shares, "c", 1000), 125);
        assert!(shares.has_room(&set("quiet", 0), 1000));
        shares.remove(&set("a", 0));
        assert!(!shares.has_room(&set("a", 0), 1000));
        for app in 0..250 {
            shares.remove(&set("b", app));
        }
        assert_eq!(fill(&mut shares, "b", 1000), 188);
        // Labels without a namespace are one more tenant.
        assert!(shares.has_room(&LabelSet::parse(&["k8s:app=x"]).unwrap(), 1000));
    }

    #[test]
    fn a_small_range_is_for_whoever_comes_first() {
        let mut shares = NamespaceShares::default();
        assert_eq!(fill(&mut shares, "a", 10), FLOOR);
    }
}
