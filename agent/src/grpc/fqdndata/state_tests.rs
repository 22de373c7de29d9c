//! The whole state, and how it revokes removed rules.

use std::{net::IpAddr, sync::Arc};

use agent_core::core::EndpointLocation;
use dns_policy::rule::{EndpointRules, PortRules, Transport};
use fqdn_proto::fqdndata::EndpointInfo;
use shared_maps::EndpointId;

use super::*;

const NOW: BootTime = BootTime::from_nanos(1_000_000_000_000);

fn table(servers: Servers, names: NameRules) -> RulesTable {
    let rules = EndpointRules {
        ports: vec![PortRules {
            port: 53,
            transport: Transport::Udp,
            rules: vec![SelectorRule {
                selector: "s".to_owned(),
                servers,
                names,
            }],
        }],
    };
    RulesTable {
        revision: 1,
        ready: true,
        endpoints: [(EndpointId(7), Arc::new(rules))].into(),
    }
}

fn directory() -> Directory {
    Directory {
        locations: vec![EndpointLocation {
            id: EndpointId(7),
            identity: IdentityId(256),
            ifindex: 3,
            addresses: vec!["10.0.0.2".parse().unwrap(), "fd00::2".parse().unwrap()],
        }],
        identities: vec![IdentityId(256)],
        prefixes: vec![("10.0.0.2/32".parse().unwrap(), IdentityId(256))],
        ..Directory::default()
    }
}

fn without_places() -> Directory {
    Directory {
        locations: Vec::new(),
        ..directory()
    }
}

fn infos(state: &PolicyState) -> Vec<&EndpointInfo> {
    let mappings = state.identity_to_endpoint_mapping.iter();
    mappings.flat_map(|m| &m.endpoint_info).collect()
}

fn fresh(table: &RulesTable, directory: &Directory) -> PolicyState {
    build(table, directory, &mut SentRules::default(), NOW)
}

#[test]
fn any_server_names_every_identity() {
    let state = fresh(&table(Servers::Any, NameRules::All), &directory());
    let policy = &state.egress_l7_dns_policy[0];
    let servers = policy.dns_servers.iter();
    let identities: Vec<u32> = servers.map(|server| server.dns_server_identity).collect();
    assert_eq!(identities, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 256]);
    assert!(policy.dns_pattern.is_empty());
}

#[test]
fn each_address_has_an_entry_of_its_own() {
    let state = fresh(&RulesTable::default(), &directory());
    let infos = infos(&state);
    assert_eq!(infos.len(), 2);
    assert!(infos.iter().all(|info| info.id == 7 && info.ip.len() == 1));
    assert_eq!(
        state.identity_to_prefix_mapping[0].prefix,
        [vec![10, 0, 0, 2, 32]]
    );
}

fn assert_revoked(state: &PolicyState) {
    let [policy] = state.egress_l7_dns_policy.as_slice() else {
        panic!("{state:?}");
    };
    assert_eq!(policy.dns_pattern, ["."]);
    assert_eq!(policy.dns_servers[0].dns_server_identity, 0);
    assert_eq!(policy.dns_servers[0].dns_server_port, 53);
}

#[test]
fn removed_rules_are_revoked_while_their_endpoint_exists() {
    let mut sent_rules = SentRules::default();
    let rules = table(Servers::Any, NameRules::All);
    build(&rules, &directory(), &mut sent_rules, NOW);
    let later = NOW.plus_secs(86_400);
    for now in [NOW, later] {
        let state = build(&RulesTable::default(), &directory(), &mut sent_rules, now);
        assert_revoked(&state);
    }
    let gone = later.plus_secs(86_400);
    for now in [gone, gone.plus_secs(60)] {
        let state = build(
            &RulesTable::default(),
            &without_places(),
            &mut sent_rules,
            now,
        );
        assert_revoked(&state);
    }
    let now = gone.plus_secs(3600);
    let state = build(
        &RulesTable::default(),
        &without_places(),
        &mut sent_rules,
        now,
    );
    assert!(state.egress_l7_dns_policy.is_empty(), "for a while only");
}

#[test]
fn rules_of_the_previous_run_are_revoked() {
    let directory = Directory {
        former: [(EndpointId(7), 53, Transport::Udp)].into(),
        ..directory()
    };
    assert_revoked(&fresh(&RulesTable::default(), &directory));
    let again = fresh(&table(Servers::Any, NameRules::All), &directory);
    assert_eq!(again.egress_l7_dns_policy.len(), 1, "nothing but the rule");
}

#[test]
fn addresses_of_a_removed_endpoint_stay_for_a_moment() {
    let mut sent_rules = SentRules::default();
    let none = RulesTable::default();
    build(&none, &directory(), &mut sent_rules, NOW);
    let gone = NOW.plus_secs(3600);
    let soon = build(&none, &without_places(), &mut sent_rules, gone);
    assert_eq!(infos(&soon).len(), 2);
    let mut taken = directory();
    taken.locations[0].id = EndpointId(8);
    let reused = build(&none, &taken, &mut sent_rules, gone.plus_secs(2));
    assert!(infos(&reused).iter().all(|info| info.id == 8));
    build(&none, &without_places(), &mut sent_rules, gone.plus_secs(3));
    let later = build(
        &none,
        &without_places(),
        &mut sent_rules,
        gone.plus_secs(60),
    );
    assert!(infos(&later).is_empty());
}

#[test]
fn no_names_is_not_every_name() {
    let rules = table(Servers::Any, NameRules::Names(Vec::new()));
    let state = fresh(&rules, &directory());
    assert_eq!(state.egress_l7_dns_policy[0].dns_pattern, ["."]);
}

#[test]
fn no_server_is_not_an_empty_list() {
    let rules = table(Servers::Identities(BTreeSet::new()), NameRules::All);
    let state = fresh(&rules, &directory());
    let servers = &state.egress_l7_dns_policy[0].dns_servers;
    assert_eq!(servers.len(), 1);
    assert_eq!(servers[0].dns_server_identity, 0);
}

/// Identity that the client finds: the longest prefix.
fn found(state: &PolicyState, address: &str) -> u32 {
    let address: IpAddr = address.parse().unwrap();
    let mut best = (0, 0);
    for mapping in &state.identity_to_prefix_mapping {
        for bytes in &mapping.prefix {
            let (len, bytes) = bytes.split_last().unwrap();
            let bytes: [u8; 4] = bytes.try_into().unwrap();
            let net = IpNet::new(bytes.into(), *len).unwrap();
            if net.contains(&address) {
                best = best.max((*len, mapping.identity));
            }
        }
    }
    best.1
}

#[test]
fn omitted_entries_change_no_verdict() {
    let net = |text: &str| text.parse::<IpNet>().unwrap();
    let directory = Directory {
        prefixes: vec![
            (net("0.0.0.0/0"), IdentityId(9)),
            (net("9.0.0.0/8"), IdentityId(20)),
            (net("9.9.9.9/32"), IdentityId(21)),
            (net("9.9.9.10/32"), IdentityId(22)),
            (net("1.1.1.1/32"), IdentityId(23)),
            (net("9.9.9.11/32"), IdentityId(9)),
        ],
        ..directory()
    };
    let servers = Servers::Identities([IdentityId(20), IdentityId(22)].into());
    let mut state = fresh(&table(servers, NameRules::All), &directory);
    let allows = |state: &PolicyState, address: &str| {
        let servers = &state.egress_l7_dns_policy[0].dns_servers;
        let identity = found(state, address);
        servers.iter().any(|s| s.dns_server_identity == identity)
    };
    let addresses = [
        "9.0.0.1", "9.9.9.9", "9.9.9.10", "9.9.9.11", "1.1.1.1", "8.8.8.8",
    ];
    let before = addresses.map(|address| allows(&state, address));
    assert_eq!(before, [true, false, true, false, false, false]);
    shrink(&mut state, &directory);
    assert_eq!(addresses.map(|address| allows(&state, address)), before);
    let left: usize = state
        .identity_to_prefix_mapping
        .iter()
        .map(|m| m.prefix.len())
        .sum();
    assert_eq!(left, 4, "{state:?}");
}

#[test]
fn servers_that_no_prefix_has_are_left_out_and_revocations_stay() {
    let net = |n: u32| IpNet::from(IpAddr::from((0x0900_0000 + n).to_be_bytes()));
    let learned = (0..1000).map(|n| IdentityId(16_777_217 + n));
    let mut prefixes: Vec<_> = (0..1000).map(net).zip(learned.clone()).collect();
    prefixes.push(("0.0.0.0/0".parse().unwrap(), IdentityId(9)));
    let directory = Directory {
        identities: learned.clone().collect(),
        prefixes,
        former: [(EndpointId(7), 54, Transport::Udp)].into(),
        ..directory()
    };
    let only = |ids: Vec<IdentityId>| {
        let servers = Servers::Identities(ids.into_iter().collect());
        table(servers, NameRules::All)
    };
    for (table, left) in [
        (table(Servers::Any, NameRules::All), 10),
        // The identity that the rule selects has no prefix at all.
        (only(vec![IdentityId(20_000_000)]), 1),
    ] {
        let mut state = fresh(&table, &directory);
        shrink(&mut state, &directory);
        let [rule, revoked] = state.egress_l7_dns_policy.as_slice() else {
            panic!("{state:?}");
        };
        assert_eq!(rule.dns_servers.len(), left);
        assert!(rule.dns_servers.iter().all(|s| s.dns_server_port == 53));
        assert_eq!(revoked.dns_servers.len(), 1);
        assert_eq!(revoked.dns_servers[0].dns_server_identity, 0);
        assert_eq!(revoked.dns_servers[0].dns_server_port, 54);
    }
}
