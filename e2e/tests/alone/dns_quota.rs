//! A pod that floods the DNS proxy is limited to its quota. Another pod loses no query. `status`,
//! `observe` and the metrics name the flooding pod.
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::lab::{DNS4, web4};
use holdfast_e2e::policy::{CLIENT, dns, egress};
use holdfast_e2e::{AgentOptions, Query, eventually, with_lab};
use serde_json::Value;

/// A rate that debug builds of proxy and server can serve on a busy machine.
const QUOTA: &str = "--endpoint-dns-quota=500";
const SOON: Duration = Duration::from_secs(10);
/// Queries of the other pod.
const ASKED: u32 = 100;

#[test]
fn a_flood_of_fresh_names_costs_another_pod_no_query() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 60);
        lab.write_policy(
            "client.yaml",
            &egress("client", "client", &dns("*.good.test")),
        )?;
        let options = AgentOptions::default().flag(QUOTA);
        let rules = egress("web", "web", &dns("*.good.test"));
        let _programs = lab.start_with(&rules, &options)?;
        lab.add_endpoint(&lab.b, CLIENT)?;
        let attacker = lab.endpoint_id(&lab.a)?;

        let over = AtomicBool::new(false);
        let lost = std::thread::scope(|scope| -> Result<u32> {
            let flood = scope.spawn(|| lab.a.netns.enter(|| flood(&over)));
            eventually("the flood reaches its quota", SOON, || {
                ensure!(beyond(&lab.agent_json(&["status"])?, attacker)? > 10_000);
                Ok(())
            })?;
            let query = Query::a("www.good.test", DNS4);
            let lost = (0..ASKED).filter(|_| lab.b.ask(&query).is_err()).count();
            over.store(true, Ordering::Relaxed);
            flood.join().expect("the flood's thread")??;
            Ok(u32::try_from(lost)?)
        })?;
        assert_eq!(lost, 0, "of {ASKED} queries of the other pod");

        let status = lab.agent_json(&["status"])?;
        let quotas = status["quotas"].as_array().context("quotas")?;
        ensure!(
            quotas.iter().all(|quota| quota["endpoint"] == attacker),
            "another pod reached a quota: {quotas:?}"
        );
        ensure!(lab.agent(&["status"])?.contains("packets_to_proxy"));
        let seen = lab.agent(&["observe"])?;
        let cut = format!("endpoint {attacker} egress over_quota: UDP");
        ensure!(seen.contains(&cut), "no {cut} in {seen}");
        let dropped = lab.metric(9962, "holdfast_drop_count_total", "reason=\"over_quota\"")?;
        ensure!(dropped > 10_000.0, "{dropped} packets counted");
        Ok(())
    });
}

fn beyond(status: &Value, endpoint: u64) -> Result<u64> {
    let quotas = status["quotas"].as_array().context("quotas")?;
    let quota = quotas
        .iter()
        .find(|quota| quota["endpoint"] == endpoint && quota["quota"] == "packets_to_proxy");
    let beyond = quota.map_or(Some(0), |quota| quota["beyond"].as_u64());
    beyond.context("beyond")
}

/// Sends queries for fresh names as fast as one thread can, until `over` is set.
fn flood(over: &AtomicBool) -> Result<()> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    let server = SocketAddr::new(DNS4, 53);
    let mut query = Query::a("fresh0000000000.good.test", DNS4).encode(7)?;
    // Digits of the first label, after header and its length.
    let digits = 12 + 1 + 5;
    for number in 0_u64.. {
        if over.load(Ordering::Relaxed) {
            break;
        }
        let text = format!("{number:010}");
        query
            .get_mut(digits..digits + text.len())
            .context("the name is in the query")?
            .copy_from_slice(text.as_bytes());
        // A full queue of the interface drops some queries. The flood goes on.
        let _ = socket.send_to(&query, server);
    }
    Ok(())
}
