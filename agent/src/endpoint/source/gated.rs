//! Which host-side interfaces are closed, and until when.

use std::collections::{BTreeMap, BTreeSet};

use agent_datapath::closed::{Closed, DocumentHash, Gate, Why};

use super::interfaces::Interfaces;

/// The event that opens a closed interface. The end of the interface or of the document opens it as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Until {
    Found,
    /// The endpoint's programs are attached.
    Attached,
    /// The interface is gone. This is for an interface that leads to a former namespace, whose name another namespace
    /// has now.
    Gone,
}

/// Closed interfaces of every document.
pub(super) struct Gated {
    gate: Option<Box<dyn Gate>>,
    interfaces: Interfaces,
    closed: BTreeMap<DocumentHash, BTreeMap<u32, Until>>,
    /// Interfaces that could not be closed or opened, so that each is logged once.
    failed: BTreeSet<u32>,
    /// Why interfaces could not be closed by name.
    names_failure: Option<String>,
}

impl Gated {
    /// Begins with the interfaces that an earlier run closed. They stay closed until their documents are resolved.
    pub(super) fn new(gate: Option<Box<dyn Gate>>, interfaces: Interfaces) -> Self {
        let restored = gate
            .as_ref()
            .map_or(Ok(Closed::new()), |gate| gate.closed());
        let restored = restored.unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot list the interfaces that an earlier run closed");
            Closed::new()
        });
        let until = |interfaces: BTreeMap<u32, Why>| {
            let each = interfaces.into_iter();
            each.map(|(ifindex, why)| match why {
                Why::NotFound => (ifindex, Until::Found),
                Why::Left => (ifindex, Until::Gone),
            })
            .collect()
        };
        Self {
            gate,
            interfaces,
            closed: restored
                .into_iter()
                .map(|(document, interfaces)| (document, until(interfaces)))
                .collect(),
            failed: BTreeSet::new(),
            names_failure: None,
        }
    }

    /// Closes exactly the interfaces with these names, except those of endpoints.
    pub(super) fn close_names(&mut self, interfaces: &BTreeSet<String>) {
        let closed = self
            .gate
            .as_mut()
            .map_or(Ok(()), |gate| gate.close_names(interfaces));
        self.names_failure = closed.err().map(|error| {
            format!(
                "interfaces of endpoint documents are open until they are endpoints: the nftables rules that close \
                 them cannot be made: {error}"
            )
        });
    }

    /// Why interfaces could not be closed by name: for `status`.
    pub(super) fn names_failure(&self) -> Option<String> {
        self.names_failure.clone()
    }

    /// Whether an interface has the programs of an endpoint.
    pub(super) fn is_under_policy(&self, ifindex: u32) -> bool {
        let gate = self.gate.as_ref();
        gate.is_some_and(|gate| gate.is_under_policy(ifindex))
    }

    /// Number of closed interfaces, over all documents.
    pub(super) fn len(&self) -> usize {
        self.closed.values().map(BTreeMap::len).sum()
    }

    /// Closes an interface. An interface that has the programs of an endpoint stays as it is, unless it leads to a
    /// namespace that was replaced ([`Until::Gone`]). Returns false if the interface was not closed.
    pub(super) fn close(&mut self, key: &str, ifindex: u32, until: Until) -> bool {
        let Some(gate) = &mut self.gate else {
            return false;
        };
        if until != Until::Gone && gate.is_under_policy(ifindex) {
            return false;
        }
        let interface = self.interfaces.describe(ifindex);
        let why = match until {
            Until::Found | Until::Attached => Why::NotFound,
            Until::Gone => Why::Left,
        };
        if let Err(error) = gate.close(key, ifindex, why) {
            if self.failed.insert(ifindex) {
                tracing::error!(endpoint = key, interface, %error, "cannot close the interface");
            }
            return false;
        }
        let closed = self.closed.entry(DocumentHash::of(key)).or_default();
        if closed.insert(ifindex, until).is_none() {
            tracing::warn!(
                endpoint = key,
                interface,
                "the interface is closed until its endpoint is under policy"
            );
        }
        true
    }

    /// Closes exactly the interfaces `leading` for an unresolved document. Returns the names of the closed ones.
    pub(super) fn unresolved(&mut self, key: &str, leading: &BTreeSet<u32>) -> Vec<String> {
        self.open_others(key, leading);
        let closed = leading.iter();
        let closed = closed.filter(|ifindex| self.close(key, **ifindex, Until::Found));
        let closed: Vec<u32> = closed.copied().collect();
        self.names(closed)
    }

    /// Interfaces that are closed until the endpoint is found, except those that are gone.
    pub(super) fn waiting(&self, key: &str) -> Vec<u32> {
        let closed = self
            .closed
            .get(&DocumentHash::of(key))
            .into_iter()
            .flatten();
        let waiting = closed.filter(|(ifindex, until)| {
            **until != Until::Gone && !self.interfaces.name(**ifindex).is_gone()
        });
        waiting.map(|(ifindex, _)| *ifindex).collect()
    }

    fn names(&self, interfaces: impl IntoIterator<Item = u32>) -> Vec<String> {
        let names = interfaces.into_iter();
        let names = names.map(|ifindex| self.interfaces.describe(ifindex));
        names.collect()
    }

    /// Notes the interface of a resolved document. The interface opens once its programs are attached.
    pub(super) fn resolved(&mut self, key: &str, ifindex: u32) {
        // This includes an interface that was closed for another document, or for an earlier text of this one.
        for closed in self.closed.values_mut() {
            if let Some(until) = closed.get_mut(&ifindex) {
                *until = Until::Attached;
            }
        }
        self.open_others(key, &BTreeSet::from([ifindex]));
    }

    /// Opens interfaces that waited for the endpoint to be found, except the `kept` ones.
    fn open_others(&mut self, key: &str, kept: &BTreeSet<u32>) {
        let document = DocumentHash::of(key);
        let closed = self.closed.get(&document).into_iter().flatten();
        let others: Vec<u32> = closed
            .filter(|(ifindex, until)| **until != Until::Gone && !kept.contains(ifindex))
            .map(|(ifindex, _)| *ifindex)
            .collect();
        for ifindex in others {
            self.open(&document, ifindex);
        }
    }

    /// Opens the interfaces that are under policy, that are certainly gone, or whose document is not wanted any more.
    /// An interface of an endpoint that another document describes (`taken`) stays closed until that endpoint is under
    /// policy.
    pub(super) fn settle(
        &mut self,
        is_wanted: impl Fn(&DocumentHash) -> bool,
        taken: &BTreeSet<u32>,
    ) {
        let Some(gate) = &mut self.gate else {
            return;
        };
        let mut due = Vec::new();
        for (document, interfaces) in &self.closed {
            let wanted = is_wanted(document);
            for (ifindex, until) in interfaces {
                let waits = *until == Until::Attached;
                let attached = waits && gate.is_under_policy(*ifindex);
                let stays = wanted || (waits && taken.contains(ifindex));
                if !stays || attached || self.interfaces.name(*ifindex).is_gone() {
                    due.push((document.clone(), *ifindex));
                } else if let Err(error) = gate.keep(*ifindex) {
                    tracing::debug!(%error, "a closed interface");
                }
            }
        }
        for (document, ifindex) in due {
            self.open(&document, ifindex);
        }
    }

    fn open(&mut self, document: &DocumentHash, ifindex: u32) {
        let Some(gate) = &mut self.gate else {
            return;
        };
        match gate.open(document, ifindex) {
            Ok(()) => {
                self.failed.remove(&ifindex);
                if let Some(closed) = self.closed.get_mut(document) {
                    closed.remove(&ifindex);
                    if closed.is_empty() {
                        self.closed.remove(document);
                    }
                }
            }
            Err(error) if self.failed.insert(ifindex) => {
                let interface = self.interfaces.describe(ifindex);
                tracing::error!(interface, %error, "cannot open the interface");
            }
            Err(_) => {}
        }
    }
}
