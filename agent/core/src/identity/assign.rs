//! Numbers for label sets of documents, where no API server has objects of them.
//!
//! The rule is the same as for agents that create objects: a label set gets the first candidate that no
//! other label set has. Label sets are taken in their order, so that the same documents give the same
//! numbers.

use std::collections::{BTreeMap, BTreeSet};

use shared_maps::IdentityId;

use crate::labels::LabelSet;

/// Every candidate of a label set has other labels.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{labels}: other labels have every number that it may get; use a larger --identity-range, or \
     remove CiliumIdentity documents that no pod needs"
)]
pub struct RangeFull {
    /// The label set in words.
    labels: String,
}

/// Numbers for those of `sets` that have none in `known`. `candidates` gives the numbers that a label set
/// may have, the first choice first: [`candidates`](super::cluster::candidates), then
/// [`further_candidates`](super::cluster::further_candidates).
pub fn assign<C: Iterator<Item = IdentityId>>(
    sets: &BTreeSet<LabelSet>,
    known: &BTreeMap<IdentityId, LabelSet>,
    candidates: impl Fn(&LabelSet) -> C,
) -> Result<BTreeMap<IdentityId, LabelSet>, RangeFull> {
    let numbered: BTreeSet<&LabelSet> = known.values().collect();
    let mut assigned = BTreeMap::new();
    for labels in sets.iter().filter(|labels| !numbered.contains(labels)) {
        let is_free = |id: &IdentityId| !known.contains_key(id) && !assigned.contains_key(id);
        let id = candidates(labels).find(is_free).ok_or_else(|| RangeFull {
            labels: labels.texts().join(","),
        })?;
        assigned.insert(id, labels.clone());
    }
    Ok(assigned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str) -> LabelSet {
        LabelSet::parse(&[text]).unwrap()
    }

    /// Three numbers, the same for all.
    fn candidates(_: &LabelSet) -> impl Iterator<Item = IdentityId> + use<> {
        (300..303).map(IdentityId)
    }

    #[test]
    fn a_set_gets_its_first_candidate_that_no_other_set_has() {
        let [a, b, c] = ["k8s:app=a", "k8s:app=b", "k8s:app=c"].map(set);
        let sets = BTreeSet::from([c.clone(), b.clone(), a.clone()]);
        let known = BTreeMap::from([(IdentityId(301), b)]);
        let assigned = assign(&sets, &known, candidates).unwrap();
        let wanted = BTreeMap::from([(IdentityId(300), a), (IdentityId(302), c)]);
        assert_eq!(assigned, wanted);
    }

    #[test]
    fn a_full_range_names_the_labels_and_the_remedy() {
        let sets = ["k8s:app=a", "k8s:app=b", "k8s:app=c", "k8s:app=d"];
        let sets = BTreeSet::from(sets.map(set));
        let error = assign(&sets, &BTreeMap::new(), candidates).unwrap_err();
        let error = error.to_string();
        assert!(
            error.starts_with("k8s:app=d: other labels") && error.contains("--identity-range"),
            "{error}"
        );
    }
}
