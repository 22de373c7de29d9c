//! Leadership by a Lease: which agent looks names up, and creates and removes objects.

use std::time::Instant;

use agent_cluster::api::{backoff::Backoff, lease::Sight};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{Duration, KubeStore, LONGEST, RequestError, What, random};
use crate::resolver::store::Role;

/// The Lease's duration divided by this is the longest time before an agent first requests the Lease.
const FIRST: u32 = 20;
/// The holder renews this often within the duration.
const RENEWALS: u32 = 3;
/// A follower that saw a holder asks again when the Lease may be free, plus a random time up to the duration divided
/// by this.
const LATER: u32 = 4;
/// First and longest pause after a failure of a follower.
const RETRY: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(60));
/// Longest time that giving the Lease back takes, when the agent stops.
const RELEASE: Duration = Duration::from_secs(2);

/// The Lease, as far as this agent knows.
#[derive(Debug)]
struct Hold {
    /// Start of the request by which this agent got or renewed the Lease; `None` = it does not have the Lease.
    renewed: Option<Instant>,
    sight: Sight,
    retry: Backoff,
}

impl Hold {
    /// Until when this agent leads: some time before others may take the Lease.
    fn deadline(&self, duration: Duration) -> Option<Instant> {
        let renewed = self.renewed?;
        // Requests that are under way may take as long as the margin.
        let margin = LONGEST.min(duration / RENEWALS);
        Some(renewed + duration.saturating_sub(margin))
    }
}

impl KubeStore {
    /// Seeks the Lease until `stop`, then gives it back.
    pub(super) async fn seek_lease(&self, role: &watch::Sender<Role>, stop: &CancellationToken) {
        let duration = self.settings.lease;
        let mut hold = Hold {
            renewed: None,
            sight: Sight::default(),
            retry: Backoff::between(RETRY),
        };
        let mut due = Instant::now() + random(duration / FIRST);
        loop {
            tokio::select! {
                () = tokio::time::sleep_until(due.into()) => {}
                () = stop.cancelled() => break,
            }
            let now = Instant::now();
            let limit = hold.deadline(duration);
            let limit = limit.map_or(LONGEST, |at| at.saturating_duration_since(now));
            let taken = tokio::select! {
                taken = tokio::time::timeout(limit, self.lease.take(&mut hold.sight, now)) => taken,
                () = stop.cancelled() => break,
            };
            let taken = taken.unwrap_or_else(|_| {
                let late = format!("no answer within {limit:?}");
                Err(RequestError::Unreachable(late))
            });
            due = self.took(&mut hold, now, taken);
            set_role(role, hold.renewed.is_some());
        }
        let leads = hold.renewed.is_some();
        set_role(role, false);
        if leads {
            let _late = tokio::time::timeout(RELEASE, self.lease.release()).await;
        }
    }

    /// Takes the result of a request that began at `now`. Returns the time of the next one.
    fn took(&self, hold: &mut Hold, now: Instant, taken: Result<bool, RequestError>) -> Instant {
        let duration = self.settings.lease;
        let error = match taken {
            Ok(is_ours) => {
                self.set_problem(What::Lease, None);
                hold.retry = Backoff::between(RETRY);
                if is_ours {
                    hold.renewed = Some(now);
                    return now + duration / RENEWALS;
                }
                hold.renewed = None;
                // An agent that was faster than this one is not in sight yet.
                let free = hold.sight.free_at().filter(|free| *free > now);
                return free.unwrap_or(now + duration / RENEWALS) + random(duration / LATER);
            }
            Err(error) => error,
        };
        self.set_problem(What::Lease, Some(self.problem(What::Lease, &error)));
        let now = Instant::now();
        match hold.deadline(duration) {
            Some(deadline) if now < deadline => (now + duration / (RENEWALS * LATER)).min(deadline),
            _ => {
                hold.renewed = None;
                now + hold.retry.pause()
            }
        }
    }
}

fn set_role(role: &watch::Sender<Role>, leads: bool) {
    let now = match leads {
        true => Role::Leads,
        false => Role::Follows,
    };
    role.send_if_modified(|role| {
        let changed = *role != now;
        if changed {
            match leads {
                true => tracing::info!("this agent leads the resolver"),
                false => tracing::info!("this agent no longer leads the resolver"),
            }
        }
        *role = now;
        changed
    });
}
