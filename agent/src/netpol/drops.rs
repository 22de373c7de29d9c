//! `--log-drops`: a line for each dropped packet, with its pod and the policies that dropped it.

use std::{collections::VecDeque, io, sync::Arc, time::Duration};

use agent_cluster::own_interfaces;
use agent_core::policy::trace::protocol_name;
use agent_datapath::packet_log::{LoggedPacket, PacketLog};
use netpol::{
    contiv::Flow,
    render::{
        nft::{MIDDLE, SPOOFED, TUNNELS, dropped},
        ruleset::{Table, TableFamily},
    },
};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};
use tokio_util::sync::CancellationToken;

use super::{
    state::{Shared, State},
    why::direction,
};

/// Group of netlink to which the table's rules copy dropped packets.
pub(super) const GROUP: u16 = 9963;
/// Maximum lines in each [`SPAN`]; further packets are counted only.
const LINES: usize = 50;
const SPAN: Duration = Duration::from_secs(1);
/// Pause after packets could not be received.
const AGAIN: Duration = Duration::from_secs(5);

/// Receives the packets in the network namespace of this thread.
///
/// # Errors
/// The kernel lacks nfnetlink_log, or another process has the group.
pub(super) fn open() -> io::Result<PacketLog> {
    PacketLog::bind(GROUP)
}

/// The tables, with rules that copy dropped packets if `--log-drops` is given. Frames are counted only.
pub(super) fn logged(mut tables: Vec<Table>, is_wanted: bool) -> Vec<Table> {
    if is_wanted {
        for table in &mut tables {
            if table.family == TableFamily::Inet {
                *table = table.clone().logging(GROUP);
            }
        }
    }
    tables
}

/// Logs until stopped.
pub(super) async fn run(packets: PacketLog, shared: Arc<Shared>, stop: CancellationToken) {
    let logging = async {
        let mut budget = Budget::default();
        let mut second = interval(SPAN);
        second.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                received = packets.next() => match received {
                    Ok(received) => log_some(&shared.state.lock(), &received, &mut budget),
                    Err(error) => {
                        tracing::warn!(%error, "dropped packets cannot be received, and are not logged");
                        sleep(AGAIN).await;
                    }
                },
                _ = second.tick() => {
                    let left_out = std::mem::take(&mut budget.left_out);
                    if left_out > 0 {
                        tracing::info!(left_out, "further packets were dropped, which are not logged: at most {LINES} lines in a second");
                    }
                }
            }
        }
    };
    let _stopped = stop.run_until_cancelled(logging).await;
}

/// How many lines may be written.
#[derive(Debug, Default)]
struct Budget {
    /// When the last lines were written, at most [`LINES`].
    written: VecDeque<Instant>,
    /// Packets without a line since their number was last reported.
    left_out: u64,
}

impl Budget {
    /// Whether a packet that was received at `now` gets a line.
    fn has_line(&mut self, now: Instant) -> bool {
        let is_full = self.written.len() == LINES;
        let oldest = self.written.front().filter(|_| is_full);
        if oldest.is_some_and(|oldest| now.duration_since(*oldest) < SPAN) {
            self.left_out = self.left_out.saturating_add(1);
            return false;
        }
        if is_full {
            self.written.pop_front();
        }
        self.written.push_back(now);
        true
    }
}

fn log_some(state: &State, packets: &[LoggedPacket], budget: &mut Budget) {
    for packet in packets {
        if budget.has_line(Instant::now()) {
            log(state, packet);
        }
    }
}

fn log(state: &State, packet: &LoggedPacket) {
    let LoggedPacket {
        source: from,
        destination: to,
        ..
    } = packet;
    let Cause {
        direction,
        pod,
        policies,
    } = cause(state, packet);
    let protocol = protocol_name(packet.protocol);
    let interface = packet
        .interface
        .and_then(|index| own_interfaces::name(index).found());
    let destination_port = packet.port;
    tracing::info!(%from, %to, destination_port, protocol, direction, interface, pod, policies, "packet dropped");
}

/// Why a packet was dropped.
#[derive(Debug, PartialEq, Eq)]
struct Cause {
    direction: String,
    /// The pod whose policies dropped the packet, or the pod that sent it from a false source address. `None`: not
    /// known.
    pod: Option<String>,
    policies: Option<String>,
}

fn cause(state: &State, packet: &LoggedPacket) -> Cause {
    let flow = Flow::ALL
        .into_iter()
        .find(|flow| dropped(*flow) == packet.text);
    let Some(flow) = flow else {
        let direction = match packet.text.as_str() {
            SPOOFED => "false source",
            TUNNELS => "tunnel of the node",
            MIDDLE => "unknown TCP connection",
            text => text,
        };
        return Cause {
            direction: direction.to_owned(),
            pod: packet.interface.and_then(|index| state.pod_behind(index)),
            policies: None,
        };
    };
    let address = match flow {
        Flow::Ingress => packet.destination,
        Flow::Egress => packet.source,
    };
    let restricting = state.restricting(address, flow);
    let (pod, policies) = restricting.unzip();
    Cause {
        direction: direction(flow).to_owned(),
        pod,
        policies,
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use agent_core::policy::parse::parse_documents;

    use super::*;
    use crate::{endpoint::discover::by_route::Way, netpol::ways::Ways};

    #[test]
    fn lines_are_at_most_fifty_in_every_second() {
        let (begin, mut budget) = (Instant::now(), Budget::default());
        let at = |millis| begin + Duration::from_millis(millis);
        assert!((0..40).all(|_| budget.has_line(at(800))));
        let soon = (0..60).filter(|_| budget.has_line(at(1_700))).count();
        assert_eq!((soon, budget.left_out), (10, 50));
        let later = (0..60).filter(|_| budget.has_line(at(1_800))).count();
        assert_eq!((later, budget.left_out), (40, 70));
    }

    fn packet(text: &str, interface: u32) -> LoggedPacket {
        LoggedPacket {
            text: text.to_owned(),
            source: IpAddr::from([10, 1, 0, 9]),
            destination: IpAddr::from([10, 1, 0, 1]),
            protocol: 6,
            port: Some(80),
            interface: Some(interface),
        }
    }

    #[test]
    fn a_false_source_is_that_of_the_pod_behind_the_interface() {
        let mut state = State::new("one");
        let documents = "
{apiVersion: v1, kind: Pod, metadata: {name: web-0, namespace: shop},
 spec: {nodeName: one, containers: [{name: c}]}, status: {podIP: 10.1.0.1}}
---
{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: lock, namespace: shop}, spec: {podSelector: {}}}
";
        for document in parse_documents(documents, "test") {
            state.put(document.unwrap());
        }
        state.commit().unwrap();
        let way = Way::Pair {
            index: 7,
            name: "vethweb".to_owned(),
        };
        state.set_ways(Ways::of([(IpAddr::from([10, 1, 0, 1]), way)]));
        let of = |text: &str, interface| {
            let cause = cause(&state, &packet(text, interface));
            (cause.direction, cause.pod, cause.policies)
        };
        let web = || Some("shop/web-0".to_owned());
        assert_eq!(of(SPOOFED, 7), ("false source".to_owned(), web(), None));
        assert_eq!(of(SPOOFED, 8), ("false source".to_owned(), None, None));
        let lock = Some("NetworkPolicy/shop/lock".to_owned());
        assert_eq!(
            of(dropped(Flow::Ingress), 9),
            ("ingress".to_owned(), web(), lock)
        );
    }
}
