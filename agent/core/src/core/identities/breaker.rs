//! The circuit breaker on identities of names (CFP-28427, "Circuit breakers?").
//!
//! The servers that answer the pods' queries decide which names share an address, and so how many
//! combinations of FQDN selectors get an identity. `--tofqdns-max-identities` limits the number of combinations of two
//! or more selectors that have an identity (a single selector's identity does not count). At the limit, no further
//! combination gets an identity:
//!
//! - An address gets the labels of only some of its names: those of an existing combination among the latest
//!   [`CONSIDERED`] identities. The combination must have only labels that the address should have, and each of these
//!   that the address has already. The largest such combination is chosen.
//! - Without such a combination, an address keeps those of its labels that it still should have, and
//!   a new address gets the label of one of its selectors.
//!
//! All other labels (of blocks, and of names that EgressFirewalls deny) are always in force, and no
//! label outlives its name. A single selector's identity, and combinations in force that get a block's
//! label, come from policy and not from answers: they are never refused. If a name is removed from a combination, the
//! remaining combination is not refused either, because it replaces one in use. Mappings of an address with
//! only some of its labels count as not realised and get no lease. Such addresses are tried again when
//! an identity of names was added or removed.
//!
//! After a restart an address has the identity that the ipcache has. Identities that are in force there, and those of
//! single selectors, count even before a prefix or selector requests them again. If the checkpoint is lost, the labels
//! of an address are unknown: its number then gets the labels of all its names.

use ipnet::IpNet;

use crate::{
    core::state::{
        State,
        identity_budget::{is_combination, is_name},
    },
    labels::{DNS_NAME, Label, LabelSet},
};

/// How many identities, the latest first, are searched for the nearest combination. This bounds the
/// time that one address takes.
const CONSIDERED: usize = 1024;

/// Whether each of `some` is one of `all`.
fn within<'a>(mut some: impl Iterator<Item = &'a Label>, all: &LabelSet) -> bool {
    some.all(|label| all.as_slice().binary_search(label).is_ok())
}

impl State {
    /// Labels that a prefix gets instead of `labels`, if the breaker refuses these an identity.
    pub(in crate::core) fn part_of(&self, prefix: IpNet, labels: &LabelSet) -> Option<LabelSet> {
        let max = self.config.max_fqdn_identities?;
        let limited = self.numbers.budget().is_used_up(max)
            && is_combination(labels)
            && !self.numbers.knows_local(labels);
        if !limited {
            return None;
        }
        let metadata = self.ipcache.get(prefix);
        let held = metadata.and_then(|m| m.desired.filter(|_| m.held));
        let requested = self.restoration.request_of(prefix);
        let withheld = requested.and_then(|id| self.numbers.withheld_labels(id));
        if held.is_none() && withheld.is_some() {
            return None;
        }
        let has = held.or_else(|| metadata?.realised).and_then(|id| {
            let now = self.numbers.local_labels(id);
            now.or_else(|| self.numbers.withheld_labels(id))
        });
        let part = self.nearest(labels, has).unwrap_or_else(|| {
            let others = labels.iter().filter(|label| !self.may_be_left_out(label));
            let mut names: Vec<&Label> = has
                .iter()
                .flat_map(|has| has.iter().filter(|label| self.may_be_left_out(label)))
                .filter(|name| within([*name].into_iter(), labels))
                .collect();
            if names.is_empty() {
                names.extend(labels.iter().find(|label| self.may_be_left_out(label)));
            }
            LabelSet::new(others.chain(names).cloned().collect())
        });
        Some(part).filter(|part| part != labels)
    }

    /// At the sync, notes the combinations that will have an identity once everything is resolved,
    /// whichever answers arrive.
    pub(in crate::core) fn await_names(&mut self) {
        let withheld = self.numbers.withheld();
        let in_force =
            withheld.filter(|(id, labels)| is_combination(labels) && self.ipcache.is_in_force(*id));
        let awaited = in_force.map(|(_, labels)| labels.clone()).collect();
        self.numbers.budget_mut().expect(awaited);
    }

    /// Notes a prefix that has the labels of only some of its names.
    pub(in crate::core) fn note_limited(&mut self, prefix: IpNet) {
        self.ipcache.leave_unresolved(prefix);
        if self.numbers.budget_mut().limit(prefix) {
            self.counters.identities_limited += 1;
        }
    }

    /// The largest known combination of these names, with all other labels. It includes every label
    /// among `labels` that the prefix already has.
    fn nearest(&self, labels: &LabelSet, has: Option<&LabelSet>) -> Option<LabelSet> {
        let others = |labels: &LabelSet| {
            let others = labels.iter().filter(|label| !self.may_be_left_out(label));
            others.count()
        };
        let wanted = others(labels);
        let kept = |known: &LabelSet| {
            let has = has.into_iter().flat_map(LabelSet::iter);
            within(
                has.filter(|label| within([*label].into_iter(), labels)),
                known,
            )
        };
        let known = self.numbers.budget().latest().take(CONSIDERED);
        let known = known
            .filter_map(|id| self.numbers.local_labels(id))
            .filter(|known| others(known) == wanted && within(known.iter(), labels) && kept(known));
        known.max_by_key(|known| known.as_slice().len()).cloned()
    }

    /// Whether the label is of a name that no firewall denies. Without the label of a denied name a
    /// packet would pass.
    fn may_be_left_out(&self, label: &Label) -> bool {
        let is_denied = label.source() == DNS_NAME && self.resolved.used().is_denied(label);
        is_name(&label) && !is_denied
    }

    /// Looks again at prefixes that wait, some at a time, once an identity of names was added or
    /// removed.
    pub(in crate::core) fn retry_limited(&mut self) {
        for prefix in self.numbers.budget_mut().take_retries() {
            self.ipcache.mark(prefix);
        }
    }
}
