//! What the agent answers, as tables.

use std::io::Write as _;

use agent_cluster::health::ClusterView;
use agent_core::core::snapshot::{
    Counters, EndpointView, FirewallSummary, IdentityView, IpcacheView, LimitView, NameView,
    Reconciled, SelectorView, Summary,
};
use agent_datapath::{quota::QuotaView, upkeep::RepairsView};
use anyhow::Result;
use dns_policy::boot_time::BootTime;
use holdfast_agent::{
    admin::model::{Policies, Status},
    config::args::Output,
    endpoint::source::taken_in::StartedOpen,
    proxies::ProxyView,
};
use serde::Serialize;

use super::{
    resolver,
    table::{list, maybe, render},
};

/// DNS servers that a line of `status` lists.
const SERVERS: usize = 4;
/// Pods that a line of `status` lists.
const PODS: usize = 10;

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

/// `status`
pub(crate) fn status(status: &Status, verbose: bool) -> String {
    let mut rows = state_rows(status);
    let problems = status.problems.iter();
    rows.extend(problems.map(|problem| ("PROBLEM", problem.clone())));
    rows.extend(started_open(&status.started_open));
    rows.extend(status.kernel.rows());
    let warnings = status.warnings.iter();
    rows.extend(warnings.map(|warning| ("WARNING", warning.clone())));
    let mut text = aligned(&rows);
    if !status.proxies.is_empty() {
        text.push('\n');
        text.push_str(&proxy_table(&status.proxies));
    }
    if !status.quotas.is_empty() {
        text.push('\n');
        text.push_str(&quota_table(&status.quotas));
    }
    if verbose {
        text.push('\n');
        text.push_str(&limit_table(&status.limits));
    }
    text
}

fn state_rows(status: &Status) -> Vec<(&'static str, String)> {
    let summary = &status.summary;
    let counters = &summary.counters;
    let ready = if status.ready {
        "yes"
    } else {
        "no: sources are not synced yet"
    };
    let repaired = reconciler(&counters.reconciled, &status.repairs);
    let mut rows = vec![
        ("Agent", process(status)),
        ("Ready", ready.to_owned()),
        ("Endpoints", endpoint_counts(summary)),
        ("Policies", policy_counts(summary)),
    ];
    rows.extend(cluster_counts(summary).map(|counts| ("Objects", counts)));
    rows.extend(firewalls(&summary.firewalls).map(|counts| ("Egress firewalls", counts)));
    rows.extend(
        status
            .resolver
            .as_ref()
            .map(|view| ("Resolver", resolver::state(view))),
    );
    rows.extend([
        ("Identities", identity_counts(summary)),
        ("Ipcache", ipcache_use(summary)),
        ("Names", name_counts(summary)),
        ("Mappings", mapping_counts(counters)),
        ("Datapath", datapath_steps(summary)),
        ("Programs", status.kernel.line()),
        ("Reconciler", repaired),
        ("Built-in DNS proxy", status.builtin_dns_proxy.clone()),
    ]);
    if let Some(cluster) = &status.cluster {
        rows.push(("Cluster", cluster_source(cluster)));
    }
    rows
}

/// Pods that ran before they were under policy; `-o json` lists all.
fn started_open(pods: &[StartedOpen]) -> Option<(&'static str, String)> {
    let first = pods.iter().take(PODS).map(|pod| match &pod.until {
        Some(until) => format!("{} (until {until})", pod.pod),
        None => pod.pod.clone(),
    });
    let first: Vec<String> = first.collect();
    let more = match pods.len() - first.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let text = format!(
        "{}: {}{more}; no policy judged their first packets. Delete a pod to start it under policy",
        pods.len(),
        first.join(", ")
    );
    (!pods.is_empty()).then_some(("Started open", text))
}

/// The API server, and how many objects there are of each kind.
fn cluster_source(cluster: &ClusterView) -> String {
    let counts = cluster.watches.iter().map(|watch| match &watch.reason {
        None => format!("{} {}", watch.objects, watch.kind),
        Some(_) => format!(
            "{} {} (stale for {} s)",
            watch.objects, watch.kind, watch.stale_seconds
        ),
    });
    let counts: Vec<String> = counts.collect();
    let relay = cluster.relay.as_ref();
    let relay = relay.map_or_else(String::new, |relay| format!(" by relay {relay}"));
    format!("{}{relay}: {}", cluster.server, counts.join(", "))
}

/// None without objects of a cluster.
fn cluster_counts(summary: &Summary) -> Option<String> {
    let Summary {
        pods,
        namespaces,
        services,
        network_policies,
        ..
    } = summary;
    (pods + namespaces + services + network_policies > 0).then(|| {
        format!(
            "{pods} pods, {namespaces} namespaces, {services} Services, {network_policies} \
             NetworkPolicies"
        )
    })
}

/// None without EgressFirewalls.
fn firewalls(summary: &FirewallSummary) -> Option<String> {
    let FirewallSummary {
        firewalls,
        rules,
        names,
        addresses,
        trusted_dns,
        ..
    } = summary;
    if *firewalls == 0 {
        return None;
    }
    let dns = match trusted_dns.as_slice() {
        [] => "none".to_owned(),
        all if all.len() <= SERVERS => all.join(", "),
        all => {
            let first = all.get(..SERVERS).unwrap_or_default().join(", ");
            format!("{first} and {} more", all.len() - SERVERS)
        }
    };
    Some(format!(
        "{firewalls} ({rules} rules), {names} names with {addresses} addresses, trusted DNS {dns}"
    ))
}

/// A line for each row, the values below each other.
fn aligned(rows: &[(&str, String)]) -> String {
    let width = rows.iter().map(|(name, _)| name.len()).max();
    let width = width.unwrap_or_default();
    rows.iter()
        .map(|(name, value)| format!("{name:width$}  {value}\n"))
        .collect()
}

fn process(status: &Status) -> String {
    format!(
        "version {}, pid {}, start {} since boot",
        status.version, status.pid, status.epoch.start
    )
}

fn policy_counts(summary: &Summary) -> String {
    format!(
        "{} in force, {} refused; revision {}",
        summary.policies, summary.policies_rejected, summary.revision
    )
}

fn identity_counts(summary: &Summary) -> String {
    format!(
        "{} of endpoints, {} local, {} of them of names, {} in combination{}",
        summary.endpoint_identities,
        summary.local_identities,
        summary.fqdn_identities,
        summary.fqdn_combinations,
        summary
            .fqdn_identities_max
            .map(|max| format!(" (limit {max})"))
            .unwrap_or_default()
    )
}

fn ipcache_use(summary: &Summary) -> String {
    format!(
        "{} of {} entries",
        summary.ipcache_entries, summary.ipcache_max
    )
}

fn name_counts(summary: &Summary) -> String {
    format!(
        "{} addresses live, {} kept for connections; {} selectors",
        summary.names_live, summary.names_zombies, summary.selectors
    )
}

fn mapping_counts(counters: &Counters) -> String {
    format!(
        "{} realised, {} not; refused: {} unknown endpoint, {} not allowed, {} invalid, {} too many",
        counters.mappings_realised,
        counters.mappings_not_realised,
        counters.mappings_endpoint_unknown,
        counters.mappings_not_allowed,
        counters.mappings_invalid,
        counters.mappings_rate_limited,
    )
}

fn datapath_steps(summary: &Summary) -> String {
    let counters = &summary.counters;
    format!(
        "{} failed steps so far, {} waiting to be tried again",
        counters.step_failures, summary.pending_steps
    )
}

fn proxy_table(proxies: &[ProxyView]) -> String {
    let rows: Vec<_> = proxies
        .iter()
        .map(|proxy| {
            vec![
                proxy.instance.clone(),
                proxy.kind.clone(),
                maybe(proxy.pid.as_ref()),
                proxy.sent_revision.to_string(),
                proxy.acked_revision.to_string(),
                proxy.waiting.to_string(),
            ]
        })
        .collect();
    render(
        &["PROXY", "STREAM", "PID", "SENT", "ACKED", "WAITING"],
        &rows,
    )
}

fn quota_table(quotas: &[QuotaView]) -> String {
    let rows: Vec<_> = quotas
        .iter()
        .map(|quota| {
            vec![
                quota.endpoint.to_string(),
                quota.quota.clone(),
                quota.beyond.to_string(),
                quota.key.clone(),
            ]
        })
        .collect();
    render(&["ENDPOINT", "QUOTA REACHED", "BEYOND IT", "KEY"], &rows)
}

fn limit_table(limits: &[LimitView]) -> String {
    let rows: Vec<_> = limits
        .iter()
        .map(|limit| {
            vec![
                limit.what.clone(),
                limit.used.to_string(),
                maybe(limit.most.as_ref()),
            ]
        })
        .collect();
    render(&["LIMIT", "IN USE", "MOST"], &rows)
}

fn endpoint_counts(summary: &Summary) -> String {
    if summary.endpoints_unrestricted == 0 {
        return summary.endpoints.to_string();
    }
    let more = if summary.unrestricted.len() < summary.endpoints_unrestricted {
        ", …"
    } else {
        ""
    };
    format!(
        "{}, {} unrestricted ({}{more}); `endpoint get` says why",
        summary.endpoints,
        summary.endpoints_unrestricted,
        summary.unrestricted.join(", ")
    )
}

fn reconciler(found: &Reconciled, repairs: &[RepairsView]) -> String {
    let repaired: u64 = repairs.iter().map(|part| part.repairs).sum();
    let differences = if found.differences() + repaired == 0 {
        "nothing to repair".to_owned()
    } else {
        let parts = repairs.iter().filter(|part| part.repairs > 0);
        let parts: String = parts
            .map(|part| format!(", {} {}", part.repairs, part.part))
            .collect();
        format!(
            "repaired: {} ipcache, {} policy, {} endpoint entries, {} names, {} programs{parts}",
            found.ipcache, found.policy, found.lxc, found.names, found.programs
        )
    };
    let failures = match found.failures {
        0 => String::new(),
        1 => "; 1 comparison failed".to_owned(),
        failures => format!("; {failures} comparisons failed"),
    };
    let runs = if found.passes == 1 { "run" } else { "runs" };
    format!("{} {runs}, {differences}{failures}", found.passes)
}

/// A number with its noun: "1 file", "2 files".
pub(super) fn counted(number: usize, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}

/// `endpoint list`
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

/// `endpoint get`, `endpoint add`
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

/// `policy get`
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

/// `identity list`
pub(crate) fn identities(identities: &[IdentityView]) -> String {
    let rows: Vec<Vec<String>> = identities
        .iter()
        .map(|i| vec![i.id.to_string(), i.references.to_string(), list(&i.labels)])
        .collect();
    render(&["IDENTITY", "REFERENCES", "LABELS"], &rows)
}

/// `ip list`
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

/// `selectors list`, `fqdn names`
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

/// `fqdn cache list`
pub(crate) fn names(names: &[NameView]) -> String {
    let now = BootTime::now().0;
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
