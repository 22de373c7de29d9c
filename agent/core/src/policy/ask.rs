//! `policy trace`: what documents say of one party that sends to another. It needs neither endpoints
//! nor a datapath.

mod asking;

use std::{collections::BTreeSet, net::IpAddr};

use dns_policy::name::Fqdn;
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use shared_maps::IdentityId;

use super::{
    model::EndpointPolicy,
    repository::Repository,
    rule::Rule,
    trace::{self, FlowDirection, Port, RuleView},
};
use crate::{
    fqdn::{
        firewall_names::{FirewallNames, Openness},
        names::NameSelectors,
    },
    identity::scopes::{RESERVED_IDENTITIES, reserved},
    ipcache::{
        metadata::Claim,
        owners::Owner,
        resolve::{cidr_label, node_cidr_label, whole_families},
        table::Ipcache,
    },
    labels::{Label, LabelError, LabelSet, RESERVED, in_namespace},
    selector::selector::{Selector, Subject},
};

/// The receiver in a question of `policy trace`.
#[derive(Clone, Debug)]
pub enum To {
    /// Endpoints with these labels, or what a reserved label names.
    Labels(LabelSet),
    /// An address outside of the cluster.
    Address(IpAddr),
    /// Any address outside the cluster that was learned for a name.
    Name(Fqdn),
}

impl From<Peer> for To {
    /// A name is taken for a DNS name.
    fn from(peer: Peer) -> Self {
        match peer {
            Peer::Labels(labels) => Self::Labels(labels),
            Peer::Address(address) => Self::Address(address),
            Peer::Name(name) => Self::Name(Fqdn::normalise(&name)),
        }
    }
}

/// The answer of `policy trace`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trace {
    /// Labels of the sender, each in the form `source:key[=value]`.
    pub from: Vec<String>,
    /// The receiver, as it was asked for.
    pub to: String,
    /// Destination port, for example `443/TCP`.
    pub port: String,
    pub allowed: bool,
    /// Every judgement that the traffic has to pass: first `dns`, then `egress`, then `ingress`.
    pub steps: Vec<Step>,
}

/// One judgement that the traffic has to pass.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// `dns`: the sender may ask for the name; `egress`: it may send; `ingress`: the receiver
    /// may receive.
    pub step: String,
    /// Labels of the other side.
    pub peer: Vec<String>,
    /// `allowed`, `proxied`, `denied`, `no-rule`, `not-restricted` or `from-node`.
    pub verdict: String,
    pub passes: bool,
    /// The first ordered rule that covers the packet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tier: Option<RuleView>,
    /// Rules that decide, unless the ordered rule drops the packet.
    pub rules: Vec<RuleView>,
    /// Rules about the other side that are not about this port.
    pub other_ports: Vec<RuleView>,
}

/// Labels that addresses and names have by these documents alone.
#[derive(Debug)]
pub(crate) struct Outside {
    ipcache: Ipcache,
    names: NameSelectors,
    dns_names: FirewallNames,
    /// Blocks of all addresses of a family that select nodes too.
    all_nodes: Vec<IpNet>,
}

impl Outside {
    /// Labels by the blocks and names that the documents ask for.
    pub(crate) fn of(repository: &Repository) -> Self {
        let mut ipcache = Ipcache::new(true);
        let mut names = NameSelectors::default();
        let mut dns_names = FirewallNames::default();
        let mut node_blocks = BTreeSet::new();
        let mut node_keys: BTreeSet<&str> = BTreeSet::new();
        for all in whole_families() {
            let labels = LabelSet::new(vec![ipcache.world().label(all).clone()]);
            ipcache.claim(all, Owner::World, Claim::Labels(labels));
        }
        let mut block = |prefix: IpNet| {
            if let Some(label) = cidr_label(prefix) {
                let labels = LabelSet::new(vec![label]);
                ipcache.claim(prefix, Owner::Policy, Claim::Labels(labels));
            }
        };
        let rules = repository.iter().flat_map(|document| document.rules());
        for selector in rules.flat_map(Rule::selectors) {
            match selector {
                Selector::Cidr(cidr) => {
                    cidr.except
                        .iter()
                        .chain([&cidr.prefix])
                        .copied()
                        .for_each(&mut block);
                    node_blocks.extend(cidr.nodes.then_some(cidr.prefix));
                }
                Selector::Fqdn(fqdn) => {
                    names.add(fqdn);
                }
                Selector::Group(group) => group.except.iter().copied().for_each(&mut block),
                Selector::DnsName(name) => dns_names.add(name),
                Selector::Node(labels) => {
                    let keys = labels.requirements.iter();
                    node_keys.extend(keys.map(|requirement| requirement.key.as_str()));
                }
                Selector::Labels(_) | Selector::Entity(_) => {}
            }
        }
        let all_nodes = node_blocks.iter().filter(|block| block.prefix_len() == 0);
        let all_nodes = all_nodes.copied().collect();
        for block in node_blocks {
            let label = Claim::Labels(LabelSet::new(vec![node_cidr_label(block)]));
            ipcache.claim(block, Owner::NodesOfPolicy, label);
        }
        for document in repository.iter() {
            let (source, labels) = document.labels(None, &|key| node_keys.contains(key));
            for (prefix, labels) in labels {
                let owner = Owner::Object(source, document.key.as_str().into());
                ipcache.claim(prefix, owner, Claim::Labels(labels));
            }
        }
        Self {
            ipcache,
            names,
            dns_names,
            all_nodes,
        }
    }

    /// Subjects with these labels. Another node has an address of each family, if blocks of all
    /// addresses select nodes; all addresses of the agent's own node are judged together.
    fn labelled(&self, labels: &LabelSet) -> Vec<Subject> {
        let with = |blocks: &[IpNet]| {
            let blocks = blocks.iter().map(|block| node_cidr_label(*block));
            inside(&LabelSet::new(
                labels.iter().cloned().chain(blocks).collect(),
            ))
        };
        if labels.has_reserved("host") {
            return vec![with(&self.all_nodes)];
        }
        if !labels.has_reserved("remote-node") || self.all_nodes.is_empty() {
            return vec![inside(labels)];
        }
        let (ipv4, ipv6): (Vec<_>, Vec<_>) = self
            .all_nodes
            .iter()
            .partition(|block| matches!(block, IpNet::V4(_)));
        vec![with(&ipv4), with(&ipv6)]
    }

    fn address(&self, address: IpAddr) -> Subject {
        outside(self.ipcache.labels(IpNet::from(address)))
    }

    /// An address of each family that has the labels of the name.
    fn name(&self, name: &Fqdn) -> Vec<Subject> {
        let of = |all: IpNet| {
            let selected = self.names.labels_of(name);
            let resolved = self.dns_names.labels_of(name, Openness::Open);
            let selected = selected.iter().chain(&resolved);
            let mut labels: Vec<_> = selected.flat_map(LabelSet::iter).cloned().collect();
            labels.push(self.ipcache.world().label(all).clone());
            outside(LabelSet::new(labels))
        };
        whole_families().map(of).into()
    }
}

fn outside(labels: LabelSet) -> Subject {
    let id = reserved(&labels).unwrap_or(IdentityId::LOCAL_MIN);
    Subject::new(id, labels)
}

/// An endpoint, or what the reserved label names.
fn inside(labels: &LabelSet) -> Subject {
    let reserved = |(key, id): (&str, IdentityId)| labels.has_reserved(key).then_some(id);
    let api_server = [("kube-apiserver", IdentityId::KUBE_APISERVER)];
    let mut known = api_server.into_iter().chain(RESERVED_IDENTITIES);
    let id = known.find_map(reserved);
    Subject::new(id.unwrap_or(IdentityId::ENDPOINT_MIN), labels.clone())
}

/// Traces a packet of `from`. `known` has the labels of the address where an agent knows them.
pub fn trace(
    repository: &Repository,
    from: &LabelSet,
    to: &To,
    port: Port,
    known: Option<Subject>,
) -> Trace {
    let policy = EndpointPolicy::of(from, repository);
    let outside = Outside::of(repository);
    let mut steps = Vec::new();
    let peers = match (to, known) {
        (_, Some(subject)) => vec![subject],
        (To::Labels(labels), None) => outside.labelled(labels),
        (To::Address(address), None) => vec![outside.address(*address)],
        (To::Name(name), None) => {
            steps.extend(asking::asking(&policy, from, name, &outside));
            outside.name(name)
        }
    };
    let alike = |peer: &Subject, other: &Subject| {
        let one = trace::judge(&policy.egress, FlowDirection::Egress, from, peer, port).verdict;
        one == trace::judge(&policy.egress, FlowDirection::Egress, from, other, port).verdict
    };
    let same = matches!(peers.as_slice(), [one, other] if alike(one, other));
    for peer in peers.iter().take(if same { 1 } else { usize::MAX }) {
        steps.push(step(&policy, FlowDirection::Egress, from, peer, port));
    }
    let receivers = peers.iter().filter(|peer| peer.id.is_endpoint());
    for receiver in receivers {
        let theirs = EndpointPolicy::of(&receiver.labels, repository);
        let (own, sender) = (&receiver.labels, inside(from));
        steps.push(step(&theirs, FlowDirection::Ingress, own, &sender, port));
    }
    Trace {
        from: from.texts(),
        to: match to {
            To::Labels(labels) => labels.texts().join(","),
            To::Address(address) => address.to_string(),
            To::Name(name) => name.as_str().trim_end_matches('.').to_owned(),
        },
        port: port.to_string(),
        allowed: steps.iter().all(|step| step.passes),
        steps,
    }
}

fn step(
    policy: &EndpointPolicy,
    direction: FlowDirection,
    own: &LabelSet,
    peer: &Subject,
    port: Port,
) -> Step {
    let (name, side) = match direction {
        FlowDirection::Egress => ("egress", &policy.egress),
        FlowDirection::Ingress => ("ingress", &policy.ingress),
    };
    let decision = trace::judge(side, direction, own, peer, port);
    let about = trace::about(side, direction, own, peer);
    let others = about.iter().filter(|found| !found.covers(port));
    Step {
        step: name.to_owned(),
        peer: peer.labels.texts(),
        verdict: decision.verdict.as_str().to_owned(),
        passes: decision.verdict.passes(),
        tier: decision.tier_view(),
        rules: decision.views(),
        other_ports: others.map(RuleView::of).collect(),
    }
}

/// A sender or receiver, read from a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peer {
    /// Labels. For an endpoint they include its namespace, `default` if the text names none.
    Labels(LabelSet),
    Address(IpAddr),
    /// A name of an endpoint, or a DNS name.
    Name(String),
}

impl Peer {
    /// Reads `k8s:app=web,k8s:tier=front`, `reserved:host`, an address or a name.
    pub fn parse(text: &str) -> Result<Self, LabelError> {
        if let Ok(address) = text.parse() {
            return Ok(Self::Address(address));
        }
        if !text.contains(['=', ':']) {
            return Ok(Self::Name(text.to_owned()));
        }
        let labels = text.split(',').map(Label::parse);
        let labels: Vec<Label> = labels.collect::<Result<_, _>>()?;
        let reserved = labels.iter().any(|label| label.source() == RESERVED);
        Ok(Self::Labels(if reserved {
            LabelSet::new(labels)
        } else {
            in_namespace(labels)
        }))
    }
}

#[cfg(test)]
mod tests;
