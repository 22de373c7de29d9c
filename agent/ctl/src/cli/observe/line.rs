//! A packet as one line.

use agent_core::{core::packet_view::PacketView, policy::trace::protocol_name};

/// The line of a packet that was seen at `at`.
pub(super) fn line(at: &str, packet: &PacketView) -> String {
    let kind = packet
        .icmp_type
        .map(|kind| format!(" type {kind}"))
        .unwrap_or_default();
    let Ends { protocol, ends } = Ends::of(packet);
    let mut text = format!(
        "{at} endpoint {} {} {}: {protocol}{kind}{ends} (identity {}, remote {}, {} bytes)",
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

/// Protocol of a packet, with its source and destination.
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
