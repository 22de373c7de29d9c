//! Names, flags, marks and identity numbers that other programs rely on.

use shared_maps::{
    FAMILY_IPV4, FAMILY_IPV6, IdentityId, conntrack, ipcache, lxc, mark, pin, policy, policystats,
};

#[test]
fn names_sizes_and_flags_are_those_of_cilium() {
    assert_eq!(pin::BPF_ROOT, "/sys/fs/bpf");
    assert_eq!(pin::GLOBALS, "tc/globals");
    assert_eq!(
        (lxc::NAME, lxc::MAX_ENTRIES, lxc::FLAGS),
        ("cilium_lxc", 65535, 0x81)
    );
    assert_eq!(
        (
            ipcache::NAME,
            ipcache::NAME_V1,
            ipcache::MAX_ENTRIES,
            ipcache::FLAGS
        ),
        ("cilium_ipcache_v2", "cilium_ipcache", 512_000, 0x81)
    );
    assert_eq!(
        (policy::NAME_PREFIX, policy::MAX_ENTRIES, policy::FLAGS),
        ("cilium_policy_v2_", 16384, 0x81)
    );
    assert_eq!(
        (
            policystats::NAME,
            policystats::MAX_ENTRIES,
            policystats::FLAGS
        ),
        ("cilium_policystats", 65536, 0x2)
    );
    assert_eq!(conntrack::NAME_TCP4, "cilium_ct4_global");
    assert_eq!(conntrack::NAME_ANY4, "cilium_ct_any4_global");
    assert_eq!(conntrack::NAME_TCP6, "cilium_ct6_global");
    assert_eq!(conntrack::NAME_ANY6, "cilium_ct_any6_global");
    assert_eq!(
        (conntrack::MAX_ENTRIES_TCP, conntrack::MAX_ENTRIES_ANY),
        (524_288, 262_144)
    );
}

#[test]
fn precedences_rank_deny_redirect_allow() {
    assert_eq!(policy::PRECEDENCE_DENY, 0xffff_ffff);
    assert_eq!(policy::PRECEDENCE_DNS_REDIRECT, 0xffff_ff86);
    assert_eq!(policy::PRECEDENCE_ALLOW, 0xffff_ff01);
}

#[test]
fn marks_have_the_published_values() {
    for (identity, expected) in [
        (4, 0x0004_0b00),
        (1000, 0x03e8_0b00),
        (65541, 0x0005_0b01),
        (0x000a_bcde, 0xbcde_0b0a),
        (16_777_217, 0x0001_0b00),
    ] {
        assert_eq!(
            mark::from_proxy(IdentityId(identity)),
            expected,
            "identity {identity}"
        );
    }
    #[cfg(target_endian = "little")]
    {
        assert_eq!(mark::to_proxy(10001), 0x1127_0200);
        assert_eq!(mark::to_proxy(10094), 0x6e27_0200);
    }
    assert_eq!(mark::magic(mark::to_proxy(10094)), mark::MAGIC_TO_PROXY);
    assert_eq!((mark::TO_PROXY_TABLE, mark::TO_PROXY_RULE_PREF), (2004, 9));
}

#[test]
fn every_endpoint_identity_survives_a_mark() {
    for number in IdentityId::ENDPOINT_MIN.0..=IdentityId::ENDPOINT_MAX.0 {
        let identity = IdentityId(number);
        assert!(identity.is_endpoint());
        let mark = mark::from_proxy(identity);
        assert_eq!(mark::identity_of(mark), identity);
        assert_eq!(mark::magic(mark), mark::MAGIC_FROM_EGRESS_PROXY);
    }
}

/// In a mark such a number would read as the host's identity. Pods must never get one.
#[test]
fn no_identity_of_the_local_scope_may_name_an_endpoint() {
    assert_eq!(
        mark::identity_of(mark::from_proxy(IdentityId::LOCAL_MIN)),
        IdentityId::HOST
    );
    for number in [16_777_217, 16_777_216 + 256, 33_554_431] {
        let identity = IdentityId(number);
        assert!(
            identity.is_local_scope() && !identity.is_endpoint(),
            "{number}"
        );
    }
}

#[test]
fn reserved_numbers_and_scopes() {
    let reserved = [
        (IdentityId::UNKNOWN, 0),
        (IdentityId::HOST, 1),
        (IdentityId::WORLD, 2),
        (IdentityId::UNMANAGED, 3),
        (IdentityId::HEALTH, 4),
        (IdentityId::INIT, 5),
        (IdentityId::REMOTE_NODE, 6),
        (IdentityId::KUBE_APISERVER, 7),
        (IdentityId::INGRESS, 8),
        (IdentityId::WORLD_IPV4, 9),
        (IdentityId::WORLD_IPV6, 10),
        (IdentityId::ENDPOINT_MIN, 256),
        (IdentityId::ENDPOINT_MAX, 65535),
        (IdentityId::LOCAL_MIN, 0x0100_0001),
        (IdentityId::LOCAL_MAX, 0x01ff_ffff),
    ];
    for (identity, number) in reserved {
        assert_eq!(identity.0, number);
    }
    assert!(IdentityId::LOCAL_MAX.is_local_scope());
    assert!(!IdentityId(0x0200_0001).is_local_scope());
    assert!(!IdentityId(255).is_endpoint() && !IdentityId(65536).is_endpoint());
}

#[test]
fn world_depends_on_the_families_in_use() {
    assert_eq!(
        IdentityId::world_of(FAMILY_IPV4, true),
        IdentityId::WORLD_IPV4
    );
    assert_eq!(
        IdentityId::world_of(FAMILY_IPV6, true),
        IdentityId::WORLD_IPV6
    );
    assert_eq!(IdentityId::world_of(FAMILY_IPV4, false), IdentityId::WORLD);
    assert_eq!(IdentityId::world_of(FAMILY_IPV6, false), IdentityId::WORLD);
    for identity in [
        IdentityId::WORLD,
        IdentityId::WORLD_IPV4,
        IdentityId::WORLD_IPV6,
    ] {
        assert!(identity.is_world());
    }
    assert!(!IdentityId::HOST.is_world());
}
