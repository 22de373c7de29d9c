//! From the start to the end of the grace (`restore_grace` after the sync): the state that an earlier run left, until
//! the sources replace it.
//!
//! Owns the progress of the sources' listings, the prefixes and numbers of the earlier run, and the
//! endpoints that keep their former policy ([`super::hold`]). It keeps two invariants: no step is
//! planned before policies and endpoints are complete (except the removal of entries of removed
//! interfaces), and nothing of the earlier run is given up before the grace is over.

use std::collections::{BTreeMap, BTreeSet};

use dns_policy::boot_time::BootTime;
use ipnet::IpNet;
use shared_maps::IdentityId;

use crate::core::state::{hold::Hold, location::RuleKey};

/// Progress of one source's listing.
#[derive(Debug, Default)]
pub(crate) struct Listing {
    is_complete: bool,
    /// Keys applied since the listing began; `None` = no listing is in progress.
    seen: Option<BTreeSet<String>>,
}

impl Listing {
    /// Begins a full listing: keys are noted from now on.
    pub(crate) fn begin(&mut self) {
        self.seen = Some(BTreeSet::new());
    }

    /// Notes the key of an object; ignored outside a listing.
    pub(crate) fn note(&mut self, key: &str) {
        if let Some(seen) = &mut self.seen {
            seen.insert(key.to_owned());
        }
    }

    /// Whether a listing is in progress.
    fn is_pending(&self) -> bool {
        self.seen.is_some()
    }

    /// Ends the listing, which is complete. Returns the keys that it had.
    pub(crate) fn end(&mut self) -> BTreeSet<String> {
        self.is_complete = true;
        self.seen.take().unwrap_or_default()
    }
}

/// The listings of the sources, and what the earlier run left until they replace it.
#[derive(Debug, Default)]
pub(crate) struct Restoration {
    policies: Listing,
    endpoints: Listing,
    pods: Listing,
    services: Listing,
    identities: Listing,
    is_started: bool,
    is_synced: bool,
    /// When the grace is over.
    until: Option<BootTime>,
    prefixes: Vec<IpNet>,
    /// Numbers that prefixes had before the start, and that no checkpoint contains.
    requested: BTreeMap<IpNet, IdentityId>,
    /// Rules in the files of the earlier run.
    former_rules: BTreeSet<RuleKey>,
    hold: Hold,
}

impl Restoration {
    pub(crate) fn new(
        requested: BTreeMap<IpNet, IdentityId>,
        former_rules: BTreeSet<RuleKey>,
        hold: Hold,
    ) -> Self {
        Self {
            requested,
            former_rules,
            hold,
            ..Self::default()
        }
    }

    pub(crate) fn policies(&mut self) -> &mut Listing {
        &mut self.policies
    }

    pub(crate) fn endpoints(&mut self) -> &mut Listing {
        &mut self.endpoints
    }

    pub(crate) fn pods(&mut self) -> &mut Listing {
        &mut self.pods
    }

    pub(crate) fn services(&mut self) -> &mut Listing {
        &mut self.services
    }

    /// The listing of the cluster's identities.
    pub(crate) fn identities(&mut self) -> &mut Listing {
        &mut self.identities
    }

    /// Notes the start. True at the first call only.
    pub(crate) fn start(&mut self) -> bool {
        !std::mem::replace(&mut self.is_started, true)
    }

    /// Whether the sync has happened: policies and endpoints were complete once.
    pub(crate) fn is_synced(&self) -> bool {
        self.is_synced
    }

    /// Begins the grace, which lasts until `until`, as soon as policies and endpoints are complete and no
    /// other listing is in progress. True at the call that begins it.
    pub(crate) fn sync(&mut self, until: BootTime) -> bool {
        let complete = self.policies.is_complete && self.endpoints.is_complete;
        let others = [&self.pods, &self.services, &self.identities];
        if self.is_synced || !complete || others.iter().any(|listing| listing.is_pending()) {
            return false;
        }
        self.is_synced = true;
        self.until = Some(until);
        true
    }

    /// When the grace ends; `None` if there is none, or while endpoints keep their former policy.
    pub(crate) fn until(&self) -> Option<BootTime> {
        self.until.filter(|_| self.hold.is_empty())
    }

    /// Ends the grace. Returns the prefixes of the earlier run.
    pub(crate) fn end(&mut self) -> Vec<IpNet> {
        self.until = None;
        self.requested.clear();
        std::mem::take(&mut self.prefixes)
    }

    /// Notes that a prefix has labels of the earlier run.
    pub(crate) fn add_prefix(&mut self, prefix: IpNet) {
        self.prefixes.push(prefix);
    }

    /// The number that a prefix had before the start, if no checkpoint contains it.
    pub(crate) fn request_of(&self, prefix: IpNet) -> Option<IdentityId> {
        self.requested.get(&prefix).copied()
    }

    /// All numbers that prefixes had before the start, and that no checkpoint contains.
    pub(crate) fn requests(&self) -> impl Iterator<Item = (IpNet, IdentityId)> {
        self.requested.iter().map(|(prefix, id)| (*prefix, *id))
    }

    /// Drops the requests for numbers on which prefixes do not agree.
    pub(crate) fn retain_requests(&mut self, is_agreed: impl Fn(IdentityId) -> bool) {
        self.requested.retain(|_, id| is_agreed(*id));
    }

    /// Rules in the files of the earlier run: a proxy may still have them.
    pub(crate) fn former_rules(&self) -> &BTreeSet<RuleKey> {
        &self.former_rules
    }

    /// Endpoints that keep their former policy.
    pub(crate) fn hold(&self) -> &Hold {
        &self.hold
    }

    /// Endpoints that keep their former policy.
    pub(crate) fn hold_mut(&mut self) -> &mut Hold {
        &mut self.hold
    }
}
