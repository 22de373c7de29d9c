//! Whether an agent that is stopped will be replaced by another agent, or was uninstalled.

use std::{sync::Arc, time::Duration};

use hyper::Method;
use serde_json::Value;
use tokio::{
    sync::watch as channel,
    time::{Instant, sleep},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    client::{Api, RequestError},
    one_object::{Event, Events, Pauses},
};

/// While the agent stops: pause between two requests.
const AGAIN: Duration = Duration::from_secs(1);
/// While the agent stops: how long it asks for a clear answer.
const LONGEST: Duration = Duration::from_secs(15);
/// While the agent stops: how long it waits for an event of the watch, if it got no clear answer.
const UNDER_WAY: Duration = Duration::from_secs(2);
/// The DaemonSet of the agent, watched until [`Self::was_deleted`] has its answer: an agent that stops
/// at the moment of the uninstall still gets the event of the deletion.
#[derive(Debug)]
pub struct OwnSet {
    set: Followed,
    tasks: TaskTracker,
    stop: CancellationToken,
}

#[derive(Clone, Debug)]
struct Followed {
    api: Api,
    /// Path of all DaemonSets of the namespace.
    all: String,
    name: String,
    seen: Arc<channel::Sender<Seen>>,
}

/// The last answer about the DaemonSet that the API server gave while it accepted the agent's account.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    /// The set was never there. So a later answer "not found" does not mean that it was deleted.
    Never,
    There,
    Gone,
}

/// The state of the DaemonSet by one answer of the API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    There,
    Gone,
    /// The account is not accepted, because of an uninstall or of broken credentials.
    Refused,
    Unclear,
}

/// `is_ending`: whether the set has a `deletionTimestamp`, or the HTTP status if the request failed.
fn meaning(is_ending: Result<bool, Option<u16>>) -> Answer {
    match is_ending {
        Ok(false) => Answer::There,
        Ok(true) | Err(Some(404)) => Answer::Gone,
        Err(Some(401 | 403)) => Answer::Refused,
        Err(_) => Answer::Unclear,
    }
}

fn is_ending(set: &Value) -> bool {
    set.pointer("/metadata/deletionTimestamp").is_some()
}

impl OwnSet {
    /// Follows the DaemonSet. An uninstall by Helm removes role and account a moment after the
    /// DaemonSet, and before the agents' pods end. From then on the API server refuses the agent's
    /// requests, but a watch that began earlier goes on.
    pub fn start(api: Api, name: &str) -> Self {
        let all = format!("/apis/apps/v1/namespaces/{}/daemonsets", api.namespace());
        let set = Followed {
            api,
            all,
            name: name.to_owned(),
            seen: Arc::new(channel::Sender::new(Seen::Never)),
        };
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let (follows, stopped) = (set.clone().follow(), stop.clone());
        tasks.spawn(async move {
            stopped.run_until_cancelled_owned(follows).await;
        });
        tasks.close();
        Self { set, tasks, stop }
    }

    /// Whether the DaemonSet was deleted. False if the API server has not said so: refused
    /// credentials are no uninstall.
    pub async fn was_deleted(self) -> bool {
        let is_gone = self.set.is_gone().await;
        self.stop.cancel();
        self.tasks.wait().await;
        is_gone
    }
}

impl Followed {
    async fn follow(self) {
        let mut pauses = Pauses::default();
        loop {
            let begin = Instant::now();
            let ended = self.follow_once().await;
            if let Err(error) = &ended {
                tracing::debug!(%error, set = self.name, "cannot follow the agent's DaemonSet");
            }
            if let Some(pause) = pauses.after(begin, &ended) {
                sleep(pause).await;
            }
        }
    }

    /// Follows the set until the server ends the watch. The set is also read, after the request for the
    /// watch: the watch has no event for a set that was deleted before.
    async fn follow_once(&self) -> Result<(), RequestError> {
        let events = Events::begin(&self.api, &self.all, &self.name).await;
        self.note(meaning(answer_of(&self.get().await)));
        let mut events = events?;
        while let Some(event) = events.next().await? {
            self.note(match event {
                Event::There(set) => meaning(Ok(is_ending(&set))),
                Event::Deleted => Answer::Gone,
                Event::Bookmark => Answer::Unclear,
            });
        }
        Ok(())
    }

    fn note(&self, answer: Answer) {
        self.seen.send_if_modified(|seen| {
            let now = match (answer, *seen) {
                (Answer::There, _) => Seen::There,
                (Answer::Gone, Seen::There) => Seen::Gone,
                (_, before) => before,
            };
            std::mem::replace(seen, now) != now
        });
    }

    async fn is_gone(&self) -> bool {
        let seen = *self.seen.borrow();
        if seen == Seen::Never {
            return false;
        }
        let end = Instant::now() + LONGEST;
        while Instant::now() < end {
            let set = tokio::time::timeout_at(end, self.get()).await;
            match set.map(|set| meaning(answer_of(&set))) {
                Ok(Answer::There) => return false,
                Ok(Answer::Gone) => return true,
                Ok(Answer::Unclear) if seen == Seen::There => sleep(AGAIN).await,
                Ok(Answer::Refused | Answer::Unclear) | Err(_) => break,
            }
        }
        let mut changes = self.seen.subscribe();
        let is_gone = changes.wait_for(|seen| *seen == Seen::Gone);
        let is_gone = tokio::time::timeout(UNDER_WAY, is_gone).await.is_ok();
        if !is_gone {
            tracing::warn!(
                set = self.name,
                "the API server does not say whether the DaemonSet was deleted; everything stays in \
                 force. After an uninstall run `holdfast-agent cleanup` on this node"
            );
        }
        is_gone
    }

    async fn get(&self) -> Result<Value, RequestError> {
        let path = format!("{}/{}", self.all, self.name);
        self.api.json(Method::GET, &path, None).await
    }
}

fn answer_of(set: &Result<Value, RequestError>) -> Result<bool, Option<u16>> {
    match set {
        Ok(set) => Ok(is_ending(set)),
        Err(error) => Err(error.code()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_accepted_answer_says_that_the_daemonset_was_deleted() {
        assert_eq!(meaning(Ok(false)), Answer::There);
        for gone in [Ok(true), Err(Some(404))] {
            assert_eq!(meaning(gone), Answer::Gone, "{gone:?}");
        }
        for refused in [401, 403] {
            assert_eq!(meaning(Err(Some(refused))), Answer::Refused);
        }
        for unclear in [Some(429), Some(500), None] {
            assert_eq!(meaning(Err(unclear)), Answer::Unclear, "{unclear:?}");
        }
    }
}
