//! A pod of another node, and its namespace.

use std::net::IpAddr;

use agent_core::{
    core::{
        Event,
        testing::{
            cluster::{ClusterPod, ServicePort, VIP},
            packets::{Fate, Question, fate, identity},
            pod::Pod,
        },
    },
    labels::LabelSet,
};
use shared_maps::{
    IdentityId,
    policy::{EGRESS, INGRESS},
};

use super::{super::Spec, World};

/// Where the pod is. No answer has this address.
const ADDRESS: &str = "10.2.0.9";

impl World {
    /// The pod is there, app=web or app=db, or is removed.
    pub(super) fn cluster_pod(&mut self, is_web: Option<bool>) {
        let pod = is_web.map(|web| ClusterPod {
            pod: if web { Pod::WEB } else { Pod::DB },
            address: ADDRESS,
        });
        let events = self.cluster.pod(0, pod);
        self.of_cluster(events);
    }

    pub(super) fn team(&mut self, team: Option<&'static str>) {
        let events = self.cluster.team(team);
        self.of_cluster(events);
    }

    pub(super) fn service(&mut self, ports: Option<&'static [ServicePort]>) {
        let events = self.cluster.serve(ports);
        self.of_cluster(events);
    }

    fn of_cluster(&mut self, events: Vec<Event>) {
        if self.agent && self.synced {
            self.end_change();
            events.into_iter().for_each(|event| self.event(event));
        }
    }

    /// An agent that starts receives what there is.
    pub(super) fn replay_cluster(&mut self) {
        let events = self.cluster.replay();
        events.into_iter().for_each(|event| self.event(event));
    }

    fn has_policy(&self, spec: Spec) -> bool {
        let mut documents = self.documents.iter();
        documents.any(|(slot, document)| *document == spec.document(*slot))
    }

    /// What the NetworkPolicies say of the pod, and what the endpoint's map says of the Service.
    fn check_verdicts(&self) {
        let locations = self.node.core.locations();
        let own: IpAddr = "10.0.0.7".parse().unwrap();
        let mut at = locations.iter().filter(|l| l.addresses.contains(&own));
        let endpoint = at.next().expect("the endpoint is there").id;
        let fate_of = |remote: &str, direction, protocol, port| {
            let question = Question {
                endpoint,
                remote: remote.parse().unwrap(),
                direction,
                protocol,
                port,
            };
            fate(&self.node.datapath, question).expect("it has a policy map")
        };
        let passes = |passes| match passes {
            true => Fate::Passed,
            false => Fate::Dropped,
        };
        let pod = self.cluster.at(ADDRESS.parse().unwrap());
        for port in [443, 80] {
            let team = pod.and_then(|pod| self.cluster.team_of(pod));
            let free = !self.has_policy(Spec::FromTeamAOn443);
            let wanted = free || (team == Some("a") && port == 443);
            assert_eq!(
                fate_of(ADDRESS, INGRESS, 6, port),
                passes(wanted),
                "from, {port}"
            );
            let has = self.has_policy(Spec::ToDbOn443AndBlock);
            let wanted = has && pod.is_some_and(|pod| !pod.web) && port == 443;
            assert_eq!(
                fate_of(ADDRESS, EGRESS, 6, port),
                passes(wanted),
                "to, {port}"
            );
        }
        let vip: IpAddr = VIP.parse().unwrap();
        let ports = self.cluster.service_at(vip);
        let is_service = identity(&self.node.datapath, vip).is_service();
        assert_eq!(is_service, ports.is_some());
        for (protocol, port, to, backends) in ports.into_iter().flatten() {
            let fates = backends
                .iter()
                .map(|at| fate_of(at, EGRESS, *protocol, *to));
            let wanted = fates.min().unwrap_or(Fate::Dropped);
            assert_eq!(
                fate_of(VIP, EGRESS, *protocol, *port),
                wanted,
                "Service, {port}"
            );
        }
    }

    /// The pod's address has the labels of the pod and of its namespace.
    pub(super) fn check_cluster(&self) {
        self.check_verdicts();
        let found = self.node.identity(ADDRESS);
        let Some(pod) = self.cluster.at(ADDRESS.parse().unwrap()) else {
            assert_eq!(found, None, "the pod is gone");
            return;
        };
        let id: IdentityId = found.expect("the pod has an entry");
        let known = self.node.datapath.endpoint_identities();
        let labels = known.iter().find(|(known, _)| *known == id);
        let (_, labels) = labels.expect("its identity is on disk");
        let wanted = self.cluster.labels(pod);
        let lacking = wanted
            .iter()
            .find(|label| !labels.as_slice().contains(label));
        assert_eq!(lacking, None, "{labels:?}");
        let teams = |labels: &LabelSet| {
            labels
                .iter()
                .filter(|label| label.key().ends_with(".team"))
                .count()
        };
        assert_eq!(teams(labels), teams(&wanted), "{labels:?}");
    }
}
