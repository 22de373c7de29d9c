//! Pods of the cluster and their namespace, as the test knows them.

use std::{collections::BTreeMap, net::IpAddr};

use proptest::{prelude::*, sample::select};

use super::{
    language::{ADDRESSES, PORT_NAMES},
    pod::Pod,
};
use crate::{
    core::{Event, router::Router},
    kubernetes::{book::Book, labels::LabelFilter},
    labels::{Label, LabelSet},
    policy::{document::PolicyDocument, parse::parse_documents, source::PolicyChange},
    source_event::SourceEvent,
};

/// A pod that an object of the cluster names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::core::tests) struct ClusterPod {
    pub(in crate::core::tests) pod: Pod,
    pub(in crate::core::tests) address: &'static str,
}

pub(super) fn cluster_pod() -> impl Strategy<Value = ClusterPod> {
    let pods = (any::<bool>(), select(PORT_NAMES), select(ADDRESSES));
    pods.prop_map(|(web, ports, address)| ClusterPod {
        pod: Pod {
            web,
            ports,
            mode: None,
        },
        address,
    })
}

/// Objects of the cluster.
pub(in crate::core::tests) struct Cluster {
    router: Router,
    documents: BTreeMap<String, PolicyDocument>,
    /// By number: the greater, the younger.
    pods: BTreeMap<u8, ClusterPod>,
    team: Option<&'static str>,
}

fn router() -> Router {
    Router::new(Book::new(LabelFilter::default(), "default"))
}

impl Cluster {
    pub(in crate::core::tests) fn new() -> Self {
        Self {
            router: router(),
            documents: BTreeMap::new(),
            pods: BTreeMap::new(),
            team: None,
        }
    }

    /// The pod that an address is of, as objects have it: the younger of two.
    pub(in crate::core::tests) fn at(&self, address: IpAddr) -> Option<Pod> {
        let mut pods = self.pods.values().rev();
        let found = pods.find(|pod| pod.address.parse::<IpAddr>() == Ok(address));
        found.map(|pod| pod.pod)
    }

    /// Labels of a pod that an object names.
    pub(in crate::core::tests) fn labels(&self, pod: Pod) -> LabelSet {
        let team = self
            .team
            .map(|team| Label::new("k8s", "io.cilium.k8s.namespace.labels.team", team));
        let labels = pod.labels();
        LabelSet::new(labels.iter().cloned().chain(team).collect())
    }

    /// A pod comes, changes or goes.
    pub(in crate::core::tests) fn pod(
        &mut self,
        number: u8,
        pod: Option<ClusterPod>,
    ) -> Vec<Event> {
        let key = format!("Pod/default/p{number}");
        let Some(ClusterPod { pod, address }) = pod else {
            self.pods.remove(&number);
            return self.remove(&key);
        };
        self.pods.insert(number, ClusterPod { pod, address });
        let app = if pod.web { "web" } else { "db" };
        let ports = pod.ports.iter().map(|(name, protocol, port)| {
            let protocol = if *protocol == 6 { "TCP" } else { "UDP" };
            format!("{{name: {name}, containerPort: {port}, protocol: {protocol}}}")
        });
        let ports: Vec<String> = ports.collect();
        self.put(&format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: p{number}, creationTimestamp: \"2026-01-0{}T00:00:00Z\", labels: {{app: {app}}}}}\nspec: {{containers: [{{ports: [{}]}}]}}\nstatus: {{podIP: {address}}}\n",
            number + 1,
            ports.join(", ")
        ))
    }

    /// The namespace's label `team` has this value now; none = there is no namespace.
    pub(in crate::core::tests) fn team(&mut self, team: Option<&'static str>) -> Vec<Event> {
        self.team = team;
        match team {
            Some(team) => self.put(&format!(
                "apiVersion: v1\nkind: Namespace\nmetadata: {{name: default, labels: {{team: {team}}}}}\n"
            )),
            None => self.remove("Namespace/default"),
        }
    }

    fn put(&mut self, text: &str) -> Vec<Event> {
        let document = parse_documents(text, "test").remove(0).unwrap();
        let key = document.key.clone();
        self.documents.insert(key, document.clone());
        let change = PolicyChange::Document(SourceEvent::Apply(document));
        self.router.route(vec![change])
    }

    fn remove(&mut self, key: &str) -> Vec<Event> {
        self.documents.remove(key);
        let gone = SourceEvent::Delete(key.to_owned());
        self.router.route(vec![PolicyChange::Document(gone)])
    }

    /// Every object, for another run of the agent.
    pub(in crate::core::tests) fn replay(&self) -> Vec<Event> {
        let all = self.documents.values().cloned().map(SourceEvent::Apply);
        router().route(all.map(PolicyChange::Document).collect())
    }
}
