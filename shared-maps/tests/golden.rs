//! The bytes of every key and value as they are in the kernel's maps.
//!
//! They are written by hand from the layout tables (docs/src/maps.md). The code under test did not
//! print them. `bpftool map dump pinned …` shows the same bytes.
#![cfg(target_endian = "little")]

use shared_maps::{
    Be16,
    conntrack::{self, CtKey4, CtKey6, CtValue},
    endpoint::{self, EndpointConfig},
    event::{Counter, Event, HAS_ICMP_TYPE, Reason},
    fragment::{FragmentKey, FragmentValue},
    ipcache::{self, IpcacheKey, IpcacheValue, IpcacheValueV1},
    lxc::{self, LxcKey, LxcValue, pack_mac},
    policy::{self, PolicyKey, PolicyValue},
    policystats::{PolicyStatsKey, PolicyStatsValue},
    redirect::{RedirectKey, RedirectValue},
    sources::{SourceKey, SourceValue},
    steering::{self, Slot},
    tunnel::TunnelConfig,
    user::Record,
    world::{self, WorldKey},
};

const ZERO12: &str = "000000000000000000000000";
const POD4: [u8; 4] = [10, 0, 1, 5];
const POD6: [u8; 16] = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5];
const POD6_HEX: &str = "fd000000000000000000000000000005";
const WEB6: [u8; 16] = [0x20, 1, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x0a];
const WEB6_HEX: &str = "20010db800000000000000000000000a";

/// Checks both directions: value to bytes and bytes to value.
#[track_caller]
fn golden<R: Record + PartialEq + std::fmt::Debug>(value: R, fields: &[&str]) {
    let bytes: Vec<u8> = fields
        .concat()
        .as_bytes()
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).expect("ASCII"), 16).expect("hex"))
        .collect();
    assert_eq!(value.as_bytes(), bytes, "to bytes");
    assert_eq!(R::from_bytes(&bytes), Some(value), "from bytes");
    assert_eq!(R::from_bytes(&bytes[1..]), None, "too short");
}

#[test]
fn lxc_keys() {
    golden(LxcKey::v4(POD4), &["0a000105", ZERO12, "01", "00", "0000"]);
    golden(LxcKey::v6(POD6), &[POD6_HEX, "02", "00", "0000"]);
}

#[test]
fn lxc_value_of_a_pod() {
    let value = LxcValue {
        ifindex: 0x0102,
        lxc_id: 0x1234,
        mac: pack_mac([0x0a, 0x58, 0x0a, 0x00, 0x01, 0x05]),
        node_mac: pack_mac([0x02, 0x42, 0xac, 0x11, 0x00, 0x02]),
        sec_id: 1000,
        parent_ifindex: 7,
        ..LxcValue::default()
    };
    golden(
        value,
        &[
            "02010000",
            "0000",
            "3412",
            "00000000",
            "00000000", // ifindex, unused, id, flags, rt
            "0a580a000105",
            "0000", // MAC in wire order
            "0242ac110002",
            "0000", // host side's MAC
            "e8030000",
            "07000000",
            "0000000000000000", // identity, parent, pad
        ],
    );
}

#[test]
fn lxc_value_of_the_host() {
    let value = LxcValue {
        flags: lxc::FLAG_HOST,
        ..LxcValue::default()
    };
    let zeros = "00".repeat(36);
    golden(value, &["0000000000000000", "01000000", &zeros]);
}

#[test]
fn ipcache_keys() {
    let v4 = |len, hex| {
        golden(
            IpcacheKey::v4([10, 0, 1, 0], len),
            &[hex, "0000", "00", "01", "0a000100", ZERO12],
        )
    };
    v4(24, "38000000");
    v4(32, "40000000");
    golden(
        IpcacheKey::v4([0; 4], 0),
        &["20000000", "0000", "00", "01", "00000000", ZERO12],
    );
    golden(
        IpcacheKey::v6(WEB6, 128),
        &["a0000000", "0000", "00", "02", WEB6_HEX],
    );
}

#[test]
fn ipcache_value() {
    let value = IpcacheValue {
        sec_identity: 16_777_217,
        ..IpcacheValue::default()
    };
    golden(value, &["01000001", "00000000", ZERO12, "0000", "00", "00"]);
    let tunnelled = IpcacheValue {
        sec_identity: 1000,
        tunnel_endpoint: ipcache::widen([192, 0, 2, 1]),
        key: 3,
        flags: ipcache::FLAG_SKIP_TUNNEL | ipcache::FLAG_HAS_TUNNEL,
        ..IpcacheValue::default()
    };
    golden(
        tunnelled,
        &["e8030000", "c0000201", ZERO12, "0000", "03", "03"],
    );
}

#[test]
fn ipcache_value_of_the_older_map() {
    let value = IpcacheValueV1 {
        sec_identity: 16_777_217,
        ..IpcacheValueV1::default()
    };
    golden(value, &["01000001", "00000000", "0000", "00", "00"]);
    let tunnelled = IpcacheValueV1 {
        sec_identity: 1000,
        tunnel_endpoint: [192, 0, 2, 1],
        key: 3,
        flags: ipcache::FLAG_SKIP_TUNNEL,
        ..IpcacheValueV1::default()
    };
    golden(tunnelled, &["e8030000", "c0000201", "0000", "03", "01"]);
}

#[test]
fn what_the_programs_of_an_endpoint_are_told() {
    let dual = EndpointConfig {
        identity: 1000,
        ifindex: 0x0102,
        ipv6: POD6,
        ipv4: POD4,
        id: 0x1234,
        mac: [0x0a, 0x58, 0x0a, 0x00, 0x01, 0x05],
        gateway_mac: [0x0a, 0x58, 0x0a, 0x00, 0x01, 0x01],
        flags: endpoint::HAS_IPV4 | endpoint::HAS_IPV6,
        on_link_bits: 64,
        bridge_mac: [0x0a, 0x58, 0x0a, 0x00, 0x01, 0x02],
        on_link_bits4: 0,
        pad: [0; 5],
        link_locals: [[0x0102_0304, 0x0506_0708], [0; 2]],
        node_link_locals: [[0, 0x0100_0000], [0; 2], [0; 2], [0; 2]],
    };
    golden(
        dual,
        &[
            "e8030000",
            "02010000",
            POD6_HEX,
            "0a000105",
            "3412",
            "0a580a000105",
            "0a580a000101",
            "03",
            "40",
            "0a580a000102",
            "000000000000",
            "0403020108070605",
            "0000000000000000",
            "0000000000000001",
            &"00".repeat(24),
        ],
    );
    let ipv4_only = EndpointConfig {
        identity: 256,
        ipv4: POD4,
        id: 1,
        flags: endpoint::HAS_IPV4,
        ..EndpointConfig::default()
    };
    let no_ipv6 = "00".repeat(16);
    golden(
        ipv4_only,
        &[
            "00010000",
            "00000000",
            &no_ipv6,
            "0a000105",
            "0100",
            "000000000000",
            "000000000000",
            "01",
            "00",
            &"00".repeat(60),
        ],
    );
}

#[test]
fn policy_entries() {
    let dns = PolicyKey::new(1000, policy::EGRESS, 17, 53, 16);
    golden(dns, &["40000000", "e8030000", "01", "11", "0035"]);
    golden(
        PolicyValue::dns_redirect(dns, 10094),
        &["276e", "c0", "00", "86ffffff", "00000000"],
    );
    golden(
        PolicyValue::allow(dns),
        &["0000", "c0", "00", "01ffffff", "00000000"],
    );

    let any = PolicyKey::new(0, policy::INGRESS, 0, 0, 0);
    golden(any, &["28000000", "00000000", "00", "00", "0000"]);
    golden(
        PolicyValue::deny(any),
        &["0000", "01", "00", "ffffffff", "00000000"],
    );

    // Ports 8080..=8087 have 13 significant bits. 48 + 13 = 61; (61 - 40) << 3 = 0xa8.
    let range = PolicyKey::new(16_777_217, policy::EGRESS, 6, 8080, 13);
    golden(range, &["3d000000", "01000001", "01", "06", "1f90"]);
    golden(
        PolicyValue::allow(range),
        &["0000", "a8", "00", "01ffffff", "00000000"],
    );

    // One protocol, any port.
    let tcp = PolicyKey::new(2, policy::EGRESS, 6, 0, 0);
    golden(tcp, &["30000000", "02000000", "01", "06", "0000"]);
}

#[test]
fn policy_statistics() {
    let key = PolicyStatsKey {
        endpoint_id: 0x1234,
        prefix_len: 24,
        sec_label: 1000,
        egress: policy::EGRESS,
        protocol: 17,
        dport: Be16::new(53),
        ..PolicyStatsKey::default()
    };
    golden(key, &["3412", "00", "18", "e8030000", "01", "11", "0035"]);
    let value = PolicyStatsValue {
        packets: 3,
        bytes: 0x0102,
    };
    golden(value, &["0300000000000000", "0201000000000000"]);
}

#[test]
fn conntrack_keys_have_addresses_reversed_and_ports_not() {
    // 10.0.1.5:40000 -> 192.0.2.10:443
    let key = CtKey4 {
        daddr: POD4,
        saddr: [192, 0, 2, 10],
        dport: Be16::new(443),
        sport: Be16::new(40000),
        nexthdr: 6,
        flags: conntrack::DIR_OUT,
    };
    golden(key, &["0a000105", "c000020a", "01bb", "9c40", "06", "00"]);
    let key = CtKey6 {
        daddr: POD6,
        saddr: WEB6,
        dport: Be16::new(53),
        sport: Be16::new(40000),
        nexthdr: 17,
        flags: conntrack::DIR_IN,
    };
    golden(key, &[POD6_HEX, WEB6_HEX, "0035", "9c40", "11", "01"]);
}

#[test]
fn conntrack_value() {
    let value = CtValue {
        packets: 1,
        bytes: 60,
        lifetime: 0x0001_0203,
        flags: conntrack::FLAG_FROM_PROXY | conntrack::FLAG_SEEN_NON_SYN,
        tx_flags_seen: 0x02,
        rx_flags_seen: 0x12,
        src_sec_id: 1000,
        last_tx_report: 5,
        last_rx_report: 6,
        ..CtValue::default()
    };
    golden(
        value,
        &[
            "00000000000000000000000000000000", // NAT address
            "0100000000000000",
            "3c00000000000000", // packets, bytes
            "03020100",
            "1001",
            "0000",
            "0000", // lifetime, flags, reverse NAT, NAT port
            "02",
            "12",
            "e8030000",
            "05000000",
            "06000000",
        ],
    );
}

#[test]
fn fragments() {
    let key = FragmentKey {
        saddr: ipcache::widen(POD4),
        daddr: ipcache::widen([192, 0, 2, 53]),
        id: 0x0000_beef,
        ifindex: 9,
        protocol: 17,
        family: shared_maps::FAMILY_IPV4,
        egress: policy::EGRESS,
        pad: 0,
    };
    golden(
        key,
        &[
            "0a000105", ZERO12, "c0000235", ZERO12, "efbe0000", "09000000", "11", "01", "01", "00",
        ],
    );
    let value = FragmentValue {
        seen_at: 0x0102_0304,
        mark: shared_maps::mark::to_proxy(10094),
        pass: 1,
    };
    golden(value, &["0403020100000000", "0002276e", "01000000"]);
}

#[test]
fn redirects() {
    let key = RedirectKey {
        pod: ipcache::widen(POD4),
        server: ipcache::widen([192, 0, 2, 53]),
        port: Be16::new(53),
        protocol: 17,
        family: shared_maps::FAMILY_IPV4,
    };
    golden(
        key,
        &["0a000105", ZERO12, "c0000235", ZERO12, "0035", "11", "01"],
    );
    let value = RedirectValue {
        proxy_port: Be16::new(10094),
        pad: 0,
        ifindex: 9,
    };
    golden(value, &["276e", "0000", "09000000"]);
}

#[test]
fn steering_slots() {
    let slot = Slot {
        heartbeat: 0x0102_0304_0506_0708,
        kind: steering::KIND_SDP,
        owner: 4242,
        sockets: 0b0011,
        proxy_port: 10094,
    };
    golden(
        slot,
        &[
            "0807060504030201",
            "01000000",
            "92100000",
            "03000000",
            "6e270000",
        ],
    );
}

#[test]
fn socket_indices_do_not_overlap() {
    let mut seen = std::collections::BTreeSet::new();
    for slot in 0..steering::SLOTS {
        for (tcp, v6) in [(false, false), (false, true), (true, false), (true, true)] {
            assert!(seen.insert(steering::socket_index(slot, tcp, v6)));
        }
    }
    assert_eq!(seen.len(), 64);
    assert_eq!(seen.last(), Some(&63));
}

#[test]
fn events_and_counters() {
    let event = Event {
        time: 1,
        saddr: POD6,
        daddr: WEB6,
        remote_identity: 10,
        ifindex: 9,
        len: 74,
        sport: Be16::new(40000),
        dport: Be16::new(443),
        endpoint: 0x1234,
        reason: Reason::PolicyDenied as u8,
        family: shared_maps::FAMILY_IPV6,
        protocol: 6,
        egress: policy::EGRESS,
        flags: HAS_ICMP_TYPE,
        icmp_type: 129,
        pad: [0; 8],
    };
    golden(
        event,
        &[
            "0100000000000000",
            POD6_HEX,
            WEB6_HEX,
            "0a000000",
            "09000000",
            "4a000000",
            "9c40",
            "01bb",
            "3412",
            "10",
            "02",
            "06",
            "01",
            "01",
            "81",
            "0000000000000000",
        ],
    );
    golden(
        Counter {
            packets: 1,
            bytes: 74,
        },
        &["0100000000000000", "4a00000000000000"],
    );
}

#[test]
fn reasons_fit_the_counters_and_have_words_of_their_own() {
    let mut words = std::collections::BTreeSet::new();
    for reason in Reason::ALL {
        assert!(u32::from(reason as u8) < shared_maps::event::COUNTERS);
        assert!(words.insert(reason.as_str()), "{}", reason.as_str());
    }
}

#[test]
fn blocks_of_the_world() {
    let key = WorldKey::new([10, 0, 0, 0], 8).expect("a block");
    golden(key, &["08000000", "0a000000"]);
    golden(world::PRESENT, &["01"]);
}

#[test]
fn sources_of_wrapped_packets() {
    golden(SourceKey { ip: POD4 }, &["0a000105"]);
    let value = SourceValue {
        identity: 4242,
        seen: 0x0102_0304,
    };
    golden(value, &["92100000", "04030201"]);
}

#[test]
fn what_the_programs_are_told_of_the_tunnel() {
    let config = TunnelConfig {
        device: 7,
        mtu: 1500,
        port: 8472,
        flags: 1,
    };
    golden(config, &["07000000", "dc050000", "1821", "0100"]);
}
