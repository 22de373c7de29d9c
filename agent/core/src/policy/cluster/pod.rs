//! `Pod`: its labels, its addresses, and its named ports.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use netpol::field::{Checked, Field};
use serde_json::Value;

use super::{
    metadata,
    read::{address, optional_address, optional_bool, port, protocol},
};
use crate::{
    named_port::{NamedPorts, PortName, port_name},
    policy::head::Head,
};

/// The fields of a Pod that have a meaning here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    pub namespace: String,
    pub name: String,
    /// Its uid; for a static pod, the uid that its kubelet uses.
    pub uid: Option<Arc<str>>,
    /// Labels of the pod alone, without those of its namespace.
    pub labels: BTreeMap<String, String>,
    /// `spec.serviceAccountName`, or `spec.serviceAccount` if that is missing.
    pub service_account: Option<String>,
    /// The node that it runs on.
    pub node: Option<String>,
    /// Its addresses. Empty if it uses its node's network, or has ended: its address may be
    /// another pod's.
    pub addresses: Vec<IpAddr>,
    /// When it was made, nanoseconds since 1970.
    pub created: Option<u64>,
    /// Ports that its containers name.
    pub ports: NamedPorts,
}

/// Reads a Pod; adds to `warnings` the remarks for its author.
pub(in crate::policy) fn read(
    head: &Head,
    value: &Value,
    warnings: &mut Vec<String>,
) -> Checked<Pod> {
    let top = Field::top(value);
    let metadata = metadata::read(head, &top)?;
    let spec = top.get("spec").mapping()?;
    let text = |name: &str| spec.get(name).optional_text();
    let account = match text("serviceAccountName")? {
        Some(account) => Some(account),
        None => text("serviceAccount")?,
    };
    let on_host = optional_bool(&spec.get("hostNetwork"))?;
    Ok(Pod {
        namespace: head.namespace.clone().unwrap_or_default(),
        name: head.name.clone(),
        uid: uid(&top.get("metadata"))?,
        labels: metadata.labels,
        service_account: account.map(str::to_owned),
        node: text("nodeName")?.map(str::to_owned),
        addresses: addresses(top.get("status"), on_host == Some(true))?,
        created: metadata.created,
        ports: named_ports(&spec, warnings)?,
    })
}

/// Annotation of a static pod's object in the API: the object has a uid of its own, and the node
/// uses this one.
const MIRRORED: &str = "kubernetes.io/config.mirror";

fn uid(metadata: &Field<'_>) -> Checked<Option<Arc<str>>> {
    let annotations = metadata.get("annotations").mapping()?;
    let uid = match annotations.get(MIRRORED).optional_text()? {
        Some(uid) => Some(uid),
        None => metadata.get("uid").optional_text()?,
    };
    Ok(uid.map(Arc::from))
}

/// Addresses of a pod that is alive and has a network of its own.
fn addresses(status: Field<'_>, on_host: bool) -> Checked<Vec<IpAddr>> {
    let status = status.mapping()?;
    let phase = status.get("phase").optional_text()?;
    let mut found = Vec::new();
    found.extend(optional_address(&status.get("podIP"))?);
    for item in status.get("podIPs").items()? {
        let one = address(&item.get("ip"))?;
        if !found.contains(&one) {
            found.push(one);
        }
    }
    if on_host || matches!(phase, Some("Succeeded" | "Failed")) {
        found.clear();
    }
    Ok(found)
}

/// Named ports of the containers, and of those init containers that go on running.
fn named_ports(spec: &Field<'_>, warnings: &mut Vec<String>) -> Checked<NamedPorts> {
    let mut found: BTreeMap<PortName, (String, String)> = BTreeMap::new();
    for container in spec.get("containers").items()? {
        ports_of(&container.get("ports"), &mut found, warnings)?;
    }
    for container in spec.get("initContainers").items()? {
        if container.get("restartPolicy").as_str() == Some("Always") {
            ports_of(&container.get("ports"), &mut found, warnings)?;
        }
    }
    let texts: Vec<&str> = found.values().map(|(text, _)| text.as_str()).collect();
    NamedPorts::parse(&texts).map_err(|error| {
        let containers = spec.get("containers");
        containers.fault(error.to_string(), "correct the named ports")
    })
}

fn ports_of(
    ports: &Field<'_>,
    found: &mut BTreeMap<PortName, (String, String)>,
    warnings: &mut Vec<String>,
) -> Checked<()> {
    let within = format!("{}[", ports.path);
    for item in ports.items()? {
        let number = port(&item.get("containerPort"))?;
        let protocol = protocol(&item.get("protocol"))?;
        let field = item.get("name");
        let Some(written) = field.optional_text()? else {
            continue;
        };
        let name = port_name(written).map_err(|_| {
            let remedy = "write at most 15 letters, digits and single dashes inside, at least one \
                          of them a letter, for example http or dns-tcp";
            field.fault(format!("`{written}` is not a port name"), remedy)
        })?;
        let text = format!("{name}={number}/{}", protocol.as_str());
        match found.get(&name) {
            Some((_, first)) if first.starts_with(&within) => {
                let reason = format!("`{name}` is the name of {first} already");
                let remedy = "give each port of a container a different name";
                return field.refuse(reason, remedy);
            }
            Some((other, first)) if *other != text => warnings.push(format!(
                "{}: `{name}` is the name of {first} already, for another port ({other}): the \
                 first one counts, as in Kubernetes",
                field.path
            )),
            Some(_) => {}
            None => {
                found.insert(name, (text, item.path));
            }
        }
    }
    Ok(())
}
