//! The chains that the policies of this node's pods need, counted before they are made.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    contiv::{Flow, PolicyId},
    group::Family,
    pod::{NamedPorts, PodId},
    processor::Processor,
    render::nft::Need,
};

/// Pods with the same policies for one direction. They share a chain.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Class {
    pub(super) flow: Flow,
    pub(super) family: Family,
    /// Policies that restrict the direction: at least one, all of one namespace.
    pub(super) policies: Vec<PolicyId>,
    /// Named ports of the pods, if the policies may use names.
    pub(super) ports: NamedPorts,
}

/// A class to which pods belong.
#[derive(Debug)]
pub(super) struct Entry {
    users: usize,
    /// The needs of each policy of the class.
    pub(super) needs: Vec<Need>,
}

/// Number of rules of chains, and of elements in the sets of ranges that they name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sum {
    pub(super) rows: usize,
    pub(super) ranges: usize,
}

/// The classes of all pods of this node.
#[derive(Debug, Default)]
pub(super) struct Classes {
    of_pod: BTreeMap<PodId, Vec<Class>>,
    entries: BTreeMap<Class, Entry>,
    sum: Sum,
}

impl Class {
    fn all_of(id: &PodId, processor: &Processor) -> Vec<Self> {
        let Some(pod) = processor.pods().get(id) else {
            return Vec::new();
        };
        let families = Family::ALL.into_iter().filter(|family| {
            let mut addresses = pod.addresses.iter();
            addresses.any(|address| Family::of(*address) == *family)
        });
        let classes = families.flat_map(|family| {
            Flow::ALL.into_iter().filter_map(move |flow| {
                let policies = pod.restricting(flow).map(|policy| policy.id.clone());
                let policies: Vec<PolicyId> = policies.collect();
                let mut known = policies.iter().filter_map(|id| processor.policy(id));
                let names_ports = flow == Flow::Ingress && known.any(|one| one.names_ports);
                let ports = match names_ports {
                    true => pod.ports.clone(),
                    false => NamedPorts::new(),
                };
                (!policies.is_empty()).then_some(Self {
                    flow,
                    family,
                    policies,
                    ports,
                })
            })
        });
        classes.collect()
    }
}

impl Entry {
    fn new(class: &Class, processor: &Processor) -> Self {
        let need = |id| {
            let policy = processor.policy(id);
            let of = |policy| Need::of(policy, class.flow, class.family, &class.ports);
            policy.map_or_else(Need::default, |policy| of(&policy.policy))
        };
        Self {
            users: 0,
            needs: class.policies.iter().map(need).collect(),
        }
    }

    /// What the chain of a class needs without some of its policies.
    fn sum(&self, class: &Class, without: impl Fn(&PolicyId) -> bool) -> Sum {
        let mut sum = Sum { rows: 1, ranges: 0 };
        for (_, need) in self.of_chain(class, without) {
            if need.is_open {
                return Sum::default();
            }
            sum.rows = sum.rows.saturating_add(need.rows);
            sum.ranges = sum.ranges.saturating_add(need.ranges);
        }
        sum
    }

    fn of_chain<'a>(
        &'a self,
        class: &'a Class,
        without: impl Fn(&PolicyId) -> bool,
    ) -> impl Iterator<Item = (&'a PolicyId, &'a Need)> {
        let pairs = class.policies.iter().zip(&self.needs);
        pairs.filter(move |(id, _)| !without(id))
    }
}

impl Classes {
    /// Updates pods whose policies may have changed, or may need more or less than before.
    pub(super) fn follow(&mut self, pods: &BTreeSet<PodId>, processor: &Processor) {
        // All classes are released first, because the needs of a policy are counted when its class
        // gets its first pod.
        for id in pods {
            for class in self.of_pod.remove(id).unwrap_or_default() {
                self.release(&class);
            }
        }
        for id in pods {
            let classes = Class::all_of(id, processor);
            for class in &classes {
                self.acquire(class, processor);
            }
            if !classes.is_empty() {
                self.of_pod.insert(id.clone(), classes);
            }
        }
    }

    /// What all chains need.
    pub(super) const fn sum(&self) -> Sum {
        self.sum
    }

    /// What all chains need without some policies.
    pub(super) fn sum_without(&self, without: impl Fn(&PolicyId) -> bool) -> Sum {
        let sums = self.entries.iter();
        let sums = sums.map(|(class, entry)| entry.sum(class, &without));
        sums.fold(Sum::default(), Sum::plus)
    }

    /// The chains that remain without some policies, each with the policies of which it is made.
    pub(super) fn chains(
        &self,
        without: impl Fn(&PolicyId) -> bool + Copy,
    ) -> impl Iterator<Item = (&Class, Vec<(&PolicyId, &Need)>)> {
        let chains = self.entries.iter().map(move |(class, entry)| {
            let policies = entry.of_chain(class, without);
            (class, policies.collect::<Vec<_>>())
        });
        chains.filter(|(_, policies)| !policies.iter().any(|(_, need)| need.is_open))
    }

    fn acquire(&mut self, class: &Class, processor: &Processor) {
        let known = self.entries.get_mut(class);
        if let Some(entry) = known {
            entry.users += 1;
            return;
        }
        let mut entry = Entry::new(class, processor);
        entry.users = 1;
        self.sum = self.sum.plus(entry.sum(class, |_| false));
        self.entries.insert(class.clone(), entry);
    }

    fn release(&mut self, class: &Class) {
        let Some(entry) = self.entries.get_mut(class) else {
            return;
        };
        entry.users -= 1;
        if entry.users == 0 {
            let sum = entry.sum(class, |_| false);
            self.sum.rows -= sum.rows;
            self.sum.ranges -= sum.ranges;
            self.entries.remove(class);
        }
    }
}

impl Sum {
    const fn plus(self, other: Self) -> Self {
        Self {
            rows: self.rows.saturating_add(other.rows),
            ranges: self.ranges.saturating_add(other.ranges),
        }
    }
}
