//! Pods of the cluster: each address has the identity of its pod's labels.
//!
//! In the model a pod consists only of claims in the ipcache: a new pod makes no revision, and no endpoint's
//! DNS rules are rendered for it. Pods and endpoints share identities: a pod of another node and an
//! endpoint here have one identity if their labels are equal. An address that is also an endpoint's
//! has the endpoint's identity.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use ipnet::IpNet;
use shared_maps::IdentityId;

use super::{endpoints::NoIdentity, state::State};
use crate::{
    core::state::pods::KnownPod,
    endpoint::spec::EndpointSpec,
    identity::cluster_object::CiliumIdentity,
    ipcache::{
        metadata::Claim,
        owners::{Owner, Source},
    },
    kubernetes::pod_at::PodAt,
    labels::{Label, LabelError, LabelSet, in_namespace},
    source_event::SourceEvent,
};

impl State {
    pub(super) fn on_pods(&mut self, events: Vec<SourceEvent<PodAt>>) {
        let mut changed: BTreeSet<Arc<str>> = BTreeSet::new();
        for event in events {
            match event {
                SourceEvent::Init => self.restoration.pods().begin(),
                SourceEvent::Apply(pod) => {
                    self.restoration.pods().note(&pod.key);
                    changed.insert(Arc::clone(&pod.key));
                    self.put_pod(pod);
                }
                SourceEvent::Delete(key) => {
                    self.remove_pod(&key);
                    changed.insert(key.into());
                }
                SourceEvent::InitDone => {
                    let seen = self.restoration.pods().end();
                    let known = self.cluster.pods.known.keys();
                    let gone: Vec<_> = known
                        .filter(|key| !seen.contains(&***key))
                        .cloned()
                        .collect();
                    for key in gone {
                        self.remove_pod(&key);
                        changed.insert(key);
                    }
                }
            }
        }
        self.follow_pods(&changed);
    }

    /// Gives endpoints that are among these pods the labels of their pod.
    fn follow_pods(&mut self, changed: &BTreeSet<Arc<str>>) {
        let is_one = |spec: &EndpointSpec| {
            let pod = spec.pod.as_deref();
            pod.is_some_and(|pod| changed.contains(pod))
        };
        let specs = self.endpoints.iter().map(|endpoint| &endpoint.spec);
        let specs: Vec<_> = specs.filter(|spec| is_one(spec)).cloned().collect();
        for spec in specs {
            self.try_endpoint(spec);
        }
        if self.endpoints.waiting().any(|(spec, _)| is_one(spec)) {
            self.take_waiting();
        }
    }

    /// Labels of an endpoint, with those of its pod; `None` if the pod is unknown, or if another
    /// pod of its name is known.
    pub(super) fn endpoint_labels(
        &self,
        spec: &EndpointSpec,
    ) -> Option<Result<LabelSet, LabelError>> {
        let own = spec.labels.iter().map(|text| Label::parse(text));
        let mut labels: Vec<Label> = match own.collect() {
            Ok(own) => own,
            Err(error) => return Some(Err(error)),
        };
        if let Some(pod) = &spec.pod {
            let pods = &self.cluster.pods;
            let known = pods.labels_of(pod)?;
            // The document is of another pod of that name, before or after this one.
            if spec
                .pod_uid
                .as_deref()
                .is_some_and(|uid| !pods.is_one(pod, uid))
            {
                return None;
            }
            labels.extend(known.iter().cloned());
        }
        Some(Ok(in_namespace(labels)))
    }

    /// Tries the pods again for which no identity number was free.
    pub(super) fn retry_pods(&mut self) {
        for key in std::mem::take(&mut self.cluster.pods.without_identity) {
            if let Some(pod) = self.cluster.pods.known.remove(&key) {
                self.exchange_pod(Some(pod.at.clone()), &pod);
            }
        }
    }

    pub(super) fn on_identities(&mut self, events: Vec<SourceEvent<CiliumIdentity>>) {
        let mut touched = BTreeSet::new();
        for event in events {
            match event {
                SourceEvent::Init => self.restoration.identities().begin(),
                SourceEvent::Apply(identity) => {
                    let key = identity.id.0.to_string();
                    self.restoration.identities().note(&key);
                    touched.insert(identity.id);
                    self.numbers.learn(identity.id, Some(&identity), self.now);
                }
                SourceEvent::Delete(key) => touched.extend(self.forget_number(&key)),
                // Numbers that an earlier listing of this run had, and that this one lacks, stay
                // with their label sets.
                SourceEvent::InitDone => {
                    self.restoration.identities().end();
                }
            }
        }
        self.renumber();
        self.follow_carried(touched);
    }

    fn forget_number(&mut self, key: &str) -> Option<IdentityId> {
        let id = key.parse().ok().map(IdentityId)?;
        self.numbers.learn(id, None, self.now);
        Some(id)
    }

    /// Gives label sets whose number is new or changed their identity again, wherever they are.
    /// Returns true if there were any.
    pub(super) fn renumber(&mut self) -> bool {
        let changed = self.numbers.take_renumbered();
        if changed.is_empty() {
            return false;
        }
        let pods = self.cluster.pods.known.iter();
        let pods = pods.filter(|(_, pod)| changed.contains(&pod.at.labels));
        let pods: Vec<_> = pods.map(|(key, _)| Arc::clone(key)).collect();
        for key in pods {
            if let Some(pod) = self.cluster.pods.known.remove(&key) {
                self.exchange_pod(Some(pod.at.clone()), &pod);
            }
        }
        self.renumber_endpoints(&changed);
        self.renumber_carried(&changed);
        true
    }

    fn put_pod(&mut self, mut pod: PodAt) {
        let config = &self.config;
        pod.addresses.retain(|address| match address {
            IpAddr::V4(_) => config.enable_ipv4,
            IpAddr::V6(v6) => config.enable_ipv6 && !v6.is_unicast_link_local(),
        });
        let before = self.cluster.pods.known.remove(&pod.key);
        let before = before.unwrap_or_else(|| KnownPod {
            at: PodAt {
                addresses: Vec::new(),
                ..pod.clone()
            },
            identity: None,
        });
        self.exchange_pod(Some(pod), &before);
    }

    fn remove_pod(&mut self, key: &str) {
        if let Some(pod) = self.cluster.pods.known.remove(key) {
            self.exchange_pod(None, &pod);
        }
    }

    /// Replaces `before` by `now`. The new identity is acquired before the old one is released, so
    /// that an identity that does not change always has a holder.
    fn exchange_pod(&mut self, now: Option<PodAt>, before: &KnownPod) {
        let wants = now.as_ref().filter(|pod| !pod.addresses.is_empty());
        let acquired = wants.map(|pod| self.acquire_pod(&pod.labels));
        let is_lacking = acquired.is_some_and(|acquired| acquired.is_err());
        // The same pod with other labels keeps its identity until the new labels have a number.
        let keeps_addresses =
            |pod: &PodAt| pod.uid == before.at.uid && pod.addresses == before.at.addresses;
        let kept = before.identity.filter(|_| {
            acquired == Some(Err(NoIdentity::Awaited)) && wants.is_some_and(keeps_addresses)
        });
        let identity = acquired.and_then(Result::ok).or(kept);
        self.cluster.pods.without_identity.remove(&before.at.key);
        if let Some(pod) = wants {
            if is_lacking {
                self.cluster
                    .pods
                    .without_identity
                    .insert(Arc::clone(&pod.key));
            }
            // An address of the cluster never counts as the world, although no labels select an
            // unmanaged one.
            let claim = Claim::Identity(identity.unwrap_or(IdentityId::UNMANAGED));
            for address in &pod.addresses {
                let prefix = IpNet::from(*address);
                self.ipcache.claim(prefix, owner(pod), claim.clone());
            }
        }
        for address in &before.at.addresses {
            let stays =
                |pod: &PodAt| pod.document == before.at.document && pod.addresses.contains(address);
            if !wants.is_some_and(stays) {
                let prefix = IpNet::from(*address);
                self.ipcache.unclaim(prefix, &owner(&before.at));
            }
        }
        if let Some(old) = before.identity.filter(|_| kept.is_none()) {
            let lost = before.at.addresses.iter().copied();
            let lost = lost.filter(|at| !wants.is_some_and(|pod| pod.addresses.contains(at)));
            let lost: Vec<IpAddr> = lost.collect();
            let services = &mut self.cluster.services;
            let released = services.depart(&before.at.key, lost, old, self.now);
            if let Some(released) = released {
                self.numbers.release_endpoint(released);
            }
        }
        if let Some(at) = now {
            let key = Arc::clone(&at.key);
            self.cluster
                .pods
                .known
                .insert(key, KnownPod { at, identity });
        }
    }
}

fn owner(pod: &PodAt) -> Owner {
    Owner::Object(Source::Kubernetes, Arc::clone(&pod.document))
}
