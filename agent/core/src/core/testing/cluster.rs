//! Pods of the cluster and their namespace, as the test knows them.

use std::{collections::BTreeMap, net::IpAddr};

use super::pod::{DEFAULT, Pod};
use crate::{
    core::{Event, router::Router},
    kubernetes::{book::Book, labels::LabelFilter},
    labels::{Label, LabelSet},
    policy::{document::PolicyDocument, parse::parse_documents, source::PolicyChange},
    source_event::SourceEvent,
};

/// Address of the Service. If there is no Service, it is an address outside the cluster, within blocks that policies
/// name.
pub const VIP: &str = "1.1.9.9";

/// A port of the Service: protocol, port, port of the backends, and their addresses.
pub type ServicePort = (u8, u16, u16, &'static [&'static str]);

/// A pod that an object of the cluster names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterPod {
    pub pod: Pod,
    pub address: &'static str,
}

/// Objects of the cluster.
pub struct Cluster {
    router: Router,
    documents: BTreeMap<String, PolicyDocument>,
    /// By number: the greater, the younger.
    pods: BTreeMap<u8, ClusterPod>,
    team: Option<&'static str>,
    service: Option<&'static [ServicePort]>,
}

fn router() -> Router {
    Router::new(Book::new(LabelFilter::default(), "default"))
}

impl Cluster {
    pub fn new() -> Self {
        Self {
            router: router(),
            documents: BTreeMap::new(),
            pods: BTreeMap::new(),
            team: None,
            service: None,
        }
    }

    /// The pod that has an address according to the objects: of two pods, the younger one.
    pub fn at(&self, address: IpAddr) -> Option<Pod> {
        let mut pods = self.pods.values().rev();
        let found = pods.find(|pod| pod.address.parse::<IpAddr>() == Ok(address));
        found.map(|pod| pod.pod)
    }

    /// Labels of a pod that an object names.
    pub fn labels(&self, pod: Pod) -> LabelSet {
        let team = self
            .team_of(pod)
            .map(|team| Label::new("k8s", "io.cilium.k8s.namespace.labels.team", team));
        let labels = pod.labels();
        LabelSet::new(labels.iter().cloned().chain(team).collect())
    }

    /// The label `team` of a pod's namespace; `None` while no document describes the namespace.
    pub fn team_of(&self, pod: Pod) -> Option<&'static str> {
        self.team.filter(|_| pod.namespace == DEFAULT)
    }

    /// Adds, changes or removes a pod. A pod in another namespace is another object.
    pub fn pod(&mut self, number: u8, pod: Option<ClusterPod>) -> Vec<Event> {
        let before = self.pods.remove(&number).map(|before| before.pod.namespace);
        let is_another = |before: &&str| pod.is_none_or(|new| new.pod.namespace != *before);
        let mut events = Vec::new();
        if let Some(namespace) = before.filter(is_another) {
            events = self.remove(&format!("Pod/{namespace}/p{number}"));
        }
        let Some(ClusterPod { pod, address }) = pod else {
            return events;
        };
        self.pods.insert(number, ClusterPod { pod, address });
        let (app, namespace) = (pod.app(), pod.namespace);
        let ports = pod.ports.iter().map(|(name, protocol, port)| {
            let protocol = if *protocol == 6 { "TCP" } else { "UDP" };
            format!("{{name: {name}, containerPort: {port}, protocol: {protocol}}}")
        });
        let ports: Vec<String> = ports.collect();
        events.extend(self.put(&format!(
            r#"
apiVersion: v1
kind: Pod
metadata:
  name: p{number}
  namespace: {namespace}
  creationTimestamp: "2026-01-0{}T00:00:00Z"
  labels: {{app: {app}}}
spec: {{containers: [{{ports: [{}]}}]}}
status: {{podIP: {address}}}
"#,
            number + 1,
            ports.join(", ")
        )));
        events
    }

    /// Sets the namespace's label `team`; `None` removes the namespace.
    pub fn team(&mut self, team: Option<&'static str>) -> Vec<Event> {
        self.team = team;
        match team {
            Some(team) => self.put(&format!(
                "apiVersion: v1\nkind: Namespace\nmetadata: {{name: default, labels: {{team: {team}}}}}\n"
            )),
            None => self.remove("Namespace/default"),
        }
    }

    /// Gives the Service these ports; `None` removes the Service.
    pub fn serve(&mut self, ports: Option<&'static [ServicePort]>) -> Vec<Event> {
        let mut changes = Vec::new();
        let is_slice = |key: &&String| key.starts_with("EndpointSlice/");
        let mut gone: Vec<String> = self.documents.keys().filter(is_slice).cloned().collect();
        self.service = ports;
        if ports.is_none() {
            gone.push("Service/default/s".to_owned());
        }
        for key in gone {
            self.documents.remove(&key);
            changes.push(PolicyChange::Document(SourceEvent::Delete(key)));
        }
        let Some(ports) = ports else {
            return self.router.route(changes);
        };
        let mut texts = Vec::new();
        let mut of_service = Vec::new();
        for (n, (protocol, port, to, backends)) in ports.iter().enumerate() {
            let protocol = if *protocol == 6 { "TCP" } else { "UDP" };
            of_service.push(format!(
                "{{name: p{n}, port: {port}, protocol: {protocol}}}"
            ));
            let backends = backends.iter().map(|at| format!("{{addresses: [{at}]}}"));
            let backends: Vec<String> = backends.collect();
            let text = format!(
                r"
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: s-{n}, labels: {{kubernetes.io/service-name: s}}}}
addressType: IPv4
endpoints: [{}]
ports: [{{name: p{n}, port: {to}, protocol: {protocol}}}]
",
                backends.join(", ")
            );
            texts.push(text);
        }
        let ports = of_service.join(", ");
        let service = format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: s}}\nspec: {{clusterIP: {VIP}, ports: [{ports}]}}\n"
        );
        texts.push(service);
        for text in texts {
            let document = parse_documents(&text, "test").remove(0).unwrap();
            self.documents
                .insert(document.key.clone(), document.clone());
            changes.push(PolicyChange::Document(SourceEvent::Apply(document)));
        }
        self.router.route(changes)
    }

    /// Ports of the Service at an address.
    pub fn service_at(&self, address: IpAddr) -> Option<&'static [ServicePort]> {
        self.service
            .filter(|_| VIP.parse::<IpAddr>() == Ok(address))
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
    pub fn replay(&self) -> Vec<Event> {
        let all = self.documents.values().cloned().map(SourceEvent::Apply);
        router().route(all.map(PolicyChange::Document).collect())
    }
}
