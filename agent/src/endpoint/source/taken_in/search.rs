//! Looks into namespaces, and puts the pods in them under policy.

use std::{collections::BTreeMap, net::IpAddr, path::PathBuf, sync::Arc, time::Instant};

use agent_core::endpoint::spec::EndpointSpec;
use dns_policy::wall_time;

use super::{EndpointBook, IFNAME, LocalPod, LocalPods, LookedInto, NamespaceId, State, key};
use crate::endpoint::{
    discover::{Claims, DiscoverError, Netns, addresses_in, discover},
    source::{EndpointDocument, EndpointError},
};

/// One search for the network namespaces of pods.
struct Search {
    dir: PathBuf,
    pods: LocalPods,
    /// Files of namespaces that may be a pod's.
    files: BTreeMap<String, NamespaceId>,
    /// Files of namespaces that have to be looked into.
    due: Vec<String>,
}

/// A pod that was found.
struct Hit {
    file: String,
    namespace: NamespaceId,
    document: EndpointDocument,
    netns: Netns,
    spec: EndpointSpec,
}

/// Why the agent does not put the pod in a namespace under policy.
#[derive(Debug, thiserror::Error)]
enum NotTaken {
    #[error(
        "interface {IFNAME} of {netns} has not all addresses of the pod: {missing} is missing; \
         restart the pod"
    )]
    Lacks { netns: Netns, missing: String },
    #[error(
        "the node's end of interface {IFNAME} of {netns} is a port of {master}, which is no bridge \
         of the kernel (Open vSwitch, for example): packets would pass the policy"
    )]
    ForeignMaster { netns: Netns, master: String },
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
}

impl From<DiscoverError> for NotTaken {
    fn from(error: DiscoverError) -> Self {
        Self::Endpoint(error.into())
    }
}

impl EndpointBook {
    /// Looks for pods of this node that have no endpoint, and makes one for each that is found.
    pub(crate) fn take_in(&self) {
        let Some(search) = self.state.lock().search() else {
            return;
        };
        let mut looked_into = Vec::new();
        for file in &search.due {
            let addresses = addresses_in(&search.netns(file), IFNAME);
            looked_into.push((file.clone(), addresses));
        }
        self.state.lock().note_looked_into(&search, looked_into);
        for (name, pod) in &search.pods {
            let taken = self.take_in_one(&search, name, pod);
            self.state.lock().note_taken(name, taken);
        }
    }

    /// Puts a pod under policy.
    fn take_in_one(&self, search: &Search, name: &str, pod: &LocalPod) -> Result<(), String> {
        let files = self.state.lock().files_with(search, name, pod)?;
        let mut hits = Vec::new();
        let mut reasons = Vec::new();
        for file in files {
            match search.hit(&file, name, pod) {
                Ok(hit) => hits.extend(hit),
                Err(error) => reasons.push(error.to_string()),
            }
        }
        if hits.len() > 1 {
            let files: Vec<&str> = hits.iter().map(|hit| hit.file.as_str()).collect();
            return Err(format!(
                "several network namespaces in {} have its address {}: {}; delete the one that is \
                 not the pod's, or restart the pod",
                search.dir.display(),
                addresses(pod),
                files.join(", ")
            ));
        }
        let Some(hit) = hits.pop() else {
            return Err(reasons.join("; "));
        };
        let (key, ifname) = (key(&hit.file), hit.spec.interface.ifname.clone());
        self.enter(
            &key,
            hit.document,
            &hit.netns,
            hit.spec,
            Some(hit.namespace),
        )
        .map_err(|error| error.to_string())?;
        tracing::info!(
            endpoint = key,
            pod = name,
            interface = ifname,
            "the pod ran without an endpoint and is taken in"
        );
        Ok(())
    }
}

impl Search {
    fn netns(&self, file: &str) -> Netns {
        Netns::Path(self.dir.join(file))
    }

    /// The pod in a namespace; `None` if the file is another namespace now.
    fn hit(&self, file: &str, name: &str, pod: &LocalPod) -> Result<Option<Hit>, NotTaken> {
        let document = EndpointDocument {
            netns: Some(self.dir.join(file).to_string_lossy().into_owned()),
            ifname: IFNAME.to_owned(),
            pod: Some(name.to_owned()),
            addresses: pod.addresses.clone(),
            uid: pod.uid.as_deref().map(str::to_owned),
            taken_in: Some(wall_time::now()),
            ..EndpointDocument::default()
        };
        let netns = document.check()?;
        let Some(namespace) = self.files.get(file).copied() else {
            return Ok(None);
        };
        let claims = Claims {
            named: pod.addresses.clone(),
            known: None,
            by_itself: false,
        };
        let found = discover(&netns, IFNAME, &claims)?;
        if super::namespace_id(&netns).found() != Some(namespace) {
            return Ok(None);
        }
        if let Some(master) = found.foreign_master {
            return Err(NotTaken::ForeignMaster { netns, master });
        }
        let mut missing = pod.addresses.iter();
        if let Some(missing) = missing.find(|address| !found.present.contains(address)) {
            let missing = missing.to_string();
            return Err(NotTaken::Lacks { netns, missing });
        }
        let spec = document.spec(&key(file), &netns, found)?;
        Ok(Some(Hit {
            file: file.to_owned(),
            namespace,
            document,
            netns,
            spec,
        }))
    }
}

impl State {
    /// The next search; `None` if nothing is due.
    fn search(&mut self) -> Option<Search> {
        let source = self
            .taken_in
            .source
            .as_ref()
            .filter(|_| !self.listing.starting)?;
        let pods = Arc::clone(&source.pods.borrow());
        let dir = source.netns_dir.clone();
        let mut pods = self.follow_lacking(&pods);
        let dir = dir.filter(|_| !pods.is_empty())?;
        let files = match self.free_namespaces(&dir) {
            Ok(files) => files,
            Err(reason) => {
                for name in pods.keys() {
                    self.taken_in.note(name, reason.clone());
                }
                return None;
            }
        };
        let now = Instant::now();
        let taken_in = &self.taken_in;
        let is_due = |name: &str| taken_in.retries.is_due(name, now);
        pods.retain(|name, _| is_due(name));
        let due = files.keys().filter(|file| is_due(&key(file)));
        let due = due.cloned().collect();
        (!pods.is_empty()).then_some(Search {
            dir,
            pods,
            files,
            due,
        })
    }

    fn note_looked_into(
        &mut self,
        search: &Search,
        looked_into: Vec<(String, Result<Vec<IpAddr>, DiscoverError>)>,
    ) {
        for (file, addresses) in looked_into {
            let addresses = addresses.unwrap_or_else(|error| {
                tracing::debug!(%error, "a network namespace has no interface of a pod");
                Vec::new()
            });
            // The namespace is looked into again while a pod is missing: its addresses may come later.
            self.taken_in.retries.failed(&key(&file), Instant::now());
            if let Some(namespace) = search.files.get(&file).copied() {
                let looked_into = LookedInto {
                    namespace,
                    addresses,
                };
                self.taken_in.looked_into.insert(file, looked_into);
            }
        }
    }

    /// Namespaces that have an address of a pod.
    fn files_with(
        &self,
        search: &Search,
        name: &str,
        pod: &LocalPod,
    ) -> Result<Vec<String>, String> {
        let has = |looked_into: &LookedInto| {
            let mut addresses = looked_into.addresses.iter();
            addresses.any(|address| pod.addresses.contains(address))
        };
        let files = search.files.keys();
        let files = files.filter(|file| self.taken_in.looked_into.get(*file).is_some_and(has));
        let files: Vec<String> = files.cloned().collect();
        if !files.is_empty() {
            return Ok(files);
        }
        let (namespace, of_namespace) = name.split_once('/').unwrap_or(("", name));
        Err(format!(
            "no interface {IFNAME} of a network namespace in {} has its address {}; restart the pod \
             (`kubectl -n {namespace} delete pod {of_namespace}`), or correct --cni-netns-dir",
            search.dir.display(),
            addresses(pod)
        ))
    }

    fn note_taken(&mut self, name: &Arc<str>, taken: Result<(), String>) {
        match taken {
            Ok(()) => {
                self.taken_in.lacking.remove(name);
                self.taken_in.retries.forget(name);
            }
            Err(reason) => {
                self.taken_in.retries.failed(name, Instant::now());
                self.taken_in.note(name, reason);
            }
        }
    }
}

fn addresses(pod: &LocalPod) -> String {
    let addresses: Vec<String> = pod.addresses.iter().map(ToString::to_string).collect();
    addresses.join(", ")
}

impl super::TakenIn {
    fn note(&mut self, name: &Arc<str>, reason: String) {
        if let Some(lacking) = self.lacking.get_mut(name)
            && lacking.reason != reason
        {
            tracing::debug!(pod = %name, reason, "the pod is not under policy");
            lacking.reason = reason;
        }
    }
}
