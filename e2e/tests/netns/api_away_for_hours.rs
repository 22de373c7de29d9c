//! An API server that is away for three hours changes nothing on a node: what was read stays in force
//! while its pods look up names and connect. When it is back, the agent is up to date within
//! its retry time, and asks for each kind once.
//!
//! The hours pass in the agent alone: libfaketime runs its clocks faster, and shortens its waits.
//! The kernel's clock is not changed, so the test proves nothing about connections' lifetimes.
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::apiserver::{ApiServer, Options, pod, web_policy};
use holdfast_e2e::lab::{DNS4, at, web4};
use holdfast_e2e::node::AGENT_METRICS;
use holdfast_e2e::{AgentOptions, Lab, Program, Query, Reply, config, eventually, with_lab};
use serde_json::{Value, json};

/// Debian's package `faketime`, which `cargo xtask setup` asks for.
const LIBRARY: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1";
/// How much faster the agent's clocks run.
const SPEED: u32 = 120;
/// How long the server is away, by the agent's clock.
const AWAY: Duration = Duration::from_secs(3 * 3600);
const SOON: Duration = Duration::from_secs(20);
/// Server of the name that policy allows.
const NAMED: u8 = 10;
/// Server that policy allows by its labels.
const DB: u8 = 11;
/// Servers that policy does not allow.
const DENIED: [u8; 2] = [12, 13];
/// Maximum number of requests after the server's return: one for each kind, some for the object
/// about the node, and requests that are refused until the agent has read the token's file again.
const REQUESTS: usize = 60;

/// Web may look up and reach names of good.test, and databases.
fn policy() -> Value {
    web_policy(&json!([
        {"toEndpoints": [{"matchLabels": {"app": "db"}}]},
        {
            "toCIDR": [format!("{DNS4}/32")],
            "toPorts": [{
                "ports": [{"port": "53", "protocol": "ANY"}],
                "rules": {"dns": [{"matchPattern": "*.good.test"}]},
            }],
        },
        {"toFQDNs": [{"matchPattern": "*.good.test"}]},
    ]))
}

fn remote(name: &str, app: &str, host: u8) -> Value {
    pod(
        "default",
        name,
        json!({"app": app}),
        "n2",
        &[&web4(host).to_string()],
    )
}

fn cluster(lab: &Lab) -> Result<ApiServer> {
    let directory = lab.directory().join("apiserver");
    let api = ApiServer::start(Some(&lab.node), &directory, Options::default())?;
    let own = [lab.a.v4.to_string(), lab.a.v6.to_string()];
    let own: Vec<&str> = own.iter().map(String::as_str).collect();
    for object in [
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default"}}),
        json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": "n1"}, "status": {"addresses": []},
        }),
        policy(),
        pod("default", "web", json!({"app": "web"}), "n1", &own),
        remote("db", "db", DB),
        remote("other", "other", DENIED[0]),
    ] {
        api.put(object)?;
    }
    Ok(api)
}

/// Starts an agent with its proxy. The agent's clocks run faster.
fn start(lab: &Lab, api: &ApiServer) -> Result<Program> {
    ensure!(
        Path::new(LIBRARY).exists(),
        "{LIBRARY} is missing: install the package faketime (cargo xtask setup)"
    );
    let options = AgentOptions {
        program: Some(config::program("holdfast-agent")?),
        ..AgentOptions::default()
    };
    let kubeconfig = api.files().kubeconfig.display().to_string();
    let options = options
        .with_builtin()
        .flag("--kubernetes")
        .flag(&format!("--kubeconfig={kubeconfig}"))
        .flag("--node-name=n1");
    let mut command = lab.agent_command(&options)?;
    command.env("LD_PRELOAD", LIBRARY);
    command.env("FAKETIME", format!("+0 x{SPEED}"));
    command.env("HOLDFAST_LOG_LEVEL", "info");
    let log = lab.directory().join("log/agent.log");
    let agent = Program::start("holdfast-agent", command, &log)?;
    eventually("the agent is ready", SOON, || {
        let status = lab.agent_json(&["status"])?;
        ensure!(status["ready"] == true, "{status}");
        Ok(())
    })?;
    Ok(agent)
}

/// Entries of the maps that policy is written to.
fn maps(lab: &Lab) -> Result<Vec<Value>> {
    let endpoint = lab.endpoint_id(&lab.a)?.to_string();
    let dumps = [
        vec!["ipcache", "list"],
        vec!["lxc", "list"],
        vec!["policy", "list", &endpoint],
    ];
    dumps.iter().map(|dump| lab.bpf_json(dump)).collect()
}

/// The answer to a query. A query without an answer is repeated: the proxy gives a server 10 s of its own
/// clock, which a busy machine may exceed.
fn answer(lab: &Lab, name: &str) -> Result<Reply> {
    eventually("the query is answered", SOON, || {
        lab.a.ask(&Query::a(name, DNS4))
    })
}

/// Checks what the pod may do and may not do.
fn judged(lab: &Lab) -> Result<()> {
    answer(lab, "www.good.test")?.expect(web4(NAMED))?;
    answer(lab, "www.bad.test")?.expect_refused()?;
    for host in [NAMED, DB] {
        lab.a.expect_open(at(web4(host), 80))?;
    }
    for host in DENIED {
        lab.a.expect_closed(at(web4(host), 80))?;
    }
    Ok(())
}

fn stale(lab: &Lab) -> Result<f64> {
    let name = "holdfast_kubernetes_watch_stale_seconds";
    eventually("the agent answers", SOON, || {
        lab.metric(AGENT_METRICS, name, "kind=\"Pod\"")
    })
}

#[test]
#[ignore = "takes two minutes, and a machine that does nothing else: the agent's limits are shortened with its clocks"]
fn an_api_server_that_is_away_for_three_hours_changes_nothing() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(NAMED)], 300);
        lab.zone.set("www.bad.test", &[web4(DENIED[1])], 300);
        let api = cluster(lab)?;
        let mut agent = start(lab, &api)?;
        let netns = lab.a.netns.name();
        eventually("the endpoint is added", SOON, || {
            lab.agent(&["endpoint", "add", "--netns", netns, "--pod", "default/web"])
        })?;
        eventually("policy is in force", SOON, || judged(lab))?;
        let stays = lab.a.stream(at(web4(DB), 80))?;
        let before = maps(lab)?;

        api.away();
        let begin = Instant::now();
        let mut looks = 0;
        while begin.elapsed() * SPEED < AWAY || stale(lab)? < AWAY.as_secs_f64() {
            judged(lab)?;
            let now = maps(lab)?;
            ensure!(
                now == before,
                "the maps changed: {now:?}, before: {before:?}"
            );
            looks += 1;
        }
        ensure!(looks > 5, "{looks} looks only");
        agent.check_alive()?;
        let status = eventually("the agent answers", SOON, || lab.agent_json(&["status"]))?;
        ensure!(status["ready"] == true, "{status}");
        stays.expect_alive()?;

        // The server is back, with another token in the agent's file, and with changes.
        api.expire_token();
        api.rotate_token(2)?;
        api.delete("pods", "default", "db")?;
        api.put(remote("db-2", "db", DENIED[1]))?;
        api.forget_answered();
        api.back()?;
        let back = Instant::now();
        eventually("every watch follows", SOON, || {
            let status = lab.agent_json(&["status"])?;
            let watches = status["cluster"]["watches"].as_array().context("watches")?;
            let stale = watches.iter().find(|watch| watch["stale_seconds"] != 0);
            ensure!(stale.is_none(), "{stale:?}");
            Ok(())
        })?;
        let took = back.elapsed();
        let answered = api.answered();
        let unauthorized = api.unauthorized();
        let mut counts = BTreeMap::new();
        for answer in &answered {
            let key = (answer.verb, answer.resource.as_str(), answer.code);
            *counts.entry(key).or_insert(0_usize) += 1;
        }
        let requests = answered.len() + unauthorized;
        ensure!(
            requests <= REQUESTS,
            "{requests} requests, {unauthorized} of them without a token: {counts:?}"
        );
        // The watches go on where they were: nothing is listed again.
        ensure!(
            !counts.keys().any(|(verb, ..)| *verb == "list"),
            "{counts:?}"
        );
        eventually("the changes are in force", SOON, || {
            lab.a.expect_open(at(web4(DENIED[1]), 80))?;
            lab.a.expect_closed(at(web4(DB), 80))
        })?;
        println!("{looks} looks, {requests} requests in {took:?}: {counts:?}");
        Ok(())
    });
}
