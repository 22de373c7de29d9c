//! Tables as access lists of VPP's ACL plugin, and back.
//!
//! The local table of a pod is applied to packets that leave the vswitch for the pod, and the
//! global table to packets that leave it for other nodes. Packets from a pod with a table are
//! reflected, so that their answers pass.

mod text;

use std::{collections::BTreeSet, fmt};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

pub use self::text::{cli, from_json, to_json};
use super::PREFIX;
use crate::{
    packet::Packet,
    pod::PodId,
    policy::Protocol,
    ports::Span,
    render::tables::{self, View},
    rule::{Action, Net, Rule, Traffic},
};

const GLOBAL: &str = "NODE-GLOBAL";
const REFLECTION: &str = "REFLECTION";

/// An access list, and the interfaces to which it is applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acl {
    /// The tag of the list in VPP.
    pub name: String,
    /// The first row that matches a packet judges it. A packet that no row matches is dropped.
    pub rows: Vec<Row>,
    /// Interfaces to whose incoming packets the list is applied.
    pub input: BTreeSet<Interface>,
    /// Interfaces to whose outgoing packets the list is applied.
    pub output: BTreeSet<Interface>,
}

/// An interface of the vswitch, displayed as in the exports.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Interface {
    /// The interface of a pod: `pod:namespace/name`.
    Pod(PodId),
    /// The name of an interface that leads to other nodes.
    Node(String),
}

/// A row of an access list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// What happens to the packets.
    pub action: RowAction,
    /// Addresses of senders.
    pub source: IpNet,
    /// Addresses of receivers, of the same family.
    pub destination: IpNet,
    /// Protocol; `None` for every protocol.
    pub protocol: Option<Protocol>,
    /// Ports of the sender; all ports if there is no protocol.
    pub source_ports: Span,
    /// Ports of the receiver; all ports if there is no protocol.
    pub destination_ports: Span,
}

/// What a row does with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowAction {
    /// The vswitch drops a packet that the row matches.
    Deny,
    /// The vswitch forwards a packet that the row matches.
    Permit,
    /// Lets the packet pass, and its answers through every interface.
    Reflect,
}

impl RowAction {
    /// Every action.
    pub const ALL: [Self; 3] = [Self::Deny, Self::Permit, Self::Reflect];

    /// The action as VPP spells it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Deny => "deny",
            Self::Permit => "permit",
            Self::Reflect => "permit+reflect",
        }
    }
}

/// Access lists of tables whose local tables are for traffic to pods.
pub fn export(view: &View, node_interfaces: &BTreeSet<String>) -> Vec<Acl> {
    let nodes: BTreeSet<Interface> = node_interfaces
        .iter()
        .cloned()
        .map(Interface::Node)
        .collect();
    let acl = |name: &str, rules: &[Rule], output: BTreeSet<Interface>| Acl {
        name: format!("{PREFIX}{name}"),
        rows: rules.iter().flat_map(rows).collect(),
        input: BTreeSet::new(),
        output,
    };
    let pods = |pods: &BTreeSet<PodId>| pods.iter().cloned().map(Interface::Pod).collect();
    let local = view.local.iter();
    let mut acls: Vec<Acl> = local
        .map(|(rules, of)| acl(&tables::name(rules), rules, pods(of)))
        .collect();
    let mut reflected: BTreeSet<Interface> = acls
        .iter()
        .flat_map(|acl| acl.output.iter().cloned())
        .collect();
    if !view.global.is_empty() {
        reflected.extend(nodes.iter().cloned());
        acls.push(acl(GLOBAL, &view.global, nodes));
    }
    if !acls.is_empty() {
        acls.push(Acl {
            name: format!("{PREFIX}{REFLECTION}"),
            rows: whole_families()
                .map(|net| Row {
                    action: RowAction::Reflect,
                    ..Row::all(net, net)
                })
                .into(),
            input: reflected,
            output: BTreeSet::new(),
        });
    }
    acls
}

/// The tables from which access lists were made. Lists with other names are not ours.
pub fn import(acls: &[Acl]) -> View {
    let mut view = View::default();
    for acl in acls {
        match acl.name.strip_prefix(PREFIX) {
            None | Some(REFLECTION) => {}
            Some(GLOBAL) => view.global = rules(&acl.rows).into(),
            Some(_) => {
                let pods = acl.output.iter().filter_map(|interface| match interface {
                    Interface::Pod(pod) => Some(pod.clone()),
                    Interface::Node(_) => None,
                });
                view.local
                    .entry(rules(&acl.rows).into())
                    .or_default()
                    .extend(pods);
            }
        }
    }
    view
}

impl Row {
    fn all(source: IpNet, destination: IpNet) -> Self {
        Self {
            action: RowAction::Permit,
            source,
            destination,
            protocol: None,
            source_ports: Span::ALL,
            destination_ports: Span::ALL,
        }
    }

    /// Whether the row matches this packet.
    pub fn matches(&self, packet: &Packet) -> bool {
        let ports = match (self.protocol, packet.ports) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(protocol), Some(ports)) => {
                protocol == ports.protocol
                    && self.source_ports.contains(ports.source)
                    && self.destination_ports.contains(ports.destination)
            }
        };
        ports
            && self.source.contains(&packet.source)
            && self.destination.contains(&packet.destination)
    }
}

/// The rows of a rule: one for each family to which it applies.
fn rows(rule: &Rule) -> impl Iterator<Item = Row> {
    let rule = *rule;
    let of_both = move |family: IpNet| {
        let within = |net| match net {
            Net::Any => Some(family),
            Net::Block(block) => family.contains(&block).then_some(block),
        };
        Some(row(within(rule.source)?, within(rule.destination)?, rule))
    };
    whole_families().into_iter().filter_map(of_both)
}

fn row(source: IpNet, destination: IpNet, rule: Rule) -> Row {
    let (protocol, source_ports, destination_ports) = match rule.traffic {
        Traffic::Any => (None, Span::ALL, Span::ALL),
        Traffic::Ports {
            protocol,
            source,
            destination,
        } => (Some(protocol), source, destination),
    };
    Row {
        action: match rule.action {
            Action::Deny => RowAction::Deny,
            Action::Permit => RowAction::Permit,
        },
        protocol,
        source_ports,
        destination_ports,
        ..Row::all(source, destination)
    }
}

/// The rules of rows. Two rows that differ only because one is for all IPv4 addresses and one for
/// all IPv6 addresses become one rule.
fn rules(rows: &[Row]) -> Vec<Rule> {
    let [four, six] = whole_families();
    let mut rules = Vec::new();
    let mut rest = rows.iter().peekable();
    while let Some(row) = rest.next() {
        let other = Row {
            source: six,
            destination: six,
            ..*row
        };
        let is_pair = (row.source, row.destination) == (four, four) && rest.peek() == Some(&&other);
        if is_pair {
            rest.next();
        }
        let net = |net: IpNet, is_any: bool| if is_any { Net::Any } else { Net::Block(net) };
        let (source, destination) = (row.source, row.destination);
        let to_all = destination.prefix_len() == 0;
        let from_all = source.prefix_len() == 0 && (is_pair || !to_all);
        rules.push(Rule {
            source: net(source, from_all),
            destination: net(destination, to_all),
            traffic: match row.protocol {
                None => Traffic::Any,
                Some(protocol) => Traffic::Ports {
                    protocol,
                    source: row.source_ports,
                    destination: row.destination_ports,
                },
            },
            action: match row.action {
                RowAction::Deny => Action::Deny,
                RowAction::Permit | RowAction::Reflect => Action::Permit,
            },
        });
    }
    rules
}

fn whole_families() -> [IpNet; 2] {
    [Ipv4Net::default().into(), Ipv6Net::default().into()]
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            action,
            source,
            destination,
            ..
        } = self;
        write!(f, "{} src {source} dst {destination}", action.as_str())?;
        if let Some(protocol) = self.protocol {
            write!(f, " proto {}", protocol.number())?;
        }
        for (name, ports) in [
            ("sport", self.source_ports),
            ("dport", self.destination_ports),
        ] {
            if ports != Span::ALL {
                write!(f, " {name} {}-{}", ports.first(), ports.last())?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for Interface {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pod(pod) => write!(f, "{POD}{pod}"),
            Self::Node(name) => f.write_str(name),
        }
    }
}

const POD: &str = "pod:";
