//! Decides which policies are set aside, so that the other policies fit into the table.
//!
//! A policy that is set aside still restricts its pods, but allows nothing. Policies that do not
//! fit alone are set aside first. Then, until the rest fits, the largest policies of the namespace
//! that needs the most are set aside. The choice depends only on the objects, and not on the order
//! in which they came. It is made before any chain or group is made, and only if the policies may
//! not fit.

mod classes;

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use self::classes::Classes;
use crate::{
    cache::Cache,
    contiv::PolicyId,
    group::{self, Group},
    pod::PodId,
    processor::Processor,
    render::nft::{self, Limits},
};

/// Members are counted up to this multiple of the limit.
const COUNTED: usize = 8;

/// The parts of the table whose size is limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scarce {
    /// Rules of the chains of pods.
    Rules,
    /// Elements of groups and of sets of ranges.
    Addresses,
}

/// Why a policy is set aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetAside {
    /// The part of the table of which the policy needs too much.
    pub of: Scarce,
    /// Minimum number that the policy needs.
    pub needs: usize,
    /// The limit for all policies of this node's pods together.
    pub limit: usize,
}

impl SetAside {
    /// What is wrong with the policy, with the remedy.
    pub fn problem(self, policy: &PolicyId) -> String {
        let Self { of, needs, limit } = self;
        let (of, remedy) = match of {
            Scarce::Rules => (
                "rules",
                "use fewer peers and ports, or one policy for several pods",
            ),
            Scarce::Addresses => (
                "addresses of peers",
                "select fewer pods by its peers, or write an ipBlock in place of a selector for every pod",
            ),
        };
        format!(
            "NetworkPolicy/{policy} is set aside: its pods are restricted, and it allows nothing. It \
             needs at least {needs} {of}, and all NetworkPolicies of this node's pods get {limit}; {remedy}"
        )
    }
}

/// The policies of this node's pods, and the policies that are set aside.
#[derive(Debug)]
pub(crate) struct Selection {
    limits: Limits,
    classes: Classes,
    set_aside: BTreeMap<PolicyId, SetAside>,
    /// Number of elements in the sets of ranges of policies that are not set aside.
    ranges: usize,
}

impl Selection {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            classes: Classes::default(),
            set_aside: BTreeMap::new(),
            ranges: 0,
        }
    }

    /// The policies that are set aside.
    pub(crate) const fn set_aside(&self) -> &BTreeMap<PolicyId, SetAside> {
        &self.set_aside
    }

    /// Updates pods whose policies may have changed, or may need more or less than before.
    pub(crate) fn follow(&mut self, pods: &BTreeSet<PodId>, processor: &Processor) {
        self.classes.follow(pods, processor);
        if self.set_aside.is_empty() {
            self.ranges = self.classes.sum().ranges;
        }
    }

    /// Whether the rules of all policies fit.
    pub(crate) const fn has_room(&self) -> bool {
        self.classes.sum().rows <= self.limits.rows
    }

    /// The number of members that the groups of policies that are not set aside may have; `None` if
    /// the ranges of these policies alone are too many.
    pub(crate) const fn room(&self) -> Option<usize> {
        self.limits.addresses.checked_sub(self.ranges)
    }

    /// Decides again which policies are set aside.
    pub(crate) fn decide(&mut self, cache: &Cache, processor: &Processor) {
        let mut decision = Decision {
            cache,
            processor,
            classes: &self.classes,
            limits: self.limits,
            set_aside: BTreeMap::new(),
        };
        decision.make();
        self.set_aside = decision.set_aside;
        let aside = &self.set_aside;
        let sum = self.classes.sum_without(|id| aside.contains_key(id));
        self.ranges = sum.ranges;
    }
}

struct Decision<'a> {
    cache: &'a Cache,
    processor: &'a Processor,
    classes: &'a Classes,
    limits: Limits,
    set_aside: BTreeMap<PolicyId, SetAside>,
}

impl Decision<'_> {
    fn make(&mut self) {
        while let Some(needs) = self.excess() {
            let chosen = needs.largest();
            if chosen.is_empty() {
                return;
            }
            let (of, limit) = (needs.of, needs.limit);
            let chosen = chosen.into_iter().map(|(policy, needs)| {
                let aside = SetAside { of, needs, limit };
                (policy, aside)
            });
            self.set_aside.extend(chosen);
        }
    }

    /// The needs of the policies that are not set aside yet, if these policies do not fit.
    fn excess(&self) -> Option<Needs> {
        let rules = self.rules();
        if rules.total > rules.limit {
            return Some(rules);
        }
        let addresses = self.addresses();
        (addresses.total > addresses.limit).then_some(addresses)
    }

    fn rules(&self) -> Needs {
        let mut needs = Needs::new(Scarce::Rules, self.limits.rows);
        for (_, policies) in self.classes.chains(|id| self.set_aside.contains_key(id)) {
            needs.total = needs.total.saturating_add(1);
            for (policy, need) in policies {
                needs.add(policy, need.rows);
                needs.total = needs.total.saturating_add(need.rows);
            }
        }
        needs
    }

    fn addresses(&self) -> Needs {
        let mut needs = Needs::new(Scarce::Addresses, self.limits.addresses);
        let mut users: BTreeMap<Group, BTreeSet<&PolicyId>> = BTreeMap::new();
        for (class, policies) in self.classes.chains(|id| self.set_aside.contains_key(id)) {
            for (policy, need) in policies {
                needs.add(policy, need.ranges);
                needs.total = needs.total.saturating_add(need.ranges);
                let Some(compiled) = self.processor.policy(policy) else {
                    continue;
                };
                let (flow, family) = (class.flow, class.family);
                for group in nft::groups(&compiled.policy, flow, family, &class.ports) {
                    users.entry(group).or_default().insert(policy);
                }
            }
        }
        let groups: Vec<&Group> = users.keys().collect();
        let most = self.limits.addresses.saturating_mul(COUNTED);
        let counts = group::count(self.cache, &groups, most);
        for (policies, members) in users.values().zip(counts) {
            needs.total = needs.total.saturating_add(members);
            let namespaces = policies.iter().map(|policy| &policy.namespace);
            for namespace in namespaces.collect::<BTreeSet<_>>() {
                *needs.of_namespace(namespace) += members;
            }
            for policy in policies {
                *needs.of_policy.entry((*policy).clone()).or_default() += members;
            }
        }
        needs
    }
}

/// The needs of policies for one part of the table.
struct Needs {
    of: Scarce,
    limit: usize,
    total: usize,
    of_policy: BTreeMap<PolicyId, usize>,
    of_namespace: BTreeMap<Arc<str>, usize>,
}

impl Needs {
    const fn new(of: Scarce, limit: usize) -> Self {
        Self {
            of,
            limit,
            total: 0,
            of_policy: BTreeMap::new(),
            of_namespace: BTreeMap::new(),
        }
    }

    fn of_namespace(&mut self, name: &Arc<str>) -> &mut usize {
        self.of_namespace.entry(Arc::clone(name)).or_default()
    }

    fn add(&mut self, policy: &PolicyId, need: usize) {
        let of_policy = self.of_policy.entry(policy.clone()).or_default();
        *of_policy = of_policy.saturating_add(need);
        let of_namespace = self.of_namespace(&policy.namespace);
        *of_namespace = of_namespace.saturating_add(need);
    }

    /// The policies to set aside next: the policies that do not fit alone, or the largest policies
    /// of the namespace that needs the most, for as long as it needs the most.
    fn largest(&self) -> Vec<(PolicyId, usize)> {
        let all = self.of_policy.iter().map(|(id, need)| (id.clone(), *need));
        let alone: Vec<_> = all.clone().filter(|(_, need)| *need > self.limit).collect();
        if !alone.is_empty() {
            return alone;
        }
        let namespaces = self.of_namespace.iter();
        let mut namespaces: Vec<_> = namespaces
            .map(|(name, need)| (Reverse(*need), name))
            .collect();
        namespaces.sort_unstable();
        let Some((Reverse(mut need), largest)) = namespaces.first().copied() else {
            return Vec::new();
        };
        let next = namespaces.get(1).map_or(0, |(Reverse(need), _)| *need);
        let mut policies: Vec<_> = all
            .filter(|(id, need)| id.namespace == *largest && *need > 0)
            .collect();
        policies.sort_by_key(|(_, need)| Reverse(*need));
        let mut total = self.total;
        let mut chosen = Vec::new();
        for (policy, needs) in policies {
            chosen.push((policy, needs));
            total = total.saturating_sub(needs);
            need = need.saturating_sub(needs);
            if total <= self.limit || need <= next {
                break;
            }
        }
        chosen
    }
}
