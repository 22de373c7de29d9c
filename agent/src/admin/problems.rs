//! Problems that `status` lists, one function for each.

use crate::{
    core::snapshot::Summary, endpoint::source::taken_in::Unmanaged, kubernetes::health::ClusterView,
};

/// Policy documents that are refused.
pub(super) fn policies_refused(summary: &Summary) -> Option<String> {
    if summary.policies_rejected == 0 {
        return None;
    }
    Some(format!(
        "{} policy documents are refused: see `policy get`",
        summary.policies_rejected
    ))
}

/// Reports in the cluster that cannot be written.
pub(super) fn not_reported(cluster: &ClusterView) -> Option<String> {
    cluster.report_problem.clone()
}

/// Watches that do not follow the API server, and an object about this node that is not written.
pub(super) fn cluster_source(cluster: &ClusterView) -> impl Iterator<Item = String> {
    let own_node = cluster.own_node.iter().map(|reason| {
        format!(
            "the CiliumNode of this node cannot be written, so that other nodes may take its \
             addresses for the world: {reason}"
        )
    });
    let stale = cluster.watches.iter().filter_map(|watch| {
        let reason = watch.reason.as_ref()?;
        let effect = match (watch.has_listed, watch.stored_seconds) {
            (true, _) => "what was read before stays in force".to_owned(),
            (false, None) => {
                "until it has been read, the policy of the last run stays in force".to_owned()
            }
            (false, Some(age)) => format!(
                "until it has been read, the stored list of {age} s ago stands in, and a pod that \
                 this list does not have cannot start"
            ),
        };
        Some(format!(
            "watch of {} at {} does not follow for {} s; {effect}: {reason}",
            watch.kind, cluster.server, watch.stale_seconds
        ))
    });
    let stored = cluster.stored_problem.iter();
    let stored = stored.map(|why| format!("the stored list of the cluster is not used: {why}"));
    let certificates = cluster.relay_certificates.iter().map(|reason| {
        format!(
            "the files of the certificates for relays cannot be used, and those that were read last \
             are in use: {reason}"
        )
    });
    stale.chain(own_node).chain(stored).chain(certificates)
}

/// A pod of this node that is open.
pub(super) fn not_under_policy(unmanaged: &Unmanaged) -> String {
    format!("not under policy: {}: {}", unmanaged.pod, unmanaged.reason)
}

/// Changes that the datapath did not accept.
pub(super) fn steps_pending(summary: &Summary) -> Option<String> {
    if summary.pending_steps == 0 {
        return None;
    }
    let why = summary.trouble.as_deref().unwrap_or("see the log");
    Some(format!(
        "{} changes could not be made and are tried again; what was in force stays: {why}",
        summary.pending_steps
    ))
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
