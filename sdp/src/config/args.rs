//! Command line and environment: names, value syntax and help of every setting.

use std::{fmt, net::IpAddr, path::PathBuf, str::FromStr, time::Duration};

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use daemon::{
    command_line::{
        endpoint_args::{EndpointArg, EndpointFilter},
        failure::EXIT_CODES,
        file_args::FileArgs,
        health::HealthArgs,
        log_args::LogArgs,
        metrics_address::MetricsAddress,
        output::OutputArgs,
        values::{address, port, whole},
    },
    flags,
};
use dns_policy::{duration, reject_code::RejectCode, rule::Transport};

use crate::{privileges::RunAs, query_log::QueryLogConfig};

const LONG_ABOUT: &str = "\
Holdfast's standalone DNS proxy.

Decides which DNS names each pod of this node may resolve. Forwards an allowed
query to the server to which the pod sent it. Reports the addresses in each
answer to the agent before the pod receives the answer.

It works without a running agent, also at its start: it then reads the rules
from the endpoints' files under --state-dir, and endpoints and identities from
the pinned BPF maps. It must be started as root: it opens the maps and sockets
as root and then changes to --user.

Without a subcommand it runs as a proxy. A setting is read from the first of
these places that has it:
  1. the flag
  2. the environment: HOLDFAST_ and the flag's name in capitals, such as
     HOLDFAST_TOFQDNS_PROXY_PORT
  3. the file of --config
  4. the directory of --config-dir

A TIME is a number with a unit, such as 100ms, 10s, 5m or 1h30m.";

const AFTER_HELP: &str = "\
Examples:
  holdfast-sdp                                    run beside holdfast-agent
  holdfast-sdp --agent-address tcp://127.0.0.1:10095 --state-dir /var/run/cilium
                                                  run under a Cilium agent
  holdfast-sdp status                             state of each proxy of this node
  holdfast-sdp explain 10.0.1.5 www.example.com   verdict for one query, and its rule
  holdfast-sdp drain --name sdp-4711              stop one proxy without losing a query";

/// The whole command line.
#[derive(Debug, Parser)]
#[command(name = "holdfast-sdp", version, about = "Holdfast's standalone DNS proxy", long_about = LONG_ABOUT, after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"), mut_args = flags::complete)]
pub struct Cli {
    /// Settings of the proxy.
    #[command(flatten)]
    pub settings: Settings,
    /// Request to a running proxy; without it, this process runs as a proxy.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// Requests to running proxies.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show the state of a proxy; without --admin-socket and --name, of every proxy of this node
    Status(OutputArgs),
    /// Exit 0 if the running program is ready; otherwise print the missing parts and exit 1. For readiness and liveness probes
    // Probes of older manifests call it so.
    #[command(alias = "ready")]
    Health {
        #[command(flatten)]
        what: HealthArgs,
        #[command(flatten)]
        form: OutputArgs,
    },
    /// Show the version of this program and of the running one
    Version(OutputArgs),
    /// Stop a proxy: it accepts no new queries, finishes those in flight and exits. The last proxy of the node stays, unless --force is given
    Drain(DrainArgs),
    /// List the DNS rules in force
    Policy(PolicyArgs),
    /// Show whether a query would be allowed: the endpoint, the rule and the verdict. Exit 1 if it is refused
    Explain(ExplainArgs),
    /// Former name of `health --live`, which probes of older manifests have
    #[command(hide = true)]
    Alive,
}

/// Arguments of `drain`.
#[derive(Debug, Args)]
pub struct DrainArgs {
    /// Stop the proxy also if no other one of this node would answer the queries
    #[arg(long)]
    pub force: bool,
    /// Output options.
    #[command(flatten)]
    pub form: OutputArgs,
}

/// Arguments of `policy`.
#[derive(Debug, Args)]
pub struct PolicyArgs {
    #[command(flatten)]
    pub filter: EndpointFilter,
    /// Output options.
    #[command(flatten)]
    pub form: OutputArgs,
}

/// Arguments of `explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// Endpoint that would send the query.
    #[command(flatten)]
    pub client: EndpointArg,
    /// Name in the query
    // The field cannot be called "name": that is the global setting --name of the instance.
    #[arg(value_name = "NAME", value_parser = question_name)]
    pub question: String,
    /// DNS server of the query; without it, the verdict of each rule is listed
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    pub server: Option<IpAddr>,
    /// Destination port: 53, 53/UDP, 53/TCP. A number without a protocol is of UDP
    #[arg(long, value_name = "PORT", default_value = "53/UDP")]
    pub port: ServerPort,
    /// Former spelling of a port with `/TCP`
    #[arg(long, hide = true)]
    pub tcp: bool,
    /// Output options.
    #[command(flatten)]
    pub form: OutputArgs,
}

/// Every setting of the proxy.
#[allow(
    rustdoc::invalid_html_tags,
    rustdoc::broken_intra_doc_links,
    reason = "the texts are the command line's help"
)]
#[derive(Clone, Debug, Args)]
pub struct Settings {
    /// Port on which the DNS proxies of this node listen, on 127.0.0.1 and ::1; agent and proxies must have the same setting
    #[arg(long, value_name = "PORT", value_parser = port, default_value_t = 10094)]
    pub tofqdns_proxy_port: u16,
    /// Addresses of the agent, tried in order: unix:///PATH (native) or tcp://HOST:PORT (FQDNData); may be repeated or comma-separated [default: unix:///run/holdfast/sdp.sock, tcp://127.0.0.1:10095, tcp://[::1]:10095]
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',')]
    pub agent_address: Vec<AgentAddress>,
    /// Directory on a BPF file system that has the agent's pins, in tc/globals/
    #[arg(long, value_name = "DIR", default_value = shared_maps::pin::BPF_ROOT)]
    pub bpf_root: PathBuf,
    /// Directory of the agent's state: the proxy starts with the rules in its state/<endpoint>/ep_config.json [default: /var/run/holdfast, or /var/run/cilium if only that exists]
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Name of this instance; with a command, of the proxy that it is for [default: sdp-<pid>; a command finds the only proxy]
    #[arg(long, value_name = "NAME", global = true, value_parser = instance_name)]
    pub name: Option<String>,
    /// Unix socket through which commands reach the running program [default: /run/holdfast/sdp/<name>.sock]
    #[arg(long, value_name = "PATH", global = true)]
    pub admin_socket: Option<PathBuf>,
    /// Address of /metrics, /healthz and /readyz: HOST:PORT, :PORT for every address of the node, or off. Instances may share it
    #[arg(long, value_name = "[HOST]:PORT", default_value = "127.0.0.1:9961")]
    pub metrics_address: MetricsAddress,
    /// Directory of the journals: mappings that the agent has not stored durably yet; all instances share it
    #[arg(long, value_name = "DIR", default_value = "/var/lib/holdfast/sdp")]
    pub journal_dir: PathBuf,
    /// Longest time of a drain; queries that are still in flight then are dropped
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "10s")]
    pub drain_timeout: Duration,
    /// Longest time that a DNS proxy holds an answer until its addresses are open; then the client gets it anyway
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "100ms")]
    pub tofqdns_proxy_response_max_delay: Duration,
    /// Answer to a name that policy denies: nameError is NXDOMAIN, after which a resolver tries the next entry of its search list [default: nameError; refused if only TCP agent addresses or standalone-dns-proxy-server-port are set, as under a Cilium agent]
    #[arg(long, value_name = "HOW", value_enum, ignore_case = true)]
    pub tofqdns_dns_reject_response_code: Option<RejectCode>,
    /// Shortest time for which a learned address is valid, whatever its TTL. A connected agent's value replaces this one
    #[arg(long, value_name = "TIME", value_parser = whole_seconds, default_value = "0s")]
    pub tofqdns_min_ttl: u32,
    /// Under a Cilium agent: release an answer at once if the agent has acknowledged its addresses for the same pod and their TTL has not ended; with false, each answer waits for the agent
    #[arg(long, action = ArgAction::Set, default_value_t = true)]
    pub reuse_acknowledgements: bool,
    /// Most queries in flight at once; 0: only the memory limits apply
    #[arg(long, value_name = "N", value_parser = whole(0..=u32::MAX), default_value_t = 0)]
    pub dnsproxy_concurrency_limit: u32,
    /// How long a query waits while its pod has as many queries in flight as it may have (--dnsproxy-concurrency-limit); then the answer is SERVFAIL
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "0s")]
    pub dnsproxy_concurrency_processing_grace_period: Duration,
    /// Transparent mode: proxies forward queries to DNS servers in the cluster with the pod's address as the source, not the node's; agent and proxies must have the same setting
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub dnsproxy_enable_transparent_mode: bool,
    /// In transparent mode, use the pod's address also for servers outside of the cluster; their answers are lost if the node masquerades pods or translates the server's address
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub transparent_mode_outside_cluster: bool,
    /// User that the proxy changes to after its start as root: UID, UID:GID, or root to keep all privileges; the agent opens its socket and pins to this group
    #[arg(long, value_name = "USER", default_value_t)]
    pub user: RunAs,
    /// How the kernel selects the proxy for a query: auto (steering slots, which skip a proxy that hangs or drains; the proxy loads the steering program if it is not loaded yet) or off (the kernel's hash)
    #[arg(long, value_name = "HOW", value_enum, default_value_t = SteeringMode::Auto)]
    pub steering: SteeringMode,
    /// Serve IPv4: policy of pods, and their DNS queries
    #[arg(long, action = ArgAction::Set, default_value_t = true)]
    pub enable_ipv4: bool,
    /// Serve IPv6: policy of pods, and their DNS queries
    #[arg(long, action = ArgAction::Set, default_value_t = true)]
    pub enable_ipv6: bool,
    /// Threads that serve queries [default: number of CPUs, 4 at most]
    #[arg(long, value_name = "N", value_parser = whole(1..=16u16))]
    pub workers: Option<u16>,
    /// Port of the agent's FQDNData service on 127.0.0.1; used if --agent-address is not set [default: 10095]
    #[arg(long, value_name = "PORT", value_parser = port)]
    pub standalone_dns_proxy_server_port: Option<u16>,
    #[command(flatten)]
    pub query_log: QueryLogConfig,
    #[command(flatten)]
    pub files: FileArgs,
    #[command(flatten)]
    pub log: LogArgs,
}

fn whole_seconds(text: &str) -> Result<u32, String> {
    let time = duration::parse(text).map_err(|error| error.to_string())?;
    u32::try_from(time.as_secs()).map_err(|_| "is longer than 136 years".to_owned())
}

/// A name that can be part of a file name.
fn instance_name(name: &str) -> Result<String, String> {
    let is_name = name.len() <= 63
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
    if is_name {
        return Ok(name.to_owned());
    }
    Err("use 1 to 63 letters, digits, '-', '_' or '.', beginning with a letter or digit".to_owned())
}

fn question_name(text: &str) -> Result<String, String> {
    let labels = text.strip_suffix('.').unwrap_or(text).split('.');
    let is_name = !text.contains([':', '/', ' ']) && labels.clone().all(|label| !label.is_empty());
    if is_name || text == "." {
        return Ok(text.to_owned());
    }
    Err("this is not a DNS name: write the name alone, for example www.example.com".to_owned())
}

/// Which proxy gets a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SteeringMode {
    /// The owner of a steering slot; by the kernel's hash if the program or its maps are missing.
    Auto,
    /// The proxy that the kernel's hash selects.
    Off,
}

/// Address at which the proxy connects to an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AgentAddress {
    /// Unix socket with the native service.
    Unix(PathBuf),
    /// `host:port` with the FQDNData service.
    Tcp(String),
}

impl FromStr for AgentAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not an address: write unix:///PATH or tcp://HOST:PORT");
        if let Some(path) = text.strip_prefix("unix://") {
            return if path.starts_with('/') {
                Ok(Self::Unix(path.into()))
            } else {
                Err(wrong())
            };
        }
        let target = text.strip_prefix("tcp://").ok_or_else(wrong)?;
        let (host, port) = target.rsplit_once(':').ok_or_else(wrong)?;
        if host.is_empty() || port.parse::<u16>().is_err() {
            return Err(wrong());
        }
        Ok(Self::Tcp(target.to_owned()))
    }
}

impl fmt::Display for AgentAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix://{}", path.display()),
            Self::Tcp(target) => write!(f, "tcp://{target}"),
        }
    }
}

/// Port of a DNS server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerPort {
    /// Its number.
    pub number: u16,
    /// UDP or TCP.
    pub transport: Transport,
}

impl FromStr for ServerPort {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "`{text}` is not a port of a DNS server: write for example 53, 53/UDP or 53/TCP"
            )
        };
        let (number, protocol) = text.split_once('/').unwrap_or((text, "UDP"));
        let transport = match protocol.to_ascii_uppercase().as_str() {
            "UDP" => Transport::Udp,
            "TCP" => Transport::Tcp,
            _ => return Err(wrong()),
        };
        let number = port(number).map_err(|_| wrong())?;
        Ok(Self { number, transport })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_read_as_go_writes_them() {
        let ms = |text: &str| duration::parse(text).map(|time| time.as_millis());
        assert_eq!(ms("100ms"), Ok(100));
        assert_eq!(ms("1h30m"), Ok(5_400_000));
        assert_eq!(ms("1m0s"), Ok(60_000));
        assert_eq!(ms("7"), Ok(7_000));
        assert_eq!(ms("1.5s"), Ok(1_500));
        assert_eq!(ms("2500us"), Ok(2));
        assert_eq!(ms("0.25h"), Ok(900_000));
        // The agent accepts these, and both programs have one grammar.
        assert_eq!(ms(".5s"), Ok(500));
        assert_eq!(ms("1.s"), Ok(1_000));
        assert_eq!(ms("300000000h"), Ok(1_080_000_000_000_000));
        for bad in ["", "s", "10 s", "5d", "-1s", "1.", "1.5"] {
            assert!(ms(bad).is_err(), "{bad:?} was taken");
        }
    }

    #[test]
    fn the_name_to_explain_is_not_the_instance() {
        let line = ["holdfast-sdp", "explain", "10.0.1.5", "www.example.com"];
        let cli = Cli::try_parse_from(line).expect("a valid command line");
        assert_eq!(cli.settings.name, None);
        let Some(Command::Explain(arguments)) = cli.command else {
            panic!("not explain");
        };
        assert_eq!(arguments.question, "www.example.com");
    }

    #[test]
    fn ports_of_servers_are_written_as_those_of_packets() {
        let one = |text: &str| text.parse::<ServerPort>();
        let port = |number, transport| Ok(ServerPort { number, transport });
        assert_eq!(one("53"), port(53, Transport::Udp));
        assert_eq!(one("5353/tcp"), port(5353, Transport::Tcp));
        for bad in ["0", "70000", "53/ICMP", "dns", ""] {
            assert!(one(bad).unwrap_err().contains("53/TCP"), "{bad:?}");
        }
    }

    #[test]
    fn a_question_is_a_name_and_no_url() {
        for name in [
            "www.example.com",
            "www.example.com.",
            "_sip._udp.example.com",
            "a",
            ".",
        ] {
            assert_eq!(question_name(name).as_deref(), Ok(name));
        }
        for other in [
            "https://www.example.com",
            "www.example.com:443",
            "shop/web",
            "a..b",
            ".a",
            "",
        ] {
            assert!(question_name(other).is_err(), "{other}");
        }
    }

    #[test]
    fn addresses_need_a_scheme() {
        let one = |text: &str| text.parse::<AgentAddress>();
        assert_eq!(
            one("unix:///run/x.sock"),
            Ok(AgentAddress::Unix("/run/x.sock".into()))
        );
        assert_eq!(
            one("tcp://[::1]:10095"),
            Ok(AgentAddress::Tcp("[::1]:10095".into()))
        );
        for bad in [
            "/run/x.sock",
            "unix://x.sock",
            "tcp://localhost",
            "tcp://:1",
            "http://a:1",
        ] {
            assert!(one(bad).is_err(), "{bad:?} was taken");
        }
    }
}
