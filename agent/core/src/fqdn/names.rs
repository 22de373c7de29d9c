//! FQDN selectors by name: which of them match, found without asking each one.

use std::collections::BTreeSet;

use dns_policy::{
    name::Fqdn,
    pattern::{SelectorKey, SelectorMatcher},
    rule::NameRule,
};
use foldhash::HashMap;

use crate::{
    labels::{Label, LabelSet},
    selector::selector::fqdn_label,
};

/// Registered FQDN selectors, indexed by the names that they match.
#[derive(Debug, Default)]
pub struct NameSelectors {
    exact: HashMap<String, Vec<Entry>>,
    one_label: HashMap<String, Vec<Entry>>,
    labels: HashMap<String, Vec<Entry>>,
    scan: Vec<Entry>,
    known: BTreeSet<NameRule>,
}

#[derive(Clone, Debug)]
struct Entry {
    selector: NameRule,
    matcher: SelectorMatcher,
    label: Label,
}

impl NameSelectors {
    /// Adds a selector; gives its matcher. `None` if its text cannot be a name or pattern, which the
    /// policy reader refuses.
    pub fn add(&mut self, selector: &NameRule) -> Option<SelectorMatcher> {
        let matcher = SelectorMatcher::compile(selector).ok()?;
        if self.known.insert(selector.clone()) {
            let entry = Entry {
                selector: selector.clone(),
                matcher: matcher.clone(),
                label: fqdn_label(selector),
            };
            let found = self.entries_of(&matcher);
            found.push(entry);
        }
        Some(matcher)
    }

    /// How many selectors there are.
    pub fn len(&self) -> usize {
        self.known.len()
    }

    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// Removes a selector; gives its matcher.
    pub fn remove(&mut self, selector: &NameRule) -> Option<SelectorMatcher> {
        if !self.known.remove(selector) {
            return None;
        }
        let matcher = SelectorMatcher::compile(selector).ok()?;
        let (map, key) = match matcher.key() {
            SelectorKey::Exact(name) => (&mut self.exact, name),
            SelectorKey::OneLabel(suffix) => (&mut self.one_label, suffix),
            SelectorKey::Labels(suffix) => (&mut self.labels, suffix),
            SelectorKey::Scan => {
                self.scan.retain(|entry| entry.selector != *selector);
                return Some(matcher);
            }
        };
        if let Some(entries) = map.get_mut(key) {
            entries.retain(|entry| entry.selector != *selector);
            if entries.is_empty() {
                map.remove(key);
            }
        }
        Some(matcher)
    }

    fn entries_of(&mut self, matcher: &SelectorMatcher) -> &mut Vec<Entry> {
        match matcher.key() {
            SelectorKey::Exact(name) => self.exact.entry(name.to_owned()).or_default(),
            SelectorKey::OneLabel(suffix) => self.one_label.entry(suffix.to_owned()).or_default(),
            SelectorKey::Labels(suffix) => self.labels.entry(suffix.to_owned()).or_default(),
            SelectorKey::Scan => &mut self.scan,
        }
    }

    /// Labels of addresses of `name`; `None` if no selector matches it.
    pub fn labels_of(&self, name: &Fqdn) -> Option<LabelSet> {
        let mut found = Vec::new();
        let mut ask = |entries: &[Entry]| {
            let matching = entries.iter().filter(|entry| entry.matcher.matches(name));
            found.extend(matching.map(|entry| entry.label.clone()));
        };
        let text = name.as_str();
        ask(self.exact.get(text).map_or(&[], Vec::as_slice));
        for (n, (dot, _)) in text.match_indices('.').enumerate() {
            let suffix = match text.get(dot + 1..) {
                Some("") | None => ".",
                Some(suffix) => suffix,
            };
            if n == 0 {
                ask(self.one_label.get(suffix).map_or(&[], Vec::as_slice));
            }
            ask(self.labels.get(suffix).map_or(&[], Vec::as_slice));
        }
        ask(&self.scan);
        (!found.is_empty()).then(|| LabelSet::new(found))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_index_finds_the_same_as_a_full_search() {
        let selectors = [
            NameRule::Name("www.cilium.io".into()),
            NameRule::Pattern("*.cilium.io".into()),
            NameRule::Pattern("**.io".into()),
            NameRule::Pattern("*".into()),
            NameRule::Pattern("w*.cilium.io.".into()),
            NameRule::Pattern("Example.COM".into()),
        ];
        let mut index = NameSelectors::default();
        let matchers: Vec<_> = selectors
            .iter()
            .map(|s| (fqdn_label(s), index.add(s).unwrap()))
            .collect();
        for name in [
            "www.cilium.io",
            "cilium.io",
            "a.b.cilium.io",
            "example.com",
            ".",
            "io",
        ] {
            let name = Fqdn::normalise(name);
            let each = matchers
                .iter()
                .filter(|(_, matcher)| matcher.matches(&name));
            let each = LabelSet::new(each.map(|(label, _)| label.clone()).collect());
            let found = index.labels_of(&name);
            assert_eq!(found.unwrap_or(LabelSet::new(Vec::new())), each, "{name}");
        }
        for selector in &selectors {
            assert!(index.remove(selector).is_some());
        }
        assert_eq!(index.labels_of(&Fqdn::normalise("www.cilium.io")), None);
    }
}
