//! The shapes that fields of rules have, beyond those of [`Field`].

use dns_policy::{pattern, rule::NameRule};
use ipnet::IpNet;
use netpol::field::{Checked, Field};
use serde_json::Value;

/// Refuses what is not a mapping, and a field that is not among `known`.
pub(in crate::policy) fn only(
    field: &Field<'_>,
    known: &[&str],
    unsupported: &[&str],
) -> Checked<()> {
    for key in field.keys(known)? {
        if unsupported.contains(&key) {
            let remedy = "remove it, or keep the rule out of this agent's policies";
            let reason = format!("{key} is not supported");
            return field.get(key).refuse(reason, remedy);
        }
        if !known.contains(&key) {
            let remedy = nearest::remedy(key, known);
            return field.get(key).refuse("is an unknown field", remedy);
        }
    }
    Ok(())
}

pub(super) fn boolean(field: &Field<'_>) -> Checked<bool> {
    field.value.and_then(Value::as_bool).ok_or_else(|| {
        let reason = format!("is {}, neither true nor false", field.kind());
        field.fault(reason, "write true or false")
    })
}

pub(in crate::policy) fn prefix(field: &Field<'_>) -> Checked<IpNet> {
    let text = field.text()?;
    let parsed = text.parse().ok().or_else(|| {
        let address: Option<std::net::IpAddr> = text.parse().ok();
        address.map(IpNet::from)
    });
    parsed.map(|prefix| prefix.trunc()).ok_or_else(|| {
        let reason = format!("`{text}` is not a block of addresses");
        field.fault(reason, "write for example 10.0.0.0/8 or 2001:db8::/32")
    })
}

pub(super) fn name_rule(field: &Field<'_>, make: fn(String) -> NameRule) -> Checked<NameRule> {
    let rule = make(field.text()?.to_owned());
    let remedy = match rule {
        NameRule::Name(_) => "write a DNS name such as www.example.com, or use matchPattern",
        NameRule::Pattern(_) => "write a pattern such as *.example.com",
    };
    pattern::validate_rule(&rule).map_err(|error| field.fault(error.to_string(), remedy))?;
    Ok(rule)
}
