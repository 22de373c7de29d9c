//! Records in the ring buffer, counters, policy counters.
use agent_datapath::events::{Counters, EventReader};
use anyhow::Result;
use holdfast_e2e::kernel::{
    ENDPOINT, From, IFINDEX, MAC, PEER, PEER4, PEER6, POD4, POD6, with_kernel,
};
use holdfast_e2e::packet::{Packet, SYN, arp, ethernet, tcp, udp};
use shared_maps::event::{Event, FAMILY_ARP, Reason};
use shared_maps::policy::{EGRESS, INGRESS};
use shared_maps::policystats::{self, PolicyStatsKey, PolicyStatsValue};
use shared_maps::user::{Map, MapKind};
use shared_maps::{Be16, FAMILY_IPV4, FAMILY_IPV6};

#[test]
fn drops_and_new_connections_are_reported() {
    with_kernel(|k| {
        k.allow(PEER, EGRESS, 6, 80)?;
        let mut reader = EventReader::open(&k.globals())?;
        let open = Packet::new(POD4, PEER4, tcp(4000, 80, SYN)).frame();
        k.send(&open)?;
        k.send(&open)?;
        k.send(&Packet::new(POD6, PEER6, udp(4000, 99)).frame())?;
        k.receive(&Packet::new(PEER4, POD4, udp(7, 8)).frame(), From::Outside)?;
        let events = reader.take(100);
        let seen: Vec<_> = events.iter().map(|e| (e.reason, e.egress)).collect();
        let denied = Reason::PolicyDenied as u8;
        assert_eq!(
            seen,
            [
                (Reason::Allowed as u8, EGRESS),
                (denied, EGRESS),
                (denied, INGRESS)
            ],
            "a known connection is not reported again"
        );
        let Event { saddr, daddr, .. } = events[0];
        assert_eq!(
            (&saddr[..4], &daddr[..4]),
            (&[10, 9, 1, 2][..], &[192, 0, 2, 53][..])
        );
        assert_eq!(events[0].remote_identity, PEER);
        assert_eq!(events[0].ifindex, IFINDEX);
        assert_eq!(events[0].endpoint, ENDPOINT.0);
        assert_eq!((events[0].sport.get(), events[0].dport.get()), (4000, 80));
        assert_eq!(
            (events[0].family, events[1].family),
            (FAMILY_IPV4, FAMILY_IPV6)
        );
        assert_eq!(usize::try_from(events[0].len)?, open.len());
        Ok(())
    });
}

#[test]
fn the_record_of_an_arp_packet_has_its_sender_and_target() {
    with_kernel(|k| {
        let mut reader = EventReader::open(&k.globals())?;
        k.send(&arp(MAC, [10, 9, 1, 77], [10, 9, 1, 1]))?;
        k.send(&ethernet(0x88cc, &[0; 46]))?;
        let events = reader.take(100);
        let seen: Vec<_> = events
            .iter()
            .map(|e| (e.reason, e.family, &e.saddr[..4], &e.daddr[..4]))
            .collect();
        let (spoofed, unknown) = (Reason::SpoofedSource as u8, Reason::UnknownProtocol as u8);
        assert_eq!(
            seen,
            [
                (spoofed, FAMILY_ARP, &[10, 9, 1, 77][..], &[10, 9, 1, 1][..]),
                (unknown, 0, &[0; 4][..], &[0; 4][..])
            ]
        );
        Ok(())
    });
}

#[test]
fn a_flood_is_counted_completely_and_reported_in_part() {
    with_kernel(|k| {
        let mut reader = EventReader::open(&k.globals())?;
        let flood = Packet::new(POD4, PEER4, udp(4000, 99)).frame();
        k.cost(&flood, 100_000)?;
        let count = reader.take(100_000).len();
        assert!((1..=2000).contains(&count), "{count} records");
        let counters = Counters::open(&k.globals())?.read()?;
        let (_, denied) = counters
            .into_iter()
            .find(|(reason, _)| *reason == Reason::PolicyDenied)
            .expect("every reason is there");
        assert_eq!(denied.packets, 100_000);
        assert_eq!(denied.bytes, 100_000 * u64::try_from(flood.len())?);
        Ok(())
    });
}

#[test]
fn packets_are_counted_for_the_entry_that_decided() {
    with_kernel(|k| {
        k.allow(0, EGRESS, 0, 0)?;
        k.allow(PEER, EGRESS, 6, 80)?;
        let frame = Packet::new(POD4, PEER4, tcp(4000, 80, SYN)).frame();
        k.send(&frame)?;
        k.send(&frame)?;
        k.send(&Packet::new(POD4, PEER4, udp(4000, 99)).frame())?;
        let stats: Map<PolicyStatsKey, PolicyStatsValue> =
            k.open(policystats::NAME, MapKind::LruPerCpuHash)?;
        let packets = |key| -> Result<u64> {
            let values = stats.get_per_cpu(&key)?;
            Ok(values.iter().flatten().map(|v| v.packets).sum())
        };
        let exact = PolicyStatsKey {
            endpoint_id: ENDPOINT.0,
            pad: 0,
            prefix_len: 24,
            sec_label: PEER,
            egress: EGRESS,
            protocol: 6,
            dport: Be16::new(80),
        };
        assert_eq!(packets(exact)?, 2);
        let any = PolicyStatsKey {
            prefix_len: 0,
            sec_label: 0,
            protocol: 0,
            dport: Be16::ZERO,
            ..exact
        };
        assert_eq!(packets(any)?, 1);
        Ok(())
    });
}
