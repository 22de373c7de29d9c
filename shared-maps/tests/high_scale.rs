//! The high-scale ipcache's encodings: blocks of the world, the tunnel's header, lengths, and the age of
//! sources.
#![cfg(target_endian = "little")]

use shared_maps::{
    IdentityId,
    sources::{SourceValue, tick},
    tunnel::{self, TunnelConfig},
    user::Record as _,
    world::{self, WorldKey},
};

const MS: u64 = 1_000_000;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn high_scale_keys_of_world_blocks() {
    for (name, ip, len, expected) in [
        ("key-1", [0, 0, 0, 0], 0, "0000000000000000"),
        ("key-2", [10, 0, 0, 0], 8, "080000000a000000"),
        ("key-4", [192, 0, 2, 7], 32, "20000000c0000207"),
        (
            "bits behind the prefix",
            [10, 1, 2, 3],
            9,
            "090000000a000000",
        ),
    ] {
        let key = WorldKey::new(ip, len).expect(name);
        assert_eq!(hex(key.as_bytes()), expected, "{name}");
    }
    assert_eq!(WorldKey::new([10, 0, 0, 0], 33), None);
    assert_eq!(
        (
            world::NAME,
            world::MAX_ENTRIES,
            world::FLAGS,
            world::PRESENT
        ),
        ("cilium_world_cidrs4", 16384, 1, 1)
    );
}

#[test]
fn high_scale_headers_of_identities() {
    for (name, identity, expected) in [
        ("vni-1", 12_345, "0800000000303900"),
        ("vni-3", 2, "0800000000000200"),
        ("vni-4", 6, "0800000000000600"),
        ("vni-5", 102, "0800000000006600"),
        ("vni-6", 65_535, "0800000000ffff00"),
        ("vni-9", 16_777_215, "08000000ffffff00"),
        ("the node", 1, "0800000000000600"),
    ] {
        let vni = tunnel::vni(IdentityId(identity)).expect(name);
        assert_eq!(hex(&tunnel::header(vni)), expected, "{name}");
        assert_eq!(tunnel::vni_in(tunnel::header(vni)), vni, "{name}");
    }
    for (name, identity) in [("vni-10", 16_777_216), ("vni-12", 33_554_432)] {
        assert_eq!(tunnel::vni(IdentityId(identity)), None, "{name}");
    }
    assert_eq!(tunnel::DEFAULT_PORT, 8472);
}

#[test]
fn high_scale_nodes_send_numbers_that_mean_the_same_elsewhere() {
    for (identity, vni) in [
        (255, 5),
        (256, 256),
        (12_345, 12_345),
        (61_439, 61_439),
        (61_440, 5),
        (65_535, 5),
        (16_777_217, 5),
        (0, 5),
        (1, 5),
    ] {
        let sent = tunnel::vni_of_endpoint(IdentityId(identity));
        assert_eq!(sent, vni, "identity {identity}");
        let received = tunnel::identity_of(tunnel::header(sent));
        assert_eq!(received, Some(IdentityId(vni)));
    }
}

#[test]
fn high_scale_nodes_believe_no_other_number() {
    for vni in [
        0,
        1,
        2,
        3,
        4,
        7,
        8,
        9,
        10,
        102,
        255,
        61_440,
        65_535,
        0x00ff_ffff,
    ] {
        assert_eq!(tunnel::identity_of(tunnel::header(vni)), None, "VNI {vni}");
    }
    for vni in [5, 6, 256, 12_345, 61_439] {
        let header = tunnel::header(vni);
        assert_eq!(tunnel::identity_of(header), Some(IdentityId(vni)));
        let mut flagless = header;
        flagless[0] = 0;
        assert_eq!(tunnel::identity_of(flagless), None, "VNI {vni}");
        // Bits of other protocols that have grown from VXLAN.
        let mut more = header;
        more[0] = 0x8c;
        assert_eq!(tunnel::identity_of(more), Some(IdentityId(vni)));
    }
}

#[test]
fn high_scale_packets_are_shorter_by_fifty_bytes() {
    for (name, mtu, inner) in [
        ("mtu-1", 1400, 1350),
        ("mtu-3", 1500, 1450),
        ("mtu-4", 9000, 8950),
        ("not told yet", 0, 0),
    ] {
        let config = TunnelConfig {
            mtu,
            ..TunnelConfig::default()
        };
        assert_eq!(config.inner_mtu(), inner, "{name}");
    }
    assert_eq!(tunnel::OVERHEAD, 50);
}

#[test]
fn high_scale_never_wraps_packets_to_nodes() {
    for identity in [1, 6, 7, 0x0200_0001, 0x02ff_ffff] {
        assert!(tunnel::is_never_wrapped(IdentityId(identity)), "{identity}");
    }
    for identity in [0, 2, 3, 5, 9, 256, 12_345, 65_535, 0x0100_0001] {
        assert!(
            !tunnel::is_never_wrapped(IdentityId(identity)),
            "{identity}"
        );
    }
}

#[test]
fn high_scale_sources_count_for_two_seconds() {
    let start = 1 << 50;
    let value = SourceValue {
        identity: 4242,
        seen: tick(start),
    };
    for (age, fresh, says) in [
        (0, true, true),
        (450, true, true),
        (520, true, false),
        (1_950, true, false),
        (2_050, false, false),
        (60_000, false, false),
        (49 * 86_400_000, false, false),
    ] {
        let now = tick(start + age * MS);
        assert_eq!(value.is_fresh(now), fresh, "{age} ms");
        assert_eq!(value.says(4242, now), says, "{age} ms");
        assert!(!value.says(4243, now));
    }
    // Another CPU wrote it after this one had looked at the clock.
    assert!(value.is_fresh(tick(start - 10 * MS)));
    assert!(!value.is_fresh(tick(start - 100 * MS)));
}

#[test]
fn high_scale_clocks_may_begin_again() {
    let value = SourceValue {
        identity: 4242,
        seen: u32::MAX,
    };
    assert!(value.is_fresh(0) && value.is_fresh(100) && !value.is_fresh(200));
}
