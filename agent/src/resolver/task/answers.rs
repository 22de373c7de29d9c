//! Questions of commands to the resolver's task.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use daemon::metrics::Label as _;
use dns_policy::name::Fqdn;
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};

use super::{Task, chosen, now};
use crate::resolver::{
    ask::{self, Families},
    book::Said,
    counters::{Counters, LookupResult},
    dns_name,
    object::{Resolver, UnixTime},
    observe::Outcome,
    store::{ResolverStore, Role},
    view::{AddressView, LookupView, NameView, ObjectView, ResolverView},
};

/// Longest time for an answer of the task.
const ANSWER: Duration = Duration::from_secs(5);

/// The error that the resolver's task does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the resolver does not answer; see the agent's log")]
pub struct NotRunning;

/// A question to the task.
#[derive(Debug)]
pub enum Request {
    State(oneshot::Sender<ResolverView>),
    Objects(oneshot::Sender<Vec<ObjectView>>),
    /// Servers and families for a look-up.
    Servers(oneshot::Sender<(Vec<SocketAddr>, Families)>),
    /// The result of a look-up by command.
    LookedUp(Fqdn, Outcome),
}

/// Sends questions to the task. Clones ask the same task.
#[derive(Clone, Debug)]
pub struct ResolverHandle {
    requests: mpsc::Sender<Request>,
    counters: Arc<Counters>,
}

impl ResolverHandle {
    pub(super) fn new(requests: mpsc::Sender<Request>) -> Self {
        Self {
            requests,
            counters: Arc::default(),
        }
    }

    pub fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    async fn ask<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<T>) -> Request,
    ) -> Result<T, NotRunning> {
        let (sender, answer) = oneshot::channel();
        let asked = async {
            self.requests.send(request(sender)).await.ok()?;
            answer.await.ok()
        };
        timeout(ANSWER, asked)
            .await
            .ok()
            .flatten()
            .ok_or(NotRunning)
    }

    pub async fn state(&self) -> Result<ResolverView, NotRunning> {
        self.ask(Request::State).await
    }

    pub async fn objects(&self) -> Result<Vec<ObjectView>, NotRunning> {
        self.ask(Request::Objects).await
    }

    /// Looks a name up now. The agent that writes objects adds the result to the name's objects.
    pub async fn look_up(&self, name: &Fqdn) -> Result<LookupView, NotRunning> {
        let (servers, families) = self.ask(Request::Servers).await?;
        let objects = self.objects().await?;
        let about = objects
            .iter()
            .filter(|object| dns_name::matches(&Fqdn::normalise(&object.name), name));
        let mut view = LookupView {
            name: name.to_string(),
            servers: servers.iter().map(ToString::to_string).collect(),
            outcome: LookupResult::NoServer.text().to_owned(),
            addresses: Vec::new(),
            objects: about.map(|object| object.key.clone()).collect(),
        };
        if servers.is_empty() {
            return Ok(view);
        }
        let outcome = ask::look_up(name, &servers, families).await;
        view.outcome = LookupResult::from(&outcome).text().to_owned();
        if let Outcome::Found(addresses) = &outcome {
            let shown = addresses.iter().map(|(ip, ttl)| AddressView {
                ip: ip.to_string(),
                ttl_seconds: *ttl,
                age_seconds: 0,
            });
            view.addresses = shown.collect();
        }
        let request = Request::LookedUp(name.clone(), outcome);
        self.requests.send(request).await.map_err(|_| NotRunning)?;
        Ok(view)
    }
}

impl<S: ResolverStore> Task<S> {
    pub(super) fn answer(&mut self, request: Request) {
        // It is no error if a client does not wait for its answer.
        match request {
            Request::State(answer) => {
                let _left = answer.send(self.state());
            }
            Request::Objects(answer) => {
                let now = now();
                let objects = self.book.objects();
                let shown = objects.map(|(_, object, said)| {
                    let said = |name: &Fqdn| said.get(name).copied().unwrap_or(Said::Store);
                    let next = |name: &Fqdn| self.book.next_of(name).filter(|_| self.leads());
                    shown(object, now, said, next)
                });
                let _left = answer.send(shown.collect());
            }
            Request::Servers(answer) => {
                let servers = chosen(&self.ends.servers.borrow()).unwrap_or_default();
                let _left = answer.send((servers, self.families));
            }
            Request::LookedUp(name, outcome) => {
                self.counters.lookups.inc(LookupResult::from(&outcome));
                if self.leads() {
                    self.book.asked_by_hand(&name, &outcome, now());
                }
            }
        }
    }

    fn state(&mut self) -> ResolverView {
        let now = now();
        let mut view = ResolverView {
            role: match (self.writes, self.role) {
                (false, _) => "consumes",
                (true, Role::Leads | Role::LeadsInMemory) => "leads",
                (true, Role::Follows) => "follows",
            }
            .to_owned(),
            queued: self.ends.observations.len(),
            dropped: self.ends.observations.dropped(),
            unwritten: self.book.unwritten(),
            problems: self.problems(),
            ..ResolverView::default()
        };
        for (_, object, _) in self.book.objects() {
            view.objects += 1;
            view.names += object.status.names.len();
            view.addresses += object.status.count();
            let names = object.status.names.iter();
            let degraded =
                names.filter(|name| name.degraded.as_ref().is_some_and(|d| d.is_degraded));
            view.degraded += degraded.count();
        }
        if self.leads() {
            let next = self.book.schedule().next();
            view.next_lookup_seconds = next.map(|(at, _)| at.since(now));
        }
        view
    }
}

fn shown(
    object: &Resolver,
    now: UnixTime,
    said: impl Fn(&Fqdn) -> Said,
    next: impl Fn(&Fqdn) -> Option<UnixTime>,
) -> ObjectView {
    let names = object.status.names.iter().map(|entry| NameView {
        name: entry.name.to_string(),
        addresses: entry
            .addresses
            .iter()
            .map(|address| AddressView {
                ip: address.ip.to_string(),
                ttl_seconds: address.ttl,
                age_seconds: now.since(address.last),
            })
            .collect(),
        failures: entry.failures,
        degraded: entry
            .degraded
            .as_ref()
            .filter(|degraded| degraded.is_degraded)
            .map(|degraded| degraded.reason.clone()),
        next_lookup_seconds: next(&entry.name).map(|at| at.since(now)),
        said_by: said(&entry.name).as_str().to_owned(),
    });
    ObjectView {
        key: object.key.to_string(),
        name: object.name.to_string(),
        names: names.collect(),
    }
}
