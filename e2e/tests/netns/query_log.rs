//! The query log of a live proxy, written by the unprivileged user: the queries of a pod and their
//! ends, a file that is moved away, and the last lines of a drain.
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::dns::zone;
use holdfast_e2e::lab::{DNS4, web4};
use holdfast_e2e::policy::{WEB, good_names};
use holdfast_e2e::{AgentOptions, Query, SdpOptions, eventually, with_lab};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(10);

/// Lines of the log at `path` about queries for `name`.
fn about(path: &Path, name: &str) -> Result<Vec<Value>> {
    let text = fs::read_to_string(path).with_context(|| format!("{}", path.display()))?;
    let lines = text.lines().map(serde_json::from_str::<Value>);
    let mut lines = lines.collect::<Result<Vec<_>, _>>()?;
    lines.retain(|line| line.get("name") == Some(&name.into()));
    Ok(lines)
}

fn expect(line: &Value, fields: &Value) -> Result<()> {
    for (key, value) in fields.as_object().context("fields")? {
        ensure!(line.get(key) == Some(value), "{key} is not {value}: {line}");
    }
    Ok(())
}

#[test]
fn queries_of_pods_are_logged_and_the_file_may_be_moved() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        lab.zone.set("last.good.test", &[web4(11)], 600);
        lab.zone.set("lost.good.test", &[web4(12)], 600);
        lab.zone.manner("lost.good.test", zone::Manner::Lost);
        lab.write_policy("web.yaml", &good_names())?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        let log = lab.directory().join("queries/log.jsonl");
        let options = SdpOptions::default()
            .flag("--query-log=all")
            .flag("--drain-timeout=1s")
            .flag(&format!("--query-log-file={}", log.display()));
        let sdp = lab.start_sdp(&options)?;
        let id = lab.add_endpoint(&lab.a, WEB)?;
        lab.connected("one")?;

        let ask = |name: &str| lab.a.ask(&Query::a(name, DNS4));
        ask("www.good.test")?.expect(web4(10))?;
        lab.a
            .ask(&Query::a("www.good.test", DNS4).tcp())?
            .expect(web4(10))?;
        ask("www.bad.test")?.expect_refused()?;
        let who = json!({"endpoint": id, "pod": lab.a.v4.to_string(), "type": "A"});
        eventually("three queries are logged", SOON, || {
            let allowed = about(&log, "www.good.test.")?;
            let [udp, tcp] = &allowed[..] else {
                anyhow::bail!("{allowed:?}");
            };
            for (line, protocol) in [(udp, "udp"), (tcp, "tcp")] {
                expect(line, &who)?;
                let how = json!({
                    "protocol": protocol, "verdict": "allowed", "rule": "*.good.test.",
                    "rcode": "NOERROR", "answers": 1, "server": DNS4.to_string(), "port": 53,
                });
                expect(line, &how)?;
                ensure!(line.get("selector").is_some(), "{line}");
            }
            expect(udp, &json!({"result": "realised"}))?;
            let micros = |key| udp.get(key).and_then(Value::as_u64);
            let (held, latency) = (micros("held_us"), micros("latency_us"));
            ensure!(held.is_some() && latency >= held, "{udp}");
            let denied = about(&log, "www.bad.test.")?;
            let [denied] = &denied[..] else {
                anyhow::bail!("{denied:?}");
            };
            expect(denied, &who)?;
            let how = json!({
                "verdict": "denied", "result": "denied_name", "rcode": "NXDOMAIN",
                "server_identity": udp.get("server_identity"), "identity": udp.get("identity"),
            });
            expect(denied, &how)
        })?;

        let moved = log.with_extension("1");
        fs::rename(&log, &moved)?;
        eventually("a new file is opened", SOON, || {
            ask("www.bad.test")?.expect_refused()?;
            ensure!(!about(&log, "www.bad.test.")?.is_empty(), "no line");
            Ok(())
        })?;
        ensure!(lab.metric(9961, "holdfast_query_log_errors_total", "")? == 0.0);
        ensure!(lab.metric(9961, "holdfast_query_log_dropped_total", "")? == 0.0);
        ask("last.good.test")?.expect(web4(11))?;
        let lost = Query::a("lost.good.test", DNS4).within(Duration::from_millis(100));
        lab.a.ask(&lost).expect_err("a silent server");
        let left = sdp.terminate(SOON)?;
        ensure!(left.success(), "{left}");
        let last = about(&log, "last.good.test.")?;
        ensure!(last.len() == 1, "{last:?}");
        let [cut] = &about(&log, "lost.good.test.")?[..] else {
            anyhow::bail!("the query in flight is not logged exactly once");
        };
        expect(cut, &json!({"result": "cut", "answers": 0}))?;
        ensure!(cut.get("rcode").is_none(), "{cut}");
        Ok(())
    });
}
