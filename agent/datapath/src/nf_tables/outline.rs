//! What can be read of a table in the kernel as values, for people: sets and maps of our types with
//! their elements, and chains. Rules are not decoded: a chain has exactly the rules that it should have, or none.

use std::collections::BTreeMap;

use netpol::render::ruleset::{Chain, Entry, Key, Set, Table, Type, VerdictMap};

use super::{
    NftablesError,
    attribute::Attribute,
    batch, element,
    message::{ELEMENTS, Kind, OF_TABLE, RULE_CHAIN, SET_FLAGS, TableName},
    rule,
    socket::{Netfilter, Object},
};

const TYPES: [Type; 5] = [
    Type::Interface,
    Type::Ipv4,
    Type::Ipv6,
    Type::Port,
    Type::EtherType,
];

/// The kernel's table with the name of `wanted`; empty if there is none.
pub(super) fn read(netfilter: &mut Netfilter, wanted: &Table) -> Result<Table, NftablesError> {
    let name = TableName(wanted.family.into(), &wanted.name);
    let mut table = Table::of(wanted.family, &wanted.name);
    if netfilter.get(&name.get())?.is_none() {
        return Ok(table);
    }
    let mut reading = Reading { netfilter, name };
    table.counters = reading.objects(Kind::Counter)?.into_keys().collect();
    for (name, object) in reading.objects(Kind::Set)? {
        reading.set(name, &object, &mut table)?;
    }
    let mut rules: BTreeMap<String, Vec<Object>> = BTreeMap::new();
    for rule in reading.netfilter.list(&reading.name.list_rules(None))? {
        let chain = rule.text(RULE_CHAIN).ok_or(NftablesError::Malformed)?;
        rules.entry(chain.to_owned()).or_default().push(rule);
    }
    for (name, object) in reading.objects(Kind::Chain)? {
        let is_at = |entry: &Entry| {
            let attributes = batch::chain(*entry);
            !attributes.is_empty() && attributes.iter().all(|wanted| object.has(wanted))
        };
        // A chain with another hook is not one of ours: a change of its entry replaces the table.
        let entry = Entry::ALL.into_iter().find(is_at).unwrap_or(Entry::Jump);
        let found = rules.get(&name).map_or(&[][..], Vec::as_slice);
        let wanted = wanted.chains.get(&name);
        let wanted = wanted.map_or(&[][..], |chain| chain.rules.as_slice());
        let mut both = found.iter().zip(wanted);
        let is_equal = found.len() == wanted.len()
            && both.all(|(found, wanted)| found.has(&rule::attribute(wanted)));
        let rules = match is_equal {
            true => wanted.to_vec(),
            false => Vec::new(),
        };
        table.chains.insert(name, Chain { entry, rules });
    }
    Ok(table)
}

struct Reading<'a> {
    netfilter: &'a mut Netfilter,
    name: TableName<'a>,
}

impl Reading<'_> {
    /// Objects of the table by name.
    fn objects(&mut self, kind: Kind) -> Result<BTreeMap<String, Object>, NftablesError> {
        let all = self.netfilter.list(&self.name.list(kind))?.into_iter();
        let ours = all.filter(|object| object.text(OF_TABLE) == Some(self.name.1));
        let named = ours.filter_map(|object| Some((object.text(kind.name())?.to_owned(), object)));
        Ok(named.collect())
    }

    /// Adds a set or a map, if it is of one of our types.
    fn set(
        &mut self,
        name: String,
        object: &Object,
        table: &mut Table,
    ) -> Result<(), NftablesError> {
        let lists = self.netfilter.list(&self.name.list_elements(&name))?;
        let lists = || lists.iter().filter_map(|list| list.value(ELEMENTS));
        let is_it = |wanted: &[Attribute]| {
            let has_flags = wanted.iter().any(|wanted| wanted.kind() == SET_FLAGS);
            object.value(SET_FLAGS).is_some() == has_flags
                && wanted.iter().all(|wanted| object.has(wanted))
        };
        let key = keys().find(|key| is_it(&element::set(*key)));
        let elements = key.and_then(|key| element::read(key, lists()));
        if let (Some(key), Some(elements)) = (key, elements) {
            table.sets.insert(name, Set { key, elements });
            return Ok(());
        }
        let key = TYPES.into_iter().find(|of| is_it(&element::map(*of)));
        let elements = key.and_then(|key| element::read_verdicts(key, lists()));
        if let (Some(key), Some(elements)) = (key, elements) {
            table.maps.insert(name, VerdictMap { key, elements });
        }
        Ok(())
    }
}

/// Every type of our sets.
fn keys() -> impl Iterator<Item = Key> {
    TYPES.into_iter().flat_map(|first| {
        let pairs = TYPES.map(|second| Key::Pair(first, second));
        [Key::One(first), Key::Ranges(first)]
            .into_iter()
            .chain(pairs)
    })
}
