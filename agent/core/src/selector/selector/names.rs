//! Selectors of DNS names: those of `toFQDNs` rules, and those of EgressFirewalls.

use dns_policy::{name::Fqdn, rule::NameRule};

use crate::labels::{CLOSED_NAME, DNS_NAME, FQDN, Label};

/// The label of the addresses of names that a `toFQDNs` rule matches. Its key is the text of the rule.
pub fn fqdn_label(rule: &NameRule) -> Label {
    Label::new(FQDN, rule.text(), "")
}

/// A `dnsName` of an EgressFirewall, in lower case and without the final dot. It may begin with `*.`, where
/// the star stands for one label.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DnsNameSelector {
    name: String,
    rule: RuleOfName,
}

/// Which rules name a DNS name of an EgressFirewall.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum RuleOfName {
    /// Rules that pass packets on.
    Pass,
    /// Rules that drop packets. They are also about addresses that no answer may open.
    Deny,
}

impl DnsNameSelector {
    /// The selector of a name as people write it, in a rule that passes packets on.
    pub fn new(name: &str) -> Self {
        Self::of_rule(name, RuleOfName::Pass)
    }

    /// The selector of a name as people write it, in a rule that drops packets.
    pub fn denied(name: &str) -> Self {
        Self::of_rule(name, RuleOfName::Deny)
    }

    fn of_rule(name: &str, rule: RuleOfName) -> Self {
        let name = name.strip_suffix('.').unwrap_or(name);
        Self {
            name: name.to_ascii_lowercase(),
            rule,
        }
    }

    pub fn text(&self) -> &str {
        &self.name
    }

    /// Whether it matches a name: `*.` stands for one label.
    pub(crate) fn is_about(&self, name: &Fqdn) -> bool {
        match self.name.strip_prefix("*.") {
            Some(domain) => {
                let parent = name.parent().and_then(|parent| parent.strip_suffix('.'));
                parent == Some(domain)
            }
            None => name.as_str().strip_suffix('.') == Some(self.name.as_str()),
        }
    }

    pub(crate) const fn rule(&self) -> RuleOfName {
        self.rule
    }

    /// The label that addresses of matching names carry. Its source differs from the source of
    /// [`fqdn_label`]: no rule of another kind selects what an EgressFirewall names.
    pub fn label(&self) -> Label {
        Label::new(DNS_NAME, self.text(), "")
    }

    /// The label that such addresses carry if no answer may open them: only rules that drop
    /// packets select it.
    pub(crate) fn closed_label(&self) -> Label {
        Label::new(CLOSED_NAME, self.text(), "")
    }

    pub(super) fn matches(&self, label: &Label) -> bool {
        let is_open = label.source() == DNS_NAME;
        let is_closed = self.rule == RuleOfName::Deny && label.source() == CLOSED_NAME;
        (is_open || is_closed) && label.key() == self.text()
    }
}
