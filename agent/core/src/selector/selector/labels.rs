//! Selectors of labels.

use std::{collections::BTreeSet, fmt};

use crate::labels::{LabelSet, RESERVED};

/// `matchLabels` and `matchExpressions`, all of which must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LabelSelector {
    pub requirements: BTreeSet<Requirement>,
}

/// What a selector asks of one label.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Requirement {
    /// Source of the label; `None` = any.
    pub source: Option<String>,
    pub key: String,
    pub operator: Operator,
}

/// What a requirement asks of a label.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Operator {
    /// Present with one of these values.
    In(BTreeSet<String>),
    /// Absent, or present with another value.
    NotIn(BTreeSet<String>),
    Exists,
    DoesNotExist,
}

impl Requirement {
    /// Splits `source:key`, but not `source.key`; `any:` means any source.
    pub fn new(key: &str, operator: Operator) -> Self {
        let (source, key) = match key.split_once(':') {
            Some(("any", key)) => (None, key),
            Some((source, key)) => (Some(source.to_owned()), key),
            None => (None, key),
        };
        Self {
            source,
            key: key.to_owned(),
            operator,
        }
    }

    fn holds(&self, labels: &LabelSet) -> bool {
        let mut there = labels.iter().filter(|label| {
            label.key() == self.key && self.source.as_deref().is_none_or(|s| s == label.source())
        });
        match &self.operator {
            Operator::In(values) => there.any(|label| values.contains(label.value())),
            Operator::NotIn(values) => !there.any(|label| values.contains(label.value())),
            Operator::Exists => there.next().is_some(),
            Operator::DoesNotExist => there.next().is_none(),
        }
    }
}

impl LabelSelector {
    pub fn matches(&self, labels: &LabelSet) -> bool {
        self.requirements
            .iter()
            .all(|requirement| requirement.holds(labels))
    }

    /// Whether a requirement is about this key.
    pub fn mentions(&self, key: &str) -> bool {
        self.requirements
            .iter()
            .any(|requirement| requirement.key == key)
    }

    /// Whether it asks for a reserved label by name: only then may it mean something that is
    /// no endpoint.
    pub(crate) fn names_reserved(&self) -> bool {
        self.requirements.iter().any(|requirement| {
            requirement.source.as_deref() == Some(RESERVED)
                && matches!(requirement.operator, Operator::In(_) | Operator::Exists)
        })
    }
}

impl fmt::Display for LabelSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.requirements.is_empty() {
            return f.write_str("<every endpoint>");
        }
        for (n, requirement) in self.requirements.iter().enumerate() {
            if n > 0 {
                f.write_str(",")?;
            }
            let source = requirement.source.as_deref().unwrap_or("any");
            let key = &requirement.key;
            match &requirement.operator {
                Operator::In(values) if values.len() == 1 => {
                    write!(
                        f,
                        "{source}:{key}={}",
                        values.iter().next().map_or("", String::as_str)
                    )?;
                }
                Operator::In(values) => write!(f, "{source}:{key} in {values:?}")?,
                Operator::NotIn(values) => write!(f, "{source}:{key} not in {values:?}")?,
                Operator::Exists => write!(f, "{source}:{key}")?,
                Operator::DoesNotExist => write!(f, "!{source}:{key}")?,
            }
        }
        Ok(())
    }
}
