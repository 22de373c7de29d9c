//! The state as people see it.

use std::{collections::BTreeSet, net::IpAddr};

use netpol::{
    contiv::{Flow, PolicyId},
    explain::{Opening, Side},
    pod::PodId,
    policy::Protocol,
    processor::PodPolicies,
};

use super::{
    model::{IpSide, NetpolPod, NetpolStatus, NetpolWhy, SideView, TableView},
    state::State,
};

/// Refused documents and warnings that are shown.
const SHOWN: usize = 100;

/// Why a question cannot be answered.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoAnswer {
    /// The end is neither an address nor a pod.
    #[error("{0} is neither an address nor a pod; write for example 10.1.2.3, or shop/web-0")]
    Form(String),
    #[error("there is no pod {0} with an address of its own")]
    NoPod(PodId),
    /// The pod has no address of the other end's family.
    #[error("{from} and {to} have no addresses of one family")]
    Families {
        /// The sender, as it was asked for.
        from: String,
        /// The receiver, as it was asked for.
        to: String,
    },
}

impl State {
    /// For `status`, without what others have to say.
    pub(super) fn status(&self) -> NetpolStatus {
        let pods = self.pipeline.pods();
        let restricted = pods.values().filter(|pod| is_restricted(pod)).count();
        let size = self.pipeline.size();
        let changed = self.force.changed;
        let joined = self.pipeline.cache().warnings().into_iter();
        let joined = joined.map(|(key, warning)| format!("{key}: {warning}"));
        let own = self.warnings.iter().flat_map(|(key, warnings)| {
            let warnings = warnings.iter();
            warnings.map(move |warning| format!("{key}: {warning}"))
        });
        NetpolStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            node: self.node.clone(),
            ready: self.is_ready(),
            policies: self.pipeline.cache().policies().len(),
            refused: self
                .refused
                .iter()
                .take(SHOWN)
                .map(ToString::to_string)
                .collect(),
            pods: pods.len(),
            restricted,
            table: TableView {
                is_begun: self.force.is_begun,
                chains: size.chains,
                groups: size.groups,
                addresses: size.addresses,
                changed_seconds: changed.map(|(at, _)| at.elapsed().as_secs()),
                changed_elements: changed.map_or(0, |(_, elements)| elements),
            },
            set_aside: self.pipeline.set_aside().keys().map(name).collect(),
            not_enforced: self
                .unenforced
                .counts()
                .map(|(kind, count)| (kind.to_owned(), count))
                .collect(),
            problems: self.problems(),
            warnings: self
                .lacks_pods()
                .into_iter()
                .chain(self.open_bridges())
                .chain(joined)
                .chain(own)
                .take(SHOWN)
                .collect(),
            ..NetpolStatus::default()
        }
    }

    fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        problems.extend(
            self.waits()
                .map(|why| format!("the table of the last run stays: {why}")),
        );
        problems.extend(self.force.failing.clone());
        let aside = self.pipeline.set_aside().iter().take(SHOWN);
        problems.extend(aside.map(|(policy, why)| why.problem(policy)));
        problems.extend(self.surroundings.problems.iter().cloned());
        problems.extend(self.unenforced.problems());
        problems.extend(self.pipeline.cache().conflicts().take(SHOWN));
        let pods = self.pipeline.pods().iter();
        problems.extend(pods.flat_map(|(id, pod)| self.ways.problems(id, &pod.addresses)));
        problems
    }

    fn open_bridges(&self) -> impl Iterator<Item = String> {
        let bridges = self.ways.bridges().into_iter();
        bridges.map(|bridge| {
            format!(
                "pods on bridge {bridge} can send under each other's addresses: their ports are not known by routes; \
                 a network that routes its pods prevents it"
            )
        })
    }

    /// A wrong name of the node leaves all pods open.
    fn lacks_pods(&self) -> Option<String> {
        let others = self.pipeline.cache().pods().any(|pod| pod.node.is_some());
        (self.is_listed() && self.pipeline.pods().is_empty() && others).then(|| {
            format!(
                "no pod of the documents runs on node {}: is it the name in their spec.nodeName? --node-name sets it",
                self.node
            )
        })
    }

    /// Every pod of this node that has an address.
    pub(super) fn pods(&self) -> Vec<NetpolPod> {
        let pods = self.pipeline.pods().iter();
        let pods = pods.map(|(id, pod)| {
            let addresses = pod.addresses.iter();
            let policies = |flow| {
                pod.restricting(flow)
                    .map(|policy| name(&policy.id))
                    .collect()
            };
            NetpolPod {
                pod: id.to_string(),
                addresses: addresses
                    .map(|address| (*address, self.ways.describe(*address)))
                    .collect(),
                ingress: policies(Flow::Ingress),
                egress: policies(Flow::Egress),
            }
        });
        pods.collect()
    }

    /// Whether a connection may be opened, and by which rules. `own` are the node's addresses.
    pub(super) fn why(
        &self,
        own: &BTreeSet<IpAddr>,
        from: &str,
        to: &str,
        port: Option<(Protocol, u16)>,
    ) -> Result<NetpolWhy, NoAnswer> {
        let (senders, receivers) = (self.addresses_of(from)?, self.addresses_of(to)?);
        let pairs = senders
            .iter()
            .flat_map(|from| receivers.iter().map(move |to| (*from, *to)));
        let mut pairs = pairs.filter(|(from, to)| from.is_ipv4() == to.is_ipv4());
        let (sender, receiver) = pairs.next().ok_or_else(|| NoAnswer::Families {
            from: from.to_owned(),
            to: to.to_owned(),
        })?;
        let is_of_node = own.contains(&sender) || own.contains(&receiver);
        let sides = match is_of_node {
            true => Vec::new(),
            false => self.pipeline.explain(&Opening {
                from: sender,
                to: receiver,
                port,
            }),
        };
        Ok(NetpolWhy {
            from: self.end(sender),
            to: self.end(receiver),
            port: port.map(|(protocol, number)| format!("{number}/{}", protocol.as_str())),
            allowed: sides.iter().all(|side| side.allowed_by.is_some()),
            is_of_node,
            sides: sides.iter().map(|side| self.side(side)).collect(),
            not_in_force: match self.is_ready() {
                true => None,
                false => Some(
                    self.problems()
                        .into_iter()
                        .next()
                        .unwrap_or_else(|| "the table has not been made yet".to_owned()),
                ),
            },
        })
    }

    /// The pods with an address, and their policies about a direction, for the log.
    pub(super) fn restricting(&self, address: IpAddr, flow: Option<Flow>) -> (String, String) {
        let cache = self.pipeline.cache();
        let mut pods = cache.local_at(address);
        if pods.is_empty() {
            pods.extend(cache.pod_at(address).map(|pod| &pod.id));
        }
        let known = pods.iter().filter_map(|id| self.pipeline.pods().get(id));
        let policies = known.flat_map(|policies| {
            let flows = Flow::ALL.into_iter().filter(move |one| flow == Some(*one));
            flows.flat_map(|flow| policies.restricting(flow).map(|policy| name(&policy.id)))
        });
        let policies: Vec<String> = policies.collect();
        let pods: Vec<String> = pods.into_iter().map(ToString::to_string).collect();
        (pods.join(", "), policies.join(", "))
    }

    fn addresses_of(&self, text: &str) -> Result<Vec<IpAddr>, NoAnswer> {
        if let Ok(address) = text.parse::<IpAddr>() {
            return Ok(vec![address]);
        }
        let id = PodId::parse(text).ok_or_else(|| NoAnswer::Form(text.to_owned()))?;
        let cache = self.pipeline.cache();
        let pod = cache
            .pod(&id)
            .map(|pod| cache.addresses(pod).collect::<Vec<_>>());
        pod.filter(|addresses| !addresses.is_empty())
            .ok_or(NoAnswer::NoPod(id))
    }

    fn end(&self, address: IpAddr) -> IpSide {
        let cache = self.pipeline.cache();
        let pod = cache.pod_at(address);
        IpSide {
            address: address.to_string(),
            pod: pod.map(|pod| pod.id.to_string()),
            is_here: pod.is_some_and(|pod| cache.is_local(&pod.id)),
        }
    }

    fn side(&self, side: &Side) -> SideView {
        let direction = match side.flow {
            Flow::Ingress => "ingress",
            Flow::Egress => "egress",
        };
        let set_aside = side.policies.iter();
        let set_aside = set_aside.filter(|id| self.pipeline.set_aside().contains_key(id));
        let allowed_by = side.allowed_by.as_ref();
        SideView {
            pod: side.pod.to_string(),
            direction: direction.to_owned(),
            policies: side.policies.iter().map(name).collect(),
            set_aside: set_aside.map(name).collect(),
            allowed_by: allowed_by.map(|(policy, field)| format!("{} {field}", name(policy))),
        }
    }
}

fn is_restricted(pod: &PodPolicies) -> bool {
    Flow::ALL.into_iter().any(|flow| pod.is_restricted(flow))
}

fn name(policy: &PolicyId) -> String {
    format!("NetworkPolicy/{policy}")
}
