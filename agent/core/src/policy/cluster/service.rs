//! `Service`: its addresses and ports.

use std::{collections::BTreeMap, net::IpAddr};

use serde_json::Value;

use super::{
    metadata,
    read::{Protocol, address, optional_text, port, protocol},
};
use crate::policy::{
    head::Head,
    validate::{fault::Checked, list, mapping, text},
};

/// Label of a Service whose traffic another program than kube-proxy translates.
const OTHER_PROXY: &str = "service.kubernetes.io/service-proxy-name";

/// The fields of a Service that have a meaning here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    pub namespace: String,
    pub name: String,
    /// Addresses in the cluster. Empty if it is headless or an external name.
    pub cluster_ips: Vec<IpAddr>,
    /// Addresses outside that are routed to nodes.
    pub external_ips: Vec<IpAddr>,
    /// Addresses of its load balancer that nodes translate themselves (`ipMode: VIP`).
    pub load_balancer_ips: Vec<IpAddr>,
    pub ports: Vec<ServicePort>,
    /// Labels of the pods behind it; empty if its slices are written by hand.
    pub selector: BTreeMap<String, String>,
    /// Another program than kube-proxy translates it.
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
}

pub(in crate::policy) fn read(head: &Head, value: &Value) -> Checked<Service> {
    let metadata = metadata::read(head, value)?;
    let spec = mapping("spec", value.get("spec"))?;
    let field = |name: &str| spec.and_then(|spec| spec.get(name));
    let mut cluster_ips = Vec::new();
    let single = optional_text("spec.clusterIP", field("clusterIP"))?;
    if single.is_some_and(|text| text != "None") {
        cluster_ips.push(address("spec.clusterIP", field("clusterIP"))?);
    }
    cluster_ips.extend(addresses("spec.clusterIPs", field("clusterIPs"))?);
    cluster_ips.sort_unstable();
    cluster_ips.dedup();
    let mut selector = BTreeMap::new();
    for (key, value) in mapping("spec.selector", field("selector"))?
        .into_iter()
        .flatten()
    {
        let value = text(&format!("spec.selector.{key}"), value)?;
        selector.insert(key.clone(), value.to_owned());
    }
    Ok(Service {
        namespace: head.namespace.clone().unwrap_or_default(),
        name: head.name.clone(),
        cluster_ips,
        external_ips: addresses("spec.externalIPs", field("externalIPs"))?,
        load_balancer_ips: load_balancer(value)?,
        ports: ports(field("ports"))?,
        selector,
        has_other_proxy: metadata.labels.contains_key(OTHER_PROXY),
    })
}

fn addresses(path: &str, value: Option<&Value>) -> Checked<Vec<IpAddr>> {
    let all = list(path, value)?.iter().enumerate();
    let all = all.filter(|(_, item)| !matches!(item.as_str(), Some("None" | "")));
    all.map(|(n, item)| address(&format!("{path}[{n}]"), Some(item)))
        .collect()
}

fn load_balancer(value: &Value) -> Checked<Vec<IpAddr>> {
    let status = mapping("status", value.get("status"))?;
    let status = status.and_then(|status| status.get("loadBalancer"));
    let status = mapping("status.loadBalancer", status)?;
    let path = "status.loadBalancer.ingress";
    let mut found = Vec::new();
    let all = list(path, status.and_then(|status| status.get("ingress")))?;
    for (n, item) in all.iter().enumerate() {
        let path = format!("{path}[{n}]");
        let mode = optional_text(&format!("{path}.ipMode"), item.get("ipMode"))?;
        let has_address = optional_text(&format!("{path}.ip"), item.get("ip"))?.is_some();
        if has_address && mode != Some("Proxy") {
            found.push(address(&format!("{path}.ip"), item.get("ip"))?);
        }
    }
    Ok(found)
}

fn ports(value: Option<&Value>) -> Checked<Vec<ServicePort>> {
    let mut found = Vec::new();
    for (n, item) in list("spec.ports", value)?.iter().enumerate() {
        let path = format!("spec.ports[{n}]");
        let name = optional_text(&format!("{path}.name"), item.get("name"))?;
        found.push(ServicePort {
            name: name.unwrap_or_default().to_owned(),
            protocol: protocol(&format!("{path}.protocol"), item.get("protocol"))?,
            port: port(&format!("{path}.port"), item.get("port"))?,
        });
    }
    Ok(found)
}
