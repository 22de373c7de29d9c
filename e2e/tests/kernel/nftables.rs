//! The rules of netfilter as the kernel lists them: which packets must be judged, and which the node's
//! NAT does not change.
use std::{collections::BTreeSet, time::Duration};

use agent_datapath::{
    nf_tables::TableEvents,
    nftables::{
        self,
        Family::{self, Arp, Bridge, Inet},
        Missing, TABLE,
    },
    unclaimed::ClosedNames,
};
use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::{Netns, shell};
use tokio::time::timeout;

/// Runs `test` in a network namespace of its own.
fn with_netns(name: &str, test: impl FnOnce(&Netns) -> Result<()> + Send) {
    let netns = Netns::create(format!("hf-nftables-{}-{name}", std::process::id()));
    let outcome = netns.and_then(|netns| test(&netns));
    if let Err(error) = outcome {
        panic!("{error:?}");
    }
}

fn nft(netns: &Netns, commands: &str) -> Result<String> {
    shell::feed(netns.command("nft").args(["-n", "-f", "-"]), commands)
}

fn install(netns: &Netns) -> Result<()> {
    let install = || Family::ALL.into_iter().try_for_each(nftables::install);
    netns.enter(install)?.context("install")
}

fn missing(netns: &Netns) -> Result<Option<Missing>> {
    netns.enter(|| -> Result<_> {
        for family in Family::ALL {
            if let Some(missing) = nftables::check(family).context("check")? {
                return Ok(Some(missing));
            }
        }
        Ok(None)
    })?
}

#[test]
fn the_rules_are_repaired_after_any_change() {
    with_netns("repaired", |netns| {
        ensure!(missing(netns)? == Some(Missing::Table(Inet)));
        install(netns)?;
        ensure!(missing(netns)?.is_none());
        let table = nft(netns, "list table inet holdfast_v1")?;
        let bridge = nft(netns, "list table bridge holdfast_v1")?;
        for line in [
            "type filter hook prerouting priority -450; policy accept;",
            "type filter hook prerouting priority -449; policy accept;",
            "iifgroup 1215261796 meta mark 0x00000d00 meta mark set 0x00000000 accept",
            "iifgroup 1215261796 meta mark 0x00000000 counter packets 0 bytes 0 drop",
        ] {
            ensure!(table.contains(line), "{line:?} is not in {table}");
            ensure!(bridge.contains(line), "{line:?} is not in {bridge}");
        }
        for line in [
            "type filter hook prerouting priority -300; policy accept;",
            "meta mark & 0x00000f00 == 0x00000200 meta mark != 0x00000200 notrack",
            "type filter hook output priority -300; policy accept;",
            "meta mark 0x00000b00 notrack",
        ] {
            ensure!(table.contains(line), "{line:?} is not in {table}");
        }
        for (done, left) in [
            ("flush ruleset", Missing::Table(Inet)),
            ("delete table inet holdfast_v1", Missing::Table(Inet)),
            (
                "add table inet holdfast_v1 { flags dormant; }",
                Missing::Table(Inet),
            ),
            ("delete table bridge holdfast_v1", Missing::Table(Bridge)),
            ("delete table arp holdfast_v1", Missing::Table(Arp)),
            (
                "flush chain bridge holdfast_v1 judged",
                Missing::Rule(Bridge, "judged"),
            ),
            (
                "add rule inet holdfast_v1 judged accept",
                Missing::Rule(Inet, "judged"),
            ),
            (
                "flush chain inet holdfast_v1 to_proxies",
                Missing::Rule(Inet, "to_proxies"),
            ),
            (
                "flush chain inet holdfast_v1 from_proxies",
                Missing::Rule(Inet, "from_proxies"),
            ),
            (
                "insert rule inet holdfast_v1 to_proxies accept",
                Missing::Rule(Inet, "to_proxies"),
            ),
            (
                "flush chain inet holdfast_v1 from_proxies\nadd rule inet holdfast_v1 from_proxies meta mark 0xb01 notrack",
                Missing::Rule(Inet, "from_proxies"),
            ),
            (
                "flush chain inet holdfast_v1 from_proxies\ndelete chain inet holdfast_v1 from_proxies",
                Missing::Chain(Inet, "from_proxies"),
            ),
            (
                "delete table inet holdfast_v1\nadd table inet holdfast_v1\n\
                 add chain inet holdfast_v1 judged { type filter hook prerouting priority 0; }",
                Missing::Chain(Inet, "judged"),
            ),
        ] {
            nft(netns, done)?;
            ensure!(
                missing(netns)? == Some(left),
                "{done}: {:?}",
                missing(netns)?
            );
            install(netns)?;
            ensure!(missing(netns)?.is_none(), "{done}: not repaired");
            ensure!(
                nft(netns, "list table inet holdfast_v1")? == table,
                "{done}"
            );
        }
        install(netns)?;
        ensure!(nft(netns, "list table inet holdfast_v1")? == table);
        Ok(())
    });
}

#[test]
fn other_tables_stay_as_they_are() {
    with_netns("others", |netns| {
        nft(
            netns,
            "table inet holdfast { chain pre { type filter hook prerouting priority raw; counter; }; }",
        )?;
        let before = nft(netns, "list table inet holdfast")?;
        install(netns)?;
        let was_there = netns.enter(|| nftables::remove(Inet))?.context("remove")?;
        let again = netns
            .enter(|| nftables::remove(Inet))?
            .context("remove again")?;
        anyhow::ensure!(was_there && !again, "{was_there}, {again}");
        ensure!(missing(netns)? == Some(Missing::Table(Inet)));
        for family in [Bridge, Arp] {
            ensure!(
                netns
                    .enter(|| nftables::remove(family))?
                    .context("remove")?
            );
        }
        ensure!(nft(netns, "list ruleset")? == before);
        Ok(())
    });
}

#[test]
fn a_refusal_by_the_kernel_names_the_reason() {
    with_netns("refused", |netns| {
        // Only the owner of a table may change it.
        let mut owner = netns.command("nft");
        owner
            .arg("-i")
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::null());
        let mut owner = owner.spawn()?;
        let mut stdin = owner.stdin.take().context("no stdin")?;
        std::io::Write::write_all(&mut stdin, b"add table inet holdfast_v1 { flags owner; }\n")?;
        holdfast_e2e::eventually(
            "the table is there",
            std::time::Duration::from_secs(5),
            || {
                let tables = netns.run("nft", &["list", "tables"])?;
                ensure!(tables.contains("holdfast_v1"), "{tables}");
                Ok(())
            },
        )?;
        let refused = netns.enter(|| nftables::install(Inet))?;
        drop(stdin);
        owner.wait()?;
        let text = refused.err().context("not refused")?.to_string();
        ensure!(
            text.contains("nftables table inet holdfast_v1") && text.contains("not permitted"),
            "{text}"
        );
        install(netns)
    });
}

#[test]
fn a_change_of_a_table_is_reported_at_once_and_one_of_another_program_is_not() {
    with_netns("events", |netns| {
        install(netns)?;
        netns.enter(|| -> Result<()> {
            let mut runtime = tokio::runtime::Builder::new_current_thread();
            let runtime = runtime.enable_all().build()?;
            runtime.block_on(async {
                let events = TableEvents::open(TABLE)?;
                let quiet = Duration::from_millis(200);
                for change in [
                    "flush chain bridge holdfast_v1 judged",
                    "delete table inet holdfast_v1",
                ] {
                    nft(netns, change)?;
                    let reported = timeout(Duration::from_secs(2), events.changed()).await;
                    reported.context(change)??;
                    while timeout(quiet, events.changed()).await.is_ok() {}
                }
                nft(netns, "add table inet other")?;
                ensure!(timeout(quiet, events.changed()).await.is_err());
                Ok(())
            })
        })?
    });
}

#[test]
fn a_bridge_that_is_new_is_closed_at_the_start_and_what_was_closed_stays_so() {
    let names =
        |names: &[&str]| -> BTreeSet<String> { names.iter().copied().map(str::to_owned).collect() };
    with_netns("closed", |netns| {
        let begin = |bridges: &[&str]| netns.enter(|| ClosedNames::begin(names(bridges)));
        let rule = "add table bridge try; add chain bridge try c; add rule bridge try c meta ibrname \"br0\"\n";
        if nft(netns, rule).is_err() {
            println!("this kernel lacks CONFIG_NFT_BRIDGE_META: only the refusal is tested");
            ensure!(begin(&["br0"])?.is_err(), "it is not refused");
            return Ok(());
        }
        let first = begin(&["br0"])??;
        netns.enter(|| first.set_interfaces(&names(&["hf0"])))??;
        drop(first);
        let _second = begin(&["br0", "br1"])??;
        // Started twice: what a start that was cut off has written is not added again.
        let _third = begin(&["br0", "br1"])??;
        let table = nft(netns, "list table bridge holdfast_v1_closed\n")?;
        for (name, rules) in [("\"br0\"", 6), ("\"br1\"", 6), ("\"hf0\"", 2)] {
            let found = table.lines().filter(|line| line.contains(name)).count();
            ensure!(
                found == rules,
                "{found} rules have {name}, not {rules}: {table}"
            );
        }
        Ok(())
    });
}
