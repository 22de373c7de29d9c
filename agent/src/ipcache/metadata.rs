//! What is known about one prefix, per owner.

use std::fmt;

use holdfast_sdp::name::Fqdn;
use shared_maps::{EndpointId, IdentityId};

use crate::labels::LabelSet;

/// Who gave a prefix its labels (or its identity).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Owner {
    /// The name manager, for one name (CFP-28427, "IP Labels Lifecycle").
    Name(Fqdn),
    /// CIDR selectors of policy.
    Policy,
    /// The node: the outside as a whole.
    World,
    /// The node: its own address.
    Node,
    /// A local endpoint's address.
    Endpoint(EndpointId),
    /// An earlier run, until the restore grace ends.
    Restored,
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => write!(f, "fqdn-name-manager/{name}"),
            Self::Policy => f.write_str("policy"),
            Self::World => f.write_str("world"),
            Self::Node => f.write_str("node"),
            Self::Endpoint(id) => write!(f, "endpoint/{id}"),
            Self::Restored => f.write_str("restored"),
        }
    }
}

/// What an owner says of a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Claim {
    /// Labels: merged with those of other owners and of covering prefixes.
    Labels(LabelSet),
    /// The identity itself, whatever labels say (pods, the node).
    Identity(IdentityId),
}

/// Everything about one prefix.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    claims: Vec<(Owner, Claim)>,
    /// Identity it shall have; none = no entry.
    pub desired: Option<IdentityId>,
    /// Identity the datapath has as far as planned; none = no entry.
    pub realised: Option<IdentityId>,
    /// It holds a reference to `desired`.
    pub held: bool,
    /// It awaits its resolution.
    pub(super) dirty: bool,
    /// Its labels got no identity: `desired` is older than they are.
    pub unresolved: bool,
}

impl Metadata {
    /// Sets an owner's claim. True if that changed anything.
    pub fn set(&mut self, owner: Owner, claim: Claim) -> bool {
        match self.claims.iter_mut().find(|(known, _)| *known == owner) {
            Some((_, old)) if *old == claim => false,
            Some((_, old)) => {
                *old = claim;
                true
            }
            None => {
                self.claims.push((owner, claim));
                true
            }
        }
    }

    /// Removes an owner's claim. True if it had one.
    pub fn unset(&mut self, owner: &Owner) -> bool {
        let before = self.claims.len();
        self.claims.retain(|(known, _)| known != owner);
        before != self.claims.len()
    }

    /// Whether nobody claims anything.
    pub fn is_unclaimed(&self) -> bool {
        self.claims.is_empty()
    }

    /// Whether nothing at all is left to remember.
    pub fn is_spent(&self) -> bool {
        self.claims.is_empty() && self.desired.is_none() && self.realised.is_none() && !self.dirty
    }

    /// The owners.
    pub fn owners(&self) -> impl Iterator<Item = &Owner> {
        self.claims.iter().map(|(owner, _)| owner)
    }

    /// An identity claimed outright; the node's goes before any endpoint's.
    pub fn identity(&self) -> Option<IdentityId> {
        let claimed = self.claims.iter().filter_map(|(owner, claim)| match claim {
            Claim::Identity(id) => Some((*owner != Owner::Node, *id)),
            Claim::Labels(_) => None,
        });
        claimed.min().map(|(_, id)| id)
    }

    /// Label sets of all owners.
    pub fn labels(&self) -> impl Iterator<Item = &LabelSet> {
        self.claims.iter().filter_map(|(_, claim)| match claim {
            Claim::Labels(labels) => Some(labels),
            Claim::Identity(_) => None,
        })
    }
}
