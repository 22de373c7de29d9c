//! `--vpp-export-dir`: files that follow the policies, and whose failures stop no enforcement.

use std::fs;
use std::path::Path;

use anyhow::{Result, ensure};
use holdfast_e2e::{Lab, eventually, with_lab};
use serde_json::{Value, json};

use super::{PORT, Pods, SOON, both, of, reaches, status_has};

fn opens(lab: &Lab, ports: &Value) -> Result<()> {
    let peer = json!([{"ipBlock": {"cidr": "10.0.0.0/8"}}]);
    let rules = json!([{"from": peer, "ports": [ports]}]);
    lab.write_network_policy("b", &json!({"podSelector": of("b"), "ingress": rules}))
}

/// Waits until a file has a text.
fn has(file: &Path, text: &str) -> Result<()> {
    eventually(text, SOON, || {
        let content = fs::read_to_string(file)?;
        ensure!(content.contains(text), "{}: {content}", file.display());
        Ok(())
    })
}

#[test]
fn exports_follow_the_policies_and_stop_no_enforcement() {
    with_lab(|lab| {
        let _pods = Pods::new(lab)?;
        let directory = lab.directory().join("exports");
        let export = format!("--vpp-export-dir={}", directory.display());
        let flags = [export.as_str(), "--node-output-interface=uplink0"];
        let output = lab.netpol_command(&flags)?.output()?;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(
            !output.status.success() && error.contains(&export[..16]),
            "{error}"
        );
        fs::create_dir(&directory)?;

        opens(lab, &json!({"port": PORT}))?;
        let _netpol = lab.start_netpol(&flags)?;
        has(&directory.join("acl.txt"), "pod:default/b")?;
        has(&directory.join("acl.json"), "80-80")?;
        // The pods of the lab have IPv6 addresses, which session rules do not support.
        status_has(
            lab,
            &[
                "Exports",
                "session-rules.json",
                "pod default/a",
                "Ready            yes",
            ],
        )?;

        let away = lab.directory().join("away");
        fs::rename(&directory, &away)?;
        opens(lab, &json!({"port": 8080}))?;
        reaches(&lab.a, &both(&lab.b, 8080)[..1], true)?;
        reaches(&lab.a, &both(&lab.b, PORT), false)?;
        status_has(lab, &["acl.json: No such file", "Ready            yes"])?;
        fs::rename(&away, &directory)?;
        has(&directory.join("acl.json"), "8080-8080")?;
        eventually("the problem ends", SOON, || {
            let status = lab.netpol(&["status"])?;
            ensure!(!status.contains("acl.json"), "{status}");
            Ok(())
        })
    });
}
