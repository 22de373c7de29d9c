//! Chains of a table: made in one step, and compared with what the kernel has.

use super::{NftablesError, rule::Rule};
use crate::nf_tables::{
    attribute::Attribute,
    message::{Message, TABLE_FLAGS, TableName, base_chain},
    socket::Netfilter,
};

/// A chain and its rules.
pub(crate) struct Chain<'a> {
    pub(crate) name: &'static str,
    /// `enum nf_inet_hooks`, whose numbers are those of `NF_BR_*` too.
    pub(crate) hook: u32,
    pub(crate) priority: i32,
    pub(crate) rules: &'a [Rule<'a>],
}

/// The part of a table that is not as it should be.
pub(crate) enum Fault {
    Table,
    Chain(&'static str),
    Rule(&'static str),
}

impl Chain<'_> {
    fn attributes(&self) -> Vec<Attribute> {
        base_chain(self.hook, self.priority)
    }
}

/// What of a table is missing or changed; `None` if its rules are in force.
pub(crate) fn check(
    table: TableName<'_>,
    chains: &[Chain<'_>],
) -> Result<Option<Fault>, NftablesError> {
    let mut netfilter = Netfilter::open()?;
    match netfilter.get(&table.get())? {
        Some(found) if found.has(&Attribute::number(TABLE_FLAGS, 0)) => {}
        _ => return Ok(Some(Fault::Table)),
    }
    for chain in chains {
        match netfilter.get(&table.get_chain(chain.name))? {
            Some(found) if chain.attributes().iter().all(|wanted| found.has(wanted)) => {}
            _ => return Ok(Some(Fault::Chain(chain.name))),
        }
        let rules = netfilter.list(&table.list_rules(Some(chain.name)))?;
        let mut both = rules.iter().zip(chain.rules);
        if rules.len() != chain.rules.len() || !both.all(|(is, rule)| is.has(&rule.attribute())) {
            return Ok(Some(Fault::Rule(chain.name)));
        }
    }
    Ok(None)
}

/// Messages that make a table in place of what is there under its name.
pub(crate) fn table(table: TableName<'_>, chains: &[Chain<'_>]) -> Vec<Message> {
    // A table that may not exist is created first, because only a table that exists can be deleted.
    let mut messages = vec![table.create(), table.delete(), table.create()];
    for chain in chains {
        let attributes = chain.attributes();
        messages.push(table.create_chain(chain.name, attributes));
        let rules = chain.rules.iter();
        let rules = rules.map(|rule| (rule.attribute(), rule.option()));
        messages.extend(rules.map(|(rule, option)| table.append_rule(chain.name, rule, option)));
    }
    messages
}

/// Adds missing rules after the existing ones, and makes a missing table or chain.
pub(crate) fn complete(table: TableName<'_>, chains: &[Chain<'_>]) -> Result<(), NftablesError> {
    let mut netfilter = Netfilter::open()?;
    let mut messages = vec![table.create()];
    for chain in chains {
        messages.push(table.create_chain(chain.name, chain.attributes()));
        let found = match netfilter.get(&table.get_chain(chain.name))? {
            Some(_) => netfilter.list(&table.list_rules(Some(chain.name)))?,
            None => Vec::new(),
        };
        let missing = chain
            .rules
            .iter()
            .map(|rule| (rule.attribute(), rule.option()))
            .filter(|(rule, _)| !found.iter().any(|is| is.has(rule)));
        messages.extend(missing.map(|(rule, option)| table.append_rule(chain.name, rule, option)));
    }
    netfilter.commit(&messages)
}

/// Removes a table. Gives whether it was there.
pub(crate) fn remove(table: TableName<'_>) -> Result<bool, NftablesError> {
    let mut netfilter = Netfilter::open()?;
    let was_there = netfilter.get(&table.get())?.is_some();
    if was_there {
        netfilter.commit(&[table.create(), table.delete()])?;
    }
    Ok(was_there)
}
