//! Policies as a table of nf_tables.
//!
//! ```text
//! table inet holdfast_policies_v1 {
//!   map to4   { address of a restricted pod : jump i4_… }     # what it may receive
//!   map from4 { address of a restricted pod : jump e4_… }     # what it may send
//!   set g4_…  { addresses of the pods that a peer selects }   # set p4_…: address . port
//!   set r_…   { ranges of addresses or ports }
//!   chain i4_… { ip saddr @g4_… tcp dport 80 return; …; drop }
//!   chain forward { answers pass; … ip saddr vmap @from4; ip daddr vmap @to4 }
//! }
//! ```
//! and the same for IPv6. A row permits by `return`: the chain of the other side judges next. The
//! names of chains and sets follow from their content. A chain never changes: a pod with other rows
//! jumps to another chain, and pods with equal rows share a chain. A new pod of the cluster becomes
//! an element of the groups that select it, and changes no chain.

mod base;
mod chains;
mod frames;
mod names;
mod need;
mod ranges;
mod rows;
mod tunnels;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

pub(crate) use self::need::{Need, groups};
pub use self::{
    base::{MIDDLE, SPOOFED, TABLE, dropped},
    frames::{FRAMES, TO_ALL},
    tunnels::TUNNELS,
};
use self::{
    chains::{ChainId, Chains},
    rows::rows,
};
use super::{
    change::{Change, Step},
    ruleset::{Element, Table, TableFamily, Value, Verdict},
};
use crate::{
    cache::Cache,
    contiv::Flow,
    counted::Counted,
    group::{Family, Groups},
    links::NodeLinks,
    pod::PodId,
    processor::PodPolicies,
};

/// Maximum size of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Elements of all groups and sets of ranges.
    pub addresses: usize,
    /// Rules of all chains.
    pub rows: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            addresses: 1_000_000,
            rows: 20_000,
        }
    }
}

/// The table would exceed the [`Limits`]. The last accepted table stays in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TooLarge {
    /// Too many members of groups.
    #[error(
        "NetworkPolicies of this node's pods need {found} addresses of peers, of which nftables gets at \
         most {limit}: the last policies that fit stay in force; select fewer pods by their peers, or \
         write an ipBlock in place of a selector for every pod"
    )]
    Addresses {
        /// Addresses that the policies need.
        found: usize,
        /// Maximum number that is put in force.
        limit: usize,
    },
    /// Too many rules.
    #[error(
        "NetworkPolicies of this node's pods need {found} rules, of which nftables gets at most \
         {limit}: the last policies that fit stay in force; use fewer peers and ports, or one policy for \
         several pods"
    )]
    Rows {
        /// Rules that the policies need.
        found: usize,
        /// Maximum number that is put in force.
        limit: usize,
    },
}

/// Size of the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// Chains of pods.
    pub chains: usize,
    /// Rules of these chains.
    pub rows: usize,
    /// Groups of pods.
    pub groups: usize,
    /// Elements of groups and of sets of ranges.
    pub addresses: usize,
}

/// The table, and its changes since the last [`Nft::take`].
#[derive(Debug, Default)]
pub(crate) struct Nft {
    groups: Groups,
    chains: Chains,
    pods: BTreeMap<PodId, Placed>,
    /// The chains of the pods that claim an address, each with its number of claims.
    claims: BTreeMap<Claimed, BTreeMap<ChainId, usize>>,
    /// Chains of addresses that are claimed by pods with several chains.
    joined: BTreeMap<Claimed, ChainId>,
    /// For each map: addresses with the names of their chains.
    verdicts: BTreeMap<(Flow, Family), Counted<(IpAddr, String)>>,
    /// Addresses of restricted pods.
    own: Counted<IpAddr>,
    links: Counted<u32>,
    behind: Counted<(u32, IpAddr)>,
    routed: Counted<IpAddr>,
    node_links: NodeLinks,
    /// The links at the last [`Nft::take`]; empty while every pod is open.
    guarded: NodeLinks,
    /// Whether a pod on a bridge was restricted in what it receives, at the last [`Nft::take`].
    is_quiet: bool,
    interfaces: BTreeMap<IpAddr, u32>,
}

/// A direction of an address.
type Claimed = (Flow, IpAddr);

/// The chains and addresses of a pod in the table.
#[derive(Debug, Default)]
struct Placed {
    chains: Vec<ChainId>,
    claims: Vec<(Claimed, ChainId)>,
    own: Vec<IpAddr>,
}

impl Nft {
    /// Updates a pod of this node; `None` if the pod is gone.
    pub(crate) fn place(&mut self, id: &PodId, now: Option<&PodPolicies>) {
        let placed = now.map(|pod| self.add(pod)).unwrap_or_default();
        let new = placed.claims.clone();
        let before = match placed.chains.is_empty() {
            true => self.pods.remove(id),
            false => self.pods.insert(id.clone(), placed),
        };
        let before = before.unwrap_or_default();
        self.claim(&new, &before.claims);
        for chain in before.chains {
            self.chains.release(&mut self.groups, chain);
        }
        for address in &before.own {
            self.own.remove(address);
        }
    }

    /// Updates pods of the cluster. Groups that are new since [`Nft::fill`] have no members yet.
    pub(crate) fn follow(&mut self, cache: &Cache, touched: &BTreeSet<PodId>) {
        self.groups.follow(cache, touched);
    }

    /// Whether groups, including new groups, have at most this many members in total.
    pub(crate) fn has_at_most(&self, cache: &Cache, members: usize) -> bool {
        self.groups.has_at_most(cache, members)
    }

    /// Gives new groups their members, after the last call of [`Nft::place`].
    pub(crate) fn fill(&mut self, cache: &Cache) {
        self.groups.fill(cache);
    }

    /// Replaces the interfaces behind which addresses are. Packets from these interfaces with
    /// another source are dropped.
    pub(crate) fn set_interfaces(&mut self, interfaces: BTreeMap<IpAddr, u32>) {
        for (address, link) in &interfaces {
            self.links.add(*link);
            self.behind.add((*link, *address));
            self.routed.add(*address);
        }
        for (address, link) in std::mem::replace(&mut self.interfaces, interfaces) {
            self.links.remove(&link);
            self.behind.remove(&(link, address));
            self.routed.remove(&address);
        }
    }

    /// Sets the links from which the guards on interfaces, bridges and tunnels follow.
    pub(crate) fn set_links(&mut self, links: NodeLinks) {
        self.node_links = links;
    }

    /// Size of the table that [`Nft::take`] makes.
    pub(crate) fn size(&self) -> Size {
        self.chains.size(&self.groups)
    }

    /// Addresses of pods with the directions that get another chain with the next [`Nft::take`].
    pub(crate) fn closing(&self) -> BTreeSet<(IpAddr, Flow)> {
        let maps = self.verdicts.iter();
        let added = maps.flat_map(|((flow, _), verdicts)| {
            verdicts.added().map(|(address, _)| (*address, *flow))
        });
        added.collect()
    }

    /// Returns the changes since the last call for the table of policies and the table of frames.
    /// Fails if the table would be too large.
    pub(crate) fn take(&mut self, limits: Limits) -> Result<(Change, Change), TooLarge> {
        let size = self.size();
        if size.addresses > limits.addresses {
            let (found, limit) = (size.addresses, limits.addresses);
            return Err(TooLarge::Addresses { found, limit });
        }
        if size.rows > limits.rows {
            let (found, limit) = (size.rows, limits.rows);
            return Err(TooLarge::Rows { found, limit });
        }
        let mut steps = Vec::new();
        self.chains.take(&mut self.groups, &mut steps);
        for ((flow, family), verdicts) in &mut self.verdicts {
            let (added, removed) = verdicts.take();
            let map = base::map(*flow, *family);
            push(
                &mut steps,
                Step::DeleteVerdicts,
                map,
                removed.iter().map(jump),
            );
            push(&mut steps, Step::AddVerdicts, map, added.iter().map(jump));
        }
        let itself = base::itself;
        push_by_family(&mut steps, base::own, self.own.take(), |one| *one, itself);
        self.take_interfaces(&mut steps);
        let before = self.frames();
        self.take_links(&mut steps);
        let frames = Change::between(&before, &self.frames());
        Ok((Change::of(TableFamily::Inet, TABLE, steps), frames))
    }

    /// The table of frames at the last [`Nft::take`].
    pub(crate) fn frames(&self) -> Table {
        frames::table(&self.guarded, self.is_quiet)
    }

    /// The whole table at the last [`Nft::take`].
    pub(crate) fn table(&self) -> Table {
        let mut table = base::table();
        tunnels::add(&mut table);
        self.chains.fill(&self.groups, &mut table);
        for ((flow, family), verdicts) in &self.verdicts {
            if let Some(map) = table.maps.get_mut(base::map(*flow, *family)) {
                map.elements.extend(verdicts.taken().map(jump));
            }
        }
        for address in self.own.taken() {
            let set = base::own(Family::of(*address));
            insert(&mut table, set, base::itself(address));
        }
        for link in self.links.taken() {
            insert(
                &mut table,
                base::LINKS,
                Element::One(Value::Interface(*link)),
            );
        }
        for address in self.routed.taken() {
            let set = base::routed(Family::of(*address));
            insert(&mut table, set, Element::One(ranges::address(*address)));
        }
        for (set, elements) in of_links(&self.guarded) {
            for element in elements {
                insert(&mut table, set, element);
            }
        }
        for pair in self.behind.taken() {
            insert(
                &mut table,
                base::behind(Family::of(pair.1)),
                base::behind_link(pair),
            );
        }
        table
    }

    /// Takes the links. If all pods of the node are open, takes no links, because nothing is
    /// guarded.
    fn take_links(&mut self, steps: &mut Vec<Step>) {
        let now = match self.own.len() {
            0 => NodeLinks::default(),
            _ => self.node_links.clone(),
        };
        let mut restricted = Family::ALL.into_iter().filter_map(|family| {
            let chains = self.verdicts.get(&(Flow::Ingress, family))?;
            let mut addresses = chains.members().map(|(address, _)| address);
            addresses.find(|address| now.bridged.contains(*address))
        });
        self.is_quiet = restricted.next().is_some();
        let before = of_links(&std::mem::replace(&mut self.guarded, now));
        for (set, now) in of_links(&self.guarded) {
            let before = before.get(set).cloned().unwrap_or_default();
            let removed = before.difference(&now).copied();
            push(steps, Step::DeleteElements, set, removed);
            let added = now.difference(&before).copied();
            push(steps, Step::AddElements, set, added);
        }
    }

    fn take_interfaces(&mut self, steps: &mut Vec<Step>) {
        let (added, removed) = self.links.take();
        let link = |link: &u32| Element::One(Value::Interface(*link));
        push(
            steps,
            Step::DeleteElements,
            base::LINKS,
            removed.iter().map(link),
        );
        push(
            steps,
            Step::AddElements,
            base::LINKS,
            added.iter().map(link),
        );
        let alone = |address: &IpAddr| Element::One(ranges::address(*address));
        push_by_family(steps, base::routed, self.routed.take(), |one| *one, alone);
        let pair = base::behind_link;
        push_by_family(
            steps,
            base::behind,
            self.behind.take(),
            |(_, one)| *one,
            pair,
        );
    }

    /// Adds and removes claims of a pod.
    fn claim(&mut self, added: &[(Claimed, ChainId)], removed: &[(Claimed, ChainId)]) {
        let claimed = added.iter().chain(removed).map(|(claimed, _)| *claimed);
        let before = claimed.map(|claimed| (claimed, self.chain_of(claimed)));
        let before: BTreeMap<Claimed, Option<ChainId>> = before.collect();
        for (claimed, chain) in added {
            let chains = self.claims.entry(*claimed).or_default();
            *chains.entry(*chain).or_default() += 1;
        }
        for (claimed, chain) in removed {
            if let Some(chains) = self.claims.get_mut(claimed) {
                take_one(chains, *chain);
                if chains.is_empty() {
                    self.claims.remove(claimed);
                }
            }
        }
        for (claimed, before) in before {
            self.lead(claimed, before);
        }
    }

    /// The chain of an address: its pod's chain, or a chain that joins the chains of all pods that
    /// claim it.
    fn chain_of(&self, claimed: Claimed) -> Option<ChainId> {
        let joined = self.joined.get(&claimed).copied();
        joined.or_else(|| self.claims.get(&claimed)?.keys().next().copied())
    }

    /// Leads packets of an address to the chain of the pods that claim it now, instead of the chain
    /// `before`.
    fn lead(&mut self, claimed: Claimed, before: Option<ChainId>) {
        let (flow, address) = claimed;
        let family = Family::of(address);
        let chains = self.claims.get(&claimed).into_iter();
        let chains: BTreeSet<ChainId> = chains.flat_map(BTreeMap::keys).copied().collect();
        let joined = (chains.len() > 1).then(|| self.chains.join(flow, family, &chains));
        let released = match joined {
            Some(chain) => self.joined.insert(claimed, chain),
            None => self.joined.remove(&claimed),
        };
        let name = |chain: Option<ChainId>| Some((address, self.chains.name(chain?)?.to_owned()));
        let (before, now) = (name(before), name(self.chain_of(claimed)));
        if before != now {
            let verdicts = self.verdicts.entry((flow, family)).or_default();
            if let Some(before) = before {
                verdicts.remove(&before);
            }
            if let Some(now) = now {
                verdicts.add(now);
            }
        }
        if let Some(chain) = released {
            self.chains.release(&mut self.groups, chain);
        }
    }

    /// Chains and keys of a pod's restricted directions.
    fn add(&mut self, pod: &PodPolicies) -> Placed {
        let mut placed = Placed::default();
        let mut own = BTreeSet::new();
        for family in Family::ALL {
            let addresses = pod.addresses.iter();
            let addresses = addresses.filter(|address| Family::of(**address) == family);
            let addresses: Vec<IpAddr> = addresses.copied().collect();
            if addresses.is_empty() {
                continue;
            }
            for flow in Flow::ALL {
                let Some(rows) = rows(pod, flow, family) else {
                    continue;
                };
                let chain = self.chains.acquire(&mut self.groups, flow, family, rows);
                placed.chains.push(chain);
                own.extend(addresses.iter().copied());
                let claims = addresses.iter();
                placed
                    .claims
                    .extend(claims.map(|address| ((flow, *address), chain)));
            }
        }
        for address in &own {
            self.own.add(*address);
        }
        placed.own.extend(own);
        placed
    }
}

/// Members of the sets that depend on the node's interfaces.
fn of_links(links: &NodeLinks) -> BTreeMap<&'static str, BTreeSet<Element>> {
    let bridges = links.bridges.iter();
    let bridges = bridges.map(|link| Element::One(Value::Interface(*link)));
    let mut members = tunnels::members(links);
    members.insert(base::BRIDGES, bridges.collect());
    members
}

/// Removes one claim of a chain.
fn take_one(chains: &mut BTreeMap<ChainId, usize>, chain: ChainId) {
    if let Some(claims) = chains.get_mut(&chain) {
        *claims -= 1;
        if *claims == 0 {
            chains.remove(&chain);
        }
    }
}

fn jump((address, chain): &(IpAddr, String)) -> (Value, Verdict) {
    (ranges::address(*address), Verdict::Jump(chain.clone()))
}

fn insert(table: &mut Table, set: &str, element: Element) {
    if let Some(set) = table.sets.get_mut(set) {
        set.elements.insert(element);
    }
}

fn push<T>(
    steps: &mut Vec<Step>,
    step: impl Fn(String, Vec<T>) -> Step,
    name: &str,
    elements: impl Iterator<Item = T>,
) {
    let elements: Vec<T> = elements.collect();
    if !elements.is_empty() {
        steps.push(step(name.to_owned(), elements));
    }
}

/// The steps for the sets of both families, from the added and the removed members.
fn push_by_family<T>(
    steps: &mut Vec<Step>,
    set: impl Fn(Family) -> &'static str,
    (added, removed): (BTreeSet<T>, BTreeSet<T>),
    address: impl Fn(&T) -> IpAddr,
    element: impl Fn(&T) -> Element,
) {
    for family in Family::ALL {
        let of = |members: &BTreeSet<T>| -> Vec<Element> {
            let members = members.iter();
            let members = members.filter(|member| Family::of(address(member)) == family);
            members.map(&element).collect()
        };
        let name = set(family);
        push(steps, Step::DeleteElements, name, of(&removed).into_iter());
        push(steps, Step::AddElements, name, of(&added).into_iter());
    }
}
