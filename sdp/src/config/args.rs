//! Command line and environment: names, value syntax and help of every setting.

use std::{fmt, net::IpAddr, path::PathBuf, str::FromStr, time::Duration};

use clap::{Args, Parser, Subcommand, ValueEnum};
use dns_policy::{
    duration::{self, DurationError},
    reject_code::RejectCode,
};

use crate::{
    privileges::RunAs,
    query_log::{Sample, Target, Which},
};

const LONG_ABOUT: &str = "\
Holdfast's standalone DNS proxy.

Decides which DNS names each pod of this node may resolve, forwards what is
allowed to the very server the pod asked, and tells the agent which addresses
the answers held before the pod sees them. It serves on while the agent is
away, and starts without it: rules come from the endpoints' files below
--state-dir, endpoints and identities from the pinned BPF maps.

Without a subcommand it runs as a proxy. Settings come from, highest first:
a flag, the environment (HOLDFAST_ and the flag's name in capitals, such as
HOLDFAST_TOFQDNS_PROXY_PORT), --config, --config-dir.";

const AFTER_HELP: &str = "\
Examples:
  holdfast-sdp                                    run beside holdfast-agent
  holdfast-sdp --agent-address tcp://127.0.0.1:10095 --state-dir /var/run/cilium
                                                  run beneath a Cilium agent
  holdfast-sdp status                             how every instance here is doing
  holdfast-sdp explain 10.0.1.5 www.example.com   who asks, by which rule, what verdict
  holdfast-sdp drain --name sdp-4711              leave without losing a query

Exit codes: 0 fine, 1 failed, 2 usage or configuration.";

/// The whole command line.
#[derive(Debug, Parser)]
#[command(name = "holdfast-sdp", version, about = "Holdfast's standalone DNS proxy", long_about = LONG_ABOUT, after_help = AFTER_HELP)]
pub struct Cli {
    /// Settings of the proxy.
    #[command(flatten)]
    pub settings: Settings,
    /// What to ask of a running proxy.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// A question to running proxies.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// How a proxy is doing; without --admin-socket and --name, every proxy of this node
    Status(OutputArgs),
    /// Leave: take no new queries, finish those in flight, exit
    Drain(OutputArgs),
    /// DNS rules in force
    Policy(PolicyArgs),
    /// Why a query would be allowed or refused: who asks, by which rule, what verdict
    Explain(ExplainArgs),
}

/// How to print.
#[derive(Clone, Copy, Debug, Args)]
pub struct OutputArgs {
    /// Print for people or as JSON
    #[arg(short = 'o', long = "output", value_enum, default_value = "text")]
    pub output: Output,
}

/// Form of what a subcommand prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    Text,
    /// One JSON document.
    Json,
}

/// Arguments of `policy`.
#[derive(Debug, Args)]
pub struct PolicyArgs {
    /// Only this endpoint's rules
    #[arg(long, value_name = "ID")]
    pub endpoint: Option<u16>,
    /// How to print.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Arguments of `explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// Address of the pod that would ask
    #[arg(value_name = "CLIENT-IP")]
    pub client: IpAddr,
    /// Name it would ask for
    // Not "name": that is the instance's, of the settings that are valid here, too.
    #[arg(value_name = "NAME")]
    pub question: String,
    /// DNS server it would ask; without it, the verdict is told per rule
    #[arg(long, value_name = "IP")]
    pub server: Option<IpAddr>,
    /// Port of the DNS server
    #[arg(long, value_name = "PORT", default_value_t = 53)]
    pub port: u16,
    /// Ask over TCP instead of UDP
    #[arg(long)]
    pub tcp: bool,
    /// How to print.
    #[command(flatten)]
    pub output: OutputArgs,
}

macro_rules! settings {
    ($( $(#[$attr:meta])* $field:ident : $type:ty = $env:literal, )*) => {
        /// Every setting as one source gives it: absent means "not said there".
        #[allow(
            rustdoc::invalid_html_tags,
            rustdoc::broken_intra_doc_links,
            reason = "the texts are the command line's help"
        )]
        #[derive(Clone, Debug, Default, Args)]
        pub struct Settings {
            $( $(#[$attr])* #[arg(env = $env)] pub $field: Option<$type>, )*
        }

        impl Settings {
            /// These settings, with `lower` where they say nothing.
            #[must_use]
            pub fn or(self, lower: Self) -> Self {
                Self { $( $field: self.$field.or(lower.$field), )* }
            }
        }
    };
}

settings! {
    /// Port the proxy listens on, on 127.0.0.1 and ::1; the agent must say the same [default: 10094]
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    tofqdns_proxy_port: u16 = "HOLDFAST_TOFQDNS_PROXY_PORT",
    /// Where the agent is, tried in order: unix:///PATH (native) or tcp://HOST:PORT (FQDNData); may be repeated or comma-separated [default: unix:///run/holdfast/sdp.sock, tcp://127.0.0.1:10095, tcp://[::1]:10095]
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',')]
    agent_address: Vec<AgentAddress> = "HOLDFAST_AGENT_ADDRESS",
    /// Root of the BPF file system that holds tc/globals/ [default: /sys/fs/bpf]
    #[arg(long, value_name = "DIR")]
    bpf_root: PathBuf = "HOLDFAST_BPF_ROOT",
    /// Directory whose state/<endpoint>/ep_config.json hold the rules to start with [default: /var/run/holdfast, or /var/run/cilium where only that exists]
    #[arg(long, value_name = "DIR")]
    state_dir: PathBuf = "HOLDFAST_STATE_DIR",
    /// Name of this instance [default: sdp-<pid>]
    #[arg(long, value_name = "NAME", global = true)]
    name: String = "HOLDFAST_NAME",
    /// Socket for status, explain, policy and drain [default: /run/holdfast/sdp/<name>.sock]
    #[arg(long, value_name = "PATH", global = true)]
    admin_socket: PathBuf = "HOLDFAST_ADMIN_SOCKET",
    /// Where /metrics, /healthz and /readyz are served; instances may share it; ":PORT" for all addresses of the node, "off" for none [default: 127.0.0.1:9961]
    #[arg(long, value_name = "[HOST]:PORT")]
    metrics_address: MetricsAddress = "HOLDFAST_METRICS_ADDRESS",
    /// Directory for mappings that the agent has not made durable yet, shared by all instances [default: /var/lib/holdfast/sdp]
    #[arg(long, value_name = "DIR")]
    journal_dir: PathBuf = "HOLDFAST_JOURNAL_DIR",
    /// How long leaving may take at most [default: 10s]
    #[arg(long, value_name = "TIME")]
    drain_timeout: Span = "HOLDFAST_DRAIN_TIMEOUT",
    /// How long an answer waits at most for the agent to plumb its addresses [default: 100ms]
    #[arg(long, value_name = "TIME")]
    tofqdns_proxy_response_max_delay: Span = "HOLDFAST_TOFQDNS_PROXY_RESPONSE_MAX_DELAY",
    /// Answer to a name that policy forbids: nameError is NXDOMAIN, which lets search lists go on [default: nameError; refused if only TCP agent addresses or standalone-dns-proxy-server-port are set, as under a Cilium agent]
    #[arg(long, value_name = "HOW", value_enum, ignore_case = true)]
    tofqdns_dns_reject_response_code: RejectCode = "HOLDFAST_TOFQDNS_DNS_REJECT_RESPONSE_CODE",
    /// Least time an address counts as learned; the agent's own value wins while it is connected [default: 0s]
    #[arg(long, value_name = "TIME")]
    tofqdns_min_ttl: Span = "HOLDFAST_TOFQDNS_MIN_TTL",
    /// Under a Cilium agent: release an answer at once if the agent has acknowledged its addresses to the same pod and their TTL still runs; false has each answer wait for the agent [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    reuse_acknowledgements: bool = "HOLDFAST_REUSE_ACKNOWLEDGEMENTS",
    /// Most queries in flight at once; 0 leaves it to the memory limits [default: 0]
    #[arg(long, value_name = "N")]
    dnsproxy_concurrency_limit: u32 = "HOLDFAST_DNSPROXY_CONCURRENCY_LIMIT",
    /// How long a query waits for a place where as many are in flight as its pod may have (--dnsproxy-concurrency-limit); then it is answered SERVFAIL [default: 0s]
    #[arg(long, value_name = "TIME")]
    dnsproxy_concurrency_processing_grace_period: Span = "HOLDFAST_DNSPROXY_CONCURRENCY_PROCESSING_GRACE_PERIOD",
    /// Ask DNS servers in the cluster under the address of the pod that asks, not the node's; the agent must be told the same [default: false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    dnsproxy_enable_transparent_mode: bool = "HOLDFAST_DNSPROXY_ENABLE_TRANSPARENT_MODE",
    /// In transparent mode, ask servers outside of the cluster under the pod's address, too: no answer comes where the node masquerades pods or translates the server's address [default: false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    transparent_mode_outside_cluster: bool = "HOLDFAST_TRANSPARENT_MODE_OUTSIDE_CLUSTER",
    /// As whom to run once what needs root is open: UID, UID:GID, or root to keep all privileges; the agent opens its socket and pins to this group [default: 10094:10094]
    #[arg(long, value_name = "USER")]
    user: RunAs = "HOLDFAST_USER",
    /// Which proxy of the node gets a query: auto (slots, which leave out proxies that hang or leave; loads the program for it where nobody has) or off (the kernel's hash) [default: auto]
    #[arg(long, value_name = "HOW", value_enum)]
    steering: SteeringMode = "HOLDFAST_STEERING",
    /// Serve IPv4 [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    enable_ipv4: bool = "HOLDFAST_ENABLE_IPV4",
    /// Serve IPv6 [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    enable_ipv6: bool = "HOLDFAST_ENABLE_IPV6",
    /// Threads that serve queries [default: number of CPUs, 4 at most]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=16))]
    workers: u16 = "HOLDFAST_WORKERS",
    /// Port of a Cilium agent's FQDNData service on this node, where --agent-address says nothing [default: 10095]
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    standalone_dns_proxy_server_port: u16 = "HOLDFAST_STANDALONE_DNS_PROXY_SERVER_PORT",
    /// Least severity that is logged: error, warn, info, debug, trace, or a filter such as holdfast_sdp::link=debug [default: info]
    #[arg(long, value_name = "FILTER")]
    log_level: String = "HOLDFAST_LOG_LEVEL",
    /// Form of the log [default: text]
    #[arg(long, value_name = "FORM", value_enum)]
    log_format: LogFormat = "HOLDFAST_LOG_FORMAT",
    /// Which queries are logged, one JSON object a line: off, denied, or all that are judged [default: off]
    #[arg(long, value_name = "WHICH", value_enum)]
    query_log: Which = "HOLDFAST_QUERY_LOG",
    /// Where the query log goes: stdout, stderr or the path of a file, which may be moved away while it is written [default: stdout]
    #[arg(long, value_name = "WHERE")]
    query_log_file: Target = "HOLDFAST_QUERY_LOG_FILE",
    /// Share of the queries that is logged, such as 1/100 [default: 1]
    #[arg(long, value_name = "1/N")]
    query_log_sample: Sample = "HOLDFAST_QUERY_LOG_SAMPLE",
    /// YAML file with any of these settings; an unknown key is an error
    #[arg(long, value_name = "FILE")]
    config: PathBuf = "HOLDFAST_CONFIG",
    /// Directory with one file per setting, as a mounted ConfigMap, Cilium's included; unknown keys are ignored and named in the log
    #[arg(long, value_name = "DIR")]
    config_dir: PathBuf = "HOLDFAST_CONFIG_DIR",
}

/// Which proxy gets a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SteeringMode {
    /// The owner of a slot; without program and maps, whom the kernel's hash says.
    Auto,
    /// Whom the kernel's hash says.
    Off,
}

/// Form of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines for people.
    Text,
    /// One JSON object a line.
    Json,
}

/// A length of time as Go writes it: `100ms`, `1.5s`, `5m`, `1h30m`; a bare number is seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span(pub Duration);

impl FromStr for Span {
    type Err = DurationError;

    fn from_str(text: &str) -> Result<Self, DurationError> {
        duration::parse(text).map(Self)
    }
}

/// Where an agent may be found.
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
        let wrong = || format!("{text:?} is no address: write unix:///PATH or tcp://HOST:PORT");
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

/// Where metrics are served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricsAddress {
    /// Nowhere.
    Off,
    /// On every address of the node.
    AnyHost(u16),
    /// On this address.
    At(std::net::SocketAddr),
}

impl FromStr for MetricsAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no address: write HOST:PORT, :PORT or off");
        if text.is_empty() || text == "off" {
            return Ok(Self::Off);
        }
        match text.strip_prefix(':') {
            Some(port) => port.parse().map(Self::AnyHost).map_err(|_| wrong()),
            None => text.parse().map(Self::At).map_err(|_| wrong()),
        }
    }
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::AnyHost(port) => write!(f, ":{port}"),
            Self::At(address) => address.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_read_as_go_writes_them() {
        let ms = |text: &str| text.parse::<Span>().map(|s| s.0.as_millis());
        assert_eq!(ms("100ms"), Ok(100));
        assert_eq!(ms("1h30m"), Ok(5_400_000));
        assert_eq!(ms("1m0s"), Ok(60_000));
        assert_eq!(ms("7"), Ok(7_000));
        assert_eq!(ms("1.5s"), Ok(1_500));
        assert_eq!(ms("2500us"), Ok(2));
        assert_eq!(ms("0.25h"), Ok(900_000));
        for bad in [
            "",
            "s",
            "10 s",
            "5d",
            "-1s",
            "1.s",
            "1.",
            ".5s",
            "1.5",
            "300000000h",
        ] {
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
