//! Rules at the start and between events: the rules in force, their endpoints, and whether they are enough
//! to answer.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    gate::{self, BoundPorts},
    kept_rules::end_rules_of_lost_endpoints,
    maps::instances::Instances,
    ready::Need,
    restore::{self, Restored},
    shared_state::Shared,
    steering::SteeringStatus,
};

/// How long the first rules may hold up the listeners.
const FIRST_RULES_WITHIN: Duration = Duration::from_secs(1);
/// How often a proxy that could only refuse queries checks whether another proxy has the port.
const PORT_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Puts the rules on disk in force, unless the agent has sent its own.
pub(super) fn restore_rules(shared: &Shared) {
    let mut writing = shared.agent.link.writing_rules();
    if shared.agent.link.has_agent_rules() || !shared.maps.has_lxc() {
        return;
    }
    let mut found = restore::load(&shared.config.state_dir, |ip| shared.maps.lxc_entry(ip));
    let instances = shared.maps.instances().unwrap_or_default();
    prefer_what_was_said(shared, &mut found, &instances);
    // This runs repeatedly while there are no rules; each problem is logged once.
    let news = *shared.skipped_files.lock() != found.skipped;
    for skipped in found.skipped.iter().filter(|_| news) {
        let path = skipped.path.display();
        if skipped.damaged {
            tracing::error!(%path, reason = skipped.reason, "endpoint's file skipped");
        } else {
            tracing::info!(%path, reason = skipped.reason, "endpoint's file skipped");
        }
    }
    let errors = shared.policy.apply(&found.rules, &[]);
    for error in &errors {
        tracing::error!(%error, "a restored rule allows nothing");
    }
    let endpoints = found.rules.iter().map(|of| of.endpoint);
    writing.adopt(endpoints, &instances);
    shared.agent.link.rows_skipped(found.rows.count());
    for odd in found.rows.odd.iter().filter(|_| news) {
        tracing::warn!(odd, "a row of an endpoint's file allows nothing");
    }
    if !found.rules.is_empty() {
        tracing::info!(endpoints = found.rules.len(), "rules restored from disk");
    }
    shared.agent.link.rules_from_disk(found.rules.len());
    *shared.skipped_files.lock() = found.skipped;
}

/// Uses the rules that a Cilium agent sent last, unless a file of the agent is newer.
fn prefer_what_was_said(shared: &Shared, found: &mut Restored, now: &Instances) {
    let (said, until) = match shared.agent.rules_journal.read() {
        Ok(Some(said)) => said,
        Ok(None) => return,
        Err(error) => {
            let path = shared.agent.rules_journal.status().path.unwrap_or_default();
            tracing::error!(path, %error, "cannot use the rules that the agent sent last");
            return;
        }
    };
    let counts = found.prefer(said, until, now);
    if counts.entries.is_empty() {
        return;
    }
    tracing::info!(
        endpoints = counts.entries.len(),
        "using the rules that the agent sent last"
    );
    shared.maps.add_former(counts.prefixes.clone());
    shared.agent.rules_journal.adopt(counts);
}

/// Keeps the agent's rules on disk, on a thread that may wait for the disk.
pub(super) fn keep_rules(shared: &Shared) {
    if let Some(work) = shared.agent.rules_journal.work(Instant::now()) {
        let journal = Arc::clone(&shared.agent.rules_journal);
        tokio::task::spawn_blocking(move || journal.done(&work, work.run()));
    }
}

/// Ends the rules of endpoints that are gone from `cilium_lxc`, or whose numbers other endpoints
/// have there.
pub(super) fn end_lost_rules(shared: &Shared) {
    let mut writing = shared.agent.link.writing_rules();
    if end_rules_of_lost_endpoints(&mut writing, &shared.maps, &shared.policy) > 0 {
        shared.agent.link.rules_kept(writing.unconfirmed());
    }
}

/// Waits for rules, [`FIRST_RULES_WITHIN`] at most: from the moment its sockets are bound, this
/// process gets queries that another proxy could have answered.
pub(super) async fn first_rules(shared: &Shared) {
    let there = async {
        while shared.ready.is_missing(Need::Rules) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::select! {
        _ = tokio::time::timeout(FIRST_RULES_WITHIN, there) => {}
        () = shared.drain.leaving() => {}
    }
}

/// Waits while this process could only refuse queries and another proxy has the port. Once our
/// sockets are bound, the kernel's hash gives them a share of the queries.
pub(super) async fn others_first(shared: &Shared, mut ports: BoundPorts) {
    let waits = async {
        loop {
            note_gate(shared);
            let Some(why) = shared.gate.closed() else {
                return;
            };
            // An unreadable entry is not a proxy to wait for.
            if !ports
                .has(shared.config.flags.tofqdns_proxy_port)
                .unwrap_or(false)
            {
                return;
            }
            let text = format!("another proxy of the port answers until this one can: {why}");
            *shared.steering.lock() = SteeringStatus::Waiting(why.to_string());
            shared.ready.block(Need::Listeners, text);
            tokio::time::sleep(PORT_POLL_INTERVAL).await;
        }
    };
    tokio::select! {
        () = waits => {}
        () = shared.drain.leaving() => {}
    }
}

/// Notes whether queries can be answered.
pub(super) fn note_gate(shared: &Shared) {
    let with_rules = shared.policy.load().len();
    let sent = shared.agent.link.sent_rules();
    let can = gate::can_answer(shared.maps.problem(), with_rules, sent, Instant::now());
    shared.gate.set(can);
}
