//! Names in `to.dnsName`: those that the CustomResourceDefinition of OVN-Kubernetes accepts.

use std::net::IpAddr;

use netpol::field::{Checked, Field};

/// Maximum number of bytes of a name without its final dot.
const MAX_NAME: usize = 253;
/// Maximum number of bytes of one label (RFC 1035, 2.3.4).
const MAX_LABEL: usize = 63;
const EXAMPLE: &str = "write a name such as www.example.com, or *.example.com for one label of it";
const LETTERS: &str = "labels have letters, digits and dashes between them; write a name such as \
                       www.example.com, or its form with xn-- for other letters";

/// Checks a name, with `*.` before it or without, and with the final dot or without.
pub(super) fn check(field: &Field<'_>, written: &str) -> Checked<()> {
    let name = written.strip_suffix('.').unwrap_or(written);
    let fault = |reason: &str, remedy: &str| {
        // A line break in a name would split the message.
        let shown = written.escape_debug();
        field.refuse(format!("`{shown}` {reason}"), remedy)
    };
    if name.len() > MAX_NAME {
        return fault("is longer than 253 bytes", "shorten it");
    }
    if let Ok(address) = name.parse::<IpAddr>() {
        let bits = if address.is_ipv4() { 32 } else { 128 };
        let remedy = format!("write cidrSelector: {address}/{bits} in place of dnsName");
        return fault("is an address and not a name", &remedy);
    }
    let (star, domain) = match name.strip_prefix("*.") {
        Some(domain) => (true, domain),
        None => (false, name),
    };
    let labels: Vec<&str> = domain.split('.').collect();
    if labels.iter().any(|label| label.len() > MAX_LABEL) {
        return fault("has a label of more than 63 bytes", "shorten the label");
    }
    if labels.iter().any(|label| label.contains('*')) {
        let reason = "has a star elsewhere than alone before the first dot";
        return fault(reason, EXAMPLE);
    }
    if !labels.iter().all(|label| is_label(label)) {
        return fault("is not a DNS name", LETTERS);
    }
    match (star, labels.len()) {
        (true, 1) => fault(
            "has one label after the star",
            "name a domain of at least two",
        ),
        (false, 1) => fault("has one label", "name a domain of at least two"),
        _ => Ok(()),
    }
}

/// Letters and digits, and dashes between them.
fn is_label(label: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    !label.is_empty()
        && label.bytes().all(inner)
        && !label.starts_with('-')
        && !label.ends_with('-')
}
