//! Changes of the node's interfaces, routes and addresses, as the kernel reports them.

use std::{io, sync::Arc, time::Duration};

use rtnetlink::{MulticastGroup, packet_core::NetlinkMessage, packet_route::RouteNetlinkMessage};
use tokio::sync::Notify;
use tokio_stream::StreamExt as _;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Pause before the next attempt to subscribe.
const AGAIN: Duration = Duration::from_secs(5);
/// Pause after a subscription ended, which happens if its messages have no room.
const ENDED: Duration = Duration::from_millis(100);

/// Says whether a message is of a change that matters.
pub(crate) type Filter = dyn FnMut(NetlinkMessage<RouteNetlinkMessage>) -> bool + Send;

/// A subscription to multicast groups of rtnetlink, with a filter of their messages.
pub(crate) struct Subscription {
    pub(crate) groups: &'static [MulticastGroup],
    /// Makes a filter for each attempt.
    pub(crate) filter: fn() -> Box<Filter>,
    /// How the agent notices changes while no event comes, for the log.
    pub(crate) instead: &'static str,
}

/// Wakes a task after changes that the filter passes. Several changes may be one wake-up.
#[derive(Clone, Debug, Default)]
pub(crate) struct NetlinkEvents(Arc<Notify>);

impl NetlinkEvents {
    /// Subscribes until stopped. While the subscription fails, no event comes.
    pub(crate) fn watch(
        subscription: Subscription,
        tasks: &TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        let events = Self::default();
        let following = events.clone().follow_always(subscription);
        tasks.spawn(stop.run_until_cancelled_owned(following));
        events
    }

    /// Returns when something changed since the last call, and once after each subscription: what
    /// changed before it was not reported.
    pub(crate) async fn changed(&self) {
        self.0.notified().await;
    }

    async fn follow_always(self, subscription: Subscription) {
        loop {
            let pause = match self.follow(&subscription).await {
                Ok(()) => ENDED,
                Err(error) => {
                    let instead = subscription.instead;
                    tracing::warn!(%error, "cannot receive events of the kernel; {instead}");
                    AGAIN
                }
            };
            tokio::time::sleep(pause).await;
        }
    }

    async fn follow(&self, subscription: &Subscription) -> io::Result<()> {
        let (connection, _handle, mut messages) =
            rtnetlink::new_multicast_connection(subscription.groups)?;
        self.0.notify_one();
        let mut connection = std::pin::pin!(connection);
        let mut is_change = (subscription.filter)();
        loop {
            tokio::select! {
                biased;
                message = messages.next() => match message {
                    Some((message, _)) => {
                        if is_change(message) {
                            self.0.notify_one();
                        }
                    }
                    None => return Ok(()),
                },
                () = &mut connection => return Ok(()),
            }
        }
    }
}
