//! Clusters whose pods a node does not read (`--high-scale-prune`): the ipcache grows with the nodes, and
//! not with the pods.

use std::time::Instant;

use agent_core::{
    core::router::Router,
    high_scale::scope::PodScope,
    policy::{
        document::PolicyDocument,
        source::{
            PolicyChange,
            cluster::{Batch, ClusterDocuments, Seen},
        },
    },
    source_event::SourceEvent,
    tunnel_mode::TunnelMode,
};
use anyhow::{Result, ensure};
use holdfast_e2e::in_memory::{Node, config, document, web};
use holdfast_e2e::policy::egress;

use super::cluster::{pod, resident};
use super::names::per;
use super::report::Figure;

/// Number of pods in one batch.
const BATCH: usize = 1_000;
/// Number of entries that every node has: the world, its own address, its endpoint.
const OTHERS: usize = 18;
/// Number of nodes of the clusters whose number of pods grows.
const NODES: usize = 100;
/// Maximum memory that a node may take for the pods of others, in bytes.
const MEMORY: u64 = 10_000_000;

/// A node that reads only its own pods.
struct Pruned {
    node: Node,
    router: Router,
    documents: ClusterDocuments,
    scope: PodScope,
}

impl Pruned {
    fn start(nodes: usize) -> Result<Self> {
        let scope = PodScope::Kept {
            node: "node-of-the-benchmark".to_owned(),
            keep: Vec::new(),
        };
        let mut config = config();
        config.high_scale = Some(TunnelMode::Full);
        config.pods = scope.clone();
        let rules = "- toCIDR: [192.0.2.0/24]\n";
        let policy = document(&egress("block", "web", rules))?;
        let node = Node::start(config, &[policy], &[web(None)])?;
        let of_scope = scope.clone();
        let documents = ClusterDocuments::new(["Pod"]);
        let documents = documents.of_scope(Box::new(move |document| of_scope.has(document)));
        let mut pruned = Self {
            node,
            router: Router::default().with_pods(scope.clone()),
            documents,
            scope,
        };
        let nodes: Result<Vec<_>> = (0..nodes).map(of_node).collect();
        pruned.put(nodes?);
        Ok(pruned)
    }

    fn put(&mut self, documents: Vec<PolicyDocument>) {
        let changes = documents.into_iter().map(SourceEvent::Apply);
        let changes = changes.map(PolicyChange::Document).collect();
        for event in self.router.route(changes) {
            self.node.event(event);
        }
    }

    /// Lists pods, as a watch or a relay does. The agent sees each pod and keeps its own.
    fn list(&mut self, pods: usize) -> Result<()> {
        self.see(vec![Seen::Listing]);
        for first in (0..pods).step_by(BATCH) {
            let seen = (first..pods.min(first + BATCH)).map(|number| {
                let document = pod(number)?;
                Ok(Seen::Put {
                    key: document.key.clone(),
                    digest: number as u64,
                    document: Ok(document),
                    is_marked: false,
                    json: None,
                })
            });
            let seen: Result<Vec<_>> = seen.collect();
            self.see(seen?);
        }
        self.see(vec![Seen::Listed]);
        let kept = self.documents.begin();
        ensure!(
            self.scope.prunes() && kept.is_empty(),
            "{} pods",
            kept.len()
        );
        self.put(kept);
        Ok(())
    }

    fn see(&mut self, seen: Vec<Seen>) {
        self.documents.take(Batch { kind: "Pod", seen });
    }
}

/// A CiliumNode with one address.
fn of_node(number: usize) -> Result<PolicyDocument> {
    let [_, a, b, c] = u32::try_from(number)?.to_be_bytes();
    document(&format!(
        "apiVersion: cilium.io/v2\nkind: CiliumNode\nmetadata: {{name: node{number}}}\n\
         spec: {{addresses: [{{type: InternalIP, ip: 172.{}.{b}.{c}}}]}}\n",
        16 + a
    ))
}

/// Clusters of up to `pods` pods.
pub(crate) fn clusters(pods: usize) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for (nodes, pods) in [
        (NODES, pods / 1_000),
        (NODES, pods / 100),
        (NODES, pods / 10),
        (NODES, pods),
        (100 * NODES, pods),
    ] {
        let mut node = Pruned::start(nodes)?;
        let before = resident()?;
        let start = Instant::now();
        node.list(pods)?;
        let time = start.elapsed();
        let memory = resident()?.saturating_sub(before);
        let entries = node.node.core.summary().ipcache_entries;
        let name = |what: &str| format!("growth: {what}, {pods} pods on {nodes} nodes");
        let most = nodes + OTHERS;
        figures.push(
            Figure::new(&name("entries"), "entries", entries as f64)
                .promised(format!("at most {most}"), entries <= most),
        );
        figures.push(
            Figure::new(&name("memory"), "bytes", memory as f64)
                .promised(format!("at most {MEMORY}"), memory <= MEMORY),
        );
        figures.push(Figure::new(&name("read"), "us/pod", per(time, pods)));
    }
    Ok(figures)
}
