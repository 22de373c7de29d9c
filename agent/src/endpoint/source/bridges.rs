//! Documents about a bridge: each of its ports that leads to another namespace is an endpoint, unless another
//! document is about it.

use std::collections::{BTreeMap, BTreeSet};

use super::{EndpointDocument, State, gated::Until};
use crate::endpoint::discover::{DiscoverError, Netns, bridge, leading_to};

const PREFIX: &str = "port/";

/// Key of the endpoint at a port: `port/dir/<file>/<interface>`.
fn key(document: &str, port: &str) -> String {
    format!("{PREFIX}{document}/{port}")
}

/// Whether an endpoint is a port that a document about a bridge covers.
pub(super) fn is_key(key: &str) -> bool {
    key.starts_with(PREFIX)
}

impl State {
    /// If a document is about a bridge, makes a document for each port of the bridge. Removes the documents of ports
    /// that are gone or that another document is about. If the ports cannot be listed, the documents of ports stay as
    /// they are.
    pub(super) fn expand_bridges(&mut self) {
        let documents = self.documents.iter();
        let bridges: Vec<(String, EndpointDocument)> = documents
            .filter(|(_, document)| document.bridge.is_some())
            .map(|(key, document)| (key.clone(), document.clone()))
            .collect();
        let has_ports = self
            .documents
            .keys()
            .chain(self.found.keys())
            .any(|key| is_key(key));
        if bridges.is_empty() && !has_ports {
            return;
        }
        let ports = match bridge::ports_by_bridge() {
            Ok(ports) => ports,
            Err(error) => {
                tracing::debug!(%error, "cannot list the ports of bridges");
                self.ports_unknown = true;
                return;
            }
        };
        self.ports_unknown = false;
        let mut wanted = BTreeMap::new();
        for (document_key, document) in bridges {
            let of_bridge = document
                .bridge
                .as_ref()
                .and_then(|bridge| ports.get(bridge));
            for (index, port) in of_bridge.into_iter().flatten() {
                if !self.is_claimed(*index, port) {
                    let document = EndpointDocument {
                        bridge: None,
                        interface: Some(port.clone()),
                        ..document.clone()
                    };
                    wanted.insert(key(&document_key, port), (*index, document));
                }
            }
        }
        let documents = self.documents.keys();
        let gone = documents.filter(|key| is_key(key) && !wanted.contains_key(*key));
        for key in gone.cloned().collect::<Vec<_>>() {
            self.documents.remove(&key);
            self.marks.stale.remove(&key);
            self.problems.unresolved.remove(&key);
            self.problems.retries.forget(&key);
        }
        for (key, (index, document)) in wanted {
            // Many ports may appear at the same time. All of them are closed before the agent looks at the first one.
            if !self.documents.contains_key(&key) && !self.listing.starting {
                self.gated.close(&key, index, Until::Found);
            }
            if self.documents.get(&key) != Some(&document) {
                self.documents.insert(key.clone(), document);
                self.marks.stale.insert(key);
            }
        }
    }

    /// Whether a document that is not about a bridge is about an interface.
    fn is_claimed(&self, index: u32, interface: &str) -> bool {
        let mut documents = self.documents.iter().filter(|(key, _)| !is_key(key));
        let mut found = self.found.iter().filter(|(key, _)| !is_key(key));
        documents.any(|(_, document)| document.interface.as_deref() == Some(interface))
            || found.any(|(key, found)| {
                found.spec.interface.ifindex == index && !found.superseded && self.is_wanted(key)
            })
    }

    /// Keys of the endpoints that are ports of bridges and lead to the interface `ifname` of a namespace.
    pub(super) fn ports_to(
        &self,
        netns: &Netns,
        ifname: &str,
    ) -> Result<Vec<String>, DiscoverError> {
        if !self.documents.keys().any(|key| is_key(key)) {
            return Ok(Vec::new());
        }
        let leading = leading_to(netns, ifname)?;
        let ports = bridge::ports_by_bridge()?;
        let names: BTreeSet<&String> = ports
            .values()
            .flatten()
            .filter(|(index, _)| leading.contains(index))
            .map(|(_, name)| name)
            .collect();
        let documents = self.documents.iter().filter(|(key, document)| {
            let interface = document.interface.as_ref();
            is_key(key) && interface.is_some_and(|name| names.contains(name))
        });
        Ok(documents.map(|(key, _)| key.clone()).collect())
    }
}
