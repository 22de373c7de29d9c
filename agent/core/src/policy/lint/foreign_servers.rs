//! DNS rules that let a server of one namespace answer names that a policy of another namespace opens.
//!
//! Addresses have the labels of names for the whole node. So the owner of a namespace that runs a
//! DNS server, and lets its pods ask that server for such a name, could open any address to the pods
//! of the other namespace.

use std::net::IpAddr;

use dns_policy::rule::NameRule;

use crate::{
    labels::{NAMESPACE_KEY, NAMESPACE_LABELS, NAMESPACE_NAME, RESERVED},
    policy::{
        document::PolicyDocument,
        rule::{DnsNames, PeerRule, Peers},
    },
    selector::selector::{CidrSelector, Entity, LabelSelector, Operator, Selector},
};

/// Maximum number of pairs of names that are compared: a status must not wait for more.
const COMPARED: usize = 100_000;
/// Maximum number of warnings that are given.
const FOUND: usize = 20;

/// DNS servers that every namespace trusts.
#[derive(Clone, Copy, Debug)]
pub struct KnownServers<'a> {
    /// Namespace of the DNS Service.
    pub namespace: &'a str,
    /// Servers that are trusted by address.
    pub given: &'a [IpAddr],
    /// Whether answers of other servers open nothing.
    pub only_trusted: bool,
}

/// A DNS rule about one server.
#[derive(Clone, Copy)]
struct Asking<'a> {
    document: &'a PolicyDocument,
    rule: &'a PeerRule,
    names: &'a DnsNames,
    /// `None` = any server.
    server: Option<&'a Selector>,
}

/// A name or pattern that a policy opens.
#[derive(Clone, Copy)]
struct Opening<'a> {
    document: &'a PolicyDocument,
    rule: &'a PeerRule,
    selector: &'a NameRule,
}

/// Keys of policies, each with a warning.
pub fn warnings<'a>(
    documents: impl Iterator<Item = &'a PolicyDocument>,
    known: KnownServers<'_>,
) -> Vec<(String, String)> {
    let (mut asking, mut opening) = (Vec::new(), Vec::new());
    for document in documents {
        asking.extend(asking_in(document));
        opening.extend(opening_in(document));
    }
    let mut left = COMPARED;
    let mut found = Vec::new();
    for ask in asking.iter().filter(|ask| !known.has(ask.server)) {
        let mut foreign = opening.iter().filter(|open| {
            if left == 0 || namespace(open.document) == namespace(ask.document) {
                return false;
            }
            left -= 1;
            let own = asking
                .iter()
                .filter(|own| is_for(own.document, open.document));
            let meet = names_of(ask.names).any(|name| meet(&name, &tokens(open.selector.text())));
            meet && !own.clone().any(|own| includes(own.server, ask.server))
        });
        if let Some(first) = foreign.next() {
            found.push((ask.document.key.clone(), text(ask, first, known)));
        }
        if found.len() >= FOUND {
            break;
        }
    }
    found
}

fn text(ask: &Asking<'_>, open: &Opening<'_>, known: KnownServers<'_>) -> String {
    let server = ask
        .server
        .map_or("any server".to_owned(), |server| server.to_string());
    let remedy = match known.only_trusted {
        true => "because of --tofqdns-servers=trusted, such an answer opens nothing",
        false => {
            "start the agents with --tofqdns-servers=trusted, or let the pods ask only servers that \
             both policies name"
        }
    };
    format!(
        "{}: its pods may ask {server} for names that {} {} opens (toFQDNs {}), whose pods may not ask \
         that server: its owner can choose addresses that open to them; {remedy}",
        ask.rule.path,
        open.document.key,
        open.rule.path,
        open.selector.text(),
    )
}

fn asking_in(document: &PolicyDocument) -> impl Iterator<Item = Asking<'_>> {
    let rules = document.rules().iter().flat_map(|rule| &rule.egress.peers);
    let rules = rules.filter(|rule| !rule.deny);
    rules.flat_map(move |rule| {
        let names = rule.ports.iter().filter_map(|port| port.dns.as_ref());
        names.flat_map(move |names| {
            let any = (rule.peers == Peers::Any).then_some(None);
            let servers = any.into_iter().chain(rule.selectors().map(Some));
            servers.map(move |server| Asking {
                document,
                rule,
                names,
                server,
            })
        })
    })
}

fn opening_in(document: &PolicyDocument) -> impl Iterator<Item = Opening<'_>> {
    let rules = document.rules().iter().flat_map(|rule| &rule.egress.peers);
    let rules = rules.filter(|rule| !rule.deny);
    rules.flat_map(move |rule| {
        rule.selectors().filter_map(move |selector| match selector {
            Selector::Fqdn(selector) => Some(Opening {
                document,
                rule,
                selector,
            }),
            _ => None,
        })
    })
}

/// The namespace of a policy; `None` for a policy of the whole cluster.
fn namespace(document: &PolicyDocument) -> Option<&str> {
    let mut parts = document.key.split('/').skip(1);
    let first = parts.next();
    parts.next().and(first)
}

/// Whether a policy may be about the pods that `other` is about.
fn is_for(policy: &PolicyDocument, other: &PolicyDocument) -> bool {
    namespace(policy).is_none() || namespace(policy) == namespace(other)
}

impl KnownServers<'_> {
    /// Whether every namespace trusts this server: no other owner has one.
    fn has(&self, server: Option<&Selector>) -> bool {
        match server {
            Some(Selector::Labels(labels)) => self.is_in_namespace(labels),
            Some(Selector::Cidr(block)) => address(block).is_some_and(|a| self.given.contains(&a)),
            Some(Selector::Entity(entity)) => !matches!(
                entity,
                Entity::World | Entity::WorldIpv4 | Entity::WorldIpv6 | Entity::Cluster
            ),
            Some(Selector::Node(_)) => true,
            _ => false,
        }
    }

    fn is_in_namespace(&self, labels: &LabelSelector) -> bool {
        labels.requirements.iter().any(|requirement| {
            let Operator::In(values) = &requirement.operator else {
                return requirement.source.as_deref() == Some(RESERVED);
            };
            let is_of_namespace = requirement.key == NAMESPACE_KEY
                || requirement.key.strip_prefix(NAMESPACE_LABELS) == Some(NAMESPACE_NAME);
            requirement.source.as_deref() == Some(RESERVED)
                || is_of_namespace && values.iter().all(|value| value == self.namespace)
        })
    }
}

fn address(block: &CidrSelector) -> Option<IpAddr> {
    let is_single = block.prefix.prefix_len() == block.prefix.max_prefix_len();
    is_single.then(|| block.prefix.addr())
}

/// Whether a rule about `own` servers lets pods ask `server` too, as far as this can be told
/// without labels of pods.
fn includes(own: Option<&Selector>, server: Option<&Selector>) -> bool {
    match (own, server) {
        (None, _) => true,
        (Some(own), Some(server)) if own == server => true,
        (Some(Selector::Labels(own)), Some(Selector::Labels(server))) => {
            own.requirements.is_subset(&server.requirements)
        }
        (Some(Selector::Cidr(own)), Some(Selector::Cidr(server))) => {
            own.except.is_empty() && own.prefix.contains(&server.prefix)
        }
        _ => false,
    }
}

/// One step of a pattern.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Token {
    Letter(u8),
    /// Any letters of a label.
    Star,
    /// Any letters and dots, which may be several labels.
    Any,
}

fn names_of(names: &DnsNames) -> impl Iterator<Item = Vec<Token>> {
    let all = matches!(names, DnsNames::All).then(|| vec![Token::Any]);
    let some = match names {
        DnsNames::All => [].as_slice(),
        DnsNames::Names(names) => names.as_slice(),
    };
    let some = some.iter().map(|name| tokens(name.text()));
    all.into_iter().chain(some)
}

fn tokens(pattern: &str) -> Vec<Token> {
    let text = pattern.strip_suffix('.').unwrap_or(pattern);
    if !text.is_empty() && text.chars().all(|c| c == '*') {
        return vec![Token::Any];
    }
    let (first, rest) = match text.strip_prefix("**.") {
        Some(rest) => (vec![Token::Any, Token::Letter(b'.')], rest),
        None => (Vec::new(), text),
    };
    let rest = rest.bytes().map(|byte| match byte {
        b'*' => Token::Star,
        letter => Token::Letter(letter.to_ascii_lowercase()),
    });
    first.into_iter().chain(rest).collect()
}

/// Whether some name fits both patterns.
fn meet(one: &[Token], other: &[Token]) -> bool {
    // Positions of `other` that are reached, for each position of `one`.
    let mut reached = vec![false; other.len() + 1];
    if let Some(first) = reached.first_mut() {
        *first = true;
    }
    follow(None, other, &mut reached);
    for token in one {
        let mut next = vec![false; other.len() + 1];
        for (at, there) in other
            .iter()
            .zip(0..)
            .filter(|(_, at)| reached.get(*at) == Some(&true))
        {
            let place = match (token, at) {
                (Token::Letter(a), Token::Letter(b)) if a == b => there + 1,
                (Token::Letter(b'.'), Token::Star) => continue,
                (Token::Letter(_), Token::Star | Token::Any) => there,
                _ => continue,
            };
            if let Some(slot) = next.get_mut(place) {
                *slot = true;
            }
        }
        if !matches!(token, Token::Letter(_)) {
            // The token may stand for nothing.
            next.copy_from_slice(&reached);
        }
        follow(Some(*token), other, &mut next);
        reached = next;
    }
    reached.last() == Some(&true)
}

/// Goes on over steps of `other` that need no letter of their own, or one that `token` stands for.
fn follow(token: Option<Token>, other: &[Token], reached: &mut [bool]) {
    for (at, step) in other.iter().enumerate() {
        let passes = match (token, step) {
            (_, Token::Star | Token::Any) => true,
            (Some(Token::Star), Token::Letter(letter)) => *letter != b'.',
            (Some(Token::Any), Token::Letter(_)) => true,
            _ => false,
        };
        if passes
            && reached.get(at) == Some(&true)
            && let Some(next) = reached.get_mut(at + 1)
        {
            *next = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::parse::parse_documents;

    const DNS_OF_A: &str = "toEndpoints: [{matchLabels: {app: dns}}]";
    const KUBE_DNS: &str = "toEndpoints: [{matchLabels: {'k8s:io.kubernetes.pod.namespace': \
                            kube-system, k8s-app: kube-dns}}]";

    fn asks(namespace: &str, servers: &str, names: &str) -> String {
        format!(
            r"
---
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {{name: dns, namespace: {namespace}}}
spec:
  endpointSelector: {{}}
  egress:
  - {servers}
    toPorts: [{{ports: [{{port: '53'}}], rules: {{dns: [{names}]}}}}]
"
        )
    }

    fn opens(namespace: &str, name: &str) -> String {
        format!(
            r"
---
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {{name: web, namespace: {namespace}}}
spec:
  endpointSelector: {{}}
  egress:
  - toFQDNs: [{name}]
"
        )
    }

    fn warned(text: &str, only_trusted: bool) -> Vec<(String, String)> {
        let documents = parse_documents(text, "test").into_iter();
        let documents: Vec<PolicyDocument> = documents.map(Result::unwrap).collect();
        let known = KnownServers {
            namespace: "kube-system",
            given: &["192.0.2.53".parse().unwrap()],
            only_trusted,
        };
        warnings(documents.iter(), known)
    }

    #[test]
    fn both_policies_and_the_server_are_named() {
        let text = asks("a", DNS_OF_A, "{matchPattern: '*.example.com'}")
            + &asks("b", KUBE_DNS, "{matchPattern: '*'}")
            + &opens("b", "{matchName: api.example.com}");
        let found = warned(&text, false);
        let [(key, warning)] = found.as_slice() else {
            panic!("{found:?}");
        };
        assert_eq!(key, "CiliumNetworkPolicy/a/dns");
        for says in [
            "spec.egress[0]: its pods may ask ",
            "app=dns",
            "CiliumNetworkPolicy/b/web spec.egress[0] opens (toFQDNs api.example.com)",
            "--tofqdns-servers=trusted",
        ] {
            assert!(warning.contains(says), "{warning}");
        }
        let found = warned(&text, true);
        assert!(found[0].1.ends_with("such an answer opens nothing"));
    }

    #[test]
    fn servers_that_both_namespaces_ask_and_names_that_none_opens_are_no_warning() {
        let every = "{matchPattern: '*'}";
        let own = opens("b", "{matchName: api.example.com}");
        let of_b = asks("b", KUBE_DNS, every);
        let is_warned = |asks_in_a: &str, of_b: &str| {
            let found = warned(&format!("{asks_in_a}{of_b}{own}"), false);
            !found.is_empty()
        };
        assert!(is_warned(&asks("a", DNS_OF_A, every), &of_b));
        assert!(!is_warned(&asks("a", KUBE_DNS, every), &of_b));
        assert!(!is_warned(&asks("b", DNS_OF_A, every), &of_b), "its own");
        assert!(!is_warned(
            &asks("a", DNS_OF_A, "{matchPattern: '*.test'}"),
            &of_b
        ));
        let outside = |address: &str| format!("toCIDR: [{address}]");
        let asks_in_a = asks("a", &outside("192.0.2.99/32"), every);
        assert!(is_warned(&asks_in_a, &of_b));
        assert!(!is_warned(
            &asks("a", &outside("192.0.2.53/32"), every),
            &of_b
        ));
        let same = asks("b", &outside("192.0.2.0/24"), every);
        assert!(!is_warned(&asks_in_a, &same), "b asks it too");
        let world = asks("a", "toEntities: [world]", every);
        assert!(is_warned(&world, &of_b));
        assert!(!is_warned(&asks("a", "toEntities: [host]", every), &of_b));
        // A policy of the whole cluster lets everyone ask it.
        let everyone = asks("a", DNS_OF_A, every)
            .replace("CiliumNetworkPolicy", "CiliumClusterwideNetworkPolicy")
            .replace(", namespace: a", "");
        assert!(!is_warned(&everyone, &of_b), "{everyone}");
    }

    #[test]
    fn patterns_meet_if_a_name_fits_both() {
        for (one, other, wanted) in [
            ("api.example.com", "API.example.com.", true),
            ("api.example.com", "*.example.com", true),
            ("a.api.example.com", "*.example.com", false),
            ("a.api.example.com", "**.example.com", true),
            ("example.com", "*", true),
            ("a*.example.com", "*b.example.com", true),
            ("a*.example.com", "b*.example.com", false),
            ("*.example.com", "www.*", false),
            ("*.example.com", "www.*.com", true),
            ("*.*.com", "www.example.*", true),
            ("*.org", "*.com", false),
            ("**.com", "a.*.com", true),
            ("", "a", false),
        ] {
            let (a, b) = (tokens(one), tokens(other));
            assert_eq!(meet(&a, &b), wanted, "{one} {other}");
            assert_eq!(meet(&b, &a), wanted, "{other} {one}");
        }
    }
}
