//! Connections of the pod, and what conntrack says of them.

use std::net::IpAddr;

use super::{ADDRESSES, Fate, World};
use crate::core::Event;
use crate::core::tests::model::NAMES;
use dns_policy::name::Fqdn;

impl World {
    /// The pod opens a connection to an address of every name in an answer to it whose TTL
    /// runs, or ends those to this address.
    pub(super) fn connection(&mut self, address: usize, on: bool) {
        let Some(octets) = ADDRESSES.get(address) else {
            return;
        };
        let address = IpAddr::from(*octets);
        if !on {
            self.uses.retain(|(_, to)| *to != address);
            return;
        }
        // Told while no agent confirmed it, it may not be open: no connection comes about.
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
        let names: Vec<usize> = confirmed.map(|answer| answer.name).collect();
        let open = names
            .into_iter()
            .filter(|name| self.node_knows(*name, address));
        let open: Vec<_> = open.map(|name| (name, address)).collect();
        self.uses.extend(open);
    }

    fn node_knows(&self, name: usize, address: IpAddr) -> bool {
        let name = Fqdn::normalise(NAMES[name]);
        let names = self.node.core.snapshot().names;
        names.iter().any(|view| {
            view.endpoint == 1 && view.name == name.as_str() && view.address == address.to_string()
        })
    }

    pub(super) fn conntrack_scan(&mut self, complete: bool) {
        if !self.agent {
            return;
        }
        let pod = IpAddr::from([10, 0, 0, 7]);
        let alive = self.uses.iter().map(|(_, to)| (pod, *to)).collect();
        self.event(Event::Liveness {
            gc_start: self.now,
            alive,
            complete,
        });
    }

    pub(super) fn check_uses(&self) {
        if !self.agent || !self.synced {
            return;
        }
        for (name, address) in &self.uses {
            self.check_labels(*name, *address, "a connection uses it");
        }
    }

    pub(in super::super) fn uses(&self) -> impl Iterator<Item = &(usize, IpAddr)> {
        self.uses.iter()
    }
}
