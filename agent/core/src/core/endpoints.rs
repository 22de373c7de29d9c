//! How endpoints are added, changed and removed.

use std::{collections::BTreeSet, net::IpAddr};

use dns_policy::boot_time::BootTime;
use ipnet::IpNet;
use shared_maps::{EndpointId, IdentityId};

use super::state::State;

use crate::{
    endpoint::{
        endpoint::{DirtyPeers, Endpoint},
        spec::EndpointSpec,
    },
    identity::pods::Asked,
    ipcache::{metadata::Claim, owners::Owner},
    labels::LabelSet,
    source_event::SourceEvent,
};

/// Why a pod has no identity yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NoIdentity {
    /// The cluster has yet to give the pod an identity.
    #[error(
        "its labels have no identity number yet: the agent waits for the number of the cluster"
    )]
    Awaited,
    #[error("no identity number is left for its labels: use fewer distinct label sets")]
    Exhausted,
}

/// Why the model has an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// The endpoint's source lists it.
    Source,
    /// An earlier run had it.
    EarlierRun,
}

impl State {
    pub(super) fn on_endpoint(&mut self, event: SourceEvent<EndpointSpec>) {
        match event {
            SourceEvent::Init => self.restoration.endpoints().begin(),
            SourceEvent::Apply(spec) => {
                self.restoration.endpoints().note(&spec.key);
                if self.apply_endpoint(spec) {
                    self.take_waiting();
                }
            }
            SourceEvent::Delete(key) => {
                self.delete_endpoint(&key);
                self.take_waiting();
            }
            SourceEvent::InitDone => {
                let seen = self.restoration.endpoints().end();
                let known = self.endpoints.iter().map(|e| e.spec.key.clone());
                let waiting = self.endpoints.waiting().map(|(spec, _)| spec.key.clone());
                let known: Vec<String> = known.chain(waiting).collect();
                for key in known.iter().filter(|key| !seen.contains(*key)) {
                    self.delete_endpoint(key);
                }
                self.take_waiting();
            }
        }
    }

    fn delete_endpoint(&mut self, key: &str) {
        self.endpoints.end_wait(key);
        if let Some(id) = self.endpoints.by_key(key) {
            self.remove_endpoint(id);
        }
    }

    /// Tries the waiting endpoints again. An endpoint that is accepted may free an address for which another one
    /// waits.
    pub(super) fn take_waiting(&mut self) {
        let tries = self.endpoints.waiting().len() + 1;
        for _ in 0..tries {
            let mut freed = false;
            for spec in self.endpoints.take_waiting() {
                freed |= self.apply_endpoint(spec);
            }
            if !freed {
                break;
            }
        }
    }

    /// Tries the endpoints again that wait because no identity number was free.
    pub(super) fn retry_endpoints(&mut self) {
        for spec in self.endpoints.take_without_identity() {
            self.try_endpoint(spec);
        }
    }

    /// Applies a specification. Returns whether an address became free.
    fn apply_endpoint(&mut self, spec: EndpointSpec) -> bool {
        let own = self.endpoints.by_key(&spec.key);
        let own = own.and_then(|id| self.endpoints.get(id));
        let before: Vec<IpAddr> = own.into_iter().flat_map(Endpoint::addresses).collect();
        self.try_endpoint(spec);
        before
            .iter()
            .any(|address| self.endpoints.by_address(*address).is_none())
    }

    pub(super) fn try_endpoint(&mut self, mut spec: EndpointSpec) {
        // This specification replaces an earlier one that still waits.
        self.endpoints.end_wait(&spec.key);
        let config = &self.config;
        spec.addresses.retain(|address| match address {
            IpAddr::V4(_) => config.enable_ipv4,
            IpAddr::V6(v6) => config.enable_ipv6 && !v6.is_unicast_link_local(),
        });
        let labels = match self.endpoint_labels(&spec) {
            Some(Ok(labels)) => labels,
            Some(Err(error)) => {
                self.endpoints.wait(spec, error.to_string());
                return;
            }
            None => {
                self.await_pod(spec);
                return;
            }
        };
        if spec.addresses.is_empty() {
            let reason = "it has no address of an enabled family: give its interface one";
            self.endpoints.wait(spec, reason.to_owned());
            return;
        }
        self.adopt(&spec);
        let asked = spec.clone();
        let own = self.endpoints.by_key(&spec.key);
        let refused = self.keep_own_addresses(own, &mut spec);
        if spec.addresses.is_empty() {
            let of = own.and_then(|id| self.endpoints.get_mut(id));
            if let Some(endpoint) =
                of.filter(|endpoint| endpoint.spec.interface.ifindex == spec.interface.ifindex)
            {
                // The endpoint's policy at this interface stays in force.
                endpoint.restored = false;
                let id = endpoint.id;
                self.endpoints.mark(id);
            } else if let Some(id) = own {
                self.remove_endpoint(id);
            }
        } else {
            self.take_endpoint(own, spec, &labels);
        }
        if let Some(reason) = refused {
            // The specification is tried again with all the addresses that it asked for.
            let other = self.endpoints.end_wait(&asked.key);
            self.endpoints.wait(asked, other.unwrap_or(reason));
        }
    }

    /// Makes an endpoint wait until its pod is known. If the endpoint is in force already, it stays as it is.
    fn await_pod(&mut self, spec: EndpointSpec) {
        self.adopt(&spec);
        let own = self.endpoints.by_key(&spec.key);
        let own = own.and_then(|id| self.endpoints.get_mut(id));
        let own = own.filter(|endpoint| {
            endpoint.spec.interface.ifindex == spec.interface.ifindex
                && endpoint.addresses().eq(pick(&spec.addresses))
        });
        if let Some(endpoint) = own {
            endpoint.restored = false;
            endpoint.spec.pod.clone_from(&spec.pod);
            endpoint.spec.pod_uid.clone_from(&spec.pod_uid);
            let id = endpoint.id;
            self.endpoints.mark(id);
        }
        let pod = spec.pod.as_deref().unwrap_or_default();
        let reason = match (&spec.pod_uid, self.cluster.pods.labels_of(pod)) {
            (Some(uid), Some(_)) => format!(
                "Pod/{pod} describes another pod of that name: this one has the uid {uid}. The agent \
                 waits for its object; an endpoint that has labels already keeps them"
            ),
            _ => format!(
                "there is no document Pod/{pod}: with --kubernetes correct the name, or wait until the \
                 API server or a relay answers; without it put the document into --policy-dir \
                 (`kubectl get pod -o yaml` prints it)"
            ),
        };
        self.endpoints.wait(spec, reason);
    }

    fn take_endpoint(&mut self, own: Option<EndpointId>, spec: EndpointSpec, labels: &LabelSet) {
        if let Some(id) = own {
            let Some(endpoint) = self.endpoints.get(id) else {
                return;
            };
            let same = endpoint.spec.interface.ifindex == spec.interface.ifindex
                && endpoint.addresses().eq(pick(&spec.addresses));
            if same {
                self.update_endpoint(id, spec, labels);
                return;
            }
            if is_same_pod(&endpoint.spec, &spec) {
                self.readdress_endpoint(id, spec, labels);
                return;
            }
            // The interface or the pod is another one, so this is another instance.
            self.remove_endpoint(id);
        }
        if let Some(id) = self.endpoints.free_number() {
            self.add_endpoint(id, spec, labels, Origin::Source);
        } else {
            let reason = "no endpoint number is free: remove endpoints".to_owned();
            self.endpoints.wait(spec, reason);
        }
    }

    /// Removes addresses of the node, of Services and of other endpoints: a pod with NET_ADMIN can
    /// give its interface any address. Returns the reason if a family then has no address.
    fn keep_own_addresses(
        &self,
        own: Option<EndpointId>,
        spec: &mut EndpointSpec,
    ) -> Option<String> {
        let mut reason = None;
        let families = pick(&spec.addresses).count();
        spec.addresses.retain(|address| {
            let other = self.endpoints.by_address(*address);
            if self.lxc.is_node_address(*address) {
                reason = Some(format!(
                    "its address {address} is this node's: give it another one"
                ));
            } else if let Some(service) = self.cluster.services.addresses().at_cluster_ip(*address)
            {
                reason = Some(format!(
                    "its address {address} is that of Service {service}: give it another one"
                ));
            } else if let Some(other) = other.filter(|other| Some(*other) != own) {
                reason = Some(format!(
                    "its address {address} belongs to endpoint {other}: remove that one first"
                ));
            } else {
                return true;
            }
            false
        });
        reason.filter(|_| pick(&spec.addresses).count() < families)
    }

    /// An endpoint that is found again under another key of its source stays the same endpoint. That
    /// happens to endpoints of an earlier run, and if documents of a file change places. If another
    /// endpoint has the key of `spec`, the two swap keys until the source sends the other one again.
    fn adopt(&mut self, spec: &EndpointSpec) {
        let own = self.endpoints.by_key(&spec.key);
        let at = pick(&spec.addresses).find_map(|address| self.endpoints.by_address(address));
        let same = at.and_then(|id| self.endpoints.get(id)).filter(|endpoint| {
            Some(endpoint.id) != own
                && endpoint.spec.interface.ifindex == spec.interface.ifindex
                && endpoint.addresses().eq(pick(&spec.addresses))
        });
        let Some(mut endpoint) = same.map(|e| e.id).and_then(|id| self.endpoints.take(id)) else {
            return;
        };
        let displaced = own.and_then(|id| self.endpoints.take(id));
        let key = std::mem::replace(&mut endpoint.spec.key, spec.key.clone());
        let mut moved = vec![endpoint.id];
        self.endpoints.insert(endpoint);
        if let Some(mut displaced) = displaced {
            displaced.spec.key = key;
            moved.push(displaced.id);
            self.endpoints.insert(displaced);
        }
        for id in moved {
            self.files.mark_due(id, self.now);
        }
    }

    /// Maximum number of entries in an endpoint's policy map.
    pub(super) fn policy_map_max(&self, id: EndpointId) -> usize {
        self.endpoints.map_size(id, self.config.policy_map_max)
    }

    /// Adds an endpoint to the model.
    pub(super) fn add_endpoint(
        &mut self,
        id: EndpointId,
        spec: EndpointSpec,
        labels: &LabelSet,
        origin: Origin,
    ) {
        let identity = match self.acquire_pod(labels) {
            Ok(identity) => identity,
            Err(lacking) => {
                self.endpoints.await_identity(spec, lacking.to_string());
                self.endpoints.free(id);
                return;
            }
        };
        let since = match origin {
            Origin::Source => {
                self.endpoints.forget_map_size(id);
                self.now
            }
            Origin::EarlierRun => BootTime::START,
        };
        let (mut ipv4, mut ipv6) = (None, None);
        for address in pick(&spec.addresses) {
            match address {
                IpAddr::V4(v4) => ipv4 = Some(v4),
                IpAddr::V6(v6) => ipv6 = Some(v6),
            }
        }
        self.endpoints.insert(Endpoint {
            id,
            spec,
            labels: labels.clone(),
            identity,
            ipv4,
            ipv6,
            since,
            former: Vec::new(),
            restored: origin == Origin::EarlierRun,
            policy_map: None,
            dirty_peers: DirtyPeers::All,
            attached: None,
            former_programs: None,
            problem: None,
            unplaced: None,
            policy_revision: 0,
        });
        self.files.add(id);
        self.endpoints.mark(id);
        self.join_subject(identity, labels, id);
        self.claim_addresses(id);
    }

    /// Acquires the identity of the labels of a pod, which may be on this node or on another one.
    pub(super) fn acquire_pod(&mut self, labels: &LabelSet) -> Result<IdentityId, NoIdentity> {
        let acquired = match self.numbers.ask_pod(labels, self.now) {
            Asked::Have(acquired) => acquired,
            Asked::Awaited => return Err(NoIdentity::Awaited),
            Asked::Exhausted => {
                self.counters.identity_exhausted += 1;
                return Err(NoIdentity::Exhausted);
            }
        };
        if acquired.new {
            self.introduce(acquired.id, labels.clone());
        }
        Ok(acquired.id)
    }

    fn claim_addresses(&mut self, id: EndpointId) {
        let Some(endpoint) = self.endpoints.get(id) else {
            return;
        };
        let identity = Claim::Identity(endpoint.identity);
        let value = endpoint.lxc();
        for address in endpoint.addresses() {
            self.ipcache
                .claim(IpNet::from(address), Owner::Endpoint(id), identity.clone());
            self.lxc.claim(address, value);
        }
    }

    /// Gives an endpoint other addresses; it keeps its number and its names.
    fn readdress_endpoint(&mut self, id: EndpointId, spec: EndpointSpec, labels: &LabelSet) {
        let Some(mut endpoint) = self.endpoints.take(id) else {
            return;
        };
        for address in endpoint.addresses() {
            self.ipcache
                .unclaim(IpNet::from(address), &Owner::Endpoint(id));
            self.lxc.unclaim(address);
        }
        endpoint.set_addresses(pick(&spec.addresses), self.now);
        self.endpoints.insert(endpoint);
        // If the labels have no identity, the endpoint keeps its former one.
        self.claim_addresses(id);
        self.update_endpoint(id, spec, labels);
        self.files.mark_due(id, self.now);
    }

    fn update_endpoint(&mut self, id: EndpointId, spec: EndpointSpec, labels: &LabelSet) {
        let Some(endpoint) = self.endpoints.mark_mut(id) else {
            return;
        };
        let confirmed = std::mem::take(&mut endpoint.restored);
        let unchanged = endpoint.spec == spec && endpoint.labels == *labels;
        endpoint.spec = spec;
        if unchanged {
            return;
        }
        if endpoint.labels != *labels {
            let before = endpoint.identity;
            let wanted = endpoint.spec.clone();
            let identity = match self.acquire_pod(labels) {
                Ok(identity) => identity,
                Err(lacking) => {
                    // The endpoint keeps its identity.
                    self.endpoints.await_identity(wanted, lacking.to_string());
                    return;
                }
            };
            self.exchange_identity(id, before, identity, labels);
        }
        if !confirmed {
            self.files.mark_due(id, self.now);
        }
        self.claim_addresses(id);
    }

    /// Gives an endpoint another identity, because its labels changed or have another number.
    fn exchange_identity(
        &mut self,
        id: EndpointId,
        before: IdentityId,
        identity: IdentityId,
        labels: &LabelSet,
    ) {
        self.leave_subject(before, id);
        if let Some(endpoint) = self.endpoints.get_mut(id) {
            endpoint.identity = identity;
            endpoint.labels = labels.clone();
            endpoint.dirty_peers = DirtyPeers::All;
        }
        self.join_subject(identity, labels, id);
        self.numbers.release_endpoint(before);
    }

    /// Gives endpoints with these labels their identity again, because its number is new or
    /// changed.
    pub(super) fn renumber_endpoints(&mut self, changed: &BTreeSet<LabelSet>) {
        let concerned = self
            .endpoints
            .iter()
            .filter(|e| changed.contains(&e.labels));
        let concerned: Vec<_> = concerned
            .map(|endpoint| (endpoint.id, endpoint.identity, endpoint.labels.clone()))
            .collect();
        for (id, before, labels) in concerned {
            let Ok(identity) = self.acquire_pod(&labels) else {
                continue;
            };
            if identity == before {
                self.numbers.release_endpoint(identity);
                continue;
            }
            self.exchange_identity(id, before, identity, &labels);
            self.endpoints.mark(id);
            self.files.mark_due(id, self.now);
            self.claim_addresses(id);
        }
        self.take_waiting();
    }

    /// Takes an endpoint out of the model; the next flush removes its entries from the datapath.
    pub(super) fn remove_endpoint(&mut self, id: EndpointId) {
        let Some(mut endpoint) = self.endpoints.take(id) else {
            return;
        };
        // Programs of the earlier run, or of an attempt that failed halfway, may be attached: they
        // must not outlive the endpoint.
        if endpoint.attached.is_none() {
            endpoint.attached = Some(endpoint.attachment());
        }
        for address in endpoint.addresses() {
            self.ipcache
                .unclaim(IpNet::from(address), &Owner::Endpoint(id));
            self.lxc.unclaim(address);
        }
        self.restoration.hold_mut().forget(id);
        self.leave_subject(endpoint.identity, id);
        self.numbers.release_endpoint(endpoint.identity);
        let gone = self.learned.names.remove_endpoint(id, self.now);
        self.unlabel(gone);
        self.files.leave(id);
        self.endpoints.leave(endpoint);
    }

    pub(super) fn set_node_addresses(&mut self, addresses: &[IpAddr]) {
        let new: BTreeSet<IpAddr> = addresses
            .iter()
            .copied()
            .filter(|a| !a.is_loopback())
            .collect();
        let change = self.lxc.set_node_addresses(new);
        for address in &change.removed {
            self.ipcache.unclaim(IpNet::from(*address), &Owner::Node);
            if let Some(id) = self.endpoints.by_address(*address) {
                self.claim_addresses(id);
            }
        }
        for address in change.added {
            let host = Claim::Identity(IdentityId::HOST);
            self.ipcache.claim(IpNet::from(address), Owner::Node, host);
        }
        if !change.removed.is_empty() {
            self.take_waiting();
        }
    }
}

/// Whether two specifications with the same key are about one pod: they have the same host-side
/// interface and network namespace, and names and uids that do not differ. A specification of an
/// earlier run has no name and uid, so its name and uid are not compared.
fn is_same_pod(before: &EndpointSpec, now: &EndpointSpec) -> bool {
    let differ = |before: &Option<String>, now: &Option<String>| matches!((before, now), (Some(before), Some(now)) if before != now);
    before.interface.ifindex == now.interface.ifindex
        && before.interface.ifname == now.interface.ifname
        && before.netns == now.netns
        && !differ(&before.pod, &now.pod)
        && !differ(&before.pod_uid, &now.pod_uid)
}

/// The addresses that are used: the first of each family, IPv4 first.
fn pick(addresses: &[IpAddr]) -> impl Iterator<Item = IpAddr> {
    let v4 = addresses.iter().find(|address| address.is_ipv4());
    let v6 = addresses.iter().find(|address| address.is_ipv6());
    v4.into_iter().chain(v6).copied()
}
