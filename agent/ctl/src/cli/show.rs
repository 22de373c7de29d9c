//! What the agent answers, as tables.

mod status;

use std::io::Write as _;

use agent_core::core::snapshot::{EndpointView, IdentityView, IpcacheView, NameView, SelectorView};
use anyhow::Result;
use dns_policy::boot_time::BootTime;
use holdfast_agent::{admin::model::Policies, config::args::Output};
use serde::Serialize;

pub(crate) use self::status::status;
use super::table::{list, maybe, render};

/// Prints `value` as asked. A reader that closed the pipe is no error.
pub(crate) fn print<T: Serialize + ?Sized>(
    output: Output,
    value: &T,
    table: impl FnOnce(&T) -> String,
) -> Result<()> {
    let mut text = if super::is_json(output) {
        serde_json::to_string_pretty(value)?
    } else {
        table(value)
    };
    if !text.ends_with('\n') {
        text.push('\n');
    }
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

/// A number with its noun: "1 file", "2 files".
pub(super) fn counted(number: usize, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}

/// The table of `endpoint list`.
pub(crate) fn endpoints(endpoints: &[EndpointView]) -> String {
    let rows: Vec<Vec<String>> = endpoints
        .iter()
        .map(|e| {
            vec![
                e.id.to_string(),
                e.state.clone(),
                e.identity.to_string(),
                maybe(e.ipv4.as_ref()),
                maybe(e.ipv6.as_ref()),
                e.ifname.clone(),
                enforced(e),
                maybe(e.pod.as_ref()),
                list(&e.labels),
                e.key.clone(),
            ]
        })
        .collect();
    render(
        &[
            "ID",
            "STATE",
            "IDENTITY",
            "IPV4",
            "IPV6",
            "INTERFACE",
            "ENFORCED",
            "POD",
            "LABELS",
            "KEY",
        ],
        &rows,
    )
}

fn enforced(endpoint: &EndpointView) -> String {
    let egress = endpoint.egress_enforced.then_some("egress");
    let ingress = endpoint.ingress_enforced.then_some("ingress");
    let firewalls = endpoint.firewalls.iter().map(String::as_str);
    let by: Vec<&str> = egress.into_iter().chain(ingress).chain(firewalls).collect();
    match by.as_slice() {
        [] => "unrestricted".to_owned(),
        by => by.join(","),
    }
}

/// The same, with the reason.
fn enforced_why(endpoint: &EndpointView) -> String {
    let restricted = endpoint.egress_enforced || endpoint.ingress_enforced;
    let mode = endpoint.enable_policy.as_str();
    let has_firewall = !endpoint.firewalls.is_empty();
    let why = match (restricted, mode) {
        (true, "always") => " (enable-policy is always)",
        (true, _) => "",
        (false, "never") => ": enable-policy is never",
        (false, _) if endpoint.policies.is_empty() => ": no policy selects it",
        (false, _) if has_firewall => {
            ": the EgressFirewall drops what a Deny rule covers, and no other policy restricts it"
        }
        (false, _) => ": no policy that selects it restricts it",
    };
    format!("{}{why}", enforced(endpoint))
}

/// Note of `endpoint add` on an interface that was an endpoint already.
pub(super) fn replaced(before: &EndpointView, now: &EndpointView) -> String {
    let mut changes = Vec::new();
    for (what, before, now) in [
        ("labels", list(&before.labels), list(&now.labels)),
        ("ports", list(&before.named_ports), list(&now.named_ports)),
    ] {
        if before != now {
            changes.push(format!("{what} {before} replaced by {now}"));
        }
    }
    if changes.is_empty() {
        changes.push("labels and ports are the same".to_owned());
    }
    format!(
        "{} was an endpoint already: {}",
        now.key,
        changes.join("; ")
    )
}

/// The text of `endpoint get` and `endpoint add`.
pub(crate) fn endpoint(e: &EndpointView) -> String {
    let mut rows = vec![
        ("Endpoint", format!("{} ({})", e.id, e.state)),
        ("Key", e.key.clone()),
        ("Identity", e.identity.to_string()),
        ("Labels", list(&e.labels)),
        ("Ports", list(&e.named_ports)),
        (
            "Addresses",
            format!("{} {}", maybe(e.ipv4.as_ref()), maybe(e.ipv6.as_ref())),
        ),
        (
            "Interface",
            format!("{} (index {}), namespace {}", e.ifname, e.ifindex, e.netns),
        ),
        ("Policies", list(&e.policies)),
        ("Enforced", enforced_why(e)),
        (
            "Policy map",
            format!(
                "{}, revision {}",
                counted(e.policy_entries, "entry", "entries"),
                e.policy_revision
            ),
        ),
    ];
    if let Some(problem) = &e.problem {
        rows.push(("PROBLEM", problem.clone()));
    }
    let mut text: String = rows
        .iter()
        .map(|(name, value)| format!("{name:10}  {value}\n"))
        .collect();
    let rules: Vec<Vec<String>> = e
        .dns_rules
        .iter()
        .map(|rule| {
            vec![
                format!("{}/{}", rule.port, rule.protocol),
                rule.selector.clone(),
                rule.servers
                    .as_ref()
                    .map_or_else(|| "any".to_owned(), |ids| list(ids)),
                rule.names
                    .as_ref()
                    .map_or_else(|| "any".to_owned(), |names| list(names)),
            ]
        })
        .collect();
    if !rules.is_empty() {
        text.push('\n');
        text.push_str(&render(&["DNS", "SERVERS", "IDENTITIES", "NAMES"], &rules));
    }
    text
}

/// The text of `policy get`.
pub(crate) fn policies(policies: &Policies) -> String {
    let rows: Vec<Vec<String>> = policies
        .policies
        .iter()
        .map(|p| vec![p.key.clone(), p.source.clone(), list(&p.endpoints)])
        .collect();
    let mut text = render(&["POLICY", "SOURCE", "ENDPOINTS"], &rows);
    for policy in &policies.policies {
        for warning in &policy.warnings {
            text.push_str(&format!("warning: {}: {warning}\n", policy.key));
        }
    }
    for refused in &policies.rejected {
        let key = refused.key.as_deref().unwrap_or("unnamed");
        text.push_str(&format!(
            "refused: {} ({key}): {}\n",
            refused.source, refused.reason
        ));
    }
    text
}

/// The table of `identity list`.
pub(crate) fn identities(identities: &[IdentityView]) -> String {
    let rows: Vec<Vec<String>> = identities
        .iter()
        .map(|i| vec![i.id.to_string(), i.references.to_string(), list(&i.labels)])
        .collect();
    render(&["IDENTITY", "REFERENCES", "LABELS"], &rows)
}

/// The table of `ip list`.
pub(crate) fn prefixes(prefixes: &[IpcacheView]) -> String {
    let rows: Vec<Vec<String>> = prefixes
        .iter()
        .map(|p| {
            let realised = match p.realised {
                Some(id) if id == p.identity => "yes".to_owned(),
                Some(id) => format!("has {id}"),
                None => "no".to_owned(),
            };
            vec![
                p.prefix.clone(),
                p.identity.to_string(),
                realised,
                list(&p.owners),
            ]
        })
        .collect();
    render(&["PREFIX", "IDENTITY", "REALISED", "OWNERS"], &rows)
}

/// The table of `selectors list` and `fqdn names`.
pub(crate) fn selectors(selectors: &[SelectorView]) -> String {
    let rows: Vec<Vec<String>> = selectors
        .iter()
        .map(|s| {
            vec![
                s.selector.clone(),
                s.kind.clone(),
                s.users.to_string(),
                list(&s.identities),
            ]
        })
        .collect();
    render(&["SELECTOR", "KIND", "USERS", "IDENTITIES"], &rows)
}

/// The table of `fqdn cache list`.
pub(crate) fn names(names: &[NameView]) -> String {
    let now = BootTime::now().nanos();
    let left = |at: u64| match at {
        0 => "-".to_owned(),
        at if at <= now => "over".to_owned(),
        at => format!("{} s", (at - now) / 1_000_000_000),
    };
    let rows: Vec<Vec<String>> = names
        .iter()
        .map(|n| {
            vec![
                n.endpoint.to_string(),
                n.name.clone(),
                n.address.clone(),
                n.source.clone(),
                n.ttl.to_string(),
                left(n.expires_at),
                left(n.lease_end),
            ]
        })
        .collect();
    render(
        &[
            "ENDPOINT", "NAME", "ADDRESS", "SOURCE", "TTL", "EXPIRES", "LEASE",
        ],
        &rows,
    )
}

#[cfg(test)]
mod tests;
