//! The rules that the agent has sent to proxies of this service. A proxy receives the whole state each time, but does
//! not remove a rule that the state lacks, not even a rule from another connection. A query from an address without an
//! endpoint can crash a proxy.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use agent_core::core::{Directory, state::location::RuleKey};
use dns_policy::boot_time::BootTime;
use shared_maps::{EndpointId, IdentityId};

/// For how many seconds the rules of a removed endpoint are revoked: longer than a proxy may be away and come back as
/// the same process.
const REVOKED: u64 = 600;
/// Seconds for which the address of a removed endpoint stays known: its queries may still wait in a proxy's socket.
const LINGERS: u64 = 10;

/// Rules and addresses that the agent has sent, over any connection.
#[derive(Debug, Default)]
pub(super) struct SentRules {
    /// The time at which the rule's endpoint was removed. `None`: the endpoint exists.
    rules: BTreeMap<RuleKey, Option<BootTime>>,
    addresses: BTreeMap<IpAddr, Seen>,
    /// Whether the rules that the previous run sent have been added.
    seeded: bool,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    endpoint: EndpointId,
    identity: IdentityId,
    gone: Option<BootTime>,
}

/// An address with its endpoint.
pub(super) type At = (IpAddr, EndpointId, IdentityId);

impl SentRules {
    /// Records the rules that are sent now. Returns the rules to be revoked.
    pub(super) fn rules(
        &mut self,
        now: BootTime,
        current: &BTreeSet<RuleKey>,
        directory: &Directory,
    ) -> Vec<RuleKey> {
        let former = (!std::mem::replace(&mut self.seeded, true)).then_some(&directory.former);
        for key in former.into_iter().flatten().chain(current) {
            self.rules.insert(*key, None);
        }
        let there: BTreeSet<EndpointId> = directory
            .locations
            .iter()
            .map(|location| location.id)
            .collect();
        self.rules.retain(|(endpoint, ..), gone| {
            *gone = (!there.contains(endpoint)).then(|| gone.unwrap_or(now));
            gone.is_none_or(|gone| gone.plus_secs(REVOKED) > now)
        });
        let gone = self.rules.keys().filter(|key| !current.contains(*key));
        gone.copied().collect()
    }

    /// Records the addresses of endpoints. Returns them, and the addresses of endpoints that were removed a moment ago.
    pub(super) fn addresses(&mut self, now: BootTime, directory: &Directory) -> Vec<At> {
        for seen in self.addresses.values_mut() {
            seen.gone.get_or_insert(now);
        }
        for location in &directory.locations {
            let seen = Seen {
                endpoint: location.id,
                identity: location.identity,
                gone: None,
            };
            let addresses = location.addresses.iter();
            self.addresses
                .extend(addresses.map(|address| (*address, seen)));
        }
        self.addresses
            .retain(|_, seen| seen.gone.is_none_or(|gone| gone.plus_secs(LINGERS) > now));
        let all = self.addresses.iter();
        all.map(|(address, seen)| (*address, seen.endpoint, seen.identity))
            .collect()
    }
}
