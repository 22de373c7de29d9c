//! Objects of the cluster that say where its nodes and API servers are.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use serde_json::Value;

use super::validate::{Checked, Fault, list, object, text};
use crate::{
    ipcache::metadata::Source,
    labels::{Label, LabelSet, RESERVED},
};

/// What an object says of addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClusterObject {
    /// A `CiliumNode`.
    Node(Node),
    /// An `EndpointSlice` of the service `default/kubernetes`.
    ApiServers(BTreeSet<IpAddr>),
}

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
}

impl ClusterObject {
    /// Where it has its knowledge from.
    pub const fn source(&self) -> Source {
        match self {
            Self::Node(_) => Source::CustomResource,
            Self::ApiServers(_) => Source::KubeApiserver,
        }
    }

    /// Labels of each address; the node called `own` is this one (Cilium `pkg/node/manager`,
    /// nodeIdentityLabels).
    pub fn labels(&self, own: Option<&str>) -> BTreeMap<IpAddr, LabelSet> {
        let mut found: BTreeMap<IpAddr, Vec<Label>> = BTreeMap::new();
        let mut say = |addresses: &BTreeSet<IpAddr>, key: &str| {
            for address in addresses {
                let label = Label::new(RESERVED, key, "");
                found.entry(*address).or_default().push(label);
            }
        };
        match self {
            Self::Node(node) => {
                let is_own = own == Some(node.name.as_str());
                say(&node.addresses, if is_own { "host" } else { "remote-node" });
                say(&node.health, "health");
                say(&node.ingress, "ingress");
            }
            Self::ApiServers(addresses) => say(addresses, "kube-apiserver"),
        }
        let sets = found.into_iter();
        sets.map(|(address, labels)| (address, LabelSet::new(labels)))
            .collect()
    }
}

/// Checks a `CiliumNode`. What says how nodes are reached, and labels of nodes, mean nothing
/// here and are taken.
pub fn node(name: &str, value: &Value) -> Checked<ClusterObject> {
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
    for (n, item) in list("spec.addresses", spec.get("addresses"))?
        .iter()
        .enumerate()
    {
        let path = format!("spec.addresses[{n}]");
        let map = object(&path, item, &["type", "ip"], &[])?;
        addresses.insert(one(&format!("{path}.ip"), map.get("ip"))?);
    }
    let pair = |field: &str| {
        let mut found = BTreeSet::new();
        let path = format!("spec.{field}");
        if let Some(value) = spec.get(field) {
            let map = object(&path, value, &["ipv4", "ipv6"], &[])?;
            for (family, value) in map {
                // Cilium writes an empty text where there is none.
                if value.as_str() != Some("") {
                    found.insert(one(&format!("{path}.{family}"), Some(value))?);
                }
            }
        }
        Ok(found)
    };
    Ok(ClusterObject::Node(Node {
        name: name.to_owned(),
        addresses,
        health: pair("health")?,
        ingress: pair("ingress")?,
    }))
}

/// Label of an `EndpointSlice` that names its service.
const SERVICE: &str = "kubernetes.io/service-name";

/// Checks an `EndpointSlice` of the API servers. An address counts whether it is ready or not.
pub fn api_servers(namespace: &str, value: &Value) -> Checked<ClusterObject> {
    let labels = value
        .get("metadata")
        .and_then(|metadata| metadata.get("labels"));
    let service = labels
        .and_then(|labels| labels.get(SERVICE))
        .and_then(Value::as_str);
    if (namespace, service) != ("default", Some("kubernetes")) {
        return Err(Fault::new(
            &format!("metadata.labels.{SERVICE}"),
            "is not kubernetes, in namespace default",
            "remove the document: only the slices of the API servers mean something here",
        ));
    }
    let mut addresses = BTreeSet::new();
    for (n, item) in list("endpoints", value.get("endpoints"))?
        .iter()
        .enumerate()
    {
        let path = format!("endpoints[{n}].addresses");
        for (n, item) in list(&path, item.get("addresses"))?.iter().enumerate() {
            addresses.insert(one(&format!("{path}[{n}]"), Some(item))?);
        }
    }
    Ok(ClusterObject::ApiServers(addresses))
}

fn one(path: &str, value: Option<&Value>) -> Checked<IpAddr> {
    let null = Value::Null;
    let written = text(path, value.unwrap_or(&null))?;
    let fault = |reason: &str| {
        let remedy = "write the address alone, for example 192.0.2.1";
        Fault::new(path, &format!("`{written}` {reason}"), remedy)
    };
    let address: IpAddr = written.parse().map_err(|_| fault("is not an address"))?;
    let odd = address.is_unspecified() || address.is_loopback() || address.is_multicast();
    if odd {
        return Err(fault("is not an address of one machine"));
    }
    Ok(address)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::parse::{PolicyDocument, PolicyError, parse_documents};

    fn read(text: &str) -> Result<PolicyDocument, PolicyError> {
        parse_documents(text, "test").remove(0)
    }

    fn labels(document: &PolicyDocument, own: &str) -> Vec<String> {
        let (_, labels) = document.labels(Some(own));
        let texts = labels.iter();
        let texts = texts.map(|(prefix, labels)| format!("{prefix} {}", labels.texts().join(",")));
        texts.collect()
    }

    /// As `kubectl get ciliumnode -o yaml` writes it.
    const NODE: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNode
metadata: {name: worker-2, labels: {zone: a}, resourceVersion: "7"}
spec:
  addresses:
  - {ip: 192.0.2.2, type: InternalIP}
  - {ip: "2001:db8::2", type: ExternalIP}
  - {ip: 10.2.0.1, type: CiliumInternalIP}
  alibaba-cloud: {}
  azure: {}
  bootid: 6c4b
  encryption: {}
  eni: {}
  health: {ipv4: 10.2.0.9, ipv6: ""}
  ingress: {ipv4: 10.2.0.8}
  ipam: {podCIDRs: [10.2.0.0/24], pools: {}}
status: {ipam: {}}
"#;

    #[test]
    fn nodes_are_remote_but_for_ones_own() {
        let node = read(NODE).unwrap();
        assert_eq!(node.key, "CiliumNode/worker-2");
        assert_eq!(
            labels(&node, "worker-1"),
            [
                "10.2.0.1/32 reserved:remote-node",
                "10.2.0.8/32 reserved:ingress",
                "10.2.0.9/32 reserved:health",
                "192.0.2.2/32 reserved:remote-node",
                "2001:db8::2/128 reserved:remote-node",
            ]
        );
        assert!(labels(&node, "worker-2").contains(&"192.0.2.2/32 reserved:host".to_owned()));
        assert_eq!(node.labels(None).0, Source::CustomResource);
    }

    const SLICE: &str = r#"
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: kubernetes, namespace: default, labels: {kubernetes.io/service-name: kubernetes}}
addressType: IPv4
endpoints:
- addresses: [192.0.2.1]
  conditions: {ready: true}
- addresses: [192.0.2.9]
  conditions: {ready: false}
ports: [{name: https, port: 6443, protocol: TCP}]
"#;

    #[test]
    fn api_servers_are_the_endpoints_of_their_service() {
        let slice = read(SLICE).unwrap();
        assert_eq!(slice.key, "EndpointSlice/default/kubernetes");
        let api = |ip| format!("{ip}/32 reserved:kube-apiserver");
        assert_eq!(labels(&slice, ""), [api("192.0.2.1"), api("192.0.2.9")]);
        assert_eq!(slice.labels(None).0, Source::KubeApiserver);
    }

    #[test]
    fn refused_with_the_field() {
        let service = "metadata.labels.kubernetes.io/service-name";
        for (text, from, to, field) in [
            (NODE, "192.0.2.2", "node-2", "spec.addresses[0].ip"),
            (NODE, "192.0.2.2", "127.0.0.1", "spec.addresses[0].ip"),
            (NODE, "{ip: 192.0.2.2,", "{", "spec.addresses[0].ip"),
            (NODE, "ipam:", "ipams:", "spec.ipams"),
            (NODE, "10.2.0.9", "10.2.0", "spec.health.ipv4"),
            (NODE, "cilium.io/v2", "v1", "apiVersion"),
            (
                SLICE,
                "service-name: kubernetes",
                "service-name: other",
                service,
            ),
            (SLICE, "namespace: default", "namespace: other", service),
            (
                SLICE,
                "[192.0.2.9]",
                "[api.test]",
                "endpoints[1].addresses[0]",
            ),
            (SLICE, "discovery.k8s.io/v1", "v1", "apiVersion"),
        ] {
            let error = read(&text.replace(from, to)).unwrap_err();
            assert_eq!(error.field, field, "{from} → {to}: {error}");
        }
    }
}
