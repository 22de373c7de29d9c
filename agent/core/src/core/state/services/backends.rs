//! Backends of Services, including pods that were just removed.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use dns_policy::boot_time::BootTime;
use shared_maps::IdentityId;

use crate::{
    kubernetes::service_at::{BackendAt, Family, ServiceAt},
    policy::compute::service::{Backend, Service, ServicePort},
};

/// How long a backend whose pod is unknown is left out, seconds.
pub(crate) const SKEW: u64 = 30;

/// After this many seconds, an address that no slice names any more may be left out again.
const FORGOTTEN_AFTER: u64 = 3600;

/// Maximum number of addresses that are remembered as left out, now or earlier.
const MAX_GRACES: usize = 16_384;

/// Why a backend is not judged by the identity of its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exception {
    /// Its pod is unknown, since this time.
    Unknown(BootTime),
    /// Its pod was removed, and had this identity.
    Departed(IdentityId),
}

/// What is behind the address of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Behind {
    /// The address has this identity.
    Known(IdentityId),
    /// A removed pod, with the identity that it had.
    Departed(IdentityId),
    /// A pod that no document describes.
    UnknownPod,
}

/// When addresses were left out first. An address is left out only once. If a slice is removed and written again, its
/// address is not left out a second time.
#[derive(Debug, Default)]
pub(crate) struct Graces(BTreeMap<IpAddr, BootTime>);

impl Graces {
    /// Since when an address is unknown. `is_named` says whether slices name an address.
    pub(crate) fn since(
        &mut self,
        address: IpAddr,
        now: BootTime,
        is_named: impl Fn(&IpAddr) -> bool,
    ) -> BootTime {
        if let Some(since) = self.0.get(&address) {
            return *since;
        }
        if self.0.len() >= MAX_GRACES {
            let is_young = |since: &BootTime| since.plus_secs(FORGOTTEN_AFTER) > now;
            self.0
                .retain(|address, since| is_young(since) || is_named(address));
        }
        if self.0.len() >= MAX_GRACES {
            return BootTime::from_nanos(now.nanos().saturating_sub(SKEW * 1_000_000_000));
        }
        self.0.insert(address, now);
        now
    }

    /// Forgets an address, because a pod has it.
    pub(crate) fn end(&mut self, address: IpAddr) {
        self.0.remove(&address);
    }
}

/// Removed pods that slices still name.
#[derive(Debug, Default)]
pub(crate) struct DepartedPods {
    pub(crate) pods: BTreeMap<Arc<str>, DepartedPod>,
    pub(crate) ends: BTreeSet<(BootTime, Arc<str>)>,
}

#[derive(Debug)]
pub(crate) struct DepartedPod {
    /// Identity that the pod had. A reference to it is held until `until`.
    pub(crate) identity: IdentityId,
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) until: BootTime,
}

impl DepartedPods {
    pub(crate) fn identity_of(&self, backend: &BackendAt) -> Option<IdentityId> {
        let pod = self.pods.get(backend.pod.as_ref()?)?;
        let has = pod.addresses.contains(&backend.address);
        has.then_some(pod.identity)
    }

    /// Takes the identities of the pods whose time is over.
    pub(crate) fn take_ended(&mut self, now: BootTime) -> Vec<IdentityId> {
        let mut ended = Vec::new();
        while self.ends.first().is_some_and(|(until, _)| *until <= now)
            && let Some((_, key)) = self.ends.pop_first()
        {
            ended.extend(self.pods.remove(&key).map(|pod| pod.identity));
        }
        ended
    }
}

/// The Service as policy sees it at the addresses of a family.
pub(crate) fn service_of(
    at: &ServiceAt,
    family: Family,
    behind: &BTreeMap<IpAddr, Behind>,
    exceptions: &BTreeMap<IpAddr, Exception>,
    now: BootTime,
) -> Service {
    let identity_of = |backend: &BackendAt| match exceptions.get(&backend.address) {
        Some(Exception::Unknown(since)) => {
            let is_over = since.plus_secs(SKEW) <= now;
            is_over.then_some(IdentityId::UNKNOWN)
        }
        Some(Exception::Departed(identity)) => Some(*identity),
        None => match behind.get(&backend.address)? {
            Behind::Known(identity) => Some(*identity),
            Behind::Departed(_) | Behind::UnknownPod => None,
        },
    };
    let ports = at.ports.iter().map(|port| {
        let backends = port.backends_of(family).filter_map(|backend| {
            Some(Backend {
                identity: identity_of(backend)?,
                port: backend.port.unwrap_or(port.port),
            })
        });
        ServicePort {
            protocol: port.protocol.number(),
            port: port.port,
            backends: backends.collect(),
        }
    });
    Service {
        ports: ports.collect(),
    }
}
