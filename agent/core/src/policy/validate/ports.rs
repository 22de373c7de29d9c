//! Ports, ICMP types and DNS rules.

use dns_policy::rule::NameRule;
use serde_json::{Map, Value};

use super::field::{list, object, text};
use crate::{
    named_port::PortName,
    policy::{
        rule::{DnsNames, PortRule, Ports, Protocol},
        validate::{
            fault::{Checked, Fault},
            field::name_rule,
            section::Section,
        },
    },
};

/// Ports and ICMP types; none if the rule names neither.
pub(super) fn ports_of(
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
            if matches!(port.ports, Ports::Range(first, last) if first != last) {
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
    let protocol = protocol(path, map)?;
    let port_path = format!("{path}.port");
    let Some(first) = map.get("port") else {
        return Err(Fault::new(
            &port_path,
            "is missing",
            "name a port; \"0\" means every port",
        ));
    };
    let end_path = format!("{path}.endPort");
    let end = map
        .get("endPort")
        .map(|value| number(&end_path, value))
        .transpose()?;
    let end = end.filter(|end| *end > 0);
    if let Some(name) = port_name(&port_path, first)? {
        if matches!(protocol, Protocol::Icmp | Protocol::Icmpv6) {
            let remedy = "write the number of the type";
            return Err(Fault::new(
                &port_path,
                "is a name, which ICMP types have not",
                remedy,
            ));
        }
        if end.is_some() {
            let remedy = "remove it: a name is one port";
            return Err(Fault::new(&end_path, "stands beside a port name", remedy));
        }
        return Ok(PortRule {
            protocol,
            ports: Ports::Named(name),
            dns: None,
        });
    }
    let first = number(&port_path, first)?;
    let (first, last) = range(&end_path, first, end)?;
    Ok(PortRule {
        protocol,
        ports: Ports::Range(first, last),
        dns: None,
    })
}

fn protocol(path: &str, map: &Map<String, Value>) -> Checked<Protocol> {
    let protocol_path = format!("{path}.protocol");
    Ok(
        match map
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
        },
    )
}

/// First and last port of a rule. Port 0 without an end means every port.
fn range(end_path: &str, first: u16, end: Option<u16>) -> Checked<(u16, u16)> {
    Ok(match (first, end) {
        (0, None) => (0, u16::MAX),
        (0, Some(_)) => {
            return Err(Fault::new(
                end_path,
                "stands beside port 0",
                "remove it: 0 is every port",
            ));
        }
        (first, Some(last)) if last < first => {
            let remedy = "make it at least as high as port";
            return Err(Fault::new(
                end_path,
                &format!("{last} is below port {first}"),
                remedy,
            ));
        }
        (first, last) => (first, last.unwrap_or(first)),
    })
}

/// The name of a port; none if it is a number, or neither a number nor a text.
fn port_name(path: &str, value: &Value) -> Checked<Option<PortName>> {
    let Value::String(text) = value else {
        return Ok(None);
    };
    if text.bytes().all(|b| b.is_ascii_digit()) {
        return Ok(None);
    }
    match text.parse() {
        Ok(name) => Ok(Some(name)),
        Err(_) => Err(Fault::new(
            path,
            &format!("`{text}` is neither a number nor a port name"),
            "write a number from 0 to 65535, or a name of at most 15 letters, digits and single \
             dashes inside, at least one of them a letter",
        )),
    }
}

fn number(path: &str, value: &Value) -> Checked<u16> {
    let parsed = match value {
        Value::Number(number) => number.as_u64().and_then(|n| u16::try_from(n).ok()),
        Value::String(text) if text.bytes().all(|b| b.is_ascii_digit()) => text.parse().ok(),
        _ => None,
    };
    parsed.ok_or_else(|| Fault::new(path, "is not a port", "write a number from 0 to 65535"))
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
                    let reason = format!("`{other}` is not a family");
                    return Err(Fault::new(&family_path, &reason, "use IPv4 or IPv6"));
                }
            };
            let kind = icmp_type(&format!("{path}.type"), map.get("type"), protocol)?;
            found.push(PortRule {
                protocol,
                ports: Ports::Range(kind, kind),
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
    let fault = || Fault::new(path, "is not an ICMP type", "write its number, 0 to 255");
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
