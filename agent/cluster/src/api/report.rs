//! Reports in the cluster which of its objects are refused: in the status of policies, and as Events.
//! The status of a policy also reports that it is accepted.
//!
//! ```text
//!  documents ─► refusals ─► plan (what, and when) ─► condition / event ─► API server
//!                            ▲
//!                          lease: one agent of the cluster writes
//! ```
//!
//! A failure here never changes the policy in force.

mod condition;
mod event;
mod firewall_status;
mod plan;

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use agent_core::policy::egress_firewall;
use hyper::Method;
use jiff::Timestamp;
use serde_json::Value;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use self::plan::{Next, Outcome, Plan, What, Write};
use super::{
    backoff::{Backoff, random},
    client::{Api, RequestError},
    lease::{Sight, Terms},
    lease_client::{LeaseClient, micro_time, present},
};
use crate::{
    health::ClusterHealth,
    refusals::Refusals,
    resource::{Resource, WITH_IDENTITIES},
};

/// Whether the status of an object has to be written if the object is accepted: true if the status has our
/// report of a refusal, or no report yet. Always false for a kind whose status has no field for a report.
pub(crate) fn is_marked(kind: &str, status: Option<&Value>) -> bool {
    match kind {
        egress_firewall::KIND => firewall_status::is_marked(status),
        _ => plan::has_condition(kind) && condition::is_marked(status),
    }
}

/// The Lease that makes one agent of the cluster the writer, in the agents' namespace. An agent takes
/// it only while it has something to report.
const LEASE: Terms = Terms {
    name: "holdfast-refusals",
    duration: Duration::from_secs(120),
};
/// How often the holder renews.
const RENEW: Duration = Duration::from_secs(40);
/// Longest time before an agent requests the Lease, so that not all agents do it at once.
const FIRST: Duration = Duration::from_secs(3);
/// First and longest time until the Lease is requested again after a failure.
const RETRY: (Duration, Duration) = (Duration::from_secs(5), Duration::from_mins(5));
/// The holder stops writing this long before another agent may take its Lease.
const MARGIN: Duration = Duration::from_secs(20);

/// The task that reports refused objects in the cluster, while it holds the Lease.
#[derive(Debug)]
pub(crate) struct Reporter {
    pub(crate) api: Api,
    pub(crate) node: String,
    /// The refused objects; a new value is sent whenever they change.
    pub(crate) refusals: watch::Receiver<Arc<Refusals>>,
    pub(crate) health: ClusterHealth,
}

/// The Lease, as far as this agent knows.
#[derive(Debug)]
struct Hold {
    /// When this agent last took or renewed the Lease. `None`: the Lease is not ours.
    renewed: Option<Instant>,
    sight: Sight,
    /// When the Lease is requested again.
    due: Instant,
    retry: Backoff,
}

impl Hold {
    fn new(due: Instant) -> Self {
        Self {
            renewed: None,
            sight: Sight::default(),
            due,
            retry: Backoff::between(RETRY),
        }
    }

    fn is_ours(&self, now: Instant) -> bool {
        self.renewed
            .is_some_and(|renewed| now < renewed + LEASE.duration - MARGIN)
    }
}

impl Reporter {
    /// Runs until the agent stops.
    pub(crate) async fn run(self, stop: CancellationToken) {
        stop.run_until_cancelled_owned(self.report()).await;
    }

    async fn report(mut self) {
        let mut plan = Plan::new(Instant::now());
        let mut hold = Hold::new(Instant::now() + random(FIRST));
        let mut problems = BTreeMap::new();
        loop {
            let refusals = self.refusals.borrow_and_update().clone();
            let is_empty = refusals.is_empty();
            plan.set(refusals);
            if is_empty {
                self.release(&hold).await;
                problems.clear();
                self.health.set_report_problem(None);
                if self.refusals.changed().await.is_err() {
                    return;
                }
                hold = Hold::new(Instant::now() + random(FIRST));
                continue;
            }
            let now = Instant::now();
            if now >= hold.due {
                let had = hold.is_ours(now);
                let held = self.hold(&mut hold, now).await;
                if !had {
                    plan.forget();
                }
                self.note(&mut problems, "the Lease", held.err());
            }
            let wake = match plan.next(Instant::now()) {
                _ if !hold.is_ours(Instant::now()) => hold.due,
                Next::Write(write) => {
                    let what = match write.what {
                        What::Condition => "conditions of policies",
                        What::Event(_) => "Events",
                    };
                    let (outcome, error) = self.write(&write).await;
                    plan.done(write, outcome, Instant::now());
                    self.note(&mut problems, what, error);
                    continue;
                }
                Next::At(at) => at.min(hold.due),
                Next::Nothing => hold.due,
            };
            tokio::select! {
                () = tokio::time::sleep_until(wake.into()) => {}
                changed = self.refusals.changed() => if changed.is_err() {
                    return;
                },
            }
        }
    }

    /// Shows why reports of one kind fail, and logs it once.
    fn note(
        &self,
        problems: &mut BTreeMap<&'static str, String>,
        what: &'static str,
        error: Option<RequestError>,
    ) {
        let Some(error) = error else {
            if problems.remove(what).is_some() {
                let all = problems.values().next().cloned();
                self.health.set_report_problem(all);
            }
            return;
        };
        let remedy = match error.code() {
            Some(403) => {
                "; add the missing verb to the agent's ClusterRole or Role, which the chart makes"
            }
            _ => "; the agent tries again",
        };
        let problem = format!("{what} for refused objects cannot be written: {error}{remedy}");
        if problems.get(what) != Some(&problem) {
            tracing::warn!(problem, "refused objects are not reported in the cluster");
            problems.insert(what, problem.clone());
            self.health.set_report_problem(Some(problem));
        }
    }

    /// Takes or renews the Lease, if it is free or ours.
    async fn hold(&self, hold: &mut Hold, now: Instant) -> Result<(), RequestError> {
        let taken = self.lease().take(&mut hold.sight, now).await;
        match taken {
            Ok(true) => {
                hold.renewed = Some(now);
                hold.due = now + RENEW;
                hold.retry = Backoff::between(RETRY);
                Ok(())
            }
            Ok(false) => {
                hold.renewed = None;
                hold.due = now + LEASE.duration / 2 + random(LEASE.duration / 2);
                hold.retry = Backoff::between(RETRY);
                Ok(())
            }
            Err(error) => {
                hold.due = Instant::now() + hold.retry.pause();
                Err(error)
            }
        }
    }

    fn lease(&self) -> LeaseClient {
        LeaseClient {
            api: self.api.clone(),
            namespace: self.api.namespace().to_owned(),
            holder: self.node.clone(),
            terms: LEASE,
        }
    }

    /// Releases the Lease if this agent holds it.
    async fn release(&self, hold: &Hold) {
        if hold.is_ours(Instant::now()) {
            self.lease().release().await;
        }
    }

    async fn write(&self, write: &Write) -> (Outcome, Option<RequestError>) {
        let error = match self.try_write(write).await {
            Ok(()) => return (Outcome::Done, None),
            Err(error) => error,
        };
        match error.code() {
            // The object, or this API version of its kind, is gone: the watch reports it.
            Some(404) => (Outcome::Done, None),
            Some(409) => (Outcome::Conflict, None),
            // The error concerns this object only. The object is reported again after it has changed.
            Some(400 | 413 | 422) => {
                let key = &write.key;
                tracing::warn!(key, %error, "refused object is not reported in the cluster");
                (Outcome::Done, None)
            }
            _ => (Outcome::Failed, Some(error)),
        }
    }

    async fn try_write(&self, write: &Write) -> Result<(), RequestError> {
        let Some(place) = Place::of(&write.key) else {
            return Ok(());
        };
        let Some(object) = self.object(&place).await? else {
            return Ok(());
        };
        match (write.what, &write.message) {
            (What::Condition, message) => {
                let now = Timestamp::now().strftime("%FT%TZ").to_string();
                let message = message.as_deref();
                let patch = match place.resource.kind {
                    egress_firewall::KIND => firewall_status::patch(&object, message),
                    _ => condition::patch(&object, message, &now),
                };
                let Some(patch) = patch else {
                    return Ok(());
                };
                let path = format!("{}/{}/status", place.path(), place.name);
                self.api.json(Method::PATCH, &path, Some(&patch)).await?;
            }
            (What::Event(count), Some(message)) => {
                self.write_event(&object, message, count).await?;
            }
            (What::Event(_), None) => {}
        }
        Ok(())
    }

    /// Creates an Event, or raises its count if it exists.
    async fn write_event(
        &self,
        object: &Value,
        message: &str,
        count: u32,
    ) -> Result<(), RequestError> {
        let note = event::shortened(message, event::NOTE_MAX);
        let namespace = event::namespace(object);
        let events = format!("/apis/events.k8s.io/v1/namespaces/{namespace}/events");
        let path = format!("{events}/{}", event::name(object, note));
        let now = micro_time();
        let again = |count| event::series(count, &now);
        if count > 1 {
            let patched = self
                .api
                .json(Method::PATCH, &path, Some(&again(count)))
                .await;
            // The Event may be gone, because Events live for an hour.
            if present(patched)?.is_some() {
                return Ok(());
            }
        }
        let event = event::event(object, note, &self.node, &now);
        match self.api.json(Method::POST, &events, Some(&event)).await {
            Err(error) if error.code() == Some(409) => {
                let patch = again(count.max(2));
                self.api.json(Method::PATCH, &path, Some(&patch)).await?;
            }
            other => {
                other?;
            }
        }
        Ok(())
    }

    /// An object as it is now. The account has the right to `list` objects, and not to `get` one.
    async fn object(&self, place: &Place<'_>) -> Result<Option<Value>, RequestError> {
        let path = format!(
            "{}?fieldSelector=metadata.name%3D{}&limit=1",
            place.path(),
            place.name
        );
        let mut list = self.api.json(Method::GET, &path, None).await?;
        let items = list.get_mut("items").and_then(Value::as_array_mut);
        let item = items.and_then(|items| items.pop());
        Ok(item.filter(Value::is_object).map(|mut object| {
            // Items of a list have neither field.
            object["apiVersion"] = place.resource.version.into();
            object["kind"] = place.resource.kind.into();
            object
        }))
    }
}

/// Where the API server has the object of a key.
struct Place<'a> {
    resource: &'static Resource,
    namespace: Option<&'a str>,
    name: &'a str,
}

impl<'a> Place<'a> {
    /// `None` if the key is not that of an object that can be named in a path.
    fn of(key: &'a str) -> Option<Self> {
        let mut parts = key.split('/');
        let kind = parts.next()?;
        let (namespace, name) = match (parts.next()?, parts.next()) {
            (name, None) => (None, name),
            (namespace, Some(name)) => (Some(namespace), name),
        };
        let is_plain = |text: &str| {
            let mut bytes = text.bytes();
            text.starts_with(|first: char| first.is_ascii_alphanumeric())
                && bytes.all(|b| b.is_ascii_alphanumeric() || b"-.".contains(&b))
        };
        let is_known = parts.next().is_none() && namespace.is_none_or(is_plain) && is_plain(name);
        let mut resources = WITH_IDENTITIES.iter();
        let resource = resources.find(|resource| resource.kind == kind)?;
        is_known.then_some(Self {
            resource,
            namespace,
            name,
        })
    }

    /// URL path of the collection that contains the object, with the namespace if the object has one.
    fn path(&self) -> String {
        let all = self.resource.path();
        match (self.namespace, all.rsplit_once('/')) {
            (Some(namespace), Some((group, plural))) => {
                format!("{group}/namespaces/{namespace}/{plural}")
            }
            _ => all,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_kinds_with_a_place_for_a_report_are_marked() {
        for (kind, is) in [
            ("CiliumNetworkPolicy", true),
            ("CiliumClusterwideNetworkPolicy", true),
            ("EgressFirewall", true),
            ("NetworkPolicy", false),
            ("Pod", false),
            ("CiliumNode", false),
        ] {
            assert_eq!(is_marked(kind, None), is, "{kind}");
        }
    }

    #[test]
    fn a_key_names_the_path_of_its_object_and_an_odd_one_none() {
        let path =
            |key: &str| Place::of(key).map(|place| format!("{}/{}", place.path(), place.name));
        assert_eq!(
            path("CiliumNetworkPolicy/shop/web").as_deref(),
            Some("/apis/cilium.io/v2/namespaces/shop/ciliumnetworkpolicies/web")
        );
        assert_eq!(
            path("CiliumClusterwideNetworkPolicy/web").as_deref(),
            Some("/apis/cilium.io/v2/ciliumclusterwidenetworkpolicies/web")
        );
        assert_eq!(
            path("Pod/a/b").as_deref(),
            Some("/api/v1/namespaces/a/pods/b")
        );
        for odd in [
            "",
            "Pod",
            "Pod/",
            "Pod/a/?",
            "Pod/a/b/c",
            "Pod/../b",
            "Secret/a/b",
        ] {
            assert_eq!(path(odd), None, "{odd}");
        }
    }
}
