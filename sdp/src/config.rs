//! The proxy's configuration: every default, and how the sources are merged.

use std::{
    ffi::OsString,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    num::NonZeroUsize,
    path::{Path, PathBuf},
};

pub mod args;
mod file;

pub use args::{AgentAddress, SteeringMode};
use args::{Cli, Settings};
use clap::{CommandFactory as _, Parser as _};
use daemon::settings_file;
use dns_policy::reject_code::RejectCode;
use file::FileError;

/// Default port of the FQDNData service.
const FQDNDATA_PORT: u16 = 10095;
/// Default socket of the agent's native service.
const AGENT_SOCKET: &str = "/run/holdfast/sdp.sock";
/// Directory of the proxies' admin sockets.
pub(crate) const ADMIN_DIR: &str = "/run/holdfast/sdp";
const STATE_DIR: &str = "/var/run/holdfast";
const CILIUM_STATE_DIR: &str = "/var/run/cilium";
/// Maximum number of workers. The steering maps have few slots, and more workers would get none.
const MAX_WORKERS: usize = 16;
/// Default limit on workers, so small that several replicas find slots at the same time.
pub(crate) const MOST_WORKERS_BY_DEFAULT: usize = MAX_WORKERS / 4;

/// Everything the proxy needs to know to run.
#[derive(Clone, Debug)]
pub struct Config {
    /// The flags, for all settings that depend on no other setting.
    pub flags: Settings,
    /// Addresses of the agent, in the order in which they are tried.
    pub agent: Vec<AgentAddress>,
    /// Directory whose `state/` holds the endpoints' files.
    pub state_dir: PathBuf,
    /// Name of this instance, which is part of file names.
    pub name: String,
    pub admin_socket: PathBuf,
    /// How forbidden queries are answered.
    pub reject: RejectCode,
    /// Number of UDP workers.
    pub workers: usize,
    /// Notes for the log about settings that are not used.
    pub notes: Vec<String>,
}

/// Why there is no configuration. Each of these errors ends the program with exit code 2.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error(transparent)]
    Usage(#[from] clap::Error),
    #[error(transparent)]
    File(#[from] FileError),
    #[error(
        "--enable-ipv4=false and --enable-ipv6=false leave no address family to serve: enable one"
    )]
    NoFamily,
}

impl Config {
    /// Completes a command line and its environment with the files that they name, and with
    /// defaults.
    pub fn resolve(line: impl IntoIterator<Item = OsString>) -> Result<Self, ConfigError> {
        let mut line: Vec<_> = line.into_iter().collect();
        let program = Cli::command();
        let matches = program.clone().try_get_matches_from(&line)?;
        let found = settings_file::read("holdfast-sdp", &program, &matches, file::directory)?;
        let mut notes = Vec::new();
        if let Some(dir) = matches.get_one::<PathBuf>("config_dir")
            && !found.ignored.is_empty()
        {
            notes.push(format!(
                "--config-dir {}: keys of other programs, ignored: {}",
                dir.display(),
                found.ignored.join(", ")
            ));
        }
        line.splice(1..1, found.arguments);
        Self::with_defaults(Cli::try_parse_from(line)?.settings, notes)
    }

    fn with_defaults(flags: Settings, notes: Vec<String>) -> Result<Self, ConfigError> {
        if !flags.enable_ipv4 && !flags.enable_ipv6 {
            return Err(ConfigError::NoFamily);
        }
        let name = flags.name.clone();
        let name = name.unwrap_or_else(|| format!("sdp-{}", std::process::id()));
        let admin_socket = flags.admin_socket.clone();
        let reject = flags.tofqdns_dns_reject_response_code;
        Ok(Self {
            agent: agents(&flags),
            state_dir: flags.state_dir.clone().unwrap_or_else(default_state_dir),
            admin_socket: admin_socket.unwrap_or_else(|| admin_socket_of(&name)),
            name,
            reject: reject.unwrap_or_else(|| default_reject(&flags)),
            workers: flags.workers.map_or_else(default_workers, usize::from),
            flags,
            notes,
        })
    }

    /// Loopback addresses with the proxy port, one for each enabled family.
    pub fn listeners(&self) -> Vec<SocketAddr> {
        let flags = &self.flags;
        let v4 = flags.enable_ipv4.then_some(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let v6 = flags.enable_ipv6.then_some(IpAddr::V6(Ipv6Addr::LOCALHOST));
        let both = v4.into_iter().chain(v6);
        both.map(|ip| SocketAddr::new(ip, flags.tofqdns_proxy_port))
            .collect()
    }

    /// Addresses to bind for metrics, best first; empty if metrics are off.
    pub fn metrics_candidates(&self) -> Vec<SocketAddr> {
        self.flags.metrics_address.candidates()
    }
}

/// Admin socket of the instance called `name`.
pub(crate) fn admin_socket_of(name: &str) -> PathBuf {
    Path::new(ADMIN_DIR).join(format!("{name}.sock"))
}

/// By default, the socket of our agent is tried first, which costs nothing if it does not exist.
/// Cilium's key gives the port of Cilium's agent.
fn agents(flags: &Settings) -> Vec<AgentAddress> {
    if !flags.agent_address.is_empty() {
        return flags.agent_address.clone();
    }
    let port = flags.standalone_dns_proxy_server_port;
    let port = port.unwrap_or(FQDNDATA_PORT);
    vec![
        AgentAddress::Unix(AGENT_SOCKET.into()),
        AgentAddress::Tcp(format!("127.0.0.1:{port}")),
        AgentAddress::Tcp(format!("[::1]:{port}")),
    ]
}

/// NXDOMAIN if our own agent may be the peer: with REFUSED, the search lists of musl and c-ares
/// stop before a name that policy allows. REFUSED, Cilium's default, if the configuration only says
/// how to reach Cilium's agent. The configuration decides, and not which agent answers, so that all
/// proxies of a node reply alike at any time.
fn default_reject(flags: &Settings) -> RejectCode {
    let is_own = |agent| matches!(agent, &AgentAddress::Unix(_));
    let own_agent = match flags.agent_address.as_slice() {
        [] => flags.standalone_dns_proxy_server_port.is_none(),
        agents => agents.iter().any(is_own),
    };
    match own_agent {
        true => RejectCode::NameError,
        false => RejectCode::Refused,
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

/// One worker per CPU, up to a limit.
fn default_workers() -> usize {
    std::thread::available_parallelism()
        .map_or(1, NonZeroUsize::get)
        .min(MOST_WORKERS_BY_DEFAULT)
}

#[cfg(test)]
mod tests {
    use std::{fs, time::Duration};

    use super::*;

    fn resolve(arguments: &[&str]) -> Result<Config, ConfigError> {
        let all = std::iter::once("holdfast-sdp").chain(arguments.iter().copied());
        Config::resolve(all.map(OsString::from))
    }

    #[test]
    fn defaults() {
        let config = resolve(&["--name", "a"]).unwrap();
        let flags = &config.flags;
        assert_eq!(flags.tofqdns_proxy_port, 10094);
        assert_eq!(config.admin_socket, Path::new("/run/holdfast/sdp/a.sock"));
        assert_eq!(config.agent.len(), 3);
        assert!(matches!(config.agent[0], AgentAddress::Unix(_)));
        let delay = flags.tofqdns_proxy_response_max_delay;
        assert_eq!(delay, Duration::from_millis(100));
        assert!(flags.enable_ipv4 && flags.enable_ipv6);
        assert_eq!(flags.dnsproxy_concurrency_limit, 0);
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
        assert_eq!((config.flags.tofqdns_proxy_port, config.workers), (3, 2));
        assert_eq!(config.flags.drain_timeout, Duration::from_secs(1));
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
        for arguments in [&["--name", "../x"][..], &["--tofqdns-min-ttl", "2000000h"]] {
            let error = resolve(arguments).unwrap_err().to_string();
            assert!(error.contains(arguments[0]), "{error}");
        }
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
