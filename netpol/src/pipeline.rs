//! Turns objects of the cluster into the table of this node, with the smallest possible changes.
//!
//! ```text
//!  put, remove, replace ─► Cache ─► Processor ─► chains and groups ─► Commit: steps for the kernel
//!                          indexes   policies     render::nft          closed directions, ended pods
//!                                    of each pod
//!                                      ▲ └─► Selection: which are set aside, so that the others fit
//!                                      └───────┘
//! ```
//! A replacement of all objects and single changes, in any order, lead to the same table.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use crate::{
    cache::{Cache, Key, Object},
    contiv::{Flow, PolicyId},
    explain::{OpenSide, Opening, Side, open_sides, sides},
    links::NodeLinks,
    pod::PodId,
    processor::{PodPolicies, Processor, Reconfigured},
    render::{
        change::Change,
        nft::{Limits, Nft, Size, TooLarge},
        ruleset::Table,
    },
    set_aside::{Selection, SetAside},
};

/// The policies of one node.
#[derive(Debug)]
pub struct Pipeline {
    cache: Cache,
    processor: Processor,
    nft: Nft,
    limits: Limits,
    selection: Selection,
    /// Whether the next commit decides again which policies are set aside.
    reconsiders: bool,
    /// What happened since the last commit, as in [`Commit`].
    ended: BTreeSet<IpAddr>,
    has_other_pods: bool,
    has_committed: bool,
}

/// What a commit changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Commit {
    /// Steps from the last commit's table to this one's.
    pub change: Change,
    /// The same steps for the table of frames.
    pub frames: Change,
    /// Addresses of pods with the directions whose rules changed. Connections that the former rules
    /// allowed may be open.
    pub closed: BTreeSet<(IpAddr, Flow)>,
    /// Addresses that pods of this node lost, or that another pod of this node also claims.
    pub ended: BTreeSet<IpAddr>,
    /// Whether pods of this node may have other addresses than before.
    pub has_other_pods: bool,
}

impl Pipeline {
    /// A node without pods. `node` is its name, as in the pods' `spec.nodeName`.
    pub fn new(node: &str, limits: Limits) -> Self {
        Self {
            cache: Cache::new(node),
            processor: Processor::default(),
            nft: Nft::default(),
            limits,
            selection: Selection::new(limits),
            reconsiders: false,
            ended: BTreeSet::new(),
            has_other_pods: false,
            has_committed: false,
        }
    }

    /// Adds an object, or replaces its former version.
    pub fn put(&mut self, object: Object) {
        self.cache.put(object);
    }

    /// Removes an object, if it exists.
    pub fn remove(&mut self, key: &Key) {
        self.cache.remove(key);
    }

    /// Replaces all objects by these.
    pub fn replace(&mut self, objects: Vec<Object>) {
        self.cache.replace(objects);
    }

    /// Sets the interface behind which each address is, for all addresses whose interface is known.
    /// Packets from one of these interfaces with another source are dropped.
    pub fn set_interfaces(&mut self, interfaces: BTreeMap<IpAddr, u32>) {
        self.nft.set_interfaces(interfaces);
    }

    /// Sets the node's interfaces. While a pod is restricted, the node's bridge ports exchange no
    /// frames that the table does not see, and no IPv6 packets with link-local addresses, because
    /// no policy selects these.
    pub fn set_links(&mut self, links: NodeLinks) {
        self.nft.set_links(links);
    }

    /// Returns what has changed since the last commit. Policies that do not fit into the table are
    /// [set aside](Pipeline::set_aside). If the table would still be too large, the whole commit is
    /// refused: the last commit's table stays in force, and the next commit also has this commit's
    /// changes.
    ///
    /// If the kernel refuses the steps, compare [`Pipeline::table`] with the kernel's table: later
    /// commits assume that this commit is in force.
    pub fn commit(&mut self) -> Result<Commit, TooLarge> {
        self.process();
        let closed = self.nft.closing();
        let (change, frames) = self.nft.take(self.limits)?;
        self.has_committed = true;
        Ok(Commit {
            change,
            frames,
            closed,
            ended: std::mem::take(&mut self.ended),
            has_other_pods: std::mem::take(&mut self.has_other_pods),
        })
    }

    /// The policies that did not fit into the table at the last commit. Each restricts its pods and
    /// allows nothing.
    pub fn set_aside(&self) -> &BTreeMap<PolicyId, SetAside> {
        self.selection.set_aside()
    }

    /// Makes the next commit decide again which policies are set aside. Otherwise they stay the
    /// same as long as no policy and no pod of this node changes, even if fewer peers need less
    /// room.
    pub fn reconsider(&mut self) {
        self.reconsiders = true;
    }

    /// Whether a commit was accepted. Until then, [`Pipeline::table`] has no policy.
    pub fn has_committed(&self) -> bool {
        self.has_committed
    }

    /// The whole table at the last commit that was not refused.
    pub fn table(&self) -> Table {
        self.nft.table()
    }

    /// The table of family `bridge` at the same commit. It is empty while no pod is on a bridge.
    pub fn frames(&self) -> Table {
        self.nft.frames()
    }

    /// Size of the table that the policies need, even if that table is refused.
    pub fn size(&self) -> Size {
        self.nft.size()
    }

    /// The pods of this node that have an address, each with the policies that restrict it.
    pub fn pods(&self) -> &BTreeMap<PodId, PodPolicies> {
        self.processor.pods()
    }

    /// The sides that decide a connection: one for each pod of this node that claims an end and has
    /// policies for the direction. Without a side, the connection passes.
    pub fn explain(&self, opening: &Opening) -> Vec<Side> {
        sides(&self.cache, self.processor.pods(), opening)
    }

    /// The ports that are open between two addresses, with sides like those of
    /// [`Pipeline::explain`].
    pub fn open_between(&self, from: IpAddr, to: IpAddr) -> Vec<OpenSide> {
        open_sides(&self.cache, self.processor.pods(), from, to)
    }

    /// All objects.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    fn process(&mut self) {
        let touched = self.cache.take_touched();
        let mut changed = self.processor.process(&self.cache, &touched);
        let mut pods: BTreeSet<PodId> = changed.iter().map(|pod| pod.id.clone()).collect();
        for policy in &touched.policies {
            pods.extend(self.processor.restricted_by(policy).cloned());
        }
        self.selection.follow(&pods, &self.processor);
        let again = std::mem::take(&mut self.reconsiders) || !pods.is_empty();
        let is_decided = match self.set_aside().is_empty() {
            true => !self.selection.has_room(),
            false => again || !touched.policies.is_empty(),
        };
        if is_decided {
            changed.extend(self.decide());
        }
        self.place(changed);
        self.nft.follow(&self.cache, &touched.pods);
        if !is_decided && !self.fits() {
            let changed = self.decide();
            self.place(changed);
        }
        self.nft.fill(&self.cache);
    }

    /// Whether the members of all groups fit, including new groups.
    fn fits(&self) -> bool {
        let room = self.selection.room();
        room.is_some_and(|room| self.nft.has_at_most(&self.cache, room))
    }

    /// Decides which policies are set aside. Returns the pods for which that makes a difference.
    fn decide(&mut self) -> Vec<Reconfigured> {
        self.selection.decide(&self.cache, &self.processor);
        let aside = self.set_aside().keys().cloned().collect();
        self.processor.set_aside(&self.cache, aside)
    }

    fn place(&mut self, changed: Vec<Reconfigured>) {
        self.has_other_pods |= !changed.is_empty();
        for pod in changed {
            let now = self.processor.pods().get(&pod.id);
            self.nft.place(&pod.id, now);
            let still = |address: &IpAddr| now.is_some_and(|now| now.addresses.contains(address));
            let before = pod
                .before
                .map(|before| before.addresses)
                .unwrap_or_default();
            let new = now.into_iter().flat_map(|now| &now.addresses);
            let new = new.filter(|address| !before.contains(address));
            let shared = new.filter(|address| self.cache.local_at(**address).len() > 1);
            self.ended.extend(shared);
            self.ended
                .extend(before.iter().filter(|address| !still(address)));
        }
    }
}

#[cfg(test)]
mod tests;
