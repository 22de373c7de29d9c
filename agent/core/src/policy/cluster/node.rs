//! `CiliumNode` and `Node`: addresses of a node, and the blocks of its pods.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::LazyLock,
};

use ipnet::IpNet;
use netpol::field::{Checked, Field};
use serde_json::Value;

use super::read::address;
use crate::{
    labels::{Label, LabelSet, NODE, RESERVED},
    policy::validate::{only, prefix},
    tunnel_mode::TunnelMode,
};

/// Prefix length of the widest IPv4 block of one node's pods: private blocks are no wider.
const WIDEST_V4: u8 = 8;
/// The same for IPv6: registries give no wider block to a network.
const WIDEST_V6: u8 = 16;

/// Annotation of a CiliumNode: the role of the node in the tunnel between nodes, as in
/// `--high-scale-ipcache`.
pub const HIGH_SCALE: &str = "holdfast.io/high-scale";

/// Annotation of a CiliumNode that an agent writes: the keys of the labels that the agent copied from
/// the Node, separated by commas.
pub const COPIED_LABELS: &str = "holdfast.io/copied-labels";

/// Label that says who writes a CiliumNode.
pub const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// Its value for agents.
pub const US: &str = "holdfast-agent";

/// Key of the label that the addresses of a node have while the labels of its Node are unknown. A `Deny` by
/// labels covers such a node, and an `Allow` does not.
pub(in crate::policy) const UNKNOWN_LABELS: &str = "holdfast.io/labels-unknown";

/// A node of the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub name: String,
    /// The node's own addresses of every type.
    pub addresses: BTreeSet<IpAddr>,
    /// Addresses of its health endpoint.
    pub health: BTreeSet<IpAddr>,
    /// Addresses from which its ingress proxy sends.
    pub ingress: BTreeSet<IpAddr>,
    /// Blocks that its pods' addresses are from.
    pub pod_blocks: BTreeSet<IpNet>,
    /// Labels of the CiliumNode or Node object.
    pub labels: BTreeMap<String, String>,
    /// Whether the object has no labels of its Node: it was written by an agent that does not, or
    /// could not, copy them.
    pub is_unlabelled: bool,
    /// What [`HIGH_SCALE`] says, if that is a mode.
    pub high_scale: Option<TunnelMode>,
}

impl Node {
    /// Labels of each address, and of the blocks of its pods; the node called `own` is this one
    /// (Cilium `pkg/node/manager`, nodeIdentityLabels). A label of its object counts only if a
    /// selector of nodes names the label's key: each combination of values is an identity.
    pub(in crate::policy) fn address_labels(
        &self,
        own: Option<&str>,
        asked: &dyn Fn(&str) -> bool,
    ) -> BTreeMap<IpNet, LabelSet> {
        let mut found: BTreeMap<IpNet, Vec<Label>> = BTreeMap::new();
        let is_own = own == Some(self.name.as_str());
        for (addresses, key) in [
            (&self.addresses, if is_own { "host" } else { "remote-node" }),
            (&self.health, "health"),
            (&self.ingress, "ingress"),
        ] {
            for address in addresses {
                let label = Label::new(RESERVED, key, "");
                found.entry(IpNet::from(*address)).or_default().push(label);
            }
        }
        let of_object = self.labels.iter().filter(|(key, _)| asked(key));
        let of_object = of_object.map(|(key, value)| Label::new(NODE, key, value));
        let mut of_object: Vec<Label> = of_object.collect();
        if self.is_unlabelled && asked(UNKNOWN_LABELS) {
            of_object.push(Label::new(NODE, UNKNOWN_LABELS, ""));
        }
        for address in &self.addresses {
            let labels = found.entry(IpNet::from(*address)).or_default();
            labels.extend(of_object.iter().cloned());
        }
        for block in &self.pod_blocks {
            let label = Label::new(RESERVED, "unmanaged", "");
            found.entry(*block).or_default().push(label);
        }
        let sets = found.into_iter();
        sets.map(|(prefix, labels)| (prefix, shared(labels)))
            .collect()
    }
}

/// A label set. Sets of one label, which addresses of all nodes have, are stored once.
fn shared(labels: Vec<Label>) -> LabelSet {
    static ALONE: LazyLock<Vec<LabelSet>> = LazyLock::new(|| {
        let keys = ["remote-node", "unmanaged", "health", "ingress", "host"];
        let labels = keys.map(|key| Label::new(RESERVED, key, ""));
        labels.map(|label| LabelSet::new(vec![label])).into()
    });
    let known = ALONE.iter().find(|set| set.as_slice() == labels);
    known.cloned().unwrap_or_else(|| LabelSet::new(labels))
}

/// Reads a `CiliumNode`. Fields that say how nodes are reached mean nothing here and are accepted.
pub(in crate::policy) fn read_cilium(
    name: &str,
    value: &Value,
    warnings: &mut Vec<String>,
) -> Checked<Node> {
    let top = Field::top(value);
    let spec = top.get("spec");
    if spec.value.is_none() {
        return spec.refuse("is missing", "add spec.addresses");
    }
    let known = [
        "addresses",
        "health",
        "ingress",
        "alibaba-cloud",
        "azure",
        "bootid",
        "encryption",
        "eni",
        "instance-id",
        "ipam",
        "nodeidentity",
    ];
    only(&spec, &known, &[])?;
    let (mut addresses, mut outside) = (BTreeSet::new(), BTreeSet::new());
    for item in spec.get("addresses").items()? {
        only(&item, &["type", "ip"], &[])?;
        let address = address(&item.get("ip"))?;
        addresses.insert(address);
        // CiliumInternalIP is an address of the node in the block of its pods.
        let of_type = item.get("type").as_str();
        if matches!(of_type, Some("InternalIP" | "ExternalIP")) {
            outside.insert(address);
        }
    }
    let mut blocks = written_blocks(&spec.get("ipam").mapping()?.get("podCIDRs"))?;
    refuse_odd_blocks(&mut blocks, &outside, warnings);
    let annotations = top.get("metadata").get("annotations");
    let high_scale = annotations.get(HIGH_SCALE);
    let labels = labels(&top.get("metadata").get("labels"));
    let is_of_agent = labels.get(MANAGED_BY).is_some_and(|by| by == US);
    Ok(Node {
        name: name.to_owned(),
        addresses,
        health: pair(&spec.get("health"))?,
        ingress: pair(&spec.get("ingress"))?,
        pod_blocks: blocks.into_values().collect(),
        is_unlabelled: is_of_agent && annotations.get(COPIED_LABELS).value.is_none(),
        labels,
        high_scale: high_scale.as_str().and_then(TunnelMode::of),
    })
}

/// Labels of the object. A value that is no text is left out: a node is read with whatever labels.
fn labels(field: &Field<'_>) -> BTreeMap<String, String> {
    let labels = field.entries();
    labels
        .filter_map(|(key, value)| Some((key.to_owned(), value.as_str()?.to_owned())))
        .collect()
}

/// The IPv4 and the IPv6 address of a field.
fn pair(field: &Field<'_>) -> Checked<BTreeSet<IpAddr>> {
    let mut found = BTreeSet::new();
    if field.value.is_some() {
        only(field, &["ipv4", "ipv6"], &[])?;
    }
    for (_, written) in field.entries() {
        // Cilium writes an empty text where there is none.
        if written.as_str() != Some("") {
            found.insert(address(&written)?);
        }
    }
    Ok(found)
}

/// Blocks by the path of their field.
type Blocks = BTreeMap<String, IpNet>;

fn written_blocks(field: &Field<'_>) -> Checked<Blocks> {
    let blocks = field.items()?.map(|item| {
        let block = prefix(&item)?;
        Ok((item.path, block))
    });
    blocks.collect()
}

/// Leaves out blocks that cannot be those of one node's pods: otherwise no address outside the
/// cluster would count as the world. The node's addresses count all the same.
fn refuse_odd_blocks(blocks: &mut Blocks, nodes: &BTreeSet<IpAddr>, warnings: &mut Vec<String>) {
    blocks.retain(|path, block| {
        let widest = match block {
            IpNet::V4(_) => WIDEST_V4,
            IpNet::V6(_) => WIDEST_V6,
        };
        let own = nodes.iter().find(|address| block.contains(*address));
        let reason = match own {
            _ if block.prefix_len() < widest => format!("is wider than a /{widest}"),
            _ if block.addr().is_loopback() || block.addr().is_multicast() => {
                "has no addresses of pods".to_owned()
            }
            Some(own) => format!("contains the node's own address {own}"),
            None => return true,
        };
        warnings.push(format!(
            "{path}: `{block}` {reason}, so it is not used: unknown addresses in it remain the \
             world; write the block that this node's pods have their addresses from"
        ));
        false
    });
}

/// Reads a `Node` of Kubernetes.
pub(in crate::policy) fn read(
    name: &str,
    value: &Value,
    warnings: &mut Vec<String>,
) -> Checked<Node> {
    let top = Field::top(value);
    let mut addresses = BTreeSet::new();
    for item in top.get("status").mapping()?.get("addresses").items()? {
        let of_type = item.get("type").optional_text()?;
        // The other types are names.
        if matches!(of_type, Some("InternalIP" | "ExternalIP")) {
            addresses.insert(address(&item.get("address"))?);
        }
    }
    let spec = top.get("spec").mapping()?;
    let mut blocks = written_blocks(&spec.get("podCIDRs"))?;
    let single = spec.get("podCIDR");
    if single.value.is_some_and(|one| one.as_str() != Some("")) {
        let one = prefix(&single)?;
        if !blocks.values().any(|block| *block == one) {
            blocks.insert(single.path, one);
        }
    }
    refuse_odd_blocks(&mut blocks, &addresses, warnings);
    Ok(Node {
        name: name.to_owned(),
        addresses,
        health: BTreeSet::new(),
        ingress: BTreeSet::new(),
        pod_blocks: blocks.into_values().collect(),
        labels: labels(&top.get("metadata").get("labels")),
        is_unlabelled: false,
        high_scale: None,
    })
}
