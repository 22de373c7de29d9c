//! Whether an agent that is stopped is replaced by another, or was uninstalled.

use std::{
    sync::Arc,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use hyper::Method;
use tokio::time::{Instant, sleep};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::client::Api;

/// Between two questions.
const AGAIN: Duration = Duration::from_secs(1);
/// Between two questions while the agent runs and has not seen its DaemonSet.
const LOOK: Duration = Duration::from_secs(30);
/// Longest time for an answer at the end. An uninstall removes role and account just then: until
/// the API server has noticed that the account is gone, it answers 403.
const LONGEST: Duration = Duration::from_secs(15);

/// The DaemonSet that the agent is of.
#[derive(Clone, Debug)]
pub(crate) struct OwnSet {
    api: Api,
    path: String,
    /// A name that never was a DaemonSet's says nothing when it is not found.
    seen: Arc<AtomicBool>,
}

/// What an answer means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    There,
    Gone,
    Unclear,
}

/// `is_ending`: the set has a `deletionTimestamp`. The other is an HTTP status.
fn meaning(answer: Result<bool, Option<u16>>) -> Answer {
    match answer {
        Ok(false) => Answer::There,
        Ok(true) | Err(Some(404 | 401)) => Answer::Gone,
        Err(_) => Answer::Unclear,
    }
}

impl OwnSet {
    /// Looks for the DaemonSet until it was seen once.
    pub(crate) fn start(
        api: Api,
        name: &str,
        tasks: &TaskTracker,
        stop: &CancellationToken,
    ) -> Self {
        let path = format!(
            "/apis/apps/v1/namespaces/{}/daemonsets/{name}",
            api.namespace()
        );
        let set = Self {
            api,
            path,
            seen: Arc::default(),
        };
        let (looks, stop) = (set.clone(), stop.clone());
        tasks.spawn(async move {
            while looks.ask().await != Answer::There {
                tokio::select! {
                    () = sleep(LOOK) => {}
                    () = stop.cancelled() => return,
                }
            }
            looks.seen.store(true, Ordering::Relaxed);
        });
        set
    }

    /// Whether it was deleted. False if no answer says so in time.
    pub(crate) async fn is_gone(&self) -> bool {
        if !self.seen.load(Ordering::Relaxed) {
            return false;
        }
        let end = Instant::now() + LONGEST;
        while Instant::now() < end {
            let asked = tokio::time::timeout_at(end, self.ask()).await;
            match asked {
                Ok(Answer::There) | Err(_) => return false,
                Ok(Answer::Gone) => return true,
                Ok(Answer::Unclear) => sleep(AGAIN).await,
            }
        }
        false
    }

    async fn ask(&self) -> Answer {
        let answer = self.api.json(Method::GET, &self.path, None).await;
        meaning(match &answer {
            Ok(set) => Ok(set.pointer("/metadata/deletionTimestamp").is_some()),
            Err(error) => Err(error.code()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_deleted_daemonset_or_account_is_an_uninstall() {
        assert_eq!(meaning(Ok(false)), Answer::There);
        for gone in [Ok(true), Err(Some(404)), Err(Some(401))] {
            assert_eq!(meaning(gone), Answer::Gone, "{gone:?}");
        }
        for unclear in [Err(Some(403)), Err(Some(429)), Err(Some(500)), Err(None)] {
            assert_eq!(meaning(unclear), Answer::Unclear, "{unclear:?}");
        }
    }
}
