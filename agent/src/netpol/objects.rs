//! Documents as objects of the pipeline of NetworkPolicies.

use std::sync::Arc;

use agent_core::policy::{
    cluster::{namespace::Namespace, pod::Pod},
    document::Body,
};
use netpol::{
    cache::{Key, Object},
    contiv::PolicyId,
    pod::{self, PodId},
    policy::Protocol,
};

/// The object of a document; `None` if its kind is not one of the pipeline's.
pub fn object(body: &Body) -> Option<Object> {
    match body {
        Body::Pod(pod) => Some(Object::Pod(Arc::new(pod_of(pod)))),
        Body::Namespace(namespace) => Some(Object::Namespace(Arc::new(namespace_of(namespace)))),
        Body::NetworkPolicy { policy, .. } => Some(Object::Policy(Arc::clone(policy))),
        _ => None,
    }
}

/// The uid of a document's pod.
pub(super) fn uid(body: &Body) -> Option<Arc<str>> {
    match body {
        Body::Pod(pod) => pod.uid.clone(),
        _ => None,
    }
}

/// The object of a document's key; `None` if its kind is not one of the pipeline's.
pub(super) fn key(key: &str) -> Option<Key> {
    let (kind, rest) = key.split_once('/')?;
    match (kind, rest.split_once('/')) {
        ("Namespace", None) => Some(Key::Namespace(rest.into())),
        ("Pod", Some((namespace, name))) => Some(Key::Pod(PodId::new(namespace, name))),
        ("NetworkPolicy", Some((namespace, name))) => Some(Key::Policy(PolicyId {
            namespace: namespace.into(),
            name: name.into(),
        })),
        _ => None,
    }
}

fn pod_of(pod: &Pod) -> pod::Pod {
    let ports = pod.ports.iter().filter_map(|(name, port)| {
        let protocol = Protocol::from_number(port.protocol)?;
        Some(((name.clone(), protocol), port.port))
    });
    pod::Pod {
        id: PodId::new(&pod.namespace, &pod.name),
        labels: pod.labels.clone(),
        node: pod.node.as_deref().map(Arc::from),
        addresses: pod.addresses.clone(),
        created: pod.created,
        ports: ports.collect(),
    }
}

fn namespace_of(namespace: &Namespace) -> pod::Namespace {
    pod::Namespace {
        name: namespace.name.as_str().into(),
        labels: namespace.labels.clone(),
    }
}

#[cfg(test)]
mod tests {
    use agent_core::policy::parse::parse_documents;

    use super::*;

    #[test]
    fn each_object_has_the_key_of_its_document() {
        let documents = "
apiVersion: v1
kind: Namespace
metadata: {name: shop}
---
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, labels: {app: web, pod-template-hash: x}}
spec: {nodeName: n1, containers: [{ports: [{name: dns, containerPort: 53, protocol: UDP}]}]}
status: {podIP: 10.1.0.1}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web, namespace: shop}
spec: {podSelector: {}}
";
        for document in parse_documents(documents, "test") {
            let document = document.unwrap();
            let object = object(&document.body).unwrap();
            assert_eq!(Some(object.key()), key(&document.key), "{}", document.key);
            if let Object::Pod(pod) = object {
                assert_eq!(pod.labels.len(), 2);
                assert_eq!(pod.node.as_deref(), Some("n1"));
                let (name, number) = pod.ports.first_key_value().unwrap();
                assert_eq!((name.1, *number), (Protocol::Udp, 53));
            }
        }
        assert_eq!(key("CiliumNetworkPolicy/shop/web"), None);
    }
}
