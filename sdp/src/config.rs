//! The proxy's configuration: every default, and how the sources are merged.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    num::NonZeroUsize,
    path::{Path, PathBuf},
    time::Duration,
};

pub mod args;
pub(crate) mod file;

use args::Settings;
pub use args::{AgentAddress, LogFormat, MetricsAddress, SteeringMode};
use dns_policy::reject_code::RejectCode;
use file::FileError;

use crate::{privileges::RunAs, query_log::QueryLogConfig, sink::Acknowledgements};

/// Port of the listeners if `--tofqdns-proxy-port` is not set.
pub const PROXY_PORT: u16 = 10094;
/// Default port of the FQDNData service.
pub(crate) const FQDNDATA_PORT: u16 = 10095;
/// Port of the metrics server on loopback if `--metrics-address` is not set.
pub(crate) const METRICS_PORT: u16 = 9961;
/// Default socket of the agent's native service.
pub(crate) const AGENT_SOCKET: &str = "/run/holdfast/sdp.sock";
/// Directory of the proxies' admin sockets.
pub(crate) const ADMIN_DIR: &str = "/run/holdfast/sdp";
const STATE_DIR: &str = "/var/run/holdfast";
const CILIUM_STATE_DIR: &str = "/var/run/cilium";
const JOURNAL_DIR: &str = "/var/lib/holdfast/sdp";
/// Slots of the steering maps are few: more workers would not get one.
const MAX_WORKERS: usize = 16;
/// Few enough that replicas find slots side by side.
pub(crate) const MOST_WORKERS_BY_DEFAULT: usize = MAX_WORKERS / 4;

/// Everything the proxy needs to know to run.
#[derive(Clone, Debug)]
pub struct Config {
    pub proxy_port: u16,
    /// Addresses of the agent, in the order in which they are tried.
    pub agent: Vec<AgentAddress>,
    /// Root of the BPF file system.
    pub bpf_root: PathBuf,
    /// Directory whose `state/` holds the endpoints' files.
    pub state_dir: PathBuf,
    /// Name of this instance, which is part of file names.
    pub name: String,
    /// Path of the admin socket, by default `/run/holdfast/sdp/<name>.sock`.
    pub admin_socket: PathBuf,
    /// Address of the metrics page.
    pub metrics: MetricsAddress,
    /// Directory of the mapping journal.
    pub journal_dir: PathBuf,
    /// Longest duration of a drain, 10 s by default.
    pub drain_timeout: Duration,
    /// Bound of holding an answer.
    pub response_max_delay: Duration,
    /// How forbidden queries are answered.
    pub reject: RejectCode,
    /// Floor of TTLs, seconds, until an agent sends its own.
    pub min_ttl: u32,
    /// Most queries in flight of all workers and TCP together; none: the built-in limit.
    pub concurrency_limit: Option<NonZeroUsize>,
    /// How long a query waits for a place in flight.
    pub concurrency_grace: Duration,
    /// Ask servers under pods' addresses.
    pub transparent: bool,
    /// Whether transparent mode includes servers outside of the cluster.
    pub transparent_outside: bool,
    /// Effect of acknowledgements of an agent without leases.
    pub acknowledgements: Acknowledgements,
    /// User to which the process changes after its start.
    pub user: RunAs,
    /// Which proxy gets a query.
    pub steering: SteeringMode,
    pub ipv4: bool,
    pub ipv6: bool,
    /// Number of UDP workers; by default one for each CPU, 4 at most.
    pub workers: usize,
    pub query_log: QueryLogConfig,
    /// Filter of the program's log, as in `--log-level`.
    pub log_level: String,
    pub log_format: LogFormat,
    /// Settings of the sources that are not used, for the log.
    pub notes: Vec<String>,
}

/// Why there is no configuration; all of these end the program with code 2.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(
        "--enable-ipv4=false and --enable-ipv6=false leave no address family to serve: enable one"
    )]
    NoFamily,
    /// An instance name that cannot be part of a file name.
    #[error(
        "--name {0:?}: use 1 to 63 letters, digits, '-', '_' or '.', beginning with a letter or digit"
    )]
    Name(String),
    /// A span that does not fit.
    #[error("--tofqdns-min-ttl is longer than 136 years")]
    MinTtl,
}

impl Config {
    /// Merges flags and environment (`given`) with the files they name, and fills in defaults.
    pub fn resolve(given: Settings) -> Result<Self, ConfigError> {
        let mut notes = Vec::new();
        let (config, config_dir) = (given.config.clone(), given.config_dir.clone());
        let mut merged = given;
        if let Some(path) = config {
            let found = file::read_yaml(&path)?;
            merged = merged.or(found.settings);
        }
        if let Some(dir) = config_dir {
            let found = file::read_dir(&dir)?;
            merged = merged.or(found.settings);
            if !found.ignored.is_empty() {
                notes.push(format!(
                    "--config-dir {}: keys of other programs, ignored: {}",
                    dir.display(),
                    found.ignored.join(", ")
                ));
            }
        }
        let mut config = Self::with_defaults(merged)?;
        config.notes = notes;
        Ok(config)
    }

    fn with_defaults(s: Settings) -> Result<Self, ConfigError> {
        let (ipv4, ipv6) = (s.enable_ipv4.unwrap_or(true), s.enable_ipv6.unwrap_or(true));
        if !ipv4 && !ipv6 {
            return Err(ConfigError::NoFamily);
        }
        let name = instance_name(s.name)?;
        let min_ttl = s.tofqdns_min_ttl.map_or(0, |ttl| ttl.as_secs());
        let port = s.standalone_dns_proxy_server_port;
        let reject = s
            .tofqdns_dns_reject_response_code
            .unwrap_or_else(|| default_reject(s.agent_address.as_deref(), port));
        Ok(Self {
            proxy_port: s.tofqdns_proxy_port.unwrap_or(PROXY_PORT),
            agent: s.agent_address.unwrap_or_else(|| default_agents(port)),
            bpf_root: s
                .bpf_root
                .unwrap_or_else(|| shared_maps::pin::BPF_ROOT.into()),
            state_dir: s.state_dir.unwrap_or_else(default_state_dir),
            admin_socket: s.admin_socket.unwrap_or_else(|| admin_socket_of(&name)),
            name,
            metrics: s.metrics_address.unwrap_or(MetricsAddress::At(
                (Ipv4Addr::LOCALHOST, METRICS_PORT).into(),
            )),
            journal_dir: s.journal_dir.unwrap_or_else(|| JOURNAL_DIR.into()),
            drain_timeout: s.drain_timeout.unwrap_or(Duration::from_secs(10)),
            response_max_delay: s
                .tofqdns_proxy_response_max_delay
                .unwrap_or(Duration::from_millis(100)),
            reject,
            min_ttl: u32::try_from(min_ttl).map_err(|_| ConfigError::MinTtl)?,
            concurrency_limit: s
                .dnsproxy_concurrency_limit
                .and_then(|n| NonZeroUsize::new(usize::try_from(n).unwrap_or(usize::MAX))),
            concurrency_grace: s
                .dnsproxy_concurrency_processing_grace_period
                .unwrap_or_default(),
            transparent: s.dnsproxy_enable_transparent_mode.unwrap_or(false),
            transparent_outside: s.transparent_mode_outside_cluster.unwrap_or(false),
            acknowledgements: match s.reuse_acknowledgements {
                Some(false) => Acknowledgements::CountOnce,
                _ => Acknowledgements::Reused,
            },
            user: s.user.unwrap_or_default(),
            steering: s.steering.unwrap_or(SteeringMode::Auto),
            ipv4,
            ipv6,
            workers: s.workers.map_or_else(default_workers, usize::from),
            query_log: QueryLogConfig {
                which: s.query_log.unwrap_or_default(),
                target: s.query_log_file.unwrap_or_default(),
                sample: s.query_log_sample.unwrap_or_default(),
            },
            log_level: s.log_level.unwrap_or_else(|| "info".into()),
            log_format: s.log_format.unwrap_or(LogFormat::Text),
            notes: Vec::new(),
        })
    }

    /// Loopback addresses with the proxy port, one for each enabled family.
    pub fn listeners(&self) -> Vec<SocketAddr> {
        let v4 = self.ipv4.then_some(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let v6 = self.ipv6.then_some(IpAddr::V6(Ipv6Addr::LOCALHOST));
        let both = v4.into_iter().chain(v6);
        both.map(|ip| SocketAddr::new(ip, self.proxy_port))
            .collect()
    }

    /// Addresses to bind for metrics, best first; empty if they are off.
    pub fn metrics_candidates(&self) -> Vec<SocketAddr> {
        match self.metrics {
            MetricsAddress::Off => Vec::new(),
            MetricsAddress::At(address) => vec![address],
            MetricsAddress::AnyHost(port) => {
                vec![([0u16; 8], port).into(), ([0u8; 4], port).into()]
            }
        }
    }
}

/// Admin socket of the instance called `name`.
pub(crate) fn admin_socket_of(name: &str) -> PathBuf {
    Path::new(ADMIN_DIR).join(format!("{name}.sock"))
}

/// Our agent's socket first: where there is none, that costs nothing. Cilium's key has the
/// port at which its own agent serves.
fn default_agents(port: Option<u16>) -> Vec<AgentAddress> {
    let native = AgentAddress::Unix(AGENT_SOCKET.into());
    let fqdndata = |port| {
        [
            AgentAddress::Tcp(format!("127.0.0.1:{port}")),
            AgentAddress::Tcp(format!("[::1]:{port}")),
        ]
    };
    let mut all = vec![native];
    all.extend(fqdndata(port.unwrap_or(FQDNDATA_PORT)));
    all
}

fn instance_name(given: Option<String>) -> Result<String, ConfigError> {
    let name = given.unwrap_or_else(|| format!("sdp-{}", std::process::id()));
    if !is_instance_name(&name) {
        return Err(ConfigError::Name(name));
    }
    Ok(name)
}

/// NXDOMAIN where our own agent may be the peer: with REFUSED, the search lists of musl and
/// c-ares stop before a name that policy allows. REFUSED, Cilium's default, where all that is
/// configured is how to reach Cilium's agent. Configuration decides, not which agent answers, so
/// that every proxy of a node replies alike at any time.
fn default_reject(agents: Option<&[AgentAddress]>, cilium_port: Option<u16>) -> RejectCode {
    let own_agent = match agents {
        Some(agents) => agents
            .iter()
            .any(|agent| matches!(agent, AgentAddress::Unix(_))),
        None => cilium_port.is_none(),
    };
    if own_agent {
        RejectCode::NameError
    } else {
        RejectCode::Refused
    }
}

fn default_state_dir() -> PathBuf {
    let ours = Path::new(STATE_DIR);
    let cilium = Path::new(CILIUM_STATE_DIR);
    if !ours.join("state").exists() && cilium.join("state").exists() {
        cilium.to_owned()
    } else {
        ours.to_owned()
    }
}

/// One per CPU, up to a limit.
fn default_workers() -> usize {
    std::thread::available_parallelism()
        .map_or(1, NonZeroUsize::get)
        .min(MOST_WORKERS_BY_DEFAULT)
}

fn is_instance_name(name: &str) -> bool {
    name.len() <= 63
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use clap::Parser;

    use super::{args::Cli, *};

    fn resolve(arguments: &[&str]) -> Result<Config, ConfigError> {
        let all = std::iter::once("holdfast-sdp").chain(arguments.iter().copied());
        Config::resolve(Cli::try_parse_from(all).unwrap().settings)
    }

    #[test]
    fn defaults() {
        let config = resolve(&["--name", "a"]).unwrap();
        assert_eq!(config.proxy_port, PROXY_PORT);
        assert_eq!(config.admin_socket, Path::new("/run/holdfast/sdp/a.sock"));
        assert_eq!(config.agent.len(), 3);
        assert!(matches!(config.agent[0], AgentAddress::Unix(_)));
        assert_eq!(config.response_max_delay, Duration::from_millis(100));
        assert!(config.ipv4 && config.ipv6 && config.concurrency_limit.is_none());
    }

    #[test]
    fn a_flag_overrides_the_file_and_the_file_overrides_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        let keys = dir.path().join("keys");
        fs::create_dir(&keys).unwrap();
        for key in ["tofqdns-proxy-port", "workers", "drain-timeout"] {
            fs::write(keys.join(key), "1").unwrap();
        }
        let yaml = dir.path().join("c.yaml");
        fs::write(&yaml, "tofqdns-proxy-port: 2\nworkers: 2\n").unwrap();
        let config = resolve(&[
            "--tofqdns-proxy-port=3",
            "--config",
            yaml.to_str().unwrap(),
            "--config-dir",
            keys.to_str().unwrap(),
        ])
        .unwrap();
        assert_eq!((config.proxy_port, config.workers), (3, 2));
        assert_eq!(config.drain_timeout, Duration::from_secs(1));
    }

    #[test]
    fn agent_addresses_are_repeated_or_listed() {
        for arguments in [
            &["--agent-address=unix:///a", "--agent-address=tcp://h:1"][..],
            &["--agent-address=unix:///a,tcp://h:1"],
        ] {
            let agent = resolve(arguments).unwrap().agent;
            assert_eq!(
                agent.iter().map(ToString::to_string).collect::<Vec<_>>(),
                ["unix:///a", "tcp://h:1"]
            );
        }
    }

    #[test]
    fn the_answer_to_a_refused_name_follows_from_the_configured_agent() {
        for (arguments, wanted) in [
            (&[][..], RejectCode::NameError),
            (&["--agent-address=unix:///a"], RejectCode::NameError),
            (
                &["--agent-address=tcp://h:1,unix:///a"],
                RejectCode::NameError,
            ),
            (&["--agent-address=tcp://h:1"], RejectCode::Refused),
            (
                &["--standalone-dns-proxy-server-port=1"],
                RejectCode::Refused,
            ),
            (
                &["--tofqdns-dns-reject-response-code=refused"],
                RejectCode::Refused,
            ),
            (
                &[
                    "--agent-address=tcp://h:1",
                    "--tofqdns-dns-reject-response-code=nameError",
                ],
                RejectCode::NameError,
            ),
        ] {
            assert_eq!(resolve(arguments).unwrap().reject, wanted, "{arguments:?}");
        }
    }

    #[test]
    fn settings_that_cannot_work_are_refused() {
        assert!(matches!(
            resolve(&["--name", "../x"]),
            Err(ConfigError::Name(_))
        ));
        assert!(matches!(
            resolve(&["--enable-ipv4=false", "--enable-ipv6=false"]),
            Err(ConfigError::NoFamily)
        ));
        assert!(matches!(
            resolve(&["--config", "/nowhere.yaml"]),
            Err(ConfigError::File(_))
        ));
    }
}
