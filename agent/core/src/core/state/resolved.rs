//! Names of EgressFirewalls, and the addresses in DNSNameResolver objects for them.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, SystemTime},
};

use dns_policy::{boot_time::BootTime, mapping::Mapping, name::Fqdn};

use crate::{
    fqdn::{
        cache::Limits,
        firewall_names::{FirewallNames, Openness},
        resolved::{ResolvedPairs, Room},
    },
    name_objects::{Observation, ResolvedName, TrustedServers},
    selector::selector::DnsNameSelector,
};

/// The store's objects keep at most one pair per this many entries of the ipcache.
const SHARE: usize = 4;

/// How many answers of servers that do not count are remembered; the oldest are forgotten.
const MAX_UNTRUSTED: usize = 64;

/// The names that EgressFirewalls use, with their pairs, objects and servers.
#[derive(Debug)]
pub(crate) struct ResolvedNames {
    pub(crate) used: FirewallNames,
    /// Selectors that were added or removed since addresses were labelled.
    pub(crate) changed: Vec<DnsNameSelector>,
    pub(crate) pairs: ResolvedPairs,
    pub(crate) objects: BTreeMap<String, Object>,
    /// Objects beyond [`MAX_OBJECTS`], which are not read. At most [`MAX_OBJECTS`] of them are noted.
    pub(crate) left_out: BTreeSet<String>,
    /// Objects that a listing under way has named.
    pub(crate) listed: Option<BTreeSet<String>>,
    pub(crate) servers: Arc<TrustedServers>,
    /// The latest servers that do not count, with the names that they answered, for `why`.
    untrusted: VecDeque<(SocketAddr, Fqdn)>,
    pub(crate) observed: Vec<Observation>,
    /// Whether names or servers changed since they were last published.
    pub(crate) is_unpublished: bool,
}

#[derive(Debug)]
pub(crate) struct Object {
    pub(crate) is: ResolvedName,
    /// Addresses that keep their label because of this object.
    pub(crate) held: BTreeSet<IpAddr>,
}

/// What an answer means for EgressFirewalls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Relevance {
    /// No firewall uses the name.
    Unused,
    /// No firewall uses the name, and the answer comes from a server that counts.
    UnusedAndTrusted,
    /// The answer comes from a server that does not count.
    Untrusted,
    /// A firewall uses the name, and the server counts: the addresses get labels.
    Counts,
}

impl Relevance {
    pub(crate) const fn is_trusted(self) -> bool {
        matches!(self, Self::UnusedAndTrusted | Self::Counts)
    }
}

impl ResolvedNames {
    pub(crate) fn new(limits: Limits, ipcache_max: usize) -> Self {
        Self {
            used: FirewallNames::default(),
            changed: Vec::new(),
            pairs: ResolvedPairs::new(limits, ipcache_max / SHARE),
            objects: BTreeMap::new(),
            left_out: BTreeSet::new(),
            listed: None,
            untrusted: VecDeque::new(),
            servers: Arc::default(),
            observed: Vec::new(),
            is_unpublished: false,
        }
    }

    pub(crate) fn used(&self) -> &FirewallNames {
        &self.used
    }

    pub(crate) fn next_deadline(&self) -> Option<BootTime> {
        self.pairs.next_deadline()
    }

    /// Whether an address has labels of a name.
    pub(crate) fn has(&self, name: &Fqdn, address: IpAddr) -> bool {
        self.pairs.has(name, address)
    }

    /// How much room there is for an address of an answer.
    pub(crate) fn room(&self, name: &Fqdn, address: IpAddr, openness: Openness) -> Room {
        self.pairs.room(name, address, openness)
    }

    pub(crate) fn note_untrusted(&mut self, server: SocketAddr, name: &Fqdn) {
        self.untrusted
            .retain(|(known, of)| *known != server || of != name);
        if self.untrusted.len() >= MAX_UNTRUSTED {
            self.untrusted.pop_front();
        }
        self.untrusted.push_back((server, name.clone()));
    }

    /// Servers that do not count and lately answered a name, the latest first.
    pub(crate) fn untrusted_servers(&self, name: &Fqdn) -> Vec<SocketAddr> {
        let of_name = self.untrusted.iter().rev().filter(|(_, of)| of == name);
        of_name.map(|(server, _)| *server).collect()
    }

    pub(crate) fn trusted_servers(&self) -> &BTreeSet<SocketAddr> {
        &self.servers.asked
    }

    /// Replaces the servers that count.
    pub(crate) fn trust(&mut self, servers: Arc<TrustedServers>) {
        if self.servers != servers {
            self.servers = servers;
            self.is_unpublished = true;
        }
    }

    /// Notes the answer's addresses for the resolver, those of each family together.
    pub(crate) fn observe(&mut self, mapping: &Mapping, ttl: u32, at: SystemTime) {
        let (v4, v6): (Vec<IpAddr>, Vec<IpAddr>) = mapping
            .addresses
            .iter()
            .partition(|address| address.is_ipv4());
        for addresses in [v4, v6].into_iter().filter(|some| !some.is_empty()) {
            self.observed.push(Observation {
                name: mapping.name.clone(),
                addresses,
                ttl: Duration::from_secs(u64::from(ttl)),
                at,
            });
        }
    }
}
