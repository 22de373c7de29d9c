//! Fields that several kinds have: addresses, ports, protocols, namespaces and names.

use std::net::IpAddr;

use netpol::{
    field::{Checked, Field},
    policy::Protocol,
};
use serde_json::Value;

use crate::labels::Label;

/// Reads an address as the API server and kube-proxy do: IPv4 may have leading zeros, which mean
/// nothing, and may be embedded in IPv6.
fn parse_address(written: &str) -> Option<IpAddr> {
    let with_zeros = || {
        let part = |part: &str| {
            let is_number = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
            let digits = part.trim_start_matches('0');
            match (is_number, digits) {
                (true, "") => Some(0),
                (true, digits) => digits.parse::<u8>().ok(),
                (false, _) => None,
            }
        };
        let parts = written.split('.').map(part).collect::<Option<Vec<u8>>>()?;
        <[u8; 4]>::try_from(parts).ok().map(IpAddr::from)
    };
    let address = written.parse().ok().or_else(with_zeros)?;
    Some(address.to_canonical())
}

/// The address of one machine or pod.
pub(super) fn address(field: &Field<'_>) -> Checked<IpAddr> {
    let written = field.text()?;
    let fault = |reason: &str| {
        let remedy = "write the address alone, for example 192.0.2.1";
        field.fault(format!("`{written}` {reason}"), remedy)
    };
    let address = parse_address(written).ok_or_else(|| fault("is not an address"))?;
    let odd = address.is_unspecified() || address.is_loopback() || address.is_multicast();
    if odd {
        return Err(fault("is not an address of one machine"));
    }
    Ok(address)
}

/// An address; `None` if it is absent or empty.
pub(super) fn optional_address(field: &Field<'_>) -> Checked<Option<IpAddr>> {
    let written = field.optional_text()?;
    written.map(|_| address(field)).transpose()
}

/// A label of pods. Labels that only the agent gives, to nodes, the world, blocks and names, are
/// refused.
pub(super) fn label(field: &Field<'_>, written: &str, remedy: &str) -> Checked<Label> {
    let label = Label::parse(written).map_err(|error| field.fault(error.to_string(), remedy))?;
    if !label.is_given_by_agent() {
        return Ok(label);
    }
    let source = label.source();
    let remedy = format!("remove the label; the agent gives {source}: labels itself");
    field.refuse(format!("`{label}` is not a label of pods"), remedy)
}

/// A port number, never 0.
pub(super) fn port(field: &Field<'_>) -> Checked<u16> {
    let number = field.value.and_then(Value::as_u64);
    let port = number.and_then(|number| u16::try_from(number).ok());
    port.filter(|port| *port != 0).ok_or_else(|| {
        let written = field.value.map(|value| format!("`{value}`"));
        let written = written.unwrap_or_else(|| "missing".to_owned());
        let remedy = "write a number from 1 to 65535";
        field.fault(format!("is {written}, not a port"), remedy)
    })
}

/// A protocol; TCP if there is none.
pub(super) fn protocol(field: &Field<'_>) -> Checked<Protocol> {
    let text = field.optional_text()?.unwrap_or("TCP");
    let reason = || format!("`{text}` is not a protocol");
    Protocol::parse(text).ok_or_else(|| field.fault(reason(), "write TCP, UDP or SCTP"))
}

/// True or false; `None` if it is absent.
pub(super) fn optional_bool(field: &Field<'_>) -> Checked<Option<bool>> {
    match field.value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Bool(value)) => Ok(Some(*value)),
        Some(_) => field.refuse("is neither true nor false", "write true or false"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_the_api_server_reads_them() {
        let read = |text: &str| address(&Field::top(&Value::from(text))).ok();
        let plain: IpAddr = "10.2.0.10".parse().unwrap();
        for odd in [
            "10.2.0.10",
            "010.2.0.10",
            "10.02.000.0010",
            "::ffff:10.2.0.10",
        ] {
            assert_eq!(read(odd), Some(plain), "{odd}");
        }
        assert!(read("2001:db8::1").is_some());
        for bad in [
            "",
            "10.2.0",
            "10.2.0.256",
            "10.2.0.+1",
            "10.2.0.1.1",
            "0x10.2.0.1",
            "000.0.0.0",
        ] {
            assert_eq!(read(bad), None, "{bad}");
        }
    }
}
