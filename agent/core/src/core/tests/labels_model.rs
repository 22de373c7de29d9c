//! Random claims on a dozen prefixes are compared with a reading from scratch after every claim:
//! labels and identity of each prefix, references of each identity, selections, the map.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use dns_policy::{boot_time::BootTime, name::Fqdn, rule::NameRule};
use ipnet::IpNet;
use proptest::prelude::*;
use shared_maps::{EndpointId, IdentityId};

use crate::{
    core::{CoreConfig, Restored, plan::Plan, state::State},
    datapath::memory::MemoryDatapath,
    ipcache::{
        metadata::Claim,
        owners::{Owner, Source},
        resolve::cidr_label,
        table::key_of,
    },
    labels::{Label, LabelSet},
    selector::selector::{CidrSelector, Entity, Selector},
};

const PREFIXES: [&str; 12] = [
    "0.0.0.0/0",
    "10.0.0.0/8",
    "10.0.0.0/16",
    "10.0.1.0/24",
    "10.0.1.0/25",
    "10.0.1.1/32",
    "10.0.1.200/32",
    "10.1.0.1/32",
    "192.0.2.1/32",
    "::/0",
    "2001:db8::/32",
    "2001:db8::1/128",
];
/// Labels by bit; those of one key and different values are neighbours. A block's own label has
/// the bit [`BLOCK`] + its number.
const LABELS: [&str; 12] = [
    "fqdn:a.test",
    "fqdn:*.test",
    "fqdn:*",
    "cidrgroup:one",
    "cidrgroup:two",
    "k8s:zone=x",
    "k8s:zone=y",
    "reserved:host",
    "reserved:remote-node",
    "reserved:kube-apiserver",
    "reserved:world-ipv4",
    "reserved:world-ipv6",
];
const BLOCK: usize = 16;
const ZONES: u32 = 0b110_0000;
const HOST: u32 = 1 << 7;
const INSIDE: u32 = HOST | 1 << 8;
const WORLD: u32 = 0b11 << 10;
const BLOCKS: u32 = 0xffff_0000;
const OUTSIDE_ONLY: u32 = BLOCKS | WORLD | 0b1_1111;

/// Owners, the most trusted first, each with the labels that it may give besides a block's own label.
const SAYS: [&[u32]; 6] = [
    &[1 << 9, 1 << 5],
    &[],
    &[1 << 3, 1 << 4, 0b1_1000, 1 << 5, 1 << 6],
    &[1 << 8, 1 << 7, 1 << 6, 1 << 8 | 1 << 5],
    &[0b001, 0b010, 0b011, 0b111],
    &[0b010, 0b100, 0b110],
];
/// Number of the owner that gives an identity, and of the owner of blocks.
const ENDPOINT: usize = 1;
const POLICY: usize = 6;
const POD: IdentityId = IdentityId(300);

fn owner(number: usize) -> Owner {
    match number {
        0 => Owner::Object(Source::KubeApiserver, Arc::from("api")),
        ENDPOINT => Owner::Endpoint(EndpointId(5)),
        2 => Owner::Object(Source::CustomResource, Arc::from("group")),
        3 => Owner::Object(Source::Kubernetes, Arc::from("nodes")),
        POLICY => Owner::Policy,
        name => Owner::Name(Fqdn::normalise(&format!("n{name}.test"))),
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Said {
    Labels(u32),
    Identity(IdentityId),
}

/// An owner's labels of a prefix, or the removal of that owner.
#[derive(Clone, Copy, Debug)]
struct Act {
    prefix: usize,
    owner: usize,
    said: Option<Said>,
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = (0..PREFIXES.len(), 0..=POLICY, 0..10_usize).prop_map(|(prefix, owner, n)| {
        let said = match owner {
            _ if n < 3 => None,
            ENDPOINT => Some(Said::Identity(POD)),
            POLICY if PREFIXES[prefix].ends_with("/0") => None,
            POLICY => Some(Said::Labels(1 << (BLOCK + prefix))),
            _ => SAYS[owner]
                .get(n % SAYS[owner].len())
                .map(|l| Said::Labels(*l)),
        };
        Act {
            prefix,
            owner,
            said,
        }
    });
    prop::collection::vec(act, 1..16)
}

/// What each owner claims for each prefix.
struct Model {
    prefixes: Vec<IpNet>,
    said: Vec<BTreeMap<usize, Said>>,
}

impl Model {
    fn new() -> Self {
        let prefixes: Vec<IpNet> = PREFIXES.iter().map(|p| p.parse().unwrap()).collect();
        let mut said = vec![BTreeMap::new(); prefixes.len()];
        // Claims for all addresses outside the cluster, which are never removed.
        said[0].insert(usize::MAX, Said::Labels(1 << 10));
        said[9].insert(usize::MAX, Said::Labels(1 << 11));
        Self { prefixes, said }
    }

    /// Labels or identity of a prefix, worked out from scratch; `None` if it has no owner.
    fn reading(&self, prefix: usize) -> Option<Said> {
        let said = &self.said[prefix];
        let outright = said.values().find(|said| matches!(said, Said::Identity(_)));
        if said.is_empty() || outright.is_some() {
            return outright.copied();
        }
        let net = &self.prefixes[prefix];
        let mut covering: Vec<usize> = (0..self.prefixes.len())
            .filter(|n| self.prefixes[*n].contains(net))
            .collect();
        covering.sort_by_key(|n| u8::MAX - self.prefixes[*n].prefix_len());
        let mut labels = 0;
        for said in covering.iter().flat_map(|n| self.said[*n].values()) {
            let Said::Labels(more) = said else { continue };
            for group in [ZONES, BLOCKS] {
                if labels & group == 0 {
                    labels |= more & group;
                }
            }
            labels |= more & !(ZONES | BLOCKS);
        }
        if labels & INSIDE != 0 {
            labels &= !OUTSIDE_ONLY;
        } else {
            labels |= if net.addr().is_ipv4() {
                1 << 10
            } else {
                1 << 11
            };
        }
        Some(Said::Labels(labels))
    }

    /// Labels as the agent has them.
    fn spell(&self, labels: u32) -> LabelSet {
        let plain = LABELS.iter().enumerate();
        let plain = plain.filter(|(bit, _)| labels & 1 << bit != 0);
        let plain = plain.map(|(_, text)| Label::parse(text).unwrap());
        let blocks = self.prefixes.iter().enumerate();
        let blocks = blocks.filter(|(n, _)| labels & 1 << (BLOCK + n) != 0);
        let blocks = blocks.filter_map(|(_, prefix)| cidr_label(*prefix));
        LabelSet::new(plain.chain(blocks).collect())
    }
}

/// Reserved number of labels, if they have one.
fn reserved(labels: u32) -> Option<IdentityId> {
    if labels & HOST != 0 {
        return Some(IdentityId::HOST);
    }
    let remote = 1 << 8;
    let numbers = [
        (1 << 10, IdentityId::WORLD_IPV4),
        (1 << 11, IdentityId::WORLD_IPV6),
        (remote, IdentityId::REMOTE_NODE),
        (remote | 1 << 9, IdentityId::KUBE_APISERVER),
    ];
    numbers
        .into_iter()
        .find(|(of, _)| *of == labels)
        .map(|(_, id)| id)
}

/// A selector, and an independent reading of which labels it selects.
type Read = (Selector, fn(u32) -> bool);

/// Selectors that are always registered.
fn selectors() -> [Read; 5] {
    let block = |text: &str| {
        Selector::Cidr(CidrSelector {
            prefix: text.parse().unwrap(),
            except: Default::default(),
            nodes: false,
        })
    };
    let name = Selector::Fqdn(NameRule::Pattern("*.test".to_owned()));
    [
        (name, |labels| labels & 0b010 != 0),
        (block("10.0.0.0/16"), |labels| {
            [2, 3, 4, 5, 6]
                .iter()
                .any(|n| labels & 1 << (BLOCK + n) != 0)
        }),
        (block("10.0.1.0/25"), |labels| {
            [4, 5].iter().any(|n| labels & 1 << (BLOCK + n) != 0)
        }),
        (Selector::Entity(Entity::World), |labels| {
            labels & WORLD != 0
        }),
        (Selector::Entity(Entity::KubeApiserver), |labels| {
            labels & 1 << 9 != 0
        }),
    ]
}

struct Checked {
    model: Model,
    state: State,
    datapath: MemoryDatapath,
    spelt: HashMap<u32, LabelSet>,
    selectors: [Read; 5],
}

impl Checked {
    fn new(config: CoreConfig) -> Self {
        let now = BootTime::START.plus_secs(1000);
        let restored = Restored {
            now,
            ..Restored::default()
        };
        let mut state = State::new(config, restored);
        state.restoration.policies().end();
        state.restoration.endpoints().end();
        assert!(state.restoration.sync(state.now));
        let selectors = selectors();
        for (selector, _) in &selectors {
            state.policy.register(selector);
        }
        Self {
            model: Model::new(),
            state,
            datapath: MemoryDatapath::default(),
            spelt: HashMap::new(),
            selectors,
        }
    }

    fn act(&mut self, act: Act) {
        let Act {
            prefix,
            owner: by,
            said,
        } = act;
        let net = self.model.prefixes[prefix];
        match said {
            Some(said) => {
                let claim = match said {
                    Said::Labels(labels) => Claim::Labels(self.spell(labels)),
                    Said::Identity(id) => Claim::Identity(id),
                };
                self.state.ipcache.claim(net, owner(by), claim);
                self.model.said[prefix].insert(by, said);
            }
            None => {
                self.state.ipcache.unclaim(net, &owner(by));
                self.model.said[prefix].remove(&by);
            }
        }
        self.flush();
    }

    fn flush(&mut self) {
        let mut plan = Plan::default();
        self.state.flush(&mut plan);
        assert!(plan.apply(&mut self.datapath).is_empty());
    }

    fn spell(&mut self, labels: u32) -> LabelSet {
        let model = &self.model;
        let spelt = self.spelt.entry(labels);
        spelt.or_insert_with(|| model.spell(labels)).clone()
    }

    fn check(&mut self) {
        let mut holders: BTreeMap<u32, usize> = BTreeMap::new();
        let mut of_host = HOST;
        let mut numbers: BTreeMap<u32, IdentityId> = BTreeMap::new();
        for prefix in 0..PREFIXES.len() {
            let net = self.model.prefixes[prefix];
            let metadata = self.state.ipcache.get(net);
            let is = metadata.and_then(|metadata| metadata.desired);
            let in_map = self.datapath.ipcache.get(&key_of(net));
            assert_eq!(
                in_map.map(|value| IdentityId(value.sec_identity)),
                is,
                "{net}"
            );
            let labels = match self.model.reading(prefix) {
                None => {
                    assert_eq!(is, None, "{net}");
                    continue;
                }
                Some(Said::Identity(id)) => {
                    assert_eq!(is, Some(id), "{net}");
                    continue;
                }
                Some(Said::Labels(labels)) => labels,
            };
            if labels & HOST != 0 {
                of_host |= labels;
            }
            if let Some(reserved) = reserved(labels) {
                assert_eq!(is, Some(reserved), "{net}");
                numbers.insert(if labels & HOST != 0 { HOST } else { labels }, reserved);
                continue;
            }
            *holders.entry(labels).or_default() += 1;
            let shall = self.spell(labels);
            let id = is.unwrap_or_else(|| panic!("{net} has no identity"));
            assert_eq!(self.state.numbers.local_labels(id), Some(&shall), "{net}");
            assert_eq!(*numbers.entry(labels).or_insert(id), id, "{net}");
            assert_eq!(id.is_local_scope(), labels & INSIDE == 0, "{net}");
        }
        let mut allocated = self.state.numbers.allocated_local();
        assert_eq!(allocated.len(), holders.len());
        allocated.sort();
        for (labels, references) in holders {
            let held = (numbers[&labels], self.spell(labels), references);
            assert!(allocated.binary_search(&held).is_ok(), "{held:?}");
        }
        numbers.remove(&HOST);
        let selectors = self.selectors.iter();
        for (selector, reads) in selectors {
            let id = self.state.policy.selectors().id_of(selector).unwrap();
            for (labels, number) in &numbers {
                assert_eq!(
                    self.state.policy.selectors().selects(id, *number),
                    reads(*labels),
                    "{selector}: {number}"
                );
            }
            assert_eq!(
                self.state.policy.selectors().selects(id, IdentityId::HOST),
                reads(of_host),
                "{selector}: host"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn every_state_is_what_a_reading_from_scratch_says(acts in acts()) {
        let mut checked = Checked::new(CoreConfig::default());
        for act in acts {
            checked.act(act);
            checked.check();
        }
    }
}

const NAMES: u32 = 0b111;

impl Checked {
    /// Labels that each prefix has in the ipcache; `None` where its number is reserved or a pod's.
    fn in_force(&self) -> Vec<Option<u32>> {
        let bit = |label: &Label| {
            let mut texts = LABELS.iter();
            let plain = texts.position(|text| *text == label.to_string());
            let blocks = self.model.prefixes.iter();
            let mut blocks = blocks.map(|prefix| cidr_label(*prefix));
            let mut block = || blocks.position(|block| block.as_ref() == Some(label));
            1 << plain.unwrap_or_else(|| BLOCK + block().unwrap())
        };
        let of = |prefix: &IpNet| {
            let value = self.datapath.ipcache.get(&key_of(*prefix))?;
            let labels = self
                .state
                .numbers
                .local_labels(IdentityId(value.sec_identity))?;
            Some(labels.iter().map(bit).fold(0, |all, one| all | one))
        };
        self.model.prefixes.iter().map(of).collect()
    }

    /// With the breaker: a prefix loses no name that it has and must keep, gains none that it must not
    /// have, and all its other labels are exact.
    fn check_limited(&self, before: &[Option<u32>]) {
        let limited = self.state.numbers.budget();
        for (prefix, is) in self.in_force().into_iter().enumerate() {
            let Some(Said::Labels(shall)) = self.model.reading(prefix) else {
                continue;
            };
            let (Some(is), None) = (is, reserved(shall)) else {
                assert_eq!(is.is_none(), reserved(shall).is_some());
                continue;
            };
            let net = self.model.prefixes[prefix];
            let had = before[prefix].unwrap_or(0) & NAMES;
            assert_eq!(is & !NAMES, shall & !NAMES, "{net}");
            assert_eq!(is != shall, limited.is_limited(net), "{net}");
            assert_eq!(had & shall & !is, 0, "{net} lost a name");
            assert_eq!(
                is & NAMES & !shall,
                0,
                "{net} has a name that is not its own"
            );
            assert_eq!(is & NAMES == 0, shall & NAMES == 0, "{net}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn the_circuit_breaker_takes_nothing_away(acts in acts(), max in 0..5_usize) {
        let config = CoreConfig { max_fqdn_identities: Some(max), ..CoreConfig::default() };
        let mut checked = Checked::new(config);
        for act in acts {
            let before = checked.in_force();
            checked.act(act);
            checked.check_limited(&before);
        }
        // Prefixes that wait get their labels as far as there is room.
        for _ in 0..PREFIXES.len() {
            let before = checked.in_force();
            checked.state.retry_limited();
            checked.flush();
            checked.check_limited(&before);
        }
        let budget = checked.state.numbers.budget();
        assert!(budget.limited() == 0 || budget.combinations() >= max);
    }
}
