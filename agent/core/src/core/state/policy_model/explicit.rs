//! Subjects whose maps have no entries for everyone, because one of these maps is full.

use std::collections::BTreeSet;

use shared_maps::IdentityId;

use crate::{core::state::policy_model::PolicyModel, policy::compute::explicit::Explicit};

impl PolicyModel {
    /// Makes a subject explicit in further directions. The maps of its endpoints have to follow all its
    /// entries.
    pub(crate) fn make_explicit(&mut self, identity: IdentityId, directions: Explicit) {
        let Some(subject) = self.subjects.get_mut(&identity) else {
            return;
        };
        subject.explicit_at = self.selectors.identities().len();
        let explicit = subject.explicit().or(directions);
        self.render_again(identity, explicit);
    }

    /// Gives a subject its usual form again. Returns the identities whose entries the maps of its
    /// endpoints have to follow.
    pub(crate) fn end_explicit(&mut self, identity: IdentityId) -> Vec<IdentityId> {
        self.render_again(identity, Explicit::default())
    }

    /// Subjects whose usual entries may fit again, because a quarter of the identities is no longer in
    /// use.
    pub(crate) fn may_end_explicit(&self) -> Vec<IdentityId> {
        let identities = self.selectors.identities().len();
        let subjects = self.subjects.iter().filter(|(_, subject)| {
            subject.explicit().is_anywhere() && identities <= subject.explicit_at / 4 * 3
        });
        subjects.map(|(identity, _)| *identity).collect()
    }

    fn render_again(&mut self, identity: IdentityId, explicit: Explicit) -> Vec<IdentityId> {
        let Some(subject) = self.subjects.get_mut(&identity) else {
            return Vec::new();
        };
        if subject.explicit() == explicit {
            return Vec::new();
        }
        subject.rules.set_explicit(explicit);
        let everyone = IdentityId::UNKNOWN;
        let peers: BTreeSet<IdentityId> = self.selectors.identities().collect();
        for peer in &peers {
            subject.render(*peer, &self.selectors, self.proxy_port);
        }
        let services = subject.follow_services(&[everyone], &self.services, self.proxy_port);
        let all = peers.into_iter().chain(services).chain([everyone]);
        all.collect()
    }
}
