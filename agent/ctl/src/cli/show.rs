//! What the agent answers, as tables.

mod owner;
mod status;

use agent_core::core::snapshot::{
    DnsRulesView, EndpointView, IdentityView, IpcacheView, NameView, SelectorView,
};
use anyhow::Result;
use daemon::command_line::{
    output::{self, Output},
    table::{list, maybe, table},
    terminal::one_line,
};
use dns_policy::{boot_time::BootTime, wall_time};
use holdfast_agent::admin::model::Policies;
use serde::Serialize;

pub(crate) use self::{
    owner::standby,
    status::{cluster_source, status},
};

/// Prints `value` in the requested format. A reader that closed the pipe is no error.
pub(crate) fn print<T: Serialize + ?Sized>(
    output: Output,
    value: &T,
    table: impl FnOnce(&T) -> String,
) -> Result<()> {
    Ok(output::print(output, value, table)?)
}

/// A number with its noun: "1 file", "2 files".
pub(super) fn counted(number: usize, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}

/// A line for each row, the values below each other. A line feed in a value, for example in a name that
/// a problem quotes, is escaped: it would begin a line that looks like one of ours.
pub(crate) fn aligned(rows: &[(&str, String)]) -> String {
    let width = rows.iter().map(|(name, _)| name.len()).max();
    let width = width.unwrap_or_default();
    rows.iter()
        .map(|(name, value)| format!("{name:width$}  {}\n", one_line(value)))
        .collect()
}

/// The table of `endpoint list`.
pub(crate) fn endpoints(endpoints: &[EndpointView]) -> String {
    table(
        endpoints,
        [
            ("ID", |e| e.id.to_string()),
            ("STATE", |e| e.state.clone()),
            ("IDENTITY", |e| e.identity.to_string()),
            ("IPV4", |e| maybe(e.ipv4.as_ref())),
            ("IPV6", |e| maybe(e.ipv6.as_ref())),
            ("INTERFACE", |e| e.ifname.clone()),
            ("ENFORCED", enforced),
            ("POD/CONTAINER", pod_or_container),
            ("LABELS", |e| list(&e.labels)),
            ("KEY", |e| e.key.clone()),
        ],
    )
}

fn pod_or_container(endpoint: &EndpointView) -> String {
    let is_container = ["podman/", "docker/"]
        .iter()
        .any(|runtime| endpoint.netns.starts_with(runtime));
    maybe(
        endpoint
            .pod
            .as_ref()
            .or(is_container.then_some(&endpoint.netns)),
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

/// Like [`enforced`], with the reason.
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
    if !e.dns_rules.is_empty() {
        text.push('\n');
        text.push_str(&dns_rules(&e.dns_rules));
    }
    text
}

fn dns_rules(rules: &[DnsRulesView]) -> String {
    table(
        rules,
        [
            ("DNS", |rule| format!("{}/{}", rule.port, rule.protocol)),
            ("SERVERS", |rule| rule.selector.clone()),
            ("IDENTITIES", |rule| any_or(rule.servers.as_deref())),
            ("NAMES", |rule| any_or(rule.names.as_deref())),
        ],
    )
}

fn any_or<T: ToString>(items: Option<&[T]>) -> String {
    items.map_or_else(|| "any".to_owned(), list)
}

/// The text of `policy get`.
pub(crate) fn policies(policies: &Policies) -> String {
    let mut text = table(
        &policies.policies,
        [
            ("POLICY", |p| p.key.clone()),
            ("SOURCE", |p| p.source.clone()),
            ("ENDPOINTS", |p| list(&p.endpoints)),
        ],
    );
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
    table(
        identities,
        [
            ("IDENTITY", |i| i.id.to_string()),
            ("REFERENCES", |i| i.references.to_string()),
            ("FROM", |i| i.source.word().to_owned()),
            ("SINCE", |i| match i.since {
                Some(seconds) => wall_time::render(seconds.saturating_mul(1_000_000_000)),
                None => "-".to_owned(),
            }),
            ("LABELS", |i| list(&i.labels)),
        ],
    )
}

/// The table of `ip list`.
pub(crate) fn prefixes(prefixes: &[IpcacheView]) -> String {
    table(
        prefixes,
        [
            ("PREFIX", |p| p.prefix.clone()),
            ("IDENTITY", |p| p.identity.to_string()),
            ("REALISED", |p| match p.realised {
                Some(id) if id == p.identity => "yes".to_owned(),
                Some(id) => format!("has {id}"),
                None => "no".to_owned(),
            }),
            ("OWNERS", |p| list(&p.owners)),
        ],
    )
}

/// The table of `selectors list` and `fqdn names`.
pub(crate) fn selectors(selectors: &[SelectorView]) -> String {
    table(
        selectors,
        [
            ("SELECTOR", |s| s.selector.clone()),
            ("KIND", |s| s.kind.clone()),
            ("USERS", |s| s.users.to_string()),
            ("IDENTITIES", |s| list(&s.identities)),
        ],
    )
}

/// The table of `fqdn cache list`.
pub(crate) fn names(names: &[NameView]) -> String {
    table(
        names,
        [
            ("ENDPOINT", |n| n.endpoint.to_string()),
            ("NAME", |n| n.name.clone()),
            ("ADDRESS", |n| n.address.clone()),
            ("SOURCE", |n| n.source.clone()),
            ("TTL", |n| n.ttl.to_string()),
            ("EXPIRES", |n| left(n.expires_at)),
            ("LEASE", |n| left(n.lease_end)),
        ],
    )
}

fn left(at: u64) -> String {
    let now = BootTime::now().nanos();
    match at {
        0 => "-".to_owned(),
        at if at <= now => "over".to_owned(),
        at => format!("{} s", (at - now) / 1_000_000_000),
    }
}

#[cfg(test)]
mod tests;
