//! Which interface leads to each pod of this node. The interfaces only guard against false source addresses: if one
//! is not found, this opens nothing.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
};

use netpol::{links::NodeLinks, pod::PodId};

use crate::endpoint::discover::{
    by_route::{Way, way_to},
    ports::{Port, Ports},
};

/// The way to each address of the node's pods, and the ports of the node, as they were found last.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Ways(BTreeMap<IpAddr, Way>, Ports);

/// Properties of the bridges that pods are on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bridging {
    /// Whether one of the bridges filters VLANs.
    pub(super) filters_vlans: bool,
}

impl Ways {
    #[cfg(test)]
    pub(super) fn of(ways: impl IntoIterator<Item = (IpAddr, Way)>) -> Self {
        Self(ways.into_iter().collect(), Ports::default())
    }

    /// Whether these are the addresses that were looked at.
    pub(super) fn are_of(&self, addresses: &BTreeSet<IpAddr>) -> bool {
        self.0.keys().eq(addresses)
    }

    /// Forgets the ways to these addresses, so that they are looked at again.
    pub(super) fn forget(&mut self, addresses: &[IpAddr]) {
        self.0.retain(|address, _| !addresses.contains(address));
    }

    /// Why there may be packets of a new pod with this address that no rule sees; `None` if a rule
    /// sees each of them.
    pub(super) fn obstacle(&self, address: IpAddr) -> Option<String> {
        match self.0.get(&address) {
            Some(Way::Pair { .. } | Way::Bridge { .. }) => None,
            Some(Way::Elsewhere { name, kind }) => Some(format!(
                "the route to {address} leads to {name} ({kind}), which is neither a pod's pair of interfaces nor a \
                 bridge: no rule would see its packets"
            )),
            Some(Way::Nowhere) => Some(format!("the node has no route to {address}")),
            None => Some(format!("the route to {address} is not known yet")),
        }
    }

    /// Looks at the ways to `addresses` again. A way that cannot be looked at stays as it was.
    ///
    /// # Errors
    /// Some ways could not be looked at.
    pub(super) async fn look(&mut self, addresses: &BTreeSet<IpAddr>) -> io::Result<()> {
        self.0.retain(|address, _| addresses.contains(address));
        let (connection, handle, _messages) = rtnetlink::new_connection()?;
        let look = async {
            let mut looked = Ports::list(&handle).await.map(|ports| self.1 = ports);
            if let Err(error) = &looked {
                tracing::warn!(%error, "cannot list the ports of bridges and tunnels; those known stay as they were");
            }
            for address in addresses {
                match way_to(&handle, *address).await {
                    Ok(way) => drop(self.0.insert(*address, way)),
                    Err(error) => {
                        tracing::warn!(%address, %error, "cannot ask for the route to a pod; its interface stays as it was");
                        looked = Err(error);
                    }
                }
            }
            looked
        };
        tokio::select! {
            () = connection => Err(io::ErrorKind::UnexpectedEof.into()),
            looked = look => looked,
        }
    }

    /// The interface behind which each address is, where a route says it.
    pub(super) fn interfaces(&self) -> BTreeMap<IpAddr, u32> {
        let pairs = self.0.iter().filter_map(|(address, way)| match way {
            Way::Pair { index, .. } => Some((*address, *index)),
            _ => None,
        });
        pairs.collect()
    }

    /// An address behind an interface, where a route says it.
    pub(super) fn behind(&self, interface: u32) -> Option<IpAddr> {
        let mut all = self.0.iter();
        let found =
            all.find(|(_, way)| matches!(way, Way::Pair { index, .. } if *index == interface));
        found.map(|(address, _)| *address)
    }

    /// Addresses of pods on bridges, with the bridge.
    fn bridged(&self) -> impl Iterator<Item = (IpAddr, u32)> {
        self.0.iter().filter_map(|(address, way)| match way {
            Way::Bridge { index, .. } => Some((*address, *index)),
            _ => None,
        })
    }

    /// The node's interfaces, as its tables need them.
    pub(super) fn links(&self) -> NodeLinks {
        let bridges: BTreeSet<u32> = self.bridged().map(|(_, bridge)| bridge).collect();
        let is_of_pod = |port: &&Port| port.leads_elsewhere && bridges.contains(&port.bridge);
        let others = self.1.of_bridges.iter().filter(|port| !is_of_pod(port));
        let shared: BTreeSet<u32> = others.clone().map(|port| port.bridge).collect();
        let routed = self.interfaces().into_values();
        NodeLinks {
            other_ports: others.map(|port| port.index).collect(),
            senders: routed.chain(bridges.difference(&shared).copied()).collect(),
            addresses: self.0.keys().copied().collect(),
            tunnel_ports: self.1.of_tunnels.clone(),
            bridged: self.bridged().map(|(address, _)| address).collect(),
            broadcasts: self.1.broadcasts.clone(),
            bridges,
        }
    }

    /// Properties of the bridges that pods are on; `None` if there are none.
    pub(super) fn bridging(&self) -> Option<Bridging> {
        let bridges = self.links().bridges;
        let filters_vlans = !bridges.is_disjoint(&self.1.vlan_bridges);
        (!bridges.is_empty()).then_some(Bridging { filters_vlans })
    }

    /// Notes a way without asking the kernel.
    #[cfg(test)]
    pub(super) fn note(&mut self, address: IpAddr, way: Way) {
        self.0.insert(address, way);
    }

    /// The way to an address, for people.
    pub(super) fn describe(&self, address: IpAddr) -> String {
        match self.0.get(&address) {
            Some(Way::Pair { name, .. }) => name.clone(),
            Some(Way::Bridge { name, .. }) => format!("bridge {name}"),
            Some(Way::Elsewhere { name, kind }) => format!("{name} ({kind}), no pod's"),
            Some(Way::Nowhere) => "no route".to_owned(),
            None => "-".to_owned(),
        }
    }

    /// What is wrong with the ways to the addresses of a pod.
    pub(super) fn problems<'a>(
        &'a self,
        pod: &'a PodId,
        addresses: &'a [IpAddr],
    ) -> impl Iterator<Item = String> + 'a {
        addresses.iter().filter_map(move |address| {
            let Some(Way::Elsewhere { name, kind }) = self.0.get(address) else {
                return None;
            };
            Some(format!(
                "pod {pod}: the route to {address} leads to {name} ({kind}), not to a pod of this node; \
                 its policy is in force, but other pods can send under its address; correct the route, or \
                 the pod's status.podIPs"
            ))
        })
    }

    /// Bridges with pods, which can send under each other's addresses.
    pub(super) fn bridges(&self) -> BTreeSet<&str> {
        let bridges = self.0.values().filter_map(|way| match way {
            Way::Bridge { name, .. } => Some(name.as_str()),
            _ => None,
        });
        bridges.collect()
    }
}
