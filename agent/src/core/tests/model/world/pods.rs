//! A pod of another node, and its namespace.

use shared_maps::IdentityId;

use super::World;
use crate::{
    core::tests::oracle::{ClusterPod, Pod},
    identity::checkpoint,
};

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

    fn of_cluster(&mut self, events: Vec<crate::core::Event>) {
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

    /// The pod's address has the labels of the pod and of its namespace.
    pub(super) fn check_cluster(&self) {
        let found = self.node.identity(ADDRESS);
        let Some(pod) = self.cluster.at(ADDRESS.parse().unwrap()) else {
            assert_eq!(found, None, "the pod is gone");
            return;
        };
        let id: IdentityId = found.expect("the pod has an entry");
        let text = self.node.datapath.endpoint_checkpoint.as_deref();
        let known = checkpoint::parse_endpoints(text.unwrap_or("[]")).unwrap();
        let labels = known.iter().find(|(known, _)| *known == id);
        let (_, labels) = labels.expect("its identity is on disk");
        let wanted = self.cluster.labels(pod);
        let lacking = wanted
            .iter()
            .find(|label| !labels.as_slice().contains(label));
        assert_eq!(lacking, None, "{labels:?}");
        let teams = |labels: &crate::labels::LabelSet| {
            labels
                .iter()
                .filter(|label| label.key().ends_with(".team"))
                .count()
        };
        assert_eq!(teams(labels), teams(&wanted), "{labels:?}");
    }
}
