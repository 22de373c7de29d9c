//! A table as the kernel has it, compared with the table that should be there.

use std::{collections::BTreeMap, fmt};

use netpol::render::ruleset::Table;

use super::{
    NftablesError,
    attribute::Attribute,
    batch, element,
    message::{
        CHAIN_HOOK, ELEMENTS, Kind, OF_TABLE, RULE_CHAIN, SET_FLAGS, TABLE_FLAGS, TableName,
        counter_type,
    },
    rule,
    socket::{Netfilter, Object},
};

/// How the kernel's table differs from the one that should be there. The text is the name of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Difference {
    /// The table does not exist.
    NoTable,
    /// The table exists, and should not.
    NotNeeded,
    /// The table has flags: it is dormant, or a program owns it.
    Flags,
    /// An object does not exist, or another object has its name.
    Missing(&'static str, String),
    /// An object is not one of ours.
    Foreign(&'static str, String),
    /// The rules of a chain are not exactly those that should be there.
    Rules(String),
    /// The elements of a set or map are not exactly those that should be there.
    Elements(String),
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoTable => f.write_str("the table is missing"),
            Self::NotNeeded => f.write_str("the table is not needed"),
            Self::Flags => f.write_str("the table is dormant, or a program owns it"),
            Self::Missing(kind, name) => write!(f, "{kind} {name} is missing or changed"),
            Self::Foreign(kind, name) => write!(f, "{kind} {name} is foreign"),
            Self::Rules(chain) => write!(f, "the rules of chain {chain} are not as they should be"),
            Self::Elements(set) => write!(f, "the elements of {set} are not as they should be"),
        }
    }
}

/// The first difference; `None` if the kernel's table is exactly the wanted one.
pub(super) fn compare(
    netfilter: &mut Netfilter,
    wanted: &Table,
) -> Result<Option<Difference>, NftablesError> {
    match try_compare(netfilter, wanted) {
        Ok(()) => Ok(None),
        Err(Stop::Differs(difference)) => Ok(Some(difference)),
        // The table, or a set whose elements were listed, was removed meanwhile.
        Err(Stop::Failed(NftablesError::Refused { source, .. }))
            if source.raw_os_error() == Some(libc::ENOENT) =>
        {
            Ok(Some(Difference::NoTable))
        }
        Err(Stop::Failed(error)) => Err(error),
    }
}

enum Stop {
    Differs(Difference),
    Failed(NftablesError),
}

impl From<NftablesError> for Stop {
    fn from(error: NftablesError) -> Self {
        Self::Failed(error)
    }
}

fn try_compare(netfilter: &mut Netfilter, wanted: &Table) -> Result<(), Stop> {
    let table = TableName(wanted.family.into(), &wanted.name);
    match netfilter.get(&table.get())? {
        None if wanted.is_empty() => return Ok(()),
        None => return Err(Stop::Differs(Difference::NoTable)),
        Some(_) if wanted.is_empty() => return Err(Stop::Differs(Difference::NotNeeded)),
        Some(found) if found.has(&Attribute::number(TABLE_FLAGS, 0)) => {}
        Some(_) => return Err(Stop::Differs(Difference::Flags)),
    }
    let mut comparison = Comparison {
        netfilter,
        table,
        wanted,
    };
    comparison.counters()?;
    comparison.chains()?;
    comparison.sets()?;
    comparison.rules()?;
    comparison.elements()
}

struct Comparison<'a> {
    netfilter: &'a mut Netfilter,
    table: TableName<'a>,
    wanted: &'a Table,
}

impl Comparison<'_> {
    fn counters(&mut self) -> Result<(), Stop> {
        let mut found = self.objects(Kind::Counter)?;
        for name in &self.wanted.counters {
            let is_counter = |found: &Object| found.has(&counter_type());
            take(&mut found, Kind::Counter, name, is_counter)?;
        }
        nothing_left(&found, Kind::Counter)
    }

    fn chains(&mut self) -> Result<(), Stop> {
        let mut found = self.objects(Kind::Chain)?;
        for (name, chain) in &self.wanted.chains {
            let attributes = batch::chain(chain.entry);
            let is_it = |found: &Object| is_just(found, &attributes, CHAIN_HOOK);
            take(&mut found, Kind::Chain, name, is_it)?;
        }
        nothing_left(&found, Kind::Chain)
    }

    fn sets(&mut self) -> Result<(), Stop> {
        let mut found = self.objects(Kind::Set)?;
        let sets = self.wanted.sets.iter();
        let sets = sets.map(|(name, set)| (name, element::set(set.key)));
        let maps = self.wanted.maps.iter();
        let maps = maps.map(|(name, map)| (name, element::map(map.key)));
        for (name, attributes) in sets.chain(maps) {
            let is_it = |found: &Object| is_just(found, &attributes, SET_FLAGS);
            take(&mut found, Kind::Set, name, is_it)?;
        }
        nothing_left(&found, Kind::Set)
    }

    /// Compares the rules of each chain. The kernel lists them in their order.
    fn rules(&mut self) -> Result<(), Stop> {
        let mut found: BTreeMap<String, Vec<Object>> = BTreeMap::new();
        for rule in self.netfilter.list(&self.table.list_rules(None))? {
            let chain = rule.text(RULE_CHAIN).ok_or(NftablesError::Malformed)?;
            found.entry(chain.to_owned()).or_default().push(rule);
        }
        for (name, chain) in &self.wanted.chains {
            let found = found.get(name).map_or(&[][..], Vec::as_slice);
            let mut both = found.iter().zip(&chain.rules);
            let is_equal = found.len() == chain.rules.len()
                && both.all(|(found, wanted)| found.has(&rule::attribute(wanted)));
            if !is_equal {
                return Err(Stop::Differs(Difference::Rules(name.clone())));
            }
        }
        Ok(())
    }

    fn elements(&mut self) -> Result<(), Stop> {
        for (name, set) in &self.wanted.sets {
            let lists = self.netfilter.list(&self.table.list_elements(name))?;
            let lists = lists.iter().filter_map(|list| list.value(ELEMENTS));
            if element::read(set.key, lists).as_ref() != Some(&set.elements) {
                return Err(Stop::Differs(Difference::Elements(format!("set {name}"))));
            }
        }
        for (name, map) in &self.wanted.maps {
            let lists = self.netfilter.list(&self.table.list_elements(name))?;
            let lists = lists.iter().filter_map(|list| list.value(ELEMENTS));
            if element::read_verdicts(map.key, lists).as_ref() != Some(&map.elements) {
                return Err(Stop::Differs(Difference::Elements(format!("map {name}"))));
            }
        }
        Ok(())
    }

    fn objects(&mut self, kind: Kind) -> Result<BTreeMap<String, Object>, Stop> {
        let mut objects = BTreeMap::new();
        for object in self.netfilter.list(&self.table.list(kind))? {
            if object.text(OF_TABLE) != Some(self.table.1) {
                continue;
            }
            let name = object.text(kind.name()).ok_or(NftablesError::Malformed)?;
            let name = name.to_owned();
            if objects.insert(name.clone(), object).is_some() {
                return Err(Stop::Differs(Difference::Foreign(kind.text(), name)));
            }
        }
        Ok(objects)
    }
}

/// Whether an object has these attributes, and the optional attribute only if it is wanted.
fn is_just(found: &Object, wanted: &[Attribute], optional: u16) -> bool {
    let is_wanted = wanted.iter().any(|wanted| wanted.kind() == optional);
    found.value(optional).is_some() == is_wanted && wanted.iter().all(|wanted| found.has(wanted))
}

fn take(
    found: &mut BTreeMap<String, Object>,
    kind: Kind,
    name: &str,
    is_it: impl Fn(&Object) -> bool,
) -> Result<(), Stop> {
    match found.remove(name) {
        Some(found) if is_it(&found) => Ok(()),
        _ => Err(Stop::Differs(Difference::Missing(
            kind.text(),
            name.to_owned(),
        ))),
    }
}

fn nothing_left(found: &BTreeMap<String, Object>, kind: Kind) -> Result<(), Stop> {
    match found.keys().next() {
        None => Ok(()),
        Some(name) => Err(Stop::Differs(Difference::Foreign(
            kind.text(),
            name.clone(),
        ))),
    }
}
