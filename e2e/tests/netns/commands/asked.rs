//! Questions to both programs, and answers that are not as expected.

use anyhow::{Context, Result, bail, ensure};
use holdfast_e2e::{Lab, config};
use serde_json::Value;

use super::SDP;

/// Answers so far that were not as expected.
pub(super) struct Asked<'a> {
    pub(super) lab: &'a Lab,
    wrong: Vec<String>,
}

impl<'a> Asked<'a> {
    pub(super) fn new(lab: &'a Lab) -> Self {
        let wrong = Vec::new();
        Self { lab, wrong }
    }

    /// Asks `program`. The text must contain `tokens`. The JSON must contain, for each of
    /// `objects`, an object with the same fields.
    pub(super) fn ask(
        &mut self,
        program: &str,
        arguments: &[&str],
        tokens: &[&str],
        objects: &[Value],
    ) {
        self.ask_for(0, program, arguments, tokens, objects);
    }

    /// Like `ask`, for a command that exits with `code`.
    pub(super) fn ask_for(
        &mut self,
        code: i32,
        program: &str,
        arguments: &[&str],
        tokens: &[&str],
        objects: &[Value],
    ) {
        let people = text(self.lab, program, arguments, code).and_then(|said| {
            match tokens.iter().find(|token| !said.contains(**token)) {
                Some(token) => bail!("lacks {token}:\n{said}"),
                None => Ok(()),
            }
        });
        self.note(&arguments.join(" "), people);
        let programs = parsed(self.lab, program, arguments, code).and_then(|said| {
            match objects.iter().find(|object| !has(&said, object)) {
                Some(object) => bail!("JSON lacks {object}: {said}"),
                None => Ok(()),
            }
        });
        self.note(&arguments.join(" "), programs);
    }

    /// Neither the text nor the JSON may contain `token`.
    pub(super) fn lacks(&mut self, program: &str, arguments: &[&str], token: &str) {
        for form in [&[][..], &["-o", "json"]] {
            let said = text(self.lab, program, &[arguments, form].concat(), 0);
            let outcome = said.and_then(|said| {
                ensure!(!said.contains(token), "has {token}:\n{said}");
                Ok(())
            });
            self.note(&arguments.join(" "), outcome);
        }
    }

    /// The command must exit with 1 and an error that contains `named`.
    pub(super) fn fails(&mut self, program: &str, arguments: &[&str], named: &str) {
        let outcome = run(self.lab, program, arguments).and_then(|done| {
            ensure!(done.code == Some(1), "ended with {:?}: {done:?}", done.code);
            ensure!(
                done.error.contains(named) || done.said.contains(named),
                "does not name {named}: {done:?}"
            );
            ensure!(done.error.starts_with(program), "{done:?}");
            Ok(())
        });
        self.note(&arguments.join(" "), outcome);
    }

    pub(super) fn note<T>(&mut self, what: &str, outcome: Result<T>) {
        if let Err(error) = outcome {
            self.wrong.push(format!("{what}: {error:#}"));
        }
    }

    pub(super) fn done(self) -> Result<()> {
        ensure!(self.wrong.is_empty(), "{}", self.wrong.join("\n"));
        Ok(())
    }
}

#[derive(Debug)]
pub(super) struct Done {
    pub(super) code: Option<i32>,
    pub(super) said: String,
    pub(super) error: String,
}

pub(super) fn run(lab: &Lab, program: &str, arguments: &[&str]) -> Result<Done> {
    let path = config::program(program)?.display().to_string();
    let mut command = lab.node.command(&path);
    command.args(arguments);
    if program == SDP {
        command.arg("--admin-socket").arg(lab.sdp_admin("one"));
    } else if !matches!(arguments, ["bpf", ..] | ["policy", "validate", ..]) {
        command.arg("--admin-socket").arg(lab.agent_socket());
    }
    let output = command.output()?;
    Ok(Done {
        code: output.status.code(),
        said: String::from_utf8(output.stdout)?,
        error: String::from_utf8(output.stderr)?,
    })
}

pub(super) fn text(lab: &Lab, program: &str, arguments: &[&str], code: i32) -> Result<String> {
    let done = run(lab, program, arguments)?;
    ensure!(done.code == Some(code), "{arguments:?}: {done:?}");
    Ok(done.said)
}

pub(super) fn parsed(lab: &Lab, program: &str, arguments: &[&str], code: i32) -> Result<Value> {
    let said = text(lab, program, &[arguments, &["-o", "json"]].concat(), code)?;
    serde_json::from_str(&said).with_context(|| format!("JSON of {arguments:?}: {said}"))
}

/// Whether some object inside `value` has all fields of `object`.
pub(super) fn has(value: &Value, object: &Value) -> bool {
    let Some(wanted) = object.as_object() else {
        return false;
    };
    match value {
        Value::Object(fields) => {
            let mut wanted = wanted.iter();
            wanted.all(|(name, value)| fields.get(name) == Some(value))
                || fields.values().any(|value| has(value, object))
        }
        Value::Array(items) => items.iter().any(|item| has(item, object)),
        _ => false,
    }
}
