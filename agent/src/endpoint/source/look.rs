//! Looks again at endpoints whose interface is still there: a pod can change its interfaces without an event on the
//! node.

use std::{collections::BTreeMap, net::IpAddr, ops::Bound};

use daemon::lookup::Lookup;

use super::{
    Deliver, EndpointBook, EndpointDocument, Found, State, cli, cni, document,
    interfaces::{Interfaces, namespace_id},
};

/// Interfaces and addresses of pods that are not under policy.
#[derive(Debug, Default)]
pub(super) struct Looked {
    /// The endpoint that was looked at last.
    last: String,
    /// Names of interfaces that lead to another namespace and are no endpoints, by the key of the
    /// pod's endpoint.
    further: BTreeMap<String, Vec<String>>,
    /// Addresses that the interfaces of pods on bridges have instead of the addresses of their endpoints, by the key of
    /// the endpoint.
    foreign: BTreeMap<String, Vec<IpAddr>>,
}

impl EndpointBook {
    /// Pods with interfaces that are not under policy, and what to do.
    pub(crate) fn further_interfaces(&self) -> Vec<String> {
        let state = self.state.lock();
        let further = state.looked.further.iter();
        let problems = further.filter_map(|(key, names)| {
            let document = state.documents.get(key)?;
            let (kind, name) = match (&document.pod, &document.container) {
                (None, Some(container)) => ("container", container.to_string()),
                (pod, _) => ("pod", pod.clone().unwrap_or_default()),
            };
            Some(format!(
                "endpoint {key}: {kind} {name} has further interfaces to other namespaces ({}), and only \
                 {} is under policy: remove the plugin or program that makes them",
                names.join(", "),
                document.ifname
            ))
        });
        problems.collect()
    }

    /// Endpoints on bridges whose interfaces have other addresses now, and what to do.
    pub(crate) fn foreign_addresses(&self) -> Vec<String> {
        let state = self.state.lock();
        let problems = state.looked.foreign.iter().filter_map(|(key, foreign)| {
            let document = state.documents.get(key)?;
            let own = &state.found.get(key)?.spec.addresses;
            let remedy = match (document.addresses.is_empty(), cli::is_key(key), cni::is_key(key)) {
                (_, _, true) => "start the pod again".to_owned(),
                (true, true, _) => "add it again (`holdfast-agent endpoint add`)".to_owned(),
                (true, false, _) => "write its document again without a change (`touch`)".to_owned(),
                (false, true, _) => {
                    "add it again with the new --address (`holdfast-agent endpoint add`)".to_owned()
                }
                (false, false, _) => "correct `addresses` in its document".to_owned(),
            };
            Some(format!(
                "endpoint {key}: interface {} of the pod has {}, which is not the endpoint's address ({}): \
                 on a bridge such packets are dropped. If the pod shall have it, {remedy}",
                document.ifname,
                listed(foreign),
                listed(own)
            ))
        });
        problems.collect()
    }
}

fn listed(addresses: &[IpAddr]) -> String {
    let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    addresses.join(", ")
}

/// Addresses that a pod's interface has instead of the endpoint's: all of a family in which the endpoint has no
/// address, or has only addresses that the interface has lost.
fn foreign(own: &[IpAddr], present: &[IpAddr]) -> Vec<IpAddr> {
    let is_used = |address: &&IpAddr| {
        let mut of_family = own.iter().filter(|own| own.is_ipv4() == address.is_ipv4());
        of_family.any(|own| present.contains(own))
    };
    let foreign = present.iter().filter(|address| !is_used(address));
    foreign.copied().collect()
}

impl State {
    /// Looks at one endpoint at each call, in turn. If it is a routed pod, accepts the MAC and the link-local addresses
    /// that the pod gave itself after it was found. Also notes further interfaces of the pod, and on a bridge the
    /// addresses that are not the endpoint's.
    pub(super) fn look_at_next(&mut self, deliver: &Deliver) {
        let wanted = |(key, found): &(&String, &Found)| {
            found.is_settled(&self.interfaces, self.documents.get(*key))
        };
        let after = (Bound::Excluded(self.looked.last.as_str()), Bound::Unbounded);
        let mut next = self.found.range::<str, _>(after).filter(wanted);
        let Some((key, found)) = next.next() else {
            self.looked.last.clear();
            let found = &self.found;
            self.looked.further.retain(|key, _| found.contains_key(key));
            self.looked.foreign.retain(|key, _| found.contains_key(key));
            return;
        };
        let (key, before, namespace) = (key.clone(), found.spec.clone(), found.namespace);
        self.looked.last.clone_from(&key);
        let Some(document) = self.documents.get(&key) else {
            return;
        };
        // If the endpoint cannot be found again, it stays as it is.
        let known = document::Addresses::Known;
        let Ok(looked) = document.look(&key, Some(&before), known) else {
            return;
        };
        let now = looked.spec;
        if document.pod.is_some() || document.container.is_some() {
            self.note_further(&key, looked.others);
        }
        if before.interface.on_bridge {
            let foreign = foreign(&before.addresses, &looked.present);
            self.note_foreign(&key, foreign);
        }
        let (was, now) = (&before.interface, now.interface);
        let changed = now.link != was.link || now.mac != was.mac;
        if !was.on_bridge && now.ifindex == was.ifindex && changed {
            let mut spec = before;
            spec.interface.link = now.link;
            spec.interface.mac = now.mac;
            self.put(&key, spec, namespace, deliver);
        }
    }

    fn note_foreign(&mut self, key: &str, foreign: Vec<IpAddr>) {
        if foreign.is_empty() {
            self.looked.foreign.remove(key);
        } else if self.looked.foreign.get(key) != Some(&foreign) {
            tracing::warn!(
                endpoint = key,
                addresses = listed(&foreign),
                "the pod has addresses that are not the endpoint's"
            );
            self.looked.foreign.insert(key.to_owned(), foreign);
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

impl Found {
    /// False if something shows that the interface is gone or renamed, or that the document names another namespace
    /// than the one where the endpoint was found.
    pub(super) fn is_settled(
        &self,
        interfaces: &Interfaces,
        document: Option<&EndpointDocument>,
    ) -> bool {
        let netns = document.and_then(|document| document.namespace().ok());
        let now = netns.map(|netns| namespace_id(&netns));
        let replaced = matches!(
            (self.namespace, now),
            (Some(then), Some(Lookup::Found(now))) if then != now
        );
        let in_place = match interfaces.name(self.spec.interface.ifindex) {
            Lookup::Found(name) => name == self.spec.interface.ifname,
            Lookup::Gone => false,
            Lookup::Unknown(_) => true,
        };
        in_place && !replaced && !self.superseded
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_beside_the_endpoints_own_is_not_foreign() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let (own, other, v6) = (ip("10.0.0.7"), ip("10.0.0.8"), ip("fd00::7"));
        assert!(foreign(&[own], &[own, other]).is_empty());
        assert_eq!(foreign(&[own], &[other]), [other]);
        assert_eq!(foreign(&[own], &[own, v6]), [v6]);
        assert!(foreign(&[own, v6], &[]).is_empty());
    }
}
