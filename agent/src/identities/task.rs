//! Makes the objects that label sets lack, and sends their numbers to the core.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use agent_cluster::{
    api::{
        backoff::{Backoff, random},
        client::{Api, RequestError},
        lease::Terms,
        lease_client::LeaseClient,
    },
    health::ClusterHealth,
};
use agent_core::{
    core::Event,
    identity::cluster::{GivenNumber, WantedIdentities, WantedIdentity},
    labels::LabelSet,
};
use tokio::sync::watch;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    leader::Leader,
    objects::{Made, Objects, Store},
    obstacles::{LOOKING, Obstacles, beside_operator, concerns_all, explain, full},
    operator::{OperatorSight, Verdict},
    queue::{Queue, Turn},
    resting,
    view::{Identities, Outcome},
};
use crate::runner::{CoreHandle, identity_feed::IdentityFeed};

/// Name of the Lease.
pub(super) const LEASE: &str = "holdfast-identities";
/// The longest time that the agent waits before it tries a new label set. Each agent waits for a random time, so that
/// the agents of new replicas spread their requests.
const SPREAD: Duration = Duration::from_millis(50);
/// A label set whose object exists, but whose number the core does not know yet, or that has no number left, is tried
/// again after this time.
const AGAIN: Duration = Duration::from_mins(1);
/// First and longest pause after a failure.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

/// Settings of the tasks.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) api: Api,
    pub(crate) node: String,
    /// How long an object stays that no pod uses.
    pub(crate) unused_for: Duration,
    /// Duration of the Lease.
    pub(crate) lease: Duration,
}

/// Starts the task that makes objects, and the task of the leader. Returns their state for `status` and metrics.
pub(crate) fn start(
    settings: Settings,
    feed: &IdentityFeed,
    core: &CoreHandle,
    health: ClusterHealth,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) -> Identities {
    let shared = Identities::default();
    let objects = Objects {
        api: settings.api.clone(),
        node: settings.node.clone(),
    };
    let others = watch::Sender::<Arc<WantedIdentities>>::default();
    let maker = Maker {
        objects: objects.clone(),
        core: core.clone(),
        shared: shared.clone(),
        own: feed.wanted(),
        others: others.subscribe(),
        queue: Queue::default(),
        backoff: Backoff::between(PAUSES),
        operator: OperatorSight::new(),
        obstacles: Obstacles::default(),
        is_beside_operator: false,
        resting_at: Some(Instant::now()),
    };
    tasks.spawn(stop.clone().run_until_cancelled_owned(maker.run()));
    let leader = Leader {
        lease: LeaseClient {
            namespace: settings.api.namespace().to_owned(),
            api: settings.api,
            holder: settings.node,
            terms: Terms {
                name: LEASE,
                duration: settings.lease,
            },
        },
        objects,
        core: core.clone(),
        shared: shared.clone(),
        health,
        unused_for: settings.unused_for,
        others,
    };
    tasks.spawn(leader.run(stop.clone()));
    shared
}

/// Makes objects, one at a time.
#[derive(Debug)]
struct Maker<S> {
    objects: S,
    core: CoreHandle,
    shared: Identities,
    /// Label sets of this node.
    own: watch::Receiver<Arc<WantedIdentities>>,
    /// Label sets of other nodes, while this agent leads.
    others: watch::Receiver<Arc<WantedIdentities>>,
    queue: Queue,
    backoff: Backoff,
    operator: OperatorSight,
    obstacles: Obstacles,
    /// Whether an operator of Cilium runs, or may run.
    is_beside_operator: bool,
    /// When to read which numbers [rest](resting); `None` = they were read.
    resting_at: Option<Instant>,
}

impl<S: Store> Maker<S> {
    async fn run(mut self) {
        loop {
            let wanted = self.follow();
            let until = self.step(&wanted).await;
            let until = until.unwrap_or_else(|| self.objects.now() + AGAIN);
            if until <= self.objects.now() {
                continue;
            }
            tokio::select! {
                () = self.objects.sleep_until(until) => {}
                Ok(()) = self.own.changed() => {}
                Ok(()) = self.others.changed() => {}
            }
        }
    }

    /// Joins the lists of this node and of other nodes.
    fn follow(&mut self) -> WantedIdentities {
        let mut wanted = WantedIdentities::clone(&self.others.borrow_and_update());
        let own = Arc::clone(&self.own.borrow_and_update());
        wanted.extend(
            own.iter()
                .map(|(labels, one)| (labels.clone(), one.clone())),
        );
        let at = self.objects.now();
        // One random delay for all of them: the shortest of many would be short on every node.
        let delay = random(SPREAD);
        self.queue.follow(&wanted, at, || delay);
        let limited = self.queue.limited(at).into_iter().collect();
        let lacking = wanted.keys().next().map(|labels| labels.texts().join(","));
        self.obstacles.follow(&wanted);
        if self.queue.is_empty() && !self.is_beside_operator {
            self.obstacles.let_all();
        }
        self.shared.change(|view| {
            view.limited = limited;
            view.lacking = lacking;
        });
        self.show();
        wanted
    }

    /// Writes the first obstacle into the view, for `status`.
    fn show(&self) {
        let problem = self.obstacles.first();
        self.shared.change(|view| view.problem = problem);
    }

    /// Makes one object, if an attempt is due. Gives when the next step is due.
    async fn step(&mut self, wanted: &WantedIdentities) -> Option<Instant> {
        if !self.queue.is_empty() {
            self.look_for_operator().await;
        }
        if self.is_beside_operator {
            return self.operator.next();
        }
        if !self.queue.is_empty() && self.read_resting().await {
            // The core then leaves these numbers out of the choices.
            return Some(self.objects.now());
        }
        match self.queue.next(self.objects.now()) {
            Turn::Rest => None,
            Turn::WaitUntil(at) => Some(at),
            Turn::Make(labels) => {
                let one = wanted.get(&labels)?;
                match self.make(&labels, one).await {
                    Ok(()) => {
                        self.backoff = Backoff::between(PAUSES);
                        self.queue.accept(&labels);
                    }
                    Err(error) => self.take_failure(&labels, &error).await,
                }
                Some(self.objects.now())
            }
        }
    }

    /// Reads once, before the agent makes its first object, which numbers [rest](resting). Gives whether there are
    /// any.
    async fn read_resting(&mut self) -> bool {
        if self.resting_at.is_none_or(|at| at > self.objects.now()) {
            return false;
        }
        let namespace = self.objects.namespace().to_owned();
        let ids = match self.objects.lease(&namespace, LEASE).await {
            Ok(lease) => resting::numbers(lease.as_ref()),
            Err(error) => {
                tracing::debug!(%error, "cannot read which numbers rest");
                self.resting_at = Some(self.objects.now() + AGAIN);
                return false;
            }
        };
        self.resting_at = None;
        if ids.is_empty() {
            return false;
        }
        // A core that stopped makes no list.
        let _stopped = self.core.send(Event::NumbersResting(ids)).await;
        let _stopped = self.core.inspect(|_| ()).await;
        true
    }

    /// Notes why an object was not made, and waits if the next one would fail for the same reason.
    async fn take_failure(&mut self, labels: &LabelSet, error: &RequestError) {
        self.shared.creates().inc(Outcome::Failed);
        if concerns_all(error) {
            self.obstacles.stop_all(explain(error));
            self.show();
            let until = self.objects.now() + self.backoff.pause();
            self.objects.sleep_until(until).await;
        } else {
            self.obstacles.stop(labels, explain(error));
            self.show();
            self.queue.refuse(labels, self.objects.now());
        }
    }

    async fn make(&mut self, labels: &LabelSet, one: &WantedIdentity) -> Result<(), RequestError> {
        for id in one.choices.iter().copied() {
            let made = self.objects.make(id, labels, one.is_of_pod).await?;
            let outcome = match made {
                Made::Others => continue,
                Made::Created => Outcome::Created,
                Made::Found => Outcome::Found,
            };
            self.shared.creates().inc(outcome);
            self.obstacles.made(labels);
            self.show();
            if one.vanished {
                tracing::warn!(
                    identity = id.0,
                    labels = labels.texts().join(","),
                    "a CiliumIdentity was deleted while pods use it; it is there again"
                );
                self.shared.change(|view| view.vanished += 1);
            }
            self.queue.later(labels, self.objects.now() + AGAIN);
            let given = GivenNumber {
                labels: labels.clone(),
                id,
            };
            // A core that stopped needs no number.
            let _stopped = self.core.send(Event::NumbersGiven(vec![given])).await;
            return Ok(());
        }
        self.shared.creates().inc(Outcome::Full);
        self.queue.later(labels, self.objects.now() + AGAIN);
        self.obstacles.stop(labels, full(labels, one));
        self.show();
        Ok(())
    }

    async fn look_for_operator(&mut self) {
        let verdict = self.operator.look(&self.objects).await;
        let was_beside = std::mem::replace(&mut self.is_beside_operator, verdict != Verdict::None);
        match verdict {
            Verdict::None if was_beside => self.obstacles.let_all(),
            Verdict::None => {}
            Verdict::Undecided => self.obstacles.stop_all(LOOKING.to_owned()),
            Verdict::Runs(lease) => {
                let problem = beside_operator(&lease);
                if self.obstacles.first().as_ref() != Some(&problem) {
                    tracing::error!("{problem}");
                }
                self.obstacles.stop_all(problem);
            }
        }
        self.show();
    }
}

#[cfg(test)]
mod tests;
