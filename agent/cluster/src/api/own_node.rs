//! This node's CiliumNode: the addresses of its interfaces and the blocks of its pods, for the
//! agents of other nodes.
//!
//! The Node owns the object, so that it goes with the Node. It is written only if it differs. One
//! that another program made is left alone.

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
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::client::{Api, RequestError};
use crate::{health::ClusterHealth, own_interfaces};

/// Between two looks at the addresses of this node.
const LOOK: Duration = Duration::from_secs(5);
/// Between two looks at the objects in the cluster.
const AGAIN: Duration = Duration::from_secs(600);
/// The same while the Node has no block of pods: it gets one soon after it was made.
const AGAIN_WITHOUT_BLOCKS: Duration = Duration::from_secs(60);
/// The same after a write that failed.
const AGAIN_AFTER_FAILURE: Duration = Duration::from_secs(30);

/// The node that the object is about.
pub(super) struct OwnNode {
    pub(super) api: Api,
    pub(super) name: String,
    /// Part of the node in the tunnel between nodes; none if it has no part.
    pub(super) high_scale: Option<&'static str>,
}

/// Keeps the object until the agent stops.
pub(super) async fn run(node: OwnNode, health: ClusterHealth, stop: CancellationToken) {
    stop.run_until_cancelled_owned(keep(node, health)).await;
}

async fn keep(node: OwnNode, health: ClusterHealth) {
    let mut written: Option<BTreeSet<IpAddr>> = None;
    let mut again = Instant::now();
    loop {
        let addresses = match own_interfaces::list().map(|all| all.own) {
            Ok(addresses) => reachable(&addresses),
            Err(error) => {
                tracing::warn!(%error, "cannot list the node's addresses");
                tokio::time::sleep(LOOK).await;
                continue;
            }
        };
        let is_due = Instant::now() >= again;
        if is_due
            || written
                .as_ref()
                .is_some_and(|written| *written != addresses)
        {
            let pause = match write(&node, &addresses).await {
                Ok(has_blocks) => {
                    health.set_own_node(None);
                    written = Some(addresses);
                    if has_blocks {
                        AGAIN + share(&node.name)
                    } else {
                        AGAIN_WITHOUT_BLOCKS
                    }
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

/// Writes the object if it differs; gives whether the Node has blocks of pods.
async fn write(own: &OwnNode, addresses: &BTreeSet<IpAddr>) -> Result<bool, String> {
    let OwnNode {
        api,
        name,
        high_scale,
    } = own;
    let node = api
        .json(Method::GET, &format!("/api/v1/nodes/{name}"), None)
        .await;
    let node = node.map_err(|error| match error.code() {
        Some(404) => format!(
            "--node-name {name}: the cluster has no Node of this name; start the agent with the \
             name that `kubectl get nodes` has for this machine"
        ),
        Some(403) => explain("get", "nodes", &error),
        _ => error.to_string(),
    })?;
    let mut wanted = wanted(name, &node, addresses);
    if let Some(mode) = high_scale {
        wanted["metadata"]["annotations"] = json!({HIGH_SCALE: mode});
    }
    let has_blocks = !wanted["spec"]["ipam"].is_null();
    let all = "/apis/cilium.io/v2/ciliumnodes";
    let one = format!("{all}/{name}");
    let (method, path, body) = match api.json(Method::GET, &one, None).await {
        Ok(found) => match merged(&found, &wanted) {
            Some(merged) => (Method::PUT, one.as_str(), merged),
            None => return Ok(has_blocks),
        },
        Err(error) if error.code() == Some(404) => (Method::POST, all, wanted),
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
    Ok(has_blocks)
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
    // Addresses of the Node that no interface has: others see them all the same.
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

/// `found` with what is wanted; none if it is so already, or if it is another program's.
fn merged(found: &Value, wanted: &Value) -> Option<Value> {
    if found["metadata"]["labels"][MANAGED_BY] != US {
        tracing::debug!("the CiliumNode of this node is another program's, and left alone");
        return None;
    }
    let owners = &wanted["metadata"]["ownerReferences"];
    let mode = &wanted["metadata"]["annotations"][HIGH_SCALE];
    let (spec, has) = (&wanted["spec"], &found["spec"]);
    let same = ["addresses", "ipam"]
        .iter()
        .all(|field| has[field] == spec[field])
        && found["metadata"]["ownerReferences"] == *owners
        && found["metadata"]["annotations"][HIGH_SCALE] == *mode
        && found["metadata"]["labels"][LEFT].is_null();
    if same {
        return None;
    }
    let mut merged = found.clone();
    merged["metadata"]["ownerReferences"] = owners.clone();
    match mode.is_null() {
        false => merged["metadata"]["annotations"][HIGH_SCALE] = mode.clone(),
        true => {
            let annotations = merged["metadata"]["annotations"].as_object_mut();
            annotations.and_then(|all| all.remove(HIGH_SCALE));
        }
    }
    // The agent is here again.
    let labels = merged["metadata"]["labels"].as_object_mut();
    labels.and_then(|labels| labels.remove(LEFT));
    for field in ["addresses", "ipam"] {
        match spec.get(field) {
            Some(value) => merged["spec"][field] = value.clone(),
            None => drop(merged["spec"].as_object_mut()?.remove(field)),
        }
    }
    Some(merged)
}

#[cfg(test)]
mod tests;
