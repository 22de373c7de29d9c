//! Fields of a rule, checked one by one: every refusal names its field and what to do.

pub(crate) mod fault;
mod field;
mod labels;
mod ports;
pub(crate) mod section;

use std::sync::Arc;

use dns_policy::rule::NameRule;
use std::collections::BTreeSet;

use serde_json::{Map, Value};

use self::{
    field::boolean,
    labels::{allowed_peer_labels, group_labels, peer_labels, subject},
    ports::ports_of,
};
pub(super) use self::{
    field::{list, mapping, object, prefix, text},
    labels::{node_labels, pods_of_namespace},
};
use super::rule::{Direction, PeerRule, Peers, Rule};
use crate::{
    labels::{CIDR_GROUP, NAMESPACE_KEY, NAMESPACE_LABELS, RESERVED},
    policy::validate::{
        fault::{Checked, Fault},
        field::name_rule,
        section::{Scope, Section, section},
    },
    selector::selector::{
        CidrSelector, Entity, FqdnSelector, GroupSelector, LabelSelector, Operator, Requirement,
        Selector, group_label,
    },
};

/// Checks one `spec`, or one element of `specs`.
pub(crate) fn rule(path: &str, value: &Value, scope: &Scope) -> Checked<Rule> {
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
    let map = object(path, value, &known, &["nodeSelector"])?;
    let selector_path = format!("{path}.endpointSelector");
    let Some(selector) = map.get("endpointSelector") else {
        let remedy = "add it; `endpointSelector: {}` selects every endpoint";
        return Err(Fault::new(&selector_path, "is missing", remedy));
    };
    let subject = subject(&selector_path, selector, scope)?;
    if map.contains_key("log") {
        let remedy = "remove it: `observe` and `why` name the rule of a packet";
        return Err(Fault::new(
            &format!("{path}.log"),
            "log is not supported",
            remedy,
        ));
    }
    refuse_empty(path, map)?;
    Ok(Rule {
        egress: direction(path, map, &EGRESS, scope)?,
        ingress: direction(path, map, &INGRESS, scope)?,
        subject,
        tier: Vec::new(),
    })
}

fn refuse_empty(path: &str, map: &Map<String, Value>) -> Checked<()> {
    let says = ["egress", "ingress", "egressDeny", "ingressDeny"];
    let is_empty = |field: &&str| match map.get(*field) {
        None | Some(Value::Null) => true,
        Some(value) => value.as_array().is_some_and(Vec::is_empty),
    };
    // Cilium refuses it, too; a file that was cut off may look like this.
    if says.iter().all(is_empty) && !map.contains_key("enableDefaultDeny") {
        let reason = format!("has nothing in {}", says.join(", "));
        let remedy = "add one: `egress: [{}]` allows nothing to be sent";
        return Err(Fault::new(path, &reason, remedy));
    }
    Ok(())
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

fn direction(
    path: &str,
    map: &Map<String, Value>,
    fields: &DirectionFields,
    scope: &Scope,
) -> Checked<Direction> {
    let DirectionFields {
        allow,
        deny,
        egress,
    } = *fields;
    let mut peers = Vec::new();
    for (field, is_deny) in [(deny, true), (allow, false)] {
        let path = format!("{path}.{field}");
        for (n, item) in list(&path, map.get(field))?.iter().enumerate() {
            let path = format!("{path}[{n}]");
            let rules = peer_rules(&path, item, &section(egress, is_deny), scope)?;
            peers.extend(rules.into_iter().map(Arc::new));
        }
    }
    let has = |field| matches!(map.get(field), Some(Value::Array(items)) if !items.is_empty());
    let default_deny = default_deny(path, map, allow)?;
    Ok(Direction {
        default_deny: default_deny.unwrap_or(has(allow) || has(deny)),
        peers,
    })
}

/// The value of `enableDefaultDeny` for a direction; none if it is not set.
fn default_deny(path: &str, map: &Map<String, Value>, flag: &str) -> Checked<Option<bool>> {
    let Some(value) = map.get("enableDefaultDeny") else {
        return Ok(None);
    };
    let path = format!("{path}.enableDefaultDeny");
    let flags = object(&path, value, &["egress", "ingress"], &[])?;
    let value = flags.get(flag);
    value
        .map(|value| boolean(&format!("{path}.{flag}"), value))
        .transpose()
}

/// Checks an element of `egress`, `ingress`, `egressDeny` or `ingressDeny`; none if it is
/// empty and so allows nothing, two if it means everyone's ports by number and endpoints' ports
/// by name.
fn peer_rules(
    path: &str,
    value: &Value,
    section: &Section,
    scope: &Scope,
) -> Checked<Vec<PeerRule>> {
    let mut known = vec![
        section.cidr,
        section.cidr_set,
        section.endpoints,
        section.entities,
        "toPorts",
        "icmps",
    ];
    known.extend(section.fqdns);
    let map = object(path, value, &known, section.unsupported)?;
    let peers = chosen_peers(path, map, section, scope)?;
    let ports = ports_of(path, map, section)?;
    if peers.is_none() && ports.is_none() {
        return Ok(Vec::new());
    }
    let rule = PeerRule {
        path: path.into(),
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

/// Peers of an element, which may name them by one field only; none if it names none.
fn chosen_peers(
    path: &str,
    map: &Map<String, Value>,
    section: &Section,
    scope: &Scope,
) -> Checked<Option<Peers>> {
    let mut peers = None;
    let fields = [
        Some(section.cidr),
        Some(section.cidr_set),
        Some(section.endpoints),
        Some(section.entities),
        section.fqdns,
    ];
    let mut chosen: Option<&str> = None;
    for field in fields.into_iter().flatten() {
        let Some(value) = map.get(field) else {
            continue;
        };
        let path = format!("{path}.{field}");
        if let Some(other) = chosen.replace(field) {
            let reason = format!("stands beside {other}");
            return Err(Fault::new(
                &path,
                &reason,
                "put each into a rule of its own",
            ));
        }
        peers = Some(peers_of(&path, field, value, section, scope)?);
    }
    Ok(peers)
}

fn peers_of(
    path: &str,
    field: &str,
    value: &Value,
    section: &Section,
    scope: &Scope,
) -> Checked<Peers> {
    let mut selectors = Vec::new();
    for (n, item) in list(path, Some(value))?.iter().enumerate() {
        let path = format!("{path}[{n}]");
        let selector = if field == section.cidr {
            let prefix = prefix(&path, item)?;
            Selector::Cidr(CidrSelector {
                prefix,
                except: [].into(),
                nodes: false,
            })
        } else if field == section.cidr_set {
            cidr_set(&path, item)?
        } else if field == section.endpoints {
            Selector::Labels(match section.deny {
                true => peer_labels(&path, item, scope)?,
                false => allowed_peer_labels(&path, item, scope)?,
            })
        } else if field == section.entities {
            match text(&path, item)? {
                "all" => return Ok(Peers::Any),
                name => Selector::Entity(Entity::parse(name).ok_or_else(|| {
                    Fault::new(
                        &path,
                        &format!("`{name}` is not an entity"),
                        "use all, world, world-ipv4, world-ipv6, cluster, host, remote-node, \
                         kube-apiserver, health, init, unmanaged, ingress or none",
                    )
                })?),
            }
        } else {
            if section.deny {
                let remedy = "deny blocks with toCIDRSet: names cannot be denied";
                return Err(Fault::new(
                    &path,
                    "names are not supported in egressDeny",
                    remedy,
                ));
            }
            fqdn(&path, item)?
        };
        selectors.push(selector);
    }
    Ok(Peers::Selectors(selectors))
}

fn cidr_set(path: &str, value: &Value) -> Checked<Selector> {
    let known = ["cidr", "cidrGroupRef", "cidrGroupSelector", "except"];
    let map = object(path, value, &known, &[])?;
    let mut named = known.iter().filter(|field| **field != "except");
    let mut named = named.by_ref().filter(|field| map.contains_key(**field));
    let (Some(field), None) = (named.next(), named.next()) else {
        let reason = "has not exactly one of cidr, cidrGroupRef and cidrGroupSelector";
        return Err(Fault::new(path, reason, "name one block, or one group"));
    };
    let mut except = BTreeSet::new();
    let except_path = format!("{path}.except");
    for (n, item) in list(&except_path, map.get("except"))?.iter().enumerate() {
        except.insert(prefix(&format!("{except_path}[{n}]"), item)?);
    }
    let field_path = format!("{path}.{field}");
    let value = map.get(*field).unwrap_or(&Value::Null);
    let labels = match *field {
        "cidr" => {
            let prefix = prefix(&field_path, value)?;
            for (n, part) in except.iter().enumerate() {
                if !prefix.contains(part) {
                    return Err(Fault::new(
                        &format!("{except_path}[{n}]"),
                        &format!("{part} is not inside {prefix}"),
                        "name a part of the block, or remove it",
                    ));
                }
            }
            return Ok(Selector::Cidr(CidrSelector {
                prefix,
                except,
                nodes: false,
            }));
        }
        "cidrGroupRef" => {
            let name = group_label(text(&field_path, value)?);
            let named = Requirement::new(&format!("{CIDR_GROUP}:{}", name.key()), Operator::Exists);
            LabelSelector {
                requirements: [named].into(),
            }
        }
        _ => group_labels(&field_path, value)?,
    };
    Ok(Selector::Group(GroupSelector { labels, except }))
}

fn fqdn(path: &str, value: &Value) -> Checked<Selector> {
    let map = object(path, value, &["matchName", "matchPattern"], &[])?;
    match (map.get("matchName"), map.get("matchPattern")) {
        (Some(_), Some(_)) => Err(Fault::new(
            path,
            "has both matchName and matchPattern",
            "make two elements of it: either one then selects",
        )),
        (None, None) => Err(Fault::new(
            path,
            "has neither matchName nor matchPattern",
            "add one of them",
        )),
        (Some(name), None) => {
            let rule = name_rule(&format!("{path}.matchName"), name, NameRule::Name)?;
            Ok(Selector::Fqdn(selector_of(rule)))
        }
        (None, Some(pattern)) => {
            let rule = name_rule(&format!("{path}.matchPattern"), pattern, NameRule::Pattern)?;
            Ok(Selector::Fqdn(selector_of(rule)))
        }
    }
}

fn selector_of(rule: NameRule) -> FqdnSelector {
    match rule {
        NameRule::Name(text) => FqdnSelector::Name(text),
        NameRule::Pattern(text) => FqdnSelector::Pattern(text),
    }
}

/// What the author of these rules should know although they are valid.
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

/// Whether the peers include pods whose namespace no label says.
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
        Selector::Fqdn(FqdnSelector::Pattern(text)) => {
            text.chars().all(|c| matches!(c, '*' | '.')) && text.contains('*')
        }
        _ => false,
    })
}

/// Whether the peers include servers outside of the cluster's control.
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
