//! The lines and tables of `status`.

use agent_cluster::health::ClusterView;
use agent_core::{
    core::snapshot::{Counters, FirewallSummary, LimitView, Reconciled, Summary},
    first_of::first_of,
};
use agent_datapath::{quota::QuotaView, tunnel::TunnelView, upkeep::RepairsView};
use daemon::command_line::table::{maybe, table};
use holdfast_agent::{
    admin::model::Status, endpoint::source::taken_in::StartedOpen,
    identities::view::IdentitiesView, proxies::ProxyView,
};

use super::{aligned, owner};
use crate::cli::resolver;

/// Maximum number of DNS servers that a line lists.
const SERVERS: usize = 4;
/// Maximum number of pods that a line lists.
const PODS: usize = 10;

/// The text of `status`. With `verbose` it ends with the table of limits.
pub(crate) fn status(status: &Status, verbose: bool) -> String {
    let mut rows = state_rows(status);
    let problems = status.problems.iter();
    rows.extend(problems.map(|problem| ("PROBLEM", problem.clone())));
    rows.extend(started_open(&status.started_open));
    if !status.awaited.is_empty() {
        let named = first_of(status.awaited.iter(), PODS);
        rows.push(("Not there", format!("{named}; under policy when it comes")));
    }
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
        "no: policies or endpoints are not synced yet"
    };
    let repaired = reconciler(&counters.reconciled, &status.repairs);
    let mut rows = vec![
        ("Agent", process(status)),
        ("Owner", owner::owns(&status.owner)),
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
    rows.extend([("Identities", identity_counts(summary))]);
    rows.extend(
        status
            .identities
            .as_ref()
            .map(|view| ("Numbers", numbers(summary, view))),
    );
    rows.extend([
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
    if let Some(tunnel) = &status.tunnel {
        rows.push(("Tunnel", tunnel_state(tunnel)));
    }
    if let Some(standby) = &status.standby {
        rows.push(("Standby", owner::waits(standby)));
    }
    rows
}

/// The tunnel between nodes.
fn tunnel_state(tunnel: &TunnelView) -> String {
    let blocks = match tunnel.world_blocks {
        Some(count) => format!("{count} blocks outside of the cluster"),
        None => "blocks outside of the cluster are unknown".to_owned(),
    };
    let wraps = match tunnel.wraps {
        true => format!("wraps packets of at most {} bytes", tunnel.inner_mtu),
        false => "wraps nothing".to_owned(),
    };
    let nodes = tunnel.other_nodes.iter();
    let nodes: String = nodes
        .map(|count| format!("; other nodes known: {count}"))
        .collect();
    format!(
        "{}, on {}, UDP port {}; {wraps}; {blocks}{nodes}",
        tunnel.mode,
        tunnel.devices.join(", "),
        tunnel.port
    )
}

/// Numbers of the cluster, and what this agent does for them.
fn numbers(summary: &Summary, view: &IdentitiesView) -> String {
    let counts = summary.cluster_identities.unwrap_or_default();
    let mut text = format!(
        "of the cluster: {} known, {} local",
        counts.known, counts.local
    );
    if counts.waiting > 0 {
        text.push_str(&format!(", {} awaited", counts.waiting));
    }
    if let Some(labels) = view.lacking.as_ref().filter(|_| counts.local > 0) {
        text.push_str(&format!(" ({labels})"));
    }
    if view.leads {
        text.push_str("; this agent deletes unused ones");
    }
    text
}

/// Pods that ran before they were under policy; `-o json` lists all.
fn started_open(pods: &[StartedOpen]) -> Option<(&'static str, String)> {
    let named = pods.iter().map(|pod| match &pod.until {
        Some(until) => format!("{} (until {until})", pod.pod),
        None => pod.pod.clone(),
    });
    let text = format!(
        "{}: {}; no policy judged their first packets. Delete a pod to start it under policy",
        pods.len(),
        first_of(named, PODS)
    );
    (!pods.is_empty()).then_some(("Started open", text))
}

/// The API server, and how many objects there are of each kind.
pub(crate) fn cluster_source(cluster: &ClusterView) -> String {
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

/// `None` without objects of a cluster.
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

/// The value of the line about EgressFirewalls; `None` if there are none.
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
        all => first_of(all, SERVERS),
    };
    Some(format!(
        "{firewalls} ({rules} rules), {names} names with {addresses} addresses, trusted DNS {dns}"
    ))
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
    table(
        proxies,
        [
            ("PROXY", |proxy| proxy.instance.clone()),
            ("STREAM", |proxy| proxy.kind.clone()),
            ("PID", |proxy| maybe(proxy.pid.as_ref())),
            ("SENT", |proxy| proxy.sent_revision.to_string()),
            ("ACKED", |proxy| proxy.acked_revision.to_string()),
            ("WAITING", |proxy| proxy.waiting.to_string()),
        ],
    )
}

fn quota_table(quotas: &[QuotaView]) -> String {
    table(
        quotas,
        [
            ("ENDPOINT", |quota| quota.endpoint.to_string()),
            ("QUOTA REACHED", |quota| quota.quota.clone()),
            ("BEYOND IT", |quota| quota.beyond.to_string()),
            ("KEY", |quota| quota.key.clone()),
        ],
    )
}

fn limit_table(limits: &[LimitView]) -> String {
    table(
        limits,
        [
            ("LIMIT", |limit| limit.what.clone()),
            ("IN USE", |limit| limit.used.to_string()),
            ("MOST", |limit| maybe(limit.most.as_ref())),
        ],
    )
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
