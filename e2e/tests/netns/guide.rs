//! Pages of the guide: their commands run as they are printed, and print what the page says.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Context, Result, ensure};
use holdfast_e2e::guide::{self, Machine, Played};

const WWW: IpAddr = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 10));
const FIRST_PAGE: &str = "getting-started.md";

/// Plays `test` on a machine, and prints the logs if it fails.
fn with_machine(test: impl FnOnce(&mut Machine) -> Result<()>) {
    let mut machine = Machine::start().unwrap_or_else(|error| panic!("no machine: {error:#}"));
    for name in ["www.example.org", "www.example.com"] {
        machine.zone.set(name, &[WWW], 60);
    }
    if let Err(error) = test(&mut machine) {
        machine.print_logs();
        panic!("{error:#}");
    }
}

/// What most pages take for granted: the programs and the pod of the first page.
fn programs_and_pod(machine: &mut Machine) -> Result<()> {
    let first = guide::text(FIRST_PAGE)?;
    for section in ["1. Build", "2. A pod"] {
        guide::play_section(machine, FIRST_PAGE, &first, section)?;
    }
    Ok(())
}

/// Plays a page of the test's own, which fails if `status` reports a problem or a warning.
fn no_complaint(machine: &mut Machine) -> Result<()> {
    guide::play(machine, "status", "```sh\nholdfast-agent status\n```\n").map(drop)
}

fn report(page: &str, played: &Played) {
    println!(
        "{page}: {} commands run, output of {} compared, {} blocks not run: {:?}",
        played.run,
        played.compared,
        played.left_out.len(),
        guide::reasons(played)
    );
}

#[test]
fn getting_started() {
    with_machine(|machine| {
        let played = guide::play(machine, FIRST_PAGE, &guide::text(FIRST_PAGE)?)?;
        report(FIRST_PAGE, &played);
        ensure!(
            played.left_out == ["the test has built the programs"],
            "{played:?}"
        );
        Ok(())
    });
}

#[test]
fn quick_start_on_a_host() {
    with_machine(|machine| {
        machine.serve(WWW, &[80, 443])?;
        let page = "quick-start-host.md";
        let played = guide::play(machine, page, &guide::text(page)?)?;
        report(page, &played);
        // The tier `packages` installs, starts and purges the packages.
        let reasons = guide::reasons(&played);
        let known = ["needs systemd", "the test has built the programs"];
        ensure!(
            reasons.iter().all(|reason| known.contains(reason)),
            "{played:?}"
        );
        Ok(())
    });
}

#[test]
fn egress_firewall() {
    with_machine(|machine| {
        programs_and_pod(machine)?;
        machine.write("firewalls.yaml", include_str!("guide/firewalls.yaml"))?;
        let page = "egress-firewall.md";
        let text = guide::text(page)?;
        let (first, from_others) =
            text.split_at(text.find("\n## From OpenShift").context("heading")?);
        let played = guide::play(machine, page, first)?;
        report(page, &played);
        ensure!(played.left_out.is_empty(), "{played:?}");
        no_complaint(machine)?;
        // The second part begins where no firewall is there yet.
        machine.prepare("rm /etc/holdfast/policies/firewall.yaml")?;
        let page = "egress-firewall.md (From OpenShift)";
        let played = guide::play(machine, page, from_others)?;
        report(page, &played);
        ensure!(played.left_out == ["needs a cluster"], "{played:?}");
        no_complaint(machine)
    });
}

#[test]
fn network_policies() {
    with_machine(|machine| {
        programs_and_pod(machine)?;
        machine.write("cluster.yaml", include_str!("guide/cluster.yaml"))?;
        let page = "network-policies.md";
        let played = guide::play(machine, page, &guide::text(page)?)?;
        report(page, &played);
        ensure!(played.left_out == ["needs a cluster"], "{played:?}");
        no_complaint(machine)
    });
}

#[test]
fn a_page_that_is_wrong_fails() {
    with_machine(|machine| {
        let right = "```sh\nx=1\necho $x\n```\n```text\n1\n```\n```sh\ntest ! -e /run/netns\n```\n";
        let played = guide::play(machine, "right", right)?;
        ensure!((played.run, played.compared) == (3, 1), "{played:?}");
        for (wrong, why) in [
            ("```sh\nfalse\n```\n", "exit status 1"),
            ("```sh\nno-such-program\n```\n", "exit status 127"),
            ("```sh\necho $x\n```\n```text\n2\n```\n", "output differs"),
            ("```console\n$ echo a\nb\n```\n", "output differs"),
            ("```console\n$ true\nb\n```\n", "lacks a line"),
            ("```sh\necho 'PROBLEM  x'\n```\n", "PROBLEM"),
            ("```console\n$ echo 'PROBLEM  x'\n…\n```\n", "PROBLEM"),
            ("# No command\n", "no command was run"),
            (
                "<!-- not run: x -->\n```sh\ntrue\n```\n",
                "no command was run",
            ),
        ] {
            let error = guide::play(machine, "wrong", wrong).expect_err(wrong);
            ensure!(format!("{error:#}").contains(why), "{wrong}: {error:#}");
        }
        Ok(())
    });
}
