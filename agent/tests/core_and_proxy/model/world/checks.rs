//! What must hold at every instant, and once everything has come to rest.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use agent_core::{
    core::testing::policy::matcher,
    identity::checkpoint,
    labels::FQDN,
    selector::selector::{Selector, fqdn_label},
};
use dns_policy::{boot_time::BootTime, name::Fqdn};
use shared_maps::{IdentityId, ipcache::IpcacheKey};

use super::{
    super::{Act, LONGEST, LastWrite, NAMES, PROXIES, SHORTEST, Scan},
    Failure, Fate, World,
};

impl World {
    /// Starts the agent, connects the proxies, and gives all of them a few seconds.
    fn come_to_rest(&mut self) {
        self.act(Act::Fail(Failure::Nothing));
        self.start_agent();
        self.act(Act::Sync);
        for proxy in 0..PROXIES {
            self.act(Act::Connect(proxy));
        }
        while !self.orphans.is_empty() {
            self.act(Act::Adopt(0));
        }
        for _ in 0..8 {
            self.act(Act::Settle);
            self.act(Act::Wait(1000));
        }
        self.act(Act::Settle);
        self.troubled = false;
    }

    pub(in super::super) fn check_end(&mut self) {
        self.come_to_rest();
        self.check_cluster();
        for answer in &self.answers {
            let Fate::Released(at) = answer.fate else {
                assert_ne!(answer.fate, Fate::Held(self.now), "it is held for ever");
                continue;
            };
            // How far a journal may be behind: see `BEHIND` in the proxy.
            let same = self
                .answers
                .iter()
                .filter(|other| other.name == answer.name);
            let longest = same.map(|other| other.ttl).max().unwrap_or(SHORTEST);
            let behind = |at: BootTime| at.plus_secs(u64::from(longest) / 8 + 1);
            let cleaned = self.cleaned.get(answer.name);
            if answer.shaken && cleaned.is_some_and(|cleaned| at <= behind(*cleaned)) {
                continue;
            }
            if answer.between && self.start > 1 {
                continue;
            }
            let life = u64::from(answer.ttl);
            let life = if answer.shaken {
                (life - life / 8).saturating_sub(2)
            } else {
                life
            };
            if at.plus_secs(life) > self.now {
                for address in &answer.addresses {
                    self.check_labels(answer.name, *address, "it is valid");
                }
            }
        }
        // This covers the TTL, the slack or what a journal adds, and the time after a lease.
        self.act(Act::Wait((u64::from(LONGEST) + 1000) * 1000));
        self.act(Act::Settle);
        self.uses.clear();
        for _ in 0..3 {
            self.act(Act::ConntrackScan(Scan::Complete));
            self.act(Act::Wait(1000));
        }
        self.act(Act::Wait(100_000));
        self.check_no_names();
        for (_, proxy) in &self.proxies {
            assert_eq!(proxy.sink.status().kept, 0);
            assert_eq!(proxy.journalled(), 0);
        }
    }

    /// A request removes all names; the agent is killed before it wrote that into
    /// the endpoints' files, perhaps with a proxy, and the request is not repeated.
    pub(in super::super) fn check_cleaned(&mut self, proxy_dies: bool) {
        self.come_to_rest();
        let files = self.node.datapath.files.clone();
        for name in NAMES {
            self.act(Act::Clean(name));
        }
        self.act(Act::KillAgent);
        self.node.datapath.files = files;
        if proxy_dies {
            self.act(Act::KillProxy(0, LastWrite::Whole));
        }
        self.come_to_rest();
        // Waits until the grace period is over.
        self.act(Act::Wait(31_000));
        self.check_no_names();
    }

    /// No address has the label of a name.
    fn check_no_names(&self) {
        let known = self.known();
        for (key, value) in &self.node.datapath.ipcache {
            let labels = known.get(&IdentityId(value.sec_identity));
            let left = labels.is_some_and(|all| all.iter().any(|l| l.starts_with(FQDN)));
            assert!(!left, "{key:?} still has {labels:?}");
        }
    }

    /// Labels of the identities that are on disk.
    fn known(&self) -> BTreeMap<IdentityId, BTreeSet<String>> {
        let text = self.node.datapath.checkpoint.as_deref().unwrap_or("[]");
        let all = checkpoint::parse_local(text).unwrap().into_iter();
        all.map(|(id, labels)| (id, labels.texts().into_iter().collect()))
            .collect()
    }

    /// Labels that a name has by the policy that the agent received.
    fn wanted(&self, name: &Fqdn) -> BTreeSet<String> {
        let rules = self.applied.values().flat_map(|document| document.rules());
        let selectors = rules.flat_map(|rule| rule.selectors());
        let mut wanted = BTreeSet::new();
        for selector in selectors {
            if let Selector::Fqdn(fqdn) = selector
                && matcher(fqdn).matches(name)
            {
                wanted.insert(fqdn_label(fqdn).to_string());
            }
        }
        wanted
    }

    pub(super) fn check_labels(&self, name: &str, address: IpAddr, why: &str) {
        if self.troubled {
            return;
        }
        self.check_pair(&Fqdn::normalise(name), address, why);
    }

    fn check_pair(&self, name: &Fqdn, address: IpAddr, why: &str) {
        let wanted = self.wanted(name);
        if wanted.is_empty() {
            return;
        }
        let IpAddr::V4(v4) = address else { return };
        let entry = self
            .node
            .datapath
            .ipcache
            .get(&IpcacheKey::v4(v4.octets(), 32));
        let known = self.known();
        let has = entry.and_then(|value| known.get(&IdentityId(value.sec_identity)));
        assert!(
            has.is_some_and(|has| has.is_superset(&wanted)),
            "{address} of {name:?} lacks {wanted:?}, has {has:?}, although {why}"
        );
    }

    pub(super) fn check_promises(&mut self) {
        let now = self.now;
        self.promises.retain(|_, end| end.plus_secs(5) > now);
        if self.agent && self.synced && !self.troubled {
            for (_, name, address) in self.promises.keys() {
                self.check_pair(name, *address, "it is under a lease");
            }
        }
    }
}
