//! Numbers of label sets. Of two objects with one label set the older counts, then the one with the
//! lower number.

use std::collections::{BTreeMap, BTreeSet};

use shared_maps::IdentityId;

use crate::{
    identity::cluster_object::{CiliumIdentity, Precedence},
    labels::LabelSet,
    source_event::SourceEvent,
};

/// Objects by number, and numbers by label set.
#[derive(Debug, Default)]
pub(super) struct Identities {
    objects: BTreeMap<IdentityId, CiliumIdentity>,
    /// The first of each set counts.
    numbers: BTreeMap<LabelSet, BTreeSet<Precedence>>,
    touched: BTreeSet<IdentityId>,
    /// Objects as they were returned last.
    returned: BTreeMap<IdentityId, CiliumIdentity>,
}

impl Identities {
    pub(super) fn put(&mut self, object: CiliumIdentity) {
        self.take(object.id);
        let numbers = self.numbers.entry(object.labels.clone()).or_default();
        numbers.insert(object.precedence());
        self.touched.extend(numbers.iter().map(|one| one.id));
        self.objects.insert(object.id, object);
    }

    /// Removes the identity whose number this is.
    pub(super) fn remove(&mut self, number: &str) {
        if let Ok(number) = number.parse() {
            self.take(IdentityId(number));
        }
    }

    fn take(&mut self, id: IdentityId) {
        let Some(object) = self.objects.remove(&id) else {
            return;
        };
        self.touched.insert(id);
        if let Some(numbers) = self.numbers.get_mut(&object.labels) {
            numbers.remove(&object.precedence());
            self.touched.extend(numbers.iter().map(|one| one.id));
            if numbers.is_empty() {
                self.numbers.remove(&object.labels);
            }
        }
    }

    /// What changed since the last call; numbers that go come first.
    pub(super) fn changes(&mut self) -> Vec<SourceEvent<CiliumIdentity>> {
        let (mut gone, mut put) = (Vec::new(), Vec::new());
        for id in std::mem::take(&mut self.touched) {
            let counts = |object: &&CiliumIdentity| {
                let numbers = self.numbers.get(&object.labels);
                let first = numbers.and_then(BTreeSet::first);
                first.is_some_and(|first| first.id == id)
            };
            let now = self.objects.get(&id).filter(counts).cloned();
            let before = match &now {
                Some(object) => self.returned.insert(id, object.clone()),
                None => self.returned.remove(&id),
            };
            match now {
                Some(object) if before.as_ref() != Some(&object) => {
                    put.push(SourceEvent::Apply(object));
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
            let mut names = numbers
                .iter()
                .map(|one| format!("CiliumIdentity/{}", one.id.0));
            let first = names.next().unwrap_or_default();
            let others: Vec<String> = names.collect();
            let warning = format!(
                "security-labels: {} has the same ({}): {first} counts (the older, or the lowest \
                 number); remove the others",
                others.join(" and "),
                labels.texts().join(",")
            );
            (first, warning)
        })
    }
}
