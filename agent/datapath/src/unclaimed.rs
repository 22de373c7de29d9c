//! Interfaces that nothing passes unless they are endpoints', by their names and by their bridges. This
//! holds even for interfaces that do not exist yet, and even while no agent runs.
//!
//! ```text
//!  table inet holdfast_v1_closed
//!    chain came    type filter hook prerouting priority -450
//!                  iifname NAME  iifgroup != GROUP  iifkind KIND  counter drop
//!    chain leaves  type filter hook postrouting priority -450
//!                  oifname NAME  oifgroup != GROUP  oifkind KIND  counter drop
//!  table bridge holdfast_v1_closed
//!    the same chains, with these rules and
//!                  meta ibrname BRIDGE  iifgroup != GROUP  iifkind KIND  counter drop
//! ```
//! The agent puts an interface into the [group](super::group) when the programs of its endpoint are
//! attached. An interface of another kind, such as the host's network card, does not lead to a container.

use std::{collections::BTreeSet, fmt, sync::Arc};

use parking_lot::Mutex;

use super::{
    group::GROUP,
    nf_tables::{Family, NftablesError, message::TableName, socket::Netfilter},
    nftables::{
        chain::{self, Chain},
        rule::{Action, Condition, Rule, Way},
    },
};

/// Name of the tables. It begins with the name of the agent's other tables, so that a watch on that
/// name also reports changes of these tables.
const CLOSED: &str = "holdfast_v1_closed";
/// Families that have a table.
pub const FAMILIES: [Family; 2] = [Family::Inet, Family::Bridge];
/// Kinds of interfaces that lead to containers and virtual machines.
const KINDS: [&str; 3] = ["veth", "netkit", "tun"];
/// Both ways with their chains and hooks: `NF_INET_PRE_ROUTING`, `NF_INET_POST_ROUTING`.
const WAYS: [(Way, &str, u32); 2] = [(Way::Came, "came", 0), (Way::Leaves, "leaves", 4)];

/// Names whose interfaces are closed unless they are endpoints'. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct ClosedNames(Arc<Mutex<Names>>);

#[derive(Debug, Default)]
struct Names {
    bridges: BTreeSet<String>,
    /// `None`: the names are not known yet, and interfaces that an earlier run closed stay closed.
    interfaces: Option<BTreeSet<String>>,
}

impl ClosedNames {
    /// Puts the rules about these bridges in force.
    ///
    /// # Errors
    /// The kernel cannot close ports of bridges.
    pub fn begin(bridges: BTreeSet<String>) -> Result<Self, NftablesError> {
        let names = Names {
            bridges,
            interfaces: None,
        };
        if !names.bridges.is_empty() {
            let table = name(Family::Bridge);
            let messages = names.with_chains(Family::Bridge, |chains| chain::table(table, chains));
            Netfilter::open()?.check(&messages)?;
            // Interfaces that an earlier run closed stay closed: their rules are kept.
            names.with_chains(Family::Bridge, |chains| chain::complete(table, chains))?;
        }
        Ok(Self(Arc::new(Mutex::new(names))))
    }

    /// Closes these interfaces and no others.
    pub fn set_interfaces(&self, interfaces: &BTreeSet<String>) -> Result<(), NftablesError> {
        let mut names = self.0.lock();
        if names.interfaces.as_ref() == Some(interfaces) {
            return Ok(());
        }
        names.interfaces = Some(interfaces.clone());
        names.install()
    }

    /// Makes rules that are missing or changed. Gives what was wrong, if anything.
    pub(super) fn repair(&self) -> Result<Option<String>, NftablesError> {
        let names = self.0.lock();
        if names.interfaces.is_none() || names.is_empty() {
            return Ok(None);
        }
        let mut repaired = None;
        for family in FAMILIES {
            let table = name(family);
            let fault = names.with_chains(family, |chains| chain::check(table, chains))?;
            if fault.is_some() {
                names.install()?;
                repaired = Some(format!("{table} is missing or changed"));
            }
        }
        Ok(repaired)
    }
}

impl Names {
    fn is_empty(&self) -> bool {
        self.bridges.is_empty() && self.interfaces.as_ref().is_none_or(BTreeSet::is_empty)
    }

    /// Makes the tables, or removes them if nothing is closed.
    fn install(&self) -> Result<(), NftablesError> {
        if self.is_empty() {
            return FAMILIES
                .into_iter()
                .try_for_each(|family| remove(family).map(drop));
        }
        for family in FAMILIES {
            let messages = self.with_chains(family, |chains| chain::table(name(family), chains));
            Netfilter::open()?.commit(&messages)?;
        }
        Ok(())
    }

    /// What `take` makes of the chains of a family.
    fn with_chains<'a, T>(&'a self, family: Family, take: impl FnOnce(&[Chain<'_>]) -> T) -> T {
        let of_way = |way| {
            // A card of the host, its loopback or a bridge stays open: a document that names one by mistake must not
            // take the host off the network.
            let of_kinds = |named: Condition<'a>| {
                KINDS.map(|kind| {
                    vec![
                        named,
                        Condition::NotOfGroup(way, GROUP),
                        Condition::OfKind(way, kind),
                    ]
                })
            };
            let interfaces = self.interfaces.iter().flatten();
            let mut rules: Vec<Vec<Condition<'_>>> = interfaces
                .flat_map(|name| of_kinds(Condition::OfInterface(way, name)))
                .collect();
            if family == Family::Bridge {
                let bridges = self.bridges.iter();
                rules.extend(bridges.flat_map(|bridge| of_kinds(Condition::OfBridge(way, bridge))));
            }
            rules
        };
        let conditions = WAYS.map(|(way, _, _)| of_way(way));
        let rules = conditions.each_ref().map(|of_way| {
            let rules = of_way.iter().map(|conditions| Rule {
                conditions,
                action: Action::Drop,
            });
            rules.collect::<Vec<_>>()
        });
        let [came, leaves] = [0, 1].map(|index| {
            let (_, name, hook) = WAYS[index];
            Chain {
                name,
                hook,
                priority: libc::NF_IP_PRI_RAW_BEFORE_DEFRAG,
                rules: &rules[index],
            }
        });
        take(&[came, leaves])
    }
}

/// The tables, for messages to people.
pub fn table(family: Family) -> impl fmt::Display {
    name(family)
}

const fn name(family: Family) -> TableName<'static> {
    TableName(family, CLOSED)
}

/// Removes the table of a family. Gives whether it was there.
pub fn remove(family: Family) -> Result<bool, NftablesError> {
    chain::remove(name(family))
}
