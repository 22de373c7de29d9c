//! `CiliumEndpoint`: a pod as Cilium describes it, with the labels of its identity.

use std::net::IpAddr;

use netpol::field::{Checked, Field};
use serde_json::Value;

use super::{
    metadata,
    read::{label, optional_address, port, protocol},
};
use crate::{
    labels::{Label, LabelSet},
    named_port::NamedPorts,
    policy::head::Head,
};

/// A pod as Cilium describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CiliumEndpoint {
    pub namespace: String,
    /// Its name, which is also the pod's.
    pub name: String,
    /// Labels of its identity, from `status.identity.labels`.
    pub labels: LabelSet,
    pub addresses: Vec<IpAddr>,
    /// When it was made, nanoseconds since 1970.
    pub created: Option<u64>,
    pub ports: NamedPorts,
}

/// Reads an endpoint. While it has no identity or no addresses yet, its labels or addresses are empty.
pub(in crate::policy) fn read(head: &Head, value: &Value) -> Checked<CiliumEndpoint> {
    let top = Field::top(value);
    let metadata = metadata::read(head, &top)?;
    let status = top.get("status").mapping()?;
    let labels = status.get("identity").mapping()?.get("labels").items()?;
    let labels = labels.map(|item| label(&item, item.text()?, "write it as Cilium does"));
    let labels = labels.collect::<Checked<Vec<Label>>>()?;
    let networking = status.get("networking").mapping()?;
    let mut addresses = Vec::new();
    for item in networking.get("addressing").items()? {
        for family in ["ipv4", "ipv6"] {
            addresses.extend(optional_address(&item.get(family))?);
        }
    }
    Ok(CiliumEndpoint {
        namespace: head.namespace.clone().unwrap_or_default(),
        name: head.name.clone(),
        labels: LabelSet::new(labels),
        addresses,
        created: metadata.created,
        ports: named_ports(&status.get("named-ports"))?,
    })
}

fn named_ports(field: &Field<'_>) -> Checked<NamedPorts> {
    let mut texts = Vec::new();
    for item in field.items()? {
        let number = port(&item.get("port"))?;
        let protocol = protocol(&item.get("protocol"))?;
        if let Some(name) = item.get("name").optional_text()? {
            texts.push(format!("{name}={number}/{}", protocol.as_str()));
        }
    }
    NamedPorts::parse(&texts)
        .map_err(|error| field.fault(error.to_string(), "correct the named ports"))
}
