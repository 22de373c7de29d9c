//! Forgetting learned names because somebody asks for it.

use std::{collections::BTreeMap, net::IpAddr};

use holdfast_sdp::{
    mapping::{BootTime, Mapping},
    name::Fqdn,
    pattern::SelectorMatcher,
    policy::rule::NameRule,
};
use ipnet::IpNet;
use shared_maps::EndpointId;

use super::{event::CleanNames, plan::Plan, state::State};
use crate::ipcache::metadata::Owner;

/// Cleanings remembered; the oldest are forgotten.
const REMEMBERED: usize = 64;

/// What was cleaned: a proxy that was away meanwhile still has it, and would open it again.
#[derive(Debug)]
pub(super) struct Cleaned {
    endpoint: Option<EndpointId>,
    matcher: Option<SelectorMatcher>,
    at: BootTime,
}

impl Cleaned {
    fn is_of(&self, endpoint: EndpointId, name: &Fqdn) -> bool {
        self.endpoint.is_none_or(|only| only == endpoint)
            && self
                .matcher
                .as_ref()
                .is_none_or(|matcher| matcher.matches(name))
    }
}

impl State {
    /// Whether what a proxy tells again was cleaned since it was seen.
    pub(super) fn was_cleaned(&self, mapping: &Mapping) -> bool {
        self.cleaned.iter().any(|cleaned| {
            mapping.seen_at <= cleaned.at && cleaned.is_of(mapping.endpoint.id, &mapping.name)
        })
    }

    /// Forgets names: those under a lease once every stream dropped it, or it ended.
    pub(super) fn on_clean(&mut self, plan: &mut Plan, clean: &CleanNames) {
        let matcher = match &clean.pattern {
            None => None,
            Some(text) => match SelectorMatcher::compile(&NameRule::Pattern(text.clone())) {
                Ok(matcher) => Some(matcher),
                // A pattern that is none matches nothing; the command line checks it first.
                Err(_) => return,
            },
        };
        let cleaned = Cleaned {
            endpoint: clean.endpoint,
            matcher,
            at: self.now,
        };
        let mut forget = Vec::new();
        for (id, names) in self.names.endpoints() {
            if cleaned.endpoint.is_some_and(|only| only != id) {
                continue;
            }
            let live = names
                .names
                .iter()
                .flat_map(|(n, all)| all.keys().map(move |a| (n, *a)));
            let zombies = names
                .zombies
                .iter()
                .flat_map(|(a, z)| z.names.iter().map(move |n| (n, *a)));
            for (name, address) in live.chain(zombies) {
                if cleaned.is_of(id, name) {
                    forget.push((id, name.clone(), address));
                }
            }
        }
        self.cleaned.push_back(cleaned);
        if self.cleaned.len() > REMEMBERED {
            self.cleaned.pop_front();
        }
        let mut revoke: BTreeMap<_, Vec<IpAddr>> = Default::default();
        for (id, name, address) in forget {
            // What a restart kept of the address goes too.
            self.ipcache.unclaim(IpNet::from(address), &Owner::Restored);
            let gone = self.names.forget(id, &name, address, self.now);
            self.unlabel(gone.into_iter().collect());
            let pair = self
                .names
                .name_mut(&name)
                .and_then(|entry| entry.pairs.get_mut(&address));
            if let Some(pair) = pair
                && pair.owners == 0
                && pair.lease_end > self.now
            {
                pair.revoking = true;
                revoke.entry(name).or_default().push(address);
            }
            self.file_soon(id);
        }
        for (name, addresses) in revoke {
            self.revoke_leases(name, addresses);
        }
        self.end_revocations(plan);
        self.flush(plan);
    }
}
