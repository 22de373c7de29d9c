//! Names that EgressFirewalls use, and the labels that they give to addresses.

use std::collections::BTreeSet;

use dns_policy::name::Fqdn;
use foldhash::HashMap;

use crate::{
    labels::{Label, LabelSet},
    selector::selector::{DnsNameSelector, RuleOfName},
};

/// Start of a wildcard: it stands for one label.
const STAR: &str = "*.";

/// Selectors by the text of their name.
#[derive(Debug, Default)]
pub(crate) struct FirewallNames {
    exact: HashMap<Box<str>, Uses>,
    /// Selectors of `*.` and a name, by that name.
    below: HashMap<Box<str>, Uses>,
}

/// Selectors of one name, by the kind of rule that names it.
#[derive(Debug, Default)]
struct Uses {
    pass: Option<DnsNameSelector>,
    deny: Option<DnsNameSelector>,
}

/// Whether answers may open an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Openness {
    /// Answers may open the address.
    Open,
    /// It is in a refused prefix: only rules that drop packets count.
    Closed,
}

impl FirewallNames {
    pub(crate) fn add(&mut self, selector: &DnsNameSelector) {
        let (names, text) = self.place_of(selector.text());
        let uses = names.entry(text.into()).or_default();
        *uses.of(selector.rule()) = Some(selector.clone());
    }

    pub(crate) fn remove(&mut self, selector: &DnsNameSelector) {
        let (names, text) = self.place_of(selector.text());
        if let Some(uses) = names.get_mut(text) {
            *uses.of(selector.rule()) = None;
            if uses.pass.is_none() && uses.deny.is_none() {
                names.remove(text);
            }
        }
    }

    fn place_of<'a>(&mut self, text: &'a str) -> (&mut HashMap<Box<str>, Uses>, &'a str) {
        match text.strip_prefix(STAR) {
            Some(rest) => (&mut self.below, rest),
            None => (&mut self.exact, text),
        }
    }

    /// Whether firewalls use no name.
    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether firewalls use a name with a star.
    pub(crate) fn has_wildcard(&self) -> bool {
        !self.below.is_empty()
    }

    /// How many names firewalls use.
    pub(crate) fn len(&self) -> usize {
        self.exact.len() + self.below.len()
    }

    /// Whether a rule that drops packets uses the name of this label.
    pub(crate) fn is_denied(&self, label: &Label) -> bool {
        let uses = match label.key().strip_prefix(STAR) {
            Some(rest) => self.below.get(rest),
            None => self.exact.get(label.key()),
        };
        uses.is_some_and(|uses| uses.deny.is_some())
    }

    /// The names, with their final dots.
    pub(crate) fn wanted(&self) -> BTreeSet<Fqdn> {
        let exact = self.exact.keys().map(|name| Fqdn::normalise(name));
        let below = self.below.keys();
        let below = below.map(|rest| Fqdn::normalise(&format!("{STAR}{rest}")));
        exact.chain(below).collect()
    }

    /// Whether a firewall uses this name, or the wildcard that matches it.
    pub(crate) fn matches(&self, name: &Fqdn) -> bool {
        self.uses_of(name).next().is_some()
    }

    /// Labels of addresses of `name`; `None` if no firewall uses the name.
    pub(crate) fn labels_of(&self, name: &Fqdn, openness: Openness) -> Option<LabelSet> {
        let labels = self.uses_of(name).filter_map(|uses| match openness {
            Openness::Open => {
                let selector = uses.pass.as_ref().or(uses.deny.as_ref());
                selector.map(DnsNameSelector::label)
            }
            Openness::Closed => uses.deny.as_ref().map(DnsNameSelector::closed_label),
        });
        let labels: Vec<Label> = labels.collect();
        (!labels.is_empty()).then(|| LabelSet::new(labels))
    }

    fn uses_of(&self, name: &Fqdn) -> impl Iterator<Item = &Uses> {
        let text = without_dot(name.as_str());
        let own = self.exact.get(text);
        let below = match self.below.is_empty() {
            true => None,
            false => {
                let parent = name.parent().map(without_dot);
                parent.and_then(|parent| self.below.get(parent))
            }
        };
        own.into_iter().chain(below)
    }
}

impl Uses {
    const fn of(&mut self, rule: RuleOfName) -> &mut Option<DnsNameSelector> {
        match rule {
            RuleOfName::Pass => &mut self.pass,
            RuleOfName::Deny => &mut self.deny,
        }
    }
}

/// Whether a selector with this text matches a name.
pub(crate) fn means(text: &str, name: &Fqdn) -> bool {
    let mut one = FirewallNames::default();
    one.add(&DnsNameSelector::new(text));
    one.matches(name)
}

fn without_dot(name: &str) -> &str {
    name.strip_suffix('.').unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(names: &FirewallNames, name: &str, openness: Openness) -> Vec<String> {
        let labels = names.labels_of(&Fqdn::normalise(name), openness);
        labels.map_or(Vec::new(), |labels| labels.texts())
    }

    #[test]
    fn a_star_is_one_label_and_never_the_domain_itself() {
        let mut names = FirewallNames::default();
        names.add(&DnsNameSelector::new("*.example.com"));
        names.add(&DnsNameSelector::new("WWW.example.com."));
        let open = |name: &str| labels(&names, name, Openness::Open);
        assert_eq!(open("sub1.example.com."), ["dnsname:*.example.com"]);
        assert_eq!(open("*.example.com."), ["dnsname:*.example.com"]);
        assert_eq!(
            open("www.example.com"),
            ["dnsname:*.example.com", "dnsname:www.example.com"]
        );
        // `\.` is a dot within a label.
        assert_eq!(open(r"a\.b.example.com."), ["dnsname:*.example.com"]);
        for other in [
            "example.com.",
            "sub2.sub1.example.com.",
            "www.example.org.",
            r"www\.example.com.",
            ".",
            "com.",
        ] {
            assert_eq!(open(other), [""; 0], "{other}");
            assert!(!names.matches(&Fqdn::normalise(other)), "{other}");
        }
    }

    #[test]
    fn an_address_that_no_answer_may_open_has_labels_of_denied_names_only() {
        let mut names = FirewallNames::default();
        let (pass, deny) = (
            DnsNameSelector::new("*.example.com"),
            DnsNameSelector::denied("metadata.example.com"),
        );
        names.add(&pass);
        names.add(&deny);
        let name = "metadata.example.com.";
        assert_eq!(
            labels(&names, name, Openness::Closed),
            ["dnsname-closed:metadata.example.com"]
        );
        assert_eq!(
            labels(&names, name, Openness::Open),
            ["dnsname:*.example.com", "dnsname:metadata.example.com"]
        );
        assert!(names.is_denied(&deny.label()) && !names.is_denied(&pass.label()));
        names.remove(&deny);
        assert_eq!(labels(&names, name, Openness::Closed), [""; 0]);
        names.remove(&pass);
        assert!(names.is_empty());
    }
}
