//! Reads a page: its blocks, and the commands in them.

use anyhow::{Result, bail, ensure};

/// A part of a page.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Part {
    Run(Command),
    /// A file in the working directory.
    File {
        name: String,
        text: String,
    },
    /// A block that is not run.
    LeftOut {
        reason: String,
    },
}

/// A command of a page.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Command {
    /// Number of its line in the page, from 1.
    pub(super) line: usize,
    /// One or more lines for the shell.
    pub(super) text: String,
    /// The output that the page shows for it.
    pub(super) prints: Option<String>,
}

/// Splits a page into its parts, in order.
pub(super) fn parts(page: &str) -> Result<Vec<Part>> {
    let mut parts: Vec<Part> = Vec::new();
    let mut note: Option<&str> = None;
    // Whether the last part is a command, with nothing after its block.
    let mut adjacent = false;
    let mut lines = (1..).zip(page.lines());
    while let Some((number, line)) = lines.next() {
        let line = line.trim();
        if let Some(comment) = line
            .strip_prefix("<!-- ")
            .and_then(|rest| rest.strip_suffix(" -->"))
        {
            note = Some(comment);
            continue;
        }
        let Some(language) = line.strip_prefix("```") else {
            if !line.is_empty() {
                (note, adjacent) = (None, false);
            }
            continue;
        };
        let mut block = Vec::new();
        loop {
            match lines.next() {
                Some((_, end)) if end.trim() == "```" => break,
                Some(line) => block.push(line),
                None => bail!("line {number}: the block has no end"),
            }
        }
        let text = || -> String { block.iter().map(|(_, line)| format!("{line}\n")).collect() };
        let comment = note.take();
        let left_out = comment.and_then(|note| note.strip_prefix("not run: "));
        let file = comment.and_then(|note| note.strip_prefix("save as: "));
        let was_adjacent = std::mem::take(&mut adjacent);
        match (language, left_out, file) {
            ("sh" | "console", Some(reason), _) => parts.push(Part::LeftOut {
                reason: reason.to_owned(),
            }),
            ("sh", None, _) => {
                parts.extend(of_shell(&block)?.into_iter().map(Part::Run));
                adjacent = true;
            }
            ("console", None, _) => parts.extend(of_console(&block)?.into_iter().map(Part::Run)),
            (_, _, Some(name)) => parts.push(Part::File {
                name: name.to_owned(),
                text: text(),
            }),
            ("text", None, None) if was_adjacent => {
                if let Some(Part::Run(command)) = parts.last_mut() {
                    command.prints = Some(text());
                }
            }
            _ => {}
        }
    }
    Ok(parts)
}

/// Commands of a block that has only commands.
fn of_shell(block: &[(usize, &str)]) -> Result<Vec<Command>> {
    let mut commands = Vec::new();
    let mut lines = block.iter();
    while let Some((number, first)) = lines.next() {
        if first.trim().is_empty() || first.trim_start().starts_with('#') {
            continue;
        }
        let mut text = (*first).to_owned();
        while text.ends_with('\\') {
            let Some((_, next)) = lines.next() else {
                bail!("line {number}: the command has no end");
            };
            text.push('\n');
            text.push_str(next);
        }
        if let Some(end) = heredoc(&text) {
            loop {
                let Some((_, next)) = lines.next() else {
                    bail!("line {number}: the document has no end {end}");
                };
                text.push('\n');
                text.push_str(next);
                if *next == end {
                    break;
                }
            }
        }
        commands.push(Command {
            line: *number,
            text,
            prints: None,
        });
    }
    Ok(commands)
}

/// Commands of a block with `$ ` before each, and what they print.
fn of_console(block: &[(usize, &str)]) -> Result<Vec<Command>> {
    let mut commands: Vec<Command> = Vec::new();
    let mut lines = block.iter();
    while let Some((number, line)) = lines.next() {
        if let Some(first) = line.strip_prefix("$ ") {
            let mut text = first.to_owned();
            while text.ends_with('\\') {
                let Some((_, next)) = lines.next() else {
                    bail!("line {number}: the command has no end");
                };
                text.push('\n');
                text.push_str(next);
            }
            commands.push(Command {
                line: *number,
                text,
                prints: None,
            });
            continue;
        }
        let Some(command) = commands.last_mut() else {
            bail!("line {number}: a console block begins with a command after `$ `");
        };
        let prints = command.prints.get_or_insert_default();
        prints.push_str(line);
        prints.push('\n');
    }
    ensure!(!commands.is_empty(), "a console block has no command");
    Ok(commands)
}

/// The word that ends the here-document that begins on `line`.
fn heredoc(line: &str) -> Option<String> {
    let (_, after) = line.split_once("<<")?;
    let word = after.split_whitespace().next()?;
    Some(word.trim_matches(['\'', '"']).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "\
# Page

```sh
cat > x <<'END'
# one
END
echo a \\
  b   # both

true
```

```text
a b
```

<!-- not run: needs a cluster -->
```sh
oc get all
```

```text
not output
```

<!-- save as: f.yaml -->
```yaml
a: 1
```

```console
$ echo c
c
$ true
```
";

    fn command(line: usize, text: &str, prints: Option<&str>) -> Part {
        Part::Run(Command {
            line,
            text: text.to_owned(),
            prints: prints.map(str::to_owned),
        })
    }

    #[test]
    fn a_page_is_commands_files_and_blocks_left_out() {
        assert_eq!(
            parts(PAGE).unwrap(),
            [
                command(4, "cat > x <<'END'\n# one\nEND", None),
                command(7, "echo a \\\n  b   # both", None),
                command(10, "true", Some("a b\n")),
                Part::LeftOut {
                    reason: "needs a cluster".to_owned()
                },
                Part::File {
                    name: "f.yaml".to_owned(),
                    text: "a: 1\n".to_owned()
                },
                command(32, "echo c", Some("c\n")),
                command(34, "true", None),
            ]
        );
    }

    #[test]
    fn text_after_prose_is_not_compared() {
        let page = "```sh\ntrue\n```\nAn error:\n```text\nbad\n```\n";
        assert_eq!(parts(page).unwrap(), [command(2, "true", None)]);
    }

    #[test]
    fn a_note_counts_for_the_next_block_only() {
        let page = "<!-- not run: x -->\nProse.\n\n```sh\ntrue\n```\n";
        assert_eq!(parts(page).unwrap(), [command(5, "true", None)]);
    }

    #[test]
    fn an_open_block_is_an_error() {
        assert!(parts("```sh\ntrue\n").is_err());
        assert!(parts("```sh\ncat <<X\n```\n").is_err());
        assert!(parts("```console\nprinted\n```\n").is_err());
    }
}
