//! What NetworkPolicies allow, read straight from the documents as the documentation of the
//! Kubernetes API describes them. Nothing here is shared with the code under test.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;
use serde_json::Value;

/// Labels of a pod or of a namespace.
pub(super) type Labels = BTreeMap<String, String>;

/// A pod.
#[derive(Clone, Debug)]
pub(super) struct Pod {
    pub(super) namespace: String,
    pub(super) labels: Labels,
    /// Name, protocol and number of its container ports.
    pub(super) ports: Vec<(String, String, u16)>,
}

/// A sender or a receiver.
#[derive(Clone, Copy, Debug)]
pub(super) enum Party<'a> {
    Pod(&'a Pod),
    /// The node on which the pods run.
    Node,
    Outside(IpAddr),
}

/// A packet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packet<'a> {
    pub(super) from: Party<'a>,
    pub(super) to: Party<'a>,
    /// `TCP`, `UDP`, `SCTP` or another one, which has no ports.
    pub(super) protocol: &'a str,
    pub(super) port: u16,
}

/// Whether the policies let a packet pass. `namespaces` are the labels of each namespace.
pub(super) fn allows(
    policies: &[&Value],
    namespaces: &BTreeMap<String, Labels>,
    packet: Packet<'_>,
) -> bool {
    let reader = Reader { namespaces, packet };
    reader.side(policies, "Egress") && reader.side(policies, "Ingress")
}

struct Reader<'a> {
    namespaces: &'a BTreeMap<String, Labels>,
    packet: Packet<'a>,
}

impl Reader<'_> {
    /// Whether the policies of one type let the packet pass.
    fn side(&self, policies: &[&Value], policy_type: &str) -> bool {
        let (own, peer) = match policy_type {
            "Egress" => (self.packet.from, self.packet.to),
            _ => (self.packet.to, self.packet.from),
        };
        let Party::Pod(own) = own else {
            return true;
        };
        // The node reaches its own pods, whatever the policies are.
        if policy_type == "Ingress" && matches!(peer, Party::Node) {
            return true;
        }
        let of_pod = policies.iter().filter(|policy| {
            namespace_of(policy) == own.namespace
                && types(policy).contains(&policy_type)
                && selects(&policy["spec"]["podSelector"], &own.labels)
        });
        let of_pod: Vec<&&Value> = of_pod.collect();
        of_pod.is_empty()
            || of_pod.iter().any(|policy| {
                let (rules, peers) = match policy_type {
                    "Egress" => (&policy["spec"]["egress"], "to"),
                    _ => (&policy["spec"]["ingress"], "from"),
                };
                items(rules).iter().any(|rule| {
                    self.peers(&rule[peers], namespace_of(policy), peer)
                        && self.ports(&rule["ports"])
                })
            })
    }

    fn peers(&self, peers: &Value, own: &str, peer: Party<'_>) -> bool {
        items(peers).is_empty() || items(peers).iter().any(|item| self.peer(item, own, peer))
    }

    fn peer(&self, item: &Value, own: &str, peer: Party<'_>) -> bool {
        match peer {
            Party::Node => false,
            Party::Outside(address) => {
                let block = &item["ipBlock"];
                let within = |text: &Value| {
                    let block: IpNet = text.as_str().unwrap().parse().unwrap();
                    block.contains(&address)
                };
                !block.is_null()
                    && within(&block["cidr"])
                    && !items(&block["except"]).iter().any(within)
            }
            Party::Pod(pod) => {
                let (pods, namespaces) = (&item["podSelector"], &item["namespaceSelector"]);
                let namespace = if namespaces.is_null() {
                    pod.namespace == own
                } else {
                    selects(namespaces, &self.namespaces[&pod.namespace])
                };
                let selected = pods.is_null() || selects(pods, &pod.labels);
                !(pods.is_null() && namespaces.is_null()) && namespace && selected
            }
        }
    }

    fn ports(&self, ports: &Value) -> bool {
        items(ports).is_empty() || items(ports).iter().any(|port| self.port(port))
    }

    fn port(&self, item: &Value) -> bool {
        let Packet {
            to, protocol, port, ..
        } = self.packet;
        if item["protocol"].as_str().unwrap_or("TCP") != protocol {
            return false;
        }
        match &item["port"] {
            Value::Null => true,
            Value::String(name) => match to {
                Party::Pod(pod) => pod
                    .ports
                    .iter()
                    .any(|(known, of, number)| known == name && of == protocol && *number == port),
                Party::Node | Party::Outside(_) => false,
            },
            first => {
                let first = first.as_u64().unwrap();
                let last = item["endPort"].as_u64().unwrap_or(first);
                (first..=last).contains(&u64::from(port))
            }
        }
    }
}

fn namespace_of(policy: &Value) -> &str {
    policy["metadata"]["namespace"].as_str().unwrap()
}

fn items(list: &Value) -> &[Value] {
    list.as_array().map_or(&[], Vec::as_slice)
}

fn types(policy: &Value) -> Vec<&str> {
    let spec = &policy["spec"];
    let listed: Vec<&str> = items(&spec["policyTypes"])
        .iter()
        .filter_map(Value::as_str)
        .collect();
    if !listed.is_empty() {
        listed
    } else if items(&spec["egress"]).is_empty() {
        vec!["Ingress"]
    } else {
        vec!["Ingress", "Egress"]
    }
}

fn selects(selector: &Value, labels: &Labels) -> bool {
    let pairs = selector["matchLabels"].as_object().into_iter().flatten();
    let mut pairs = pairs.map(|(key, value)| labels.get(key).map(String::as_str) == value.as_str());
    pairs.all(|holds| holds)
        && items(&selector["matchExpressions"])
            .iter()
            .all(|expression| {
                let value = labels.get(expression["key"].as_str().unwrap());
                let listed = value.is_some_and(|value| {
                    items(&expression["values"])
                        .iter()
                        .any(|other| other == value.as_str())
                });
                match expression["operator"].as_str().unwrap() {
                    "In" => listed,
                    "NotIn" => !listed,
                    "Exists" => value.is_some(),
                    "DoesNotExist" => value.is_none(),
                    other => panic!("{other}"),
                }
            })
}
