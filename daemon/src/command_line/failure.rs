//! How a command ends: exit codes, and one line on standard error for a failure.

use std::{error::Error, ffi::OsString, fmt::Display, process::ExitCode};

use clap::{
    Arg, Command,
    error::{ContextKind, ContextValue, ErrorKind},
};

use super::terminal::harmless;

/// The command failed, or its answer is no: not allowed, not ready, refused.
pub const FAILED: u8 = 1;
/// Wrong usage or configuration.
pub const USAGE: u8 = 2;

/// Text of `--help` about exit codes.
pub const EXIT_CODES: &str = "Exit codes: 0 success; 1 failure, or the answer is no (not allowed, not ready, \
                              refused); 2 wrong usage or configuration.";

/// Prints the usage error or the requested help. Returns the exit code.
pub fn usage(program: &str, error: &clap::Error, command: &Command, line: &[OsString]) -> ExitCode {
    let _closed = error.print();
    if let Some(variable) = variable(error, command, line) {
        let of = format!("the value is that of the environment variable {variable}");
        note(program, &of);
    }
    if let Some(full) = elsewhere(error, command) {
        note(program, &format!("did you mean `{program} {full}`?"));
    }
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(USAGE))
}

/// The full name of the unknown command, such as `policy validate` for `validate`, if only one
/// command in another place has this name.
fn elsewhere(error: &clap::Error, command: &Command) -> Option<String> {
    let (ErrorKind::InvalidSubcommand, Some(ContextValue::String(word))) =
        (error.kind(), error.get(ContextKind::InvalidSubcommand))
    else {
        return None;
    };
    let mut found = Vec::new();
    find_commands(command, "", word, &mut found);
    match found.as_slice() {
        [only] => Some(only.clone()),
        _ => None,
    }
}

/// Adds the commands with the name `word` below `command`, whose full name is `path`.
fn find_commands(command: &Command, path: &str, word: &str, found: &mut Vec<String>) {
    let visible = command.get_subcommands().filter(|one| !one.is_hide_set());
    for one in visible.filter(|one| one.get_name() != "help") {
        let path = format!("{path}{}", one.get_name());
        find_commands(one, &format!("{path} "), word, found);
        if one.get_name() == word {
            found.push(path);
        }
    }
}

/// The environment variable that has the wrong value; `None` if the value comes from a flag in
/// `line`.
fn variable(error: &clap::Error, command: &Command, line: &[OsString]) -> Option<String> {
    let kinds = [ErrorKind::ValueValidation, ErrorKind::InvalidValue];
    let Some(ContextValue::String(arg)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    let flag = arg.split(' ').next()?.split('[').next()?;
    let is_written = |word: &OsString| word.to_string_lossy().starts_with(flag);
    if !kinds.contains(&error.kind()) || line.iter().any(is_written) {
        return None;
    }
    let word = |word: &OsString| word.to_str().map(str::to_owned);
    let words = line.iter().skip(1).filter_map(word);
    let chosen = words.fold(command, |found, word| {
        found.find_subcommand(word).unwrap_or(found)
    });
    let mut all = [chosen, command]
        .into_iter()
        .flat_map(Command::get_arguments);
    let found = all.find(|arg| arg.get_long() == flag.strip_prefix("--"));
    let variable = found.and_then(Arg::get_env)?;
    Some(variable.to_string_lossy().into_owned())
}

/// The text of an error and its causes, without causes that the text already contains.
pub fn causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let said = next.to_string();
        if !text.contains(&said) {
            text.push_str(": ");
            text.push_str(&said);
        }
        cause = next.source();
    }
    text
}

/// Prints an error of `program`. Returns the exit code.
pub fn failed(program: &str, code: u8, error: &dyn Display) -> ExitCode {
    note(program, error);
    ExitCode::from(code)
}

/// Prints a line of `program` on standard error. Errors of writing are ignored.
pub fn note(program: &str, text: &dyn Display) {
    use std::io::Write as _;
    let line = format!("{program}: {}\n", harmless(&text.to_string()));
    let _closed = std::io::stderr().write_all(line.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_found_below_another_one() {
        let program = Command::new("x").subcommands([
            Command::new("policy").subcommands([Command::new("validate"), Command::new("get")]),
            Command::new("endpoint").subcommand(Command::new("get")),
        ]);
        for (word, found) in [
            ("validate", Some("policy validate")),
            // Two commands have this name.
            ("get", None),
            ("ghost", None),
        ] {
            let line = ["x", word];
            let error = program.clone().subcommand_required(true);
            let error = error.try_get_matches_from(line).unwrap_err();
            assert_eq!(elsewhere(&error, &program).as_deref(), found, "{word}");
        }
    }

    #[test]
    fn a_wrong_value_of_the_environment_is_told_from_one_of_the_line() {
        let level = Arg::new("level")
            .long("log-level")
            .env("NO_SUCH_VARIABLE")
            .value_parser(["info"]);
        let run = Command::new("run").arg(level);
        let program = Command::new("x").subcommand(run);
        let line = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
        let written = line(&["x", "run", "--log-level=debgu"]);
        let error = program.clone().try_get_matches_from(&written).unwrap_err();
        assert_eq!(variable(&error, &program, &written), None);
        let found = variable(&error, &program, &line(&["x", "run"]));
        assert_eq!(found.as_deref(), Some("NO_SUCH_VARIABLE"));
        let unknown = line(&["x", "run", "--no-such"]);
        let error = program.clone().try_get_matches_from(&unknown).unwrap_err();
        assert_eq!(variable(&error, &program, &line(&["x", "run"])), None);
    }
}
