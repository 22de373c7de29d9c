//! `CiliumNode` and `Node`: addresses of a node, and the blocks of its pods.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::IpNet;
use serde_json::{Map, Value};

use super::read::{address, optional_text};
use crate::{
    labels::{Label, LabelSet, RESERVED},
    policy::validate::{Checked, Fault, list, mapping, object, prefix},
};

/// A node of the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its name.
    pub name: String,
    /// Its own addresses, of whatever type.
    pub addresses: BTreeSet<IpAddr>,
    /// Those of its health endpoint.
    pub health: BTreeSet<IpAddr>,
    /// Those that its ingress proxy sends from.
    pub ingress: BTreeSet<IpAddr>,
    /// Blocks that its pods' addresses are from.
    pub pod_blocks: BTreeSet<IpNet>,
}

impl Node {
    /// Labels of each address; the node called `own` is this one (Cilium `pkg/node/manager`,
    /// nodeIdentityLabels).
    pub(in crate::policy) fn address_labels(&self, own: Option<&str>) -> BTreeMap<IpNet, LabelSet> {
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
        let sets = found.into_iter();
        sets.map(|(prefix, labels)| (prefix, LabelSet::new(labels)))
            .collect()
    }
}

/// Reads a `CiliumNode`. Fields that say how nodes are reached, and labels of nodes, mean nothing
/// here and are accepted.
pub(in crate::policy) fn read_cilium(name: &str, value: &Value) -> Checked<Node> {
    let Some(spec) = value.get("spec") else {
        return Err(Fault::new("spec", "is missing", "add spec.addresses"));
    };
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
    let spec = object("spec", spec, &known, &[])?;
    let mut addresses = BTreeSet::new();
    let all = list("spec.addresses", spec.get("addresses"))?;
    for (n, item) in all.iter().enumerate() {
        let path = format!("spec.addresses[{n}]");
        let map = object(&path, item, &["type", "ip"], &[])?;
        addresses.insert(address(&format!("{path}.ip"), map.get("ip"))?);
    }
    let ipam = mapping("spec.ipam", spec.get("ipam"))?;
    let blocks = ipam.and_then(|ipam| ipam.get("podCIDRs"));
    Ok(Node {
        name: name.to_owned(),
        addresses,
        health: pair(spec, "health")?,
        ingress: pair(spec, "ingress")?,
        pod_blocks: blocks_of("spec.ipam.podCIDRs", blocks)?,
    })
}

/// The IPv4 and the IPv6 address of a field.
fn pair(spec: &Map<String, Value>, field: &str) -> Checked<BTreeSet<IpAddr>> {
    let mut found = BTreeSet::new();
    let path = format!("spec.{field}");
    if let Some(value) = spec.get(field) {
        let map = object(&path, value, &["ipv4", "ipv6"], &[])?;
        for (family, value) in map {
            // Cilium writes an empty text where there is none.
            if value.as_str() != Some("") {
                found.insert(address(&format!("{path}.{family}"), Some(value))?);
            }
        }
    }
    Ok(found)
}

fn blocks_of(path: &str, value: Option<&Value>) -> Checked<BTreeSet<IpNet>> {
    let all = list(path, value)?.iter().enumerate();
    all.map(|(n, item)| prefix(&format!("{path}[{n}]"), item))
        .collect()
}

/// Reads a `Node` of Kubernetes.
pub(in crate::policy) fn read(name: &str, value: &Value) -> Checked<Node> {
    let status = mapping("status", value.get("status"))?;
    let all = status.and_then(|status| status.get("addresses"));
    let mut addresses = BTreeSet::new();
    for (n, item) in list("status.addresses", all)?.iter().enumerate() {
        let path = format!("status.addresses[{n}]");
        let of_type = optional_text(&format!("{path}.type"), item.get("type"))?;
        // The other types are names.
        if matches!(of_type, Some("InternalIP" | "ExternalIP")) {
            addresses.insert(address(&format!("{path}.address"), item.get("address"))?);
        }
    }
    let spec = mapping("spec", value.get("spec"))?;
    let field = |name: &str| spec.and_then(|spec| spec.get(name));
    let mut pod_blocks = blocks_of("spec.podCIDRs", field("podCIDRs"))?;
    if let Some(one) = field("podCIDR").filter(|one| one.as_str() != Some("")) {
        pod_blocks.insert(prefix("spec.podCIDR", one)?);
    }
    Ok(Node {
        name: name.to_owned(),
        addresses,
        health: BTreeSet::new(),
        ingress: BTreeSet::new(),
        pod_blocks,
    })
}
