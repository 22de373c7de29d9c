//! Looks at endpoints again whose interface is still there: a pod changes its interfaces without an
//! event on the node.

use std::{collections::BTreeMap, ops::Bound};

use super::{Deliver, EndpointBook, Found, State};
use crate::endpoint::spec::EndpointSpec;

/// Interfaces of pods that are not under policy.
#[derive(Debug, Default)]
pub(super) struct Looked {
    /// The endpoint that was looked at last.
    last: String,
    /// Names of interfaces that lead to another namespace and are no endpoints, by the key of the
    /// pod's endpoint.
    further: BTreeMap<String, Vec<String>>,
}

impl EndpointBook {
    /// Pods with interfaces that are not under policy, and what to do.
    pub(crate) fn further_interfaces(&self) -> Vec<String> {
        let state = self.state.lock();
        let further = state.looked.further.iter();
        let problems = further.filter_map(|(key, names)| {
            let document = state.documents.get(key)?;
            let pod = document.pod.as_deref().unwrap_or_default();
            Some(format!(
                "endpoint {key}: pod {pod} has further interfaces to other namespaces ({}), and only \
                 {} is under policy: remove the plugin or program that makes them",
                names.join(", "),
                document.ifname
            ))
        });
        problems.collect()
    }
}

impl State {
    /// Looks at one endpoint, the next at each call: takes the MAC and the link-local addresses that
    /// a routed pod gave itself after it was found, and notes further interfaces of a pod.
    pub(super) fn look_at_next(&mut self, deliver: &Deliver) {
        let wanted = |(key, found): &(&String, &Found)| {
            let document = self.documents.get(*key);
            let is_pod = document.is_some_and(|document| document.pod.is_some());
            (is_pod || !found.spec.on_bridge) && found.is_settled(&self.interfaces, document)
        };
        let after = (Bound::Excluded(self.looked.last.as_str()), Bound::Unbounded);
        let mut next = self.found.range::<str, _>(after).filter(wanted);
        let Some((key, found)) = next.next() else {
            self.looked.last.clear();
            let found = &self.found;
            self.looked.further.retain(|key, _| found.contains_key(key));
            return;
        };
        let (key, before, namespace) = (key.clone(), found.spec.clone(), found.namespace);
        self.looked.last.clone_from(&key);
        let Some(document) = self.documents.get(&key) else {
            return;
        };
        // An endpoint that cannot be found again stays as it is.
        let Ok((now, others)) = document.look(&key, Some(&before)) else {
            return;
        };
        if document.pod.is_some() {
            self.note_further(&key, others);
        }
        let changed = now.link != before.link || now.mac != before.mac;
        if !before.on_bridge && now.ifindex == before.ifindex && changed {
            let (link, mac) = (now.link, now.mac);
            let spec = EndpointSpec {
                link,
                mac,
                ..before
            };
            self.put(&key, spec, namespace, deliver);
        }
    }

    fn note_further(&mut self, key: &str, mut names: Vec<String>) {
        let namespace = self.found.get(key).and_then(|found| found.namespace);
        names.retain(|name| {
            let mut found = self.found.iter();
            let is_endpoint = found.any(|(other, found)| {
                let document = self.documents.get(other);
                namespace.is_some()
                    && found.namespace == namespace
                    && document.is_some_and(|document| document.ifname == *name)
            });
            !is_endpoint
        });
        let before = self.looked.further.get(key);
        if names.is_empty() {
            self.looked.further.remove(key);
        } else if before != Some(&names) {
            let interfaces = names.join(", ");
            tracing::warn!(
                endpoint = key,
                interfaces,
                "the pod has interfaces that are not under policy"
            );
            self.looked.further.insert(key.to_owned(), names);
        }
    }
}
