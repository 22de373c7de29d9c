//! The settings of a run by the names of its flags: what a standby compares with the owner's.

use std::collections::BTreeMap;

use clap::{ArgMatches, Command};
use serde::{Deserialize, Serialize};

/// Flags that two agents of one node may have different: they change nothing that is in force.
const MAY_DIFFER: [&str; 6] = [
    "config",
    "config_dir",
    "log_format",
    "log_level",
    "metrics_address",
    "standby",
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

    /// What another run has different, as text.
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
    fn what_is_in_force_is_compared_and_the_log_is_not() {
        let one = settings(&["--log-level=debug", "--standby", "--metrics-address=off"]);
        assert_eq!(one.differences(&settings(&[])), Vec::<String>::new());
        let other = settings(&["--enable-ipv6=false", "--k8s-dns-alias=a,b"]);
        let found = one.differences(&other);
        assert_eq!(found.len(), 2, "{found:?}");
        assert_eq!(found[0], "--enable-ipv6 is true here, and false there");
        assert!(
            found[1].starts_with("--k8s-dns-alias is not set here"),
            "{found:?}"
        );
    }
}
