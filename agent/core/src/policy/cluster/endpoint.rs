//! `CiliumEndpoint`: a pod as Cilium describes it, with the labels of its identity.

use std::net::IpAddr;

use serde_json::Value;

use super::{
    metadata,
    read::{address, not_reserved, optional_text, port, protocol},
};
use crate::{
    labels::{Label, LabelSet},
    named_port::NamedPorts,
    policy::{
        head::Head,
        validate::{
            fault::{Checked, Fault},
            list, mapping, text,
        },
    },
};

/// A pod as Cilium describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CiliumEndpoint {
    pub namespace: String,
    /// Its name, that of the pod.
    pub name: String,
    /// Labels of its identity, from `status.identity.labels`.
    pub labels: LabelSet,
    pub addresses: Vec<IpAddr>,
    /// When it was made, nanoseconds since 1970.
    pub created: Option<u64>,
    pub ports: NamedPorts,
}

/// Reads an endpoint. One without an identity or addresses yet has no labels or addresses.
pub(in crate::policy) fn read(head: &Head, value: &Value) -> Checked<CiliumEndpoint> {
    let metadata = metadata::read(head, value)?;
    let status = mapping("status", value.get("status"))?;
    let field = |name: &str| status.and_then(|status| status.get(name));
    let identity = mapping("status.identity", field("identity"))?;
    let path = "status.identity.labels";
    let mut labels = Vec::new();
    let all = list(path, identity.and_then(|identity| identity.get("labels")))?;
    for (n, item) in all.iter().enumerate() {
        let path = format!("{path}[{n}]");
        let label = Label::parse(text(&path, item)?).map_err(|error| {
            let remedy = "write it as Cilium does";
            Fault::new(&path, &error.to_string(), remedy)
        })?;
        not_reserved(&path, &label)?;
        labels.push(label);
    }
    let networking = mapping("status.networking", field("networking"))?;
    let path = "status.networking.addressing";
    let mut addresses = Vec::new();
    let all = list(path, networking.and_then(|map| map.get("addressing")))?;
    for (n, item) in all.iter().enumerate() {
        for family in ["ipv4", "ipv6"] {
            let path = format!("{path}[{n}].{family}");
            if optional_text(&path, item.get(family))?.is_some() {
                addresses.push(address(&path, item.get(family))?);
            }
        }
    }
    Ok(CiliumEndpoint {
        namespace: head.namespace.clone().unwrap_or_default(),
        name: head.name.clone(),
        labels: LabelSet::new(labels),
        addresses,
        created: metadata.created,
        ports: named_ports(field("named-ports"))?,
    })
}

fn named_ports(value: Option<&Value>) -> Checked<NamedPorts> {
    let path = "status.named-ports";
    let mut texts = Vec::new();
    for (n, item) in list(path, value)?.iter().enumerate() {
        let path = format!("{path}[{n}]");
        let number = port(&format!("{path}.port"), item.get("port"))?;
        let protocol = protocol(&format!("{path}.protocol"), item.get("protocol"))?;
        if let Some(name) = optional_text(&format!("{path}.name"), item.get("name"))? {
            texts.push(format!("{name}={number}/{}", protocol.as_str()));
        }
    }
    NamedPorts::parse(&texts)
        .map_err(|error| Fault::new(path, &error.to_string(), "correct the named ports"))
}
