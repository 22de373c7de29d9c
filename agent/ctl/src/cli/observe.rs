//! `observe`: what the datapath says about packets.

mod line;
mod select;

use std::collections::VecDeque;

use agent_core::core::packet_view::PacketView;
use anyhow::Result;
use daemon::command_line::{failure, output::print_next};
use dns_policy::wall_time;
use holdfast_agent::{
    admin::client::Client,
    config::observe_args::{ObserveArgs, Since},
    events::Packets,
};
use serde::Serialize;
use shared_maps::user::monotonic_ns;

use self::{line::line, select::Selection};

/// A packet with its wall-clock time.
#[derive(Debug, Serialize)]
struct Observed<'a> {
    /// RFC 3339, in UTC.
    at: String,
    #[serde(flatten)]
    packet: &'a PacketView,
}

/// Prints the packets that the agent kept; with `--follow`, also later packets.
pub(crate) async fn run(args: &ObserveArgs) -> Result<()> {
    let client = Client::new(args.client.admin_socket());
    let endpoint = match &args.endpoint.endpoint {
        Some(text) => Some(super::number_of(&client, text).await?),
        None => None,
    };
    let selection = Selection {
        endpoint,
        since: args.since.map(since),
        filter: &args.filter,
    };
    let mut after = 0;
    let mut first = true;
    loop {
        let wait = if first { "0" } else { "1" };
        let packets: Packets = client
            .get(&format!("/v1/events?after={after}&wait={wait}"))
            .await?;
        if packets.missed > 0 && !first {
            let missed = format!("{} packets were missed", packets.missed);
            failure::note("holdfast-agent", &missed);
        }
        let selected = packets.packets.iter().filter(|one| selection.has(one));
        let printed = last_of(selected, args.last.filter(|_| first));
        for packet in printed {
            let observed = Observed {
                at: wall_time::render(wall(packet.time)),
                packet,
            };
            let text = |observed: &Observed<'_>| line(&observed.at, observed.packet);
            if !print_next(args.client.output(), &observed, text)? {
                return Ok(());
            }
        }
        if !args.follow {
            return Ok(());
        }
        after = packets.next;
        first = false;
    }
}

/// The last `number` packets, in their order.
fn last_of<'a>(
    packets: impl Iterator<Item = &'a PacketView>,
    number: Option<usize>,
) -> VecDeque<&'a PacketView> {
    let mut last = VecDeque::new();
    for packet in packets {
        last.push_back(packet);
        if number.is_some_and(|number| last.len() > number) {
            last.pop_front();
        }
    }
    last
}

/// A time of CLOCK_MONOTONIC as nanoseconds since 1970. Both clocks are this node's.
fn wall(monotonic: u64) -> u64 {
    let ago = monotonic_ns().saturating_sub(monotonic);
    wall_time::now().saturating_sub(ago)
}

/// An instant as nanoseconds of CLOCK_MONOTONIC.
fn since(since: Since) -> u64 {
    let ago = match since {
        Since::At(at) => wall_time::now().saturating_sub(at),
        Since::Ago(ago) => u64::try_from(ago.as_nanos()).unwrap_or(u64::MAX),
    };
    monotonic_ns().saturating_sub(ago)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_packets_come_in_their_order() {
        let packets: Vec<PacketView> = (0..5)
            .map(|time| PacketView {
                time,
                ..PacketView::default()
            })
            .collect();
        let times = |number| -> Vec<u64> {
            let last = last_of(packets.iter(), number);
            last.iter().map(|packet| packet.time).collect()
        };
        assert_eq!(times(Some(2)), [3, 4]);
        assert_eq!(times(Some(0)), [0; 0]);
        assert_eq!(times(Some(usize::MAX)), times(None));
    }

    #[test]
    fn times_of_packets_are_those_of_the_wall() {
        let wall = wall(monotonic_ns().saturating_sub(5_000_000_000));
        let ago = wall_time::now() - wall;
        assert!((5_000_000_000..65_000_000_000).contains(&ago), "{ago}");
        assert!(since(Since::At(0)) == 0);
    }
}
