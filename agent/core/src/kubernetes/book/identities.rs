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

    /// What changed since the last call; removed numbers come first. Duplicates are returned as such: they give
    /// no number.
    pub(super) fn changes(&mut self) -> Vec<SourceEvent<CiliumIdentity>> {
        let (mut gone, mut put) = (Vec::new(), Vec::new());
        for id in std::mem::take(&mut self.touched) {
            let now = self.objects.get(&id).and_then(|object| self.given(object));
            let before = match &now {
                Some(object) => self.returned.insert(id, object.clone()),
                None => self.returned.remove(&id),
            };
            match now {
                Some(object) if before.as_ref() != Some(&object) => {
                    let list = if object.is_duplicate {
                        &mut gone
                    } else {
                        &mut put
                    };
                    list.push(SourceEvent::Apply(object));
                }
                None if before.is_some() => gone.push(SourceEvent::Delete(id.0.to_string())),
                _ => {}
            }
        }
        gone.append(&mut put);
        gone
    }

    /// The object as [`Self::changes`] returns it: as one that counts, or as a duplicate. `None` for a document that
    /// does not count. An object of the API server is no duplicate if only documents of this node precede it: other
    /// nodes use its number.
    fn given(&self, object: &CiliumIdentity) -> Option<CiliumIdentity> {
        let numbers = self.numbers.get(&object.labels)?;
        if numbers.first()?.id == object.id {
            return Some(object.clone());
        }
        let of_server = |id: &IdentityId| self.objects.get(id).is_some_and(|one| !one.is_document);
        let first = numbers.iter().map(|one| one.id).find(of_server)?;
        let is_duplicate = !object.is_document && first != object.id;
        is_duplicate.then(|| CiliumIdentity {
            is_duplicate,
            ..object.clone()
        })
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
