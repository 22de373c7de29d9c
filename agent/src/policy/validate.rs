//! Fields of a rule, checked one by one: every refusal names its field and what to do.

use holdfast_sdp::{pattern, policy::rule::NameRule};
use ipnet::IpNet;
use serde_json::{Map, Value};

use super::rule::{Direction, DnsNames, PeerRule, Peers, PortRule, Protocol, Rule};
use crate::{
    labels::{K8S, NAMESPACE_KEY, RESERVED},
    selector::selector::{
        CidrSelector, Entity, FqdnSelector, LabelSelector, Operator, Requirement, Selector,
    },
};

/// Key prefix under which a pod carries the labels of its namespace.
const NAMESPACE_LABELS: &str = "io.cilium.k8s.namespace.labels.";

/// What is wrong with a field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Path of the field.
    pub field: String,
    /// What is wrong with it.
    pub reason: String,
    /// What to do.
    pub remedy: String,
}

impl Fault {
    /// Builds a fault.
    pub fn new(field: &str, reason: &str, remedy: &str) -> Self {
        Self {
            field: field.to_owned(),
            reason: reason.to_owned(),
            remedy: remedy.to_owned(),
        }
    }
}

/// What a document's selectors may mean.
#[derive(Clone, Debug)]
pub struct Scope {
    /// Namespace of the document; none = cluster-wide.
    pub namespace: Option<String>,
}

type Checked<T> = Result<T, Fault>;

/// Direction of a section, with the names of its fields.
struct Section {
    cidr: &'static str,
    cidr_set: &'static str,
    endpoints: &'static str,
    entities: &'static str,
    fqdns: Option<&'static str>,
    unsupported: &'static [&'static str],
    egress: bool,
    deny: bool,
}

const fn section(egress: bool, deny: bool) -> Section {
    if egress {
        Section {
            cidr: "toCIDR",
            cidr_set: "toCIDRSet",
            endpoints: "toEndpoints",
            entities: "toEntities",
            fqdns: Some("toFQDNs"),
            unsupported: &[
                "toServices",
                "toGroups",
                "toNodes",
                "toRequires",
                "authentication",
            ],
            egress,
            deny,
        }
    } else {
        Section {
            cidr: "fromCIDR",
            cidr_set: "fromCIDRSet",
            endpoints: "fromEndpoints",
            entities: "fromEntities",
            fqdns: None,
            unsupported: &["fromGroups", "fromNodes", "fromRequires", "authentication"],
            egress,
            deny,
        }
    }
}

/// Checks one `spec`.
pub fn rule(path: &str, value: &Value, scope: &Scope) -> Checked<Rule> {
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
    let direction = |egress: bool, allow: &str, deny: &str, flag: &str| {
        let mut peers = Vec::new();
        for (field, is_deny) in [(deny, true), (allow, false)] {
            let path = format!("{path}.{field}");
            for (n, item) in list(&path, map.get(field))?.iter().enumerate() {
                let path = format!("{path}[{n}]");
                peers.extend(peer_rule(&path, item, &section(egress, is_deny), scope)?);
            }
        }
        let has = |field| matches!(map.get(field), Some(Value::Array(items)) if !items.is_empty());
        let default_deny = match map.get("enableDefaultDeny") {
            None => None,
            Some(value) => {
                let path = format!("{path}.enableDefaultDeny");
                let flags = object(&path, value, &["egress", "ingress"], &[])?;
                flags
                    .get(flag)
                    .map(|value| boolean(&format!("{path}.{flag}"), value))
                    .transpose()?
            }
        };
        let default_deny = default_deny.unwrap_or(has(allow) || has(deny));
        Ok(Direction {
            default_deny,
            peers,
        })
    };
    Ok(Rule {
        egress: direction(true, "egress", "egressDeny", "egress")?,
        ingress: direction(false, "ingress", "ingressDeny", "ingress")?,
        subject,
    })
}

/// Checks an element of `egress`, `ingress`, `egressDeny` or `ingressDeny`; none if it is
/// empty and so allows nothing.
fn peer_rule(
    path: &str,
    value: &Value,
    section: &Section,
    scope: &Scope,
) -> Checked<Option<PeerRule>> {
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
    let ports = ports_of(path, map, section)?;
    if peers.is_none() && ports.is_none() {
        return Ok(None);
    }
    Ok(Some(PeerRule {
        deny: section.deny,
        peers: peers.unwrap_or(Peers::Any),
        ports: ports.unwrap_or_default(),
    }))
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
            })
        } else if field == section.cidr_set {
            cidr_set(&path, item)?
        } else if field == section.endpoints {
            Selector::Labels(peer_labels(&path, item, scope)?)
        } else if field == section.entities {
            match text(&path, item)? {
                "all" => return Ok(Peers::Any),
                name => Selector::Entity(Entity::parse(name).ok_or_else(|| {
                    Fault::new(
                        &path,
                        &format!("`{name}` is no entity"),
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
    let unsupported = ["cidrGroupRef", "cidrGroupSelector"];
    let map = object(path, value, &["cidr", "except"], &unsupported)?;
    let Some(cidr) = map.get("cidr") else {
        return Err(Fault::new(
            &format!("{path}.cidr"),
            "is missing",
            "add a block",
        ));
    };
    let prefix = prefix(&format!("{path}.cidr"), cidr)?;
    let mut except = std::collections::BTreeSet::new();
    let except_path = format!("{path}.except");
    for (n, item) in list(&except_path, map.get("except"))?.iter().enumerate() {
        let path = format!("{except_path}[{n}]");
        let part = self::prefix(&path, item)?;
        if !prefix.contains(&part) {
            let reason = format!("{part} is not inside {prefix}");
            return Err(Fault::new(
                &path,
                &reason,
                "name a part of the block, or remove it",
            ));
        }
        except.insert(part);
    }
    Ok(Selector::Cidr(CidrSelector { prefix, except }))
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

fn name_rule(path: &str, value: &Value, make: fn(String) -> NameRule) -> Checked<NameRule> {
    let rule = make(text(path, value)?.to_owned());
    pattern::validate_rule(&rule).map_err(|error| {
        Fault::new(
            path,
            &error.to_string(),
            "write a DNS name such as www.example.com or *.example.com",
        )
    })?;
    Ok(rule)
}

/// Ports and ICMP types; none if the rule names neither.
fn ports_of(
    path: &str,
    map: &Map<String, Value>,
    section: &Section,
) -> Checked<Option<Vec<PortRule>>> {
    match (map.get("toPorts"), map.get("icmps")) {
        (None, None) => Ok(None),
        (Some(_), Some(_)) => {
            let path = format!("{path}.icmps");
            Err(Fault::new(
                &path,
                "stands beside toPorts",
                "put each into a rule of its own",
            ))
        }
        (Some(ports), None) => {
            let path = format!("{path}.toPorts");
            let mut found = Vec::new();
            for (n, item) in list(&path, Some(ports))?.iter().enumerate() {
                found.extend(port_rules(&format!("{path}[{n}]"), item, section)?);
            }
            Ok((!found.is_empty()).then_some(found))
        }
        (None, Some(icmps)) => icmp_rules(&format!("{path}.icmps"), icmps).map(Some),
    }
}

fn port_rules(path: &str, value: &Value, section: &Section) -> Checked<Vec<PortRule>> {
    let unsupported = [
        "terminatingTLS",
        "originatingTLS",
        "serverNames",
        "listener",
    ];
    let map = object(path, value, &["ports", "rules"], &unsupported)?;
    let dns = match map.get("rules") {
        None => None,
        Some(rules) => dns_names(&format!("{path}.rules"), rules)?,
    };
    let rules_path = format!("{path}.rules.dns");
    if dns.is_some() && section.deny {
        return Err(Fault::new(
            &rules_path,
            "stands in a deny rule",
            "put it under egress",
        ));
    }
    if dns.is_some() && !section.egress {
        return Err(Fault::new(
            &rules_path,
            "stands in an ingress rule",
            "put it under egress",
        ));
    }
    let ports_path = format!("{path}.ports");
    let items = list(&ports_path, map.get("ports"))?;
    if items.is_empty() {
        return Err(Fault::new(
            &ports_path,
            "is empty",
            "name a port, or remove toPorts",
        ));
    }
    let mut found = Vec::new();
    for (n, item) in items.iter().enumerate() {
        let path = format!("{ports_path}[{n}]");
        let mut port = port(&path, item)?;
        if dns.is_some() {
            if port.first != port.last {
                let remedy = "list each DNS port by itself";
                return Err(Fault::new(&path, "is a range with DNS rules", remedy));
            }
            if !matches!(port.protocol, Protocol::Any | Protocol::Udp | Protocol::Tcp) {
                let remedy = "use protocol UDP, TCP or ANY";
                return Err(Fault::new(
                    &format!("{path}.protocol"),
                    "carries no DNS",
                    remedy,
                ));
            }
            port.dns.clone_from(&dns);
        }
        found.push(port);
    }
    Ok(found)
}

fn port(path: &str, value: &Value) -> Checked<PortRule> {
    let map = object(path, value, &["port", "endPort", "protocol"], &[])?;
    let protocol_path = format!("{path}.protocol");
    let protocol = match map
        .get("protocol")
        .map(|v| text(&protocol_path, v))
        .transpose()?
    {
        None | Some("ANY" | "") => Protocol::Any,
        Some("TCP") => Protocol::Tcp,
        Some("UDP") => Protocol::Udp,
        Some("SCTP") => Protocol::Sctp,
        Some("ICMP") => Protocol::Icmp,
        Some("ICMPv6" | "ICMPV6") => Protocol::Icmpv6,
        Some(other) => {
            let remedy = "use TCP, UDP, SCTP, ICMP, ICMPv6 or ANY";
            return Err(Fault::new(
                &protocol_path,
                &format!("`{other}` is not supported"),
                remedy,
            ));
        }
    };
    let port_path = format!("{path}.port");
    let Some(first) = map.get("port") else {
        return Err(Fault::new(
            &port_path,
            "is missing",
            "name a port; \"0\" means every port",
        ));
    };
    let first = number(&port_path, first)?;
    let end_path = format!("{path}.endPort");
    let end = map
        .get("endPort")
        .map(|value| number(&end_path, value))
        .transpose()?;
    let (first, last) = match (first, end.filter(|end| *end > 0)) {
        (0, None) => (0, u16::MAX),
        (0, Some(_)) => {
            return Err(Fault::new(
                &end_path,
                "stands beside port 0",
                "remove it: 0 is every port",
            ));
        }
        (first, Some(last)) if last < first => {
            let remedy = "make it at least as high as port";
            return Err(Fault::new(
                &end_path,
                &format!("{last} is below port {first}"),
                remedy,
            ));
        }
        (first, last) => (first, last.unwrap_or(first)),
    };
    Ok(PortRule {
        protocol,
        first,
        last,
        dns: None,
    })
}

fn number(path: &str, value: &Value) -> Checked<u16> {
    let parsed = match value {
        Value::Number(number) => number.as_u64().and_then(|n| u16::try_from(n).ok()),
        Value::String(text) if text.bytes().all(|b| b.is_ascii_digit()) => text.parse().ok(),
        Value::String(name) => {
            let reason = format!("`{name}` is a named port, which is not supported");
            return Err(Fault::new(path, &reason, "write its number"));
        }
        _ => None,
    };
    parsed.ok_or_else(|| Fault::new(path, "is no port", "write a number from 0 to 65535"))
}

fn icmp_rules(path: &str, value: &Value) -> Checked<Vec<PortRule>> {
    let mut found = Vec::new();
    for (n, item) in list(path, Some(value))?.iter().enumerate() {
        let path = format!("{path}[{n}]");
        let map = object(&path, item, &["fields"], &[])?;
        let path = format!("{path}.fields");
        for (n, field) in list(&path, map.get("fields"))?.iter().enumerate() {
            let path = format!("{path}[{n}]");
            let map = object(&path, field, &["family", "type"], &[])?;
            let family_path = format!("{path}.family");
            let protocol = match map
                .get("family")
                .map(|v| text(&family_path, v))
                .transpose()?
            {
                None | Some("IPv4") => Protocol::Icmp,
                Some("IPv6") => Protocol::Icmpv6,
                Some(other) => {
                    let reason = format!("`{other}` is no family");
                    return Err(Fault::new(&family_path, &reason, "use IPv4 or IPv6"));
                }
            };
            let kind = icmp_type(&format!("{path}.type"), map.get("type"), protocol)?;
            found.push(PortRule {
                protocol,
                first: kind,
                last: kind,
                dns: None,
            });
        }
    }
    if found.is_empty() {
        return Err(Fault::new(
            path,
            "names no field",
            "name an ICMP type, or remove icmps",
        ));
    }
    Ok(found)
}

fn icmp_type(path: &str, value: Option<&Value>, protocol: Protocol) -> Checked<u16> {
    let named = |name: &str| match (protocol, name) {
        (Protocol::Icmp, "EchoReply") => Some(0),
        (Protocol::Icmp, "DestinationUnreachable") => Some(3),
        (Protocol::Icmp, "EchoRequest") => Some(8),
        (Protocol::Icmp, "TimeExceeded") => Some(11),
        (Protocol::Icmpv6, "DestinationUnreachable") => Some(1),
        (Protocol::Icmpv6, "PacketTooBig") => Some(2),
        (Protocol::Icmpv6, "TimeExceeded") => Some(3),
        (Protocol::Icmpv6, "EchoRequest") => Some(128),
        (Protocol::Icmpv6, "EchoReply") => Some(129),
        _ => None,
    };
    let parsed = match value {
        Some(Value::Number(number)) => number.as_u64().and_then(|n| u8::try_from(n).ok()),
        Some(Value::String(text)) => named(text).or_else(|| text.parse().ok()),
        _ => None,
    };
    let fault = || Fault::new(path, "is no ICMP type", "write its number, 0 to 255");
    parsed.map(u16::from).ok_or_else(fault)
}

/// The `rules` of a `toPorts` element; none if it has no DNS rules.
fn dns_names(path: &str, value: &Value) -> Checked<Option<DnsNames>> {
    let map = object(path, value, &["dns"], &["http", "kafka", "l7", "l7proto"])?;
    let Some(dns) = map.get("dns") else {
        return Ok(None);
    };
    let path = format!("{path}.dns");
    let items = list(&path, Some(dns))?;
    if items.is_empty() {
        return Ok(Some(DnsNames::All));
    }
    let mut names = Vec::new();
    for (n, item) in items.iter().enumerate() {
        let path = format!("{path}[{n}]");
        let map = object(&path, item, &["matchName", "matchPattern"], &[])?;
        let before = names.len();
        if let Some(name) = map.get("matchName") {
            names.push(name_rule(
                &format!("{path}.matchName"),
                name,
                NameRule::Name,
            )?);
        }
        if let Some(pattern) = map.get("matchPattern") {
            names.push(name_rule(
                &format!("{path}.matchPattern"),
                pattern,
                NameRule::Pattern,
            )?);
        }
        if names.len() == before {
            let remedy = "add one of them; matchPattern: \"*\" allows every name";
            return Err(Fault::new(
                &path,
                "has neither matchName nor matchPattern",
                remedy,
            ));
        }
    }
    Ok(Some(DnsNames::Names(names)))
}

fn subject(path: &str, value: &Value, scope: &Scope) -> Checked<LabelSelector> {
    let mut selector = labels(path, value)?;
    if let Some(namespace) = &scope.namespace {
        if selector.mentions(NAMESPACE_KEY) {
            let remedy = "set metadata.namespace, or use CiliumClusterwideNetworkPolicy";
            return Err(Fault::new(path, "selects a namespace", remedy));
        }
        selector.requirements.insert(in_namespace(namespace));
    }
    Ok(selector)
}

fn peer_labels(path: &str, value: &Value, scope: &Scope) -> Checked<LabelSelector> {
    let mut selector = labels(path, value)?;
    let elsewhere = selector.requirements.iter().any(|requirement| {
        requirement.key == NAMESPACE_KEY
            || requirement.key.starts_with(NAMESPACE_LABELS)
            || requirement.source.as_deref() == Some(RESERVED)
    });
    if let (Some(namespace), false) = (&scope.namespace, elsewhere) {
        selector.requirements.insert(in_namespace(namespace));
    }
    Ok(selector)
}

fn in_namespace(namespace: &str) -> Requirement {
    let operator = Operator::In([namespace.to_owned()].into());
    Requirement::new(&format!("{K8S}:{NAMESPACE_KEY}"), operator)
}

fn labels(path: &str, value: &Value) -> Checked<LabelSelector> {
    let map = object(path, value, &["matchLabels", "matchExpressions"], &[])?;
    let mut requirements = std::collections::BTreeSet::new();
    let labels_path = format!("{path}.matchLabels");
    match map.get("matchLabels") {
        None | Some(Value::Null) => {}
        Some(Value::Object(pairs)) => {
            for (key, value) in pairs {
                let wanted = text(&format!("{labels_path}.{key}"), value)?;
                let operator = Operator::In([wanted.to_owned()].into());
                requirements.insert(Requirement::new(key, operator));
            }
        }
        Some(_) => {
            return Err(Fault::new(
                &labels_path,
                "is no mapping",
                "write key: value pairs",
            ));
        }
    }
    let path = format!("{path}.matchExpressions");
    for (n, item) in list(&path, map.get("matchExpressions"))?.iter().enumerate() {
        requirements.insert(expression(&format!("{path}[{n}]"), item)?);
    }
    Ok(LabelSelector { requirements })
}

fn expression(path: &str, value: &Value) -> Checked<Requirement> {
    let map = object(path, value, &["key", "operator", "values"], &[])?;
    let field = |name: &str| {
        let path = format!("{path}.{name}");
        match map.get(name) {
            Some(value) => text(&path, value),
            None => Err(Fault::new(&path, "is missing", "add it")),
        }
    };
    let values_path = format!("{path}.values");
    let mut values = std::collections::BTreeSet::new();
    for (n, item) in list(&values_path, map.get("values"))?.iter().enumerate() {
        values.insert(text(&format!("{values_path}[{n}]"), item)?.to_owned());
    }
    let operator = match field("operator")? {
        "In" => Operator::In(values.clone()),
        "NotIn" => Operator::NotIn(values.clone()),
        "Exists" => Operator::Exists,
        "DoesNotExist" => Operator::DoesNotExist,
        other => {
            let remedy = "use In, NotIn, Exists or DoesNotExist";
            let reason = format!("`{other}` is no operator");
            return Err(Fault::new(&format!("{path}.operator"), &reason, remedy));
        }
    };
    let wants_values = matches!(operator, Operator::In(_) | Operator::NotIn(_));
    if wants_values == values.is_empty() {
        let (reason, remedy) = if wants_values {
            ("is empty", "list at least one value")
        } else {
            ("is set", "remove it: this operator takes no values")
        };
        return Err(Fault::new(&values_path, reason, remedy));
    }
    Ok(Requirement::new(field("key")?, operator))
}

fn object<'a>(
    path: &str,
    value: &'a Value,
    known: &[&str],
    unsupported: &[&str],
) -> Checked<&'a Map<String, Value>> {
    let Some(map) = value.as_object() else {
        let reason = format!("is {}, not a mapping", kind(value));
        return Err(Fault::new(
            path,
            &reason,
            &format!("write a mapping with {}", known.join(", ")),
        ));
    };
    for key in map.keys() {
        let path = format!("{path}.{key}");
        if unsupported.contains(&key.as_str()) {
            let remedy = "remove it, or keep the rule out of this agent's policies";
            return Err(Fault::new(
                &path,
                &format!("{key} is not supported"),
                remedy,
            ));
        }
        if !known.contains(&key.as_str()) {
            let remedy = format!("remove it; known here are {}", known.join(", "));
            return Err(Fault::new(&path, "is no known field", &remedy));
        }
    }
    Ok(map)
}

fn list<'a>(path: &str, value: Option<&'a Value>) -> Checked<&'a [Value]> {
    match value {
        None | Some(Value::Null) => Ok(&[]),
        Some(Value::Array(items)) => Ok(items),
        Some(other) => {
            let reason = format!("is {}, not a list", kind(other));
            Err(Fault::new(
                path,
                &reason,
                "write a list (each element after a dash)",
            ))
        }
    }
}

fn text<'a>(path: &str, value: &'a Value) -> Checked<&'a str> {
    value.as_str().ok_or_else(|| {
        let reason = format!("is {}, not a text", kind(value));
        Fault::new(path, &reason, "put it in quotes")
    })
}

fn boolean(path: &str, value: &Value) -> Checked<bool> {
    value.as_bool().ok_or_else(|| {
        let reason = format!("is {}, neither true nor false", kind(value));
        Fault::new(path, &reason, "write true or false")
    })
}

fn prefix(path: &str, value: &Value) -> Checked<IpNet> {
    let text = text(path, value)?;
    let parsed = text.parse().ok().or_else(|| {
        let address: Option<std::net::IpAddr> = text.parse().ok();
        address.map(IpNet::from)
    });
    parsed.map(|prefix| prefix.trunc()).ok_or_else(|| {
        let reason = format!("`{text}` is no block of addresses");
        Fault::new(
            path,
            &reason,
            "write for example 10.0.0.0/8 or 2001:db8::/32",
        )
    })
}

const fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "empty",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "a mapping",
    }
}

/// What the author of these rules should know although they are valid.
pub fn warnings(rules: &[Rule]) -> Vec<String> {
    let mut found = Vec::new();
    let egress = || rules.iter().flat_map(|rule| &rule.egress.peers);
    let by_name = egress().any(|rule| {
        matches!(&rule.peers, Peers::Selectors(list) if list.iter().any(|s| matches!(s, Selector::Fqdn(_))))
    });
    let dns = |rule: &&PeerRule| rule.ports.iter().any(|port| port.dns.is_some());
    if by_name && !egress().any(|rule| dns(&rule)) {
        found.push(
            "toFQDNs without any DNS rule: addresses are learned only from DNS answers that pass \
             the proxy; add an egress rule to the DNS servers with toPorts.rules.dns"
                .to_owned(),
        );
    }
    if egress().filter(dns).any(|rule| is_anyone(&rule.peers)) {
        found.push(
            "a DNS rule allows any server: whoever runs one can give any address an allowed \
             name; restrict the rule with toEndpoints or toCIDR to servers you trust"
                .to_owned(),
        );
    }
    found
}

/// Whether servers nobody vouches for are among the peers.
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
        Selector::Fqdn(_) => false,
        Selector::Entity(entity) => matches!(
            entity,
            Entity::World | Entity::WorldIpv4 | Entity::WorldIpv6 | Entity::Cluster
        ),
    })
}
