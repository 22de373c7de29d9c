//! `EgressFirewall` of OVN-Kubernetes (`k8s.ovn.org/v1`) as an ordered list of rules.
//!
//! | EgressFirewall | tier rule |
//! |---|---|
//! | `metadata.namespace` | subject: the pods of the namespace |
//! | `type: Deny`, `type: Allow` | `Deny`, `Pass` |
//! | `to.cidrSelector` | a block of addresses outside and of nodes |
//! | `to.dnsName` | a name, or `*.` and a name: one label |
//! | `to.nodeSelector` | nodes by their labels |
//! | `ports` | ports of TCP, UDP and SCTP; without them every protocol |

mod name;

use std::sync::Arc;

use ipnet::IpNet;
use serde_json::{Map, Value};

use super::{
    rule::{Direction, PortRule, Ports, Protocol, Rule, TierAction, TierRule},
    validate::{list, node_labels, object, pods_of_namespace, text},
};
use crate::{
    policy::{
        head::Head,
        validate::fault::{Checked, Fault},
    },
    selector::selector::{CidrSelector, DnsNameSelector, Selector},
};

pub const KIND: &str = "EgressFirewall";
pub(crate) const API_VERSION: &str = "k8s.ovn.org/v1";
/// The name that one has in its namespace: so there is one in each.
const NAME: &str = "default";
/// Rules that one may have.
const MAX_RULES: usize = 8000;

/// Reads a document; adds to `warnings` the remarks for its author.
pub(super) fn read(head: &Head, value: &Value, warnings: &mut Vec<String>) -> Checked<Rule> {
    if head.name != NAME {
        let reason = format!("is `{}`", head.name);
        let remedy = "name it `default`: a namespace has one EgressFirewall of that name";
        return Err(Fault::new("metadata.name", &reason, remedy));
    }
    let Some(spec) = value.get("spec").filter(|spec| !spec.is_null()) else {
        return Err(Fault::new("spec", "is missing", "add spec.egress"));
    };
    let spec = object("spec", spec, &["egress"], &[])?;
    if spec.get("egress").is_none_or(Value::is_null) {
        let remedy = "add the list of rules; `egress: []` restricts nothing";
        return Err(Fault::new("spec.egress", "is missing", remedy));
    }
    let items = list("spec.egress", spec.get("egress"))?;
    if items.len() > MAX_RULES {
        let reason = format!("has {} rules", items.len());
        let remedy = format!("write at most {MAX_RULES}: merge blocks, or use `*.` names");
        return Err(Fault::new("spec.egress", &reason, &remedy));
    }
    let mut tier = Vec::with_capacity(items.len());
    for (n, item) in items.iter().enumerate() {
        let rule = tier_rule(&format!("spec.egress[{n}]"), item, warnings)?;
        tier.push(Arc::new(rule));
    }
    warnings.extend(without_effect(&tier));
    Ok(Rule {
        subject: pods_of_namespace(head.namespace.as_deref().unwrap_or_default()),
        egress: Direction::default(),
        ingress: Direction::default(),
        tier,
    })
}

/// A warning about rules that no packet reaches, because rules before them cover every address of
/// one family or of both.
fn without_effect(tier: &[Arc<TierRule>]) -> Option<String> {
    let (mut ipv4, mut ipv6) = (false, false);
    let mut idle: Vec<&str> = Vec::new();
    for rule in tier {
        let block = rule.selectors.iter().find_map(|selector| match selector {
            Selector::Cidr(cidr) => Some(cidr.prefix),
            _ => None,
        });
        let is_covered = match block {
            Some(IpNet::V4(_)) => ipv4,
            Some(IpNet::V6(_)) => ipv6,
            None => ipv4 && ipv6,
        };
        if is_covered {
            idle.push(&rule.path);
        }
        let all = block.filter(|block| block.prefix_len() == 0 && rule.ports.is_empty());
        ipv4 |= matches!(all, Some(IpNet::V4(_)));
        ipv6 |= matches!(all, Some(IpNet::V6(_)));
    }
    let (first, later) = idle.split_first()?;
    let later = match later.len() {
        0 => String::new(),
        1 => ", like 1 later rule".to_owned(),
        more => format!(", like {more} later rules"),
    };
    Some(format!(
        "{first}: has no effect{later}: rules before it cover all its addresses; put it before them"
    ))
}

fn tier_rule(path: &str, value: &Value, warnings: &mut Vec<String>) -> Checked<TierRule> {
    let map = object(path, value, &["type", "to", "ports"], &[])?;
    let action = action(path, map)?;
    let to_path = format!("{path}.to");
    let Some(to) = map.get("to").filter(|to| !to.is_null()) else {
        let remedy = "add cidrSelector, dnsName or nodeSelector";
        return Err(Fault::new(&to_path, "is missing", remedy));
    };
    let selector = destination(&to_path, to, action, warnings)?;
    let ports_path = format!("{path}.ports");
    let ports = list(&ports_path, map.get("ports"))?.iter().enumerate();
    let ports = ports.map(|(n, item)| port(&format!("{ports_path}[{n}]"), item));
    Ok(TierRule {
        path: path.into(),
        action,
        selectors: vec![selector],
        ports: ports.collect::<Checked<_>>()?,
    })
}

fn action(path: &str, map: &Map<String, Value>) -> Checked<TierAction> {
    let path = format!("{path}.type");
    let Some(value) = map.get("type") else {
        return Err(Fault::new(&path, "is missing", "write Allow or Deny"));
    };
    match text(&path, value)? {
        "Allow" => Ok(TierAction::Pass),
        "Deny" => Ok(TierAction::Deny),
        other => Err(Fault::new(
            &path,
            &format!("is `{other}`"),
            "write Allow or Deny, in this spelling",
        )),
    }
}

fn destination(
    path: &str,
    value: &Value,
    action: TierAction,
    warnings: &mut Vec<String>,
) -> Checked<Selector> {
    let known = ["cidrSelector", "dnsName", "nodeSelector"];
    let map = object(path, value, &known, &[])?;
    let mut named = map.iter().filter(|(_, value)| !value.is_null());
    let (Some((field, value)), None) = (named.next(), named.next()) else {
        let reason = "has not exactly one of cidrSelector, dnsName and nodeSelector";
        let remedy = "give one of them; each destination is a rule of its own";
        return Err(Fault::new(path, reason, remedy));
    };
    let path = format!("{path}.{field}");
    match field.as_str() {
        "cidrSelector" => Ok(Selector::Cidr(CidrSelector {
            prefix: block(&path, value, warnings)?,
            except: [].into(),
            nodes: true,
        })),
        "dnsName" => {
            let written = text(&path, value)?;
            name::check(&path, written)?;
            Ok(Selector::DnsName(match action {
                TierAction::Pass => DnsNameSelector::new(written),
                TierAction::Deny => {
                    warnings.push(format!(
                        "{path}: `{written}` is denied by the addresses that DNS answers gave for \
                         it: none is known before the first answer, and other names at these \
                         addresses are denied with it; deny blocks with cidrSelector instead"
                    ));
                    DnsNameSelector::denied(written)
                }
            }))
        }
        _ => Ok(Selector::Node(node_labels(&path, value)?)),
    }
}

fn block(path: &str, value: &Value, warnings: &mut Vec<String>) -> Checked<IpNet> {
    let written = text(path, value)?;
    let block: IpNet = written.parse().map_err(|_| {
        let reason = format!("`{written}` is not a block of addresses");
        let remedy = "write for example 192.0.2.0/24, 192.0.2.1/32 or 2001:db8::/32";
        Fault::new(path, &reason, remedy)
    })?;
    let cut = block.trunc();
    if cut != block {
        warnings.push(format!(
            "{path}: `{written}` has bits beyond its prefix length and means {cut}; write {cut}"
        ));
    }
    Ok(cut)
}

fn port(path: &str, value: &Value) -> Checked<PortRule> {
    let map = object(path, value, &["protocol", "port"], &[])?;
    let field = |name: &str, remedy: &str| {
        let path = format!("{path}.{name}");
        let value = map.get(name).filter(|value| !value.is_null());
        match value {
            Some(value) => Ok((path, value)),
            None => Err(Fault::new(&path, "is missing", remedy)),
        }
    };
    let names = "write TCP, UDP or SCTP";
    let (protocol_path, protocol) = field("protocol", names)?;
    let protocol = match text(&protocol_path, protocol)? {
        "TCP" => Protocol::Tcp,
        "UDP" => Protocol::Udp,
        "SCTP" => Protocol::Sctp,
        other => {
            let reason = format!("is `{other}`");
            return Err(Fault::new(&protocol_path, &reason, names));
        }
    };
    let numbers = "write a number from 1 to 65535; without `ports` the rule means every port";
    let (port_path, port) = field("port", numbers)?;
    let number = port.as_u64().and_then(|port| u16::try_from(port).ok());
    let Some(number) = number.filter(|number| *number > 0) else {
        return Err(Fault::new(&port_path, &format!("is {port}"), numbers));
    };
    Ok(PortRule {
        protocol,
        ports: Ports::Range(number, number),
        dns: None,
    })
}

#[cfg(test)]
mod tests;
