//! `policy render` says what `netpol run` enforces.

use std::io::Write as _;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::netpol_run::{NODE, TABLE};
use holdfast_e2e::{Lab, config, eventually, shell, with_lab};
use serde_json::json;

use super::{PORT, Pods, SOON, of};

fn render(lab: &Lab, flags: &[&str]) -> Result<String> {
    let mut command = Command::new(config::program("holdfast-agent")?);
    command.args(["policy", "render", "-f"]);
    command.arg(lab.policy_dir()).args(flags);
    shell::finish(&mut command)
}

#[test]
fn nft_accepts_the_rendered_table_which_is_the_one_in_force() {
    with_lab(|lab| {
        let _pods = Pods::new(lab)?;
        let block = json!([{"ipBlock": {"cidr": "192.0.2.0/24", "except": ["192.0.2.128/25"]}}]);
        lab.write_network_policy(
            "b",
            &json!({
                "podSelector": of("b"),
                "policyTypes": ["Ingress", "Egress"],
                "ingress": [{"from": [{"podSelector": of("a")}], "ports": [{"port": PORT, "endPort": 90}]}],
                "egress": [{"to": block}],
            }),
        )?;
        let text = render(lab, &["--node", NODE, "--format", "nft"])?;
        let mut nft = lab.node.command("nft");
        let mut nft = nft.args(["-c", "-f", "-"]).stdin(Stdio::piped()).spawn()?;
        let mut input = nft.stdin.take().context("it is piped")?;
        input.write_all(text.as_bytes())?;
        drop(input);
        ensure!(nft.wait()?.success(), "nft refuses:\n{text}");

        let _netpol = lab.start_netpol(&[])?;
        let chains = |text: &str| -> Vec<String> {
            let words = text.split_whitespace().filter(|word| word.contains("4_"));
            let mut names: Vec<String> = words
                .map(|word| word.trim_matches([',', '@']).to_owned())
                .collect();
            names.sort();
            names.dedup();
            names
        };
        let rendered = chains(&text);
        ensure!(rendered.len() > 3, "{rendered:?}");
        eventually("the same chains and groups are in force", SOON, || {
            let listed = chains(&lab.netpol_table()?);
            ensure!(
                listed == rendered,
                "{listed:?} of {TABLE:?}, {rendered:?} rendered"
            );
            Ok(())
        })?;
        let verdict = |to: &str| {
            render(
                lab,
                &["--pod", "default/a", "--to", "default/b", "--port", to],
            )
        };
        ensure!(
            verdict("80/TCP")?.contains("80/TCP: passes"),
            "{}",
            verdict("80/TCP")?
        );
        ensure!(
            verdict("91/TCP")?.contains("91/TCP: is dropped"),
            "{}",
            verdict("91/TCP")?
        );
        Ok(())
    });
}
