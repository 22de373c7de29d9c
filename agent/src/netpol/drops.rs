//! `--log-drops`: a line for each dropped packet, with its pod and the policies that dropped it.

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use agent_datapath::packet_log::{LoggedPacket, PacketLog};
use netpol::{
    contiv::Flow,
    render::{
        nft::{MIDDLE, SPOOFED, TUNNELS, dropped},
        ruleset::{Table, TableFamily},
    },
};
use tokio_util::sync::CancellationToken;

use super::state::{Shared, State};

/// Group of netlink to which the table's rules copy dropped packets.
pub(super) const GROUP: u16 = 9963;
/// Lines in [`SPAN`]; further packets are counted only.
const LINES: u32 = 50;
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
        let (mut begin, mut lines, mut left_out) = (Instant::now(), 0, 0_u64);
        loop {
            let received = match packets.next().await {
                Ok(received) => received,
                Err(error) => {
                    tracing::warn!(%error, "dropped packets cannot be received, and are not logged");
                    tokio::time::sleep(AGAIN).await;
                    continue;
                }
            };
            if begin.elapsed() >= SPAN {
                if left_out > 0 {
                    tracing::info!(left_out, "further packets were dropped");
                }
                (begin, lines, left_out) = (Instant::now(), 0, 0);
            }
            let state = shared.state.lock();
            for packet in received {
                match lines < LINES {
                    true => log(&state, &packet),
                    false => left_out += 1,
                }
                lines = lines.saturating_add(1);
            }
        }
    };
    let _stopped = stop.run_until_cancelled(logging).await;
}

fn log(state: &State, packet: &LoggedPacket) {
    let (from, to) = (packet.source, packet.destination);
    let (port, protocol) = (packet.port, packet.protocol);
    let flow = Flow::ALL
        .into_iter()
        .find(|flow| dropped(*flow) == packet.text);
    let pod = match flow {
        Some(Flow::Ingress) => to,
        Some(Flow::Egress) | None => from,
    };
    let (pod, policies) = state.restricting(pod, flow);
    let direction = match flow {
        Some(Flow::Ingress) => "ingress",
        Some(Flow::Egress) => "egress",
        None if packet.text == SPOOFED => "false source",
        None if packet.text == TUNNELS => "tunnel of the node",
        None if packet.text == MIDDLE => "unknown TCP connection",
        None => packet.text.as_str(),
    };
    tracing::info!(%from, %to, port, protocol, direction, pod, policies, "packet dropped");
}
