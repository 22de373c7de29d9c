//! `cluster status`: the agents of all nodes, with the administrator's own kubectl.
//!
//! ```text
//! kubectl get ──► objects ──┐
//!     │ running pods        ├─► rows ──► text, JSON
//! kubectl exec ─► answer ───┘
//! ```

mod answer;
mod kubectl;
mod objects;
mod placement;
mod rows;
mod text;

use std::{collections::BTreeMap, sync::Arc};

use agent_core::kubernetes::unattended::LEFT;
use anyhow::{Context as _, Result, bail};
use holdfast_agent::config::cluster_command::ClusterStatusArgs;
use serde::de::DeserializeOwned;
use tokio::{sync::Semaphore, task::JoinSet};

use self::{
    answer::Agent,
    kubectl::Kubectl,
    objects::{CiliumNode, DaemonSet, Enforcement, List, Node, Pod},
    rows::{Cluster, Report},
};
use super::show::print;

/// Selects the pods and the DaemonSets of the chart's agents, with programs and with nftables.
const SELECTOR: &str = "app.kubernetes.io/name in (holdfast-agent, holdfast-netpol)";

/// Asks the agents and prints their answers. Fails if a node is not fine.
pub(crate) async fn status(args: ClusterStatusArgs) -> Result<()> {
    let (output, parallel) = (args.form.output, usize::from(args.parallel));
    let kubectl = Arc::new(Kubectl::new(args));
    let mut cluster = listing(&kubectl).await?;
    let running = cluster.pods.iter().filter(|pod| pod.is_running());
    let running = running.map(|pod| (pod.metadata.name.clone(), pod.enforcement()));
    let running = running.collect();
    cluster.answers = ask(&kubectl, running, parallel).await;
    let report = Report::of(&cluster);
    print(output, &report, text::text)?;
    if !report.is_fine() {
        bail!("not every node is fine");
    }
    Ok(())
}

/// Lists the objects. Fails if the pods cannot be listed. The report names other kinds that cannot be listed.
async fn listing(kubectl: &Kubectl) -> Result<Cluster> {
    let (pods, nodes, sets) = tokio::join!(
        list::<Pod>(kubectl, &["pods", "--selector", SELECTOR]),
        list::<Node>(kubectl, &["nodes"]),
        list::<DaemonSet>(kubectl, &["daemonsets", "--selector", SELECTOR]),
    );
    let mut cluster = Cluster {
        pods: pods?,
        ..Cluster::default()
    };
    match sets {
        Ok(sets) => cluster.sets = sets,
        Err(error) => cluster.unread.push(format!("{error:#}")),
    }
    match nodes {
        Ok(nodes) => cluster.nodes = nodes,
        Err(error) => cluster.unread.push(format!("{error:#}")),
    }
    if cluster.pods.is_empty() && cluster.sets.is_empty() {
        let namespace = kubectl.namespace();
        bail!(
            "namespace {namespace} has no pods and no DaemonSet with the label {SELECTOR}: give --namespace"
        );
    }
    if cluster.lacks_pods() {
        // The cluster may not know this kind: only agents with an API server write these objects.
        let label = format!("{LEFT}=true");
        let what = ["ciliumnodes.cilium.io", "--selector", &label];
        let left: Vec<CiliumNode> = list(kubectl, &what).await.unwrap_or_default();
        cluster.left = left.into_iter().map(|node| node.metadata.name).collect();
    }
    Ok(cluster)
}

async fn list<T: DeserializeOwned>(kubectl: &Kubectl, what: &[&str]) -> Result<Vec<T>> {
    let arguments = [&["get", "--output=json"], what].concat();
    let what_failed = what.first().copied().unwrap_or_default();
    let failure = || {
        format!(
            "cannot list {what_failed}; if kubectl reaches the cluster with another kubeconfig or context, \
             give --kubeconfig or --context"
        )
    };
    let text = kubectl.list(&arguments).await.with_context(failure)?;
    let list: List<T> = serde_json::from_slice(&text).with_context(failure)?;
    Ok(list.items)
}

/// The answers of pods, by name.
async fn ask(
    kubectl: &Arc<Kubectl>,
    pods: Vec<(String, Enforcement)>,
    parallel: usize,
) -> BTreeMap<String, Result<Agent, String>> {
    let turns = Arc::new(Semaphore::new(parallel));
    let mut asked = JoinSet::new();
    for (pod, enforcement) in pods {
        let (kubectl, turns) = (Arc::clone(kubectl), Arc::clone(&turns));
        asked.spawn(async move {
            let _turn = turns.acquire().await;
            let answer = ask_one(&kubectl, &pod, enforcement).await;
            (pod, answer.map_err(|error| format!("{error:#}")))
        });
    }
    asked.join_all().await.into_iter().collect()
}

async fn ask_one(kubectl: &Kubectl, pod: &str, enforcement: Enforcement) -> Result<Agent> {
    let pod = format!("pod/{pod}");
    let container = format!("--container={}", enforcement.container());
    let command = [
        &["holdfast-agent"],
        enforcement.command(),
        &["--output=json"],
    ]
    .concat();
    let arguments = [&["exec", &pod, &container, "--"], command.as_slice()].concat();
    let text = kubectl.answer(&arguments).await?;
    Agent::parse(&text, enforcement).context("the answer is no state of an agent")
}
