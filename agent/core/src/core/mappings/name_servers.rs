//! Which DNS servers are trusted for names, and the answers that open nothing because their server is
//! not trusted (`--tofqdns-servers`).
//!
//! An address has one identity on the node: its labels open it to every endpoint whose policy selects
//! the name, whichever pod asked. So the owner of two pods, one of them a DNS server, could open any
//! address to the pods of others. With [`NameServers::Trusted`], an answer of another server is not
//! learned: it gives no address a label, and no file and no lease keeps it. Its pod gets the answer unchanged.

use std::{collections::BTreeSet, net::SocketAddr, sync::Arc};

use dns_policy::mapping::Mapping;

use crate::{
    core::state::{
        State,
        passed_answers::{ADDRESSES, PassedAnswer},
    },
    fqdn::servers::NameServers,
    name_objects::TrustedServers,
};

impl State {
    /// Reads again which DNS servers are trusted: those of the flag, and those of the DNS Service
    /// unless the flag excludes them.
    pub(in crate::core) fn refresh_servers(&mut self) {
        let given: BTreeSet<_> = self.config.dns_servers.iter().copied().collect();
        let mut servers = match given.is_empty() || self.config.with_dns_service {
            true => self.cluster.services.dns_servers(&self.config.dns_service),
            false => TrustedServers::default(),
        };
        servers.asked.extend(&given);
        servers.backends.extend(&given);
        self.resolved.trust(Arc::new(servers));
    }

    /// Whether a trusted DNS server answers pods at this address.
    pub(in crate::core) fn is_trusted(&self, server: SocketAddr) -> bool {
        let server = SocketAddr::new(server.ip().to_canonical(), server.port());
        self.resolved.trusted_servers().contains(&server)
    }

    /// Whether an answer may give its addresses the labels of `toFQDNs` rules. Counts and remembers an
    /// answer that may not, or would not with `--tofqdns-servers=trusted`.
    pub(in crate::core) fn counts_for_names(&mut self, mapping: &Mapping) -> bool {
        if self.is_trusted(mapping.server) {
            return true;
        }
        let counts = self.config.name_servers == NameServers::Any;
        if self.policy.labels_of_name(&mapping.name).is_some() {
            self.counters.answers_untrusted += 1;
            if !counts {
                let server = mapping.server;
                let addresses = mapping.addresses.iter().take(ADDRESSES);
                self.learned.passed.note(PassedAnswer {
                    server: SocketAddr::new(server.ip().to_canonical(), server.port()),
                    name: mapping.name.clone(),
                    endpoint: mapping.endpoint.id,
                    addresses: addresses.copied().collect(),
                });
            }
        }
        counts
    }
}
