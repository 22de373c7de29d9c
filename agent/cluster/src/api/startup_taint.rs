//! Removes the startup taint of this node, once new pods are under policy from their first packet.
//!
//! A node pool or the kubelet sets the taint, so that no pod is scheduled to a node before its agent is
//! ready. The agent removes it, whatever its effect, and never sets it. Other taints stay: the
//! patch fails if the list of taints is no longer the one that the agent read.

use std::{
    hash::{DefaultHasher, Hash as _, Hasher as _},
    time::Duration,
};

use hyper::Method;
use serde_json::{Value, json};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::{
    backoff::{Backoff, random},
    client::{Api, RequestError},
};
use crate::health::ClusterHealth;

/// Pause between two looks at a Node without the taint: node pools set it again when they change a node.
const AGAIN: Duration = Duration::from_secs(60);
/// Attempts while other programs change the taints.
const ATTEMPTS: u32 = 5;
/// Longest pause between two attempts.
const PAUSE: Duration = Duration::from_millis(500);

/// The startup taint of this node.
#[derive(Debug)]
pub struct StartupTaint {
    pub api: Api,
    pub node: String,
    /// Key of the taint, from `--agent-not-ready-taint-key`.
    pub key: String,
    /// Takes the reason why the taint cannot be removed.
    pub health: ClusterHealth,
}

impl StartupTaint {
    /// Waits until `ready` ends with true, then keeps the taint off the node until stopped.
    pub async fn run(self, ready: impl Future<Output = bool>, stop: CancellationToken) {
        let keep = async {
            if ready.await {
                self.keep_off().await;
            }
        };
        let _stopped = stop.run_until_cancelled(keep).await;
    }

    async fn keep_off(&self) {
        let mut backoff = Backoff::default();
        loop {
            match self.remove().await {
                Ok(()) => {
                    self.health.set_startup_taint(None);
                    backoff = Backoff::default();
                    sleep(AGAIN + share(&self.node)).await;
                }
                Err(error) => {
                    self.health.set_startup_taint(Some(self.explain(&error)));
                    sleep(backoff.pause()).await;
                }
            }
        }
    }

    /// Removes the taint if it is there.
    async fn remove(&self) -> Result<(), RequestError> {
        let path = format!("/api/v1/nodes/{}", self.node);
        let mut attempt = 1;
        loop {
            let node = self.api.json(Method::GET, &path, None).await?;
            let Some(patch) = patch(&node, &self.key) else {
                return Ok(());
            };
            match self.api.json(Method::PATCH, &path, Some(&patch)).await {
                Ok(_) => {
                    tracing::info!(
                        taint = self.key,
                        node = self.node,
                        "removed the startup taint"
                    );
                    return Ok(());
                }
                // Another program changed the taints meanwhile. 422: the `test` of the patch
                // failed. 409: a conflict in etcd.
                Err(error) if matches!(error.code(), Some(409 | 422)) && attempt < ATTEMPTS => {
                    tracing::debug!(%error, "the taints of the node changed; they are read again");
                }
                Err(error) => return Err(error),
            }
            attempt += 1;
            sleep(random(PAUSE)).await;
        }
    }

    fn explain(&self, error: &RequestError) -> String {
        let (node, key) = (&self.node, &self.key);
        let by_hand = format!("`kubectl taint node {node} {key}-` removes the taint");
        match error.code() {
            Some(404) => format!(
                "--node-name {node}: the cluster has no Node of this name; start the agent with the \
                 name that `kubectl get nodes` has for this machine"
            ),
            Some(403) => format!(
                "no pod is scheduled to node {node} while it has the taint {key}, and the API server \
                 does not let the agent remove it: {error}. The chart gives the right to agents whose \
                 token names their node (Kubernetes 1.30 and newer, value agentNotReadyTaintKey); \
                 {by_hand}"
            ),
            _ => format!(
                "no pod is scheduled to node {node} while it has the taint {key}, and the agent \
                 could not remove it: {error}; {by_hand}"
            ),
        }
    }
}

/// The patch that removes the taints with this key, and fails if the node's taints are no longer
/// the taints of `node`. `None` if no taint has the key.
fn patch(node: &Value, key: &str) -> Option<Value> {
    const PATH: &str = "/spec/taints";
    let taints = node.pointer(PATH)?;
    let all = taints.as_array()?;
    let others = all.iter().filter(|taint| taint["key"] != key);
    let others: Vec<&Value> = others.collect();
    if others.len() == all.len() {
        return None;
    }
    let change = match others.is_empty() {
        true => json!({"op": "remove", "path": PATH}),
        false => json!({"op": "replace", "path": PATH, "value": others}),
    };
    Some(json!([{"op": "test", "path": PATH, "value": taints}, change]))
}

/// A part of the pause that differs from node to node.
fn share(node: &str) -> Duration {
    let mut hasher = DefaultHasher::new();
    node.hash(&mut hasher);
    Duration::from_millis(hasher.finish() % 10_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "holdfast.io/agent-not-ready";

    fn node(taints: &Value) -> Value {
        json!({"metadata": {"name": "n1"}, "spec": {"taints": taints}})
    }

    #[test]
    fn only_the_taints_with_the_key_go_and_only_if_no_taint_changed() {
        let other = json!({"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"});
        let ours = json!({"key": KEY, "value": "true", "effect": "NoSchedule"});
        let evicting = json!({"key": KEY, "effect": "NoExecute"});
        for nothing in [json!({"spec": {}}), node(&json!([])), node(&json!([other]))] {
            assert_eq!(patch(&nothing, KEY), None, "{nothing}");
        }
        let all = json!([other, ours, evicting]);
        assert_eq!(
            patch(&node(&all), KEY),
            Some(json!([
                {"op": "test", "path": "/spec/taints", "value": all},
                {"op": "replace", "path": "/spec/taints", "value": [other]},
            ]))
        );
        let alone = json!([ours]);
        assert_eq!(
            patch(&node(&alone), KEY),
            Some(json!([
                {"op": "test", "path": "/spec/taints", "value": alone},
                {"op": "remove", "path": "/spec/taints"},
            ]))
        );
    }
}
