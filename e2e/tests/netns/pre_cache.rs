//! `--tofqdns-pre-cache`: a name is open to pods that never looked it up. Errors in the file are
//! reported and affect only their entries.
use anyhow::ensure;
use holdfast_e2e::lab::{at, web4, web6};
use holdfast_e2e::policy::{WEB, good_names};
use holdfast_e2e::{AgentOptions, SdpOptions, with_lab};
use serde_json::json;

const LATER: &str = "2100-01-01T00:00:00Z";

#[test]
fn a_name_in_the_file_is_open_without_a_query() {
    with_lab(|lab| {
        let file = lab.directory().join("pre-cache.json");
        let flag = format!("--tofqdns-pre-cache={}", file.display());
        let entry = |name: &str, address: std::net::IpAddr, until: &str| {
            json!({
                "fqdn": name, "lookup-time": "2026-01-01T00:00:00Z", "expiration-time": until,
                "ttl": 60, "ips": [address],
            })
        };
        let mut entries = vec![
            entry("www.good.test", web4(10), LATER),
            entry("www.good.test.", web6(10), LATER),
            entry("old.good.test", web4(11), "2026-01-01T00:01:00Z"),
            entry("www.bad.test", web4(12), LATER),
        ];
        std::fs::write(&file, serde_json::to_vec(&entries)?)?;
        lab.write_policy("good.yaml", &good_names())?;
        let agent = lab.start_agent(&AgentOptions::default().flag(&flag))?;
        let _sdp = lab.start_sdp(&SdpOptions::default())?;
        lab.add_endpoint(&lab.a, WEB)?;
        lab.a.expect_open(at(web4(10), 80))?;
        lab.a.expect_open(at(web6(10), 80))?;
        lab.a.expect_closed(at(web4(11), 80))?;
        lab.a.expect_closed(at(web4(12), 80))?;
        let id = lab.endpoint_id(&lab.a)?.to_string();
        let why = lab.agent(&["why", &id, &format!("{}:80", web4(10))])?;
        ensure!(why.contains("www.good.test"), "{why}");
        let stream = lab.a.stream(at(web4(10), 80))?;

        agent.kill_9()?;
        entries.push(json!({"fqdn": "half.good.test", "expiration-time": "soon"}));
        std::fs::write(&file, serde_json::to_vec(&entries)?)?;
        let _agent = lab.start_agent(&AgentOptions::default().flag(&flag))?;
        stream.expect_alive()?;
        lab.a.expect_open(at(web6(10), 80))?;
        let status = lab.agent(&["status"])?;
        for part in ["pre-cache.json has", "entry 5 (\"half.good.test\")", "soon"] {
            ensure!(status.contains(part), "{part}: {status}");
        }
        Ok(())
    });
}
