//! The state as people see it.

use std::{collections::BTreeSet, net::IpAddr};

use netpol::{
    contiv::{Flow, PolicyId},
    processor::PodPolicies,
};

use super::{
    exports::Exports,
    model::{NetpolPod, NetpolStatus, TableView},
    state::State,
};

/// Maximum refused documents, and maximum warnings, that are shown.
const SHOWN: usize = 100;

impl State {
    /// The part of `status` that follows from this view alone.
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
                .chain(self.surroundings.beside.clone())
                .chain(self.open_bridges())
                .chain(joined)
                .chain(own)
                .take(SHOWN)
                .collect(),
            exports: self.exports.as_ref().map(Exports::view),
            ..NetpolStatus::default()
        }
    }

    /// What keeps policy from being in force, or needs attention.
    pub(super) fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        problems.extend(
            self.waits()
                .map(|why| format!("the table of the last run stays: {why}")),
        );
        problems.extend(self.force.failing.clone());
        problems.extend(self.unstored.clone());
        let aside = self.pipeline.set_aside().iter().take(SHOWN);
        problems.extend(aside.map(|(policy, why)| why.problem(policy)));
        problems.extend(self.surroundings.problems.iter().cloned());
        problems.extend(self.open_to_frames());
        problems.extend(self.unenforced.problems());
        problems.extend(self.pipeline.cache().conflicts().take(SHOWN));
        let pods = self.pipeline.pods().iter();
        problems.extend(pods.flat_map(|(id, pod)| self.ways.problems(id, &pod.addresses)));
        problems.extend(self.exports.iter().flat_map(Exports::problems));
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

    /// The problem of a node that seems to have no pods: a wrong node name leaves all pods open.
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

    /// The pods with an address, and their policies about a direction, for the log.
    pub(super) fn restricting(&self, address: IpAddr, flow: Flow) -> Option<(String, String)> {
        let here = self.pipeline.cache().local_at(address);
        let policies = here.iter().filter_map(|id| self.pipeline.pods().get(*id));
        let policies = policies.flat_map(|pod| pod.restricting(flow));
        let policies: BTreeSet<String> = policies.map(|policy| name(&policy.id)).collect();
        let policies: Vec<String> = policies.into_iter().collect();
        self.pods_at(address)
            .map(|pods| (pods, policies.join(", ")))
    }

    /// The pod behind an interface, for the log.
    pub(super) fn pod_behind(&self, interface: u32) -> Option<String> {
        self.pods_at(self.ways.behind(interface)?)
    }

    /// The pods of this node that claim an address.
    fn pods_at(&self, address: IpAddr) -> Option<String> {
        let here = self.pipeline.cache().local_at(address).into_iter();
        let here: Vec<String> = here.map(ToString::to_string).collect();
        (!here.is_empty()).then(|| here.join(", "))
    }
}

fn is_restricted(pod: &PodPolicies) -> bool {
    Flow::ALL.into_iter().any(|flow| pod.is_restricted(flow))
}

/// A policy by its kind and name.
pub(super) fn name(policy: &PolicyId) -> String {
    format!("NetworkPolicy/{policy}")
}
