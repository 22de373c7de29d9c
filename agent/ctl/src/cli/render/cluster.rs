//! The objects of the given files, by node.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use agent_core::policy::{
    document::{Body, PolicyDocument, PolicyError},
    kinds::is_read,
};
use anyhow::{Result, bail};
use daemon::command_line::failure;
use holdfast_agent::{config::render_args::RenderArgs, netpol::objects::object};
use netpol::{
    cache::Object,
    node::{Node, Surroundings},
    pod::{Pod, PodId},
    verdict::World,
};

use super::{
    super::{policy::read_documents, show::counted},
    text,
};

/// Maximum names that a message lists.
const LISTED: usize = 10;

/// Pods, namespaces and policies.
pub(super) struct Cluster {
    objects: Vec<Object>,
    /// The only node whose pods count, if the user names one.
    only: Option<String>,
    around: Surroundings,
}

impl Cluster {
    /// Reads the files. Fails if a document is refused, or if there is no pod.
    pub(super) fn read(args: &RenderArgs) -> Result<Self> {
        let mut documents: BTreeMap<String, PolicyDocument> = BTreeMap::new();
        let mut unknown = 0;
        for (file, read) in read_documents(&args.files)? {
            for document in read {
                if document.as_ref().is_err_and(is_of_unknown_kind) {
                    unknown += 1;
                    continue;
                }
                let document = document?;
                let key = document.key.clone();
                if documents.insert(key.clone(), document).is_some() {
                    bail!("{file}: {key} is there twice; rename or remove one");
                }
            }
        }
        note_unknown(unknown);
        warn_of_others(documents.values());
        let objects = documents
            .values()
            .filter_map(|document| object(&document.body));
        let objects: Vec<Object> = objects.map(with_node).collect();
        if !objects
            .iter()
            .any(|object| matches!(object, Object::Pod(_)))
        {
            bail!(
                "there is no Pod among the documents, and policies mean addresses of pods: add the \
                 pods, for example from kubectl get pods,namespaces -A -o yaml"
            );
        }
        let cluster = Self {
            objects,
            only: args.node.clone(),
            around: Surroundings {
                node_interfaces: args.vswitch.interfaces(),
                nat_loopback: args.vswitch.nat_loopback,
            },
        };
        if let Some(node) = &args.node
            && !cluster.all_nodes().contains(node)
        {
            bail!(
                "--node {node}: no pod runs there; nodes: {}",
                cluster.names()
            );
        }
        Ok(cluster)
    }

    /// Nodes of the pods that count.
    pub(super) fn nodes(&self) -> Vec<String> {
        match &self.only {
            Some(only) => vec![only.clone()],
            None => self.all_nodes().into_iter().collect(),
        }
    }

    /// The node whose pods count; fails if there are several.
    pub(super) fn only_node(&self) -> Result<String> {
        match self.nodes().as_slice() {
            [one] => Ok(one.clone()),
            _ => bail!(
                "the pods run on several nodes: choose one of them with --node: {}",
                self.names()
            ),
        }
    }

    /// The pod of this name: `namespace/name`, or a name that only one pod has.
    pub(super) fn pod(&self, text: &str, flag: &str) -> Result<PodId> {
        let is_meant = |pod: &&Arc<Pod>| match text.contains('/') {
            true => pod.id.to_string() == text,
            false => *pod.id.name == *text,
        };
        let meant: Vec<&Arc<Pod>> = self.pods().filter(is_meant).collect();
        let names = |pods: &[&Arc<Pod>]| {
            let names = pods.iter().map(|pod| pod.id.to_string());
            listed(names.collect())
        };
        match meant.as_slice() {
            [pod] if pod.addresses.is_empty() => {
                bail!("{flag} {text}: the pod has no address of its own (status.podIPs)")
            }
            [pod] => Ok(pod.id.clone()),
            [] => {
                let all: Vec<&Arc<Pod>> = self.pods().collect();
                bail!("{flag} {text}: there is no such pod; pods: {}", names(&all))
            }
            several => bail!(
                "{flag} {text}: several pods have this name: {}",
                names(several)
            ),
        }
    }

    /// The node of a pod. Fails if the user named another node.
    pub(super) fn node_of(&self, id: &PodId) -> Result<String> {
        let pod = self.pods().find(|pod| pod.id == *id);
        let node = pod.and_then(|pod| pod.node.as_deref()).unwrap_or_default();
        match &self.only {
            Some(only) if only != node => {
                bail!(
                    "--pod {id}: the pod runs on node {}, not on {only}",
                    text::name(node)
                )
            }
            _ => Ok(node.to_owned()),
        }
    }

    /// A side of a packet: a pod with its addresses, or an address.
    pub(super) fn side(&self, name: &str, flag: &str) -> Result<Side> {
        if let Ok(address) = name.parse::<IpAddr>() {
            let pod = self.pods().find(|pod| pod.addresses.contains(&address));
            return Ok(Side {
                name: pod.map(|pod| pod.id.to_string()),
                node: pod.and_then(|pod| pod.node.as_deref()).map(str::to_owned),
                addresses: vec![address],
            });
        }
        let id = self.pod(name, flag)?;
        let pod = self.pods().find(|pod| pod.id == id);
        Ok(Side {
            name: Some(id.to_string()),
            node: pod.and_then(|pod| pod.node.as_deref()).map(str::to_owned),
            addresses: pod.map_or(Vec::new(), |pod| pod.addresses.clone()),
        })
    }

    /// The renderings of a node.
    pub(super) fn render(&self, node: &str) -> Result<Node> {
        let rendered = Node::new(node, &self.objects, &self.around)?;
        for (policy, why) in &rendered.set_aside {
            eprintln!("holdfast-agent: {}", why.problem(policy));
        }
        Ok(rendered)
    }

    /// The renderings of a node as if no other pod ran on it.
    pub(super) fn render_only(&self, node: &str, pod: &PodId) -> Result<Node> {
        let elsewhere = |object: &Object| match object {
            Object::Pod(other) if other.id != *pod => Object::Pod(Arc::new(Pod {
                node: None,
                ..Pod::clone(other)
            })),
            other => other.clone(),
        };
        let objects: Vec<Object> = self.objects.iter().map(elsewhere).collect();
        Ok(Node::new(node, &objects, &self.around)?)
    }

    /// The documents themselves, for verdicts without a rendering.
    pub(super) fn world(&self) -> World {
        World::new(&self.objects)
    }

    fn pods(&self) -> impl Iterator<Item = &Arc<Pod>> {
        self.objects.iter().filter_map(|object| match object {
            Object::Pod(pod) => Some(pod),
            _ => None,
        })
    }

    fn all_nodes(&self) -> BTreeSet<String> {
        let nodes = self.pods().filter_map(|pod| pod.node.as_deref());
        nodes.map(str::to_owned).collect()
    }

    fn names(&self) -> String {
        let names = self.all_nodes();
        listed(
            names
                .iter()
                .map(|name| text::name(name).to_owned())
                .collect(),
        )
    }
}

/// One side of a packet.
pub(super) struct Side {
    /// Name of the pod; `None` if the side is not a pod.
    pub(super) name: Option<String>,
    pub(super) node: Option<String>,
    pub(super) addresses: Vec<IpAddr>,
}

/// Pods without `spec.nodeName` are the pods of a node without a name.
fn with_node(object: Object) -> Object {
    match object {
        Object::Pod(pod) if pod.node.is_none() => Object::Pod(Arc::new(Pod {
            node: Some("".into()),
            ..Pod::clone(&pod)
        })),
        other => other,
    }
}

fn listed(mut names: Vec<String>) -> String {
    let more = names.len().saturating_sub(LISTED);
    names.truncate(LISTED);
    match more {
        0 => names.join(", "),
        more => format!("{} and {more} more", names.join(", ")),
    }
}

/// A document of a kind that is read nowhere, such as a Deployment in a list of all objects.
fn is_of_unknown_kind(error: &PolicyError) -> bool {
    let kind = error.key.as_deref().and_then(|key| key.split('/').next());
    error.field == "kind" && kind.is_some_and(|kind| !kind.is_empty() && !is_read(kind))
}

fn note_unknown(count: usize) {
    if count > 0 {
        let count = counted(count, "document is", "documents are");
        let note = format!("{count} of kinds that mean nothing for policies: left out");
        failure::note("holdfast-agent", &note);
    }
}

/// Warns of policies of other kinds, which are not in renderings.
fn warn_of_others<'a>(documents: impl Iterator<Item = &'a PolicyDocument>) {
    let is_other = |document: &&PolicyDocument| matches!(document.body, Body::Rules(_));
    let others = documents.filter(is_other).count();
    if others > 0 {
        let count = counted(others, "policy is", "policies are");
        let note = format!("{count} of other kinds: only NetworkPolicies are rendered");
        failure::note("holdfast-agent", &note);
    }
}
