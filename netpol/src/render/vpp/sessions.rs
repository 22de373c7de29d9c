//! Tables as session rules of VPP's TCP stack (VPPTCP), and back.
//!
//! Each pod has its own table for what it sends. The node has one table for what its pods receive
//! from other nodes. If several rules match a connection, the rule with the longest remote prefix
//! applies. The stack has only IPv4, only TCP and UDP, only single ports, and no rule for everyone.

mod json;
mod refusal;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
    ops::RangeInclusive,
};

use ipnet::{IpNet, Ipv4Net};

pub(crate) use self::refusal::refusal;
pub use self::{
    json::{from_json, to_json},
    refusal::NoSessionRules,
};
use crate::{
    pod::PodId,
    policy::Protocol,
    ports::Span,
    render::tables::View,
    rule::{Action, Net, Rule, Traffic},
};

/// Maximum number of ports of one rule that become session rules, one for each port.
const MAX_PORTS: u32 = 1024;

const TAG: &str = "contiv/vpp-policy";
const ANY: &str = "-ANY";
const SPLIT: &str = "-SPLIT";
const PORTS: &str = "-PORTS-";

/// What happens to connections of TCP or UDP between some addresses and ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionRule {
    /// The table to which the rule belongs.
    pub scope: Scope,
    /// TCP or UDP.
    pub protocol: Protocol,
    /// Addresses of the pod; `None` in a pod's own table.
    pub local: Option<Ipv4Net>,
    /// Port of the pod; 0 for every port.
    pub local_port: u16,
    /// Addresses of the other side.
    pub remote: Ipv4Net,
    /// Port of the other side; 0 for every port.
    pub remote_port: u16,
    /// What happens to the connection.
    pub action: Action,
    /// Names the rule of which this is a part, for [`import`].
    pub tag: String,
}

/// A table of session rules.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// The table of a pod, for the connections that it opens.
    Local(PodId),
    /// The table of the node, for the connections that other nodes open.
    Global,
}

/// Session rules of tables whose local tables are for traffic from pods. `addresses` are the pods'
/// addresses, because a pod always reaches itself.
pub fn export(
    view: &View,
    addresses: &BTreeMap<PodId, Vec<IpAddr>>,
) -> Result<Vec<SessionRule>, NoSessionRules> {
    let mut list = List::default();
    for (rules, pods) in &view.local {
        for pod in pods {
            let own = addresses.get(pod).map_or(&[][..], Vec::as_slice);
            let is_self = |rule: &Rule| own.iter().any(|a| rule.destination == Net::one(*a));
            let scope = Scope::Local(pod.clone());
            let mut others = rules.iter().filter(|rule| !is_self(rule));
            others.try_for_each(|rule| list.add(&scope, rule))?;
        }
    }
    let mut global = view.global.iter();
    global.try_for_each(|rule| list.add(&Scope::Global, rule))?;
    Ok(list.without_defaults())
}

/// The tables from which session rules were made. Rules without a session rule are missing: a pod's
/// rules about itself, and rules that other rules hide.
pub fn import(rules: &[SessionRule]) -> View {
    let mut tables: BTreeMap<&Scope, BTreeSet<Rule>> = BTreeMap::new();
    for rule in rules.iter().filter(|rule| rule.tag.starts_with(TAG)) {
        tables.entry(&rule.scope).or_default().insert(rule.origin());
    }
    let mut view = View::default();
    for (scope, mut rules) in tables {
        let is_closed = rules.contains(&Rule::DENY_ALL) && matches!(scope, Scope::Local(_));
        if !is_closed {
            rules.insert(Rule::PERMIT_ALL);
        }
        let rules = rules.into_iter().collect();
        match scope {
            Scope::Global => view.global = rules,
            Scope::Local(pod) => {
                view.local.entry(rules).or_default().insert(pod.clone());
            }
        }
    }
    view
}

impl SessionRule {
    /// The rule of which this session rule is a part.
    fn origin(&self) -> Rule {
        let remote = if self.tag.contains(SPLIT) {
            Net::Any
        } else {
            Net::Block(self.remote.into())
        };
        let (source, destination, port) = match self.local {
            None => (Net::Any, remote, self.remote_port),
            Some(local) => (remote, Net::Block(local.into()), self.local_port),
        };
        let ports = match port {
            0 => Span::ALL,
            port => self.range().unwrap_or(Span::one(port)),
        };
        Rule {
            source,
            destination,
            traffic: match self.tag.contains(ANY) {
                true => Traffic::Any,
                false => Traffic::to(self.protocol, ports),
            },
            action: self.action,
        }
    }

    /// The range of ports to which the rule's port belongs.
    fn range(&self) -> Option<Span> {
        let (_, range) = self.tag.split_once(PORTS)?;
        let (first, last) = range.split_once('-')?;
        Span::new(first.parse().ok()?, last.parse().ok()?)
    }
}

impl fmt::Display for SessionRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scope = match &self.scope {
            Scope::Local(pod) => pod.to_string(),
            Scope::Global => "global".to_owned(),
        };
        let action = match self.action {
            Action::Deny => "deny",
            Action::Permit => "allow",
        };
        let local = self.local.map_or("any".to_owned(), |net| net.to_string());
        let port = |port: u16| match port {
            0 => "any".to_owned(),
            port => port.to_string(),
        };
        let protocol = self.protocol.as_str();
        let (local_port, remote_port) = (port(self.local_port), port(self.remote_port));
        write!(
            f,
            "{scope}: {action} {protocol} lcl {local} port {local_port} rmt {} port {remote_port}",
            self.remote
        )
    }
}

/// Session rules. Of several rules with the same key, the first one applies.
#[derive(Default)]
struct List {
    rules: Vec<SessionRule>,
    keys: BTreeSet<(Scope, Protocol, Option<Ipv4Net>, u16, Ipv4Net, u16)>,
}

impl List {
    fn add(&mut self, scope: &Scope, rule: &Rule) -> Result<(), NoSessionRules> {
        if *rule == Rule::PERMIT_ALL {
            return Ok(());
        }
        let (local, remote) = match scope {
            Scope::Local(_) => (None, rule.destination),
            Scope::Global => (Some(block(rule.destination, rule)?), rule.source),
        };
        let (remotes, split) = match remote {
            Net::Any => (halves(), SPLIT),
            Net::Block(_) => match block(remote, rule)? {
                net if net.prefix_len() == 0 => (halves(), SPLIT),
                net => (vec![net], ""),
            },
        };
        let (protocols, ports, any) = match rule.traffic {
            Traffic::Any => (vec![Protocol::Tcp, Protocol::Udp], Span::ALL, ANY),
            Traffic::Ports {
                protocol: Protocol::Sctp,
                ..
            } => return Err(NoSessionRules::of(rule, refusal::SCTP)),
            Traffic::Ports {
                protocol,
                source: Span::ALL,
                destination,
            } => (vec![protocol], destination, ""),
            Traffic::Ports { .. } => return Err(NoSessionRules::of(rule, refusal::SOURCE_PORTS)),
        };
        let (ports, range) =
            single(ports).ok_or_else(|| NoSessionRules::of(rule, refusal::PORTS))?;
        let tag = format!("{TAG}{any}{split}{range}");
        for protocol in protocols {
            for port in ports.clone() {
                let (local_port, remote_port) = match scope {
                    Scope::Local(_) => (0, port),
                    Scope::Global => (port, 0),
                };
                for remote in &remotes {
                    self.push(SessionRule {
                        scope: scope.clone(),
                        protocol,
                        local,
                        local_port,
                        remote: *remote,
                        remote_port,
                        action: rule.action,
                        tag: tag.clone(),
                    });
                }
            }
        }
        Ok(())
    }

    /// The rules without those that permit every port to everyone, because the stack itself does
    /// so. Such a rule stays if it exempts its protocol from a denial of every protocol.
    fn without_defaults(self) -> Vec<SessionRule> {
        let is_default = |rule: &SessionRule| {
            let every_port = rule.local_port == 0 && rule.remote_port == 0;
            rule.action == Action::Permit && every_port && rule.tag.contains(SPLIT)
        };
        let denials = self.rules.iter();
        let denials = denials.filter(|rule| rule.action == Action::Deny && rule.tag.contains(ANY));
        let denials: BTreeSet<_> = denials
            .map(|rule| (rule.scope.clone(), rule.local, rule.remote))
            .collect();
        let mut rules = self.rules;
        rules.retain(|rule| {
            let key = (rule.scope.clone(), rule.local, rule.remote);
            !is_default(rule) || denials.contains(&key)
        });
        rules
    }

    fn push(&mut self, rule: SessionRule) {
        let key = (
            rule.scope.clone(),
            rule.protocol,
            rule.local,
            rule.local_port,
            rule.remote,
            rule.remote_port,
        );
        if self.keys.insert(key) {
            self.rules.push(rule);
        }
    }
}

/// The single ports of a range for session rules, with the tag of the range; `None` if there are
/// too many ports.
fn single(ports: Span) -> Option<(RangeInclusive<u16>, String)> {
    match ports.len() {
        _ if ports == Span::ALL => Some((0..=0, String::new())),
        1 => Some((ports.first()..=ports.last(), String::new())),
        2..=MAX_PORTS => {
            let (first, last) = (ports.first(), ports.last());
            Some((first..=last, format!("{PORTS}{first}-{last}")))
        }
        _ => None,
    }
}

/// A block of IPv4 addresses, the only family of the stack.
fn block(net: Net, rule: &Rule) -> Result<Ipv4Net, NoSessionRules> {
    match net {
        Net::Block(IpNet::V4(net)) => Ok(net),
        _ => Err(NoSessionRules::of(rule, refusal::IPV6)),
    }
}

/// All addresses as two blocks, because the stack has no rule for everyone.
fn halves() -> Vec<Ipv4Net> {
    Ipv4Net::default()
        .subnets(1)
        .into_iter()
        .flatten()
        .collect()
}
