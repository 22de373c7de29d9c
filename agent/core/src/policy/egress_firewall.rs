//! `EgressFirewall` of OVN-Kubernetes (`k8s.ovn.org/v1`) as an ordered list of rules.
//!
//! | EgressFirewall | tier rule |
//! |---|---|
//! | `metadata.namespace` | subject: the pods of the namespace |
//! | `type: Deny`, `type: Allow` | `Deny`, `Pass` |
//! | `to.cidrSelector` | a block of addresses outside the cluster and of nodes |
//! | `to.dnsName` | a name, or `*.` and a name: one label |
//! | `to.nodeSelector` | nodes by their labels |
//! | `ports` | ports of TCP, UDP and SCTP; without them every protocol |

mod name;

use std::sync::Arc;

use ipnet::IpNet;
use netpol::{
    field::{Checked, Field},
    policy::Protocol,
};
use serde_json::Value;

use super::{
    cluster::node::UNKNOWN_LABELS,
    rule::{Direction, PortRule, Ports, Rule, TierAction, TierRule},
    validate::{node_labels, only, pods_of_namespace},
};
use crate::{
    labels::NODE,
    policy::head::Head,
    selector::selector::{
        CidrSelector, DnsNameSelector, LabelSelector, Operator, Requirement, Selector,
    },
};

pub const KIND: &str = "EgressFirewall";
pub(crate) const API_VERSION: &str = "k8s.ovn.org/v1";
/// The only name that an EgressFirewall may have: so each namespace has at most one.
pub(in crate::policy) const NAME: &str = "default";
/// Maximum number of rules that an EgressFirewall may have.
const MAX_RULES: usize = 8000;

/// Reads a document; adds to `warnings` the remarks for its author.
pub(super) fn read(head: &Head, value: &Value, warnings: &mut Vec<String>) -> Checked<Rule> {
    let top = Field::top(value);
    if head.name != NAME {
        let reason = format!("is `{}`", head.name);
        let remedy = "name it `default`: a namespace has one EgressFirewall of that name";
        return top.get("metadata").get("name").refuse(reason, remedy);
    }
    let spec = top.get("spec").required("add spec.egress")?;
    only(&spec, &["egress"], &[])?;
    let remedy = "add the list of rules; `egress: []` restricts nothing";
    let egress = spec.get("egress").required(remedy)?;
    let items = egress.items()?;
    if items.len() > MAX_RULES {
        let reason = format!("has {} rules", items.len());
        let remedy = format!("write at most {MAX_RULES}: merge blocks, or use `*.` names");
        return egress.refuse(reason, remedy);
    }
    let tier = items.map(|item| Ok(Arc::new(tier_rule(&item, warnings)?)));
    let tier = tier.collect::<Checked<Vec<_>>>()?;
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

fn tier_rule(field: &Field<'_>, warnings: &mut Vec<String>) -> Checked<TierRule> {
    only(field, &["type", "to", "ports"], &[])?;
    let action = action(&field.get("type"))?;
    let to = field.get("to");
    let to = to.required("add cidrSelector, dnsName or nodeSelector")?;
    let selector = destination(&to, action, warnings)?;
    let selectors = match selector {
        Selector::Node(labels) => node_rule(labels, action),
        other => vec![other],
    };
    let ports = field.get("ports").items()?.map(|item| port(&item));
    Ok(TierRule {
        path: field.path.as_str().into(),
        action,
        selectors,
        ports: ports.collect::<Checked<_>>()?,
    })
}

/// What a rule by labels of nodes selects. A deny covers nodes whose labels are unknown. An allow covers none of
/// them, even if it asks for the absence of labels.
fn node_rule(mut labels: LabelSelector, action: TierAction) -> Vec<Selector> {
    let unknown = |operator| Requirement {
        source: Some(NODE.to_owned()),
        key: UNKNOWN_LABELS.to_owned(),
        operator,
    };
    let is_absence =
        |one: &Requirement| matches!(one.operator, Operator::NotIn(_) | Operator::DoesNotExist);
    match action {
        // It selects every node.
        _ if labels.requirements.is_empty() => vec![Selector::Node(labels)],
        TierAction::Pass => {
            if labels.requirements.iter().any(is_absence) {
                let known = unknown(Operator::DoesNotExist);
                labels.requirements.insert(known);
            }
            vec![Selector::Node(labels)]
        }
        TierAction::Deny => {
            let unknown = LabelSelector {
                requirements: [unknown(Operator::Exists)].into(),
            };
            vec![Selector::Node(labels), Selector::Node(unknown)]
        }
    }
}

fn action(field: &Field<'_>) -> Checked<TierAction> {
    if field.value.is_none() {
        return field.refuse("is missing", "write Allow or Deny");
    }
    match field.text()? {
        "Allow" => Ok(TierAction::Pass),
        "Deny" => Ok(TierAction::Deny),
        other => field.refuse(
            format!("is `{other}`"),
            "write Allow or Deny, in this spelling",
        ),
    }
}

fn destination(
    to: &Field<'_>,
    action: TierAction,
    warnings: &mut Vec<String>,
) -> Checked<Selector> {
    only(to, &["cidrSelector", "dnsName", "nodeSelector"], &[])?;
    let mut named = to.entries().filter(|(_, field)| !field.is_absent());
    let (Some((name, field)), None) = (named.next(), named.next()) else {
        let reason = "has not exactly one of cidrSelector, dnsName and nodeSelector";
        let remedy = "give one of them; each destination is a rule of its own";
        return to.refuse(reason, remedy);
    };
    match name {
        "cidrSelector" => Ok(Selector::Cidr(CidrSelector {
            prefix: block(&field, warnings)?,
            except: [].into(),
            nodes: true,
        })),
        "dnsName" => {
            let written = field.text()?;
            name::check(&field, written)?;
            Ok(Selector::DnsName(match action {
                TierAction::Pass => DnsNameSelector::new(written),
                TierAction::Deny => {
                    warnings.push(format!(
                        "{}: `{written}` is denied by the addresses that DNS answers gave for it: \
                         none is known before the first answer, and other names at these \
                         addresses are denied with it; deny blocks with cidrSelector instead",
                        field.path
                    ));
                    DnsNameSelector::denied(written)
                }
            }))
        }
        _ => Ok(Selector::Node(node_labels(&field)?)),
    }
}

fn block(field: &Field<'_>, warnings: &mut Vec<String>) -> Checked<IpNet> {
    let written = field.text()?;
    let block: IpNet = written.parse().map_err(|_| {
        let reason = format!("`{written}` is not a block of addresses");
        let remedy = "write for example 192.0.2.0/24, 192.0.2.1/32 or 2001:db8::/32";
        field.fault(reason, remedy)
    })?;
    let cut = block.trunc();
    if cut != block {
        warnings.push(format!(
            "{}: `{written}` has bits beyond its prefix length and means {cut}; write {cut}",
            field.path
        ));
    }
    Ok(cut)
}

fn port(field: &Field<'_>) -> Checked<PortRule> {
    only(field, &["protocol", "port"], &[])?;
    let names = "write TCP, UDP or SCTP";
    let written = field.get("protocol").required(names)?;
    let text = written.text()?;
    let protocol =
        Protocol::parse(text).ok_or_else(|| written.fault(format!("is `{text}`"), names))?;
    let numbers = "write a number from 1 to 65535; without `ports` the rule means every port";
    let port = field.get("port").required(numbers)?;
    let number = port.value.and_then(Value::as_u64);
    let number = number.and_then(|port| u16::try_from(port).ok());
    let Some(number) = number.filter(|number| *number > 0) else {
        let written = port.value.map(Value::to_string).unwrap_or_default();
        return port.refuse(format!("is {written}"), numbers);
    };
    Ok(PortRule {
        protocol: protocol.into(),
        ports: Ports::Range(number, number),
        dns: None,
    })
}

#[cfg(test)]
mod tests;
