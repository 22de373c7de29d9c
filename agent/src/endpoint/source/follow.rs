//! Finding endpoints, and finding them again when their interface or namespace was replaced.

use std::{collections::BTreeSet, io, time::Instant};

use agent_core::{endpoint::spec::EndpointSpec, source_event::SourceEvent};
use agent_datapath::closed::DocumentHash;
use daemon::lookup::Lookup;

use super::{
    Deliver, ENDED, EndpointDocument, EndpointError, Found, NamespaceId, State, cni, dir,
    document::Addresses, gated::Until, left::with_remedy, namespace_id, processes::Holder,
};
use crate::endpoint::discover::{DiscoverError, lead_apart, leading_to};

/// An endpoint whose interface was found.
struct Located {
    spec: EndpointSpec,
    /// The namespace that the endpoint's document names now. `None` if the agent does not know the namespace.
    namespace: Option<NamespaceId>,
}

impl State {
    /// Looks for the endpoints of documents whose endpoint is not found, whose interface is gone or renamed, whose
    /// namespace was replaced, or that changed, as far as a retry is due.
    pub(super) fn follow_due(&mut self, deliver: &Deliver) {
        self.forget_ended_pods(deliver);
        self.locate_containers();
        self.expand_bridges();
        let settled = |(key, found): &(&String, &Found)| {
            found.is_settled(&self.interfaces, self.documents.get(*key))
        };
        let moved = self.found.iter().filter(|entry| !settled(entry));
        let moved: BTreeSet<&String> = moved.map(|(key, _)| key).collect();
        let waits = |key: &String| self.kept.contains(key) && !moved.contains(key);
        let missing = self.documents.iter().filter(|(key, document)| {
            // If the namespace of a document is gone, it is looked for only while another interface may take the place
            // of its former one: that interface has to be closed.
            !self.found.contains_key(*key)
                && (self.place_left(key).is_some() || !self.is_namespace_gone(key, document))
        });
        let now = Instant::now();
        let missing = missing.map(|(key, _)| key);
        let others = missing.chain(&self.marks.stale);
        let keys: BTreeSet<&String> = moved.iter().copied().chain(others).collect();
        let due = keys
            .into_iter()
            .filter(|key| !waits(key) && self.problems.retries.is_due(key, now));
        for key in due.cloned().collect::<Vec<_>>() {
            self.follow(&key, deliver);
        }
        self.forget_unwanted();
    }

    /// Opens closed interfaces that are under policy now, and forgets documents that are gone.
    pub(super) fn forget_unwanted(&mut self) {
        let mut processes = std::mem::take(&mut self.processes);
        processes.retain(|key| self.is_wanted(key));
        self.processes = processes;
        let mut left = std::mem::take(&mut self.left);
        left.retain(|key, _| self.is_wanted(key));
        self.left = left;
        for key in self.store.keys() {
            if dir::is_key(&key) && !self.is_wanted(&key) {
                self.store.remove(&key);
            }
        }
        if self.gated.len() == 0 {
            return;
        }
        let unknown = self.dir.is_some() && (!self.listing.listed || !self.listing.torn.is_empty());
        let keys = self.documents.keys().chain(&self.listing.refused);
        let wanted: BTreeSet<DocumentHash> = keys.map(|key| DocumentHash::of(key)).collect();
        let found = self.found.values().filter(|found| !found.superseded);
        let taken = found.map(|found| found.spec.interface.ifindex).collect();
        self.gated
            .settle(|document| unknown || wanted.contains(document), &taken);
    }

    /// Resolves a document. An endpoint that cannot be found again stays unchanged while its interface exists, or
    /// while its namespace cannot be looked at.
    pub(super) fn follow(&mut self, key: &str, deliver: &Deliver) {
        let before = self.still_there(key);
        let Some(document) = self.documents.get(key).cloned() else {
            match before {
                Some(spec) => self.put(key, spec, None, deliver),
                None => self.forget(key, deliver),
            }
            return;
        };
        if document.bridge.is_some() {
            self.marks.stale.remove(key);
            return;
        }
        if before.is_none() && document.is_awaited() {
            self.await_return(key, deliver);
            return;
        }
        if before.is_none() && self.has_ended(key, &document) {
            self.end(key, &document, deliver);
            return;
        }
        match document.pid.map(|pid| self.processes.look(key, pid)) {
            Some(Lookup::Unknown(error)) => {
                self.await_process(key, &document, &error, deliver);
                return;
            }
            Some(Lookup::Found(Holder::Another)) => {
                match before {
                    Some(before) => {
                        let kept = document.relabelled(before.clone()).unwrap_or(before);
                        self.put(key, kept, None, deliver);
                    }
                    None => self.end(key, &document, deliver),
                }
                return;
            }
            _ => {}
        }
        match self.look_for(key, &document, before.as_ref()) {
            Ok(located) => self.put_at(key, &document, located, before, deliver),
            Err(error) => self.not_found(key, &document, &error, before, deliver),
        }
    }

    /// Awaits the container or interface that a document names. The endpoint is made when the container or interface
    /// appears.
    fn await_return(&mut self, key: &str, deliver: &Deliver) {
        self.marks.stale.remove(key);
        self.problems.unresolved.remove(key);
        self.problems.retries.forget(key);
        self.gated.unresolved(key, &BTreeSet::new());
        self.forget(key, deliver);
    }

    /// Leaves an endpoint as it is while its process cannot be looked at.
    fn await_process(
        &mut self,
        key: &str,
        document: &EndpointDocument,
        error: &io::Error,
        deliver: &Deliver,
    ) {
        let reason = format!("{error}; it stays as it is until the process can be looked at");
        self.problems.retries.failed(key, Instant::now());
        self.note(key, &reason);
        self.keep(key, document, deliver);
    }

    /// Looks for the interface that a document names. `before`: where its endpoint was found last.
    fn look_for(
        &self,
        key: &str,
        document: &EndpointDocument,
        before: Option<&EndpointSpec>,
    ) -> Result<Located, EndpointError> {
        let netns = document.namespace();
        let namespace = netns.as_ref().ok();
        let namespace = namespace.and_then(|netns| namespace_id(netns).found());
        let addresses = match self.marks.rewritten.contains(key) {
            true => Addresses::Present,
            false => Addresses::Known,
        };
        let spec = document.look(key, before, addresses)?.spec;
        match self.other_with(spec.interface.ifindex, key) {
            Some(other) => Err(EndpointError::Taken {
                netns: netns?,
                ifname: document.ifname.clone(),
                other,
            }),
            None => Ok(Located { spec, namespace }),
        }
    }

    /// Puts an endpoint at the interface that was found. First closes interfaces through which its
    /// pod could send without policy.
    fn put_at(
        &mut self,
        key: &str,
        document: &EndpointDocument,
        Located { spec, namespace }: Located,
        before: Option<EndpointSpec>,
        deliver: &Deliver,
    ) {
        if before.is_none() {
            self.processes.found(key, document.pid);
        }
        let elsewhere = before.filter(|before| before.interface.ifindex != spec.interface.ifindex);
        let known = self.found.contains_key(key);
        let moved = elsewhere.is_some() || self.still_there(key).is_none();
        if moved && (known || !self.listing.starting) {
            self.gated
                .close(key, spec.interface.ifindex, Until::Attached);
        }
        // The document names the same namespace as before, but another namespace has that name now.
        let replaced = |before: &EndpointSpec| {
            let netns = document.namespace().ok();
            let netns = netns.filter(|netns| netns.to_string() == before.netns);
            let apart =
                |netns| lead_apart(&netns, before.interface.ifindex, spec.interface.ifindex);
            netns.is_some_and(|netns| apart(netns).unwrap_or(true))
        };
        if let Some(before) = elsewhere.filter(replaced) {
            self.gated.close(key, before.interface.ifindex, Until::Gone);
        }
        self.settle_document(key, spec.interface.ifindex);
        self.put(key, spec, namespace, deliver);
    }

    /// Handles a document whose interface was not found: its endpoint keeps its last policy while its
    /// interface may exist, and is removed otherwise.
    fn not_found(
        &mut self,
        key: &str,
        document: &EndpointDocument,
        error: &EndpointError,
        before: Option<EndpointSpec>,
        deliver: &Deliver,
    ) {
        self.problems.passing |= error.is_passing();
        match before {
            Some(before) => {
                let ifname = &before.interface.ifname;
                let reason =
                    format!("{error}; it keeps its last policy while interface {ifname} exists");
                let closed = self.close_unresolved(key, document, error);
                self.note(key, &with_closed(&reason, &closed));
                self.keep(key, document, deliver);
            }
            None if error.shows_nothing() && !self.has_successor(key) => {
                let closed = self.close_unresolved(key, document, error);
                self.note(key, &with_closed(&error.to_string(), &closed));
                self.keep(key, document, deliver);
            }
            None => {
                self.leave_place(key);
                let closed = self.close_unresolved(key, document, error);
                self.forget(key, deliver);
                let is_gone = !cni::is_key(key) && self.is_namespace_gone(key, document);
                let reason = match is_gone {
                    true => with_remedy(&error.to_string(), key, document, &closed),
                    false => with_closed(&error.to_string(), &closed),
                };
                self.note(key, &reason);
            }
        }
    }

    /// Whether an interface has the number of the endpoint's former interface.
    fn has_successor(&self, key: &str) -> bool {
        let found = self.found.get(key);
        found.is_some_and(|found| {
            let now = self.interfaces.name(found.spec.interface.ifindex);
            matches!(now, Lookup::Found(_))
        })
    }

    /// Leaves an endpoint where it was found, with the labels that its document gives it now, until
    /// the document is resolved. If another document has got the interface meanwhile, the endpoint is not changed.
    pub(super) fn keep(&mut self, key: &str, document: &EndpointDocument, deliver: &Deliver) {
        self.marks.stale.insert(key.to_owned());
        let Some(found) = self.found.get(key).filter(|found| !found.superseded) else {
            return;
        };
        let (before, namespace) = (found.spec.clone(), found.namespace);
        let kept = document.relabelled(before.clone()).unwrap_or(before);
        self.put(key, kept, namespace, deliver);
    }

    /// Handles a document whose process has ended.
    fn end(&mut self, key: &str, document: &EndpointDocument, deliver: &Deliver) {
        self.marks.ended.insert(key.to_owned());
        self.leave_place(key);
        self.problems.retries.failed(key, Instant::now());
        let closed = self.close(key, Ok(BTreeSet::new()));
        self.forget(key, deliver);
        self.note(key, &with_remedy(ENDED, key, document, &closed));
    }

    /// Records that a document is resolved to an interface.
    pub(super) fn settle_document(&mut self, key: &str, ifindex: u32) {
        self.marks.stale.remove(key);
        self.marks.rewritten.remove(key);
        self.problems.unresolved.remove(key);
        self.problems.retries.forget(key);
        self.gated.resolved(key, ifindex);
    }

    /// Closes the interfaces that lead to the pod of an unresolved document, except interfaces of endpoints.
    /// Returns the names of the closed ones.
    fn close_unresolved(
        &mut self,
        key: &str,
        document: &EndpointDocument,
        error: &EndpointError,
    ) -> Vec<String> {
        self.problems.retries.failed(key, Instant::now());
        let leading = match (error, document.namespace()) {
            (EndpointError::Discover(_), Ok(netns)) => leading_to(&netns, &document.ifname),
            _ => Ok(BTreeSet::new()),
        };
        self.close(key, leading)
    }

    /// Closes the interfaces `leading`, and those that take the place of the endpoint's interface. Interfaces of
    /// endpoints are left out. Returns the names of the closed ones.
    fn close(&mut self, key: &str, leading: Result<BTreeSet<u32>, DiscoverError>) -> Vec<String> {
        let successors = self.successors(key);
        // A pod that is closed must not open itself by a change of its address.
        let mut stay = self.place_left(key).is_some();
        let mut interfaces = BTreeSet::new();
        for found in [leading, successors] {
            match found {
                Ok(found) => interfaces.extend(found),
                Err(error) => {
                    tracing::debug!(endpoint = key, %error, "cannot look for the pod's interfaces");
                    stay = true;
                }
            }
        }
        if stay {
            interfaces.extend(self.gated.waiting(key));
        }
        for endpoint in self.found.values().filter(|found| !found.superseded) {
            interfaces.remove(&endpoint.spec.interface.ifindex);
        }
        self.gated.unresolved(key, &interfaces)
    }

    pub(super) fn put(
        &mut self,
        key: &str,
        spec: EndpointSpec,
        namespace: Option<NamespaceId>,
        deliver: &Deliver,
    ) {
        let before = self.found.get(key);
        let delivered = before.is_some_and(|before| before.delivered && before.spec == spec);
        let found = Found {
            spec: spec.clone(),
            namespace,
            delivered: true,
            superseded: false,
        };
        for other in self.found.values_mut() {
            other.superseded |= other.spec.interface.ifindex == spec.interface.ifindex;
        }
        self.found.insert(key.to_owned(), found);
        self.left.remove(key);
        self.store_one(key);
        if !delivered {
            deliver(SourceEvent::Apply(spec));
        }
    }

    pub(super) fn forget(&mut self, key: &str, deliver: &Deliver) {
        let found = self.found.remove(key);
        if found.is_some_and(|found| found.delivered) {
            deliver(SourceEvent::Delete(key.to_owned()));
        }
    }

    pub(super) fn note(&mut self, key: &str, reason: &str) {
        if self.problems.unresolved.get(key).map(String::as_str) != Some(reason) {
            tracing::warn!(endpoint = key, %reason, "the endpoint's document cannot be applied");
            self.problems
                .unresolved
                .insert(key.to_owned(), reason.to_owned());
        }
    }
}

/// The reason, and the names of the interfaces that are closed.
fn with_closed(reason: &str, closed: &[String]) -> String {
    match closed {
        [] => reason.to_owned(),
        closed => format!(
            "{reason}; until it is found nothing passes {}",
            closed.join(", ")
        ),
    }
}
