//! Services of a pod whose policy map has no room for its denies.

use super::{DENY_ALL, blocks, firewall};
use crate::core::{
    CoreConfig,
    tests::{
        oracle::Fate,
        pods::Member,
        services::{VIP, at, pod, service, slice},
    },
};

fn member(entries: usize) -> Member {
    let config = CoreConfig {
        policy_map_max: entries,
        ..CoreConfig::default()
    };
    let of_web = firewall(DENY_ALL).replace("namespace: small", "namespace: default");
    let mut member = Member::with(config, &of_web);
    member.put(&blocks(60));
    member
}

/// Each Service is open or closed as it would be with a map that has room.
#[test]
fn services_are_as_open_as_with_room() {
    let put = |member: &mut Member| {
        member.put(
            &(pod("db-0", "db", "10.2.0.9")
                + &service(
                    "db",
                    &format!("clusterIP: {VIP}"),
                    "{port: 80, name: a}, {port: 81, name: b}",
                )
                + &slice(
                    "db",
                    &[("db-0", "10.2.0.9")],
                    "{name: a, port: 8080}, {name: b, port: 8081}",
                )
                + &service("out", "clusterIP: 10.96.0.11", "{port: 80}")
                + &slice("out", &[("", "20.1.3.1")], "{port: 80}")),
        );
    };
    let (mut small, mut large) = (member(50), member(16_384));
    put(&mut small);
    put(&mut large);
    assert_eq!(small.node.core.summary().endpoint_problems, [""; 0]);
    let entries = |member: &Member| member.node.datapath.policy[&member.node.id()].len();
    assert!(entries(&small) <= 50 && entries(&large) > 60);
    for (address, port, fate) in [
        (VIP, 80, Fate::Passed),
        (VIP, 81, Fate::Passed),
        ("10.2.0.9", 8080, Fate::Passed),
        ("10.96.0.11", 80, Fate::Dropped),
        ("20.1.3.1", 80, Fate::Dropped),
    ] {
        for member in [&small, &large] {
            assert_eq!(at(&member.node, address, 6, port), fate, "{address}:{port}");
        }
    }
}
