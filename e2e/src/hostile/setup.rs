//! A lab with an attacker, a victim, and a DNS server for each.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, UdpSocket};
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use anyhow::Result;
use nix::sys::signal::Signal;

use super::Size;
use super::attack::{REACHABLE, SERVER, SILENT, ZONE};
use crate::bridge::Bridge;
use crate::dns::probe::Query;
use crate::lab::Lab;
use crate::node::{AGENT_METRICS, AgentOptions, SdpOptions};
use crate::nsd;
use crate::policy::{WEB, cidr, dns_to, egress, names};
use crate::process::Program;
use crate::traffic::names::{self as zone, Names};
use crate::traffic::{Client, Spec, Traffic};
use crate::wait::eventually;

pub(super) const ATTACKER: &str = "k8s:app=attacker,k8s:io.kubernetes.pod.namespace=default";
/// IPv4 address of the DNS server that only pod B queries.
pub(super) const SERVER4: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2));
/// IPv6 address of the same server.
pub(super) const SERVER6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0x53, 0, 0, 0, 0, 2));
/// Names of B's steady load.
pub(super) const LOAD: Names = Names {
    hot: 500,
    all: 20_000,
    others_percent: 5,
};
/// Names with numbers from [`LOAD`]`.all` to this one are queried once, to connect to their
/// addresses.
const ALL_NAMES: u32 = 60_000;
/// Number of addresses of the name `big`.
const BIG: u32 = 4_000;
/// The proxy's `--tofqdns-proxy-response-max-delay`. An answer that takes longer was released
/// before its addresses were open.
pub(super) const MAX_DELAY: Duration = Duration::from_secs(1);
/// Names of the attacker with 1,000 addresses each.
pub(super) const LARGE_NAMES: u32 = 64;
/// How long B waits for answers at the end.
const LOST_AFTER: Duration = Duration::from_secs(5);
/// Longest wait for a program to end after a signal.
const ENDS: Duration = Duration::from_secs(15);
const FIRST_ANSWER: Duration = Duration::from_secs(15);
/// Port of the server that sends first.
pub(super) const PUSH_PORT: u16 = 8081;
/// TCP port of the proxy's metrics.
pub(super) const SDP_METRICS: u16 = 9961;

/// A running agent, one running proxy, and two pods under policy.
#[derive(Debug)]
pub struct Setup {
    // Fields are dropped in this order: programs before the lab.
    pub(super) sdp: Program,
    pub(super) agent: Program,
    _servers: [Program; 2],
    _silent: (UdpSocket, TcpListener),
    /// A server of B that sends first, on [`PUSH_PORT`].
    pub(super) push: TcpListener,
    /// The lab; pod a attacks, pod b works.
    pub lab: Lab,
    pub(super) size: Size,
    /// Number of the next fresh name.
    pub(super) fresh: AtomicU32,
}

impl Setup {
    /// Makes the setup. The node routes both pods.
    pub fn new(size: &Size) -> Result<Self> {
        Self::of(Lab::new()?, size)
    }

    /// Like [`Self::new`], with both pods at ports of one bridge.
    pub fn on_bridge(size: &Size) -> Result<Self> {
        let lab = Lab::new()?;
        Bridge::of_pods(&lab, "cni0", &[&lab.a, &lab.b])?;
        Self::of(lab, size)
    }

    fn of(lab: Lab, size: &Size) -> Result<Self> {
        lab.world.batch(&format!(
            "address add {SERVER}/32 dev eth0\n\
             address add {SILENT}/32 dev eth0\n\
             route add local 100.64.0.0/12 dev lo\n\
             route add blackhole {REACHABLE}\n\
             route add local 2001:db8:64::/96 dev lo"
        ))?;
        lab.world.sysctl(&[("net.core.somaxconn", "16384")])?;
        // An eighth of the usual number of ports for connections to one server, so that an attack
        // can use them up within seconds.
        lab.node
            .sysctl(&[("net.ipv4.ip_local_port_range", "32768 36863")])?;
        for pod in [&lab.a, &lab.b] {
            pod.netns
                .sysctl(&[("net.ipv4.ip_local_port_range", "12000 65000")])?;
        }
        let silent = lab.world.enter(|| -> Result<_> {
            let udp = UdpSocket::bind((SILENT, 53))?;
            let tcp = TcpListener::bind((SILENT, 53))?;
            // Connections complete in the kernel; no process accepts them.
            socket2::SockRef::from(&tcp).listen(16_000)?;
            Ok((udp, tcp))
        })??;
        let any = (Ipv6Addr::UNSPECIFIED, PUSH_PORT);
        let push = lab.world.enter(|| TcpListener::bind(any))??;
        let load = Names {
            all: ALL_NAMES,
            ..LOAD
        };
        let servers = [
            nsd::start(
                &lab,
                &[SERVER4, SERVER6],
                zone::ZONE,
                &zone::zone_file(&load),
            )?,
            nsd::start_in(
                &lab,
                &lab.world,
                "nsd-attacker",
                &[SERVER],
                ZONE,
                &attacker_zone(),
            )?,
        ];
        lab.write_policy("b.yaml", &egress("good-names", "web", &victim_rules()))?;
        lab.write_policy(
            "a.yaml",
            &egress("flood-names", "attacker", &attacker_rules()),
        )?;
        let agent = start_agent(&lab)?;
        let sdp = start_proxy(&lab)?;
        lab.add_endpoint(&lab.a, ATTACKER)?;
        lab.add_endpoint(&lab.b, WEB)?;
        lab.connected("one")?;
        for server in [SERVER4, SERVER6] {
            for query in [
                Query::a(&zone::name(0), server),
                Query::a(&zone::name(0), server).tcp(),
            ] {
                eventually("a first answer", FIRST_ANSWER, || {
                    lab.b.ask(&query)?.expect(zone::v4(0).into())
                })?;
            }
        }
        Ok(Self {
            sdp,
            agent,
            _servers: servers,
            _silent: silent,
            push,
            lab,
            size: size.clone(),
            fresh: AtomicU32::new(LOAD.all),
        })
    }
}

impl Setup {
    /// Starts the load of pod B.
    pub(super) fn load_of_b(&self) -> Result<Traffic> {
        Traffic::start(&Spec {
            clients: vec![Client::of(&self.lab.b)],
            servers: vec![SERVER4, SERVER6],
            udp_rate: self.size.udp_rate,
            tcp_rate: self.size.tcp_rate,
            lasting: 1,
            names: LOAD,
            lost_after: LOST_AFTER,
        })
    }

    /// Ends the agent and starts it again, with a built-in proxy or without.
    pub(super) fn replace_agent(&mut self, builtin: bool) -> Result<()> {
        self.agent.signal(Signal::SIGTERM)?;
        self.agent.wait(ENDS)?;
        self.agent = start_agent_with(&self.lab, builtin)?;
        self.lab.connected("one")
    }

    /// Kills the proxy with SIGKILL and waits until it has ended.
    pub(super) fn kill_proxy(&mut self) -> Result<()> {
        self.sdp.signal(Signal::SIGKILL)?;
        self.sdp.wait(ENDS)?;
        Ok(())
    }

    /// Starts the proxy again and waits until it is connected to the agent.
    pub(super) fn start_proxy(&mut self) -> Result<()> {
        self.sdp = start_proxy(&self.lab)?;
        self.lab.connected("one")
    }
}

/// The proxy, with a log level at which a flood does not fill the log.
fn start_proxy(lab: &Lab) -> Result<Program> {
    let delay = format!(
        "--tofqdns-proxy-response-max-delay={}ms",
        MAX_DELAY.as_millis()
    );
    let options = SdpOptions::new("one", SDP_METRICS).flag(&delay);
    let mut command = lab.sdp_command(&options)?;
    command.env("HOLDFAST_LOG_LEVEL", "info");
    let log = lab.directory().join("log/sdp-one.log");
    let mut sdp = Program::start("holdfast-sdp", command, &log)?;
    lab.wait_ready(&mut sdp, SDP_METRICS)?;
    Ok(sdp)
}

/// The agent, with a log level at which a flood does not fill the log.
pub(super) fn start_agent(lab: &Lab) -> Result<Program> {
    start_agent_with(lab, false)
}

fn start_agent_with(lab: &Lab, builtin: bool) -> Result<Program> {
    let mut options = AgentOptions {
        builtin,
        ..AgentOptions::default()
    }
    .flag("--enable-standalone-dns-proxy");
    if cfg!(debug_assertions) {
        // A debug build serves about a fifth of the queries of a release build, so its quota is a
        // fifth of the default.
        options = options.flag("--endpoint-dns-quota=2000");
    }
    let mut command = lab.agent_command(&options)?;
    command.env("HOLDFAST_LOG_LEVEL", "info");
    let log = lab.directory().join("log/agent.log");
    let mut agent = Program::start("holdfast-agent", command, &log)?;
    lab.wait_ready(&mut agent, AGENT_METRICS)?;
    Ok(agent)
}

fn victim_rules() -> String {
    let servers = [format!("{SERVER4}/32"), format!("{SERVER6}/128")];
    dns_to("*.good.test", &[servers[0].as_str(), servers[1].as_str()])
        + &names("*.good.test")
        + &format!(
            r#"
- toFQDNs: [{{matchPattern: "*.good.test"}}]
  toPorts:
  - ports: [{{port: "{PUSH_PORT}", protocol: TCP}}]
"#
        )
}

fn attacker_rules() -> String {
    let servers = [format!("{SERVER}/32"), format!("{SILENT}/32")];
    let pattern = format!("*.{ZONE}");
    let of_b = format!("{SERVER4}/32");
    dns_to("*.good.test", &[of_b.as_str()])
        + &dns_to(&pattern, &[servers[0].as_str(), servers[1].as_str()])
        + &names(&pattern)
        + &cidr(REACHABLE)
        + &format!(
            r#"
- toCIDR: ["{REACHABLE}"]
  toPorts:
  - ports: [{{port: "7777", protocol: UDP}}]
"#
        )
}

/// Every name has one address, except `big` with [`BIG`] and the `large` names with 1,000 each.
fn attacker_zone() -> String {
    let mut records = format!(
        "$ORIGIN {ZONE}.\n$TTL 600\n@ IN SOA ns hostmaster 1 3600 600 86400 60\n@ IN NS ns\n\
         ns IN A {SERVER}\n* IN A 100.96.0.1\n"
    );
    let first = Ipv4Addr::new(100, 96, 1, 0).to_bits();
    for number in 0..BIG {
        let address = Ipv4Addr::from_bits(first + number);
        records.push_str(&format!("big IN A {address}\n"));
    }
    for name in 0..LARGE_NAMES {
        for number in 0..1_000 {
            let address = Ipv4Addr::from_bits(first + (name + 1) * 4_096 + number);
            records.push_str(&format!("large{name} IN A {address}\n"));
        }
    }
    records
}
