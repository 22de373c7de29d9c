//! What NetworkPolicies allow, read straight from the documents as the documentation of the
//! Kubernetes API describes them. Nothing here is shared with the code under test.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;
use serde_json::Value;

/// Labels of a pod or of a namespace.
pub(super) type Labels = BTreeMap<String, String>;

/// A pod as the documents describe it.
#[derive(Clone, Debug)]
pub(super) struct Pod {
    pub(super) namespace: String,
    /// `None` while no document describes the namespace.
    pub(super) namespace_labels: Option<Labels>,
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
    /// Neither a pod nor this node, and in no block: another node, or an address that only a rule
    /// without peers allows.
    Other,
    Outside(IpAddr),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Packet<'a> {
    pub(super) from: Party<'a>,
    pub(super) to: Party<'a>,
    /// `TCP`, `UDP`, `SCTP` or another one, which has no ports.
    pub(super) protocol: &'a str,
    pub(super) port: u16,
}

/// Which packets policies are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PolicyType {
    Egress,
    Ingress,
}

/// What the policies of one type say of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ruling {
    /// No policy of this type selects the pod.
    NotRestricted,
    /// Policies select the pod, and no rule is about the packet.
    NoRule,
    Allowed,
}

/// Whether the policies let a packet pass.
pub(super) fn allows(policies: &[&Value], packet: Packet<'_>) -> bool {
    [PolicyType::Egress, PolicyType::Ingress]
        .into_iter()
        .all(|policy_type| {
            // The node reaches its own pods, whatever the policies are.
            let from_node = matches!(packet.from, Party::Node);
            let is_free = policy_type == PolicyType::Ingress && from_node;
            is_free || ruling(policies, packet, policy_type) != Ruling::NoRule
        })
}

/// The ruling of the policies of one type on a packet.
pub(super) fn ruling(policies: &[&Value], packet: Packet<'_>, policy_type: PolicyType) -> Ruling {
    Reader { packet }.side(policies, policy_type)
}

struct Reader<'a> {
    packet: Packet<'a>,
}

impl Reader<'_> {
    fn side(&self, policies: &[&Value], policy_type: PolicyType) -> Ruling {
        let (own, peer, name) = match policy_type {
            PolicyType::Egress => (self.packet.from, self.packet.to, "Egress"),
            PolicyType::Ingress => (self.packet.to, self.packet.from, "Ingress"),
        };
        let Party::Pod(own) = own else {
            return Ruling::NotRestricted;
        };
        let of_pod = policies.iter().filter(|policy| {
            namespace_of(policy) == own.namespace
                && types(policy).contains(&name)
                && selects(&policy["spec"]["podSelector"], &own.labels)
        });
        let mut ruling = Ruling::NotRestricted;
        for policy in of_pod {
            let (rules, peers) = match policy_type {
                PolicyType::Egress => (&policy["spec"]["egress"], "to"),
                PolicyType::Ingress => (&policy["spec"]["ingress"], "from"),
            };
            let allowed = items(rules).iter().any(|rule| {
                self.peers(&rule[peers], namespace_of(policy), peer) && self.ports(&rule["ports"])
            });
            if allowed {
                return Ruling::Allowed;
            }
            ruling = Ruling::NoRule;
        }
        ruling
    }

    fn peers(&self, peers: &Value, own: &str, peer: Party<'_>) -> bool {
        items(peers).is_empty() || items(peers).iter().any(|item| self.peer(item, own, peer))
    }

    fn peer(&self, item: &Value, own: &str, peer: Party<'_>) -> bool {
        match peer {
            Party::Node | Party::Other => false,
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
                    selects_namespace(namespaces, pod)
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
                Party::Node | Party::Other | Party::Outside(_) => false,
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

/// Whether a selector selects a pod's namespace. Only the name of a namespace without a document is
/// known: no selector that asks for the absence of another label selects it.
fn selects_namespace(selector: &Value, pod: &Pod) -> bool {
    const NAME: &str = "kubernetes.io/metadata.name";
    let Some(labels) = &pod.namespace_labels else {
        let asks_for_absence = items(&selector["matchExpressions"])
            .iter()
            .any(|expression| {
                let operator = expression["operator"].as_str().unwrap();
                expression["key"] != NAME && matches!(operator, "NotIn" | "DoesNotExist")
            });
        let name = Labels::from([(NAME.to_owned(), pod.namespace.clone())]);
        return !asks_for_absence && selects(selector, &name);
    };
    selects(selector, labels)
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
