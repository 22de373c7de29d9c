//! Ports, ICMP types and DNS rules.

use dns_policy::rule::NameRule;
use netpol::field::{Checked, Field};
use serde_json::Value;

use super::field::{name_rule, only};
use crate::{
    named_port::{self, PortName},
    policy::{
        rule::{DnsNames, PortRule, Ports, Protocol},
        validate::section::Section,
    },
};

/// Ports and ICMP types; `None` if the rule has neither.
pub(super) fn ports_of(field: &Field<'_>, section: &Section) -> Checked<Option<Vec<PortRule>>> {
    match (field.get("toPorts").written(), field.get("icmps").written()) {
        (None, None) => Ok(None),
        (Some(_), Some(icmps)) => {
            icmps.refuse("stands beside toPorts", "put each into a rule of its own")
        }
        (Some(ports), None) => {
            let mut found = Vec::new();
            for item in ports.items()? {
                found.extend(port_rules(&item, section)?);
            }
            Ok((!found.is_empty()).then_some(found))
        }
        (None, Some(icmps)) => icmp_rules(&icmps).map(Some),
    }
}

fn port_rules(field: &Field<'_>, section: &Section) -> Checked<Vec<PortRule>> {
    let unsupported = [
        "terminatingTLS",
        "originatingTLS",
        "serverNames",
        "listener",
    ];
    only(field, &["ports", "rules"], &unsupported)?;
    let rules = field.get("rules").written();
    let dns = match &rules {
        None => None,
        Some(rules) => dns_names(rules)?,
    };
    if let (Some(rules), true) = (&rules, dns.is_some()) {
        let remedy = "put it under egress";
        if section.deny {
            return rules.get("dns").refuse("stands in a deny rule", remedy);
        }
        if !section.egress {
            return rules.get("dns").refuse("stands in an ingress rule", remedy);
        }
    }
    let ports = field.get("ports");
    let items = ports.items()?;
    if items.len() == 0 {
        return ports.refuse("is empty", "name a port, or remove toPorts");
    }
    items.map(|item| port_with(&item, dns.as_ref())).collect()
}

/// A port with DNS rules, or without.
fn port_with(field: &Field<'_>, dns: Option<&DnsNames>) -> Checked<PortRule> {
    let mut port = port(field)?;
    if dns.is_some() {
        if matches!(port.ports, Ports::Range(first, last) if first != last) {
            let remedy = "list each DNS port by itself";
            return field.refuse("is a range with DNS rules", remedy);
        }
        if !matches!(port.protocol, Protocol::Any | Protocol::Udp | Protocol::Tcp) {
            let protocol = field.get("protocol");
            return protocol.refuse("carries no DNS", "use protocol UDP, TCP or ANY");
        }
    }
    port.dns = dns.cloned();
    Ok(port)
}

fn port(field: &Field<'_>) -> Checked<PortRule> {
    only(field, &["port", "endPort", "protocol"], &[])?;
    let protocol = protocol(&field.get("protocol"))?;
    let (written, end_field) = (field.get("port"), field.get("endPort"));
    if written.value.is_none() {
        return written.refuse("is missing", "name a port; \"0\" means every port");
    }
    let end = match end_field.value {
        Some(_) => Some(number(&end_field)?).filter(|end| *end > 0),
        None => None,
    };
    let ports = match port_name(&written)? {
        Some(_) if matches!(protocol, Protocol::Icmp | Protocol::Icmpv6) => {
            let remedy = "write the number of the type";
            return written.refuse("is a name, which ICMP types have not", remedy);
        }
        Some(_) if end.is_some() => {
            let remedy = "remove it: a name is one port";
            return end_field.refuse("stands beside a port name", remedy);
        }
        Some(name) => Ports::Named(name),
        None => range(&end_field, number(&written)?, end)?,
    };
    Ok(PortRule {
        protocol,
        ports,
        dns: None,
    })
}

fn protocol(field: &Field<'_>) -> Checked<Protocol> {
    if field.value.is_none() {
        return Ok(Protocol::Any);
    }
    Ok(match field.text()? {
        "ANY" | "" => Protocol::Any,
        "TCP" => Protocol::Tcp,
        "UDP" => Protocol::Udp,
        "SCTP" => Protocol::Sctp,
        "ICMP" => Protocol::Icmp,
        "ICMPv6" | "ICMPV6" => Protocol::Icmpv6,
        other => {
            let remedy = "use TCP, UDP, SCTP, ICMP, ICMPv6 or ANY";
            return field.refuse(format!("`{other}` is not supported"), remedy);
        }
    })
}

/// The ports of a rule. Port 0 without an end means every port.
fn range(end_field: &Field<'_>, first: u16, end: Option<u16>) -> Checked<Ports> {
    Ok(match (first, end) {
        (0, None) => Ports::Range(0, u16::MAX),
        (0, Some(_)) => {
            return end_field.refuse("stands beside port 0", "remove it: 0 is every port");
        }
        (first, Some(last)) if last < first => {
            let remedy = "make it at least as high as port";
            return end_field.refuse(format!("{last} is below port {first}"), remedy);
        }
        (first, last) => Ports::Range(first, last.unwrap_or(first)),
    })
}

/// The name of a port; `None` if it is a number, or neither a number nor a text.
fn port_name(field: &Field<'_>) -> Checked<Option<PortName>> {
    let text = match field.value {
        Some(Value::String(text)) if !is_digits(text) => text,
        _ => return Ok(None),
    };
    named_port::port_name(text).map(Some).map_err(|_| {
        field.fault(
            format!("`{text}` is neither a number nor a port name"),
            "write a number from 0 to 65535, or a name of at most 15 letters, digits and single \
             dashes inside, at least one of them a letter",
        )
    })
}

fn is_digits(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_digit())
}

fn number(field: &Field<'_>) -> Checked<u16> {
    let parsed = match field.value {
        Some(Value::Number(number)) => number.as_u64().and_then(|n| u16::try_from(n).ok()),
        Some(Value::String(text)) if is_digits(text) => text.parse().ok(),
        _ => None,
    };
    parsed.ok_or_else(|| field.fault("is not a port", "write a number from 0 to 65535"))
}

fn icmp_rules(icmps: &Field<'_>) -> Checked<Vec<PortRule>> {
    let mut found = Vec::new();
    for item in icmps.items()? {
        only(&item, &["fields"], &[])?;
        for field in item.get("fields").items()? {
            only(&field, &["family", "type"], &[])?;
            let protocol = icmp_protocol(&field.get("family"))?;
            let kind = icmp_type(&field.get("type"), protocol)?;
            found.push(PortRule {
                protocol,
                ports: Ports::Range(kind, kind),
                dns: None,
            });
        }
    }
    if found.is_empty() {
        return icmps.refuse("names no field", "name an ICMP type, or remove icmps");
    }
    Ok(found)
}

fn icmp_protocol(family: &Field<'_>) -> Checked<Protocol> {
    if family.value.is_none() {
        return Ok(Protocol::Icmp);
    }
    match family.text()? {
        "IPv4" => Ok(Protocol::Icmp),
        "IPv6" => Ok(Protocol::Icmpv6),
        other => family.refuse(format!("`{other}` is not a family"), "use IPv4 or IPv6"),
    }
}

fn icmp_type(field: &Field<'_>, protocol: Protocol) -> Checked<u16> {
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
    let parsed = match field.value {
        Some(Value::Number(number)) => number.as_u64().and_then(|n| u8::try_from(n).ok()),
        Some(Value::String(text)) => named(text).or_else(|| text.parse().ok()),
        _ => None,
    };
    let fault = || field.fault("is not an ICMP type", "write its number, 0 to 255");
    parsed.map(u16::from).ok_or_else(fault)
}

/// The `rules` of a `toPorts` element; `None` if it has no DNS rules.
fn dns_names(rules: &Field<'_>) -> Checked<Option<DnsNames>> {
    only(rules, &["dns"], &["http", "kafka", "l7", "l7proto"])?;
    let dns = rules.get("dns");
    if dns.value.is_none() {
        return Ok(None);
    }
    let mut names = Vec::new();
    for item in dns.items()? {
        only(&item, &["matchName", "matchPattern"], &[])?;
        let before = names.len();
        if let Some(name) = item.get("matchName").written() {
            names.push(name_rule(&name, NameRule::Name)?);
        }
        if let Some(pattern) = item.get("matchPattern").written() {
            names.push(name_rule(&pattern, NameRule::Pattern)?);
        }
        if names.len() == before {
            let remedy = "add one of them; matchPattern: \"*\" allows every name";
            return item.refuse("has neither matchName nor matchPattern", remedy);
        }
    }
    Ok(Some(match names.is_empty() {
        true => DnsNames::All,
        false => DnsNames::Names(names),
    }))
}
