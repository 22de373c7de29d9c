//! EgressFirewalls that leave a family open, or deny the DNS servers of their pods.

use std::collections::BTreeSet;

use ipnet::IpNet;

use crate::{
    ipcache::resolve::whole_families,
    policy::{
        document::PolicyDocument,
        rule::{Peers, Rule, TierAction, TierRule},
    },
    selector::selector::{Entity, Selector},
};

/// Protocols of DNS: UDP, TCP.
const DNS_PROTOCOLS: [u8; 2] = [17, 6];
const DNS_PORT: u16 = 53;
/// Maximum number of warnings about DNS servers.
const FOUND: usize = 20;
/// A block with a prefix no longer than this covers the addresses of a family that are in use, as
/// 2000::/3 does.
const NEARLY_ALL: u8 = 3;

/// The remedy for a denied DNS server.
pub const ALLOW_BEFORE: &str = "allow port 53 of the DNS server, UDP and TCP, in a rule before it";

/// Whether a block is of one family.
type Family = fn(&IpNet) -> bool;

/// A family that a firewall leaves open although it denies the other one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenFamily {
    /// Whether IPv4 is open; otherwise IPv6 is.
    pub(crate) is_ipv4: bool,
    pub text: String,
}

/// A firewall that denies every address of one family and none of the other one.
pub fn open_family(document: &PolicyDocument) -> Option<OpenFamily> {
    if !document.is_firewall() {
        return None;
    }
    let tier = || document.rules().iter().flat_map(|rule| &rule.tier);
    let blocks = |rule: &TierRule| blocks_of(rule).collect::<Vec<_>>();
    let whole = |is_family: Family| {
        tier().find(move |rule| {
            let mut blocks = blocks(rule).into_iter().filter(is_family);
            let is_all = blocks.any(|block| block.prefix_len() == 0);
            rule.action == TierAction::Deny && rule.ports.is_empty() && is_all
        })
    };
    // An author who allows the whole family leaves it open on purpose.
    let is_meant = |is_family: Family| {
        tier().any(|rule| {
            let mut blocks = blocks(rule).into_iter().filter(is_family);
            rule.ports.is_empty() && blocks.any(|block| block.prefix_len() <= NEARLY_ALL)
        })
    };
    let (ipv4, ipv6): (Family, Family) = (is_ipv4, is_ipv6);
    let (denies, denied, open, all) = match (whole(ipv4), whole(ipv6)) {
        (Some(rule), None) if !is_meant(ipv6) => (rule, "IPv4", "IPv6", "::/0"),
        (None, Some(rule)) if !is_meant(ipv4) => (rule, "IPv6", "IPv4", "0.0.0.0/0"),
        _ => return None,
    };
    let text = format!(
        "{}: denies every {denied} address, and {open} stays open: a pod with an {open} address may \
         send to every {open} address outside; add a rule of type Deny with cidrSelector {all}, or one \
         of type Allow if that is intended",
        denies.path
    );
    Some(OpenFamily {
        is_ipv4: open == "IPv4",
        text,
    })
}

/// Keys of firewalls, each with a warning: DNS rules of policies send queries to servers outside the
/// cluster that the firewall of the same pods denies.
pub fn denied_servers(documents: &[&PolicyDocument]) -> Vec<(String, String)> {
    let mut found = BTreeSet::new();
    let firewalls = documents.iter().filter(|document| document.is_firewall());
    for firewall in firewalls {
        for document in documents.iter().filter(|other| !other.is_firewall()) {
            let rules = document.rules().iter();
            for rule in rules.filter(|rule| may_share(rule, firewall)) {
                for (path, servers) in dns_servers(rule) {
                    if found.len() >= FOUND {
                        break;
                    }
                    let denies: Option<Vec<&TierRule>> = servers
                        .iter()
                        .map(|server| denied_by(firewall, *server))
                        .collect();
                    let Some(denies) = denies.filter(|denies| !denies.is_empty()) else {
                        continue;
                    };
                    let paths: Vec<&str> = denies.iter().map(|rule| &*rule.path).collect();
                    let warning = warning(&paths, &document.key, path, &servers);
                    found.insert((firewall.key.clone(), warning));
                }
            }
        }
    }
    found.into_iter().collect()
}

fn warning(denies: &[&str], document: &str, path: &str, servers: &[IpNet]) -> String {
    let mut denies = denies.to_vec();
    denies.dedup();
    let servers: Vec<String> = servers.iter().map(ToString::to_string).collect();
    format!(
        "{}: denies the DNS servers of {document} {path} ({}): its pods get no answer; {ALLOW_BEFORE}",
        denies.join(", "),
        servers.join(", "),
    )
}

/// Whether a rule may be about pods of a firewall's namespace.
fn may_share(rule: &Rule, firewall: &PolicyDocument) -> bool {
    let mut firewalls = firewall.rules().iter();
    firewalls.any(|own| {
        let namespace = &own.subject.requirements;
        let same_key = |key: &str| {
            let mut own = namespace.iter();
            own.any(|requirement| requirement.key == key)
        };
        let named = rule.subject.requirements.iter();
        let mut named = named.filter(|requirement| same_key(&requirement.key));
        named.all(|requirement| namespace.contains(requirement))
    })
}

/// Blocks of DNS servers outside the cluster that rules with DNS names are about, with the paths of
/// the rules. A rule that is also about other servers is left out.
fn dns_servers(rule: &Rule) -> impl Iterator<Item = (&str, Vec<IpNet>)> {
    let peers = rule.egress.peers.iter();
    let dns = peers.filter(|rule| {
        let mut ports = rule.ports.iter();
        let is_dns_port = |protocol: &u8| {
            let mut ports = rule.ports.iter();
            ports.any(|port| port.dns.is_some() && port.covers(*protocol, DNS_PORT, None))
        };
        !rule.deny && ports.any(|port| port.dns.is_some()) && DNS_PROTOCOLS.iter().any(is_dns_port)
    });
    dns.filter_map(|rule| {
        let Peers::Selectors(selectors) = &rule.peers else {
            return None;
        };
        let mut servers = Vec::new();
        for selector in selectors {
            match selector {
                Selector::Cidr(cidr) => servers.push(cidr.prefix),
                Selector::Entity(Entity::World) => servers.extend(whole_families()),
                _ => return None,
            }
        }
        Some((&*rule.path, servers))
    })
}

/// The rule that denies every address of a block at port 53; `None` if a rule before it may allow one
/// of them.
fn denied_by(firewall: &PolicyDocument, server: IpNet) -> Option<&TierRule> {
    let tier = firewall.rules().iter().flat_map(|rule| &rule.tier);
    for rule in tier {
        let meets = |block: &IpNet| block.contains(&server) || server.contains(block);
        let mut blocks = blocks_of(rule).filter(meets).peekable();
        let covers = |protocol: &u8| {
            let mut ports = rule.ports.iter();
            rule.ports.is_empty() || ports.any(|port| port.covers(*protocol, DNS_PORT, None))
        };
        match rule.action {
            TierAction::Pass if blocks.peek().is_some() && DNS_PROTOCOLS.iter().any(covers) => {
                return None;
            }
            TierAction::Deny
                if blocks.any(|block| block.contains(&server))
                    && DNS_PROTOCOLS.iter().all(covers) =>
            {
                return Some(rule);
            }
            _ => {}
        }
    }
    None
}

fn blocks_of(rule: &TierRule) -> impl Iterator<Item = IpNet> {
    rule.selectors.iter().filter_map(|selector| match selector {
        Selector::Cidr(cidr) => Some(cidr.prefix),
        _ => None,
    })
}

fn is_ipv4(block: &IpNet) -> bool {
    matches!(block, IpNet::V4(_))
}

fn is_ipv6(block: &IpNet) -> bool {
    matches!(block, IpNet::V6(_))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::parse::parse_documents;

    const DENY_IPV4: &str = "{type: Deny, to: {cidrSelector: 0.0.0.0/0}}";
    const DENY_IPV6: &str = "{type: Deny, to: {cidrSelector: '::/0'}}";

    fn firewall(rules: &[&str]) -> String {
        format!(
            r"
apiVersion: k8s.ovn.org/v1
kind: EgressFirewall
metadata: {{name: default, namespace: shop}}
spec: {{egress: [{}]}}
---
",
            rules.join(", ")
        )
    }

    fn dns(namespace: &str, servers: &str) -> String {
        format!(
            r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {{name: dns, namespace: {namespace}}}
spec:
  endpointSelector: {{}}
  egress:
  - {servers}
    toPorts: [{{ports: [{{port: '53'}}], rules: {{dns: [{{matchPattern: '*'}}]}}}}]
---
"
        )
    }

    fn documents(text: &str) -> Vec<PolicyDocument> {
        let all = parse_documents(text, "test").into_iter();
        all.map(Result::unwrap).collect()
    }

    fn open(rules: &[&str]) -> Option<String> {
        open_family(&documents(&firewall(rules))[0]).map(|open| open.text)
    }

    #[test]
    fn a_firewall_that_denies_one_family_only_is_warned_about() {
        let text = open(&[DENY_IPV4]).unwrap();
        for part in [
            "spec.egress[0]: denies every IPv4",
            "IPv6 stays open",
            "::/0",
        ] {
            assert!(text.contains(part), "{text}");
        }
        let text = open(&[DENY_IPV6]).unwrap();
        assert!(
            text.contains("IPv4 stays open") && text.contains("0.0.0.0/0"),
            "{text}"
        );
        let port = "{type: Deny, to: {cidrSelector: '::/0'}, ports: [{protocol: TCP, port: 25}]}";
        let part = "{type: Deny, to: {cidrSelector: 'fd00::/8'}}";
        for further in [port, part] {
            assert!(open(&[DENY_IPV4, further]).is_some(), "{further}");
        }
        let unicast = "{type: Deny, to: {cidrSelector: '2000::/3'}}";
        let intended = "{type: Allow, to: {cidrSelector: '::/0'}}";
        for further in [DENY_IPV6, unicast, intended] {
            assert_eq!(open(&[DENY_IPV4, further]), None, "{further}");
        }
        let some = "{type: Deny, to: {cidrSelector: 10.0.0.0/8}}";
        assert_eq!(open(&[some]), None);
        assert_eq!(open(&[]), None);
        let policy = documents(&dns("shop", "toEntities: [world]"));
        assert_eq!(open_family(&policy[0]), None);
    }

    fn denied(text: &str) -> Vec<(String, String)> {
        let documents = documents(text);
        denied_servers(&documents.iter().collect::<Vec<_>>())
    }

    #[test]
    fn dns_servers_that_a_firewall_denies_are_named() {
        const SERVER: &str = "toCIDR: [192.0.2.53/32]";
        let allow = |ports: &str| {
            format!("{{type: Allow, to: {{cidrSelector: 192.0.2.0/24}}, ports: [{ports}]}}")
        };
        let both = allow("{protocol: UDP, port: 53}, {protocol: TCP, port: 53}");
        let https = allow("{protocol: TCP, port: 443}");
        let with = |rules: &[&str]| denied(&(firewall(rules) + &dns("shop", SERVER)));
        let found = with(&[DENY_IPV4]);
        let [(key, text)] = found.as_slice() else {
            panic!("{found:?}");
        };
        assert_eq!(key, "EgressFirewall/shop/default");
        for part in [
            "spec.egress[0]: denies the DNS servers of CiliumNetworkPolicy/shop/dns spec.egress[0]",
            "192.0.2.53/32",
            ALLOW_BEFORE,
        ] {
            assert!(text.contains(part), "{text}");
        }
        // Neither an allow below the rule that denies the server helps, nor one for another port.
        assert!(!with(&[DENY_IPV4, &both]).is_empty());
        assert!(!with(&[&https, DENY_IPV4]).is_empty());
        assert!(with(&[&both, DENY_IPV4]).is_empty());
        assert!(with(&[DENY_IPV6]).is_empty());
        let other = |namespace: &str, servers: &str| {
            denied(&(firewall(&[DENY_IPV4]) + &dns(namespace, servers)))
        };
        assert!(other("bank", SERVER).is_empty());
        assert!(other("shop", "toEndpoints: [{matchLabels: {app: dns}}]").is_empty());
        assert!(other("shop", "toCIDR: [192.0.2.53/32, '2001:db8::53/128']").is_empty());
        assert!(other("shop", "toEntities: [world]").is_empty());
        let whole = firewall(&[DENY_IPV4, DENY_IPV6]) + &dns("shop", "toEntities: [world]");
        assert_eq!(denied(&whole).len(), 1);
        // A policy of the whole cluster is about the firewall's pods too.
        let everyone = dns("shop", SERVER)
            .replace("CiliumNetworkPolicy", "CiliumClusterwideNetworkPolicy")
            .replace(", namespace: shop", "");
        assert_eq!(denied(&(firewall(&[DENY_IPV4]) + &everyone)).len(), 1);
    }
}
