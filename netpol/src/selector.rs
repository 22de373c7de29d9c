//! Label selectors: `matchLabels` and `matchExpressions`.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

/// Selects label sets that meet every requirement. Without requirements, it selects all label sets.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Selector {
    /// Sorted. Groups, policies and rows with this selector share the allocation.
    requirements: Arc<[Requirement]>,
}

/// A requirement on one label key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Requirement {
    /// Key of the label, as the object carries it.
    pub key: String,
    /// The condition on the label's value.
    pub condition: Condition,
}

/// A condition on the value of a label.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Condition {
    /// The label is present with one of these values.
    In(BTreeSet<String>),
    /// The label is absent, or its value is none of these.
    NotIn(BTreeSet<String>),
    /// The label is present, with any value.
    Exists,
    /// The label is absent from the object.
    DoesNotExist,
}

impl Selector {
    /// The selector with these requirements.
    pub fn new(requirements: BTreeSet<Requirement>) -> Self {
        Self {
            requirements: requirements.into_iter().collect(),
        }
    }

    /// The requirements, sorted by key.
    pub fn requirements(&self) -> impl ExactSizeIterator<Item = &Requirement> {
        self.requirements.iter()
    }

    /// Whether the selector selects every label set, because it requires nothing.
    pub fn selects_all(&self) -> bool {
        self.requirements.is_empty()
    }

    /// Whether the selector selects an object with these labels.
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.requirements.iter().all(|requirement| {
            let value = labels.get(&requirement.key);
            match &requirement.condition {
                Condition::In(values) => value.is_some_and(|value| values.contains(value)),
                Condition::NotIn(values) => value.is_none_or(|value| !values.contains(value)),
                Condition::Exists => value.is_some(),
                Condition::DoesNotExist => value.is_none(),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selects(condition: Condition, value: Option<&str>) -> bool {
        let requirement = Requirement {
            key: "app".to_owned(),
            condition,
        };
        let labels = value.map(|value| ("app".to_owned(), value.to_owned()));
        Selector::new([requirement].into()).matches(&labels.into_iter().collect())
    }

    #[test]
    fn conditions_on_present_and_absent_labels() {
        let values = || BTreeSet::from(["web".to_owned(), "api".to_owned()]);
        // Columns: a condition; whether it holds for the label web, for db, and without the label.
        let table = [
            (Condition::In(values()), [true, false, false]),
            (Condition::NotIn(values()), [false, true, true]),
            (Condition::Exists, [true, true, false]),
            (Condition::DoesNotExist, [false, false, true]),
        ];
        for (condition, wanted) in table {
            let found = [Some("web"), Some("db"), None].map(|v| selects(condition.clone(), v));
            assert_eq!(found, wanted, "{condition:?}");
        }
    }

    #[test]
    fn without_requirements_it_selects_all() {
        assert!(Selector::default().selects_all());
        assert!(Selector::default().matches(&BTreeMap::new()));
    }
}
