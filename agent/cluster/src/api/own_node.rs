//! This node's CiliumNode: the addresses of its interfaces, the blocks of its pods and the labels of
//! its Node, for the agents of other nodes.
//!
//! The Node owns the object, so that it is deleted with the Node. It is written only if it differs. An
//! object that another program made is left alone.

use std::{
    collections::BTreeSet,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    net::IpAddr,
    time::Duration,
};

use agent_core::{
    high_scale::objects::ANNOTATION as HIGH_SCALE,
    kubernetes::unattended::{LEFT, MANAGED_BY, US},
};
use hyper::Method;
use ipnet::IpNet;
use serde_json::{Value, json};
use tokio::{sync::watch as channel, time::Instant};
use tokio_util::sync::CancellationToken;

use self::{follow::Followed, labels::Labels, pace::Pace};
use super::client::{Api, RequestError};
use crate::{health::ClusterHealth, own_interfaces};

mod follow;
mod labels;
mod pace;

/// Pause between two looks at the addresses of this node.
const LOOK: Duration = Duration::from_secs(5);
/// Pause between two looks at the objects in the cluster.
const AGAIN: Duration = Duration::from_secs(600);
/// Pause while the Node has no block of pods, which it gets soon after it was made, and while the
/// changes of its labels cannot be followed.
const AGAIN_SOON: Duration = Duration::from_secs(60);
/// Pause after a write that failed.
const AGAIN_AFTER_FAILURE: Duration = Duration::from_secs(30);

/// The node that the object is about.
pub(super) struct OwnNode {
    pub(super) api: Api,
    pub(super) name: String,
    /// Part of the node in the tunnel between nodes; `None` if it has no part.
    pub(super) high_scale: Option<&'static str>,
}

/// Keeps the object until the agent stops.
pub(super) async fn run(node: OwnNode, health: ClusterHealth, stop: CancellationToken) {
    let (send, followed) = channel::channel(Followed::default());
    let both = async {
        tokio::join!(
            follow::run(node.api.clone(), node.name.clone(), send),
            keep(&node, followed, health),
        )
    };
    stop.run_until_cancelled(both).await;
}

async fn keep(node: &OwnNode, mut followed: channel::Receiver<Followed>, health: ClusterHealth) {
    let mut written: Option<BTreeSet<IpAddr>> = None;
    let mut again = Instant::now();
    let mut of_labels = Pace::default();
    loop {
        let addresses = match own_interfaces::list().map(|all| all.own) {
            Ok(addresses) => reachable(&addresses),
            Err(error) => {
                tracing::warn!(%error, "cannot list the node's addresses");
                tokio::time::sleep(LOOK).await;
                continue;
            }
        };
        let now = Instant::now();
        let is_moved = written.as_ref().is_some_and(|known| *known != addresses);
        let is_relabelled =
            written.is_some() && followed.has_changed().unwrap_or(false) && of_labels.allows(now);
        if now >= again || is_moved || is_relabelled {
            if is_relabelled {
                of_labels.note(now);
            }
            let refused = followed.borrow_and_update().refused.clone();
            let pause = match write(node, &addresses).await {
                Ok(result) => {
                    health.set_own_node(None);
                    let pause = result.pause(refused.is_some(), &node.name);
                    health.set_node_labels(result.labels_left_out.or(refused));
                    written = Some(addresses);
                    pause
                }
                Err(reason) => {
                    health.set_own_node(Some(reason));
                    written = None;
                    AGAIN_AFTER_FAILURE
                }
            };
            again = Instant::now() + pause;
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// A write that succeeded, or was not necessary.
#[derive(Debug, Default, PartialEq, Eq)]
struct Written {
    has_blocks: bool,
    /// Why the labels of the Node were not copied.
    labels_left_out: Option<String>,
}

impl Written {
    /// Time until the next look.
    fn pause(&self, is_blind: bool, name: &str) -> Duration {
        match self.has_blocks && !is_blind {
            true => AGAIN + share(name),
            false => AGAIN_SOON,
        }
    }
}

/// A part of a minute that differs from node to node.
fn share(name: &str) -> Duration {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    Duration::from_millis(hasher.finish() % 60_000)
}

/// Addresses that other machines may see.
fn reachable(all: &BTreeSet<IpAddr>) -> BTreeSet<IpAddr> {
    let is_reachable = |address: &&IpAddr| match address {
        IpAddr::V4(v4) => !v4.is_loopback() && !v4.is_link_local() && !v4.is_unspecified(),
        IpAddr::V6(v6) => !v6.is_loopback() && !v6.is_unicast_link_local() && !v6.is_unspecified(),
    };
    all.iter().filter(is_reachable).copied().collect()
}

/// Writes the object if it differs.
async fn write(own: &OwnNode, addresses: &BTreeSet<IpAddr>) -> Result<Written, String> {
    let OwnNode {
        api,
        name,
        high_scale,
    } = own;
    let node = node(api, name).await?;
    let mut wanted = wanted(name, &node, addresses);
    if let Some(mode) = high_scale {
        wanted["metadata"]["annotations"] = json!({HIGH_SCALE: mode});
    }
    let of_node = labels::of_node(&node);
    let labels_left_out = labels::excess(&of_node);
    let copied = labels_left_out.is_none().then_some(&of_node);
    let written = Written {
        has_blocks: !wanted["spec"]["ipam"].is_null(),
        labels_left_out,
    };
    let all = "/apis/cilium.io/v2/ciliumnodes";
    let one = format!("{all}/{name}");
    let (method, path, body) = match api.json(Method::GET, &one, None).await {
        Ok(found) => match merged(&found, &wanted, copied) {
            Some(merged) => (Method::PUT, one.as_str(), merged),
            None => return Ok(written),
        },
        Err(error) if error.code() == Some(404) => {
            if let Some(copied) = copied {
                labels::copy(&mut wanted, copied);
            }
            (Method::POST, all, wanted)
        }
        Err(error) if error.code() == Some(403) => {
            return Err(explain("get", "ciliumnodes.cilium.io", &error));
        }
        Err(error) => return Err(error.to_string()),
    };
    let verb = if method == Method::POST {
        "create"
    } else {
        "update"
    };
    let wrote = api.json(method, path, Some(&body)).await;
    wrote.map_err(|error| match error.code() {
        Some(403) => explain(verb, "ciliumnodes.cilium.io", &error),
        Some(404) => {
            "ciliumnodes.cilium.io: install the CRDs (chart value crds.install)".to_owned()
        }
        _ => error.to_string(),
    })?;
    Ok(written)
}

/// Reads the Node object of this node.
async fn node(api: &Api, name: &str) -> Result<Value, String> {
    let path = format!("/api/v1/nodes/{name}");
    let node = api.json(Method::GET, &path, None).await;
    node.map_err(|error| match error.code() {
        Some(404) => format!(
            "--node-name {name}: the cluster has no Node of this name; start the agent with the \
             name that `kubectl get nodes` has for this machine"
        ),
        Some(403) => explain("get", "nodes", &error),
        _ => error.to_string(),
    })
}

fn explain(verb: &str, resource: &str, error: &RequestError) -> String {
    if error.to_string().contains("ValidatingAdmissionPolicy") {
        return format!(
            "{error}; --node-name has to be the node that this agent's token names, which is that of its \
             pod (Kubernetes 1.30 and newer)"
        );
    }
    format!(
        "{error}: the verb {verb} on {resource} is missing; add it to the agent's ClusterRole, as \
         the chart has it"
    )
}

/// The object as it should be.
fn wanted(name: &str, node: &Value, addresses: &BTreeSet<IpAddr>) -> Value {
    let texts = |value: &Value| -> Vec<String> {
        let all = value.as_array().into_iter().flatten();
        all.filter_map(|one| one.as_str().map(str::to_owned))
            .collect()
    };
    let mut blocks = texts(&node["spec"]["podCIDRs"]);
    if blocks.is_empty() {
        blocks.extend(node["spec"]["podCIDR"].as_str().map(str::to_owned));
    }
    let parsed: Vec<IpNet> = blocks
        .iter()
        .filter_map(|block| block.parse().ok())
        .collect();
    let listed = node["status"]["addresses"].as_array();
    let listed: Vec<(Option<&str>, Option<IpAddr>)> = listed
        .into_iter()
        .flatten()
        .map(|one| {
            let address = one["address"].as_str().and_then(|text| text.parse().ok());
            (one["type"].as_str(), address)
        })
        .collect();
    let is_external = |address: IpAddr| listed.contains(&(Some("ExternalIP"), Some(address)));
    // Addresses of the Node that no interface has: other machines see them all the same.
    let of_node = listed
        .iter()
        .filter(|(kind, _)| matches!(kind, Some("InternalIP" | "ExternalIP")));
    let of_node = of_node.filter_map(|(_, address)| *address);
    let all: BTreeSet<IpAddr> = addresses.iter().copied().chain(of_node).collect();
    let all = all.into_iter().map(|address| {
        let kind = if is_external(address) {
            "ExternalIP"
        } else if parsed.iter().any(|block| block.contains(&address)) {
            "CiliumInternalIP"
        } else {
            "InternalIP"
        };
        json!({"type": kind, "ip": address})
    });
    let mut spec = json!({"addresses": all.collect::<Vec<_>>()});
    if !blocks.is_empty() {
        spec["ipam"] = json!({"podCIDRs": blocks});
    }
    json!({
        "apiVersion": "cilium.io/v2",
        "kind": "CiliumNode",
        "metadata": {
            "name": name,
            "labels": {MANAGED_BY: US},
            "ownerReferences": [{
                "apiVersion": "v1",
                "kind": "Node",
                "name": name,
                "uid": node["metadata"]["uid"],
            }],
        },
        "spec": spec,
    })
}

/// `found` with what is wanted and with the labels of the Node; `None` if nothing differs, or if the object is
/// another program's. Without `copied`, the labels that were copied before stay.
fn merged(found: &Value, wanted: &Value, copied: Option<&Labels>) -> Option<Value> {
    if found["metadata"]["labels"][MANAGED_BY] != US {
        tracing::debug!("the CiliumNode of this node is another program's, and left alone");
        return None;
    }
    let mut merged = found.clone();
    let metadata = &mut merged["metadata"];
    metadata["ownerReferences"] = wanted["metadata"]["ownerReferences"].clone();
    let mode = &wanted["metadata"]["annotations"][HIGH_SCALE];
    match mode.is_null() {
        false => metadata["annotations"][HIGH_SCALE] = mode.clone(),
        true => {
            let annotations = metadata.get_mut("annotations");
            let annotations = annotations.and_then(Value::as_object_mut);
            annotations.and_then(|all| all.remove(HIGH_SCALE));
        }
    }
    // The label says that the agent left the node: it is back.
    let labels = metadata["labels"].as_object_mut();
    labels.and_then(|labels| labels.remove(LEFT));
    for field in ["addresses", "ipam"] {
        match wanted["spec"].get(field) {
            Some(value) => merged["spec"][field] = value.clone(),
            None => drop(merged["spec"].as_object_mut()?.remove(field)),
        }
    }
    if let Some(copied) = copied {
        labels::copy(&mut merged, copied);
    }
    (merged != *found).then_some(merged)
}

#[cfg(test)]
mod tests;
