//! `holdfast-agent relay`, and the flags of an agent that follows relays.

use std::{
    net::{Ipv6Addr, SocketAddr},
    path::PathBuf,
};

use agent_cluster::{
    ApiSettings,
    relay::credentials,
    relay_settings::{RelayConfig, RelaySettings, TlsFile, TlsFiles},
};
use clap::{ArgAction, Args};
use daemon::{
    command_line::{
        file_args::FileArgs,
        log_args::LogArgs,
        metrics_address::MetricsAddress,
        values::{socket_address, whole},
    },
    flags,
};

use super::{ConfigError, IdentityAllocation, host_name::host_name};

/// Name in the relays' certificate, unless a flag says another.
const SERVER_NAME: &str = "holdfast-relay";

/// Flags of `run` about relays.
#[derive(Clone, Debug, Args)]
pub struct FollowArgs {
    /// Read the objects of the cluster from a relay (`holdfast-agent relay`) and not from the API
    /// server, as host:port; several with commas, of which the next is tried when one fails. For
    /// clusters of more than about 1,000 nodes: a change of a pod is 10 KB from the API server to each
    /// agent, and some 300 bytes from a relay. The agent still writes its CiliumNode at the API server
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',', value_parser = relay_address)]
    pub k8s_relay: Vec<String>,
    /// CA that signed the relays' certificate, in the PEM format
    #[arg(long, value_name = "FILE")]
    pub k8s_relay_ca: Option<PathBuf>,
    /// Certificate that this agent shows to relays, in the PEM format; the relay's --client-ca signed
    /// it. A renewed one is used for the next connection
    #[arg(long, value_name = "FILE")]
    pub k8s_relay_cert: Option<PathBuf>,
    /// Private key of --k8s-relay-cert
    #[arg(long, value_name = "FILE")]
    pub k8s_relay_key: Option<PathBuf>,
    /// Name that the relays' certificate has
    #[arg(long, value_name = "NAME", default_value = SERVER_NAME)]
    pub k8s_relay_server_name: String,
    /// Connect to relays without TLS. Only to addresses of loopback, for trials: the process that answers
    /// there decides what pods and policies the agent sees
    #[arg(long, default_value_t = false, action = ArgAction::Set)]
    pub k8s_relay_plaintext: bool,
}

/// `holdfast-agent relay`
#[derive(Clone, Debug, Args)]
#[command(
    mut_args = flags::complete,
    after_help = "A relay reads the objects of the cluster once and sends them to its agents, which are \
                  started with --kubernetes --k8s-relay HOST:PORT. About 200 agents for each relay; run at \
                  least two.\n\n\
                  Both sides show a certificate. With openssl, in a directory for the secrets:\n  \
                  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 \\\n    \
                  -subj /CN=holdfast-relay-ca -keyout ca.key -out ca.crt\n  \
                  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 \\\n    \
                  -CA ca.crt -CAkey ca.key -subj /CN=holdfast-relay -addext subjectAltName=DNS:holdfast-relay \\\n    \
                  -addext basicConstraints=critical,CA:FALSE -keyout tls.key -out tls.crt\n\
                  and the same with /CN=holdfast-agent for the agents. The chart makes them (relay.enabled=true)."
)]
pub struct RelayArgs {
    #[command(flatten)]
    pub kubernetes: ApiSettings,
    /// The cluster is older than Kubernetes 1.33 and has no ServiceCIDR objects; its agents are started
    /// with --k8s-service-cidr
    #[arg(
        long,
        default_value_t = false,
        action = ArgAction::Set,
        env = "HOLDFAST_RELAY_WITHOUT_SERVICE_CIDRS"
    )]
    pub without_service_cidrs: bool,
    /// Who gives the labels of pods their number, as the agents' --identity-allocation: with cluster, the
    /// relay sends CiliumIdentities
    #[arg(
        long,
        value_enum,
        value_name = "WHO",
        default_value_t = IdentityAllocation::Node,
        env = "HOLDFAST_RELAY_IDENTITY_ALLOCATION"
    )]
    pub identity_allocation: IdentityAllocation,
    /// Send CiliumWorldCIDRs, which agents with --high-scale-ipcache read
    #[arg(
        long,
        default_value_t = false,
        action = ArgAction::Set,
        env = "HOLDFAST_RELAY_WITH_WORLD_CIDRS"
    )]
    pub with_world_cidrs: bool,
    /// Address and port for agents
    #[arg(
        long,
        value_name = "ADDRESS:PORT",
        value_parser = socket_address,
        default_value = "0.0.0.0:9971",
        env = "HOLDFAST_RELAY_LISTEN"
    )]
    pub listen: SocketAddr,
    /// Certificate that the relay shows to agents, in the PEM format, with the name of the agents'
    /// --k8s-relay-server-name. A renewed one is used within 10 seconds, without a restart
    #[arg(long, value_name = "FILE", env = "HOLDFAST_RELAY_TLS_CERT")]
    pub tls_cert: Option<PathBuf>,
    /// Private key of --tls-cert
    #[arg(long, value_name = "FILE", env = "HOLDFAST_RELAY_TLS_KEY")]
    pub tls_key: Option<PathBuf>,
    /// CA that signed the agents' certificates, in the PEM format. It must sign nothing else: every
    /// holder of such a certificate may read the objects of the cluster here. Agents that a renewed CA
    /// did not sign are disconnected: to replace a CA, write both into the file until every agent has
    /// its new certificate
    #[arg(long, value_name = "FILE", env = "HOLDFAST_RELAY_CLIENT_CA")]
    pub client_ca: Option<PathBuf>,
    /// Serve without TLS. Only on an address of loopback, for trials
    #[arg(long, default_value_t = false, action = ArgAction::Set, env = "HOLDFAST_RELAY_PLAINTEXT")]
    pub plaintext: bool,
    /// Most agents at once; one more is refused and tries another relay. One address gets at most half
    /// of them, so that one host cannot keep the others out
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1000,
        value_parser = whole(1..=100_000u32),
        env = "HOLDFAST_RELAY_MAX_AGENTS"
    )]
    pub max_agents: u32,
    /// Name of this instance, where it reports refused objects [default: the host name]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Address of /metrics, /healthz and /readyz: HOST:PORT, :PORT for every address of the node, or off
    #[arg(long, value_name = "[HOST]:PORT", default_value = "127.0.0.1:9972")]
    pub metrics_address: MetricsAddress,
    #[command(flatten)]
    pub files: FileArgs,
    #[command(flatten)]
    pub log: LogArgs,
}

impl TryFrom<RelayArgs> for RelayConfig {
    type Error = ConfigError;

    fn try_from(args: RelayArgs) -> Result<Self, ConfigError> {
        let flags = Flags {
            authority: "client-ca",
            certificate: "tls-cert",
            key: "tls-key",
            plaintext: "plaintext",
        };
        if args.plaintext && !args.listen.ip().is_loopback() {
            return Err(ConfigError::new(
                "listen",
                format!(
                    "{} is not an address of loopback, and --plaintext has no protection; write for \
                     example 127.0.0.1:9971, or give --tls-cert, --tls-key and --client-ca",
                    args.listen
                ),
            ));
        }
        let files = [args.client_ca, args.tls_cert, args.tls_key];
        Ok(Self {
            tls: tls(&flags, files, args.plaintext)?,
            kubernetes: args.kubernetes,
            has_service_blocks: args.without_service_cidrs,
            has_identities: args.identity_allocation == IdentityAllocation::Cluster,
            has_world_cidrs: args.with_world_cidrs,
            listen: args.listen,
            agents_max: usize::try_from(args.max_agents).unwrap_or(usize::MAX),
            name: args.name.unwrap_or_else(host_name),
            metrics_address: args.metrics_address,
        })
    }
}

/// The relays that an agent follows; none without `--k8s-relay`.
pub(super) fn relays(args: FollowArgs) -> Result<Option<RelaySettings>, ConfigError> {
    let flags = Flags {
        authority: "k8s-relay-ca",
        certificate: "k8s-relay-cert",
        key: "k8s-relay-key",
        plaintext: "k8s-relay-plaintext",
    };
    let files = [args.k8s_relay_ca, args.k8s_relay_cert, args.k8s_relay_key];
    if args.k8s_relay.is_empty() {
        let given = [flags.authority, flags.certificate, flags.key];
        let given = given.into_iter().zip(files.map(|file| file.is_some()));
        let mut given = given.chain([(flags.plaintext, args.k8s_relay_plaintext)]);
        return match given.find(|(_, is_given)| *is_given) {
            None => Ok(None),
            Some((flag, _)) => Err(ConfigError::new(
                flag,
                "has no effect without --k8s-relay; add that, or leave this out",
            )),
        };
    }
    if args.k8s_relay_plaintext
        && let Some(other) = args.k8s_relay.iter().find(|address| !is_loopback(address))
    {
        return Err(ConfigError::new(
            "k8s-relay",
            format!(
                "{other} is not an address of loopback, and --k8s-relay-plaintext has no protection; \
                 give --k8s-relay-ca, --k8s-relay-cert and --k8s-relay-key"
            ),
        ));
    }
    Ok(Some(RelaySettings {
        tls: tls(&flags, files, args.k8s_relay_plaintext)?,
        addresses: args.k8s_relay,
        server_name: args.k8s_relay_server_name,
    }))
}

/// Names of the flags of one side.
struct Flags {
    authority: &'static str,
    certificate: &'static str,
    key: &'static str,
    plaintext: &'static str,
}

/// Checks that the three files are given and can be used.
fn tls(
    flags: &Flags,
    [authority, certificate, key]: [Option<PathBuf>; 3],
    is_plain: bool,
) -> Result<Option<TlsFiles>, ConfigError> {
    if is_plain {
        let names = [flags.authority, flags.certificate, flags.key];
        let mut given = names.into_iter().zip([authority, certificate, key]);
        return match given.find(|(_, file)| file.is_some()) {
            None => Ok(None),
            Some((flag, _)) => Err(ConfigError::new(
                flag,
                format!(
                    "has no effect with --{}, which turns TLS off; leave one of the two out",
                    flags.plaintext
                ),
            )),
        };
    }
    let given = |file: Option<PathBuf>, flag: &'static str| {
        file.ok_or_else(|| ConfigError {
            flag,
            reason: format!(
                "is missing: relays and agents show a certificate to each other; give --{}, --{} and \
                 --{} (`holdfast-agent relay --help` says how to make them; for a trial on loopback \
                 --{})",
                flags.authority, flags.certificate, flags.key, flags.plaintext
            ),
        })
    };
    let files = TlsFiles {
        authority: given(authority, flags.authority)?,
        certificate: given(certificate, flags.certificate)?,
        key: given(key, flags.key)?,
    };
    credentials::check(&files).map_err(|error| ConfigError {
        flag: match error.file {
            TlsFile::Authority => flags.authority,
            TlsFile::Certificate => flags.certificate,
            TlsFile::Key => flags.key,
        },
        reason: error.to_string(),
    })?;
    Ok(Some(files))
}

fn is_loopback(address: &str) -> bool {
    let address: Result<SocketAddr, _> = address.parse();
    address.is_ok_and(|address| address.ip().is_loopback())
}

/// Checks that the address of a relay is `host:port`. A port of 0 is refused.
fn relay_address(text: &str) -> Result<String, String> {
    let example = "write for example 192.0.2.1:9971 or [2001:db8::1]:9971";
    let (host, port) = text.rsplit_once(':').ok_or(example)?;
    let of_name = |c: char| c.is_ascii_alphanumeric() || c == '.' || c == '-';
    let bracketed = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'));
    let is_host = match bracketed {
        Some(address) => address.parse::<Ipv6Addr>().is_ok(),
        None => !host.is_empty() && host.chars().all(of_name),
    };
    let is_good = is_host && port.parse::<u16>().is_ok_and(|port| port != 0);
    match is_good {
        true => Ok(text.to_owned()),
        false => Err(format!("`{text}` is not host:port; {example}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relay_is_a_host_and_a_port() {
        for good in [
            "192.0.2.1:9971",
            "[2001:db8::1]:9971",
            "relay-1.example.org:1",
        ] {
            assert_eq!(relay_address(good), Ok(good.to_owned()));
        }
        for bad in [
            "",
            "192.0.2.1",
            "192.0.2.1:0",
            "2001:db8::1:9971",
            "[x]:1",
            ":1",
            "$(RELAY):1",
            "a/b:1",
        ] {
            let error = relay_address(bad).unwrap_err();
            assert!(error.contains("192.0.2.1:9971"), "{bad}: {error}");
        }
    }

    /// `relay`, or `run` with relays.
    fn refused(command: &str, flags: &[String]) -> String {
        use clap::Parser as _;
        let line = ["holdfast-agent", command].map(str::to_owned);
        let cli = crate::config::Cli::parse_from(line.iter().chain(flags));
        let refused = match cli.command {
            crate::config::Command::Relay(args) => RelayConfig::try_from(*args).map(drop),
            crate::config::Command::Run(args) => relays(args.follow).map(drop),
            _ => panic!("{command}"),
        };
        refused.unwrap_err().to_string()
    }

    #[test]
    #[cfg(feature = "kubernetes")]
    fn files_that_do_not_belong_together_are_named_by_the_flags_of_their_side() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        let of = |name: &str| {
            let key = rcgen::KeyPair::generate().unwrap();
            let params = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
            let certificate = params.self_signed(&key).unwrap();
            std::fs::write(path(&format!("{name}.crt")), certificate.pem()).unwrap();
            std::fs::write(path(&format!("{name}.key")), key.serialize_pem()).unwrap();
        };
        of("a");
        of("b");
        let broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        std::fs::write(path("broken"), broken).unwrap();
        let mismatch = format!(
            "it is not the certificate of the private key in {}",
            path("b.key")
        );
        for (files, of_relay, of_agent, reason) in [
            (
                ["a.crt", "a.crt", "b.key"],
                "tls-cert",
                "k8s-relay-cert",
                mismatch.as_str(),
            ),
            (
                ["broken", "a.crt", "a.key"],
                "client-ca",
                "k8s-relay-ca",
                "authority",
            ),
            (
                ["a.crt", "broken", "a.key"],
                "tls-cert",
                "k8s-relay-cert",
                "PEM format",
            ),
            (
                ["a.crt", "a.crt", "a.crt"],
                "tls-key",
                "k8s-relay-key",
                "private key",
            ),
        ] {
            for (command, names, flag) in [
                ("relay", ["client-ca", "tls-cert", "tls-key"], of_relay),
                (
                    "run",
                    ["k8s-relay-ca", "k8s-relay-cert", "k8s-relay-key"],
                    of_agent,
                ),
            ] {
                let flags = names.iter().zip(files);
                let flags = flags.map(|(name, file)| format!("--{name}={}", path(file)));
                let mut flags: Vec<String> = flags.collect();
                if command == "run" {
                    flags.push("--k8s-relay=192.0.2.1:9971".to_owned());
                }
                let error = refused(command, &flags);
                assert!(
                    error.starts_with(&format!("--{flag}: {}", dir.path().display())),
                    "{error}"
                );
                assert!(error.contains(reason) && error.contains("write"), "{error}");
            }
        }
    }

    #[test]
    fn plain_text_with_certificates_is_refused() {
        let flags = ["--plaintext", "--listen=127.0.0.1:9971", "--tls-cert=a"];
        let error = refused("relay", &flags.map(str::to_owned));
        assert!(
            error.starts_with("--tls-cert: has no effect with --plaintext"),
            "{error}"
        );
        let flags = [
            "--k8s-relay=127.0.0.1:9971",
            "--k8s-relay-plaintext",
            "--k8s-relay-ca=a",
        ];
        let error = refused("run", &flags.map(str::to_owned));
        assert!(
            error.starts_with("--k8s-relay-ca: has no effect with --k8s-relay-plaintext"),
            "{error}"
        );
    }
}
