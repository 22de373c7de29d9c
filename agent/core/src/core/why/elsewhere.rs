//! Which other node judges the other side of a packet: this node has no policy of that node's pods in
//! force.

use std::net::IpAddr;

use crate::{
    core::{
        Core,
        state::{State, pods::KnownPod},
    },
    ipcache::owners::{Owner, Source},
    policy::{cluster::node::Node, document::Body},
};

/// A pod of another node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Elsewhere {
    /// `namespace/name`; `None` if no document describes it.
    pub pod: Option<String>,
    /// Name of its node; `None` if no document has it.
    pub node: Option<String>,
    /// Addresses of that node, if its document is there.
    pub node_addresses: Vec<IpAddr>,
}

impl Core {
    /// Where the pod of an address is judged, if it is of another node. `None` for endpoints of this
    /// node and addresses that are no pod's.
    pub fn elsewhere(&self, address: IpAddr) -> Option<Elsewhere> {
        self.state.elsewhere(address)
    }
}

impl State {
    pub(super) fn elsewhere(&self, address: IpAddr) -> Option<Elsewhere> {
        if self.endpoints.by_address(address).is_some() {
            return None;
        }
        let pod = self.pod_with(address).map(|pod| &pod.at);
        let named = pod.and_then(|pod| pod.node.as_deref());
        let node = match named {
            Some(name) => self.node_where(|node| node.name == name),
            None => self.node_where(|node| node.pod_blocks.iter().any(|b| b.contains(&address))),
        };
        if pod.is_none() && node.is_none() {
            return None;
        }
        let name = named.or(node.map(|node| node.name.as_str()));
        let pod = pod.map(|pod| pod.key.to_string());
        self.unless_own(pod, name, node)
    }

    /// The other node that has an address.
    pub(super) fn other_node_at(&self, address: IpAddr) -> Option<Elsewhere> {
        let node = self.node_where(|node| node.addresses.contains(&address))?;
        self.unless_own(None, Some(&node.name), Some(node))
    }

    /// `None` if the node of this name is the agent's own.
    fn unless_own(
        &self,
        pod: Option<String>,
        name: Option<&str>,
        node: Option<&Node>,
    ) -> Option<Elsewhere> {
        let is_own = name.is_some() && name == self.config.node_name.as_deref();
        let addresses = node.into_iter().flat_map(|node| node.addresses.iter());
        (!is_own).then(|| Elsewhere {
            pod,
            node: name.map(str::to_owned),
            node_addresses: addresses.copied().collect(),
        })
    }

    /// The pod whose document gave an address to the ipcache.
    fn pod_with(&self, address: IpAddr) -> Option<&KnownPod> {
        let owners = self.ipcache.get(address.into())?.owners().into_iter();
        let mut pods = owners.filter_map(|owner| match owner {
            Owner::Object(Source::Kubernetes, document) => {
                let (_, key) = document.split_once('/')?;
                let pod = self.cluster.pods.known.get(key)?;
                pod.at.addresses.contains(&address).then_some(pod)
            }
            _ => None,
        });
        pods.next()
    }

    fn node_where(&self, is_wanted: impl Fn(&Node) -> bool) -> Option<&Node> {
        let documents = self.policy.repository().iter();
        let mut nodes = documents.filter_map(|document| match &document.body {
            Body::Node(node) => Some(node),
            _ => None,
        });
        nodes.find(|node| is_wanted(node))
    }
}
