//! A flag has the same words in each command of both programs: `--help` side by side.

use std::collections::BTreeMap;

use clap::{Arg, Command, CommandFactory as _};
use holdfast_agent::config::Cli;
use holdfast_sdp::config::args::Cli as SdpCli;

/// Flags that are different things in different commands, with the reason.
const DIFFERENT: [(&str, &str); 10] = [
    ("address", "of `observe`: a filter of packets"),
    ("config", "of `cleanup`: the file of `run`"),
    ("enable-policy", "of `endpoint add`: of one endpoint"),
    (
        "from",
        "of `identity assign`: files; of `policy trace`: the sender",
    ),
    (
        "labels",
        "of `run`: which labels of Pods count; of `endpoint add`: labels",
    ),
    ("name", "of `observe`: a filter of packets"),
    (
        "pod",
        "of `endpoint add`: what the endpoint is; of `policy render`: a filter",
    ),
    ("port", "of `observe`: a filter of packets"),
    ("state-dir", "of `netpol run`: its own directory"),
    (
        "to",
        "of `policy trace`: the receiver; of `policy render`: what is judged",
    ),
];

/// Each flag of the command and of its subcommands, with the line that has it.
fn flags(line: &str, command: &Command, found: &mut Vec<(String, Arg)>) {
    let shown = command.get_arguments().filter(|arg| !arg.is_hide_set());
    found.extend(shown.map(|arg| (line.to_owned(), arg.clone())));
    for sub in command.get_subcommands() {
        flags(&format!("{line} {}", sub.get_name()), sub, found);
    }
}

/// What a flag is: its help up to the first break, its value and the values that it may have. What
/// follows may differ, for example defaults.
fn lead(arg: &Arg) -> String {
    let text = arg.get_long_help().or(arg.get_help());
    let text = text.map(ToString::to_string).unwrap_or_default();
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let lead = text.split([',', ';', ':', '.', '(', '[']).next();
    let value = arg.get_value_names().unwrap_or_default();
    let values: Vec<String> = arg
        .get_possible_values()
        .iter()
        .map(|value| value.get_name().to_owned())
        .collect();
    format!("{value:?} {values:?} {}", lead.unwrap_or_default().trim())
}

#[test]
fn a_flag_has_the_same_words_everywhere() {
    let mut all = Vec::new();
    for mut program in [Cli::command(), SdpCli::command()] {
        program.build();
        let name = program.get_name().to_owned();
        flags(&name, &program, &mut all);
    }
    let mut words: BTreeMap<String, BTreeMap<String, Vec<String>>> = BTreeMap::new();
    for (line, arg) in all {
        let Some(flag) = arg
            .get_long()
            .filter(|flag| !["help", "version"].contains(flag))
        else {
            continue;
        };
        let of_flag = words.entry(flag.to_owned()).or_default();
        of_flag.entry(lead(&arg)).or_default().push(line);
    }
    let differs = |flag: &str| DIFFERENT.iter().any(|(name, _)| *name == flag);
    let mut wrong = String::new();
    for (flag, texts) in words {
        match (texts.len(), differs(&flag)) {
            (1, false) => {}
            (1, true) => wrong.push_str(&format!("--{flag} has the same words now\n")),
            (_, true) => {}
            (_, false) => wrong.push_str(&format!("--{flag}: {texts:#?}\n")),
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}
