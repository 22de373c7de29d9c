//! The command line, completed from the files that it names: `--config` and `--config-dir` of the
//! commands that run.

use std::ffi::OsString;

use clap::{
    ArgMatches, Command as ClapCommand, CommandFactory as _, FromArgMatches as _, error::ErrorKind,
};
use daemon::settings_file::{self, SettingsError};

use super::{
    args::{Cli, Command, PolicyCommand},
    settings::Settings,
};

/// Commands whose settings may be in files.
const COMMANDS: [&[&str]; 3] = [&["run"], &["relay"], &["netpol", "run"]];

/// A command line with the settings of its files.
#[derive(Debug)]
pub struct Parsed {
    pub cli: Cli,
    /// What `run` was asked to do, by names of flags; empty for other commands.
    pub settings: Settings,
    /// Keys of the directory that are not flags.
    pub ignored: Vec<String>,
}

/// Why there is no usable command line.
#[derive(Debug, thiserror::Error)]
pub enum ParseError {
    /// Wrong usage, or a request for help.
    #[error(transparent)]
    Usage(#[from] clap::Error),
    /// A file of settings cannot be used.
    #[error(transparent)]
    Settings(#[from] SettingsError),
}

/// Every command with its flags.
pub fn command() -> ClapCommand {
    Cli::command()
}

/// Parses the command line, the environment and the files that they name.
pub fn parse(line: impl IntoIterator<Item = OsString>) -> Result<Parsed, ParseError> {
    let mut line: Vec<OsString> = line.into_iter().collect();
    let program = Cli::command();
    let matches = program.clone().try_get_matches_from(&line)?;
    let mut ignored = Vec::new();
    for words in COMMANDS {
        let Some((command, given)) = chosen(&program, &matches, words) else {
            continue;
        };
        let typed = format!("holdfast-agent {}", words.join(" "));
        let found = settings_file::read(&typed, command, given, settings_file::directory)?;
        ignored = found.ignored;
        line.extend(found.arguments);
    }
    if let Some((command, given)) = chosen(&program, &matches, &["cleanup"]) {
        line.extend(settings_file::shared(command, given)?);
    }
    let matches = Cli::command().try_get_matches_from(&line)?;
    let cli = Cli::from_arg_matches(&matches)?;
    if let Command::Policy(PolicyCommand::Trace(args)) = &cli.command
        && let Err(error) = args.destination_port()
    {
        let error = Cli::command().error(ErrorKind::ValueValidation, error);
        return Err(error.into());
    }
    let settings =
        chosen(&program, &matches, &["run"]).map(|(command, given)| Settings::of(command, given));
    Ok(Parsed {
        cli,
        settings: settings.unwrap_or_default(),
        ignored,
    })
}

/// The command that these words name, with its arguments, if the line has it.
fn chosen<'a>(
    program: &'a ClapCommand,
    matches: &'a ArgMatches,
    words: &[&str],
) -> Option<(&'a ClapCommand, &'a ArgMatches)> {
    words
        .iter()
        .try_fold((program, matches), |(command, matches), word| {
            let given = matches.subcommand_matches(word)?;
            Some((command.find_subcommand(word)?, given))
        })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use daemon::command_line::log_args::LogFormat;

    use super::*;
    use crate::config::{Command, Config};

    fn directory(keys: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (key, text) in keys {
            fs::write(dir.path().join(key), text).unwrap();
        }
        dir
    }

    fn run(dir: &tempfile::TempDir, flags: &[&str]) -> Result<Parsed, ParseError> {
        let mut line = vec![
            OsString::from("holdfast-agent"),
            "run".into(),
            "--config-dir".into(),
        ];
        line.push(dir.path().into());
        line.extend(flags.iter().map(OsString::from));
        parse(line)
    }

    fn config(parsed: Parsed) -> Config {
        let Command::Run(args) = parsed.cli.command else {
            panic!("not run");
        };
        Config::try_from(*args).unwrap()
    }

    #[test]
    fn a_clean_up_uses_the_directories_of_the_settings_of_run() {
        let dir = directory(&[("agent.yaml", "state-dir: /a\nbpf-root: /b\nworkers: 2\n")]);
        let line = |flags: &[&str]| {
            let config = format!("--config={}", dir.path().join("agent.yaml").display());
            let line = ["holdfast-agent", "cleanup", &config]
                .into_iter()
                .chain(flags.iter().copied());
            let Command::Cleanup(args) = parse(line.map(Into::into)).unwrap().cli.command else {
                panic!("not cleanup");
            };
            [args.state_dir, args.bpf_root].map(|path| path.display().to_string())
        };
        assert_eq!(line(&[]), ["/a", "/b"]);
        assert_eq!(line(&["--state-dir=/c"]), ["/c", "/b"]);
    }

    #[test]
    fn a_flag_overrides_the_directory_and_unknown_keys_are_listed() {
        let dir = directory(&[
            ("tofqdns-proxy-port", "10194\n"),
            ("cluster-name", "east"),
            ("enable-ipv6", "False"),
            ("disable-builtin-dns-proxy", "true"),
            ("tofqdns-min-ttl", ""),
            ("workers", "2"),
            ("config-dir", "/elsewhere"),
        ]);
        fs::create_dir(dir.path().join("..data")).unwrap();
        let parsed = run(&dir, &["--cluster-name=west"]).unwrap();
        assert_eq!(parsed.ignored, ["config-dir", "workers"]);
        let config = config(parsed);
        assert_eq!(config.core.proxy_port, 10194);
        assert_eq!(config.flags.cluster.source.cluster_name, "west");
        assert!(
            !config.core.enable_ipv6
                && config.core.enable_ipv4
                && config.flags.disable_builtin_dns_proxy
        );
        assert_eq!(config.core.min_ttl, 0);
    }

    #[test]
    fn a_relay_reads_a_directory_as_an_agent_does() {
        let dir = directory(&[
            ("max-agents", "70"),
            ("listen", "127.0.0.1:7\n"),
            ("plaintext", "true"),
            ("log-format", "json"),
            ("tofqdns-proxy-port", "1"),
        ]);
        let line = |flag: &str| {
            let dir = format!("--config-dir={}", dir.path().display());
            parse(["holdfast-agent", "relay", &dir, flag].map(OsString::from))
        };
        let parsed = line("--name=a").unwrap();
        assert_eq!(parsed.ignored, ["tofqdns-proxy-port"]);
        let Command::Relay(args) = parsed.cli.command else {
            panic!("not relay");
        };
        assert_eq!((args.max_agents, args.listen.port()), (70, 7));
        assert!(args.plaintext && args.log.log_format == LogFormat::Json);
        fs::write(dir.path().join("max-agents"), "many").unwrap();
        let error = line("--name=a").unwrap_err().to_string();
        assert!(error.contains("/max-agents, key \"max-agents\""), "{error}");
        assert!(line("--max-agents=5").is_ok());
    }

    #[test]
    fn every_command_that_runs_reads_a_file_and_names_what_is_wrong_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.yaml");
        let line = |words: &[&str], text: &str| {
            fs::write(&path, text).unwrap();
            let words = words.iter().map(OsString::from);
            let file = format!("--config={}", path.display());
            parse(
                std::iter::once("holdfast-agent".into())
                    .chain(words)
                    .chain([file.into()]),
            )
        };
        for words in COMMANDS {
            let parsed = line(
                words,
                "log-level: debug\nlog-format: json\nmetrics-address: 'off'\n",
            );
            assert!(parsed.is_ok(), "{words:?}: {parsed:?}");
            let unknown = line(words, "log-levle: debug\n").unwrap_err().to_string();
            let help = format!("holdfast-agent {} --help", words.join(" "));
            assert!(
                unknown.contains("c.yaml: unknown key \"log-levle\": did you mean log-level?")
                    && unknown.contains(&help),
                "{unknown}"
            );
            let value = line(words, "log-format: maybe\n").unwrap_err().to_string();
            assert!(
                value.contains("c.yaml, key \"log-format\"") && value.contains("maybe"),
                "{value}"
            );
        }
        let listed = line(
            &["run"],
            "pod-cidr:\n  - 10.1.0.0/16\n  - fd00::/48\nlabels:\n  - k8s:app\n  - '!k8s:v'\n",
        );
        let config = config(listed.unwrap());
        assert_eq!(config.core.pod_blocks.len(), 2);
        assert_eq!(config.flags.cluster.labels.len(), 2);
    }

    #[test]
    fn lists_are_written_as_on_the_command_line() {
        let dir = directory(&[
            ("pod-cidr", "10.1.0.0/16,fd00::/48"),
            ("labels", "k8s:app !k8s:v"),
        ]);
        let config = config(run(&dir, &[]).unwrap());
        assert_eq!(config.core.pod_blocks.len(), 2);
        assert_eq!(config.flags.cluster.labels.len(), 2);
    }

    #[test]
    fn a_bad_value_is_named_by_its_file() {
        for (key, text) in [
            ("tofqdns-proxy-port", "many"),
            ("enable-ipv4", "yes"),
            ("log-format", "on"),
            ("pod-cidr", "10.0.0.0"),
        ] {
            let dir = directory(&[(key, text)]);
            let error = run(&dir, &[]).unwrap_err().to_string();
            assert!(error.contains(&format!("/{key}, key")), "{error}");
        }
        let error = parse(["holdfast-agent", "run", "--config-dir=/nowhere"].map(OsString::from));
        assert!(
            error
                .unwrap_err()
                .to_string()
                .contains("--config-dir /nowhere")
        );
    }

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
            ("run", "log-level", Some("HOLDFAST_LOG_LEVEL")),
            ("run", "config", Some("HOLDFAST_CONFIG")),
            ("relay", "name", Some("HOLDFAST_NAME")),
            ("relay", "listen", Some("HOLDFAST_RELAY_LISTEN")),
            ("cleanup", "host-root", Some("HOLDFAST_HOST_ROOT")),
        ] {
            assert_eq!(variable(command, flag).as_deref(), expected, "{flag}");
        }
    }
}
