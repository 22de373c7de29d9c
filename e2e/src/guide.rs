//! Runs the commands of a page of the guide on a machine for that page, and compares their output
//! with the page.
//!
//! - Blocks ```` ```sh ```` and ```` ```console ```` are run, command by command, in one bash. In a
//!   console block, commands begin with `$ `, and other lines are what the command above prints.
//! - A ```` ```text ```` block right after a block of commands is what its last command prints.
//! - A command must exit with 0, unless its output is compared: then any exit status is right.
//! - No command may print a line `PROBLEM …` or `WARNING …` that the page does not print.
//! - `<!-- not run: REASON -->` before a block leaves it out, invisibly for readers.
//! - `<!-- save as: FILE -->` before a block of any other language writes it into the working directory.

mod machine;
mod output;
mod page;

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

pub use machine::Machine;
use page::{Command, Part};

/// The result of playing a page.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Played {
    /// Number of commands that were run.
    pub run: usize,
    /// Commands whose output was compared.
    pub compared: usize,
    /// Reasons of the blocks that were left out.
    pub left_out: Vec<String>,
}

/// The text of a page of the guide.
pub fn text(name: &str) -> Result<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../docs/src")
        .join(name);
    std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))
}

/// Plays the page `text` on `machine`. An error names the page and the line, and has the output.
pub fn play(machine: &mut Machine, page: &str, text: &str) -> Result<Played> {
    let mut played = Played::default();
    for part in page::parts(text).with_context(|| page.to_owned())? {
        match part {
            Part::LeftOut { reason } => played.left_out.push(reason),
            Part::File { name, text } => machine.write(&name, &text)?,
            Part::Run(command) => {
                run(machine, &command)
                    .with_context(|| format!("{page}:{}: {}", command.line, command.text))?;
                played.run += 1;
                played.compared += usize::from(command.prints.is_some());
            }
        }
    }
    ensure!(played.run > 0, "{page}: no command was run");
    Ok(played)
}

/// Runs only the commands under the heading `heading` of `text`, for a page that needs them first.
pub fn play_section(
    machine: &mut Machine,
    page: &str,
    text: &str,
    heading: &str,
) -> Result<Played> {
    let section = text
        .split("\n## ")
        .find(|section| section.lines().next() == Some(heading))
        .with_context(|| format!("{page} has no section `{heading}`"))?;
    play(machine, &format!("{page} ({heading})"), section)
}

fn run(machine: &mut Machine, command: &Command) -> Result<()> {
    let ended = machine.run(&command.text)?;
    let complaint = complaint(&ended.stdout);
    let Some(expected) = &command.prints else {
        ensure!(complaint.is_none(), "it printed: {complaint:?}");
        ensure!(
            ended.status == 0,
            "exit status {}, and it printed:\n{}{}",
            ended.status,
            ended.stdout,
            ended.stderr
        );
        return Ok(());
    };
    ensure!(
        complaint.is_none_or(|line| expected.contains(line)),
        "it printed: {complaint:?}"
    );
    if let Err(difference) = output::matches(expected, &ended.stdout) {
        bail!(
            "{difference}. The page prints:\n{expected}\nThe command printed (exit status {}):\n{}\n{}",
            ended.status,
            ended.stdout,
            ended.stderr
        );
    }
    Ok(())
}

/// The first line of the output that reports a problem or a warning.
fn complaint(printed: &str) -> Option<&str> {
    printed
        .lines()
        .find(|line| line.starts_with("PROBLEM") || line.starts_with("WARNING"))
}

/// Distinct reasons, for a test that lists them.
pub fn reasons(played: &Played) -> BTreeSet<&str> {
    played.left_out.iter().map(String::as_str).collect()
}
