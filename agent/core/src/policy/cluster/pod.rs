//! `Pod`: its labels, its addresses, and its named ports.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use serde_json::Value;

use super::{
    metadata,
    read::{address, optional_bool, optional_text, port, protocol},
};
use crate::{
    named_port::{NamedPorts, PortName},
    policy::{
        head::Head,
        validate::{
            fault::{Checked, Fault},
            list, mapping,
        },
    },
};

/// The fields of a Pod that have a meaning here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    pub namespace: String,
    pub name: String,
    /// Its uid; that of a static pod is the one that its kubelet uses.
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
    let metadata = metadata::read(head, value)?;
    let spec = mapping("spec", value.get("spec"))?;
    let field = |name: &str| spec.and_then(|spec| spec.get(name));
    let text = |name: &str| optional_text(&format!("spec.{name}"), field(name));
    let account = match text("serviceAccountName")? {
        Some(account) => Some(account),
        None => text("serviceAccount")?,
    };
    let on_host = optional_bool("spec.hostNetwork", field("hostNetwork"))?;
    Ok(Pod {
        namespace: head.namespace.clone().unwrap_or_default(),
        name: head.name.clone(),
        uid: uid(value)?,
        labels: metadata.labels,
        service_account: account.map(str::to_owned),
        node: text("nodeName")?.map(str::to_owned),
        addresses: addresses(value, on_host == Some(true))?,
        created: metadata.created,
        ports: named_ports(field("containers"), field("initContainers"), warnings)?,
    })
}

/// Annotation of a static pod's object in the API: the object has a uid of its own, and the node
/// uses this one.
const MIRRORED: &str = "kubernetes.io/config.mirror";

fn uid(value: &Value) -> Checked<Option<Arc<str>>> {
    let metadata = value.get("metadata");
    let field = |name: &str| metadata.and_then(|metadata| metadata.get(name));
    let annotations = mapping("metadata.annotations", field("annotations"))?;
    let mirrored = annotations.and_then(|annotations| annotations.get(MIRRORED));
    let uid = match optional_text(&format!("metadata.annotations.{MIRRORED}"), mirrored)? {
        Some(uid) => Some(uid),
        None => optional_text("metadata.uid", field("uid"))?,
    };
    Ok(uid.map(Arc::from))
}

/// Addresses of a pod that is alive and has a network of its own.
fn addresses(value: &Value, on_host: bool) -> Checked<Vec<IpAddr>> {
    let status = mapping("status", value.get("status"))?;
    let field = |name: &str| status.and_then(|status| status.get(name));
    let phase = optional_text("status.phase", field("phase"))?;
    let mut found = Vec::new();
    if optional_text("status.podIP", field("podIP"))?.is_some() {
        found.push(address("status.podIP", field("podIP"))?);
    }
    let all = list("status.podIPs", field("podIPs"))?;
    for (n, item) in all.iter().enumerate() {
        let one = address(&format!("status.podIPs[{n}].ip"), item.get("ip"))?;
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
fn named_ports(
    containers: Option<&Value>,
    init: Option<&Value>,
    warnings: &mut Vec<String>,
) -> Checked<NamedPorts> {
    let mut found: BTreeMap<PortName, (String, String)> = BTreeMap::new();
    for (path, all) in [
        ("spec.containers", containers),
        ("spec.initContainers", init),
    ] {
        for (n, container) in list(path, all)?.iter().enumerate() {
            let restarts = container.get("restartPolicy").and_then(Value::as_str);
            if path == "spec.initContainers" && restarts != Some("Always") {
                continue;
            }
            let path = format!("{path}[{n}]");
            ports_of(&path, container, &mut found, warnings)?;
        }
    }
    let texts: Vec<&str> = found.values().map(|(text, _)| text.as_str()).collect();
    NamedPorts::parse(&texts).map_err(|error| {
        Fault::new(
            "spec.containers",
            &error.to_string(),
            "correct the named ports",
        )
    })
}

fn ports_of(
    path: &str,
    container: &Value,
    found: &mut BTreeMap<PortName, (String, String)>,
    warnings: &mut Vec<String>,
) -> Checked<()> {
    let within = format!("{path}.ports[");
    let path = format!("{path}.ports");
    for (n, item) in list(&path, container.get("ports"))?.iter().enumerate() {
        let path = format!("{path}[{n}]");
        let number = port(&format!("{path}.containerPort"), item.get("containerPort"))?;
        let protocol = protocol(&format!("{path}.protocol"), item.get("protocol"))?;
        let field = format!("{path}.name");
        let Some(written) = optional_text(&field, item.get("name"))? else {
            continue;
        };
        let name: PortName = written.parse().map_err(|_| {
            let reason = format!("`{written}` is not a port name");
            let remedy = "write at most 15 letters, digits and single dashes inside, at least one \
                          of them a letter, for example http or dns-tcp";
            Fault::new(&field, &reason, remedy)
        })?;
        let text = format!("{name}={number}/{}", protocol.as_str());
        match found.get(&name) {
            Some((_, first)) if first.starts_with(&within) => {
                let reason = format!("`{name}` is the name of {first} already");
                let remedy = "give each port of a container a different name";
                return Err(Fault::new(&field, &reason, remedy));
            }
            Some((other, first)) if *other != text => warnings.push(format!(
                "{field}: `{name}` is the name of {first} already, for another port ({other}): \
                 the first one counts, as in Kubernetes"
            )),
            Some(_) => {}
            None => {
                found.insert(name, (text, path));
            }
        }
    }
    Ok(())
}
