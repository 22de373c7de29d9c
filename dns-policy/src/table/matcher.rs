//! One set of name rules, compiled. All endpoints with the same set share it.

use std::{
    hash::{Hash, Hasher},
    sync::Arc,
};

use regex::bytes::Regex;

use super::names::{NameId, Names};
use crate::pattern::{Glob, one_label};

/// A restored expression that could not be read back into names.
#[derive(Clone, Debug)]
pub(super) struct Expression {
    pub(super) text: String,
    pub(super) regex: Regex,
}

impl PartialEq for Expression {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for Expression {}

impl Hash for Expression {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.text.hash(state);
    }
}

/// Name rules, OR-ed. The lists of numbers are sorted.
#[derive(Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Matcher {
    pub(super) all: bool,
    pub(super) exact: Box<[NameId]>,
    /// The suffix of each pattern `*.suffix`.
    pub(super) one_label: Box<[NameId]>,
    /// The suffix of each pattern `**.suffix`.
    pub(super) labels: Box<[NameId]>,
    pub(super) globs: Box<[Arc<Glob>]>,
    /// Restored regular expressions that could not be read back into names.
    pub(super) expressions: Box<[Expression]>,
}

impl Matcher {
    /// Whether any rule allows `name`. `names` belongs to the same snapshot as `self`.
    pub(super) fn matches(&self, names: &Names, name: &str) -> bool {
        self.all
            || holds(&self.exact, names, name)
            || (!self.one_label.is_empty()
                && one_label(name).is_some_and(|rest| holds(&self.one_label, names, rest)))
            || (!self.labels.is_empty() && self.matches_labels(names, name))
            || self.globs.iter().any(|g| g.matches(name))
            || self
                .expressions
                .iter()
                .any(|e| e.regex.is_match(name.as_bytes()))
    }

    /// The rule that allows `name`, as policies spell it.
    pub(super) fn which(&self, names: &Names, name: &str) -> Option<String> {
        if self.all {
            return Some("*".to_owned());
        }
        if holds(&self.exact, names, name) {
            return Some(name.to_owned());
        }
        if let Some(rest) = one_label(name).filter(|rest| holds(&self.one_label, names, rest)) {
            return Some(format!("*.{rest}"));
        }
        if let Some(suffix) = self.suffix(names, name) {
            return Some(format!("**.{suffix}"));
        }
        let glob = self.globs.iter().find(|glob| glob.matches(name));
        let expression = || {
            let mut all = self.expressions.iter();
            all.find(|e| e.regex.is_match(name.as_bytes()))
        };
        glob.map(|glob| glob.to_string())
            .or_else(|| Some(expression()?.text.clone()))
    }

    fn matches_labels(&self, names: &Names, name: &str) -> bool {
        self.suffix(names, name).is_some()
    }

    /// The suffix of `**.suffix` that `name` has.
    fn suffix<'n>(&self, names: &Names, name: &'n str) -> Option<&'n str> {
        let mut rest = name;
        while let Some(after) = one_label(rest) {
            if after.len() + 1 == rest.len() {
                return None; // an empty label
            }
            if holds(&self.labels, names, after) {
                return Some(after);
            }
            rest = after;
        }
        None
    }
}

fn holds(ids: &[NameId], names: &Names, text: &str) -> bool {
    !ids.is_empty()
        && names
            .get(text)
            .is_some_and(|id| ids.binary_search(&id).is_ok())
}
