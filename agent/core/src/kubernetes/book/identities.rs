//! Numbers of label sets. Of two numbers of one label set the lower counts.

use std::collections::{BTreeMap, BTreeSet};

use shared_maps::IdentityId;

use crate::{
    labels::LabelSet, policy::cluster::identity::CiliumIdentity, source_event::SourceEvent,
};

/// Label sets by number, and numbers by label set.
#[derive(Debug, Default)]
pub(super) struct Identities {
    labels: BTreeMap<IdentityId, LabelSet>,
    numbers: BTreeMap<LabelSet, BTreeSet<IdentityId>>,
    touched: BTreeSet<IdentityId>,
    /// Numbers as they were returned last.
    returned: BTreeMap<IdentityId, LabelSet>,
}

impl Identities {
    pub(super) fn put(&mut self, identity: &CiliumIdentity) {
        self.take(identity.id);
        self.labels.insert(identity.id, identity.labels.clone());
        let numbers = self.numbers.entry(identity.labels.clone()).or_default();
        numbers.insert(identity.id);
        self.touched.extend(numbers.iter());
    }

    /// Removes the identity whose number this is.
    pub(super) fn remove(&mut self, number: &str) {
        if let Ok(number) = number.parse() {
            self.take(IdentityId(number));
        }
    }

    fn take(&mut self, id: IdentityId) {
        let Some(labels) = self.labels.remove(&id) else {
            return;
        };
        self.touched.insert(id);
        if let Some(numbers) = self.numbers.get_mut(&labels) {
            numbers.remove(&id);
            self.touched.extend(numbers.iter());
            if numbers.is_empty() {
                self.numbers.remove(&labels);
            }
        }
    }

    /// What changed since the last call; numbers that go come first.
    pub(super) fn changes(&mut self) -> Vec<SourceEvent<CiliumIdentity>> {
        let (mut gone, mut put) = (Vec::new(), Vec::new());
        for id in std::mem::take(&mut self.touched) {
            let first = |labels: &&LabelSet| {
                let numbers = self.numbers.get(*labels);
                numbers.and_then(BTreeSet::first) == Some(&id)
            };
            let now = self.labels.get(&id).filter(first).cloned();
            let before = match &now {
                Some(labels) => self.returned.insert(id, labels.clone()),
                None => self.returned.remove(&id),
            };
            match now {
                Some(labels) if before.as_ref() != Some(&labels) => {
                    put.push(SourceEvent::Apply(CiliumIdentity { id, labels }));
                }
                None if before.is_some() => gone.push(SourceEvent::Delete(id.0.to_string())),
                _ => {}
            }
        }
        gone.append(&mut put);
        gone
    }

    /// Label sets with several numbers, in words.
    pub(super) fn conflicts(&self) -> impl Iterator<Item = (String, String)> {
        let several = self.numbers.iter().filter(|(_, numbers)| numbers.len() > 1);
        several.map(|(labels, numbers)| {
            let mut names = numbers.iter().map(|id| format!("CiliumIdentity/{}", id.0));
            let first = names.next().unwrap_or_default();
            let others: Vec<String> = names.collect();
            let warning = format!(
                "security-labels: {} has the same ({}): {first} counts, as the lowest number; remove \
                 the other documents",
                others.join(" and "),
                labels.texts().join(",")
            );
            (first, warning)
        })
    }
}
