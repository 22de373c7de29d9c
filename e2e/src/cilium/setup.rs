//! Setup of the tests under a stand-in agent.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::keepalive::Timing;
use super::world::{Rule, World};
use super::{CiliumAgent, Manner, place};
use crate::lab::{DNS4, DNS6, Lab, web4};
use crate::{Pod, Program, Query, SdpOptions, eventually};

/// Longest wait, on a busy machine, for things that usually take no time.
pub const SOON: Duration = Duration::from_secs(15);
/// How long a query waits before the next is sent.
const HASTY: Duration = Duration::from_millis(20);
/// Promised time from the start of a proxy to its first right answer.
const PROMPT: Duration = Duration::from_secs(1);
/// Security identity of pod a.
pub const WEB: u32 = 41_001;
/// Security identity of pod b.
pub const CLIENT: u32 = 41_002;
/// Identity of the DNS server.
pub const SERVER: u32 = 41_053;

/// Keys that Cilium's chart writes, and some keys of the agent that clusters add.
const CONFIG_MAP: &[(&str, &str)] = &[
    ("debug", "false"),
    ("enable-ipv4", "true"),
    ("enable-ipv6", "true"),
    ("enable-l7-proxy", "true"),
    ("enable-standalone-dns-proxy", "true"),
    ("standalone-dns-proxy-server-port", "10095"),
    ("tofqdns-proxy-port", "10094"),
    ("tofqdns-enable-dns-compression", "true"),
    ("tofqdns-min-ttl", "0"),
    ("dnsproxy-lock-count", "131"),
    ("cluster-name", "default"),
];

/// Both pods; pod a may ask for `*.good.test`.
pub fn world(lab: &Lab) -> World {
    World {
        endpoints: vec![
            place::endpoint(&lab.a, WEB),
            place::endpoint(&lab.b, CLIENT),
        ],
        rules: [(WEB, vec![Rule::new(SERVER, &["*.good.test"])])].into(),
        prefixes: vec![
            (DNS4.into(), SERVER),
            (DNS6.into(), SERVER),
            ("0.0.0.0/0".parse().expect("a prefix"), 9),
            ("::/0".parse().expect("a prefix"), 10),
        ],
    }
}

/// An agent with shorter limits than Cilium's, so that a test reaches them soon.
pub fn hurried() -> Manner {
    Manner {
        timing: Timing::hurried(20),
        pause: Duration::from_millis(50),
        ..Manner::default()
    }
}

/// The proxy as the chart starts it: with a ConfigMap, and without an agent's address.
pub fn options(lab: &Lab, name: &str) -> Result<SdpOptions> {
    let keys = lab.directory().join(format!("config-{name}"));
    place::mount_config_map(&keys, CONFIG_MAP)?;
    let sdp = SdpOptions {
        native: false,
        ..SdpOptions::new(name, 9971)
    };
    Ok(sdp.flag(&format!("--config-dir={}", keys.display())))
}

/// Asks for an A record over UDP.
pub fn ask(pod: &Pod, name: &str, server: IpAddr) -> Result<crate::Reply> {
    pod.ask(&Query::a(name, server))
}

/// Starts a proxy. Also returns how long its first right answer took.
pub fn first_answer(lab: &Lab, options: &SdpOptions, query: &Query) -> Result<(Program, Duration)> {
    let command = lab.sdp_command(options)?;
    let log: PathBuf = lab
        .directory()
        .join(format!("log/sdp-{}.log", options.name));
    let start = Instant::now();
    let mut sdp = Program::start("holdfast-sdp", command, &log)?;
    let hasty = query.clone().within(polling::stretched(HASTY));
    // A debug build needs many seconds for the snapshot of a large cluster.
    eventually("a first right answer", SOON * 4, || {
        sdp.check_alive()?;
        lab.a.ask(&hasty)?.expect(web4(10))
    })?;
    Ok((sdp, start.elapsed()))
}

/// Fails if a first right answer took longer than the proxy promises: a second from its start.
pub fn expect_prompt(took: Duration) -> Result<()> {
    ensure!(
        took < polling::stretched(PROMPT),
        "first right answer after {took:?}"
    );
    Ok(())
}

/// Fails if the client did something that the real agent would not have accepted.
pub fn expect_no_offence(agent: &CiliumAgent) -> Result<()> {
    let seen = agent.seen();
    ensure!(seen.violations.is_empty(), "{:?}", seen.violations);
    ensure!(
        (
            seen.client_pings,
            seen.too_many_pings,
            seen.unanswered_pings
        ) == (0, 0, 0),
        "pings of the client: {}, sent away: {}, pings unanswered: {}",
        seen.client_pings,
        seen.too_many_pings,
        seen.unanswered_pings
    );
    Ok(())
}
