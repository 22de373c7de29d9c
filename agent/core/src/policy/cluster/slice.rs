//! `EndpointSlice`: the backends of a Service.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use netpol::{
    field::{Checked, Field},
    policy::Protocol,
};
use serde_json::Value;

use super::{
    metadata,
    read::{address, optional_bool, port, protocol},
};
use crate::{
    labels::{Label, LabelSet, RESERVED},
    policy::head::Head,
};

/// Label that names the Service.
const SERVICE: &str = "kubernetes.io/service-name";

/// The fields of an EndpointSlice that have a meaning here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointSlice {
    pub namespace: String,
    pub name: String,
    /// The Service, in the same namespace; `None` if the slice belongs to no Service.
    pub service: Option<String>,
    pub backends: Vec<Backend>,
    /// Ports that every backend has.
    pub ports: Vec<SlicePort>,
}

/// A machine or pod behind a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backend {
    /// Its addresses: of one family, and all of the same machine or pod. An unspecified address stands
    /// for one that cannot be read here: kube-proxy may still read it.
    pub addresses: Vec<IpAddr>,
    /// Whether it may get new connections.
    pub ready: bool,
    /// Whether it answers, ready or not.
    pub serving: bool,
    /// Whether it is about to end.
    pub terminating: bool,
    /// The pod behind it, `namespace/name`.
    pub pod: Option<String>,
}

/// A port of all backends of a slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlicePort {
    /// Its name, which is that of the Service's port; empty if the Service's port has none.
    pub name: String,
    pub protocol: Protocol,
    /// The backends' port; `None` = every port. 0 stands for a number that is no port: the API server
    /// accepts any number.
    pub port: Option<u16>,
}

impl EndpointSlice {
    /// Whether its backends are the API servers: it is of the Service `default/kubernetes`.
    pub fn is_of_api_servers(&self) -> bool {
        self.namespace == "default" && self.service.as_deref() == Some("kubernetes")
    }

    /// Labels of each address of API servers. An address counts whether it is ready or not.
    pub(in crate::policy) fn api_server_labels(&self) -> BTreeMap<IpNet, LabelSet> {
        let label = LabelSet::new(vec![Label::new(RESERVED, "kube-apiserver", "")]);
        let addresses = self.backends.iter().flat_map(|backend| &backend.addresses);
        addresses
            .filter(|address| !address.is_unspecified())
            .map(|address| (IpNet::from(*address), label.clone()))
            .collect()
    }
}

/// Reads an EndpointSlice; adds to `warnings` the remarks for its author.
pub(in crate::policy) fn read(
    head: &Head,
    value: &Value,
    warnings: &mut Vec<String>,
) -> Checked<EndpointSlice> {
    let top = Field::top(value);
    let metadata = metadata::read(head, &top)?;
    let service = metadata.labels.get(SERVICE);
    if service.is_none() {
        warnings.push(format!(
            "metadata.labels.{SERVICE} is missing: the slice belongs to no Service, and its \
             backends mean nothing"
        ));
    }
    Ok(EndpointSlice {
        namespace: head.namespace.clone().unwrap_or_default(),
        name: head.name.clone(),
        service: service.cloned(),
        backends: backends(&top, warnings)?,
        ports: ports(&top.get("ports"), warnings)?,
    })
}

fn backends(top: &Field<'_>, warnings: &mut Vec<String>) -> Checked<Vec<Backend>> {
    let field = top.get("addressType");
    let family = field.optional_text()?;
    match family {
        None | Some("IPv4" | "IPv6") => {}
        Some("FQDN") => {
            let warning = "addressType: backends of type FQDN are names, not addresses: they \
                           mean nothing here";
            warnings.push(warning.to_owned());
            return Ok(Vec::new());
        }
        Some(other) => {
            let reason = format!("`{other}` is not a type of address");
            return field.refuse(reason, "write IPv4, IPv6 or FQDN");
        }
    }
    let mut found = Vec::new();
    for item in top.get("endpoints").items()? {
        let mut addresses = Vec::new();
        for written in item.get("addresses").items()? {
            match address_of(family, &written) {
                Ok(one) => addresses.push(one),
                // The slice must not stay as it was: packets may go to this backend all the same.
                Err(refusal) => {
                    warnings.push(format!(
                        "{refusal}; until then the Service is closed to restricted endpoints"
                    ));
                    addresses.extend(unreadable(family));
                }
            }
        }
        let conditions = item.get("conditions").mapping()?;
        let condition = |name: &str| optional_bool(&conditions.get(name));
        let ready = condition("ready")?.unwrap_or(true);
        found.push(Backend {
            addresses,
            ready,
            serving: condition("serving")?.unwrap_or(ready),
            terminating: condition("terminating")?.unwrap_or(false),
            pod: target(item.get("targetRef"))?,
        });
    }
    Ok(found)
}

fn address_of(family: Option<&str>, field: &Field<'_>) -> Checked<IpAddr> {
    let one = address(field)?;
    let of = if one.is_ipv4() { "IPv4" } else { "IPv6" };
    if family.is_some_and(|family| family != of) {
        let reason = format!("`{one}` is not of the slice's addressType");
        let remedy = "put addresses of the other family into a slice of their own";
        return field.refuse(reason, remedy);
    }
    Ok(one)
}

/// Stands for an address that cannot be read, in each family that it may be of.
fn unreadable(family: Option<&str>) -> impl Iterator<Item = IpAddr> {
    let v4 = (family != Some("IPv6")).then_some(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
    let v6 = (family != Some("IPv4")).then_some(IpAddr::V6(Ipv6Addr::UNSPECIFIED));
    v4.into_iter().chain(v6)
}

/// The pod that a backend refers to.
fn target(field: Field<'_>) -> Checked<Option<String>> {
    let target = field.mapping()?;
    let text = |name: &str| target.get(name).optional_text();
    Ok(match (text("kind")?, text("namespace")?, text("name")?) {
        (Some("Pod"), Some(namespace), Some(name)) => Some(format!("{namespace}/{name}")),
        _ => None,
    })
}

fn ports(field: &Field<'_>, warnings: &mut Vec<String>) -> Checked<Vec<SlicePort>> {
    let ports = field.items()?.map(|item| {
        let number = item.get("port").present();
        Ok(SlicePort {
            name: item
                .get("name")
                .optional_text()?
                .unwrap_or_default()
                .to_owned(),
            protocol: protocol(&item.get("protocol"))?,
            port: number.map(|number| {
                port(&number).unwrap_or_else(|refusal| {
                    warnings.push(refusal.to_string());
                    0
                })
            }),
        })
    });
    ports.collect()
}
