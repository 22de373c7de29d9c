//! Files made of the command lines: packaging/agent.yaml, netpol.yaml and sdp.yaml match `--help` (`cargo xtask docs`
//! writes them), and man pages and completions are made for every command (`cargo xtask package`).

use std::{
    fs,
    path::{Path, PathBuf},
};

use clap::{Arg, ArgAction, Command, CommandFactory as _};
use clap_complete::Shell;
use holdfast_agent::config::{self, Cli};
use holdfast_sdp::config::{Config as SdpConfig, args::Cli as SdpCli};

/// Maximum width of a comment, in columns.
const WIDTH: usize = 100;
/// Flags that a file of settings does not have.
const NOT_SETTINGS: [&str; 4] = ["config", "config-dir", "help", "version"];
/// Words that YAML reads as something else than text.
const YAML_WORDS: [&str; 8] = ["null", "yes", "no", "on", "off", "y", "n", "none"];

/// A file of settings of a package.
struct SettingsFile {
    name: &'static str,
    /// The command that reads it.
    line: &'static str,
    command: Command,
    /// Settings of the package that are not the program's defaults.
    values: &'static [(&'static str, &'static str)],
}

fn files() -> [SettingsFile; 3] {
    let run = Cli::command().find_subcommand("run").cloned();
    let netpol = Cli::command().find_subcommand("netpol").cloned();
    let netpol_run = netpol.and_then(|netpol| netpol.find_subcommand("run").cloned());
    [
        SettingsFile {
            name: "agent.yaml",
            line: "holdfast-agent run",
            command: run.expect("the command `run`"),
            values: &[
                ("state-dir", "/var/lib/holdfast/agent"),
                ("policy-dir", "/etc/holdfast/policies"),
                ("endpoint-dir", "/etc/holdfast/endpoints"),
            ],
        },
        SettingsFile {
            name: "netpol.yaml",
            line: "holdfast-agent netpol run",
            command: netpol_run.expect("the command `netpol run`"),
            values: &[
                ("policy-dir", "/etc/holdfast/policies"),
                ("state-dir", "/var/lib/holdfast/netpol"),
            ],
        },
        SettingsFile {
            name: "sdp.yaml",
            line: "holdfast-sdp",
            command: SdpCli::command(),
            values: &[("state-dir", "/var/lib/holdfast/agent")],
        },
    ]
}

impl SettingsFile {
    fn text(&self) -> String {
        let mut text = comment(&format!(
            "Settings of `{}`, in the order of its --help. A line without # sets a value; a flag and the \
             environment override it. A key with # has its default there, or the kind of its value. An \
             unknown key or a wrong value stops the start, and the log names it.",
            self.line
        ));
        for arg in self.command.get_arguments() {
            let Some(key) = arg.get_long().filter(|key| !NOT_SETTINGS.contains(key)) else {
                continue;
            };
            if arg.is_hide_set() {
                continue;
            }
            let value = self.values.iter().find(|(own, _)| *own == key);
            text.push('\n');
            text.push_str(&comment(&help(arg)));
            text.push_str(&match value {
                Some((_, value)) => format!("{key}: {value}\n"),
                None => format!("#{key}: {}\n", default(arg)),
            });
        }
        text
    }
}

fn help(arg: &Arg) -> String {
    let help = arg.get_long_help().or(arg.get_help());
    let mut help = help.expect("each flag has a help text").to_string();
    let values = arg.get_possible_values();
    let names: Vec<&str> = values.iter().map(|value| value.get_name()).collect();
    if !names.is_empty() && !names.contains(&"true") {
        help = format!("{help}. One of: {}", names.join(", "));
    }
    help.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The default as YAML, or the name of the value.
fn default(arg: &Arg) -> String {
    if matches!(arg.get_action(), ArgAction::SetTrue) {
        return "false".to_owned();
    }
    let values: Vec<String> = arg
        .get_default_values()
        .iter()
        .map(|value| yaml(&value.to_string_lossy()))
        .collect();
    match values.as_slice() {
        [] => {
            let name = arg.get_value_names().unwrap_or_default().first();
            name.map_or_else(|| "VALUE".to_owned(), |name| yaml(name))
        }
        [one] => one.clone(),
        many => format!("[{}]", many.join(", ")),
    }
}

fn yaml(value: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    let starts = value.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '/');
    match starts && value.chars().all(is_plain) && !YAML_WORDS.contains(&value) {
        true => value.to_owned(),
        false => serde_json::Value::from(value).to_string(),
    }
}

fn comment(text: &str) -> String {
    let mut lines = vec!["#".to_owned()];
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.len() + word.len() < WIDTH => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(format!("# {word}")),
        }
    }
    lines.join("\n") + "\n"
}

fn packaging() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging")
}

#[test]
#[expect(clippy::disallowed_methods, reason = "a switch of this test only")]
fn the_files_of_settings_match_the_command_lines() {
    for file in files() {
        let (path, text) = (packaging().join(file.name), file.text());
        if std::env::var_os("HOLDFAST_BLESS").is_some() {
            fs::write(&path, &text).expect("the file can be written");
        }
        let current = fs::read_to_string(&path).unwrap_or_default();
        assert!(
            current == text,
            "packaging/{} is out of date: cargo xtask docs",
            file.name
        );
    }
}

#[test]
fn each_program_starts_with_its_file_and_with_all_defaults_written_out() {
    let dir = tempfile::tempdir().unwrap();
    let etc = dir.path().to_str().unwrap();
    for sub in ["policies", "endpoints"] {
        fs::create_dir(dir.path().join(sub)).unwrap();
    }
    for file in files() {
        let has_default = |key: &str| {
            let mut all = file.command.get_arguments();
            let arg = all.find(|arg| arg.get_long() == Some(key));
            arg.is_some_and(|arg| !arg.get_default_values().is_empty())
        };
        let shipped = file.text().replace("/etc/holdfast", etc);
        let written_out = |line: &str| match line.strip_prefix('#') {
            Some(setting) if has_default(setting.split(':').next().unwrap_or_default()) => {
                format!("{setting}\n")
            }
            _ => format!("{line}\n"),
        };
        let all: String = shipped.lines().map(written_out).collect();
        for text in [shipped, all] {
            let path = dir.path().join(file.name);
            fs::write(&path, &text).unwrap();
            let config = format!("--config={}", path.display());
            let line = file.line.split(' ').map(str::to_owned).chain([config]);
            let line = line.map(Into::into);
            let started = match file.name {
                "sdp.yaml" => SdpConfig::resolve(line)
                    .map(drop)
                    .map_err(|e| e.to_string()),
                _ => config::parse(line).map(drop).map_err(|e| e.to_string()),
            };
            assert_eq!(started, Ok(()), "{text}");
        }
    }
}

/// Writes into the directory of HOLDFAST_PAGES, if that is set.
#[test]
#[expect(clippy::disallowed_methods, reason = "a switch of this test only")]
fn man_pages_and_completions_are_made() {
    let temporary = tempfile::tempdir().unwrap();
    let wanted = std::env::var_os("HOLDFAST_PAGES").map(PathBuf::from);
    for mut program in [Cli::command(), SdpCli::command()] {
        let name = program.get_name().to_owned();
        let home = wanted.as_deref().unwrap_or(temporary.path()).join(&name);
        fs::create_dir_all(&home).unwrap();
        clap_mangen::generate_to(program.clone(), &home).unwrap();
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            clap_complete::generate_to(shell, &mut program, &name, &home).unwrap();
        }
        let page = fs::read_to_string(home.join(format!("{name}.1"))).unwrap();
        assert!(page.contains(".TH"), "{page}");
        assert!(home.join(format!("{name}.bash")).is_file());
        assert!(home.join(format!("{name}-status.1")).is_file());
    }
}
