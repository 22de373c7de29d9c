//! Tables of policies in the kernel. A table that is written by netlink equals the table that
//! nft(8) makes from its text. Edits by other programs are found and repaired.

mod random;

use std::{collections::BTreeSet, net::Ipv4Addr, time::Duration};

use agent_datapath::nf_tables::{Connection, Difference, TableEvents};
use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::{Netns, config, shell};
use netpol::render::{
    change::{Change, Step},
    ruleset::{
        Chain, Element, Entry, Expression, Field, Key, Rule, Set, Table, TableFamily, Type, Value,
        Verdict, VerdictMap,
    },
};
use rand::{SeedableRng as _, rngs::StdRng};
use serde_json::Value as Json;
use tokio::time::timeout;

const TABLE: &str = "holdfast_test_v1";

/// Runs `test` in a network namespace of its own.
fn with_netns(name: &str, test: impl FnOnce(&Netns) -> Result<()> + Send) {
    let outcome = new_netns(name).and_then(|netns| test(&netns));
    if let Err(error) = outcome {
        panic!("{error:?}");
    }
}

fn new_netns(name: &str) -> Result<Netns> {
    Netns::create(format!("hf-nf-{}-{name}", std::process::id()))
}

fn nft(netns: &Netns, commands: &str) -> Result<String> {
    shell::feed(netns.command("nft").args(["-f", "-"]), commands)
}

/// The table as nft lists it, without handles, and with its objects in an order that does not depend on
/// their history.
fn listing(netns: &Netns, family: TableFamily) -> Result<Vec<Json>> {
    let family = family.to_string();
    let text = netns.run("nft", &["-j", "list", "table", &family, TABLE])?;
    let mut listing: Json = serde_json::from_str(&text)?;
    let mut without = vec![&mut listing];
    while let Some(value) = without.pop() {
        match value {
            Json::Object(fields) => {
                fields.remove("handle");
                without.extend(fields.values_mut());
            }
            Json::Array(values) => without.extend(values),
            _ => {}
        }
    }
    let mut objects = std::mem::take(listing["nftables"].as_array_mut().context("no objects")?);
    // Rules of a chain stay in their order.
    objects.sort_by_key(|object| {
        let (kind, object) = object
            .as_object()
            .and_then(|fields| fields.iter().next())
            .unzip();
        let name = object.and_then(|object| object.get("chain").or(object.get("name")));
        (kind.cloned(), name.map(Json::to_string))
    });
    Ok(objects)
}

fn connect(netns: &Netns) -> Result<Connection> {
    Ok(netns.enter(Connection::open)??)
}

#[test]
fn netlink_makes_what_nft_makes_of_the_text() {
    let seed = config::seed();
    eprintln!("HOLDFAST_SEED={seed} plays the same");
    let mut rng = StdRng::seed_from_u64(seed);
    let by_text = new_netns("text").expect("a namespace");
    let by_lines = new_netns("lines").expect("a namespace");
    with_netns("netlink", |netns| {
        for (family, tables) in [(TableFamily::Inet, 300), (TableFamily::Bridge, 100)] {
            let mut kernel = connect(netns)?;
            let mut text_kernel = connect(&by_text)?;
            let mut old = Table::of(family, TABLE);
            for n in 0..tables {
                let new = random::table(&mut rng, family, TABLE);
                let change = Change::between(&old, &new);
                kernel
                    .commit(std::slice::from_ref(&change))
                    .with_context(|| format!("table {n}:\n{change}"))?;
                nft(
                    &by_text,
                    &format!("{}{new}", Change::deletion(family, TABLE)),
                )?;
                nft(&by_lines, &change.to_string())?;
                let of_text = listing(&by_text, family)?;
                for found in [listing(netns, family)?, listing(&by_lines, family)?] {
                    let first = found.iter().zip(&of_text).find(|(one, other)| one != other);
                    ensure!(found == of_text, "table {n}: {first:?}\n{change}");
                }
                for kernel in [&mut kernel, &mut text_kernel] {
                    let difference = kernel.difference(&new)?;
                    ensure!(difference.is_none(), "table {n}: {difference:?}\n{new}");
                    ensure!(kernel.outline(&new)? == new, "table {n}:\n{new}");
                }
                ensure!(
                    old == new || kernel.difference(&old)?.is_some(),
                    "table {n}"
                );
                old = new;
            }
        }
        Ok(())
    });
}

#[test]
fn tables_of_both_families_change_together_or_not_at_all() {
    with_netns("both", |netns| {
        let mut kernel = connect(netns)?;
        kernel.probe(TableFamily::Bridge)?;
        let policies = small_table();
        let none = Table::of(TableFamily::Bridge, TABLE);
        let entry = Entry::Leaving;
        let rules = vec![Rule(vec![Expression::Verdict(Verdict::Drop)])];
        let frames = Table {
            chains: [("leaving".to_owned(), Chain { entry, rules })].into(),
            ..none.clone()
        };
        let lacking = Step::DeleteSet("absent".to_owned());
        let refused = Change::of(TableFamily::Bridge, TABLE, vec![Step::AddTable, lacking]);
        let first = Change::replacement(&policies);
        kernel
            .commit(&[first.clone(), refused])
            .expect_err("the second is refused");
        ensure!(kernel.difference(&policies)? == Some(Difference::NoTable));
        kernel.commit(&[first, Change::between(&none, &frames)])?;
        ensure!(kernel.difference(&policies)?.is_none());
        ensure!(kernel.difference(&frames)?.is_none());
        // A table that is not needed is found and removed.
        ensure!(kernel.difference(&none)? == Some(Difference::NotNeeded));
        kernel.commit(&[Change::between(&frames, &none)])?;
        ensure!(kernel.difference(&none)?.is_none());
        ensure!(kernel.difference(&policies)?.is_none());
        Ok(())
    });
}

/// A pod whose group has members, a block, and a guard against false sources.
fn small_table() -> Table {
    let mut table = Table::new(TABLE);
    let address = |last| Value::Ipv4(Ipv4Addr::new(10, 0, 0, last));
    table.counters.insert("dropped_in".to_owned());
    let mut add = |name: &str, key, elements| {
        table.sets.insert(name.to_owned(), Set { key, elements });
    };
    let members = (1..=3).map(|last| Element::One(address(last))).collect();
    add("g4", Key::One(Type::Ipv4), members);
    let blocks = Element::merged([(address(16), address(31)), (address(80), address(90))]);
    add("b4", Key::Ranges(Type::Ipv4), blocks);
    let pair = Element::Pair(Value::Interface(7), address(9));
    add(
        "behind4",
        Key::Pair(Type::Interface, Type::Ipv4),
        [pair].into(),
    );
    let jump = Verdict::Jump("i_a".to_owned());
    let map = VerdictMap {
        key: Type::Ipv4,
        elements: [(address(9), jump)].into(),
    };
    table.maps.insert("to4".to_owned(), map);
    let permit = |set: &str| {
        let condition = Expression::In(Field::Source4, set.to_owned());
        Rule(vec![condition, Expression::Verdict(Verdict::Return)])
    };
    let end = Rule(vec![
        Expression::Count("dropped_in".to_owned()),
        Expression::Verdict(Verdict::Drop),
    ]);
    let rules = vec![permit("g4"), permit("b4"), end];
    let entry = Entry::Jump;
    table
        .chains
        .insert("i_a".to_owned(), Chain { entry, rules });
    let rules = vec![
        Rule(vec![
            Expression::Answer,
            Expression::Verdict(Verdict::Accept),
        ]),
        Rule(vec![Expression::VerdictIn(
            Field::Destination4,
            "to4".to_owned(),
        )]),
    ];
    let entry = Entry::Forward;
    table
        .chains
        .insert("forward".to_owned(), Chain { entry, rules });
    table
}

#[test]
fn foreign_edits_are_found_and_repaired_and_other_tables_stay() {
    with_netns("edits", |netns| {
        let foreign = "table inet holdfast_test { set s { type ipv4_addr; }; chain c { type filter hook forward priority 0; counter; }; }
                       table ip holdfast_test_v1 { chain forward { type filter hook forward priority 0; }; }";
        nft(netns, foreign)?;
        let others = || -> Result<String> {
            let inet = netns.run("nft", &["list", "table", "inet", "holdfast_test"])?;
            Ok(inet + &netns.run("nft", &["list", "table", "ip", TABLE])?)
        };
        let before = others()?;
        let table = small_table();
        let mut kernel = connect(netns)?;
        ensure!(kernel.difference(&table)? == Some(Difference::NoTable));
        kernel.commit(&[Change::replacement(&table)])?;
        ensure!(kernel.difference(&table)?.is_none());
        let ours = listing(netns, TableFamily::Inet)?;
        for (edit, difference) in edits() {
            nft(netns, &edit.replace("OURS", &format!("inet {TABLE}")))?;
            let found = kernel.difference(&table)?;
            ensure!(found.as_ref() == Some(&difference), "{edit}: {found:?}");
            kernel.commit(&[Change::replacement(&table)])?;
            let left = kernel.difference(&table)?;
            ensure!(left.is_none(), "{edit}: {left:?}");
            ensure!(listing(netns, TableFamily::Inet)? == ours, "{edit}");
        }
        ensure!(others()? == before);
        kernel.commit(&[Change::deletion(TableFamily::Inet, TABLE)])?;
        ensure!(kernel.difference(&table)? == Some(Difference::NoTable));
        kernel.commit(&[Change::deletion(TableFamily::Inet, TABLE)])?;
        ensure!(others()? == before);
        Ok(())
    });
}

/// An edit of nft, and the difference that it makes.
fn edits() -> Vec<(&'static str, Difference)> {
    let rules = |chain: &str| Difference::Rules(chain.to_owned());
    let elements = |set: &str| Difference::Elements(set.to_owned());
    let foreign = |kind, name: &str| Difference::Foreign(kind, name.to_owned());
    let missing = |kind, name: &str| Difference::Missing(kind, name.to_owned());
    vec![
        ("delete table OURS", Difference::NoTable),
        ("add table OURS { flags dormant; }", Difference::Flags),
        ("flush table OURS", rules("forward")),
        ("flush chain OURS i_a", rules("i_a")),
        ("insert rule OURS forward accept", rules("forward")),
        ("add rule OURS i_a accept", rules("i_a")),
        (
            "flush chain OURS i_a\nadd rule OURS i_a ip saddr != @g4 return\nadd rule OURS i_a ip saddr @b4 return\nadd rule OURS i_a counter name dropped_in drop",
            rules("i_a"),
        ),
        (
            "flush chain OURS i_a\nadd rule OURS i_a ip daddr @g4 return\nadd rule OURS i_a ip saddr @b4 return\nadd rule OURS i_a counter name dropped_in drop",
            rules("i_a"),
        ),
        ("add element OURS g4 { 10.0.0.4 }", elements("set g4")),
        ("delete element OURS g4 { 10.0.0.1 }", elements("set g4")),
        ("flush set OURS g4", elements("set g4")),
        (
            "add element OURS b4 { 10.0.0.0-10.0.0.3 }",
            elements("set b4"),
        ),
        (
            "flush set OURS b4\nadd element OURS b4 { 10.0.0.0/8 }",
            elements("set b4"),
        ),
        (
            "add element OURS behind4 { 8 . 10.0.0.9 }",
            elements("set behind4"),
        ),
        ("flush map OURS to4", elements("map to4")),
        (
            "delete element OURS to4 { 10.0.0.9 }\nadd element OURS to4 { 10.0.0.9 : accept }",
            elements("map to4"),
        ),
        (
            "add element OURS to4 { 10.0.0.8 : drop }",
            elements("map to4"),
        ),
        (
            "add chain OURS first { type filter hook forward priority -1; policy drop; }",
            foreign("chain", "first"),
        ),
        (
            "add chain OURS forward { policy drop; }",
            missing("chain", "forward"),
        ),
        (
            "add set OURS more { type ipv4_addr; }",
            foreign("set", "more"),
        ),
        ("add counter OURS more", foreign("counter", "more")),
        (
            "add quota OURS dropped_in { 1 mbytes }",
            foreign("counter", "dropped_in"),
        ),
        (
            "flush chain OURS i_a\ndelete counter OURS dropped_in",
            missing("counter", "dropped_in"),
        ),
        (
            "flush chain OURS i_a\ndelete set OURS g4\nadd set OURS g4 { type ipv4_addr; flags timeout; }",
            missing("set", "g4"),
        ),
    ]
}

#[test]
fn a_refused_change_and_a_dry_run_change_nothing() {
    with_netns("refused", |netns| {
        let table = small_table();
        let mut kernel = connect(netns)?;
        kernel.dry_run(&[Change::replacement(&table)])?;
        ensure!(kernel.difference(&table)? == Some(Difference::NoTable));
        kernel.commit(&[Change::replacement(&table)])?;
        let ours = listing(netns, TableFamily::Inet)?;
        let to_nowhere = Rule(vec![Expression::In(Field::Source4, "absent".to_owned())]);
        let refused = Change::of(
            TableFamily::Inet,
            TABLE,
            vec![
                Step::AddCounter("more".to_owned()),
                Step::AddRule("i_a".to_owned(), to_nowhere),
            ],
        );
        let refused = [refused];
        for outcome in [kernel.commit(&refused), kernel.dry_run(&refused)] {
            let text = outcome.err().context("not refused")?.to_string();
            ensure!(
                text.contains("a rule of chain i_a") && text.contains(TABLE),
                "{text}"
            );
        }
        kernel.dry_run(&[Change::deletion(TableFamily::Inet, TABLE)])?;
        ensure!(listing(netns, TableFamily::Inet)? == ours);
        ensure!(kernel.difference(&table)?.is_none());
        kernel.probe(TableFamily::Inet)?;
        ensure!(listing(netns, TableFamily::Inet)? == ours);
        ensure!(!netns.run("nft", &["list", "tables"])?.contains("probe"));
        Ok(())
    });
}

#[test]
fn a_batch_may_have_20_000_messages_and_200_000_elements() {
    with_netns("large", |netns| {
        let mut table = small_table();
        let chain = table.chains.get_mut("i_a").context("a chain")?;
        let rule = chain.rules[0].clone();
        chain.rules.extend(std::iter::repeat_n(rule, 20_000));
        let elements: BTreeSet<Element> = (0..200_000)
            .map(|n| Element::One(Value::Ipv4(Ipv4Addr::from_bits(0x0b00_0000 + n))))
            .collect();
        table.sets.get_mut("g4").context("a set")?.elements = elements;
        let mut kernel = connect(netns)?;
        kernel.commit(&[Change::replacement(&table)])?;
        ensure!(kernel.difference(&table)?.is_none());
        let mut fewer = table.clone();
        fewer
            .sets
            .get_mut("g4")
            .context("a set")?
            .elements
            .pop_last();
        let change = Change::between(&table, &fewer);
        ensure!(
            change.steps.len() == 1 && change.elements() == 1,
            "{change}"
        );
        kernel.commit(&[change])?;
        ensure!(kernel.difference(&fewer)?.is_none());
        // Refusals of all messages do not fit into the receive buffer.
        let all: Vec<Step> = (0..20_000)
            .map(|n| Step::DeleteSet(format!("absent_{n}")))
            .collect();
        let text = kernel
            .commit(&[Change::of(TableFamily::Inet, TABLE, all)])
            .err()
            .context("not refused")?
            .to_string();
        ensure!(text.contains("set absent_0 of"), "{text}");
        ensure!(kernel.difference(&fewer)?.is_none());
        Ok(())
    });
}

#[test]
fn counters_are_read_and_changes_of_others_are_reported() {
    with_netns("reports", |netns| {
        let table = small_table();
        let mut kernel = connect(netns)?;
        netns.enter(|| -> Result<()> {
            let mut runtime = tokio::runtime::Builder::new_current_thread();
            runtime.enable_all().build()?.block_on(async {
                let events = TableEvents::open(TABLE)?.by_others(kernel.port());
                let quiet = Duration::from_millis(200);
                kernel.commit(&[Change::replacement(&table)])?;
                ensure!(
                    timeout(quiet, events.changed()).await.is_err(),
                    "own change"
                );
                nft(
                    netns,
                    &format!("add element inet {TABLE} g4 {{ 10.0.0.4 }}"),
                )?;
                timeout(Duration::from_secs(2), events.changed()).await??;
                nft(netns, "add table inet other")?;
                while timeout(quiet, events.changed()).await.is_ok() {}
                nft(netns, "delete table inet other")?;
                ensure!(
                    timeout(quiet, events.changed()).await.is_err(),
                    "another table"
                );
                Ok(())
            })
        })??;
        nft(netns, &format!("delete counter inet {TABLE} x")).expect_err("absent");
        nft(
            netns,
            &format!("add counter inet {TABLE} x {{ packets 41 bytes 1 }}"),
        )?;
        let counters = kernel.counters(TableFamily::Inet, TABLE)?;
        ensure!(
            counters.get("x") == Some(&41) && counters.get("dropped_in") == Some(&0),
            "{counters:?}"
        );
        Ok(())
    });
}
