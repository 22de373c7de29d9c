//! Whether the kernel has the parts of nf_tables that a policy table needs.

use std::collections::{BTreeMap, BTreeSet};

use netpol::render::{
    change::Change,
    ruleset::{
        Chain, Entry, Expression, Field, Key, Rule, Set, Table, TableFamily, Type, Verdict,
        VerdictMap,
    },
};

use super::{NftablesError, batch, message::Message, socket::Netfilter};

/// Asks the kernel to check a small table for each part. No table is made.
pub(super) fn probe(netfilter: &mut Netfilter, family: TableFamily) -> Result<(), NftablesError> {
    let samples = match family {
        TableFamily::Inet => samples().to_vec(),
        TableFamily::Bridge => vec![of_frames()],
    };
    probe_with(&samples, |messages| netfilter.check(messages))
}

fn probe_with(
    samples: &[Table],
    mut check: impl FnMut(&[Message]) -> Result<(), NftablesError>,
) -> Result<(), NftablesError> {
    let mut lacking = Vec::new();
    for table in samples {
        match check(&batch::messages(&Change::replacement(table))) {
            Err(NftablesError::Refused { option, source, .. })
                if is_lack(source.raw_os_error()) =>
            {
                if !lacking.contains(&option) {
                    lacking.push(option);
                }
            }
            checked => checked?,
        }
    }
    if lacking.is_empty() {
        Ok(())
    } else {
        Err(NftablesError::Lacks(lacking))
    }
}

/// Whether an error number says that the kernel does not have a part, not that the agent lacks a right.
fn is_lack(errno: Option<i32>) -> bool {
    matches!(
        errno,
        Some(libc::ENOENT | libc::EOPNOTSUPP | libc::EAFNOSUPPORT | libc::EPROTONOSUPPORT)
    )
}

/// Each table has one part more than the previous table: the first refusal names a part that is lacking.
fn samples() -> [Table; 4] {
    let drop = Expression::Verdict(Verdict::Drop);
    let sets = with_sets();
    let connections = with_rule(vec![Expression::Answer, drop.clone()]);
    let counter = with_counter(Table::new(NAME));
    let counting = with_counter(with_rule(vec![Expression::Count(COUNTER.to_owned()), drop]));
    [sets, connections, counter, counting]
}

/// A table of family `bridge`.
fn of_frames() -> Table {
    let entry = Entry::Leaving;
    let rules = vec![Rule(vec![Expression::Verdict(Verdict::Drop)])];
    Table {
        family: TableFamily::Bridge,
        chains: [("leaving".to_owned(), Chain { entry, rules })].into(),
        ..Table::new(NAME)
    }
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

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    /// A kernel without the parts that the predicate selects by the option of a message.
    fn probe_without(lacks: impl Fn(&str) -> bool, errno: i32) -> Result<(), NftablesError> {
        let mut all = samples().to_vec();
        all.push(of_frames());
        probe_with(&all, |messages| {
            let refused = messages.iter().find(|message| lacks(message.option));
            refused.map_or(Ok(()), |message| {
                Err(NftablesError::Refused {
                    what: message.what.clone(),
                    option: message.option,
                    source: io::Error::from_raw_os_error(errno),
                })
            })
        })
    }

    #[test]
    fn each_missing_part_is_named_by_its_option() {
        assert!(probe_without(|_| false, libc::ENOENT).is_ok());
        for option in [
            "CONFIG_NF_TABLES_INET",
            "CONFIG_NF_TABLES_BRIDGE",
            "CONFIG_NFT_CT",
            "CONFIG_NFT_COUNTER",
            "CONFIG_NFT_OBJREF",
        ] {
            let error = probe_without(|needs| needs.starts_with(option), libc::ENOENT);
            let text = error.expect_err(option).to_string();
            assert!(text.contains(option), "{text}");
            let options = text.matches("CONFIG_").count();
            assert_eq!(options, 1, "{text}");
        }
    }

    #[test]
    fn a_missing_privilege_is_no_missing_part() {
        let error = probe_without(|_| true, libc::EPERM).expect_err("refused");
        assert!(error.to_string().contains("CAP_NET_ADMIN"), "{error}");
    }
}
