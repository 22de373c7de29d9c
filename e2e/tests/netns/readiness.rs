//! Probes and scrapes: a program is not ready until everything needed exists, and it names each
//! missing part.
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::lab::{DNS4, at, web4};
use holdfast_e2e::policy::{WEB, good_names};
use holdfast_e2e::{AgentOptions, Lab, Program, Query, SdpOptions, eventually, with_lab};
use serde_json::Value;

const SOON: Duration = Duration::from_secs(10);
const SDP: u16 = 9961;
const AGENT: u16 = 9962;

#[test]
fn a_proxy_without_agent_files_and_maps_waits_for_the_agent() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        lab.write_policy("web.yaml", &good_names())?;
        let sdp = begin(lab, &SdpOptions::default())?;
        waits(lab)?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        ready(lab, "from the agent")?;
        lab.add_endpoint(&lab.a, WEB)?;
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;
        let left = sdp.terminate(Duration::from_secs(15))?;
        ensure!(left.success(), "{left}");
        Ok(())
    });
}

#[test]
fn a_proxy_without_agent_files_and_maps_waits_for_files_and_maps() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        lab.write_policy("web.yaml", &good_names())?;
        let nowhere = lab.directory().join("run/no-agent.sock");
        let options = SdpOptions {
            native: false,
            ..SdpOptions::default()
        };
        let options = options.flag(&format!("--agent-address=unix://{}", nowhere.display()));
        let _sdp = begin(lab, &options)?;
        waits(lab)?;
        // The maps are created first, the endpoint's file a while later.
        let _agent = lab.start_agent(&AgentOptions::default())?;
        eventually("the maps are found", SOON, || {
            let (code, body) = lab.http(SDP, "/readyz")?;
            ensure!(code == 503 && !body.contains("endpoints:"), "{code} {body}");
            ensure!(body.contains("rules: "), "{body}");
            Ok(())
        })?;
        lab.add_endpoint(&lab.a, WEB)?;
        ready(lab, "from disk, of 1 endpoints")?;
        eventually("allowed names are answered", SOON, || {
            lab.a
                .ask(&Query::a("www.good.test", DNS4))?
                .expect(web4(10))
        })?;
        lab.a
            .ask(&Query::a("www.bad.test", DNS4))?
            .expect_refused()?;
        Ok(())
    });
}

#[test]
fn both_programs_are_probed_and_scraped_over_http() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        let _programs = lab.start(&good_names())?;
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;
        lab.a.expect_open(at(web4(10), 80))?;
        lab.a.expect_closed(at(web4(11), 80))?;

        for (port, page, says) in [
            (AGENT, "/healthz", "ok\n"),
            (AGENT, "/readyz", "ready: sources are synced"),
            (SDP, "/healthz", "alive\n"),
            (SDP, "/readyz", "ready; rules: from the agent"),
        ] {
            let (code, body) = lab.http(port, page)?;
            ensure!(
                code == 200 && body.starts_with(says),
                "{page}: {code} {body}"
            );
        }
        for port in [AGENT, SDP] {
            let (code, _) = lab.http(port, "/nothing")?;
            ensure!(code == 404, "{code}");
        }

        let (code, text) = lab.http(AGENT, "/metrics")?;
        ensure!(code == 200 && text.ends_with("# EOF\n"), "{code} {text}");
        for line in [
            "# TYPE holdfast_endpoint gauge",
            "holdfast_endpoint 1",
            "holdfast_agent_ready 1",
            "holdfast_policy 1",
            "holdfast_policy_refused 0",
            "holdfast_fqdn_active_ips 1",
            "holdfast_fqdn_mappings_total{outcome=\"realised\"} 1",
            "holdfast_proxy_streams{kind=\"rules\"} 1",
            "holdfast_restore_damaged_files 0",
        ] {
            ensure!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
        ensure!(
            lab.metric(
                AGENT,
                "holdfast_drop_count_total",
                "reason=\"policy_denied\""
            )? >= 1.0,
            "{text}"
        );
        let (code, text) = lab.http(SDP, "/metrics")?;
        ensure!(code == 200 && text.ends_with("# EOF\n"), "{code} {text}");
        for line in [
            "holdfast_sdp_ready 1",
            "holdfast_agent_connected 1",
            "holdfast_dns_rule_endpoints 1",
            "holdfast_damaged_files 0",
        ] {
            ensure!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
        Ok(())
    });
}

/// Starts a proxy without waiting for it to be ready.
fn begin(lab: &Lab, options: &SdpOptions) -> Result<Program> {
    let log = lab.directory().join("log/sdp-one.log");
    Program::start("holdfast-sdp", lab.sdp_command(options)?, &log)
}

/// Waits until the proxy listens, is alive, and says what it waits for, to probes and in `status`.
fn waits(lab: &Lab) -> Result<()> {
    eventually("only rules and endpoints are missing", SOON, || {
        let (code, body) = lab.http(SDP, "/readyz")?;
        ensure!(code == 503, "{code} {body}");
        let needs: Vec<_> = body
            .lines()
            .filter_map(|line| line.split_once(": "))
            .collect();
        let named: Vec<_> = needs.iter().map(|(need, _)| *need).collect();
        ensure!(named == ["rules", "endpoints"], "{body}");
        ensure!(
            needs.iter().all(|(_, why)| !why.is_empty()) && body.contains("cilium_lxc"),
            "{body}"
        );
        Ok(())
    })?;
    let (code, body) = lab.http(SDP, "/healthz")?;
    ensure!(code == 200, "{code} {body}");
    ensure!(lab.metric(SDP, "holdfast_sdp_ready", "")? == 0.0);
    let status = lab.sdp_json("one", &["status"])?;
    let missing = status.get("missing").and_then(Value::as_array);
    let missing: Vec<_> = missing
        .context("missing")?
        .iter()
        .filter_map(|missing| missing.get("need")?.as_str())
        .collect();
    ensure!(
        status.get("ready") == Some(&Value::Bool(false)) && missing == ["rules", "endpoints"],
        "{status}"
    );
    Ok(())
}

fn ready(lab: &Lab, rules: &str) -> Result<()> {
    eventually("ready", SOON, || {
        let (code, body) = lab.http(SDP, "/readyz")?;
        ensure!(code == 200 && body.contains(rules), "{code} {body}");
        Ok(())
    })?;
    let status = lab.sdp_json("one", &["status"])?;
    ensure!(
        status.get("ready") == Some(&Value::Bool(true))
            && status.get("missing") == Some(&serde_json::json!([])),
        "{status}"
    );
    Ok(())
}
