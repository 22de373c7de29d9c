//! Which packets `observe` prints.

use std::net::{IpAddr, SocketAddr};

use agent_core::core::packet_view::PacketView;
use dns_policy::name::Fqdn;
use holdfast_agent::config::observe_args::{PacketFilter, PacketVerdict, PortFilter};

/// Conditions that a packet must meet to be printed.
pub(super) struct Selection<'a> {
    /// Number of its endpoint.
    pub(super) endpoint: Option<u16>,
    /// Earliest time of the packet, in nanoseconds of CLOCK_MONOTONIC.
    pub(super) since: Option<u64>,
    pub(super) filter: &'a PacketFilter,
}

impl Selection<'_> {
    /// Whether `packet` is printed.
    pub(super) fn has(&self, packet: &PacketView) -> bool {
        let PacketFilter {
            verdict,
            names,
            addresses,
            ports,
        } = self.filter;
        self.endpoint.is_none_or(|id| id == packet.endpoint)
            && self.since.is_none_or(|since| since <= packet.time)
            && verdict.is_none_or(|verdict| packet.dropped == (verdict == PacketVerdict::Dropped))
            && (names.is_empty() || {
                let known = packet.names.iter().map(|name| Fqdn::normalise(name));
                let mut known = known.flat_map(|name| names.iter().map(move |n| (n, name.clone())));
                known.any(|(pattern, name)| pattern.matches(name.as_str()))
            })
            && (addresses.is_empty() || {
                let mut ends = [&packet.source, &packet.destination].into_iter();
                ends.any(|end| {
                    address(end).is_some_and(|a| addresses.iter().any(|b| b.contains(&a)))
                })
            })
            && (ports.is_empty() || ports.iter().any(|port| is_to(packet, *port)))
    }
}

/// The address of one side. The text has no port if the packet is ARP.
fn address(end: &str) -> Option<IpAddr> {
    let of_socket = end.parse::<SocketAddr>().map(|socket| socket.ip());
    of_socket.or_else(|_| end.parse()).ok()
}

fn is_to(packet: &PacketView, wanted: PortFilter) -> bool {
    packet.port().is_some_and(|port| {
        let is_protocol = |protocol| protocol == port.protocol;
        port.number == wanted.number && wanted.protocol.is_none_or(is_protocol)
    })
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use holdfast_agent::config::{self, Command};

    use super::*;

    fn packet() -> PacketView {
        PacketView {
            time: 100,
            endpoint: 7,
            direction: "egress".to_owned(),
            dropped: true,
            protocol: 6,
            source: "10.0.0.7:40000".to_owned(),
            destination: "203.0.113.7:443".to_owned(),
            names: vec!["www.good.test".to_owned()],
            ..PacketView::default()
        }
    }

    fn has(flags: &[&str], packet: &PacketView) -> bool {
        let line = ["holdfast-agent", "observe"].iter().chain(flags);
        let parsed = config::parse(line.map(OsString::from)).unwrap();
        let Command::Observe(args) = parsed.cli.command else {
            panic!("not observe");
        };
        let selection = Selection {
            endpoint: None,
            since: None,
            filter: &args.filter,
        };
        selection.has(packet)
    }

    #[test]
    fn each_flag_selects() {
        for (flags, selects) in [
            (&[][..], true),
            (&["--verdict=dropped"], true),
            (&["--verdict=forwarded"], false),
            (&["--name=www.good.test"], true),
            (&["--name=WWW.good.test."], true),
            (&["--name=*.good.test"], true),
            (&["--name=*.bad.test"], false),
            (&["--name=*.bad.test", "--name=**.good.test"], true),
            (&["--address=203.0.113.7"], true),
            (&["--address=10.0.0.0/8"], true),
            (&["--address=192.0.2.0/24"], false),
            (&["--port=443"], true),
            (&["--port=443/TCP"], true),
            (&["--port=443/UDP"], false),
            (&["--port=40000"], false),
            (&["--port=80", "--port=443"], true),
            (&["--port=443", "--verdict=forwarded"], false),
        ] {
            assert_eq!(has(flags, &packet()), selects, "{flags:?}");
        }
        let arp = PacketView {
            arp: true,
            protocol: 0,
            source: "10.0.0.7".to_owned(),
            destination: "10.0.0.1".to_owned(),
            ..packet()
        };
        assert!(has(&["--address=10.0.0.1"], &arp) && !has(&["--port=443"], &arp));
        let filter = PacketFilter::default();
        let of = |endpoint, since| Selection {
            endpoint,
            since,
            filter: &filter,
        };
        assert!(of(Some(7), Some(100)).has(&packet()));
        assert!(!of(Some(8), None).has(&packet()) && !of(None, Some(101)).has(&packet()));
    }
}
