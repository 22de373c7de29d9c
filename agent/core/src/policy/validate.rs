//! Fields of a rule, checked one by one: every refusal names its field and what to do.

mod field;
mod labels;
mod ports;
pub(crate) mod section;

use std::{collections::BTreeSet, sync::Arc};

use dns_policy::rule::NameRule;
use ipnet::IpNet;
use netpol::field::{Checked, Field};
use serde_json::Value;

use self::{
    field::{boolean, name_rule},
    labels::{allowed_peer_labels, group_labels, peer_labels, subject},
    ports::ports_of,
    section::{Scope, Section, section},
};
pub(super) use self::{
    field::{only, prefix},
    labels::{node_labels, pods_of_namespace},
};
use super::rule::{Direction, PeerRule, Peers, Rule};
use crate::{
    labels::{CIDR_GROUP, NAMESPACE_KEY, NAMESPACE_LABELS, RESERVED},
    selector::selector::{
        CidrSelector, Entity, GroupSelector, LabelSelector, Operator, Requirement, Selector,
        group_label,
    },
};

/// Checks one `spec`, or one element of `specs`.
pub(crate) fn rule(spec: &Field<'_>, scope: &Scope) -> Checked<Rule> {
    let known = [
        "endpointSelector",
        "egress",
        "ingress",
        "egressDeny",
        "ingressDeny",
        "enableDefaultDeny",
        "labels",
        "description",
        "log",
    ];
    only(spec, &known, &["nodeSelector"])?;
    let selector = spec.get("endpointSelector");
    if selector.value.is_none() {
        let remedy = "add it; `endpointSelector: {}` selects every endpoint";
        return selector.refuse("is missing", remedy);
    }
    let subject = subject(&selector, scope)?;
    if let Some(log) = spec.get("log").written() {
        let remedy = "remove it: `observe` and `why` name the rule of a packet";
        return log.refuse("log is not supported", remedy);
    }
    refuse_empty(spec)?;
    Ok(Rule {
        egress: direction(spec, &EGRESS, scope)?,
        ingress: direction(spec, &INGRESS, scope)?,
        subject,
        tier: Vec::new(),
    })
}

fn refuse_empty(spec: &Field<'_>) -> Checked<()> {
    let says = ["egress", "ingress", "egressDeny", "ingressDeny"];
    let is_empty = |field: &&str| {
        let field = spec.get(field);
        field.is_absent() || is_list(&field, Vec::is_empty)
    };
    // Cilium refuses it, too; a file that was cut off may look like this.
    if says.iter().all(is_empty) && spec.get("enableDefaultDeny").value.is_none() {
        let reason = format!("has nothing in {}", says.join(", "));
        let remedy = "add one: `egress: [{}]` allows nothing to be sent";
        return spec.refuse(reason, remedy);
    }
    Ok(())
}

fn is_list(field: &Field<'_>, wanted: fn(&Vec<Value>) -> bool) -> bool {
    field.value.and_then(Value::as_array).is_some_and(wanted)
}

/// Fields of a `spec` about one direction.
struct DirectionFields {
    allow: &'static str,
    deny: &'static str,
    egress: bool,
}

const EGRESS: DirectionFields = DirectionFields {
    allow: "egress",
    deny: "egressDeny",
    egress: true,
};
const INGRESS: DirectionFields = DirectionFields {
    allow: "ingress",
    deny: "ingressDeny",
    egress: false,
};

fn direction(spec: &Field<'_>, fields: &DirectionFields, scope: &Scope) -> Checked<Direction> {
    let DirectionFields {
        allow,
        deny,
        egress,
    } = *fields;
    let mut peers = Vec::new();
    for (field, is_deny) in [(deny, true), (allow, false)] {
        for item in spec.get(field).items()? {
            let rules = peer_rules(&item, &section(egress, is_deny), scope)?;
            peers.extend(rules.into_iter().map(Arc::new));
        }
    }
    let has = |name| is_list(&spec.get(name), |items| !items.is_empty());
    let default_deny = default_deny(&spec.get("enableDefaultDeny"), allow)?;
    Ok(Direction {
        default_deny: default_deny.unwrap_or(has(allow) || has(deny)),
        peers,
    })
}

/// The value of `enableDefaultDeny` for a direction; `None` if it is not set.
fn default_deny(flags: &Field<'_>, flag: &str) -> Checked<Option<bool>> {
    if flags.value.is_none() {
        return Ok(None);
    }
    only(flags, &["egress", "ingress"], &[])?;
    let flag = flags.get(flag).written();
    flag.map(|flag| boolean(&flag)).transpose()
}

/// Checks an element of `egress`, `ingress`, `egressDeny` or `ingressDeny`. Gives no rule if the
/// element is empty and so allows nothing, two rules if it means everyone's ports by number and
/// endpoints' ports by name.
fn peer_rules(field: &Field<'_>, section: &Section, scope: &Scope) -> Checked<Vec<PeerRule>> {
    let mut known = vec![
        section.cidr,
        section.cidr_set,
        section.endpoints,
        section.entities,
        "toPorts",
        "icmps",
    ];
    known.extend(section.fqdns);
    only(field, &known, section.unsupported)?;
    let peers = chosen_peers(field, section, scope)?;
    let ports = ports_of(field, section)?;
    if peers.is_none() && ports.is_none() {
        return Ok(Vec::new());
    }
    let rule = PeerRule {
        path: field.path.as_str().into(),
        deny: section.deny,
        peers: peers.unwrap_or(Peers::Any),
        ports: ports.unwrap_or_default(),
    };
    Ok(if section.egress {
        rule.with_named_ports_of_endpoints()
    } else {
        vec![rule]
    })
}

/// Peers of an element, which may name them by one field only; `None` if it names no peers.
fn chosen_peers(element: &Field<'_>, section: &Section, scope: &Scope) -> Checked<Option<Peers>> {
    let mut peers = None;
    let names = [
        Some(section.cidr),
        Some(section.cidr_set),
        Some(section.endpoints),
        Some(section.entities),
        section.fqdns,
    ];
    let mut chosen: Option<&str> = None;
    for name in names.into_iter().flatten() {
        let Some(field) = element.get(name).written() else {
            continue;
        };
        if let Some(other) = chosen.replace(name) {
            let reason = format!("stands beside {other}");
            return field.refuse(reason, "put each into a rule of its own");
        }
        peers = Some(peers_of(&field, name, section, scope)?);
    }
    Ok(peers)
}

fn peers_of(field: &Field<'_>, name: &str, section: &Section, scope: &Scope) -> Checked<Peers> {
    let mut selectors = Vec::new();
    for item in field.items()? {
        let selector = if name == section.cidr {
            cidr(prefix(&item)?, BTreeSet::new())
        } else if name == section.cidr_set {
            cidr_set(&item)?
        } else if name == section.endpoints {
            Selector::Labels(match section.deny {
                true => peer_labels(&item, scope)?,
                false => allowed_peer_labels(&item, scope)?,
            })
        } else if name == section.entities {
            match item.text()? {
                "all" => return Ok(Peers::Any),
                name => Selector::Entity(Entity::parse(name).ok_or_else(|| {
                    item.fault(
                        format!("`{name}` is not an entity"),
                        "use all, world, world-ipv4, world-ipv6, cluster, host, remote-node, \
                         kube-apiserver, health, init, unmanaged, ingress or none",
                    )
                })?),
            }
        } else if section.deny {
            let remedy = "deny blocks with toCIDRSet: names cannot be denied";
            return item.refuse("names are not supported in egressDeny", remedy);
        } else {
            fqdn(&item)?
        };
        selectors.push(selector);
    }
    Ok(Peers::Selectors(selectors))
}

fn cidr_set(set: &Field<'_>) -> Checked<Selector> {
    let known = ["cidr", "cidrGroupRef", "cidrGroupSelector", "except"];
    only(set, &known, &[])?;
    let named = known.iter().filter(|name| **name != "except");
    let mut named = named.filter_map(|name| Some((*name, set.get(name).written()?)));
    let (Some((name, field)), None) = (named.next(), named.next()) else {
        let reason = "has not exactly one of cidr, cidrGroupRef and cidrGroupSelector";
        return set.refuse(reason, "name one block, or one group");
    };
    let except = set.get("except");
    let parts = except.items()?.map(|item| prefix(&item));
    let parts = parts.collect::<Checked<Vec<IpNet>>>()?;
    let labels = match name {
        "cidr" => {
            let prefix = prefix(&field)?;
            let mut numbered = parts.iter().enumerate();
            if let Some((n, part)) = numbered.find(|(_, part)| !prefix.contains(*part)) {
                let reason = format!("{part} is not inside {prefix}");
                let remedy = "name a part of the block, or remove it";
                return except.nth(n).refuse(reason, remedy);
            }
            return Ok(cidr(prefix, parts.into_iter().collect()));
        }
        "cidrGroupRef" => {
            let name = group_label(field.text()?);
            let named = Requirement::new(&format!("{CIDR_GROUP}:{}", name.key()), Operator::Exists);
            LabelSelector {
                requirements: [named].into(),
            }
        }
        _ => group_labels(&field)?,
    };
    let except = parts.into_iter().collect();
    Ok(Selector::Group(GroupSelector { labels, except }))
}

const fn cidr(prefix: IpNet, except: BTreeSet<IpNet>) -> Selector {
    Selector::Cidr(CidrSelector {
        prefix,
        except,
        nodes: false,
    })
}

fn fqdn(field: &Field<'_>) -> Checked<Selector> {
    only(field, &["matchName", "matchPattern"], &[])?;
    let (name, pattern) = (field.get("matchName"), field.get("matchPattern"));
    let rule = match (name.value, pattern.value) {
        (Some(_), Some(_)) => {
            let remedy = "make two elements of it: either one then selects";
            return field.refuse("has both matchName and matchPattern", remedy);
        }
        (None, None) => {
            let reason = "has neither matchName nor matchPattern";
            return field.refuse(reason, "add one of them");
        }
        (Some(_), None) => name_rule(&name, NameRule::Name)?,
        (None, Some(_)) => name_rule(&pattern, NameRule::Pattern)?,
    };
    Ok(Selector::Fqdn(rule))
}

/// Warnings for the author of these rules, which are valid.
pub(crate) fn warnings(rules: &[Rule]) -> Vec<String> {
    let mut found = Vec::new();
    for rule in rules.iter().flat_map(|rule| &rule.egress.peers) {
        if !rule.deny && is_every_name(&rule.peers) {
            found.push(format!(
                "{}: toFQDNs selects every name, so that the owner of any name can open any address \
                 (DNS rebinding), except those of --tofqdns-refuse-prefix; name the names, or deny \
                 your own networks with egressDeny and toCIDR",
                rule.path
            ));
        }
        if rule.ports.iter().any(|port| port.dns.is_some()) && is_anyone(&rule.peers) {
            found.push(format!(
                "{}: a DNS rule allows any server: whoever runs one can give any address an \
                 allowed name; restrict the rule with toEndpoints or toCIDR to servers you trust",
                rule.path
            ));
        }
        let is_about_names = rule.ports.iter().any(|port| port.dns.is_some());
        if is_about_names && !is_anyone(&rule.peers) && is_of_every_namespace(&rule.peers) {
            found.push(format!(
                "{}: a DNS rule allows pods of every namespace with these labels as servers: the \
                 owner of a pod with these labels can give any address an allowed name; add \
                 k8s:io.kubernetes.pod.namespace to the labels",
                rule.path
            ));
        }
    }
    found
}

/// Whether the peers include pods of every namespace, because no label names one.
fn is_of_every_namespace(peers: &Peers) -> bool {
    let Peers::Selectors(list) = peers else {
        return false;
    };
    list.iter().any(|selector| match selector {
        Selector::Labels(labels) => !labels.requirements.iter().any(|requirement| {
            requirement.key == NAMESPACE_KEY
                || requirement.key.starts_with(NAMESPACE_LABELS)
                || requirement.source.as_deref() == Some(RESERVED)
        }),
        _ => false,
    })
}

/// Whether a pattern among the peers matches names of any zone.
fn is_every_name(peers: &Peers) -> bool {
    let Peers::Selectors(list) = peers else {
        return false;
    };
    list.iter().any(|selector| match selector {
        Selector::Fqdn(NameRule::Pattern(text)) => {
            text.chars().all(|c| matches!(c, '*' | '.')) && text.contains('*')
        }
        _ => false,
    })
}

/// Whether the peers include servers that the cluster does not control.
fn is_anyone(peers: &Peers) -> bool {
    let Peers::Selectors(list) = peers else {
        return true;
    };
    list.iter().any(|selector| match selector {
        Selector::Labels(labels) => labels
            .requirements
            .iter()
            .all(|requirement| requirement.key == NAMESPACE_KEY),
        Selector::Cidr(cidr) => cidr.prefix.prefix_len() == 0,
        Selector::Group(_) | Selector::Fqdn(_) | Selector::DnsName(_) | Selector::Node(_) => false,
        Selector::Entity(entity) => matches!(
            entity,
            Entity::World | Entity::WorldIpv4 | Entity::WorldIpv6 | Entity::Cluster
        ),
    })
}
