//! A lab with four client pods, a fast DNS server, and a redirect.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use agent_datapath::events::Counters;
use anyhow::Result;
use shared_maps::steering::{LINK_NAME, SLOTS_NAME, SOCKS_NAME};
use shared_maps::user::{Globals, monotonic_ns};

use super::{Size, services};
use crate::bridge::Bridge;
use crate::dns::probe::Query;
use crate::lab::{DNS4, DNS6, Lab};
use crate::node::{AgentOptions, SdpOptions};
use crate::pod::Pod;
use crate::policy::{WEB, dns_to, egress, names};
use crate::process::Program;
use crate::service::{self, service4, service6};
use crate::traffic::names::{self as zone, Names};
use crate::traffic::{Client, Report, Spec, Traffic};
use crate::wait::eventually;
use crate::{nsd, shell};

/// The DNS server under load.
pub(super) const SERVER4: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2));
/// IPv6 address of the same server.
pub(super) const SERVER6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0x53, 0, 0, 0, 0, 2));
/// Port that every proxy listens on.
const PROXY_PORT: u16 = 10_094;
/// Longest wait for a program to end after a signal.
pub(super) const LEAVES: Duration = Duration::from_secs(15);
/// A query without an answer after this time is lost.
const LOST_AFTER: Duration = Duration::from_secs(5);
const FILTERS: &str = "--enable-tcx=false";
const TRANSPARENT: &str = "--dnsproxy-enable-transparent-mode";
/// The lab's servers are outside of the cluster.
const OUTSIDE: &str = "--transparent-mode-outside-cluster";
const SERVICE_CIDRS: &str = "--k8s-service-cidr=10.96.0.0/16,fd96::/64";
pub(super) const NAMES: Names = Names {
    hot: 500,
    all: 20_000,
    others_percent: 5,
};

/// How packets get to the proxies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Redirect {
    /// Marked by our programs, routed to local delivery.
    Own,
    /// Like [`Self::Own`], with programs attached by tc filters, as on kernels before 6.6.
    Filters,
    /// Like [`Self::Own`], but the proxies' queries have the pods' addresses.
    Transparent,
    /// Marked by Holdfast's programs, then redirected by TPROXY of nftables, as is Cilium's
    /// default.
    Tproxy,
    /// Like [`Self::Tproxy`], under an agent without steering: the proxies load program and maps.
    Alone,
    /// Like [`Self::Own`], with every pod at a port of one Linux bridge.
    Bridged,
    /// Like [`Self::Own`], with servers behind service addresses that the node translates. Two pods
    /// are routed, two are at ports of a bridge.
    Translated,
    /// Like [`Self::Translated`]. The policy selects the pods behind the Services.
    Services,
}

impl Redirect {
    /// Name in the report's table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Own => "own redirect",
            Self::Filters => "own redirect, tc filters",
            Self::Transparent => "own redirect, transparent",
            Self::Tproxy => "TPROXY",
            Self::Alone => "TPROXY, proxies alone",
            Self::Bridged => "own redirect, bridge",
            Self::Translated => "own redirect, translated server",
            Self::Services => "own redirect, Services",
        }
    }
}

/// Everything except agent and proxies, which the scenarios start.
#[derive(Debug)]
pub struct Setup {
    /// `None` if a scenario has its own servers.
    _nsd: Option<Program>,
    /// Pods in addition to the lab's own two, or in their place.
    pods: Vec<Pod>,
    pub lab: Lab,
    pub(super) size: Size,
    pub(super) redirect: Redirect,
}

/// A running load, and the data to end it.
pub(super) struct Running<'s> {
    traffic: Traffic,
    setup: &'s Setup,
    since: Instant,
}

impl Setup {
    /// Makes the lab, its pods and the DNS server.
    pub fn new(redirect: Redirect, size: &Size) -> Result<Self> {
        let lab = Lab::new()?;
        let pods = add_pods(&lab, redirect)?;
        // Each TCP query leaves a port in TIME_WAIT, on the node and at the server.
        for netns in [&lab.node, &lab.world] {
            netns.sysctl(&[("net.ipv4.ip_local_port_range", "12000 65000")])?;
        }
        // Kernel-chosen ports must differ from the ports of the load's raw sockets, because a pod
        // has one query per port.
        let routed = [&lab.a, &lab.b].into_iter();
        for pod in routed.chain(&pods) {
            let range = ("net.ipv4.ip_local_port_range", "43000 65000");
            pod.netns.sysctl(&[range])?;
        }
        let nsd = match redirect {
            Redirect::Services => None,
            _ => Some(nsd::start(
                &lab,
                &[SERVER4, SERVER6],
                zone::ZONE,
                &zone::zone_file(&NAMES),
            )?),
        };
        if redirect == Redirect::Translated {
            let (from, to) = (servers(redirect), servers(Redirect::Own));
            let services = [
                (from.fast[0], to.fast[0]),
                (from.fast[1], to.fast[1]),
                (from.slow[0], to.slow[0]),
                (from.slow[1], to.slow[1]),
            ];
            service::translate(&lab, &services)?;
        }
        let rules = dns_rules(redirect, "*.good.test") + &names("*.good.test");
        lab.write_policy("web.yaml", &egress("good-names", "web", &rules))?;
        if matches!(redirect, Redirect::Tproxy | Redirect::Alone) {
            let rules = format!(
                "table inet proxy {{ chain pre {{ type filter hook prerouting priority mangle;\n\
                 meta mark & 0xf00 == 0x200 meta nfproto ipv4 meta l4proto {{ tcp, udp }} \
                 tproxy ip to 127.0.0.1:{PROXY_PORT} accept\n\
                 meta mark & 0xf00 == 0x200 meta nfproto ipv6 meta l4proto {{ tcp, udp }} \
                 tproxy ip6 to [::1]:{PROXY_PORT} accept\n}}\n}}\n"
            );
            shell::feed(lab.node.command("nft").args(["-f", "-"]), &rules)?;
        }
        Ok(Self {
            _nsd: nsd,
            pods,
            lab,
            size: size.clone(),
            redirect,
        })
    }

    /// Starts the agent and adds an endpoint for every pod.
    pub(super) fn agent(&self, options: &AgentOptions) -> Result<Program> {
        let agent = self.lab.start_agent(options)?;
        if self.redirect == Redirect::Alone {
            self.remove_steering()?;
        }
        for pod in self.clients() {
            self.lab.add_endpoint(pod, WEB)?;
        }
        Ok(agent)
    }

    /// Starts a replica, and waits until it has the rules in force.
    pub(super) fn replica(&self, number: u32) -> Result<Program> {
        let replica = self.lab.start_sdp(&self.sdp_options(number))?;
        self.lab.connected(&replica_name(number))?;
        Ok(replica)
    }

    /// Options of the agent for this redirect.
    pub(super) fn agent_options(&self) -> AgentOptions {
        match self.redirect {
            Redirect::Filters => AgentOptions::default().flag(FILTERS),
            Redirect::Transparent => AgentOptions::default().flag(TRANSPARENT).flag(OUTSIDE),
            Redirect::Services => AgentOptions::default().flag(SERVICE_CIDRS),
            _ => AgentOptions::default(),
        }
    }

    /// Options of replica `number`, with its own name and metrics port.
    pub(super) fn sdp_options(&self, number: u32) -> SdpOptions {
        let port = u16::try_from(number % 100).unwrap_or(0);
        let options = SdpOptions::new(&replica_name(number), 9970 + port);
        match self.redirect {
            Redirect::Transparent => options.flag(TRANSPARENT).flag(OUTSIDE),
            _ => options,
        }
    }

    /// Starts the load, and waits until it flows.
    pub(super) fn load(&self) -> Result<Running<'_>> {
        for pod in self.clients() {
            for server in self.servers().fast {
                for query in [
                    Query::a(&zone::name(0), server),
                    Query::a(&zone::name(0), server).tcp(),
                ] {
                    eventually("a first answer", LEAVES, || {
                        pod.ask(&query)?.expect(zone::v4(0).into())
                    })?;
                }
            }
        }
        let spec = Spec {
            clients: self.clients().map(Client::of).collect(),
            servers: self.servers().fast.to_vec(),
            udp_rate: self.size.udp_rate,
            tcp_rate: self.size.tcp_rate,
            // A lasting connection ends with its server.
            lasting: match self.redirect {
                Redirect::Services => 0,
                _ => self.size.lasting,
            },
            names: NAMES,
            lost_after: LOST_AFTER,
        };
        let running = Running {
            traffic: Traffic::start(&spec)?,
            setup: self,
            since: Instant::now(),
        };
        running.traffic.flows(u64::from(self.size.udp_rate / 4))?;
        Ok(running)
    }

    /// Removes the steering program and its maps, as on a node without BPF.
    pub(super) fn remove_steering(&self) -> Result<()> {
        let link = self
            .lab
            .bpf_root()
            .join(shared_maps::pin::LINKS)
            .join(LINK_NAME);
        for pin in [link, self.lab.pin(SLOTS_NAME), self.lab.pin(SOCKS_NAME)] {
            std::fs::remove_file(pin)?;
        }
        Ok(())
    }

    /// Packets that the datapath dropped, by reason.
    pub(super) fn drops(&self) -> Result<String> {
        let counters = Counters::open(&Globals::new(self.lab.bpf_root()))?.read()?;
        let drops: Vec<String> = counters
            .into_iter()
            .filter(|(reason, counter)| reason.is_drop() && counter.packets > 0)
            .map(|(reason, counter)| format!("{} {}", counter.packets, reason.as_str()))
            .collect();
        Ok(match drops.as_slice() {
            [] => "no packet dropped".to_owned(),
            drops => format!("dropped packets: {}", drops.join(", ")),
        })
    }

    /// Rules that allow DNS to the servers under load.
    pub(super) fn rules(&self, pattern: &str) -> String {
        dns_rules(self.redirect, pattern)
    }

    /// Server addresses for the pods' queries.
    pub(super) fn servers(&self) -> Servers {
        servers(self.redirect)
    }

    pub(super) fn clients(&self) -> impl Iterator<Item = &Pod> {
        let routed = [&self.lab.a, &self.lab.b];
        let routed = routed
            .into_iter()
            .filter(|_| self.redirect != Redirect::Bridged);
        routed.chain(&self.pods)
    }
}

impl Running<'_> {
    /// Lets the load run: a pause, and then until more answers have arrived.
    pub(super) fn flows(&self) -> Result<()> {
        std::thread::sleep(self.setup.size.pause);
        self.traffic.flows(u64::from(self.setup.size.udp_rate / 4))
    }

    /// Queries sent so far, of both transports.
    pub(super) fn sent(&self) -> u64 {
        self.traffic.progress().sent
    }

    /// Ends the load after it has run long enough.
    pub(super) fn finish(self) -> Result<Report> {
        self.flows()?;
        let left = self
            .setup
            .size
            .at_least
            .saturating_sub(self.since.elapsed());
        std::thread::sleep(left);
        self.traffic.finish()
    }
}

/// DNS servers by the addresses that pods use: IPv4, then IPv6.
#[derive(Clone, Copy, Debug)]
pub(super) struct Servers {
    /// Servers that the load queries.
    pub(super) fast: [IpAddr; 2],
    /// The lab's own servers, whose answers have the delay of their zone.
    pub(super) slow: [IpAddr; 2],
}

fn servers(redirect: Redirect) -> Servers {
    match redirect {
        Redirect::Translated => Servers {
            fast: [service4(10), service6(10)],
            slow: [service4(11), service6(11)],
        },
        Redirect::Services => Servers {
            fast: services::vips(services::DNS),
            slow: services::vips(services::DNS),
        },
        _ => Servers {
            fast: [SERVER4, SERVER6],
            slow: [DNS4, DNS6],
        },
    }
}

fn add_pods(lab: &Lab, redirect: Redirect) -> Result<Vec<Pod>> {
    let bridged = match redirect {
        Redirect::Bridged => ["p", "q", "r", "s"].as_slice(),
        Redirect::Translated | Redirect::Services => &["p", "q"],
        _ => return Ok(vec![lab.add_pod("c", 13)?, lab.add_pod("d", 14)?]),
    };
    let bridge = Bridge::new(lab, "cni0")?;
    let pods = bridged.iter().zip(11..);
    pods.map(|(name, host)| bridge.add_pod(name, host))
        .collect()
}

fn dns_rules(redirect: Redirect, pattern: &str) -> String {
    if redirect == Redirect::Services {
        return services::rules(pattern);
    }
    let Servers { fast, slow } = servers(redirect);
    let blocks = [fast, slow].concat().into_iter().map(|server| {
        let length = if server.is_ipv4() { 32 } else { 128 };
        format!("{server}/{length}")
    });
    let blocks: Vec<String> = blocks.collect();
    let blocks: Vec<&str> = blocks.iter().map(String::as_str).collect();
    dns_to(pattern, &blocks)
}

pub(super) fn replica_name(number: u32) -> String {
    format!("replica{number}")
}

/// The current time, on the clock of the load's times.
pub(super) fn now() -> u64 {
    monotonic_ns()
}
