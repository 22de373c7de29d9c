//! Answers, of a server that counts and of one that does not.

use dns_policy::mapping::{Realised, Refusal};

use super::*;
use crate::{core::tests::scenario::mapping, labels::FQDN};

/// A DNS server whose answers count.
pub(super) const TRUSTED: &str = "10.9.0.53:53";
/// A server that policy allows, and that does not count.
pub(super) const UNTRUSTED: &str = "10.9.0.54:53";

impl World {
    /// Endpoint 7 receives an answer of a server.
    pub(super) fn learn(&mut self, name: &'static str, address: &'static str, server: &str) {
        let of_cluster = self.cluster.at(address.parse().unwrap()).is_some();
        let endpoints = self.node.core.snapshot().endpoints;
        let local = endpoints.iter().any(|e| e.ipv4.as_deref() == Some(address));
        let mut mapping = mapping(&self.node, name, &[address]);
        let web = endpoints.iter().find(|e| e.key == "7").unwrap().id;
        mapping.endpoint.id = EndpointId(web);
        mapping.server = server.parse().unwrap();
        let before = self.node.datapath.clone();
        let (_, result) = self.node.mapping(mapping);
        // Without policy the pod has no DNS rule: its proxy cannot report names for it.
        let has_rules = self.endpoints[&7].mode != Some(PolicyMode::Never);
        let allowed = if has_rules {
            Realised::Yes
        } else {
            Realised::No(Refusal::NotAllowed)
        };
        assert_eq!(result.realised, allowed);
        if server == UNTRUSTED {
            assert_eq!(result.lease_end, None);
            assert_eq!(self.node.datapath.ipcache, before.ipcache);
        } else if !local && !of_cluster && has_rules {
            let end = result.lease_end.unwrap_or_default().plus_secs(5);
            let address = address.parse().unwrap();
            self.pairs.insert((name, address), end);
        }
        check_way(&before, &self.node.datapath);
    }

    /// Checks that an address has a label of a name only if an answer that counts gave it.
    pub(super) fn check_no_other_names(&self) {
        let snapshot = self.node.core.snapshot();
        for address in ADDRESSES.iter().map(|text| text.parse().unwrap()) {
            let is_given = |(_, given): &(&str, IpAddr)| *given == address;
            if self.pairs.keys().any(is_given) {
                continue;
            }
            let identity = identity(&self.node.datapath, address);
            let found = snapshot.identities.iter().find(|i| i.id == identity.0);
            let mut labels = found.into_iter().flat_map(|found| &found.labels);
            let name = labels.find(|label| label.starts_with(&format!("{FQDN}:")));
            assert_eq!(name, None, "{address}");
        }
    }
}
