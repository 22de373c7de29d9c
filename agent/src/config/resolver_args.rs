//! Flags about the refresh of names that EgressFirewalls use.

use std::{path::PathBuf, time::Duration};

use clap::{Args, ValueEnum};
use daemon::command_line::values::whole;
use dns_policy::duration;

use super::{ConfigError, existing_dir::existing_dir};
use crate::resolver::{Place, ResolverSettings, object::Settings};

/// Refresh names of EgressFirewalls by their TTLs and share them between nodes, in DNSNameResolver
/// objects (network.openshift.io/v1alpha1)
#[derive(Clone, Debug, Args)]
pub struct ResolverArgs {
    /// Directory of DNSNameResolver objects, in its subdirectory dnsnameresolvers: names of
    /// EgressFirewalls are looked up before their addresses expire, and a restarted agent begins
    /// with them. Several agents may share it; one of them writes. The agent makes, changes and
    /// removes the files; do not edit them
    #[arg(long, value_name = "DIR", value_parser = existing_dir())]
    pub resolver_dir: Option<PathBuf>,
    /// Where DNSNameResolver objects are, if not in --resolver-dir. `kube`: in the Kubernetes API,
    /// where one agent of the cluster writes them. `consume`: as `kube`, and no agent writes them,
    /// because the DNS operator of OpenShift does. With --resolver-dir, `consume` reads that directory
    /// and writes nothing
    #[arg(long, value_enum, value_name = "MODE")]
    pub resolver: Option<ResolverMode>,
    /// Namespace of the DNSNameResolver objects. The writing agent removes objects of this namespace
    /// that no EgressFirewall needs
    #[arg(
        long,
        value_name = "NAMESPACE",
        default_value = "openshift-ovn-kubernetes"
    )]
    pub resolver_namespace: String,
    /// Stands for the TTL of a record whose TTL is 0, and is the shortest time between two look-ups of
    /// a name; whole seconds, at least 1s
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "5s")]
    pub resolver_min_ttl: Duration,
    /// After this many failed look-ups in a row, the next one removes the name's addresses from its
    /// object if their TTLs are over
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 5,
        value_parser = whole(1..=1_000_000u32)
    )]
    pub resolver_failure_threshold: u32,
    /// An answer that moves the next look-up of an address by no more than this does not change the
    /// object; whole seconds
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "5s")]
    pub resolver_tolerance: Duration,
    /// With --resolver kube: how long the agent that makes objects and looks names up stays the only one
    /// if it does not renew its Lease. Then another agent continues; addresses stay open meanwhile.
    /// Each agent asks for the Lease about once in this time; whole seconds, 3s to 600s
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "60s")]
    pub resolver_lease: Duration,
}

/// `--resolver`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ResolverMode {
    /// Read and write objects in the Kubernetes API.
    Kube,
    /// Read objects, and write none.
    Consume,
}

impl ResolverArgs {
    /// The checked settings; none = names are not refreshed.
    pub(super) fn settings(
        &self,
        kubernetes: bool,
    ) -> Result<Option<ResolverSettings>, ConfigError> {
        let refused = |flag, reason: &str| ConfigError::new(flag, reason);
        let place = match (&self.resolver_dir, self.resolver) {
            (None, None) => return Ok(None),
            (Some(_), Some(ResolverMode::Kube)) => {
                return Err(refused(
                    "resolver",
                    "kube and --resolver-dir are two places for the same objects; leave one out",
                ));
            }
            (Some(dir), _) => Place::Directory(dir.clone()),
            (None, Some(_)) if !kubernetes => {
                return Err(refused(
                    "resolver",
                    "has no effect without --kubernetes; add that, or use --resolver-dir DIR",
                ));
            }
            (None, Some(_)) => Place::Kubernetes,
        };
        let namespace = self.resolver_namespace.clone();
        let is_name = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        if namespace.is_empty() || namespace.len() > 63 || !namespace.bytes().all(is_name) {
            return Err(refused(
                "resolver-namespace",
                &format!(
                    "{namespace:?} is not the name of a namespace; write for example openshift-ovn-kubernetes"
                ),
            ));
        }
        let lease = self.resolver_lease;
        if lease.subsec_nanos() != 0 || !(3..=600).contains(&lease.as_secs()) {
            let reason = format!("{lease:?} is not 3 to 600 whole seconds; write for example 60s");
            return Err(refused("resolver-lease", &reason));
        }
        Ok(Some(ResolverSettings {
            place,
            lease,
            writes: self.resolver != Some(ResolverMode::Consume),
            namespace,
            settings: Settings {
                min_ttl: seconds("resolver-min-ttl", self.resolver_min_ttl, 1)?,
                failure_threshold: self.resolver_failure_threshold,
                tolerance: seconds("resolver-tolerance", self.resolver_tolerance, 0)?,
            },
        }))
    }
}

fn seconds(flag: &'static str, value: Duration, least: u32) -> Result<u32, ConfigError> {
    let seconds = u32::try_from(value.as_secs()).ok();
    let seconds = seconds.filter(|seconds| (least..=86_400).contains(seconds));
    seconds
        .filter(|_| value.subsec_nanos() == 0)
        .ok_or_else(|| {
            ConfigError::new(
                flag,
                format!("{value:?} is not {least} to 86400 whole seconds; write for example 5s"),
            )
        })
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        config::{Cli, Command, Config},
        resolver::vectors,
    };

    fn run(flags: &[String]) -> Result<Option<ResolverSettings>, String> {
        let line = ["holdfast-agent", "run"].map(str::to_owned);
        let line = line.into_iter().chain(flags.iter().cloned());
        let cli = Cli::try_parse_from(line).map_err(|error| error.to_string())?;
        let Command::Run(args) = cli.command else {
            panic!("not run");
        };
        let config = Config::try_from(*args).map_err(|error| error.to_string())?;
        Ok(config.resolver)
    }

    /// The plugin's options: each has the values that are written after it.
    fn of_options(options: &Value) -> Vec<String> {
        let mut flags = vec!["--resolver-dir=/".to_owned()];
        for (option, values) in options.as_object().unwrap() {
            let values: Vec<String> = serde_json::from_value(values.clone()).unwrap();
            let flag = match option.as_str() {
                "namespaces" => "--resolver-namespace",
                "minTTL" => "--resolver-min-ttl",
                "failureThreshold" => "--resolver-failure-threshold",
                "$argument" => {
                    flags.extend(values);
                    continue;
                }
                _ => "--resolver-bogus",
            };
            match values.first() {
                Some(value) => flags.push(format!("{flag}={value}")),
                None => flags.push(flag.to_owned()),
            }
        }
        flags
    }

    #[test]
    fn flags_are_accepted_and_refused_as_the_plugins_options_are() {
        let cases = vectors::cases();
        let cases = cases.iter().filter(|case| case["group"] == "plugin_config");
        let mut count = 0;
        for case in cases {
            let (id, expect) = (&case["id"], &case["expect"]);
            let parsed = run(&of_options(&case["given"]["options"]));
            assert_eq!(expect["error"], json!(parsed.is_err()), "{id}: {parsed:?}");
            if let Ok(parsed) = parsed {
                let settings = parsed.unwrap().settings;
                assert_eq!(expect["minTTL"], json!(settings.min_ttl), "{id}");
                let threshold = json!(settings.failure_threshold);
                assert_eq!(expect["failureThreshold"], threshold, "{id}");
            }
            count += 1;
        }
        assert_eq!(count, 14);
    }

    #[test]
    fn the_place_of_objects_is_one_that_can_be_used() {
        let flags = |flags: &[&str]| {
            run(&flags
                .iter()
                .map(|flag| (*flag).to_owned())
                .collect::<Vec<_>>())
        };
        assert_eq!(flags(&[]), Ok(None));
        let consumed = flags(&["--resolver-dir=/", "--resolver=consume"])
            .unwrap()
            .unwrap();
        assert!(!consumed.writes && consumed.place == Place::Directory("/".into()));
        for (given, says) in [
            (
                &["--resolver=kube"][..],
                "--resolver: has no effect without --kubernetes",
            ),
            (&["--resolver=kube", "--resolver-dir=/"], "leave one out"),
            (
                &["--resolver-dir=/does/not/exist"],
                "/does/not/exist is not a directory; create it first",
            ),
            (
                &["--resolver-dir=/", "--resolver-min-ttl=1500ms"],
                "--resolver-min-ttl: 1.5s is not 1 to 86400 whole seconds",
            ),
            (
                &["--resolver-dir=/", "--resolver-namespace=A b"],
                "--resolver-namespace: \"A b\" is not",
            ),
            (
                &["--resolver-dir=/", "--resolver-lease=2s"],
                "--resolver-lease: 2s is not 3 to 600 whole seconds",
            ),
        ] {
            let error = flags(given).unwrap_err();
            assert!(error.contains(says), "{given:?}: {error}");
        }
    }
}
