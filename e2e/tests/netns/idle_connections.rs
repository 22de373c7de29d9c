//! Idle connections to the agent's sockets, however many, open no pod and take no proxy's place.

use std::{
    io::{BufRead as _, BufReader},
    net::SocketAddr,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::{
    AgentOptions, Lab, Program, Query, SdpOptions, config, eventually,
    lab::{DNS4, UDP_PORT, at, web4},
    node::AGENT_METRICS,
    policy::{WEB, good_names},
    with_lab,
};
use serde_json::Value;

/// Maximum number of descriptors of the agent, below the number of connections.
const DESCRIPTORS: u64 = 2048;
/// Number of idle connections that one process opens.
const NUMBER: usize = 4000;
/// User and group of the proxies, and a user that owns nothing here.
const PROXY_USER: u32 = 10094;
const OTHER_USER: u32 = 4711;
const FQDNDATA: &str = "127.0.0.1:10095";
/// How long forbidden datagrams are sent, and the pause between two of them.
const LASTS: Duration = Duration::from_secs(6);
const BETWEEN: Duration = Duration::from_millis(20);
const SOON: Duration = Duration::from_secs(20);

/// A process of another user that holds connections.
struct Flood(Child);

impl Flood {
    fn start(lab: &Lab, user: u32, target: [&str; 2]) -> Result<Self> {
        let mut command = lab.node.command("setpriv");
        command.args(["--clear-groups", &format!("--reuid={user}")]);
        command.arg(format!("--regid={user}"));
        command.arg(config::program("lab")?).arg("hold-connections");
        command.args(target).arg(format!("--number={NUMBER}"));
        let mut child = spawn(command)?;
        let output = child.stdout.take().context("its output")?;
        let mut says = String::new();
        BufReader::new(output).read_line(&mut says)?;
        ensure!(says.contains("connections"), "the flood ended: {says:?}");
        println!("{says}");
        Ok(Self(child))
    }
}

fn spawn(mut command: Command) -> Result<Child> {
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped());
    piped.spawn().context("start the flood")
}

impl Drop for Flood {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts the agent with a limit on descriptors, as in a container or unit.
fn start_agent(lab: &Lab, descriptors: u64, options: &AgentOptions) -> Result<Program> {
    let agent = lab.agent_command(options)?;
    let mut command = Command::new("prlimit");
    command.arg(format!("--nofile={descriptors}:{descriptors}"));
    command.arg(agent.get_program()).args(agent.get_args());
    let values = agent.get_envs();
    command.envs(values.filter_map(|(name, value)| Some((name, value?))));
    let log = lab.directory().join("log/agent.log");
    let agent = Program::start("holdfast-agent", command, &log)?;
    eventually("the agent is ready", SOON, || {
        let (code, body) = lab.http(AGENT_METRICS, "/readyz")?;
        ensure!(code == 200, "/readyz: {code} {body}");
        Ok(())
    })?;
    Ok(agent)
}

fn endpoints(lab: &Lab) -> Result<Value> {
    lab.agent_json(&["endpoint", "list"])
}

/// Checks that nothing forbidden passes and that the agent answers while the flood lasts.
fn holds(lab: &Lab, before: &Value) -> Result<()> {
    let forbidden = at(web4(12), UDP_PORT);
    let begin = Instant::now();
    let mut sent = 0;
    while begin.elapsed() < LASTS {
        sent += 1;
        let passed = lab.a.datagram(forbidden, BETWEEN);
        ensure!(
            passed.is_err() && lab.web.visits(forbidden) == 0,
            "forbidden datagram {sent} passed"
        );
    }
    let (code, body) = lab.http(AGENT_METRICS, "/readyz")?;
    ensure!(code == 200, "/readyz: {code} {body}");
    let now = endpoints(lab)?;
    ensure!(now == *before, "endpoints were {before}, are {now}");
    Ok(())
}

fn agent_descriptors(agent: &Program) -> Result<usize> {
    let open = Path::new("/proc").join(agent.id().to_string()).join("fd");
    Ok(std::fs::read_dir(open)?.count())
}

#[test]
fn idle_connections_of_the_proxies_user_open_nothing() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 60);
        lab.write_policy("web.yaml", &good_names())?;
        let agent = start_agent(lab, DESCRIPTORS, &AgentOptions::default())?;
        let one = lab.start_sdp(&SdpOptions::default())?;
        lab.add_endpoint(&lab.a, WEB)?;
        lab.connected("one")?;
        let before = endpoints(lab)?;

        let socket = lab.sdp_socket();
        let target = ["--unix", socket.to_str().context("a path")?];
        let flood = Flood::start(lab, PROXY_USER, target)?;
        holds(lab, &before)?;
        let open = agent_descriptors(&agent)?;
        ensure!(open < 1024, "the agent has {open} descriptors open");
        // The proxy keeps its connection, and another proxy finds a place.
        let sessions = lab.metric(9961, "holdfast_agent_sessions_total", "")?;
        ensure!(sessions == 1.0, "the proxy lost its session: {sessions}");
        let _two = lab.start_sdp(&SdpOptions::new("two", 9971))?;
        lab.connected("two")?;
        one.kill_9()?;
        let query = Query::a("www.good.test", DNS4);
        eventually("the second proxy answers", SOON, || {
            lab.a.ask(&query)?.expect(web4(10))
        })?;
        lab.a.expect_open(at(web4(10), 80))?;

        let listener = "listener=\"sdp\"";
        let count = |name: &str| lab.metric(AGENT_METRICS, name, listener);
        let now = count("holdfast_listener_connections")?;
        ensure!((1.0..1000.0).contains(&now), "{now} connections");
        let rejected = count("holdfast_listener_rejected_total")?;
        ensure!(rejected >= 1000.0, "{rejected} rejected");
        let open = lab.metric(AGENT_METRICS, "holdfast_open_descriptors", "")?;
        ensure!(open > 10.0, "{open} descriptors");
        let limit = lab.metric(AGENT_METRICS, "holdfast_max_descriptors", "")?;
        ensure!(limit == 2048.0, "{limit} descriptors may be open");
        let status = lab.agent(&["status"])?;
        ensure!(!status.contains("descriptors"), "{status}");
        drop(flood);
        Ok(())
    });
}

#[test]
fn idle_connections_of_any_user_over_tcp_open_nothing() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 60);
        lab.write_policy("web.yaml", &good_names())?;
        let options = AgentOptions::default().flag("--enable-standalone-dns-proxy");
        let agent = start_agent(lab, DESCRIPTORS, &options)?;
        lab.add_endpoint(&lab.a, WEB)?;
        let before = endpoints(lab)?;

        let _flood = Flood::start(lab, OTHER_USER, ["--tcp", FQDNDATA])?;
        holds(lab, &before)?;
        let open = agent_descriptors(&agent)?;
        ensure!(open < 1024, "the agent has {open} descriptors open");
        let sdp = SdpOptions {
            native: false,
            ..SdpOptions::default()
        };
        let address: SocketAddr = FQDNDATA.parse()?;
        let _sdp = lab.start_sdp(&sdp.flag(&format!("--agent-address=tcp://{address}")))?;
        let query = Query::a("www.good.test", DNS4);
        eventually("names open over FQDNData", SOON, || {
            lab.a.ask(&query)?.expect(web4(10))?;
            lab.a.expect_open(at(web4(10), 80))
        })?;
        holds(lab, &before)
    });
}

/// With a limit that is too low for its own work, the agent serves fewer connections and says so.
#[test]
fn a_limit_on_descriptors_that_is_too_low_is_named() {
    with_lab(|lab| {
        let _agent = start_agent(lab, 512, &AgentOptions::default())?;
        let status = lab.agent(&["status"])?;
        ensure!(
            status.contains("PROBLEM") && status.contains("LimitNOFILE="),
            "{status}"
        );
        let socket = lab.sdp_socket();
        let target = ["--unix", socket.to_str().context("a path")?];
        let _flood = Flood::start(lab, PROXY_USER, target)?;
        let (code, _) = lab.http(AGENT_METRICS, "/readyz")?;
        ensure!(code == 200, "/readyz: {code}");
        lab.agent(&["status"])?;
        Ok(())
    });
}
