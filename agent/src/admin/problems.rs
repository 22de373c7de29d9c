//! Problems that `status` lists, one function for each.

use std::{collections::BTreeSet, path::Path, time::Duration};

use agent_cluster::health::ClusterView;
use agent_core::{
    core::snapshot::Summary, first_of::first_of, kubernetes::unattended::LEFT,
    name_objects::MAX_OBJECTS,
};
use agent_datapath::tunnel::TunnelView;
use daemon::lookup::Lookup;
use shared_maps::EndpointId;

use crate::{
    endpoint::source::taken_in::Unmanaged, identities::view::IdentitiesView, proxies::ProxyView,
};

/// For how long after the agent's start a missing proxy is no problem, because it may still connect.
const PROXIES_CONNECT: Duration = Duration::from_secs(10);
/// Maximum number of nodes that a problem lists.
const NODES: usize = 10;

/// Policy documents that are refused.
pub(super) fn policies_refused(summary: &Summary) -> Option<String> {
    let refused = summary.policies_rejected;
    (refused > 0).then(|| format!("policy documents refused: {refused}; see `policy get`"))
}

/// Reports in the cluster that cannot be written.
pub(crate) fn not_reported(cluster: &ClusterView) -> Option<String> {
    cluster.report_problem.clone()
}

/// Objects of the cluster's label sets that cannot be made or deleted.
pub(super) fn identities(identities: &IdentitiesView) -> impl Iterator<Item = String> + use<> {
    let waits = identities.lacking.as_ref().map_or(String::new(), |labels| {
        format!(" ({labels} and others have numbers of this node)")
    });
    let made = identities.problem.iter();
    let made = made.map(|reason| format!("CiliumIdentities are not made{waits}: {reason}"));
    let led = identities.lead_problem.iter();
    let led = led
        .map(|reason| format!("unused CiliumIdentities are not deleted by this agent: {reason}"));
    let limited = identities.limited.iter().map(|namespace| {
        format!(
            "label sets of namespace {namespace} change so often that their CiliumIdentities wait: 100 at once, and one \
             more in each second; their pods have numbers of this node meanwhile"
        )
    });
    let vanished = Some(identities.vanished).filter(|vanished| *vanished > 0);
    let vanished = vanished.map(|vanished| {
        format!(
            "{vanished} CiliumIdentities were deleted although pods have their labels, and this agent made them again: \
             find the program that deletes them, for example a Cilium operator"
        )
    });
    let all: Vec<String> = made.chain(led).chain(limited).chain(vanished).collect();
    all.into_iter()
}

/// Problems of the tunnel: its programs or device are not as they should be, the blocks outside of
/// the cluster are unknown or not all in use, or other nodes do not unwrap packets.
pub(super) fn tunnel(tunnel: &TunnelView) -> impl Iterator<Item = String> + use<> {
    let fault = tunnel.fault.iter();
    let fault = fault.map(|fault| format!("the tunnel between nodes: {fault}"));
    let world = tunnel.world_problem.iter().cloned();
    let behind = Some(&tunnel.behind).filter(|behind| !behind.is_empty() && tunnel.wraps);
    let behind = behind.map(|behind| {
        format!(
            "{} of the cluster's nodes do not unwrap packets, and pods there get none from this node: {}; start their \
             agents with --high-scale-ipcache=decap-only",
            behind.len(),
            first_of(behind, NODES)
        )
    });
    let all: Vec<String> = fault.chain(world).chain(behind).collect();
    all.into_iter()
}

/// A `netpol run` runs in the same network namespace.
pub(super) fn beside_netpol(runs: bool) -> Option<String> {
    runs.then(|| {
        "`holdfast-agent netpol run` runs on this node too: packets pass the programs and its nftables table, and \
         both have to allow them; stop it, and this agent deletes the table once each pod of the node is an \
         endpoint"
            .to_owned()
    })
}

/// The startup taint of this node cannot be removed.
pub(crate) fn tainted(cluster: &ClusterView) -> Option<String> {
    cluster.startup_taint.clone()
}

/// Nodes that enforce policy, although no agent runs there.
pub(super) fn without_agent(cluster: &ClusterView) -> Option<String> {
    let nodes = &cluster.nodes_without_agent;
    (!nodes.is_empty()).then(|| {
        format!(
            "no agent runs on {}: policy in force stays there, nothing changes, and no new pod \
             starts. Start an agent there (agent.nodeSelector, agent.tolerations of the chart), or take \
             the node out with `holdfast-agent cleanup` and then `kubectl label ciliumnode NODE {LEFT}=true`",
            first_of(nodes.iter().map(|one| &one.node), NODES)
        )
    })
}

/// Watches that do not follow their source, and an object about this node that is not written.
pub(crate) fn cluster_source(cluster: &ClusterView) -> impl Iterator<Item = String> {
    let own_node = cluster.own_node.iter().map(|reason| {
        format!(
            "the CiliumNode of this node cannot be written, so that other nodes may take its \
             addresses for the world: {reason}"
        )
    });
    let labels = cluster.node_labels.iter().map(|reason| {
        format!(
            "the labels of this Node are not copied to its CiliumNode at once, so that rules with a \
             nodeSelector judge this node by its former labels: {reason}"
        )
    });
    let stored = cluster.stored_problem.iter().cloned();
    let certificates = cluster.relay_certificates.iter().map(|reason| {
        format!(
            "the files of the certificates for relays cannot be used, and those that were read last \
             are in use: {reason}"
        )
    });
    let stale = stale_watches(cluster);
    stale
        .chain(own_node)
        .chain(labels)
        .chain(stored)
        .chain(certificates)
}

/// What holds for the objects of a watch that does not follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meanwhile {
    /// The objects that the watch gave stay in force.
    Listed,
    /// The objects of the last run stay in force.
    LastRun,
    /// The objects of the stored list count.
    Stored,
}

/// Watches with one fault in common.
struct Stale<'a> {
    meanwhile: Meanwhile,
    reason: &'a str,
    kinds: Vec<&'a str>,
    /// For how many seconds the first of them has been stale.
    seconds: u64,
    /// Age of the stored list, in seconds.
    stored_seconds: u64,
}

/// A fault that several watches have is one problem.
fn stale_watches(cluster: &ClusterView) -> impl Iterator<Item = String> {
    let mut all: Vec<Stale<'_>> = Vec::new();
    for watch in &cluster.watches {
        let Some(reason) = watch.reason.as_deref() else {
            continue;
        };
        let meanwhile = match (watch.has_listed, watch.stored_seconds) {
            (true, _) => Meanwhile::Listed,
            (false, None) => Meanwhile::LastRun,
            (false, Some(_)) => Meanwhile::Stored,
        };
        let known = all
            .iter_mut()
            .find(|stale| stale.meanwhile == meanwhile && stale.reason == reason);
        let stored_seconds = watch.stored_seconds.unwrap_or_default();
        match known {
            Some(stale) => {
                stale.kinds.push(&watch.kind);
                stale.seconds = stale.seconds.max(watch.stale_seconds);
                stale.stored_seconds = stale.stored_seconds.max(stored_seconds);
            }
            None => all.push(Stale {
                meanwhile,
                reason,
                kinds: vec![&watch.kind],
                seconds: watch.stale_seconds,
                stored_seconds,
            }),
        }
    }
    let of = match cluster.relays.as_slice() {
        [] => format!("at {}", cluster.server),
        relays => format!("through the relays {}", relays.join(", ")),
    };
    let lines = all.into_iter().map(|stale| stale.line(&of));
    lines.collect::<Vec<_>>().into_iter()
}

impl Stale<'_> {
    fn line(&self, of: &str) -> String {
        let (watches, follow) = match self.kinds.as_slice() {
            [_] => ("watch", "does not follow"),
            _ => ("watches", "do not follow"),
        };
        let effect = match self.meanwhile {
            Meanwhile::Listed => "what was read before stays in force".to_owned(),
            Meanwhile::LastRun => {
                "until the objects have been read, the policy of the last run stays in force"
                    .to_owned()
            }
            Meanwhile::Stored => format!(
                "until the objects have been read, the stored list of {} s ago is used, and a pod \
                 that this list does not have cannot start",
                self.stored_seconds
            ),
        };
        format!(
            "{watches} of {} {of} {follow} for {} s; {effect}: {}",
            self.kinds.join(", "),
            self.seconds,
            self.reason
        )
    }
}

/// Existing interfaces of pods for which the state directory has no files.
pub(super) fn left_behind(
    left: &[(EndpointId, u32)],
    name: impl Fn(u32) -> Lookup<String>,
) -> Vec<String> {
    let named = left.iter().filter_map(|(id, ifindex)| {
        let name = match name(*ifindex) {
            Lookup::Found(name) => name,
            Lookup::Gone => return None,
            Lookup::Unknown(_) => format!("number {ifindex}"),
        };
        Some(format!(
            "nothing passes interface {name}: it has the programs of endpoint {id} of an earlier run, of \
             which --state-dir has no file; add the pod's endpoint again (`endpoint add`, or its document \
             in --endpoint-dir), or start the pod again"
        ))
    });
    named.collect()
}

/// A pod of this node that is not under policy.
pub(super) fn not_under_policy(unmanaged: &Unmanaged) -> String {
    format!("not under policy: {}: {}", unmanaged.pod, unmanaged.reason)
}

/// Changes that the datapath did not accept.
pub(super) fn steps_pending(summary: &Summary) -> Option<String> {
    let pending = summary.pending_steps;
    let why = summary.trouble.as_deref().unwrap_or("see the log");
    (pending > 0).then(|| format!("{pending} changes could not be made and are tried again: {why}"))
}

/// Whether a proxy tells the agent what it learns.
pub(super) fn learning(proxies: &[ProxyView]) -> bool {
    proxies.iter().any(|proxy| match proxy.kind.as_str() {
        "mappings" | "builtin" => true,
        // The service's own entry is there without any client.
        "fqdndata" => proxy.acked_revision > 0,
        _ => false,
    })
}

/// No proxy tells the agent what it learns, although there was time to connect.
pub(super) fn nothing_learned(proxies: &[ProxyView], uptime: Duration) -> Option<String> {
    if uptime < PROXIES_CONNECT {
        return None;
    }
    let text = "no DNS proxy is connected, and the built-in one is off: queries of restricted endpoints get no \
                answer, or that of a proxy that is not connected, and no address opens. Start holdfast-sdp \
                (its `status` shows why it is not connected), or this agent without \
                --disable-builtin-dns-proxy";
    (!learning(proxies)).then(|| text.to_owned())
}

/// Proxies that use another state directory than this agent.
pub(super) fn other_state_dirs(proxies: &[ProxyView], own: &Path) -> Vec<String> {
    let others = proxies.iter().filter_map(|proxy| {
        let its = proxy.other_state_dir.as_ref()?;
        Some(format!(
            "proxy {} has --state-dir {its}, which is not the directory of this agent, --state-dir {}: a \
             proxy that starts without the agent has no rules; give both the same --state-dir",
            proxy.instance,
            own.display()
        ))
    });
    let others: BTreeSet<String> = others.collect();
    others.into_iter().collect()
}

/// The ipcache is at 90 % or more.
pub(super) fn ipcache_full(summary: &Summary) -> Option<String> {
    if summary.ipcache_max == 0 || summary.ipcache_entries * 10 < summary.ipcache_max * 9 {
        return None;
    }
    let how = if summary.ipcache_entries < summary.ipcache_max {
        "nearly full"
    } else {
        "full, and further addresses stay closed"
    };
    Some(format!(
        "ipcache is {how}: {} of {} entries (--bpf-ipcache-map-max)",
        summary.ipcache_entries, summary.ipcache_max
    ))
}

/// The circuit breaker limits identities of names.
pub(super) fn names_limited(summary: &Summary) -> Option<String> {
    if summary.addresses_limited == 0 {
        return None;
    }
    Some(format!(
        "circuit breaker: {} addresses have the identity of some of their names only, as \
         {} combinations of names have an identity (--tofqdns-max-identities {}); use fewer \
         overlapping names in policy, or raise the limit",
        summary.addresses_limited,
        summary.fqdn_combinations,
        summary.fqdn_identities_max.unwrap_or_default(),
    ))
}

/// No DNS server is trusted for names of EgressFirewalls.
pub(super) fn names_closed(summary: &Summary) -> Option<String> {
    let firewalls = &summary.firewalls;
    if firewalls.names == 0 || !firewalls.trusted_dns.is_empty() {
        return None;
    }
    Some(
        "names of EgressFirewalls stay closed, because no DNS server is trusted: give --dns-server, \
         or --dns-service and the Service and EndpointSlice of that name"
            .to_owned(),
    )
}

/// No DNS server is trusted for names of `toFQDNs`, and only trusted ones count.
pub(super) fn to_fqdns_closed(summary: &Summary) -> Option<String> {
    let is_used = summary.only_trusted_names && summary.fqdn_selectors > 0;
    if !is_used || !summary.firewalls.trusted_dns.is_empty() {
        return None;
    }
    Some(
        "names of toFQDNs stay closed, because only answers of trusted DNS servers count \
         (--tofqdns-servers=trusted) and none is trusted: give --dns-server, or --dns-service and the \
         Service and EndpointSlice of that name, or --tofqdns-servers=any"
            .to_owned(),
    )
}

/// EgressFirewalls cannot tell pods of other nodes from the outside.
pub(super) fn pods_outside(summary: &Summary) -> Option<String> {
    summary.firewalls.takes_pods_for_outside.then(|| {
        "EgressFirewalls treat pods of other nodes as outside: give --pod-cidr, Node or Pod \
         documents"
            .to_owned()
    })
}

/// There are more DNSNameResolver objects than the agent reads.
pub(super) fn objects_left_out(summary: &Summary) -> Option<String> {
    let left_out = summary.firewalls.objects_left_out;
    (left_out > 0).then(|| {
        format!(
            "{left_out} DNSNameResolver objects are not read, because there are more than \
             {MAX_OBJECTS}: their names open when a pod asks for them; use wildcards in the rules, or \
             remove objects that no EgressFirewall needs. After that, an object that was not read is \
             read when it changes next"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use agent_cluster::health::WatchHealth;
    use agent_core::core::snapshot::FirewallSummary;

    fn watch(kind: &str, has_listed: bool, seconds: u64, reason: Option<&str>) -> WatchHealth {
        WatchHealth {
            kind: kind.to_owned(),
            has_listed,
            stale_seconds: seconds,
            reason: reason.map(str::to_owned),
            ..WatchHealth::default()
        }
    }

    #[test]
    fn names_without_a_trusted_server_are_a_problem_with_a_remedy() {
        let of = |names: usize, trusted: &[&str], outside: bool| Summary {
            firewalls: FirewallSummary {
                names,
                trusted_dns: trusted.iter().map(ToString::to_string).collect(),
                takes_pods_for_outside: outside,
                ..FirewallSummary::default()
            },
            ..Summary::default()
        };
        let problem = names_closed(&of(1, &[], false)).unwrap();
        assert!(problem.contains("give --dns-server, or"), "{problem}");
        assert_eq!(names_closed(&of(1, &["10.96.0.10:53"], false)), None);
        assert_eq!(names_closed(&of(0, &[], false)), None);
        assert!(
            pods_outside(&of(0, &[], true))
                .unwrap()
                .contains("--pod-cidr")
        );
        assert_eq!(pods_outside(&of(0, &[], false)), None);
    }

    #[test]
    fn to_fqdns_without_a_trusted_server_are_a_problem_with_a_remedy() {
        let of = |only_trusted_names: bool, fqdn_selectors: usize, trusted: &[&str]| Summary {
            firewalls: FirewallSummary {
                trusted_dns: trusted.iter().map(ToString::to_string).collect(),
                ..FirewallSummary::default()
            },
            fqdn_selectors,
            only_trusted_names,
            ..Summary::default()
        };
        let problem = to_fqdns_closed(&of(true, 1, &[])).unwrap();
        for says in ["give --dns-server, or", "--tofqdns-servers=any"] {
            assert!(problem.contains(says), "{problem}");
        }
        assert_eq!(to_fqdns_closed(&of(false, 1, &[])), None);
        assert_eq!(to_fqdns_closed(&of(true, 0, &[])), None);
        assert_eq!(to_fqdns_closed(&of(true, 1, &["10.96.0.10:53"])), None);
    }

    #[test]
    fn objects_that_are_not_read_are_a_problem_with_a_remedy() {
        let of = |left_out: usize| {
            objects_left_out(&Summary {
                firewalls: FirewallSummary {
                    objects_left_out: left_out,
                    ..FirewallSummary::default()
                },
                ..Summary::default()
            })
        };
        assert_eq!(of(0), None);
        let problem = of(3).unwrap();
        for says in ["3 DNSNameResolver objects", "10000", "use wildcards"] {
            assert!(problem.contains(says), "{problem}");
        }
    }

    #[test]
    fn a_fault_that_several_watches_have_is_one_problem_that_names_their_kinds() {
        let refused = Some("connection refused");
        let cluster = ClusterView {
            server: "https://192.0.2.1:6443".to_owned(),
            watches: vec![
                watch("Namespace", true, 7, refused),
                watch("Pod", true, 9, refused),
                watch("Service", true, 0, None),
                watch("CiliumNode", true, 3, Some("403: forbidden")),
                watch("ServiceCIDR", false, 9, refused),
            ],
            ..ClusterView::default()
        };
        let problems: Vec<String> = cluster_source(&cluster).collect();
        let at = "at https://192.0.2.1:6443";
        let stays = "what was read before stays in force";
        assert_eq!(
            problems,
            [
                format!(
                    "watches of Namespace, Pod {at} do not follow for 9 s; {stays}: \
                     connection refused"
                ),
                format!(
                    "watch of CiliumNode {at} does not follow for 3 s; {stays}: 403: forbidden"
                ),
                format!(
                    "watch of ServiceCIDR {at} does not follow for 9 s; until the objects have been \
                     read, the policy of the last run stays in force: connection refused"
                ),
            ]
        );
    }

    #[test]
    fn an_agent_with_relays_names_them_and_not_the_api_server() {
        let cluster = ClusterView {
            server: "https://192.0.2.1:6443".to_owned(),
            relays: vec!["relay-0:9971".to_owned(), "relay-1:9971".to_owned()],
            watches: vec![watch("Pod", true, 9, Some("connection refused"))],
            ..ClusterView::default()
        };
        let problems: Vec<String> = cluster_source(&cluster).collect();
        assert_eq!(
            problems,
            [
                "watch of Pod through the relays relay-0:9971, relay-1:9971 does not follow for 9 s; \
                 what was read before stays in force: connection refused"
            ]
        );
    }

    #[test]
    fn a_missing_proxy_is_a_problem_once_it_had_the_time_to_connect() {
        let moment = Duration::from_millis(1);
        assert_eq!(nothing_learned(&[], PROXIES_CONNECT - moment), None);
        let problem = nothing_learned(&[], PROXIES_CONNECT).unwrap();
        assert!(problem.contains("no DNS proxy is connected"), "{problem}");
    }
}
