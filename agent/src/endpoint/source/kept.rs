//! Endpoints that another agent had until a moment ago.
//!
//! A look into the namespaces of all pods takes seconds on a full node, and new names, pods and policies wait for the
//! first listing. After a takeover the listing has each endpoint where the owner before had it, as long as the
//! interface is there, with the labels that its document has now. The owner itself looked at such an endpoint only
//! now and then. The looks follow, a few at a time.

use std::{
    thread,
    time::{Duration, Instant},
};

use parking_lot::MutexGuard;

use super::{Deliver, EndpointBook, State};

/// Endpoints that are looked at under one lock: the CNI plugin's requests wait for it.
const FEW: usize = 4;
/// Longest rest between two looks.
const REST: Duration = Duration::from_millis(50);

impl EndpointBook {
    /// The first listing has the endpoints as another agent on this state directory left them just now.
    pub(crate) fn keep_found(&self) {
        self.state.lock().listing.keeps = true;
    }

    /// Looks at the endpoints that the first listing took as they were, and rests as long as it looks. `is_over`
    /// ends this early. True: each was looked at.
    pub(super) fn look_at_kept(&self, is_over: impl Fn() -> bool) -> bool {
        while !is_over() {
            let begin = Instant::now();
            let mut state = self.state.lock();
            let more = state.look_at_few_kept(&*self.deliver);
            MutexGuard::unlock_fair(state);
            if !more {
                return true;
            }
            thread::sleep(begin.elapsed().min(REST));
        }
        false
    }
}

impl State {
    /// Lists an endpoint as it was. False: it has to be looked for.
    pub(super) fn keep_as_found(&mut self, key: &str, deliver: &Deliver) -> bool {
        if !self.listing.keeps || self.still_there(key).is_none() {
            return false;
        }
        let Some(document) = self.documents.get(key).cloned() else {
            return false;
        };
        // Another process may have the number of this one.
        if document.pid.is_some() || document.bridge.is_some() {
            return false;
        }
        self.kept.insert(key.to_owned());
        self.keep(key, &document, deliver);
        true
    }

    /// False: none is left.
    fn look_at_few_kept(&mut self, deliver: &Deliver) -> bool {
        for _ in 0..FEW {
            let Some(key) = self.kept.pop_first() else {
                return false;
            };
            // A poll may have been faster.
            if self.marks.stale.contains(&key) {
                self.follow(&key, deliver);
            }
        }
        !self.kept.is_empty()
    }
}

#[cfg(test)]
mod tests;
