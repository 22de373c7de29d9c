//! The one agent that looks after all objects: it deletes objects that no pod has used for a long time, and makes
//! objects for pods whose nodes have no agent.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use agent_cluster::{
    api::{
        backoff::{Backoff, random},
        client::RequestError,
        lease::Sight,
        lease_client::LeaseClient,
    },
    health::ClusterHealth,
};
use agent_core::{
    core::{Core, identities_in_use::UnusedIdentity},
    identity::cluster::WantedIdentities,
};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{
    objects::{Deleted, Objects, Store as _},
    obstacles::{concerns_all, explain},
    operator::{OperatorSight, Verdict},
    resting::{RESTING, Resting},
    task::LEASE,
    unused::Unused,
    view::Identities,
};
use crate::runner::CoreHandle;

/// Longest pause between two looks.
const LOOK: Duration = Duration::from_secs(5);
/// Kinds whose objects show which labels are in use.
const KINDS: [&str; 3] = ["Namespace", "Pod", "CiliumIdentity"];
/// Maximum number of objects that one look deletes.
const DELETES: usize = 20;
/// The holder renews the Lease after each of these parts of its duration, and stops leading one part before its end.
const PARTS: u32 = 3;
/// First and longest pause after the Lease could not be requested.
const PAUSES: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(60));
/// Longest time that the release of the Lease may take when the agent stops.
const RELEASE: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct Leader {
    pub(super) lease: LeaseClient,
    pub(super) objects: Objects,
    pub(super) core: CoreHandle,
    pub(super) shared: Identities,
    pub(super) health: ClusterHealth,
    /// How long an object stays that no pod uses.
    pub(super) unused_for: Duration,
    /// Gets the label sets of other nodes that lack an object. The task that makes objects reads it.
    pub(super) others: watch::Sender<Arc<WantedIdentities>>,
}

/// The Lease, as far as this agent knows.
#[derive(Debug)]
struct Hold {
    sight: Sight,
    /// When the request began by which the Lease became ours.
    renewed: Option<Instant>,
    retry: Backoff,
}

/// What the leading agent remembers between looks.
#[derive(Debug)]
struct Watched {
    unused: Unused,
    /// `None`: not read since this agent began to lead.
    resting: Option<Resting>,
    operator: OperatorSight,
}

impl Watched {
    fn new() -> Self {
        Self {
            unused: Unused::default(),
            resting: None,
            operator: OperatorSight::new(),
        }
    }
}

impl Leader {
    /// Requests and renews the Lease until `stop`, then releases it.
    pub(super) async fn run(self, stop: CancellationToken) {
        let mut hold = Hold {
            sight: Sight::default(),
            renewed: None,
            retry: Backoff::between(PAUSES),
        };
        stop.run_until_cancelled(self.lead(&mut hold)).await;
        if hold.renewed.is_some() {
            let _late = tokio::time::timeout(RELEASE, self.lease.release()).await;
        }
    }

    async fn lead(&self, hold: &mut Hold) {
        let duration = self.lease.terms.duration;
        let look = LOOK.min(self.unused_for / 4);
        let mut watched = Watched::new();
        let mut request_at = Instant::now() + random(duration / PARTS);
        loop {
            let now = Instant::now();
            if now >= request_at {
                request_at = self.request(hold, now).await;
            }
            let leads = self.leads(hold);
            self.show(leads);
            let next = if leads {
                self.look(hold, &mut watched).await;
                request_at.min(Instant::now() + look)
            } else {
                watched = Watched::new();
                request_at
            };
            tokio::time::sleep_until(next.into()).await;
        }
    }

    /// Whether this agent leads, and has the Lease for long enough to send one more request.
    fn leads(&self, hold: &Hold) -> bool {
        let duration = self.lease.terms.duration;
        hold.renewed
            .is_some_and(|at| at + duration - duration / PARTS > Instant::now())
    }

    fn show(&self, leads: bool) {
        if !leads {
            self.others.send_if_modified(|others| {
                let had = !others.is_empty();
                *others = Arc::default();
                had
            });
        }
        self.shared.change(|view| {
            if view.leads != leads {
                tracing::info!(
                    leads,
                    "the agent that deletes unused CiliumIdentities changed"
                );
            }
            view.leads = leads;
        });
    }

    /// Takes or renews the Lease. Gives the time of the next request.
    async fn request(&self, hold: &mut Hold, now: Instant) -> Instant {
        let duration = self.lease.terms.duration;
        let taken =
            tokio::time::timeout(duration / PARTS, self.lease.take(&mut hold.sight, now)).await;
        let late = || RequestError::Unreachable(format!("no answer within {:?}", duration / PARTS));
        let problem = match taken.unwrap_or_else(|_| Err(late())) {
            Ok(is_ours) => {
                hold.retry = Backoff::between(PAUSES);
                hold.renewed = is_ours.then_some(now);
                self.shared.change(|view| view.lead_problem = None);
                if is_ours {
                    return now + duration / PARTS;
                }
                let free = hold.sight.free_at().filter(|free| *free > now);
                return free.unwrap_or(now + duration / PARTS) + random(duration / 4);
            }
            Err(error) => format!("the Lease holdfast-identities: {error}"),
        };
        self.shared.change(|view| view.lead_problem = Some(problem));
        Instant::now() + hold.retry.pause().min(duration / PARTS)
    }

    /// Looks once at all objects.
    async fn look(&self, hold: &Hold, watched: &mut Watched) {
        let Ok(found) = self.core.inspect(Core::identities_in_use).await else {
            return;
        };
        let unused = &mut watched.unused;
        if !found.is_synced || !self.is_current() {
            // The agent does not know all pods, so it cannot know for how long an object has had no pod.
            unused.forget();
            return;
        }
        let now = Instant::now();
        let lacking = unused.lacking(found.lacking, now);
        self.others.send_if_modified(|others| {
            let differs = **others != lacking;
            if differs {
                *others = Arc::new(lacking);
            }
            differs
        });
        let due = unused.look(found.unused, self.unused_for, now);
        let due = self.announce(due, watched).await;
        match due {
            Ok(due) => self.delete_all(hold, due, &mut watched.unused).await,
            Err(error) => {
                let problem = format!("the Lease {LEASE}: {}", explain(&error));
                self.shared.change(|view| view.lead_problem = Some(problem));
            }
        }
    }

    /// Adds the numbers of these objects to the [`Resting`] numbers in the Lease before the objects are deleted,
    /// because agents that start later do not see the deletion. Gives the objects that may be deleted now.
    async fn announce(
        &self,
        mut due: Vec<UnusedIdentity>,
        watched: &mut Watched,
    ) -> Result<Vec<UnusedIdentity>, RequestError> {
        if due.is_empty() || watched.operator.look(&self.objects).await != Verdict::None {
            return Ok(Vec::new());
        }
        let mut resting = match watched.resting.take() {
            Some(resting) => resting,
            None => {
                let lease = self.objects.lease(&self.lease.namespace, LEASE).await?;
                let mut resting = Resting::default();
                resting.take(lease.as_ref(), Instant::now());
                resting
            }
        };
        let now = Instant::now();
        due.truncate(resting.room(now).min(DELETES));
        due.iter().for_each(|object| resting.add(object.id, now));
        let text = resting.text();
        watched.resting = Some(resting);
        if due.is_empty() {
            return Ok(due);
        }
        let is_written = self.lease.annotate(RESTING, &text).await?;
        Ok(if is_written { due } else { Vec::new() })
    }

    async fn delete_all(&self, hold: &Hold, due: Vec<UnusedIdentity>, unused: &mut Unused) {
        for object in due {
            if !self.leads(hold) || !self.is_current() {
                return;
            }
            match self.delete(&object).await {
                Ok(Deleted::Done) => {
                    self.shared.deleted();
                    let labels = object.labels.texts().join(",");
                    tracing::info!(
                        identity = object.id.0,
                        labels,
                        "an unused CiliumIdentity was deleted"
                    );
                }
                Ok(Deleted::Kept) => unused.keep(object.id, Instant::now()),
                Err(error) => {
                    let problem =
                        format!("CiliumIdentity {}: delete: {}", object.id, explain(&error));
                    self.shared.change(|view| view.lead_problem = Some(problem));
                    if concerns_all(&error) {
                        return;
                    }
                    unused.keep(object.id, Instant::now());
                }
            }
        }
    }

    /// Deletes an object, unless a pod uses it now.
    async fn delete(&self, object: &UnusedIdentity) -> Result<Deleted, RequestError> {
        let known = object.clone();
        let is_unused = self.core.inspect(move |core| core.is_unused(&known)).await;
        if !is_unused.unwrap_or(false) {
            return Ok(Deleted::Kept);
        }
        let uid = object.uid.as_ref();
        self.objects.delete(object.id, &object.labels, uid).await
    }

    /// Whether this agent knows every pod and every object.
    fn is_current(&self) -> bool {
        let watches = self.health.watches();
        let is_of_use = |kind: &str| KINDS.contains(&kind);
        let mut watches = watches.iter().filter(|watch| is_of_use(&watch.kind));
        watches.all(|watch| watch.has_listed && watch.reason.is_none())
    }
}
