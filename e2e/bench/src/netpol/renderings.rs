//! Time to compute the nftables table, and the combined rules, of a full node without a kernel. Every pod has
//! policies of its own.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use netpol::cache::Object;
use netpol::contiv::Flow;
use netpol::node::NodeRules;
use netpol::pipeline::Pipeline;
use netpol::pod::{Pod, PodId};
use netpol::render::nft::Limits;
use serde_json::{Value, json};

use crate::cluster::report::Report;

/// Longest time to render all pods of the node in the form of nf_tables.
const RENDERED: Duration = Duration::from_secs(1);
/// Longest time to combine the rules of both sides of all pairs of pods.
const COMBINED: Duration = Duration::from_millis(200);
const NODE: &str = "n1";
const LOCAL: usize = 110;
const POLICIES: usize = 10;
const PEERS: usize = 20;
/// Half of the pods are of other nodes.
const PODS: usize = 2 * LOCAL;
/// Each pod has its own chains, with some 44,000 rules together.
const LIMITS: Limits = Limits {
    addresses: 1_000_000,
    rows: 100_000,
};

pub(super) fn measure(report: &mut Report) -> Result<()> {
    let mut objects = Vec::new();
    for n in 0..PODS {
        objects.push(pod(n)?);
    }
    for n in 0..LOCAL * POLICIES {
        objects.push(Object::Policy(Arc::new(netpol::read(&policy(n))?)));
    }
    let begin = Instant::now();
    let mut pipeline = Pipeline::new(NODE, LIMITS);
    pipeline.replace(objects);
    let commit = pipeline.commit()?;
    let took = begin.elapsed();
    drop(commit);
    anyhow::ensure!(pipeline.set_aside().is_empty(), "policies are set aside");
    let promise = took <= RENDERED;
    report.promise(
        "render-110x10x20",
        "s",
        took.as_secs_f64(),
        "<= 1 s",
        promise,
    );

    let rules = NodeRules::of(&pipeline, None);
    let begin = Instant::now();
    let view = rules.tables(Flow::Ingress);
    let took = begin.elapsed();
    anyhow::ensure!(view.local.len() == LOCAL, "{} tables", view.local.len());
    let (millis, holds) = (took.as_secs_f64() * 1e3, took <= COMBINED);
    report.promise("combine-110", "ms", millis, "<= 200 ms", holds);
    Ok(())
}

fn pod(number: usize) -> Result<Object> {
    let last = u32::try_from(number)? + 1;
    let here = number < LOCAL;
    Ok(Object::Pod(Arc::new(Pod {
        id: PodId::new("shop", &format!("pod-{number}")),
        labels: [("pod".to_owned(), number.to_string())].into(),
        node: Some(if here { NODE } else { "n2" }.into()),
        addresses: vec![Ipv4Addr::from_bits(0x0a01_0000 + last).into()],
        created: None,
        ports: [].into(),
    })))
}

/// A policy for both directions of one pod, with peers on both nodes.
fn policy(number: usize) -> Value {
    let of = |n: usize| json!({"matchLabels": {"pod": n.to_string()}});
    let (pod, policy) = (number / POLICIES, number % POLICIES);
    // No two pods have the same peers.
    let first = 71 * pod + 7 * policy;
    let peers = (first..first + PEERS).map(|peer| json!({"podSelector": of(peer % PODS)}));
    let peers: Vec<Value> = peers.collect();
    let ports = json!([{"port": 8000 + policy}]);
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"namespace": "shop", "name": format!("policy-{number}")},
        "spec": {
            "podSelector": of(pod),
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": peers, "ports": ports}],
            "egress": [{"to": peers, "ports": ports}],
        },
    })
}
