//! Connections of the pod, and what conntrack says of them.

use std::net::IpAddr;

use agent_core::core::Event;
use dns_policy::name::Fqdn;

use super::{super::Scan, Fate, World};

impl World {
    /// The pod ends its connections to this address.
    pub(super) fn close_connections(&mut self, address: &str) {
        let address: IpAddr = address.parse().unwrap();
        self.uses.retain(|(_, to)| *to != address);
    }

    /// The pod opens a connection to this address for every name that has it in an answer whose
    /// TTL runs.
    pub(super) fn open_connection(&mut self, address: &str) {
        let address: IpAddr = address.parse().unwrap();
        // The addresses of an answer that no agent confirmed may be closed: then there is no connection.
        if !self.zombies || !self.agent || !self.synced || self.troubled {
            return;
        }
        let confirmed = self.answers.iter().filter(|answer| {
            let valid = |at: dns_policy::boot_time::BootTime| {
                at.plus_secs(u64::from(answer.ttl)) > self.now
            };
            matches!(answer.fate, Fate::Released(at) if valid(at))
                && answer.addresses.contains(&address)
                && !answer.shaken
        });
        let names: Vec<&str> = confirmed.map(|answer| answer.name).collect();
        let open = names
            .into_iter()
            .filter(|name| self.node_knows(name, address));
        let open: Vec<_> = open.map(|name| (name, address)).collect();
        self.uses.extend(open);
    }

    fn node_knows(&self, name: &str, address: IpAddr) -> bool {
        let name = Fqdn::normalise(name);
        let names = self.node.core.snapshot().names;
        names.iter().any(|view| {
            view.endpoint == 1 && view.name == name.as_str() && view.address == address.to_string()
        })
    }

    pub(super) fn conntrack_scan(&mut self, scan: Scan) {
        if !self.agent {
            return;
        }
        let pod = IpAddr::from([10, 0, 0, 7]);
        let alive = self.uses.iter().map(|(_, to)| (pod, *to)).collect();
        self.event(Event::Liveness {
            gc_start: self.now,
            alive,
            complete: scan == Scan::Complete,
        });
    }

    pub(super) fn check_uses(&self) {
        if !self.agent || !self.synced {
            return;
        }
        for (name, address) in &self.uses {
            self.check_labels(name, *address, "a connection uses it");
        }
    }

    pub(in super::super) fn uses(&self) -> impl Iterator<Item = &(&'static str, IpAddr)> {
        self.uses.iter()
    }
}
