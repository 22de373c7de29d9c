//! One endpoint: what its source says, and what the datapath has of it.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use dns_policy::boot_time::BootTime;
use shared_maps::{
    EndpointId, IdentityId,
    lxc::{LxcValue, pack_mac},
};

use super::{policy_map::PolicyMap, spec::EndpointSpec};
use crate::{datapath::attachment::Attachment, labels::LabelSet};

/// An endpoint, and what the datapath has of it once all plans are carried out.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub id: EndpointId,
    /// The endpoint as its source describes it.
    pub spec: EndpointSpec,
    pub labels: LabelSet,
    pub identity: IdentityId,
    pub ipv4: Option<Ipv4Addr>,
    pub ipv6: Option<Ipv6Addr>,
    /// Since when it is this instance; 0 = an earlier run of the agent.
    pub since: BootTime,
    /// Addresses that it had, the latest last.
    pub former: Vec<FormerAddress>,
    /// Whether it is known only from an earlier run so far.
    pub restored: bool,
    /// Its policy map once all plans are carried out; `None` = there is no map.
    pub policy_map: Option<PolicyMap>,
    /// Identities whose entries are not as they must be.
    pub dirty_peers: DirtyPeers,
    /// Its programs once all plans are carried out.
    pub attached: Option<Attachment>,
    /// What the earlier run attached, if its programs are in force: they judge by the policy map of this run.
    pub former_programs: Option<Attachment>,
    /// Why its policy is not in force.
    pub problem: Option<String>,
    /// Why its address is not in `cilium_lxc`, or its programs are not attached.
    pub unplaced: Option<String>,
    /// Revision its policy map realises.
    pub policy_revision: u64,
}

/// An address that an endpoint had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FormerAddress {
    address: IpAddr,
    until: BootTime,
}

/// Addresses that an endpoint had and that are remembered: of its latest two changes.
const FORMER: usize = 4;

/// Entries that are not as they must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DirtyPeers {
    /// Entries of these identities; an empty set means that every entry is right.
    Some(BTreeSet<IdentityId>),
    /// Every entry of the policy map.
    All,
}

impl Default for DirtyPeers {
    fn default() -> Self {
        Self::Some(BTreeSet::new())
    }
}

impl DirtyPeers {
    /// Adds identities; nothing changes if every entry is dirty already.
    pub(crate) fn add(&mut self, more: impl IntoIterator<Item = IdentityId>) {
        if let Self::Some(set) = self {
            set.extend(more);
        }
    }

    /// Whether every entry is right.
    pub(crate) fn is_none(&self) -> bool {
        matches!(self, Self::Some(set) if set.is_empty())
    }
}

impl Endpoint {
    /// Why what its source and policy say is not in force.
    pub(crate) fn why_not(&self) -> Option<&String> {
        self.problem.as_ref().or(self.unplaced.as_ref())
    }

    /// Its addresses, with IPv4 first.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        let v4 = self.ipv4.map(IpAddr::V4).into_iter();
        v4.chain(self.ipv6.map(IpAddr::V6))
    }

    /// Replaces its addresses at the time `now`.
    pub(crate) fn set_addresses(&mut self, addresses: impl Iterator<Item = IpAddr>, now: BootTime) {
        let before: Vec<IpAddr> = self.addresses().collect();
        (self.ipv4, self.ipv6) = (None, None);
        for address in addresses {
            match address {
                IpAddr::V4(v4) => self.ipv4 = Some(v4),
                IpAddr::V6(v6) => self.ipv6 = Some(v6),
            }
        }
        let lost: Vec<IpAddr> = before
            .into_iter()
            .filter(|address| self.addresses().all(|now| now != *address))
            .collect();
        let lost = lost.into_iter();
        self.former.extend(lost.map(|address| FormerAddress {
            address,
            until: now,
        }));
        let more = self.former.len().saturating_sub(FORMER);
        self.former.drain(..more);
    }

    /// Whether it had this address at that time.
    pub(crate) fn had(&self, address: IpAddr, at: BootTime) -> bool {
        self.addresses().any(|now| now == address)
            || self
                .former
                .iter()
                .any(|former| former.address == address && at <= former.until)
    }

    /// Value of each of its entries in `cilium_lxc`.
    pub(crate) fn lxc(&self) -> LxcValue {
        LxcValue {
            ifindex: self.spec.interface.ifindex,
            lxc_id: self.id.0,
            mac: pack_mac(self.spec.interface.mac),
            node_mac: pack_mac(self.spec.interface.node_mac),
            sec_id: self.identity.0,
            ..LxcValue::default()
        }
    }

    /// What its programs need to know.
    pub(crate) fn attachment(&self) -> Attachment {
        let interface = &self.spec.interface;
        Attachment {
            endpoint: self.id,
            identity: self.identity,
            ifindex: interface.ifindex,
            ipv4: self.ipv4,
            ipv6: self.ipv6,
            mac: interface.mac,
            // A bridge delivers what is addressed to one of its ports, and a port's address does
            // not change when other ports are added and removed, unlike the bridge's own address.
            gateway_mac: interface.on_bridge.then_some(interface.node_mac),
            link: interface.link.clone(),
        }
    }

    /// Whether the earlier run attached just what this run would.
    pub(crate) fn is_judged_by_former_programs(&self) -> bool {
        self.attached.is_none() && self.former_programs.as_ref() == Some(&self.attachment())
    }

    /// Number of entries in its policy map.
    pub(crate) fn policy_entries(&self) -> usize {
        self.policy_map.as_ref().map_or(0, PolicyMap::len)
    }
}
