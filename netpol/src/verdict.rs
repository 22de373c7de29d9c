//! Judges a packet by every rendering of the policies, to compare them.
//!
//! Each judge knows only its own form, and does not compute what another judge does. A node judges
//! for its own pods. A packet passes if every node that has one of its pods lets it pass.

mod nft;
mod reading;
mod vpp;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
};

pub(crate) use self::{nft::by_table, vpp::by_sessions};
pub use self::{reading::World, vpp::by_acls};
use crate::{
    configurator::PodRules,
    contiv::Flow,
    packet::Packet,
    pod::PodId,
    policy::NetworkPolicy,
    render::{
        ruleset,
        tables::View,
        vpp::{acl, sessions::SessionRule},
    },
    rule::{self, Action, Rule},
};

/// Whether a packet passes, and what decides it.
#[derive(Clone, Debug)]
pub struct Verdict<'a> {
    /// Whether the packet passes.
    pub passes: bool,
    /// The decisions in order, up to the one that drops the packet.
    pub by: Vec<By<'a>>,
}

/// What decides about a packet.
#[derive(Clone, Debug)]
pub enum By<'a> {
    /// Sender and receiver are the same pod: the packet never leaves it.
    Itself,
    /// Nothing restricts this direction.
    Open(Flow),
    /// A rule of a policy, by the path of its field, allows it.
    Policy(Flow, &'a NetworkPolicy, &'a str),
    /// Policies restrict the direction, and none of their rules matches the packet.
    NoPolicy(Flow, Vec<&'a NetworkPolicy>),
    /// A rule decides.
    Rule(&'a Rule),
    /// A row of the access list with this name decides.
    Row(&'a str, &'a acl::Row),
    /// The access list with this name has no row that matches the packet.
    NoRow(&'a str),
    /// A session rule decides.
    Session(&'a SessionRule),
    /// A rule of the chain with this name decides.
    Nft(&'a str, &'a ruleset::Rule),
}

/// The pods of a node, by their addresses.
#[derive(Clone, Debug, Default)]
pub struct Local {
    of: BTreeMap<IpAddr, PodId>,
}

impl FromIterator<(IpAddr, PodId)> for Local {
    fn from_iter<I: IntoIterator<Item = (IpAddr, PodId)>>(addresses: I) -> Self {
        Self {
            of: addresses.into_iter().collect(),
        }
    }
}

impl Local {
    /// The sending pod and the receiving pod of a packet.
    fn sides(&self, packet: &Packet) -> (Option<&PodId>, Option<&PodId>) {
        let at = |address| self.of.get(&address);
        (at(packet.source), at(packet.destination))
    }
}

impl<'a> Verdict<'a> {
    fn passed(by: By<'a>) -> Self {
        Self {
            passes: true,
            by: vec![by],
        }
    }

    /// The verdict of the first rule of a list that matches the packet. Without such a rule, the
    /// packet passes.
    fn by_list(rules: &'a [Rule], packet: &Packet, flow: Flow) -> Self {
        let found = rule::first(rules, packet);
        Self {
            passes: found.is_none_or(|rule| rule.action == Action::Permit),
            by: vec![found.map_or(By::Open(flow), By::Rule)],
        }
    }

    /// This verdict, followed by the next one if the packet passes.
    pub fn then(mut self, next: impl FnOnce() -> Self) -> Self {
        if self.passes {
            let next = next();
            self.passes = next.passes;
            self.by.extend(next.by);
        }
        self
    }
}

/// The verdict by the rules of a node's pods: first the sender's rules, and then the receiver's.
pub fn by_rules<'a>(
    pods: &'a BTreeMap<PodId, PodRules>,
    local: &Local,
    packet: &Packet,
) -> Verdict<'a> {
    let (from, to) = local.sides(packet);
    if from.is_some() && from == to {
        return Verdict::passed(By::Itself);
    }
    let list = |pod: Option<&PodId>, flow| {
        let rules = pod
            .and_then(|pod| pods.get(pod))
            .map_or(&[][..], |pod| pod.of(flow));
        Verdict::by_list(rules, packet, flow)
    };
    list(from, Flow::Egress).then(|| list(to, Flow::Ingress))
}

/// The verdict by the tables of a node. Tables of single pods are for traffic of direction `flow`.
pub fn by_tables<'a>(view: &'a View, flow: Flow, local: &Local, packet: &Packet) -> Verdict<'a> {
    let (from, to) = local.sides(packet);
    if from.is_some() && from == to {
        return Verdict::passed(By::Itself);
    }
    let judged = match flow {
        Flow::Ingress => to,
        Flow::Egress => from,
    };
    let rules = match (judged, from.or(to)) {
        (Some(pod), _) => view.local_of(pod).map_or(&[][..], |rules| rules),
        (None, Some(_)) => &view.global,
        (None, None) => &[],
    };
    Verdict::by_list(rules, packet, flow)
}

impl fmt::Display for By<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |flow: &Flow| match flow {
            Flow::Ingress => "ingress",
            Flow::Egress => "egress",
        };
        let policies = |policies: &[&NetworkPolicy]| {
            let names: BTreeSet<String> = policies.iter().map(|policy| key(policy)).collect();
            names.into_iter().collect::<Vec<_>>().join(", ")
        };
        match self {
            Self::Itself => f.write_str("a pod reaches itself"),
            Self::Open(flow) => write!(f, "{}: not restricted", name(flow)),
            Self::Policy(flow, policy, path) => write!(f, "{}: {} {path}", name(flow), key(policy)),
            Self::NoPolicy(flow, by) => {
                write!(f, "{}: no rule of {} is about it", name(flow), policies(by))
            }
            Self::Rule(rule) => write!(f, "{rule}"),
            Self::Row(acl, row) => write!(f, "{acl}: {row}"),
            Self::NoRow(acl) => write!(f, "{acl}: no row is about it"),
            Self::Session(rule) => write!(f, "{rule}"),
            Self::Nft(chain, rule) => write!(f, "{chain}: {rule}"),
        }
    }
}

fn key(policy: &NetworkPolicy) -> String {
    format!("NetworkPolicy/{}/{}", policy.namespace, policy.name)
}
