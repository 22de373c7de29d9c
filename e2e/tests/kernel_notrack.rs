//! The node's NAT does not change redirected queries: the two rules as the kernel lists them.
use anyhow::{Context as _, Result, ensure};
use holdfast_agent::datapath::notrack::{self, Missing};
use holdfast_e2e::{Netns, shell};

/// Runs `test` in a network namespace of its own.
fn with_netns(name: &str, test: impl FnOnce(&Netns) -> Result<()> + Send) {
    let netns = Netns::create(format!("hf-notrack-{}-{name}", std::process::id()));
    let outcome = netns.and_then(|netns| test(&netns));
    if let Err(error) = outcome {
        panic!("{error:?}");
    }
}

fn nft(netns: &Netns, commands: &str) -> Result<String> {
    shell::feed(netns.command("nft").args(["-n", "-f", "-"]), commands)
}

fn install(netns: &Netns) -> Result<()> {
    netns.enter(notrack::install)?.context("install")
}

fn missing(netns: &Netns) -> Result<Option<Missing>> {
    netns.enter(notrack::check)?.context("check")
}

#[test]
fn the_rules_are_repaired_after_any_change() {
    with_netns("repaired", |netns| {
        ensure!(missing(netns)? == Some(Missing::Table));
        install(netns)?;
        ensure!(missing(netns)?.is_none());
        let table = nft(netns, "list table inet holdfast_v1")?;
        for line in [
            "type filter hook prerouting priority -300; policy accept;",
            "meta mark & 0x00000f00 == 0x00000200 meta mark != 0x00000200 notrack",
            "type filter hook output priority -300; policy accept;",
            "meta mark 0x00000b00 notrack",
        ] {
            ensure!(table.contains(line), "{line:?} is not in {table}");
        }
        for (done, left) in [
            ("flush ruleset", Missing::Table),
            ("delete table inet holdfast_v1", Missing::Table),
            (
                "add table inet holdfast_v1 { flags dormant; }",
                Missing::Table,
            ),
            ("flush chain inet holdfast_v1 pre", Missing::Rule("pre")),
            ("flush chain inet holdfast_v1 out", Missing::Rule("out")),
            (
                "insert rule inet holdfast_v1 pre accept",
                Missing::Rule("pre"),
            ),
            (
                "flush chain inet holdfast_v1 out\nadd rule inet holdfast_v1 out meta mark 0xb01 notrack",
                Missing::Rule("out"),
            ),
            (
                "flush chain inet holdfast_v1 out\ndelete chain inet holdfast_v1 out",
                Missing::Chain("out"),
            ),
            (
                "delete table inet holdfast_v1\nadd table inet holdfast_v1\n\
                 add chain inet holdfast_v1 pre { type filter hook prerouting priority 0; }",
                Missing::Chain("pre"),
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
        let was_there = netns.enter(notrack::remove)?.context("remove")?;
        let again = netns.enter(notrack::remove)?.context("remove again")?;
        anyhow::ensure!(was_there && !again, "{was_there}, {again}");
        ensure!(missing(netns)? == Some(Missing::Table));
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
        let refused = netns.enter(notrack::install)?;
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
