//! Ports of a rule.

use serde_json::Value;

use super::only;
use crate::{
    field::{Checked, Field},
    name::PortName,
    policy::{Port, PortRange, Ports, Protocol},
};

/// A list of ports. If it is absent or empty, it means every port and protocol.
pub(super) fn ports(field: &Field<'_>) -> Checked<Ports> {
    let ports = field.items()?.map(|item| port(&item));
    let ports = ports.collect::<Checked<Vec<Port>>>()?;
    Ok(if ports.is_empty() {
        Ports::Any
    } else {
        Ports::Of(ports)
    })
}

fn port(field: &Field<'_>) -> Checked<Port> {
    only(field, &["protocol", "port", "endPort"])?;
    let protocol = field.get("protocol");
    let protocol = match protocol.is_absent() {
        true => Protocol::Tcp,
        false => {
            let text = protocol.text()?;
            let reason = || format!("`{text}` is not supported");
            let refused = || protocol.fault(reason(), "use TCP, UDP or SCTP");
            Protocol::parse(text).ok_or_else(refused)?
        }
    };
    let (first, end) = (field.get("port"), field.get("endPort"));
    let ports = match (first.value, end.is_absent()) {
        (None | Some(Value::Null), true) => PortRange::All,
        (None | Some(Value::Null), false) => {
            return end.refuse("stands without port", "add port, the first of the range");
        }
        (Some(Value::String(name)), no_end) => {
            let name = port_name(&first, name)?;
            if !no_end {
                let remedy = "remove it: a name means one port";
                return end.refuse("stands beside a port name", remedy);
            }
            PortRange::Named(name)
        }
        (Some(_), no_end) => {
            let first = number(&first)?;
            let last = if no_end { first } else { number(&end)? };
            PortRange::numbers(first, last).ok_or_else(|| {
                let reason = format!("{last} is below port {first}");
                end.fault(reason, "make it at least as high as port")
            })?
        }
    };
    Ok(Port { protocol, ports })
}

fn port_name(field: &Field<'_>, text: &str) -> Checked<PortName> {
    PortName::new(text).ok_or_else(|| {
        let remedy = if text.parse::<u16>().is_ok() {
            format!("write {text} without quotes to mean the number")
        } else {
            "write at most 15 lower-case letters, digits and single dashes inside, at least one \
             of them a letter"
                .to_owned()
        };
        field.fault(format!("`{text}` is not the name of a port"), remedy)
    })
}

/// A port number, at least 1.
fn number(field: &Field<'_>) -> Checked<u16> {
    let number = field.value.and_then(Value::as_u64);
    let number = number.and_then(|n| u16::try_from(n).ok());
    number.filter(|n| *n > 0).ok_or_else(|| {
        let reason = match field.value {
            Some(Value::Number(number)) => format!("{number} is not a port"),
            _ => format!("is {}, not a port", field.kind()),
        };
        field.fault(reason, "write a number from 1 to 65535")
    })
}
