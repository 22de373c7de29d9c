//! Whether a Cilium operator runs in the cluster. A Cilium operator deletes CiliumIdentities that no CiliumEndpoint
//! uses, so objects of agents would vanish while pods use them.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use serde_json::Value;

use super::objects::Store;

/// The operator's Lease, which the operator renews every few seconds.
const LEASE: &str = "cilium-operator-resource-lock";
/// Namespaces where Cilium is installed, besides the agents' namespace.
const NAMESPACES: [&str; 2] = ["kube-system", "cilium"];
/// If a Lease does not change for this long, its operator is gone and left it behind. The agent measures this time by
/// its own clock, and does not read the times in the Lease.
const LEFT: Duration = Duration::from_secs(30);
/// Pause between two looks while an operator runs or may run.
const SOON: Duration = Duration::from_secs(5);
/// Pause between two looks while no operator runs.
const LATER: Duration = Duration::from_mins(1);

/// The operator's Leases, as they were seen.
#[derive(Debug)]
pub(super) struct OperatorSight {
    leases: BTreeMap<String, Seen>,
    next: Option<Instant>,
    verdict: Verdict,
}

#[derive(Debug)]
struct Seen {
    version: String,
    holder: String,
    since: Instant,
    /// Whether the Lease changed while this agent looked.
    was_renewed: bool,
}

/// Whether an operator runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    None,
    /// The operator's Lease exists, but was not renewed yet since this agent saw it first.
    Undecided,
    /// The operator runs: text with its Lease and the holder.
    Runs(String),
}

impl OperatorSight {
    /// The state before the first look.
    pub(super) fn new() -> Self {
        Self {
            leases: BTreeMap::new(),
            next: None,
            verdict: Verdict::None,
        }
    }

    /// Looks for the Leases of operators if a look is due. Gives the latest verdict.
    pub(super) async fn look(&mut self, store: &impl Store) -> Verdict {
        if !self.is_due(store.now()) {
            return self.verdict.clone();
        }
        let own = Some(store.namespace()).filter(|own| !NAMESPACES.contains(own));
        for namespace in NAMESPACES.into_iter().chain(own) {
            match store.lease(namespace, LEASE).await {
                Ok(lease) => self.take(namespace, lease.as_ref(), store.now()),
                Err(error) => {
                    // What was seen before counts. If the API server is at fault, the next request that makes or
                    // deletes an object fails too, and that failure is reported.
                    tracing::debug!(%error, namespace, "cannot look for a Cilium operator");
                }
            }
        }
        self.judge(store.now())
    }

    fn is_due(&self, now: Instant) -> bool {
        self.next.is_none_or(|next| next <= now)
    }

    /// When the next look is due; `None` if there was no look yet.
    pub(super) fn next(&self) -> Option<Instant> {
        self.next
    }

    /// Takes the Lease of one namespace.
    fn take(&mut self, namespace: &str, lease: Option<&Value>, now: Instant) {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let lease = lease.map(|lease| {
            (
                text(&lease["metadata"]["resourceVersion"]),
                text(&lease["spec"]["holderIdentity"]),
            )
        });
        // An operator that ends gives its Lease back.
        let Some((version, holder)) = lease.filter(|(_, holder)| !holder.is_empty()) else {
            self.leases.remove(namespace);
            return;
        };
        match self.leases.get_mut(namespace) {
            Some(seen) if seen.version == version => {}
            known => {
                let was_renewed = known.is_some();
                let seen = Seen {
                    version,
                    holder,
                    since: now,
                    was_renewed,
                };
                self.leases.insert(namespace.to_owned(), seen);
            }
        }
    }

    /// The verdict after a look. Also sets the time of the next look.
    fn judge(&mut self, now: Instant) -> Verdict {
        let alive = self
            .leases
            .iter()
            .filter(|(_, seen)| seen.since + LEFT > now);
        let mut verdict = Verdict::None;
        for (namespace, seen) in alive {
            if seen.was_renewed {
                verdict = Verdict::Runs(format!("Lease {namespace}/{LEASE} of {}", seen.holder));
                break;
            }
            verdict = Verdict::Undecided;
        }
        let pause = match verdict {
            Verdict::None => LATER,
            Verdict::Undecided | Verdict::Runs(_) => SOON,
        };
        self.next = Some(now + pause);
        self.verdict = verdict.clone();
        verdict
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn lease(version: &str, holder: &str) -> Value {
        json!({"metadata": {"resourceVersion": version}, "spec": {"holderIdentity": holder}})
    }

    #[test]
    fn an_operator_runs_if_its_lease_changes_while_the_agent_looks() {
        let start = Instant::now();
        let mut sight = OperatorSight::new();
        let mut look = |lease: Option<Value>, seconds: u64| {
            let now = start + Duration::from_secs(seconds);
            sight.take("kube-system", lease.as_ref(), now);
            sight.judge(now)
        };
        assert_eq!(look(None, 0), Verdict::None);
        assert_eq!(look(Some(lease("1", "op-a")), 60), Verdict::Undecided);
        assert_eq!(look(Some(lease("1", "op-a")), 65), Verdict::Undecided);
        let runs =
            Verdict::Runs("Lease kube-system/cilium-operator-resource-lock of op-a".to_owned());
        assert_eq!(look(Some(lease("2", "op-a")), 70), runs);
        assert_eq!(look(Some(lease("2", "op-a")), 99), runs);
        // The operator was killed, and its Lease stays.
        assert_eq!(look(Some(lease("2", "op-a")), 100), Verdict::None);
        assert_eq!(
            look(Some(lease("3", "op-b")), 160),
            Verdict::Runs("Lease kube-system/cilium-operator-resource-lock of op-b".to_owned())
        );
        // The operator was uninstalled and gave its Lease back.
        assert_eq!(look(Some(lease("4", "")), 165), Verdict::None);
    }

    #[test]
    fn a_lease_that_nobody_renews_is_one_that_was_left_behind() {
        let start = Instant::now();
        let mut sight = OperatorSight::new();
        assert!(sight.is_due(start));
        sight.take("cilium", Some(&lease("1", "op")), start);
        assert_eq!(sight.judge(start), Verdict::Undecided);
        assert!(!sight.is_due(start) && sight.is_due(start + SOON));
        sight.take("cilium", Some(&lease("1", "op")), start + LEFT);
        assert_eq!(sight.judge(start + LEFT), Verdict::None);
    }
}
