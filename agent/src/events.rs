//! The datapath's reports about packets: read from its ring and kept for a while.

use std::{
    collections::VecDeque,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use agent_core::core::packet_view::PacketView;
use agent_datapath::events::EventReader;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use shared_maps::{
    FAMILY_IPV4, FAMILY_IPV6,
    event::{Event, FAMILY_ARP, HAS_ICMP_TYPE, Reason},
    policy::EGRESS,
    user::Globals,
};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// Maximum records that are stored. A further record displaces the oldest.
const KEPT: usize = 4096;
/// Pause between two reads: the programs wake a reader only when much is unread.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Answer to `/v1/events`: packets that the datapath reported.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Packets {
    /// Number of the record to ask for next.
    pub next: u64,
    /// Records that were gone before they were asked for.
    pub missed: u64,
    /// Records, oldest first.
    pub packets: Vec<PacketView>,
}

/// The latest records. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Events {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    more: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Number of the first record kept.
    first: u64,
    kept: VecDeque<PacketView>,
}

impl Events {
    /// Records from number `after` on. If there are none yet, waits at most `wait` for the next ones.
    pub async fn after(&self, after: u64, wait: Duration) -> Packets {
        let more = self.shared.more.notified();
        let found = self.read(after);
        if !found.packets.is_empty() || wait.is_zero() {
            return found;
        }
        let _later = tokio::time::timeout(wait, more).await;
        self.read(after)
    }

    fn read(&self, after: u64) -> Packets {
        let state = self.shared.state.lock();
        let from = after.max(state.first);
        let skip = usize::try_from(from - state.first).unwrap_or(usize::MAX);
        Packets {
            next: state.first + state.kept.len() as u64,
            missed: state.first.saturating_sub(after),
            packets: state.kept.iter().skip(skip).cloned().collect(),
        }
    }

    fn push(&self, packet: PacketView) {
        let mut state = self.shared.state.lock();
        if state.kept.len() == KEPT {
            state.kept.pop_front();
            state.first += 1;
        }
        state.kept.push_back(packet);
    }

    /// Reads the pinned ring until stopped.
    pub async fn follow(self, maps: Globals, stop: CancellationToken) {
        let mut poll = tokio::time::interval(POLL_INTERVAL);
        poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut reader = None;
        while stop.run_until_cancelled(poll.tick()).await.is_some() {
            if reader.is_none() {
                reader = EventReader::open(&maps)
                    .inspect_err(|error| tracing::debug!(%error, "cannot read datapath events"))
                    .ok();
            }
            let Some(reader) = &mut reader else {
                continue;
            };
            let events = reader.take(KEPT);
            for event in &events {
                self.push(view(event));
            }
            if !events.is_empty() {
                self.shared.more.notify_waiters();
            }
        }
    }
}

fn view(event: &Event) -> PacketView {
    let of_v4 = |[a, b, c, d, ..]: [u8; 16]| Ipv4Addr::new(a, b, c, d);
    let reason = Reason::ALL
        .into_iter()
        .find(|reason| *reason as u8 == event.reason);
    let end = |bytes: [u8; 16], port| match event.family {
        FAMILY_IPV4 => SocketAddr::new(of_v4(bytes).into(), port).to_string(),
        FAMILY_IPV6 => SocketAddr::new(Ipv6Addr::from(bytes).into(), port).to_string(),
        FAMILY_ARP => of_v4(bytes).to_string(),
        _ => String::new(),
    };
    PacketView {
        time: event.time,
        endpoint: event.endpoint,
        direction: if event.egress == EGRESS {
            "egress"
        } else {
            "ingress"
        }
        .to_owned(),
        reason: reason.map_or_else(
            || format!("reason {}", event.reason),
            |r| r.as_str().to_owned(),
        ),
        dropped: reason.is_some_and(Reason::is_drop),
        protocol: event.protocol,
        arp: event.family == FAMILY_ARP,
        icmp_type: (event.flags & HAS_ICMP_TYPE != 0).then_some(event.icmp_type),
        source: end(event.saddr, event.sport.get()),
        destination: end(event.daddr, event.dport.get()),
        remote_identity: event.remote_identity,
        length: event.len,
        ..PacketView::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_slow_reader_gets_the_number_of_missed_events() {
        let events = Events::default();
        for _ in 0..KEPT + 10 {
            events.push(PacketView::default());
        }
        let read = events.after(4, Duration::ZERO).await;
        assert_eq!((read.missed, read.packets.len()), (6, KEPT));
        assert_eq!(read.next, KEPT as u64 + 10);
        let nothing = events.after(read.next, Duration::ZERO).await;
        assert_eq!((nothing.missed, nothing.packets.len()), (0, 0));
    }
}
