//! From the documents of `--policy-dir` to events: policies go to the core as they are, objects of
//! the cluster through the `Book`.

mod refused_firewalls;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use self::refused_firewalls::RefusedFirewalls;
use super::event::Event;
use crate::{
    high_scale::{
        objects::{HighScaleObjects, HighScaleView},
        scope::PodScope,
    },
    kubernetes::{
        book::{Book, Changes},
        labels::LabelFilter,
        local_pods::LocalPods,
        unattended::Unattended,
    },
    name_objects::object::{self, Resolver},
    policy::{
        document::{Body, PolicyDocument},
        lint,
        source::PolicyChange,
    },
    source_event::SourceEvent,
};

/// Maximum number of changes of pods or Services in one event. An answer may have to wait for all
/// of them.
const CHUNK: usize = 64;

/// Maximum number of warnings that are logged one by one.
const LOGGED: usize = 50;

/// Divides documents by what they are about.
#[derive(Debug)]
pub struct Router {
    book: Book,
    /// Warnings of documents in the book, by key. Documents without a warning have no entry.
    objects: BTreeMap<String, Vec<String>>,
    /// Keys of documents that the core has.
    policies: BTreeSet<String>,
    firewalls: RefusedFirewalls,
    /// Warnings of policies about labels that pods do not give to their identities, by key.
    filtered: BTreeMap<String, Vec<String>>,
    warnings: Vec<String>,
    namespaces: usize,
    /// Changes of DNSNameResolvers, until the core takes them.
    names: Vec<SourceEvent<Arc<Resolver>>>,
    /// Nodes and pods of agents; `None` if agents are not pods.
    unattended: Option<Unattended>,
    /// Objects about the tunnel between nodes; `None` if this node has no part in it.
    high_scale: Option<HighScaleObjects>,
    /// The pods that are read.
    pods: PodScope,
}

/// Which parts of the agent a document is for.
struct Parts {
    core: bool,
    book: bool,
}

/// Parts of documents that are for neither the core nor the book.
const NEITHER: Parts = Parts {
    core: false,
    book: false,
};

fn parts(document: &PolicyDocument) -> Parts {
    match &document.body {
        Body::Rules(_)
        | Body::NetworkPolicy { .. }
        | Body::Group(_)
        | Body::Node(_)
        | Body::ServiceCidr(_) => Parts {
            core: true,
            book: false,
        },
        // The addresses of API servers are labels, and backends of a Service.
        Body::Slice(slice) => Parts {
            core: slice.is_of_api_servers(),
            book: true,
        },
        Body::Pod(_)
        | Body::Namespace(_)
        | Body::Service(_)
        | Body::Endpoint(_)
        | Body::Identity(_) => Parts {
            core: false,
            book: true,
        },
        Body::NameResolver(_) | Body::World(_) => NEITHER,
    }
}

/// A router with an empty book of the cluster `default`, under Cilium's rules about labels.
impl Default for Router {
    fn default() -> Self {
        Self::new(Book::new(LabelFilter::default(), "default"))
    }
}

impl Router {
    /// A router without documents. `book` reads the objects of the cluster.
    pub fn new(book: Book) -> Self {
        Self {
            book,
            objects: BTreeMap::new(),
            policies: BTreeSet::new(),
            firewalls: RefusedFirewalls::default(),
            filtered: BTreeMap::new(),
            warnings: Vec::new(),
            namespaces: 0,
            names: Vec::new(),
            unattended: None,
            high_scale: None,
            pods: PodScope::All,
        }
    }

    /// The same, with the nodes that have no agent.
    pub fn with_unattended(self, unattended: Option<Unattended>) -> Self {
        Self { unattended, ..self }
    }

    /// The same, with the objects about the tunnel between nodes. `own` is the name of this node.
    pub fn with_high_scale(self, own: &str) -> Self {
        let high_scale = Some(HighScaleObjects::new(own));
        Self { high_scale, ..self }
    }

    /// The same, with only the pods of this scope.
    pub fn with_pods(self, pods: PodScope) -> Self {
        Self { pods, ..self }
    }

    /// Events for the changes of one reading. Objects come before policies, so that a new policy
    /// meets the labels that it was written for. If no object changed, there is no event about
    /// objects.
    pub fn route(&mut self, changes: Vec<PolicyChange>) -> Vec<Event> {
        let (mut begin, mut rest) = (Vec::new(), Vec::new());
        let mut is_listing = false;
        let mut is_touched = false;
        for change in &changes {
            if let PolicyChange::Rejected(errors) = change {
                self.firewalls.set(errors);
            }
        }
        for change in changes {
            is_touched |= matches!(change, PolicyChange::Document(_));
            match change {
                PolicyChange::Document(SourceEvent::Init) => {
                    is_listing = true;
                    begin.push(Event::Policies(SourceEvent::Init));
                    self.names.push(SourceEvent::Init);
                }
                PolicyChange::Document(SourceEvent::Apply(document))
                    if !self.pods.has(&document) =>
                {
                    rest.extend(self.remove(document.key));
                }
                PolicyChange::Document(SourceEvent::Apply(document)) => {
                    rest.extend(self.put(document));
                }
                PolicyChange::Document(SourceEvent::Delete(key)) => rest.extend(self.remove(key)),
                PolicyChange::Document(SourceEvent::InitDone) => {
                    self.firewalls.set_listed();
                    if let Some(objects) = &mut self.high_scale {
                        objects.set_listed();
                    }
                    rest.extend(self.close_namespaces());
                    rest.push(Event::Policies(SourceEvent::InitDone));
                }
                other => rest.push(other.into()),
            }
        }
        rest.extend(self.close_namespaces());
        if is_listing {
            self.names.push(SourceEvent::InitDone);
        }
        let Changes {
            identities,
            pods,
            services,
        } = self.book.changes();
        let mut events = begin;
        events.extend(chunks(identities, is_listing).map(Event::Identities));
        events.extend(chunks(pods, is_listing).map(Event::Pods));
        events.extend(chunks(services, is_listing).map(Event::Services));
        if is_touched {
            events.extend(self.warn());
            let namespaces = self.book.namespaces();
            if std::mem::replace(&mut self.namespaces, namespaces) != namespaces {
                events.push(Event::Namespaces(namespaces));
            }
        }
        events.append(&mut rest);
        events
    }

    /// The pods of this node, if they changed since the last call.
    pub fn take_local(&mut self) -> Option<LocalPods> {
        self.book.take_local()
    }

    /// Changes of DNSNameResolvers since the last call. DNSNameResolvers are namespaced: the key of a
    /// removed one is `namespace/name`.
    pub fn take_names(&mut self) -> Vec<SourceEvent<Arc<Resolver>>> {
        std::mem::take(&mut self.names)
    }

    /// Nodes that have no agent, if they may have changed since the last call.
    pub fn take_unattended(&mut self) -> Option<BTreeSet<String>> {
        self.unattended.as_mut()?.take()
    }

    /// The data of objects about the tunnel between nodes, if these data changed since the last call.
    pub fn take_high_scale(&mut self) -> Option<HighScaleView> {
        self.high_scale.as_mut()?.take()
    }

    fn put(&mut self, document: PolicyDocument) -> Vec<Event> {
        let Parts { core, book } = parts(&document);
        let key = document.key.clone();
        if let Some(objects) = &mut self.high_scale {
            objects.put(&document);
        }
        if let Some(unattended) = &mut self.unattended {
            unattended.put(&document);
        }
        if let Body::NameResolver(object) = &document.body {
            self.names.push(SourceEvent::Apply(Arc::clone(object)));
        }
        if book {
            self.book.put(&document);
        }
        if !core || book {
            match document.warnings.is_empty() {
                true => drop(self.objects.remove(&key)),
                false => drop(self.objects.insert(key.clone(), document.warnings.clone())),
            }
        }
        if core {
            let unknown = lint::labels_of_no_identity(&document, |label| self.book.gives(label));
            match unknown.is_empty() {
                true => self.filtered.remove(&key),
                false => self.filtered.insert(key.clone(), unknown),
            };
            self.firewalls.put(&key);
            self.policies.insert(key);
            return vec![Event::Policies(SourceEvent::Apply(document))];
        }
        self.remove_policy(key).into_iter().collect()
    }

    fn remove(&mut self, key: String) -> Option<Event> {
        self.objects.remove(&key);
        self.book.remove(&key);
        if let Some(unattended) = &mut self.unattended {
            unattended.remove(&key);
        }
        if let Some(objects) = &mut self.high_scale {
            objects.remove(&key);
        }
        if let Some((object::KIND, place)) = key.split_once('/') {
            self.names.push(SourceEvent::Delete(place.to_owned()));
        }
        self.remove_policy(key)
    }

    fn remove_policy(&mut self, key: String) -> Option<Event> {
        self.filtered.remove(&key);
        if !self.policies.remove(&key) {
            return None;
        }
        Some(Event::Policies(match self.firewalls.replace(&key) {
            Some(closed) => SourceEvent::Apply(closed),
            None => SourceEvent::Delete(key),
        }))
    }

    /// Changes of documents that stand in for refused firewalls.
    fn close_namespaces(&mut self) -> impl Iterator<Item = Event> + use<> {
        let policies = &self.policies;
        let difference = self.firewalls.follow(|key| policies.contains(key));
        let gone = difference.delete.into_iter().map(SourceEvent::Delete);
        let closed = difference.apply.into_iter().map(SourceEvent::Apply);
        gone.chain(closed).map(Event::Policies)
    }

    /// The warnings, if they changed.
    fn warn(&mut self) -> Option<Event> {
        let own = self.objects.iter().flat_map(|(key, warnings)| {
            let warnings = warnings.iter();
            warnings.map(move |warning| format!("{key}: {warning}"))
        });
        let joined = self.book.warnings().into_iter();
        let joined = joined.map(|(key, warning)| format!("{key}: {warning}"));
        let filtered = self.filtered.iter().filter(|_| self.book.has_pods());
        let filtered = filtered.flat_map(|(key, warnings)| {
            let warnings = warnings.iter();
            warnings.map(move |warning| format!("policy {key}: {warning}"))
        });
        let warnings: Vec<String> = joined.chain(own).chain(filtered).collect();
        if warnings == self.warnings {
            return None;
        }
        let known: BTreeSet<&String> = self.warnings.iter().collect();
        let mut new = warnings.iter().filter(|text| !known.contains(text));
        for warning in new.by_ref().take(LOGGED) {
            tracing::warn!("{warning}");
        }
        let more = new.count();
        if more > 0 {
            tracing::warn!(more, "further warnings about objects of the cluster");
        }
        self.warnings.clone_from(&warnings);
        Some(Event::ClusterWarnings(warnings))
    }
}

/// Splits changes into parts. A listing gets a begin and an end, unless it is empty.
fn chunks<T>(
    changes: Vec<SourceEvent<T>>,
    is_listing: bool,
) -> impl Iterator<Item = Vec<SourceEvent<T>>> {
    let is_listing = is_listing && !changes.is_empty();
    let begin = is_listing.then_some(SourceEvent::Init);
    let end = is_listing.then_some(SourceEvent::InitDone);
    let mut all = begin.into_iter().chain(changes).chain(end);
    std::iter::from_fn(move || {
        let part: Vec<_> = all.by_ref().take(CHUNK).collect();
        (!part.is_empty()).then_some(part)
    })
}
