//! What the rules say of one packet, and which of them say it.

use std::{fmt, str::FromStr};

use dns_policy::name::Fqdn;
use serde::{Deserialize, Serialize};

use super::{
    compute::Observed,
    model::{Side, SideRule},
    rule::{Peers, PortRule, TierAction, TierRule, UNKNOWN_NAME},
};
use crate::{
    labels::LabelSet,
    selector::selector::{Selector, Subject},
};

shared_maps::words! {
    /// One direction of an endpoint's traffic with a peer.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum FlowDirection {
        Egress => "egress",
        Ingress => "ingress",
    }
}

/// IP protocol and destination port (ICMP: type).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Port {
    /// IP protocol number.
    pub protocol: u8,
    /// Port, or ICMP type.
    pub number: u16,
}

impl fmt::Display for Port {
    /// Number and protocol, for example `443/TCP`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.number, protocol_name(self.protocol))
    }
}

/// A text that is no port.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a port: write for example 443, 443/TCP, 53/UDP or 8/ICMP (the type)")]
pub struct PortError(String);

impl FromStr for Port {
    type Err = PortError;

    /// Reads `443` (TCP), `53/UDP`, `8/ICMP`.
    fn from_str(text: &str) -> Result<Self, PortError> {
        let error = || PortError(text.to_owned());
        let (number, protocol) = text.split_once('/').unwrap_or((text, "TCP"));
        let protocol = match protocol.to_ascii_uppercase().as_str() {
            "TCP" => 6,
            "UDP" => 17,
            "SCTP" => 132,
            "ICMP" => 1,
            "ICMPV6" => 58,
            _ => return Err(error()),
        };
        let number = number.parse().map_err(|_| error())?;
        if number == 0 && !matches!(protocol, 1 | 58) {
            return Err(error());
        }
        Ok(Self { protocol, number })
    }
}

/// Name of an IP protocol.
pub fn protocol_name(number: u8) -> String {
    match number {
        0 => "any".to_owned(),
        1 => "ICMP".to_owned(),
        6 => "TCP".to_owned(),
        17 => "UDP".to_owned(),
        58 => "ICMPv6".to_owned(),
        132 => "SCTP".to_owned(),
        n => n.to_string(),
    }
}

/// A port of a policy map whose low bits may be wild: `lpm_len` counts eight bits of protocol
/// first.
pub fn port_range(port: u16, lpm_len: u8) -> String {
    match lpm_len.saturating_sub(8).min(16) {
        0 => "any".to_owned(),
        16 => port.to_string(),
        bits => format!("{port}-{}", port | (u16::MAX >> bits)),
    }
}

shared_maps::words! {
    /// What becomes of a packet by policy.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Verdict {
        /// An allow rule lets it pass.
        Allowed => "allowed",
        /// A DNS rule sends it through the proxy.
        Proxied => "proxied",
        /// A deny rule drops it.
        Denied => "denied",
        /// No rule allows it, and the direction is restricted.
        NoRule => "no-rule",
        /// No rule is about it, and the direction is not restricted.
        NotRestricted => "not-restricted",
        /// From the node itself, which needs no rule.
        FromNode => "from-node",
    }
}

impl Verdict {
    /// Whether the packet passes, if only to the proxy.
    pub const fn passes(self) -> bool {
        !matches!(self, Self::Denied | Self::NoRule)
    }
}

/// A rule that is about a peer.
#[derive(Clone, Copy, Debug)]
pub struct Match<'a> {
    pub rule: &'a SideRule,
    /// Its first selector that selects the peer; `None` if it is about everyone.
    pub selector: Option<&'a Selector>,
    /// Labels of the receiver, for names of ports; `None` = no particular receiver.
    pub receiver: Option<&'a LabelSet>,
}

/// An ordered rule that is about a peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TierMatch<'a> {
    pub rule: &'a SideRule<TierRule>,
    /// Its first selector that selects the peer.
    pub selector: &'a Selector,
}

/// A verdict, and the rules that make it.
#[derive(Clone, Debug)]
pub(crate) struct Decision<'a> {
    pub verdict: Verdict,
    /// The first ordered rule that covers the packet. If it drops the packet, no other rule is read.
    pub tier: Option<TierMatch<'a>>,
    /// Rules that agree with the verdict; empty if the verdict comes from the lack of rules.
    pub by: Vec<Match<'a>>,
    /// An ordered rule with a DNS name, for which the proxy has to see the answer.
    pub observer: Option<TierMatch<'a>>,
}

impl Decision<'_> {
    /// The ordered rule, for people.
    pub(crate) fn tier_view(&self) -> Option<RuleView> {
        let tier = self.tier.as_ref()?;
        Some(RuleView::of_tier(tier, says(tier.rule.rule.action)))
    }

    /// The rules that agree with the verdict, for people.
    pub(crate) fn views(&self) -> Vec<RuleView> {
        let observer = self.observer.iter();
        let observer = observer.map(|rule| RuleView::of_tier(rule, TIER_OBSERVES));
        self.by.iter().map(RuleView::of).chain(observer).collect()
    }
}

/// An ordered rule drops the packet.
const TIER_DENY: &str = "tier-deny";
/// An ordered rule leaves the packet to the other rules.
const TIER_PASS: &str = "tier-pass";
/// An ordered rule needs the answers of DNS servers.
const TIER_OBSERVES: &str = "tier-names";

const fn says(action: TierAction) -> &'static str {
    match action {
        TierAction::Deny => TIER_DENY,
        TierAction::Pass => TIER_PASS,
    }
}

/// A policy rule, as people find it in its document.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleView {
    /// Key of the document, for example `CiliumNetworkPolicy/shop/web`.
    pub document: String,
    /// Where the document says it, for example `spec.egress[0]`.
    pub rule: String,
    /// `allow`, `deny` or `dns` (through the DNS proxy); of ordered rules `tier-deny`, `tier-pass`
    /// or `tier-names` (the proxy has to see answers for it).
    pub says: String,
    /// The selector that selects the peer; `None` if the rule is about everyone.
    pub selector: Option<String>,
    /// Ports; empty = all.
    pub ports: Vec<String>,
}

impl RuleView {
    /// The rule of a match, as people find it in its document.
    pub fn of(found: &Match<'_>) -> Self {
        let rule = &found.rule.rule;
        let ports = rule.ports.iter();
        let dns = rule.ports.iter().any(|port| port.dns.is_some());
        let says = match (rule.deny, dns) {
            (true, _) => "deny",
            (false, true) => "dns",
            (false, false) => "allow",
        };
        Self {
            document: found.rule.document.to_string(),
            rule: rule.path.to_string(),
            says: says.to_owned(),
            selector: found.selector.map(ToString::to_string),
            ports: ports.map(|port| port.text_at(found.receiver)).collect(),
        }
    }
}

impl RuleView {
    fn of_tier(found: &TierMatch<'_>, says: &str) -> Self {
        let ports = found.rule.rule.ports.iter();
        Self {
            document: found.rule.document.to_string(),
            rule: found.rule.rule.path.to_string(),
            says: says.to_owned(),
            selector: Some(found.selector.to_string()),
            ports: ports.map(ToString::to_string).collect(),
        }
    }

    /// Whether it names a port that the receiver does not have.
    pub fn lacks_port_name(&self) -> bool {
        self.ports.iter().any(|port| port.ends_with(UNKNOWN_NAME))
    }

    /// Whether it is an ordered rule that drops the packet.
    pub fn is_tier_deny(&self) -> bool {
        self.says == TIER_DENY
    }

    /// As its document has it: `Deny 0.0.0.0/0`, `Allow *.example.com; TCP 443`.
    fn fmt_tier(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let selector = self.selector.as_deref().unwrap_or_default();
        let written = ["cidr:", "dnsname:"]
            .iter()
            .find_map(|kind| selector.strip_prefix(kind));
        let written = written.unwrap_or(selector);
        // The parts after `except` are not written in the document.
        let written = written.split(" except ").next().unwrap_or(written);
        let says = match self.says.as_str() {
            TIER_DENY => "Deny",
            TIER_PASS => "Allow",
            _ => "needs DNS answers for",
        };
        write!(f, "{} {} ({says} {written}", self.document, self.rule)?;
        match self.ports.is_empty() || self.says == TIER_OBSERVES {
            true => f.write_str(")"),
            false => write!(f, "; {})", self.ports.join(", ")),
        }
    }
}

/// What people read where an ordered rule is about a packet: `rest` is what the other rules say.
pub fn after_tier(tier: Option<&RuleView>, rest: String) -> String {
    match tier {
        Some(rule) if rule.is_tier_deny() => format!("denied by {rule}"),
        Some(rule) => format!("passed on by {rule}, then {rest}"),
        None => rest,
    }
}

impl fmt::Display for RuleView {
    /// `CiliumNetworkPolicy/shop/web spec.egress[1] (fqdn:*.example.com; TCP 443)`,
    /// `EgressFirewall/shop/default spec.egress[3] (Deny 0.0.0.0/0)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.says.starts_with("tier-") {
            return self.fmt_tier(f);
        }
        let selector = self.selector.as_deref().unwrap_or("everyone");
        write!(f, "{} {} ({selector}; ", self.document, self.rule)?;
        if self.ports.is_empty() {
            f.write_str("every port)")
        } else {
            write!(f, "{})", self.ports.join(", "))
        }
    }
}

/// Rules of a direction that are about a peer, whatever the port. `own` are the labels of the
/// endpoint that has the rules.
pub(crate) fn about<'a>(
    side: &'a Side,
    direction: FlowDirection,
    own: &'a LabelSet,
    peer: &'a Subject,
) -> Vec<Match<'a>> {
    let receiver = Some(match direction {
        FlowDirection::Egress => &peer.labels,
        FlowDirection::Ingress => own,
    });
    let rules = side.rules.iter();
    rules
        .filter_map(|rule| match &rule.rule.peers {
            Peers::Any => Some(Match {
                rule,
                selector: None,
                receiver,
            }),
            Peers::Selectors(list) => {
                let selector = list.iter().find(|selector| selector.matches(peer))?;
                Some(Match {
                    rule,
                    selector: Some(selector),
                    receiver,
                })
            }
        })
        .collect()
}

impl Match<'_> {
    /// Whether it is about this port.
    pub fn covers(&self, port: Port) -> bool {
        let ports = &self.rule.rule.ports;
        ports.is_empty() || self.ports_at(port).next().is_some()
    }

    fn ports_at(&self, port: Port) -> impl Iterator<Item = &PortRule> {
        let ports = self.rule.rule.ports.iter();
        let receiver = self.receiver;
        ports.filter(move |rule| rule.covers(port.protocol, port.number, receiver))
    }

    fn proxies(&self, port: Port) -> bool {
        self.ports_at(port).any(|rule| rule.dns.is_some())
    }
}

/// Ordered rules that are about a peer, whatever the port.
fn tier_about<'a>(side: &'a Side, peer: &Subject) -> impl Iterator<Item = TierMatch<'a>> {
    side.tier.iter().filter_map(|rule| {
        let mut selectors = rule.rule.selectors.iter();
        let selector = selectors.find(|selector| selector.matches(peer))?;
        Some(TierMatch { rule, selector })
    })
}

/// The first ordered rule that covers a packet.
fn first_of_tier<'a>(side: &'a Side, peer: &Subject, port: Port) -> Option<TierMatch<'a>> {
    let covers = |found: &TierMatch<'_>| {
        let ports = &found.rule.rule.ports;
        let mut those = ports.iter();
        ports.is_empty() || those.any(|rule| rule.covers(port.protocol, port.number, None))
    };
    tier_about(side, peer).find(covers)
}

/// Ordered rules that name a DNS name.
pub(crate) fn tier_by_name(side: &Side, name: &Fqdn) -> Vec<RuleView> {
    let named = side.tier.iter().filter_map(|rule| {
        let names =
            |selector: &&Selector| matches!(selector, Selector::DnsName(of) if of.is_about(name));
        let selector = rule.rule.selectors.iter().find(names)?;
        let says = says(rule.rule.action);
        Some(RuleView::of_tier(&TierMatch { rule, selector }, says))
    });
    named.collect()
}

/// The first ordered rule with a DNS name.
fn first_with_name(side: &Side) -> Option<TierMatch<'_>> {
    side.tier.iter().find_map(|rule| {
        let mut selectors = rule.rule.selectors.iter();
        let selector = selectors.find(|selector| matches!(selector, Selector::DnsName(_)))?;
        Some(TierMatch { rule, selector })
    })
}

/// Judges one packet: the first ordered rule that covers it may drop it. Among the other rules a
/// deny beats all, and a DNS rule beats a plain allow ([`super::compute`] renders the same).
pub(crate) fn judge<'a>(
    side: &'a Side,
    direction: FlowDirection,
    own: &'a LabelSet,
    peer: &'a Subject,
    port: Port,
) -> Decision<'a> {
    let tier = first_of_tier(side, peer, port);
    if tier.is_some_and(|found| found.rule.rule.action == TierAction::Deny) {
        return Decision {
            verdict: Verdict::Denied,
            tier,
            by: Vec::new(),
            observer: None,
        };
    }
    let mut matches = about(side, direction, own, peer);
    matches.retain(|found| found.covers(port));
    let denies = |found: &Match<'_>| found.rule.rule.deny;
    let proxies = |found: &Match<'_>| found.proxies(port);
    let verdict = if matches.iter().any(denies) {
        matches.retain(denies);
        Verdict::Denied
    } else if matches.iter().any(proxies) {
        matches.retain(proxies);
        Verdict::Proxied
    } else if !matches.is_empty() {
        Verdict::Allowed
    } else if !side.enforced {
        Verdict::NotRestricted
    } else if direction == FlowDirection::Ingress && peer.id == shared_maps::IdentityId::HOST {
        Verdict::FromNode
    } else {
        Verdict::NoRule
    };
    let (verdict, observer) = observed(side, verdict, port);
    Decision {
        verdict,
        tier,
        by: matches,
        observer,
    }
}

/// The verdict where the proxy has to see answers of DNS servers, and the rule that needs them.
pub(crate) fn observed(
    side: &Side,
    verdict: Verdict,
    port: Port,
) -> (Verdict, Option<TierMatch<'_>>) {
    let observed = Observed::of(side);
    let is_observed = observed.is_at(port.protocol, port.number)
        && match verdict {
            Verdict::Allowed => true,
            Verdict::NotRestricted => observed == Observed::Everything,
            _ => false,
        };
    match is_observed {
        true => (Verdict::Proxied, first_with_name(side)),
        false => (verdict, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wild_port_bits_show_as_a_range() {
        assert_eq!(port_range(0, 0), "any");
        assert_eq!(port_range(53, 24), "53");
        assert_eq!(port_range(8080, 20), "8080-8095");
    }

    #[test]
    fn ports_read_back() {
        for text in ["443/TCP", "53/UDP", "9/SCTP", "0/ICMP", "128/ICMPv6"] {
            assert_eq!(text.parse::<Port>().unwrap().to_string(), text);
        }
        assert_eq!("443".parse::<Port>().unwrap().to_string(), "443/TCP");
        for text in ["", "0", "70000", "443/HTTP", "http", "443/TCP/UDP"] {
            assert!(text.parse::<Port>().is_err(), "{text}");
        }
    }
}
