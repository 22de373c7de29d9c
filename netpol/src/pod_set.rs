//! The pods that a [`PodSet`] selects, and an index of such sets.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use crate::{
    contiv::{InNamespaces, PodSet},
    pod::Pod,
    selector::{Condition, Selector},
};

/// The label that the API server gives to every namespace. Its value is the namespace's name.
const NAMESPACE_NAME: &str = "kubernetes.io/metadata.name";

/// What selectors can know of a pod's namespace.
#[derive(Clone, Debug)]
pub(crate) enum NamespaceLabels<'a> {
    /// Labels of its object.
    Known(&'a BTreeMap<String, String>),
    /// The namespace has no object, so only its name is known.
    Unknown(BTreeMap<String, String>),
}

impl NamespaceLabels<'_> {
    /// A namespace of this name without an object.
    pub(crate) fn unknown(name: &str) -> Self {
        Self::Unknown([(NAMESPACE_NAME.to_owned(), name.to_owned())].into())
    }

    const fn labels(&self) -> &BTreeMap<String, String> {
        match self {
            Self::Known(labels) => labels,
            Self::Unknown(name) => name,
        }
    }

    /// Whether a selector selects the namespace. If only the name is known, only requirements on
    /// the name can hold: without the object, no label is known to be absent.
    fn is_selected(&self, selector: &Selector) -> bool {
        let mut requirements = selector.requirements();
        let is_known = matches!(self, Self::Known(_));
        (is_known || requirements.all(|requirement| requirement.key == NAMESPACE_NAME))
            && selector.matches(self.labels())
    }
}

impl PodSet {
    /// Whether the set selects a pod whose namespace has these labels.
    pub(crate) fn selects(&self, pod: &Pod, namespace: &NamespaceLabels<'_>) -> bool {
        self.selects_in(&pod.id.namespace, namespace) && self.pods.matches(&pod.labels)
    }

    /// Whether the set may select pods of the namespace with this name and these labels.
    pub(crate) fn selects_in(&self, name: &str, namespace: &NamespaceLabels<'_>) -> bool {
        match &self.namespaces {
            InNamespaces::Named(own) => **own == *name,
            InNamespaces::Selected(selector) => namespace.is_selected(selector),
        }
    }
}

/// Sets of pods, indexed by a label that each requires. From the labels of a pod, it finds the few
/// sets that may select the pod. `T` identifies a set.
#[derive(Debug)]
pub(crate) struct PodSetIndex<T> {
    by_anchor: BTreeMap<Anchor, BTreeSet<T>>,
    anchors: BTreeMap<T, Vec<Anchor>>,
}

/// A property that a pod or its namespace must have.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Anchor {
    Nothing,
    Namespace(Arc<str>),
    NamespaceLabel(String, String),
    Label(String, String),
    LabelIn(Arc<str>, String, String),
}

impl<T> Default for PodSetIndex<T> {
    fn default() -> Self {
        Self {
            by_anchor: BTreeMap::new(),
            anchors: BTreeMap::new(),
        }
    }
}

impl<T: Ord + Clone> PodSetIndex<T> {
    /// Adds a set that is not in the index.
    pub(crate) fn insert(&mut self, id: &T, set: &PodSet) {
        let anchors = self.rarest(set);
        for anchor in &anchors {
            let sets = self.by_anchor.entry(anchor.clone()).or_default();
            sets.insert(id.clone());
        }
        self.anchors.insert(id.clone(), anchors);
    }

    /// Removes a set.
    pub(crate) fn remove(&mut self, id: &T) {
        for anchor in self.anchors.remove(id).unwrap_or_default() {
            if let Some(sets) = self.by_anchor.get_mut(&anchor) {
                sets.remove(id);
                if sets.is_empty() {
                    self.by_anchor.remove(&anchor);
                }
            }
        }
    }

    /// The sets that may select a pod whose namespace has these labels: all sets that select it,
    /// and some others.
    pub(crate) fn candidates(&self, pod: &Pod, namespace: &NamespaceLabels<'_>) -> BTreeSet<T> {
        let name = &pod.id.namespace;
        let own = |(key, value): (&String, &String)| {
            [
                Anchor::Label(key.clone(), value.clone()),
                Anchor::LabelIn(Arc::clone(name), key.clone(), value.clone()),
            ]
        };
        let of_namespace = namespace.labels().iter();
        let of_namespace =
            of_namespace.map(|(key, value)| Anchor::NamespaceLabel(key.clone(), value.clone()));
        let anchors = [Anchor::Nothing, Anchor::Namespace(Arc::clone(name))].into_iter();
        let anchors = anchors
            .chain(of_namespace)
            .chain(pod.labels.iter().flat_map(own));
        let found = anchors.filter_map(|anchor| self.by_anchor.get(&anchor));
        found.flatten().cloned().collect()
    }

    /// Anchors of which every pod of the set has one. Of several possible lists, this is the list
    /// whose anchors are used by the fewest sets.
    fn rarest(&self, set: &PodSet) -> Vec<Anchor> {
        let fewest = |anchors: &Vec<Anchor>| -> usize {
            let sets = anchors
                .iter()
                .filter_map(|anchor| self.by_anchor.get(anchor));
            sets.map(BTreeSet::len).sum()
        };
        match &set.namespaces {
            InNamespaces::Named(name) => {
                let of_pods = values(&set.pods, |key, value| {
                    Anchor::LabelIn(Arc::clone(name), key, value)
                });
                let rarest = of_pods.min_by_key(fewest);
                rarest.unwrap_or_else(|| vec![Anchor::Namespace(Arc::clone(name))])
            }
            InNamespaces::Selected(namespaces) => {
                let of_namespaces = values(namespaces, Anchor::NamespaceLabel);
                let of_pods = values(&set.pods, Anchor::Label);
                let rarest = of_namespaces.chain(of_pods).min_by_key(fewest);
                rarest.unwrap_or_else(|| vec![Anchor::Nothing])
            }
        }
    }
}

/// The values of each requirement that lists values.
fn values(
    selector: &Selector,
    anchor: impl Fn(String, String) -> Anchor,
) -> impl Iterator<Item = Vec<Anchor>> {
    selector.requirements().filter_map(move |requirement| {
        let Condition::In(values) = &requirement.condition else {
            return None;
        };
        let values = values.iter();
        let anchors = values.map(|value| anchor(requirement.key.clone(), value.clone()));
        Some(anchors.collect())
    })
}
