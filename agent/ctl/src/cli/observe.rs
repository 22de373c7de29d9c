//! `observe`: what the datapath says about packets.

use std::io::Write as _;

use agent_core::{core::packet_view::PacketView, policy::trace::protocol_name};
use anyhow::Result;
use holdfast_agent::{admin::client::Client, config::args::ObserveArgs, events::Packets};

/// Prints what the agent kept; with `--follow` goes on as packets come.
pub(crate) async fn run(args: &ObserveArgs) -> Result<()> {
    let client = Client::new(&args.client.admin_socket);
    let mut after = 0;
    let mut first = true;
    loop {
        let wait = if first { "0" } else { "1" };
        let packets: Packets = client
            .get(&format!("/v1/events?after={after}&wait={wait}"))
            .await?;
        if packets.missed > 0 && !first {
            eprintln!("{} packets were missed", packets.missed);
        }
        for packet in &packets.packets {
            let line = if super::is_json(args.client.output) {
                serde_json::to_string(packet)?
            } else {
                line(packet)
            };
            match writeln!(std::io::stdout(), "{line}") {
                Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => return Ok(()),
                other => other?,
            }
        }
        if !args.follow {
            return Ok(());
        }
        after = packets.next;
        first = false;
    }
}

fn line(packet: &PacketView) -> String {
    let seconds = packet.time / 1_000_000_000;
    let micros = packet.time % 1_000_000_000 / 1000;
    let kind = packet
        .icmp_type
        .map(|kind| format!(" type {kind}"))
        .unwrap_or_default();
    let Ends { protocol, ends } = Ends::of(packet);
    let mut text = format!(
        "{seconds}.{micros:06} endpoint {} {} {}: {protocol}{kind}{ends} (identity {}, remote {}, {} bytes)",
        packet.endpoint,
        packet.direction,
        packet.reason,
        packet.identity,
        packet.remote_identity,
        packet.length,
    );
    if let Some(object) = &packet.object {
        text.push_str(&format!(" {object}"));
    }
    if !packet.names.is_empty() {
        text.push_str(&format!(" {}", packet.names.join(",")));
    }
    if let Some(rule) = packet.rules.first() {
        text.push_str(&format!(" by {rule}"));
    } else if packet.dropped && packet.is_judged() {
        text.push_str(" no rule allows it");
    }
    text
}

/// What a packet is, and from where to where it goes.
struct Ends {
    protocol: String,
    ends: String,
}

impl Ends {
    fn of(packet: &PacketView) -> Self {
        let PacketView {
            source,
            destination,
            ..
        } = packet;
        let ends = match (packet.arp, source.is_empty()) {
            (true, _) => format!(" sender {source} target {destination}"),
            (false, true) => String::new(),
            (false, false) => format!(" {source} -> {destination}"),
        };
        let protocol = match (packet.arp, source.is_empty()) {
            (true, _) => "ARP".to_owned(),
            (false, true) => "frame that was not read".to_owned(),
            (false, false) => protocol_name(packet.protocol),
        };
        Self { protocol, ends }
    }
}
