//! Data about one prefix, by owner.

use shared_maps::IdentityId;

use super::owners::ByOwner;
use crate::{
    ipcache::owners::{Owner, Source},
    labels::LabelSet,
};

/// What an owner says of a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Claim {
    /// Labels: merged with those of other owners and of covering prefixes.
    Labels(LabelSet),
    /// The identity itself, whatever labels say (endpoints, pods, the node).
    Identity(IdentityId),
}

/// Rank of a Service at an address outside the cluster.
const EXTERNAL: u8 = 4;

/// The claims of all owners on one prefix, and its intended and its actual identity.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    labels: ByOwner,
    /// Distinct label sets by source, sorted, and how many owners say each. Names that the same
    /// selectors match say the same: a shared address has many owners and few sets.
    sets: Vec<((Source, LabelSet), usize)>,
    /// Identities that the node, endpoints and pods request. They are few.
    identities: Vec<(Owner, IdentityId)>,
    /// Intended identity; `None` = no entry.
    pub desired: Option<IdentityId>,
    /// Identity that the datapath has once all plans are carried out; `None` = no entry.
    pub realised: Option<IdentityId>,
    /// Whether it holds a reference to `desired`.
    pub held: bool,
    /// Whether it is in the list of prefixes to be resolved.
    pub(super) dirty: bool,
    /// Whether its labels got no identity: `desired` is then older than the labels.
    pub unresolved: bool,
}

impl Metadata {
    /// Sets an owner's claim. True if that changed what all claims together say.
    pub fn set(&mut self, owner: Owner, claim: Claim) -> bool {
        match claim {
            Claim::Labels(labels) => {
                let source = owner.source();
                let mut changed = self.unset_identity(&owner);
                match self.labels.insert(owner, labels.clone()) {
                    Some(old) if old == labels => return changed,
                    Some(old) => changed |= self.unsay(source, old),
                    None => {}
                }
                self.add_owner(source, labels) || changed
            }
            Claim::Identity(id) => {
                let changed = self.unset_labels(&owner);
                match self
                    .identities
                    .iter_mut()
                    .find(|(known, _)| *known == owner)
                {
                    Some((_, old)) if *old == id => changed,
                    Some((_, old)) => {
                        *old = id;
                        true
                    }
                    None => {
                        self.identities.push((owner, id));
                        true
                    }
                }
            }
        }
    }

    /// Removes an owner's claim. True if that changed what all claims together say.
    pub fn unset(&mut self, owner: &Owner) -> bool {
        self.unset_labels(owner) || self.unset_identity(owner)
    }

    fn unset_labels(&mut self, owner: &Owner) -> bool {
        let old = self.labels.remove(owner);
        old.is_some_and(|old| self.unsay(owner.source(), old))
    }

    fn unset_identity(&mut self, owner: &Owner) -> bool {
        let before = self.identities.len();
        self.identities.retain(|(known, _)| known != owner);
        before != self.identities.len()
    }

    /// Notes that one more owner says this. True if no owner did before.
    fn add_owner(&mut self, source: Source, labels: LabelSet) -> bool {
        let said = (source, labels);
        match self.sets.binary_search_by(|(known, _)| known.cmp(&said)) {
            Ok(at) => {
                if let Some((_, owners)) = self.sets.get_mut(at) {
                    *owners += 1;
                }
                false
            }
            Err(at) => {
                if self.sets.is_empty() {
                    self.sets.reserve_exact(1);
                }
                self.sets.insert(at, (said, 1));
                true
            }
        }
    }

    /// Notes that one owner no longer says this. True if no owner does any more.
    fn unsay(&mut self, source: Source, labels: LabelSet) -> bool {
        let said = (source, labels);
        let Ok(at) = self.sets.binary_search_by(|(known, _)| known.cmp(&said)) else {
            return false;
        };
        let Some((_, owners)) = self.sets.get_mut(at) else {
            return false;
        };
        *owners -= 1;
        if *owners > 0 {
            return false;
        }
        self.sets.remove(at);
        true
    }

    /// Whether no owner has a claim.
    pub fn is_unclaimed(&self) -> bool {
        self.labels.is_empty() && self.identities.is_empty()
    }

    /// Whether nothing at all is left to remember.
    pub fn is_spent(&self) -> bool {
        self.is_unclaimed() && self.desired.is_none() && self.realised.is_none() && !self.dirty
    }

    /// Every owner with a claim, sorted.
    pub fn owners(&self) -> Vec<&Owner> {
        let outright = self.identities.iter().map(|(owner, _)| owner);
        let mut owners: Vec<&Owner> = self.labels.owners().chain(outright).collect();
        owners.sort_unstable();
        owners
    }

    /// An identity claimed outright, in this order: that of a Service at its address in the cluster (a
    /// node may have that address at an interface), the node's, an endpoint's, a pod's, and that of a
    /// Service at an address outside the cluster, unless another node or an API server has it: packets
    /// to these are not only for the Service.
    pub fn identity(&self) -> Option<IdentityId> {
        let rank = |owner: &Owner| match owner {
            Owner::Service(_) => 0,
            Owner::Node => 1,
            Owner::Endpoint(_) => 2,
            Owner::ExternalService(_) => EXTERNAL,
            _ => 3,
        };
        let claimed = self.identities.iter();
        let claimed = claimed.map(|(owner, id)| (rank(owner), *id));
        let others = ["host", "remote-node", "kube-apiserver", "health", "ingress"];
        let is_of_node = |labels: &LabelSet| others.iter().any(|other| labels.has_reserved(other));
        let claimed = claimed
            .min()
            .filter(|(rank, _)| *rank != EXTERNAL || !self.labels().any(is_of_node));
        claimed.map(|(_, id)| id)
    }

    /// Labels that an owner gave.
    pub fn labels_by(&self, owner: &Owner) -> Option<&LabelSet> {
        self.labels.get(owner)
    }

    /// Distinct label sets of all owners, those of the most trusted source first.
    pub fn labels(&self) -> impl Iterator<Item = &LabelSet> {
        self.sets.iter().map(|((_, labels), _)| labels)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use dns_policy::name::Fqdn;

    use super::*;

    fn name(n: usize) -> Owner {
        Owner::Name(Fqdn::normalise(&format!("n{n}.example")))
    }

    fn labels(text: &str) -> Claim {
        Claim::Labels(LabelSet::parse(&[text]).unwrap())
    }

    #[test]
    fn names_with_equal_labels_are_resolved_once() {
        let mut metadata = Metadata::default();
        assert!(metadata.set(name(0), labels("fqdn:*.example")));
        for n in 1..1000 {
            assert!(!metadata.set(name(n), labels("fqdn:*.example")));
        }
        assert_eq!(metadata.labels().count(), 1);
        assert!(metadata.set(name(7), labels("fqdn:n7.example")));
        assert!(!metadata.set(name(7), labels("fqdn:n7.example")));
        assert_eq!(metadata.labels().count(), 2);
        assert!(metadata.unset(&name(7)));
        assert!(!metadata.unset(&name(7)));
        for n in (1..1000).filter(|n| *n != 7) {
            assert!(!metadata.unset(&name(n)));
        }
        assert!(!metadata.is_unclaimed());
        assert!(metadata.unset(&name(0)));
        assert!(metadata.is_spent());
    }

    #[test]
    fn an_owner_adds_labels_or_an_identity() {
        let mut metadata = Metadata::default();
        let id = IdentityId(300);
        assert!(metadata.set(Owner::Restored, labels("k8s:a=b")));
        assert!(metadata.set(Owner::Restored, Claim::Identity(id)));
        assert_eq!(
            (metadata.labels().count(), metadata.identity()),
            (0, Some(id))
        );
        assert!(metadata.set(Owner::Node, Claim::Identity(IdentityId::HOST)));
        assert_eq!(metadata.identity(), Some(IdentityId::HOST));
        assert_eq!(metadata.owners(), [&Owner::Node, &Owner::Restored]);
        assert!(metadata.unset(&Owner::Restored) && metadata.unset(&Owner::Node));
        assert!(metadata.is_unclaimed());
    }

    #[test]
    fn an_address_in_the_cluster_is_a_services_and_one_outside_is_a_nodes_first() {
        let service = IdentityId::SERVICE_MIN;
        let key: Arc<str> = "kube-system/kube-dns".into();
        let mut local = Metadata::default();
        local.set(Owner::Node, Claim::Identity(IdentityId::HOST));
        local.set(
            Owner::ExternalService(key.clone()),
            Claim::Identity(service),
        );
        assert_eq!(local.identity(), Some(IdentityId::HOST));
        local.set(Owner::Service(key.clone()), Claim::Identity(service));
        assert_eq!(local.identity(), Some(service));
        let mut other = Metadata::default();
        other.set(Owner::ExternalService(key), Claim::Identity(service));
        assert_eq!(other.identity(), Some(service));
        let node = Owner::Object(Source::CustomResource, "node".into());
        other.set(node.clone(), labels("reserved:remote-node"));
        assert_eq!(other.identity(), None);
        other.unset(&node);
        assert_eq!(other.identity(), Some(service));
    }
}
