//! The settings of a run by the names of its flags: what a standby compares with the owner's.

use std::{collections::BTreeMap, path::Path};

use clap::{ArgMatches, Command};
use serde::{Deserialize, Serialize};

/// Flags that may differ between two agents of one node: they change nothing that is in force.
const MAY_DIFFER: [&str; 8] = [
    "config",
    "config_dir",
    "log_format",
    "log_level",
    "metrics_address",
    "standby",
    "standby_expected",
    "standby_max_delay",
];

/// Paths at which proxies, commands and the next owner find an owner's files and sockets. They may not differ in a
/// takeover. The state directory is compared by its lock.
const PLACES: [&str; 5] = [
    "admin-socket",
    "bpf-root",
    "endpoint-store",
    "sdp-group",
    "sdp-socket",
];

/// Values of flags, by the flag's name without dashes in front. Defaults are included.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Settings(BTreeMap<String, Vec<String>>);

impl Settings {
    /// The values that a command line has for the flags of `command`.
    pub(crate) fn of(command: &Command, matches: &ArgMatches) -> Self {
        let ids = command.get_arguments().map(|flag| flag.get_id().as_str());
        let compared = ids.filter(|id| !MAY_DIFFER.contains(id));
        let values = compared.filter_map(|id| {
            let raw = matches.try_get_raw(id).ok().flatten()?;
            let values = raw.map(|value| value.to_string_lossy().into_owned());
            Some((id.replace('_', "-"), values.collect()))
        });
        Self(values.collect())
    }

    /// Directory of the owner's pins, as it was given.
    pub(crate) fn bpf_root(&self) -> Option<&Path> {
        let [root] = self.0.get("bpf-root")?.as_slice() else {
            return None;
        };
        Some(Path::new(root))
    }

    /// Like [`Self::differences`], for the settings that every agent must have in common with the owner.
    pub(crate) fn differences_in_places(&self, of_owner: &Self) -> Vec<String> {
        let of = |settings: &Self| {
            let all = settings.0.clone().into_iter();
            Self(
                all.filter(|(name, _)| PLACES.contains(&name.as_str()))
                    .collect(),
            )
        };
        of(self).differences(&of(of_owner))
    }

    /// The settings that differ between the owner and this run, as text.
    pub(crate) fn differences(&self, of_owner: &Self) -> Vec<String> {
        let names = self.0.keys().chain(of_owner.0.keys());
        let names: std::collections::BTreeSet<&String> = names.collect();
        let value = |settings: &Self, name: &String| {
            settings
                .0
                .get(name)
                .map_or_else(|| "not set".to_owned(), |values| values.join(","))
        };
        names
            .into_iter()
            .filter(|name| self.0.get(*name) != of_owner.0.get(*name))
            .map(|name| {
                format!(
                    "--{name} is {} here, and {} there",
                    value(self, name),
                    value(of_owner, name)
                )
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::command;
    use super::*;

    fn settings(flags: &[&str]) -> Settings {
        let line = ["holdfast-agent", "run"].iter().chain(flags);
        let program = command();
        let matches = program.clone().try_get_matches_from(line).unwrap();
        let run = program.find_subcommand("run").unwrap();
        Settings::of(run, matches.subcommand_matches("run").unwrap())
    }

    #[test]
    fn an_upgrade_may_change_settings_and_no_place() {
        let owner = settings(&[]);
        let upgrade = settings(&["--enable-ipv6=false", "--bpf-root=/sys/fs/bpf/second"]);
        let found = upgrade.differences_in_places(&owner);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with("--bpf-root is /sys/fs/bpf/second here"));
        assert_eq!(owner.bpf_root(), Some(Path::new("/sys/fs/bpf")));
        // Each name is one of a flag.
        let known = |name: &&&str| owner.0.contains_key(**name);
        assert_eq!(PLACES.iter().filter(known).count(), PLACES.len());
    }

    #[test]
    fn what_is_in_force_is_compared_and_the_log_is_not() {
        let one = settings(&["--log-level=debug", "--standby", "--metrics-address=off"]);
        assert_eq!(one.differences(&settings(&[])), Vec::<String>::new());
        let other = settings(&[
            "--enable-ipv6=false",
            "--k8s-dns-alias=169.254.20.10=kube-system/kube-dns",
        ]);
        let found = one.differences(&other);
        assert_eq!(found.len(), 2, "{found:?}");
        assert_eq!(found[0], "--enable-ipv6 is true here, and false there");
        assert!(
            found[1].starts_with("--k8s-dns-alias is not set here"),
            "{found:?}"
        );
    }
}
