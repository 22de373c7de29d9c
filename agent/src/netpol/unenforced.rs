//! Policies of kinds that nftables does not enforce: they are named, never silently ignored.

use std::collections::{BTreeMap, BTreeSet};

use super::metrics::UnenforcedKind;

/// Maximum policies that a problem names.
const NAMED: usize = 5;

/// Policies that are not enforced, by kind: `namespace/name`, or `name` if they have no namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Unenforced(BTreeMap<&'static str, BTreeSet<String>>);

impl Unenforced {
    /// Records a document by its key. Returns whether it is a policy that is not enforced.
    pub(super) fn put(&mut self, key: &str) -> bool {
        let Some((kind, name)) = split(key) else {
            return false;
        };
        self.0.entry(kind).or_default().insert(name.to_owned());
        true
    }

    /// Removes a document by its key.
    pub(super) fn remove(&mut self, key: &str) {
        if let Some((kind, name)) = split(key)
            && let Some(names) = self.0.get_mut(kind)
        {
            names.remove(name);
        }
    }

    /// Each kind with the number of its policies.
    pub(super) fn counts(&self) -> impl Iterator<Item = (&'static str, usize)> {
        let count = |kind| self.0.get(kind).map_or(0, BTreeSet::len);
        let kinds = UnenforcedKind::ALL.map(UnenforcedKind::as_str);
        kinds.into_iter().map(move |kind| (kind, count(kind)))
    }

    /// A text for each kind of which there are policies.
    pub(super) fn problems(&self) -> impl Iterator<Item = String> {
        let kinds = self.0.iter().filter(|(_, names)| !names.is_empty());
        kinds.map(|(kind, names)| {
            let named: Vec<&str> = names.iter().take(NAMED).map(String::as_str).collect();
            let more = match names.len() - named.len() {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            format!(
                "{kind} {}{more}: not enforced on this node, which has NetworkPolicies only; run \
                 `holdfast-agent run` on a node whose kernel has what it needs, or write NetworkPolicies",
                named.join(", ")
            )
        })
    }
}

fn split(key: &str) -> Option<(&'static str, &str)> {
    let (kind, name) = key.split_once('/')?;
    let mut kinds = UnenforcedKind::ALL.map(UnenforcedKind::as_str).into_iter();
    Some((kinds.find(|known| *known == kind)?, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_policy_counts_and_a_few_are_named() {
        let mut unenforced = Unenforced::default();
        assert!(!unenforced.put("NetworkPolicy/shop/web"));
        for number in 0..7 {
            assert!(unenforced.put(&format!("CiliumNetworkPolicy/shop/p{number}")));
        }
        assert!(unenforced.put("EgressFirewall/shop/default"));
        unenforced.remove("EgressFirewall/shop/default");
        let counts: Vec<_> = unenforced.counts().map(|(_, count)| count).collect();
        assert_eq!(counts, [7, 0, 0]);
        let problems: Vec<_> = unenforced.problems().collect();
        assert_eq!(problems.len(), 1);
        assert!(
            problems[0].starts_with("CiliumNetworkPolicy shop/p0, shop/p1, shop/p2, shop/p3, shop/p4 and 2 more: not enforced"),
            "{problems:?}"
        );
    }
}
