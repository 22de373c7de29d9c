//! Rules that hold for every flag of `run`, `relay` and `cleanup`.

use std::path::PathBuf;

use clap::{
    Arg, ArgAction,
    builder::{PathBufValueParser, TypedValueParser},
};

/// Completes a flag. Its environment variable is `HOLDFAST_` and its name in capitals, unless it has
/// another one. A flag that is true or false may stand without a value.
pub(super) fn complete(arg: Arg) -> Arg {
    if matches!(arg.get_action(), ArgAction::SetTrue) {
        return arg;
    }
    let variable = match (arg.get_env(), arg.get_long()) {
        (None, Some(flag)) => format!("HOLDFAST_{}", flag.to_uppercase().replace('-', "_")),
        _ => return complete_bool(arg),
    };
    complete_bool(arg.env(variable))
}

fn complete_bool(arg: Arg) -> Arg {
    match is_bool(&arg) {
        true => arg
            .num_args(0..=1)
            .default_missing_value("true")
            .require_equals(true),
        false => arg,
    }
}

/// Whether a flag takes the value true or false.
pub(super) fn is_bool(arg: &Arg) -> bool {
    let values = arg.get_possible_values();
    values.iter().any(|value| value.get_name() == "true")
}

/// The path of a directory that exists.
pub(super) fn existing_dir() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path| match path.is_dir() {
        true => Ok(path),
        false => Err(format!(
            "{} is not a directory; create it first",
            path.display()
        )),
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use crate::config::Cli;

    #[test]
    fn a_flag_has_the_variable_of_its_name_or_one_of_its_own() {
        let variable = |command: &str, flag: &str| {
            let all = Cli::command();
            let command = all.find_subcommand(command).unwrap();
            let mut flags = command.get_arguments();
            let flag = flags.find(|arg| arg.get_long() == Some(flag)).unwrap();
            let variable = flag.get_env().map(|name| name.to_str().unwrap());
            variable.map(str::to_owned)
        };
        for (command, flag, expected) in [
            ("run", "tofqdns-min-ttl", Some("HOLDFAST_TOFQDNS_MIN_TTL")),
            (
                "run",
                "policy-deny-response",
                Some("HOLDFAST_POLICY_DENY_RESPONSE"),
            ),
            ("run", "kubernetes", Some("HOLDFAST_KUBERNETES")),
            ("run", "log-json", None),
            ("relay", "name", Some("HOLDFAST_NAME")),
            ("relay", "listen", Some("HOLDFAST_RELAY_LISTEN")),
            ("cleanup", "host-root", Some("HOLDFAST_HOST_ROOT")),
        ] {
            assert_eq!(variable(command, flag).as_deref(), expected, "{flag}");
        }
    }
}
