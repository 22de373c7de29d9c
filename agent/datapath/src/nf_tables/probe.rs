//! Whether the kernel has the parts of nf_tables that a policy table needs.

use std::collections::{BTreeMap, BTreeSet};

use netpol::render::{
    change::Change,
    ruleset::{Chain, Entry, Expression, Field, Key, Rule, Set, Table, Type, Verdict, VerdictMap},
};

use super::{NftablesError, batch, socket::Netfilter};

/// Asks the kernel to check a small table for each part. Nothing is left of them.
pub(super) fn probe(netfilter: &mut Netfilter) -> Result<(), NftablesError> {
    let mut lacking = Vec::new();
    for table in samples() {
        let messages = batch::messages(&Change::replacement(&table));
        let refused = netfilter.refused(&messages)?;
        let Some(first) = refused.into_iter().next() else {
            continue;
        };
        match first.of(&messages) {
            NftablesError::Refused { option, source, .. } if is_lack(source.raw_os_error()) => {
                if !lacking.contains(&option) {
                    lacking.push(option);
                }
            }
            error => return Err(error),
        }
    }
    if lacking.is_empty() {
        Ok(())
    } else {
        Err(NftablesError::Lacks(lacking))
    }
}

/// Whether an error number says that the kernel does not have a part, rather than that it may not be used.
fn is_lack(errno: Option<i32>) -> bool {
    matches!(
        errno,
        Some(libc::ENOENT | libc::EOPNOTSUPP | libc::EAFNOSUPPORT | libc::EPROTONOSUPPORT)
    )
}

/// Each table has one part more than those before it: the first refusal names a part that is lacking.
fn samples() -> [Table; 4] {
    let drop = Expression::Verdict(Verdict::Drop);
    let sets = with_sets();
    let connections = with_rule(vec![Expression::Answer, drop.clone()]);
    let counter = with_counter(Table::new(NAME));
    let counting = with_counter(with_rule(vec![Expression::Count(COUNTER.to_owned()), drop]));
    [sets, connections, counter, counting]
}

const NAME: &str = "holdfast_probe";
const COUNTER: &str = "dropped";

fn with_rule(expressions: Vec<Expression>) -> Table {
    let mut table = Table::new(NAME);
    let chain = Chain {
        entry: Entry::Forward,
        rules: vec![Rule(expressions)],
    };
    table.chains.insert("forward".to_owned(), chain);
    table
}

fn with_counter(mut table: Table) -> Table {
    table.counters.insert(COUNTER.to_owned());
    table
}

fn with_sets() -> Table {
    let name = |text: &str| text.to_owned();
    let mut table = with_rule(vec![
        Expression::In(Field::Source4, name("blocks")),
        Expression::PairNotIn(Field::Interface, Field::Source4, name("behind")),
        Expression::VerdictIn(Field::Source4, name("from")),
    ]);
    for (set, key) in [
        ("blocks", Key::Ranges(Type::Ipv4)),
        ("behind", Key::Pair(Type::Interface, Type::Ipv4)),
    ] {
        let elements = BTreeSet::new();
        table.sets.insert(name(set), Set { key, elements });
    }
    let map = VerdictMap {
        key: Type::Ipv4,
        elements: BTreeMap::new(),
    };
    table.maps.insert(name("from"), map);
    table
}
