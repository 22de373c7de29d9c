//! Tables against the list read from top to bottom, packet by packet, as the kernel reads a map.

use shared_maps::policy::{FLAG_LPM_SHIFT, INGRESS, STATIC_PREFIX_BITS};

use super::*;
use crate::{
    labels::LabelSet,
    policy::{
        compute::{Observed, RuleIndex},
        model::{EndpointPolicy, SideRule},
        rule::{DnsNames, PeerRule, Peers, PortRule, Ports, Protocol},
    },
    selector::selector::{CidrSelector, DnsNameSelector, LabelSelector, Selector},
};

const PROXY: u16 = 10094;

/// A source of choices: the same for the same seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % end
    }

    fn chance(&mut self, of: u64) -> bool {
        self.below(of) == 0
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[usize::try_from(self.below(from.len() as u64)).unwrap()]
    }
}

/// The other side of rules, and the identities that it means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meant {
    Block24,
    Block16,
    Outside,
    Name,
    PodB,
}

/// 1.2.3.0/24 and, within it, an address with the name; 1.2.0.0/16; all other addresses outside the
/// cluster; pods.
const IDENTITIES: &[(u32, &[&str], &[Meant])] = {
    use Meant::*;
    &[
        (
            1 << 24,
            &["cidr:1.2.3.0/24", "reserved:world-ipv4"],
            &[Block24, Block16, Outside],
        ),
        (
            (1 << 24) + 1,
            &[
                "cidr:1.2.3.0/24",
                "dnsname:www.example.com",
                "reserved:world-ipv4",
            ],
            &[Block24, Block16, Outside, Name],
        ),
        (
            (1 << 24) + 2,
            &["cidr:1.2.0.0/16", "reserved:world-ipv4"],
            &[Block16, Outside],
        ),
        (9, &["reserved:world-ipv4"], &[Outside]),
        (300, &["k8s:app=b"], &[PodB]),
        (301, &["k8s:app=c"], &[]),
    ]
};

impl Meant {
    fn selector(self) -> Selector {
        let block = |text: &str| {
            Selector::Cidr(CidrSelector {
                prefix: text.parse().unwrap(),
                except: BTreeSet::new(),
                nodes: true,
            })
        };
        match self {
            Self::Block24 => block("1.2.3.0/24"),
            Self::Block16 => block("1.2.0.0/16"),
            Self::Outside => block("0.0.0.0/0"),
            Self::Name => Selector::DnsName(DnsNameSelector::new("www.example.com")),
            Self::PodB => {
                use crate::selector::selector::{Operator, Requirement};
                let values = ["b".to_owned()].into();
                let app = Requirement::new("app", Operator::In(values));
                Selector::Labels(LabelSelector {
                    requirements: [app].into(),
                })
            }
        }
    }
}

/// Ports in question: the first, and how many.
const FIRST: u16 = 48;
const PORTS: u16 = 16;
/// TCP, UDP, SCTP, ICMP, and one that no rule names.
const PROTOCOLS: [u8; 5] = [6, 17, 132, 1, 47];

fn ports(dice: &mut Dice, protocols: &[Protocol]) -> Vec<PortRule> {
    let number = if dice.chance(3) { 0 } else { 1 + dice.below(2) };
    let mut one = || {
        let port = |dice: &mut Dice| FIRST + u16::try_from(dice.below(PORTS.into())).unwrap();
        let (a, b) = (port(dice), port(dice));
        let range = match dice.below(4) {
            0 => (0, u16::MAX),
            1 => (53, 53),
            2 => (a, a),
            _ => (a.min(b), a.max(b)),
        };
        PortRule {
            protocol: dice.pick(protocols),
            ports: Ports::Range(range.0, range.1),
            dns: None,
        }
    };
    (0..number).map(|_| one()).collect()
}

fn list(dice: &mut Dice) -> Vec<(Meant, TierRule)> {
    use Meant::{Block16, Block24, Name, Outside};
    let number = dice.below(6);
    let mut one = |position: u64| {
        let meant = dice.pick(&[Block24, Block16, Outside, Outside, Name]);
        let rule = TierRule {
            path: format!("spec.egress[{position}]").into(),
            action: dice.pick(&[TierAction::Deny, TierAction::Pass]),
            selectors: vec![meant.selector()],
            ports: ports(dice, &[Protocol::Tcp, Protocol::Udp, Protocol::Sctp]),
        };
        (meant, rule)
    };
    (0..number).map(&mut one).collect()
}

/// Rules below a list; `None` = about everyone.
fn rules(dice: &mut Dice) -> Vec<(Option<Meant>, PeerRule)> {
    use Meant::{Block16, Block24, Outside, PodB};
    let number = dice.below(4);
    let mut one = || {
        let meant = dice.pick(&[
            None,
            Some(Block24),
            Some(Block16),
            Some(Outside),
            Some(PodB),
        ]);
        let protocols = [
            Protocol::Any,
            Protocol::Tcp,
            Protocol::Udp,
            Protocol::Sctp,
            Protocol::Icmp,
        ];
        let mut ports = ports(dice, &protocols);
        let deny = dice.chance(4);
        if !deny && dice.chance(2) {
            let names = dice.pick(&[0, 1]);
            for port in &mut ports {
                port.dns = Some(match names {
                    0 => DnsNames::All,
                    _ => DnsNames::Names(Vec::new()),
                });
            }
        }
        let rule = PeerRule {
            path: "spec.egress[0]".into(),
            deny,
            peers: match meant {
                None => Peers::Any,
                Some(meant) => Peers::Selectors(vec![meant.selector()]),
            },
            ports,
        };
        (meant, rule)
    };
    (0..number).map(|_| one()).collect()
}

/// A policy as the test reads it.
struct Case {
    list: Vec<(Meant, TierRule)>,
    rules: Vec<(Option<Meant>, PeerRule)>,
    enforced: bool,
}

impl Case {
    fn any(dice: &mut Dice) -> Self {
        Self {
            list: list(dice),
            rules: rules(dice),
            enforced: dice.chance(2),
        }
    }

    fn is_observed(&self) -> bool {
        self.list.iter().any(|(meant, _)| *meant == Meant::Name)
    }

    /// What happens to a packet, by the list read from top to bottom.
    fn verdict(&self, means: &[Meant], protocol: u8, port: u16) -> Verdict {
        let covers = |ports: &[PortRule]| {
            let is = |rule: &PortRule| match rule.ports {
                Ports::Range(first, last) => {
                    rule.protocol.numbers().contains(&protocol) && (first..=last).contains(&port)
                }
                Ports::Named(_) => unreachable!(),
            };
            ports.is_empty() || ports.iter().any(is)
        };
        let mut list = self.list.iter();
        let first = list.find(|(meant, rule)| means.contains(meant) && covers(&rule.ports));
        if first.is_some_and(|(_, rule)| rule.action == TierAction::Deny) {
            return Verdict::Drop;
        }
        let has_transport = matches!(protocol, 6 | 17);
        let about = self.rules.iter();
        let about = about.filter(|(meant, _)| meant.is_none_or(|meant| means.contains(&meant)));
        let about: Vec<&PeerRule> = about.map(|(_, rule)| rule).collect();
        if about.iter().any(|rule| rule.deny && covers(&rule.ports)) {
            return Verdict::Drop;
        }
        let with = |dns: bool| {
            about.iter().filter(|rule| !rule.deny).any(|rule| {
                let of_kind = rule.ports.iter().filter(|port| port.dns.is_some() == dns);
                let of_kind: Vec<PortRule> = of_kind.cloned().collect();
                match rule.ports.is_empty() {
                    true => !dns,
                    false => !of_kind.is_empty() && covers(&of_kind),
                }
            })
        };
        let observes = self.is_observed() && has_transport && port == 53;
        // An empty list of names allows none: it limits the servers' names.
        let limits = self.rules.iter().flat_map(|(_, rule)| match rule.deny {
            true => &[][..],
            false => &rule.ports,
        });
        let limited = limits.into_iter().any(|rule| {
            rule.dns
                .as_ref()
                .is_some_and(|names| *names != DnsNames::All)
                && matches!(rule.ports, Ports::Range(first, last) if first <= 53 && 53 <= last)
        });
        match (has_transport && with(true), with(false)) {
            (true, _) => Verdict::Redirect,
            (false, true) if observes => Verdict::Redirect,
            (false, true) => Verdict::Pass,
            (false, false) if self.enforced => Verdict::Drop,
            (false, false) if observes && !limited => Verdict::Redirect,
            (false, false) => Verdict::Pass,
        }
    }

    fn policy(&self) -> EndpointPolicy {
        let tier = self.list.iter().map(|(_, rule)| SideRule {
            document: "list".into(),
            rule: Arc::new(rule.clone()),
        });
        let rules = self.rules.iter().map(|(_, rule)| SideRule {
            document: "rules".into(),
            rule: Arc::new(rule.clone()),
        });
        EndpointPolicy {
            egress: Side {
                enforced: self.enforced,
                enforcers: Vec::new(),
                tier: tier.collect(),
                rules: rules.collect(),
            },
            ..EndpointPolicy::default()
        }
    }
}

fn selectors() -> SelectorCache {
    let mut selectors = SelectorCache::default();
    for meant in [
        Meant::Block24,
        Meant::Block16,
        Meant::Outside,
        Meant::Name,
        Meant::PodB,
    ] {
        selectors.register(&meant.selector());
    }
    for (id, labels, _) in IDENTITIES {
        selectors.add_identity(IdentityId(*id), LabelSet::parse(labels).unwrap());
    }
    selectors
}

/// The entries for everyone, and those of each identity.
fn render(policy: &EndpointPolicy, selectors: &SelectorCache) -> (Entries, Vec<Entries>) {
    let mut index = RuleIndex::of(policy, selectors);
    let own = LabelSet::new(Vec::new());
    let everyone = index.entries(policy, &own, IdentityId::UNKNOWN, selectors, PROXY);
    index.follow_everyone(&everyone);
    let of = IDENTITIES.iter();
    let of = of.map(|(id, ..)| index.entries(policy, &own, IdentityId(*id), selectors, PROXY));
    (everyone, of.collect())
}

/// The longest match of a packet, as the kernel's trie finds it.
fn lookup(entries: &Entries, protocol: u8, port: u16) -> Option<PolicyValue> {
    let matches = |key: &PolicyKey| {
        let bits = key.prefix_len - STATIC_PREFIX_BITS;
        let packet = (u32::from(protocol) << 16) | u32::from(port);
        let key = (u32::from(key.protocol) << 16) | u32::from(key.dport.get());
        bits == 0 || (packet ^ key) >> (24 - bits) == 0
    };
    let found = entries.iter();
    let found = found.filter(|(key, _)| key.egress == EGRESS && matches(key));
    found
        .map(|(key, value)| (key.prefix_len, *value))
        .max_by_key(|(len, _)| *len)
        .map(|(_, value)| value)
}

/// The verdict of the kernel, as `bpf/src/policy.rs::judge` reaches it.
fn kernel(own: &Entries, everyone: &Entries, protocol: u8, port: u16) -> Verdict {
    let exact = lookup(own, protocol, port);
    let is_final = |entry: &PolicyValue| entry.precedence == PRECEDENCE_DENY;
    let entry = match (exact, lookup(everyone, protocol, port)) {
        (Some(exact), _) if is_final(&exact) => exact,
        (Some(exact), Some(any)) => {
            let wins = any.precedence > exact.precedence
                || (any.precedence == exact.precedence
                    && any.flags >> FLAG_LPM_SHIFT > exact.flags >> FLAG_LPM_SHIFT);
            if wins { any } else { exact }
        }
        (Some(entry), None) | (None, Some(entry)) => entry,
        (None, None) => return Verdict::Drop,
    };
    if entry.is_deny() {
        Verdict::Drop
    } else if entry.proxy_port.get() != 0 {
        Verdict::Redirect
    } else {
        Verdict::Pass
    }
}

fn packets() -> impl Iterator<Item = (u8, u16)> {
    let ports = || (FIRST..FIRST + PORTS).chain([0, u16::MAX]);
    PROTOCOLS
        .into_iter()
        .flat_map(move |protocol| ports().map(move |port| (protocol, port)))
}

#[test]
fn a_table_says_what_the_first_rule_that_covers_a_packet_says_in_10_000_lists() {
    let selectors = selectors();
    let mut dice = Dice(7);
    let (mut most, mut tables, mut observed) = (0, 0, 0);
    for _ in 0..10_000 {
        let case = Case::any(&mut dice);
        let policy = case.policy();
        let (everyone, of) = render(&policy, &selectors);
        observed += usize::from(Observed::of(&policy.egress) != Observed::Nothing);
        for ((id, _, means), entries) in IDENTITIES.iter().zip(&of) {
            let selects = case.list.iter().any(|(meant, _)| means.contains(meant));
            assert_eq!(is_table(IdentityId(*id), entries), selects);
            tables += usize::from(selects);
            if selects {
                let egress = entries.keys().filter(|key| key.egress == EGRESS);
                most = most.max(egress.count());
                assert!(
                    entries
                        .iter()
                        .all(|(k, v)| k.egress == INGRESS || is_of_table(v))
                );
            }
            for (protocol, port) in packets() {
                let is = kernel(entries, &everyone, protocol, port);
                let shall = case.verdict(means, protocol, port);
                assert_eq!(
                    is, shall,
                    "{id} {protocol} {port}: {:?} {:?}",
                    case.list, case.rules
                );
            }
        }
    }
    assert!(tables > 10_000 && observed > 1_000, "{tables} {observed}");
    assert!(most <= 24, "{most} entries of one identity");
}

/// What a list does not select has the entries that it has without the list.
#[test]
fn a_list_changes_nothing_for_identities_that_it_does_not_select() {
    let selectors = selectors();
    let mut dice = Dice(11);
    let mut compared = 0;
    for _ in 0..2_000 {
        let mut case = Case::any(&mut dice);
        case.list.retain(|(meant, _)| *meant != Meant::Name);
        let (everyone, of) = render(&case.policy(), &selectors);
        let list = std::mem::take(&mut case.list);
        let (everyone_before, before) = render(&case.policy(), &selectors);
        assert_eq!(everyone, everyone_before);
        for (((_, _, means), entries), before) in IDENTITIES.iter().zip(of).zip(before) {
            if !list.iter().any(|(meant, _)| means.contains(meant)) {
                assert_eq!(entries, before);
                compared += 1;
            }
        }
    }
    assert!(compared > 2_000);
}

/// Why tables are needed: the list written as allows and denies, and with a precedence for each
/// position.
#[test]
fn a_list_written_as_allows_and_denies_or_with_precedences_is_wrong_in_a_quarter_of_lists() {
    let selectors = selectors();
    let mut dice = Dice(13);
    let (mut as_rules, mut as_levels, mut lists) = (0, 0, 0);
    for _ in 0..3_000 {
        let mut case = Case::any(&mut dice);
        case.list.retain(|(meant, _)| *meant != Meant::Name);
        if case.list.is_empty() {
            continue;
        }
        // There are no other rules.
        (case.rules, case.enforced) = (Vec::new(), false);
        lists += 1;
        let plain = |(meant, rule): &(Meant, TierRule)| {
            let rule = PeerRule {
                path: Arc::clone(&rule.path),
                deny: rule.action == TierAction::Deny,
                peers: Peers::Selectors(vec![meant.selector()]),
                ports: rule.ports.clone(),
            };
            (Some(*meant), rule)
        };
        let naive = Case {
            list: Vec::new(),
            rules: case.list.iter().map(plain).collect(),
            enforced: false,
        };
        let (everyone, of) = render(&naive.policy(), &selectors);
        let is_wrong = |entries: &Entries, means: &[Meant]| {
            packets().any(|(protocol, port)| {
                kernel(entries, &everyone, protocol, port) != case.verdict(means, protocol, port)
            })
        };
        let mut each = IDENTITIES.iter().zip(&of);
        as_rules += usize::from(each.any(|((_, _, means), entries)| is_wrong(entries, means)));
        let mut each = IDENTITIES.iter();
        as_levels +=
            usize::from(each.any(|(id, _, means)| is_wrong(&levels(&case, *id, means), means)));
    }
    assert!(as_rules * 4 > lists, "{as_rules} of {lists}");
    assert!(as_levels * 8 > lists, "{as_levels} of {lists}");
}

/// The list with one precedence for each position: the first of equal keys stays.
fn levels(case: &Case, id: u32, means: &[Meant]) -> Entries {
    let mut entries = Entries::new();
    let about = case.list.iter().enumerate();
    for (position, (_, rule)) in about.filter(|(_, (meant, _))| means.contains(meant)) {
        let ranges = rule.ports.iter().flat_map(|port| port.at(None));
        let all = rule.ports.is_empty().then_some((0, 0, u16::MAX));
        for (protocol, first, last) in ranges.chain(all) {
            for (port, bits) in blocks(first, last) {
                let key = PolicyKey::new(id, EGRESS, protocol, port, bits);
                let value = match rule.action {
                    TierAction::Deny => PolicyValue::deny(key),
                    TierAction::Pass => PolicyValue::allow(key),
                };
                let precedence = PRECEDENCE - u32::try_from(position).unwrap();
                entries.entry(key).or_insert(PolicyValue {
                    precedence,
                    ..value
                });
            }
        }
    }
    entries
}

#[test]
fn a_list_of_many_ports_is_rendered_in_one_pass() {
    let rule = |n: u16| TierRule {
        path: format!("spec.egress[{n}]").into(),
        action: [TierAction::Deny, TierAction::Pass][usize::from(n % 2)],
        selectors: vec![Meant::Outside.selector()],
        ports: vec![PortRule {
            protocol: Protocol::Tcp,
            ports: Ports::Range(n, u16::MAX - n),
            dns: None,
        }],
    };
    let case = Case {
        list: (0..8_000)
            .rev()
            .map(|n| (Meant::Outside, rule(n + 1)))
            .collect(),
        rules: Vec::new(),
        enforced: false,
    };
    let (everyone, of) = render(&case.policy(), &selectors());
    for port in [
        0,
        1,
        2,
        3,
        4000,
        7999,
        8000,
        8001,
        30_000,
        u16::MAX - 8000,
        u16::MAX,
    ] {
        let is = kernel(&of[3], &everyone, 6, port);
        assert_eq!(is, case.verdict(&[Meant::Outside], 6, port), "{port}");
    }
}
