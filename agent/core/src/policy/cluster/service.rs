//! `Service`: its addresses and ports.

use std::{collections::BTreeMap, net::IpAddr};

use netpol::{
    field::{Checked, Field},
    policy::Protocol,
};
use serde_json::Value;

use super::{
    metadata,
    read::{address, port, protocol},
};
use crate::policy::head::Head;

/// Label of a Service whose traffic another program than kube-proxy translates.
const OTHER_PROXY: &str = "service.kubernetes.io/service-proxy-name";

/// The fields of a Service that have a meaning here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    pub namespace: String,
    pub name: String,
    /// Addresses in the cluster. Empty if it is headless or an external name.
    pub cluster_ips: Vec<IpAddr>,
    /// Addresses outside the cluster that are routed to nodes.
    pub external_ips: Vec<IpAddr>,
    /// Addresses of its load balancer that nodes translate themselves (`ipMode: VIP`).
    pub load_balancer_ips: Vec<IpAddr>,
    pub ports: Vec<ServicePort>,
    /// Labels of the pods behind it; empty if its slices are written by hand.
    pub selector: BTreeMap<String, String>,
    /// Whether another program than kube-proxy translates it.
    pub has_other_proxy: bool,
}

/// An entry of `spec.ports`, as far as policy needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    /// Its name, which ports of slices repeat; empty if it has none.
    pub name: String,
    pub protocol: Protocol,
    /// The port that clients use.
    pub port: u16,
    /// The port of each node that leads to this port; `None` if there is no such port.
    pub node_port: Option<u16>,
}

pub(in crate::policy) fn read(head: &Head, value: &Value) -> Checked<Service> {
    let top = Field::top(value);
    let metadata = metadata::read(head, &top)?;
    let spec = top.get("spec").mapping()?;
    let mut cluster_ips = Vec::new();
    let single = spec.get("clusterIP");
    if single.optional_text()?.is_some_and(|text| text != "None") {
        cluster_ips.push(address(&single)?);
    }
    cluster_ips.extend(addresses(&spec.get("clusterIPs"))?);
    cluster_ips.sort_unstable();
    cluster_ips.dedup();
    let mut selector = BTreeMap::new();
    for (key, value) in spec.get("selector").mapping()?.entries() {
        selector.insert(key.to_owned(), value.text()?.to_owned());
    }
    Ok(Service {
        namespace: head.namespace.clone().unwrap_or_default(),
        name: head.name.clone(),
        cluster_ips,
        external_ips: addresses(&spec.get("externalIPs"))?,
        load_balancer_ips: load_balancer(top.get("status"))?,
        ports: ports(&spec.get("ports"))?,
        selector,
        has_other_proxy: metadata.labels.contains_key(OTHER_PROXY),
    })
}

fn addresses(field: &Field<'_>) -> Checked<Vec<IpAddr>> {
    let all = field.items()?;
    let all = all.filter(|item| !matches!(item.as_str(), Some("None" | "")));
    all.map(|item| address(&item)).collect()
}

fn load_balancer(status: Field<'_>) -> Checked<Vec<IpAddr>> {
    let status = status.mapping()?.get("loadBalancer").mapping()?;
    let mut found = Vec::new();
    for item in status.get("ingress").items()? {
        let mode = item.get("ipMode").optional_text()?;
        let ip = item.get("ip");
        if ip.optional_text()?.is_some() && mode != Some("Proxy") {
            found.push(address(&ip)?);
        }
    }
    Ok(found)
}

fn ports(field: &Field<'_>) -> Checked<Vec<ServicePort>> {
    let ports = field.items()?.map(|item| {
        Ok(ServicePort {
            name: item
                .get("name")
                .optional_text()?
                .unwrap_or_default()
                .to_owned(),
            protocol: protocol(&item.get("protocol"))?,
            port: port(&item.get("port"))?,
            node_port: node_port(&item.get("nodePort")),
        })
    });
    ports.collect()
}

/// No policy depends on the node port: an invalid one does not refuse the Service.
fn node_port(field: &Field<'_>) -> Option<u16> {
    port(field).ok()
}
