//! A node with its table, and short ways to write objects.

use std::sync::Arc;

use serde_json::{Value, json};

use super::judge::{self, Packet};
use crate::{
    cache::{Key, Object},
    contiv::PolicyId,
    name::PortName,
    pipeline::{Commit, Pipeline},
    pod::{Namespace, Pod, PodId},
    policy::Protocol,
    read::{self, API_VERSION, KIND},
    render::{change::Change, nft::Limits, ruleset::Table},
};

/// Name of the node.
pub(super) const HERE: &str = "here";

/// A node that checks at each commit that the steps are the difference between the two tables.
pub(super) struct Lab {
    pub(super) pipeline: Pipeline,
    pub(super) table: Table,
}

impl Lab {
    pub(super) fn new() -> Self {
        Self::within(Limits::default())
    }

    /// A node without objects whose table has these limits.
    pub(super) fn within(limits: Limits) -> Self {
        let mut pipeline = Pipeline::new(HERE, limits);
        let commit = pipeline.commit().unwrap();
        assert!(commit.change.is_empty());
        let table = pipeline.table();
        Self { pipeline, table }
    }

    /// A node with these objects.
    pub(super) fn with(objects: impl IntoIterator<Item = Object>) -> Self {
        let mut lab = Self::new();
        lab.put(objects);
        lab
    }

    /// Puts objects and commits.
    pub(super) fn put(&mut self, objects: impl IntoIterator<Item = Object>) -> Commit {
        for object in objects {
            self.pipeline.put(object);
        }
        self.commit()
    }

    /// Removes an object and commits.
    pub(super) fn remove(&mut self, key: &Key) -> Commit {
        self.pipeline.remove(key);
        self.commit()
    }

    pub(super) fn commit(&mut self) -> Commit {
        self.pipeline.reconsider();
        let commit = self.pipeline.commit().unwrap();
        let now = self.pipeline.table();
        let smallest = Change::between(&self.table, &now);
        assert_eq!(sorted(&commit.change), sorted(&smallest));
        self.table = now;
        commit
    }

    /// Whether a packet passes. `to` is an address and a port, as in `10.0.0.1 80/TCP`; without a
    /// port, it is a ping.
    pub(super) fn passes(&self, from: &str, to: &str) -> bool {
        let (destination, port) = to.split_once(' ').unwrap_or((to, ""));
        let port = port.split_once('/').map(|(number, protocol)| {
            (Protocol::parse(protocol).unwrap(), number.parse().unwrap())
        });
        let packet = Packet {
            interface: 1,
            source: from.parse().unwrap(),
            destination: destination.parse().unwrap(),
            ports: port,
        };
        judge::passes(&self.table, &packet)
    }
}

fn sorted(change: &Change) -> Vec<String> {
    let steps = change.steps.iter();
    let mut steps: Vec<String> = steps.map(|step| format!("{step:?}")).collect();
    steps.sort();
    steps
}

/// A pod of this node, unless [`elsewhere`] moves it.
pub(super) fn pod(id: &str, labels: &[(&str, &str)], addresses: &[&str]) -> Pod {
    let labels = labels.iter();
    Pod {
        id: PodId::parse(id).unwrap(),
        labels: labels
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect(),
        node: Some(HERE.into()),
        addresses: addresses.iter().map(|one| one.parse().unwrap()).collect(),
        created: None,
        ports: [].into(),
    }
}

/// The same pod with named ports, as in `http=80/TCP`.
pub(super) fn serving(pod: Pod, ports: &[&str]) -> Pod {
    let ports = ports.iter().map(|port| {
        let (name, number) = port.split_once('=').unwrap();
        let (number, protocol) = number.split_once('/').unwrap();
        let key = (
            PortName::new(name).unwrap(),
            Protocol::parse(protocol).unwrap(),
        );
        (key, number.parse().unwrap())
    });
    let ports = ports.collect();
    Pod { ports, ..pod }
}

/// The same pod on another node.
pub(super) fn elsewhere(pod: Pod) -> Pod {
    let node = Some("elsewhere".into());
    Pod { node, ..pod }
}

pub(super) fn object(pod: Pod) -> Object {
    Object::Pod(Arc::new(pod))
}

pub(super) fn namespace(name: &str, labels: &[(&str, &str)]) -> Object {
    let name_label = ("kubernetes.io/metadata.name", name);
    let labels = labels.iter().chain([&name_label]);
    Object::Namespace(Arc::new(Namespace {
        name: name.into(),
        labels: labels
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect(),
    }))
}

pub(super) fn policy(id: &str, spec: &Value) -> Object {
    let (namespace, name) = id.split_once('/').unwrap();
    let document = json!({
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"namespace": namespace, "name": name},
        "spec": spec,
    });
    Object::Policy(Arc::new(read::read(&document).unwrap()))
}

pub(super) fn policy_key(id: &str) -> Key {
    let (namespace, name) = id.split_once('/').unwrap();
    Key::Policy(PolicyId {
        namespace: namespace.into(),
        name: name.into(),
    })
}

pub(super) fn pod_key(id: &str) -> Key {
    Key::Pod(PodId::parse(id).unwrap())
}
