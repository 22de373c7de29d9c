//! What a pod may send or receive, as rows. Each row permits something.

use std::collections::{BTreeMap, BTreeSet};

use super::ranges::Ranges;
use crate::{
    contiv::{Flow, InNamespaces, Match, MatchPeers, PodSet},
    group::{Family, Group},
    name::PortName,
    pod::NamedPorts,
    policy::{PortRange, Ports, Protocol},
    processor::PodPolicies,
    render::ruleset::Value,
    selector::Selector,
};

/// Packets that pass: packets with this peer, on these ports.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Row {
    pub(super) peer: Peer,
    pub(super) ports: RowPorts,
}

/// The other side of a row. If both conditions are set, a peer must meet both.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Peer {
    /// The peer has an address in one of these ranges.
    pub(super) within: Option<Ranges>,
    /// The peer is a member of the group.
    pub(super) group: Option<Group>,
}

/// Packets of a row, by protocol and port.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum RowPorts {
    /// Every packet, even of protocols without ports.
    Any,
    /// Every port of the protocol.
    All(Protocol),
    /// These ports of the protocol.
    Numbers(Protocol, Ranges),
    /// The port that the group names. Each member of the group has its own number for it.
    OfGroup(Protocol),
}

/// The rows of a pod for its addresses of one family; `None` if the direction is open.
pub(super) fn rows(pod: &PodPolicies, flow: Flow, family: Family) -> Option<BTreeSet<Row>> {
    if !pod.is_restricted(flow) {
        return None;
    }
    let mut rows = BTreeSet::new();
    let mut by_peer: BTreeMap<Peer, PortSet> = BTreeMap::new();
    let policies = pod.restricting(flow);
    let matches = policies.flat_map(|policy| &policy.matches);
    for one in matches.filter(|one| one.flow == flow) {
        let (ports, named) = split(&pod.ports, one);
        for peer in peers(one, family) {
            rows.extend(named.iter().map(|port| named_row(&peer, port, family)));
            if !ports.is_empty() {
                by_peer.entry(peer).or_default().extend(&ports);
            }
        }
    }
    let everyone = by_peer.get(&Peer::default());
    if everyone.is_some_and(|ports| ports.any) {
        return None;
    }
    rows.extend(
        by_peer
            .into_iter()
            .flat_map(|(peer, ports)| ports.rows(&peer)),
    );
    Some(rows)
}

pub(super) fn peers(of: &Match, family: Family) -> Vec<Peer> {
    let MatchPeers::Of { groups, blocks } = &of.peers else {
        return vec![Peer::default()];
    };
    let within = Ranges::of_blocks(blocks, family);
    if within.as_ref().is_some_and(Ranges::is_everything) {
        return vec![Peer::default()];
    }
    let groups = groups.iter().map(|pods| Peer {
        within: None,
        group: Some(Group {
            family,
            pods: pods.clone(),
            port: None,
        }),
    });
    let blocks = within.map(|within| Peer {
        within: Some(within),
        group: None,
    });
    groups.chain(blocks).collect()
}

/// Splits ports into numbers, and names for which each peer has its own number. In ingress, a name
/// means the port of the pod, and nothing if the pod has no port of this name and protocol.
pub(super) fn split(own: &NamedPorts, of: &Match) -> (PortSet, BTreeSet<(PortName, Protocol)>) {
    let (mut numbered, mut named) = (PortSet::default(), BTreeSet::new());
    let ports = match &of.ports {
        Ports::Any => {
            numbered.any = true;
            return (numbered, named);
        }
        Ports::Of(ports) => ports,
    };
    for port in ports {
        let protocol = port.protocol;
        match &port.ports {
            PortRange::All => {
                numbered.all.insert(protocol);
            }
            PortRange::Numbers(numbers) => numbered.add(protocol, numbers.first(), numbers.last()),
            PortRange::Named(name) if of.flow == Flow::Egress => {
                named.insert((name.clone(), protocol));
            }
            PortRange::Named(name) => {
                if let Some(number) = own.get(&(name.clone(), protocol)) {
                    numbered.add(protocol, *number, *number);
                }
            }
        }
    }
    (numbered, named)
}

/// The row of a port that peers name, for which only pods have names.
pub(super) fn named_row(peer: &Peer, port: &(PortName, Protocol), family: Family) -> Row {
    let every_pod = || PodSet {
        namespaces: InNamespaces::Selected(Selector::default()),
        pods: Selector::default(),
    };
    let pods = peer.group.as_ref().map(|group| group.pods.clone());
    let group = Group {
        family,
        pods: pods.unwrap_or_else(every_pod),
        port: Some(port.clone()),
    };
    Row {
        peer: Peer {
            within: peer.within.clone(),
            group: Some(group),
        },
        ports: RowPorts::OfGroup(port.1),
    }
}

/// Ports by number.
#[derive(Debug, Default)]
pub(super) struct PortSet {
    pub(super) any: bool,
    all: BTreeSet<Protocol>,
    numbers: BTreeMap<Protocol, Vec<(Value, Value)>>,
}

impl PortSet {
    pub(super) fn is_empty(&self) -> bool {
        !self.any && self.all.is_empty() && self.numbers.is_empty()
    }

    /// Number of rows that a peer has with these ports.
    pub(super) fn protocols(&self) -> usize {
        match self.any {
            true => 1,
            false => self.all.len() + self.numbered().count(),
        }
    }

    /// Number of ranges in these rows. Ranges that touch count as one.
    pub(super) fn ranges(&self) -> usize {
        match self.any {
            true => 0,
            false => self.numbered().map(|(_, numbers)| numbers.len()).sum(),
        }
    }

    fn numbered(&self) -> impl Iterator<Item = (&Protocol, &Vec<(Value, Value)>)> {
        let numbers = self.numbers.iter();
        numbers.filter(|(protocol, _)| !self.all.contains(protocol))
    }

    fn add(&mut self, protocol: Protocol, first: u16, last: u16) {
        let range = (Value::Port(first), Value::Port(last));
        self.numbers.entry(protocol).or_default().push(range);
    }

    fn extend(&mut self, other: &Self) {
        self.any |= other.any;
        self.all.extend(&other.all);
        for (protocol, numbers) in &other.numbers {
            self.numbers.entry(*protocol).or_default().extend(numbers);
        }
    }

    /// One row for each protocol; a single row if every protocol is allowed.
    fn rows(self, peer: &Peer) -> Vec<Row> {
        let row = |ports| Row {
            peer: peer.clone(),
            ports,
        };
        if self.any {
            return vec![row(RowPorts::Any)];
        }
        let all = &self.all;
        let numbers = self.numbers.into_iter();
        let numbers = numbers.filter(|(protocol, _)| !all.contains(protocol));
        let numbers = numbers.filter_map(|(protocol, numbers)| {
            Some(RowPorts::Numbers(protocol, Ranges::of(numbers)?))
        });
        let all = all.iter().copied().map(RowPorts::All);
        all.chain(numbers).map(row).collect()
    }
}
