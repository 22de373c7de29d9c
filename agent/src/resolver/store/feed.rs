//! Objects of the cluster on their way from the task that reads documents to the resolver.
//!
//! Neither task waits for the other. For each object, only the latest change is kept.

use std::{collections::BTreeMap, sync::Arc};

use agent_core::{name_objects::object::Resolver, source_event::SourceEvent};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::Changes;

/// Changes that wait, at most one for each object of one namespace.
#[derive(Debug)]
pub struct Feed {
    namespace: String,
    state: Mutex<State>,
    added: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Whether the objects have been listed once.
    is_listed: bool,
    /// Whether the resolver has got the listing.
    has_begun: bool,
    /// Latest states by `namespace/name`; `None` = the object is gone.
    waiting: BTreeMap<String, Option<Arc<Resolver>>>,
}

impl Feed {
    /// A feed of the changes of one namespace's objects.
    pub fn new(namespace: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            state: Mutex::default(),
            added: Notify::new(),
        }
    }

    /// Adds changes. Objects of other namespaces are left out.
    pub(crate) fn add(&self, changes: Vec<SourceEvent<Arc<Resolver>>>) {
        if changes.is_empty() {
            return;
        }
        let mut state = self.state.lock();
        for change in changes {
            match change {
                SourceEvent::Init => {}
                SourceEvent::InitDone => state.is_listed = true,
                SourceEvent::Apply(object) => {
                    if object.key.namespace == self.namespace {
                        state.waiting.insert(object.key.to_string(), Some(object));
                    }
                }
                SourceEvent::Delete(key) => {
                    let (namespace, _) = key.split_once('/').unwrap_or_default();
                    if namespace == self.namespace {
                        state.waiting.insert(key, None);
                    }
                }
            }
        }
        drop(state);
        self.added.notify_one();
    }

    /// Waits for changes. The first changes are the listing, with its begin and its end.
    pub(super) async fn next(&self) -> Changes {
        loop {
            if let Some(changes) = self.take() {
                return changes;
            }
            self.added.notified().await;
        }
    }

    fn take(&self) -> Option<Changes> {
        let mut state = self.state.lock();
        let is_first = state.is_listed && !state.has_begun;
        if !state.is_listed || (state.waiting.is_empty() && !is_first) {
            return None;
        }
        state.has_begun = true;
        let waiting = std::mem::take(&mut state.waiting).into_iter();
        let changes = waiting.map(|(key, object)| match object {
            Some(object) => SourceEvent::Apply(Arc::unwrap_or_clone(object)),
            None => SourceEvent::Delete(key),
        });
        let begin = is_first.then_some(SourceEvent::Init);
        let end = is_first.then_some(SourceEvent::InitDone);
        Some(begin.into_iter().chain(changes).chain(end).collect())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(namespace: &str, name: &str, version: &str) -> SourceEvent<Arc<Resolver>> {
        let document = json!({
            "apiVersion": "network.openshift.io/v1alpha1", "kind": "DNSNameResolver",
            "metadata": {"namespace": namespace, "name": name, "resourceVersion": version},
            "spec": {"name": "www.example.org."},
        });
        let read = Resolver::read(&document, "default").unwrap();
        SourceEvent::Apply(Arc::new(read.object))
    }

    fn short(changes: &Changes) -> Vec<String> {
        let changes = changes.iter().map(|change| match change {
            SourceEvent::Init => "init".to_owned(),
            SourceEvent::InitDone => "done".to_owned(),
            SourceEvent::Apply(object) => format!("{}@{}", object.key, object.version.0),
            SourceEvent::Delete(key) => format!("-{key}"),
        });
        changes.collect()
    }

    #[test]
    fn nothing_comes_before_the_listing_is_whole_and_then_only_the_last_change_of_each_object() {
        let feed = Feed::new("dns");
        feed.add(vec![SourceEvent::Init, object("dns", "a", "1")]);
        assert_eq!(feed.take(), None);
        feed.add(vec![object("other", "a", "1"), SourceEvent::InitDone]);
        assert_eq!(short(&feed.take().unwrap()), ["init", "dns/a@1", "done"]);
        assert_eq!(feed.take(), None);
        feed.add(vec![object("dns", "a", "2"), object("dns", "b", "3")]);
        feed.add(vec![object("dns", "a", "4")]);
        let gone = ["dns/b", "other/a"].map(|key| SourceEvent::Delete(key.to_owned()));
        feed.add(gone.into());
        assert_eq!(short(&feed.take().unwrap()), ["dns/a@4", "-dns/b"]);
        assert_eq!(feed.take(), None);
    }

    #[test]
    fn an_empty_listing_is_a_listing() {
        let feed = Feed::new("dns");
        feed.add(vec![SourceEvent::Init, SourceEvent::InitDone]);
        assert_eq!(short(&feed.take().unwrap()), ["init", "done"]);
        assert_eq!(feed.take(), None);
    }
}
