//! Services with the backends of their slices.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use crate::{
    kubernetes::service_at::{BackendAt, PortAt, ServiceAt},
    policy::cluster::{
        service::{Service, ServicePort},
        slice::{EndpointSlice, SlicePort},
    },
    source_event::SourceEvent,
};

/// Services and slices, by keys `namespace/name`.
#[derive(Debug, Default)]
pub(super) struct Services {
    services: BTreeMap<Arc<str>, KnownService>,
    /// Slices by the key of their Service, then by name.
    slices: BTreeMap<Arc<str>, BTreeMap<Arc<str>, KnownSlice>>,
    /// The Service of each slice.
    service_of: BTreeMap<Arc<str>, Arc<str>>,
    touched: BTreeSet<Arc<str>>,
    /// Keys of the Services that the caller has.
    returned: BTreeSet<Arc<str>>,
}

/// What is kept of a [`Service`] that kube-proxy translates. Its addresses are sorted, and each is
/// in one list.
#[derive(Debug)]
struct KnownService {
    cluster_ips: Box<[IpAddr]>,
    load_balancer_ips: Box<[IpAddr]>,
    external_ips: Box<[IpAddr]>,
    ports: Box<[ServicePort]>,
}

/// What is kept of an [`EndpointSlice`].
#[derive(Debug)]
struct KnownSlice {
    backends: Box<[KnownBackend]>,
    ports: Box<[SlicePort]>,
}

/// An address of a backend.
#[derive(Debug)]
struct KnownBackend {
    address: IpAddr,
    is_ready: bool,
    pod: Option<Arc<str>>,
}

impl KnownService {
    /// `None` unless it has addresses that kube-proxy translates.
    fn of(service: &Service) -> Option<Self> {
        let cluster: BTreeSet<_> = service.cluster_ips.iter().copied().collect();
        let balanced: BTreeSet<_> = service.load_balancer_ips.iter().copied().collect();
        let balanced: BTreeSet<_> = balanced.difference(&cluster).copied().collect();
        let external = service.external_ips.iter().copied();
        let external = external.filter(|address| !cluster.contains(address));
        let external = external.filter(|address| !balanced.contains(address));
        let external: BTreeSet<_> = external.collect();
        let has_none = cluster.is_empty() && balanced.is_empty() && external.is_empty();
        if has_none || service.has_other_proxy {
            return None;
        }
        Some(Self {
            cluster_ips: cluster.into_iter().collect(),
            load_balancer_ips: balanced.into_iter().collect(),
            external_ips: external.into_iter().collect(),
            ports: service.ports.as_slice().into(),
        })
    }
}

impl KnownSlice {
    /// `known` returns the stored key of a pod, so that the slice shares it.
    fn of(slice: &EndpointSlice, known: impl Fn(&str) -> Option<Arc<str>>) -> Self {
        let backends = slice.backends.iter().flat_map(|backend| {
            let pod = backend.pod.as_deref();
            let pod = pod.map(|pod| known(pod).unwrap_or_else(|| pod.into()));
            let addresses = backend.addresses.iter();
            addresses.map(move |address| KnownBackend {
                address: *address,
                is_ready: backend.ready,
                pod: pod.clone(),
            })
        });
        Self {
            backends: backends.collect(),
            ports: slice.ports.as_slice().into(),
        }
    }
}

impl Services {
    pub(super) fn put_service(&mut self, service: &Service) {
        let key = key(&service.namespace, &service.name);
        self.touched.insert(Arc::clone(&key));
        match KnownService::of(service) {
            Some(known) => self.services.insert(key, known),
            None => self.services.remove(&key),
        };
    }

    pub(super) fn remove_service(&mut self, key: &str) {
        if let Some((key, _)) = self.services.remove_entry(key) {
            self.touched.insert(key);
        }
    }

    /// `known` returns the stored key of a pod, so that the slice shares it.
    pub(super) fn put_slice(
        &mut self,
        slice: &EndpointSlice,
        known: impl Fn(&str) -> Option<Arc<str>>,
    ) {
        let name = key(&slice.namespace, &slice.name);
        // A slice may change to another Service.
        self.remove_slice(&name);
        let Some(service) = &slice.service else {
            return;
        };
        let of = key(&slice.namespace, service);
        let of = match self.services.get_key_value(&of) {
            Some((known, _)) => Arc::clone(known),
            None => of,
        };
        self.touched.insert(Arc::clone(&of));
        self.service_of.insert(name.clone(), Arc::clone(&of));
        let slices = self.slices.entry(of).or_default();
        slices.insert(name, KnownSlice::of(slice, known));
    }

    pub(super) fn remove_slice(&mut self, name: &str) {
        let Some(of) = self.service_of.remove(name) else {
            return;
        };
        if let Some(slices) = self.slices.get_mut(&of) {
            slices.remove(name);
            if slices.is_empty() {
                self.slices.remove(&of);
            }
        }
        self.touched.insert(of);
    }

    /// What changed since the last call.
    pub(super) fn changes(&mut self) -> Vec<SourceEvent<ServiceAt>> {
        let mut found = Vec::new();
        for key in std::mem::take(&mut self.touched) {
            match self.service_at(&key) {
                Some(service) => {
                    self.returned.insert(key);
                    found.push(SourceEvent::Apply(service));
                }
                None if self.returned.remove(&key) => {
                    found.push(SourceEvent::Delete(key.to_string()))
                }
                None => {}
            }
        }
        found
    }

    fn service_at(&self, key: &Arc<str>) -> Option<ServiceAt> {
        let service = self.services.get(key)?;
        let slices = || self.slices.get(key).into_iter().flat_map(BTreeMap::values);
        let ports = service.ports.iter().map(|port| PortAt {
            name: port.name.clone(),
            protocol: port.protocol,
            port: port.port,
            node_port: port.node_port,
            backends: slices()
                .flat_map(|slice| backends(slice, port))
                .collect::<BTreeSet<_>>()
                .into_iter()
                .collect(),
        });
        Some(ServiceAt {
            key: Arc::clone(key),
            load_balancer_ips: service.load_balancer_ips.to_vec(),
            external_ips: service.external_ips.to_vec(),
            cluster_ips: service.cluster_ips.to_vec(),
            ports: ports.collect(),
        })
    }
}

/// Backends of one port: the slice's port of the same name and protocol.
fn backends(slice: &KnownSlice, port: &ServicePort) -> Vec<BackendAt> {
    let same = |other: &&SlicePort| other.name == port.name && other.protocol == port.protocol;
    let mut found = Vec::new();
    for target in slice.ports.iter().filter(same) {
        found.extend(slice.backends.iter().map(|backend| BackendAt {
            address: backend.address,
            port: target.port,
            is_ready: backend.is_ready,
            pod: backend.pod.clone(),
        }));
    }
    found
}

fn key(namespace: &str, name: &str) -> Arc<str> {
    format!("{namespace}/{name}").into()
}
