//! Ports of a rule.

use serde_json::Value;

use super::{
    Checked, Refusal,
    fields::{Fields, kind, list, text},
};
use crate::{
    name::PortName,
    policy::{Port, PortRange, Ports, Protocol},
};

/// The list at `path`; absent or empty, it means every port and protocol.
pub(super) fn ports(path: &str, value: Option<&Value>) -> Checked<Ports> {
    let mut ports = Vec::new();
    for (n, value) in list(path, value)?.iter().enumerate() {
        ports.push(port(&format!("{path}[{n}]"), value)?);
    }
    Ok(if ports.is_empty() {
        Ports::Any
    } else {
        Ports::Of(ports)
    })
}

fn port(path: &str, value: &Value) -> Checked<Port> {
    let fields = Fields::of(path, value, &["protocol", "port", "endPort"])?;
    let protocol_path = format!("{path}.protocol");
    let protocol = match fields.get("protocol") {
        None => Protocol::Tcp,
        Some(value) => match text(&protocol_path, value)? {
            "TCP" => Protocol::Tcp,
            "UDP" => Protocol::Udp,
            "SCTP" => Protocol::Sctp,
            other => {
                let reason = format!("`{other}` is not supported");
                return Err(Refusal::new(
                    &protocol_path,
                    &reason,
                    "use TCP, UDP or SCTP",
                ));
            }
        },
    };
    let (port_path, end_path) = (format!("{path}.port"), format!("{path}.endPort"));
    let end = fields.get("endPort");
    let ports = match (fields.get("port"), end) {
        (None, None) => PortRange::All,
        (None, Some(_)) => {
            let remedy = "add port, the first of the range";
            return Err(Refusal::new(&end_path, "stands without port", remedy));
        }
        (Some(Value::String(name)), end) => {
            let name = port_name(&port_path, name)?;
            if end.is_some() {
                let remedy = "remove it: a name means one port";
                return Err(Refusal::new(&end_path, "stands beside a port name", remedy));
            }
            PortRange::Named(name)
        }
        (Some(value), end) => {
            let first = number(&port_path, value)?;
            let last = end.map(|value| number(&end_path, value)).transpose()?;
            let last = last.unwrap_or(first);
            PortRange::numbers(first, last).ok_or_else(|| {
                let reason = format!("{last} is below port {first}");
                Refusal::new(&end_path, &reason, "make it at least as high as port")
            })?
        }
    };
    Ok(Port { protocol, ports })
}

fn port_name(path: &str, text: &str) -> Checked<PortName> {
    PortName::new(text).ok_or_else(|| {
        let reason = format!("`{text}` is not the name of a port");
        let remedy = if text.parse::<u16>().is_ok() {
            format!("write {text} without quotes to mean the number")
        } else {
            "write at most 15 lower-case letters, digits and single dashes inside, at least one \
             of them a letter"
                .to_owned()
        };
        Refusal::new(path, &reason, &remedy)
    })
}

/// A port number, at least 1.
fn number(path: &str, value: &Value) -> Checked<u16> {
    let number = value.as_u64().and_then(|n| u16::try_from(n).ok());
    number.filter(|n| *n > 0).ok_or_else(|| {
        let reason = match value {
            Value::Number(number) => format!("{number} is not a port"),
            other => format!("is {}, not a port", kind(other)),
        };
        Refusal::new(path, &reason, "write a number from 1 to 65535")
    })
}
