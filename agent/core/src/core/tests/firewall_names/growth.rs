//! How many identities and entries denied names cause.

use super::{DNS, config, firewall, node};
use crate::core::{CoreConfig, tests::scenario::Node};

fn denies(names: usize) -> String {
    let rules: Vec<String> = (0..names)
        .map(|n| format!("type: Deny, to: {{dnsName: n{n}.example.com}}"))
        .collect();
    firewall(&rules.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Identities of addresses with labels of names.
fn identities(node: &Node) -> usize {
    node.core.summary().fqdn_identities
}

#[test]
fn denied_names_with_addresses_of_their_own_are_one_identity_each() {
    let (names, addresses, firewalls) = (10, 20, 3);
    let rules = denies(names);
    let namespaces =
        (1..firewalls).map(|n| rules.replace("namespace: default", &format!("namespace: n{n}")));
    let mut node = node(&namespaces.fold(rules.clone(), |all, one| format!("{all}---\n{one}")));
    for name in 0..names {
        for address in 0..addresses {
            node.learn(
                &format!("n{name}.example.com"),
                &[&format!("1.1.{name}.{address}")],
            );
        }
    }
    assert_eq!(node.core.summary().firewalls.firewalls, firewalls);
    // Identities of the toFQDNs selector, one for each family. They come before the first answer.
    let selectors = 2;
    assert_eq!(identities(&node), names + selectors);
    assert_eq!(node.core.summary().fqdn_combinations, 0);
}

/// Gives addresses every combination of `names` names. Returns how many combinations have an identity.
fn combined(names: usize, rules: &str, max: usize) -> usize {
    let config = CoreConfig {
        max_fqdn_identities: Some(max),
        ..config()
    };
    let mut node = Node::synced(config, &format!("{DNS}{rules}"));
    for address in 1..1_usize << names {
        let of_address = (0..names).filter(|name| address >> name & 1 == 1);
        for name in of_address {
            node.learn(
                &format!("n{name}.example.com"),
                &[&format!("1.1.1.{address}")],
            );
        }
    }
    node.core.summary().fqdn_combinations
}

/// The limit leaves out no denied name, so that servers of the denied zones decide how many
/// combinations there are: at most one for each address, and 2^N - N - 1 for N names.
#[test]
fn denied_names_that_share_addresses_are_an_identity_for_each_combination() {
    let names = 6;
    assert_eq!(combined(names, &denies(names), 8), (1 << names) - names - 1);
    let allowed = denies(names).replace("type: Deny", "type: Allow");
    assert_eq!(
        combined(names, &allowed, 8),
        8,
        "the limit holds for others"
    );
}
