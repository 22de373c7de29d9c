//! *Carried* identities: packets of other nodes carry them (`--high-scale-ipcache`), and they are peers of
//! policies although no prefix on this node has them.
//!
//! Each CiliumIdentity of the cluster holds a reference to the identity of its labels. So the policy maps have the
//! entries of this identity before its first packet arrives, as they do for pods in the ipcache.

use std::collections::BTreeSet;

use shared_maps::IdentityId;

use super::state::{State, carried::CarriedIdentity};
use crate::{labels::LabelSet, tunnel_mode::TunnelMode};

impl State {
    /// Follows CiliumIdentities with these numbers that were added, changed or removed.
    pub(super) fn follow_carried(&mut self, numbers: BTreeSet<IdentityId>) {
        if !self.config.high_scale.is_some_and(TunnelMode::unwraps) {
            return;
        }
        for number in numbers {
            let labels = self.numbers.object(number);
            let labels = labels.map(|object| object.labels.clone());
            self.exchange_carried(number, labels);
        }
    }

    /// Gives label sets whose number is new or changed their identity again.
    pub(super) fn renumber_carried(&mut self, changed: &BTreeSet<LabelSet>) {
        let carried = self.cluster.carried.iter();
        let carried = carried.filter(|(_, one)| changed.contains(&one.labels));
        let carried: Vec<_> = carried.map(|(id, one)| (*id, one.labels.clone())).collect();
        for (number, labels) in carried {
            self.exchange_carried(number, Some(labels));
        }
    }

    /// Replaces the carried identity of a number. The new identity is acquired before the old one is released, so that
    /// an identity that does not change always has a holder.
    fn exchange_carried(&mut self, number: IdentityId, labels: Option<LabelSet>) {
        let before = self.cluster.carried.remove(&number);
        if let Some(labels) = labels {
            let identity = self.acquire_pod(&labels).ok();
            let carried = CarriedIdentity { labels, identity };
            self.cluster.carried.insert(number, carried);
        }
        if let Some(identity) = before.and_then(|before| before.identity) {
            self.numbers.release_endpoint(identity);
        }
    }

    /// To be called once every object is listed. Replaces numbers of the cluster's range that this node gave without an
    /// object: other nodes would take them for other labels.
    pub(super) fn share_numbers(&mut self) {
        if self.config.high_scale.is_some() {
            self.numbers.share();
            self.renumber();
        }
    }
}
