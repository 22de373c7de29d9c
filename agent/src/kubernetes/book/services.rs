//! Services with the backends of their slices.

use std::{
    collections::{BTreeMap, BTreeSet},
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
    services: BTreeMap<Arc<str>, Arc<Service>>,
    /// Slices by the key of their Service, then by name.
    slices: BTreeMap<Arc<str>, BTreeMap<String, Arc<EndpointSlice>>>,
    /// The Service of each slice.
    service_of: BTreeMap<String, Arc<str>>,
    touched: BTreeSet<Arc<str>>,
    /// Services that were returned.
    returned: BTreeSet<Arc<str>>,
}

impl Services {
    pub(super) fn put_service(&mut self, service: &Arc<Service>) {
        let key = key(&service.namespace, &service.name);
        self.touched.insert(Arc::clone(&key));
        self.services.insert(key, Arc::clone(service));
    }

    pub(super) fn remove_service(&mut self, key: &str) {
        if let Some((key, _)) = self.services.remove_entry(key) {
            self.touched.insert(key);
        }
    }

    pub(super) fn put_slice(&mut self, slice: &Arc<EndpointSlice>) {
        let name = format!("{}/{}", slice.namespace, slice.name);
        // A slice may change to another Service.
        self.remove_slice(&name);
        let Some(service) = &slice.service else {
            return;
        };
        let of = key(&slice.namespace, service);
        self.touched.insert(Arc::clone(&of));
        self.service_of.insert(name.clone(), Arc::clone(&of));
        let slices = self.slices.entry(of).or_default();
        slices.insert(name, Arc::clone(slice));
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

    /// None unless it has addresses that kube-proxy translates.
    fn service_at(&self, key: &Arc<str>) -> Option<ServiceAt> {
        let service = self.services.get(key)?;
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
        let slices = || self.slices.get(key).into_iter().flat_map(BTreeMap::values);
        let ports = service.ports.iter().map(|port| PortAt {
            name: port.name.clone(),
            protocol: port.protocol,
            port: port.port,
            backends: slices()
                .flat_map(|slice| backends(slice, port))
                .collect::<BTreeSet<_>>()
                .into_iter()
                .collect(),
        });
        Some(ServiceAt {
            key: Arc::clone(key),
            load_balancer_ips: balanced.into_iter().collect(),
            external_ips: external.into_iter().collect(),
            cluster_ips: cluster.into_iter().collect(),
            ports: ports.collect(),
        })
    }
}

/// Backends of one port: the slice's port of the same name and protocol.
fn backends(slice: &EndpointSlice, port: &ServicePort) -> Vec<BackendAt> {
    let same = |other: &&SlicePort| other.name == port.name && other.protocol == port.protocol;
    let mut found = Vec::new();
    for target in slice.ports.iter().filter(same) {
        for backend in &slice.backends {
            found.extend(backend.addresses.iter().map(|address| BackendAt {
                address: *address,
                port: target.port,
                is_ready: backend.ready,
                pod: backend.pod.as_deref().map(Arc::from),
            }));
        }
    }
    found
}

fn key(namespace: &str, name: &str) -> Arc<str> {
    format!("{namespace}/{name}").into()
}
