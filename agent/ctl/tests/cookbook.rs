//! Each policy of docs/src/cookbook.md is valid, and has the verdicts that comments after it name:
//!
//! - `<!-- allowed: TO PORT -->`, `<!-- dropped: TO PORT -->`: the verdict of `policy trace` from a pod `app: web` of
//! the namespace `shop`; - `<!-- warns: TEXT -->`: a warning of `policy validate`; there is no other.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

const PAGE: &str = include_str!("../../../docs/src/cookbook.md");
const FROM: &str = "k8s:app=web,k8s:io.kubernetes.pod.namespace=shop";

/// A policy of the page, and the comments after it.
#[derive(Debug, Default)]
struct Recipe {
    heading: String,
    policy: String,
    warns: Option<String>,
    /// Whether a packet passes, its destination, and its port.
    verdicts: Vec<(bool, String, String)>,
}

fn recipes(page: &str) -> Vec<Recipe> {
    let mut recipes: Vec<Recipe> = Vec::new();
    let (mut heading, mut in_policy) = ("", false);
    for line in page.lines() {
        if let Some(text) = line.strip_prefix("## ") {
            heading = text;
        } else if line == "```yaml" {
            in_policy = true;
            recipes.push(Recipe {
                heading: heading.to_owned(),
                ..Recipe::default()
            });
        } else if line == "```" {
            in_policy = false;
        } else if let Some(recipe) = recipes.last_mut() {
            if in_policy {
                recipe.policy.push_str(line);
                recipe.policy.push('\n');
            } else if let Some(comment) = comment(line) {
                recipe.add(comment);
            }
        }
    }
    recipes
}

fn comment(line: &str) -> Option<&str> {
    line.strip_prefix("<!-- ")?.strip_suffix(" -->")
}

impl Recipe {
    fn add(&mut self, comment: &str) {
        let (word, rest) = comment.split_once(": ").expect("a comment of a recipe");
        if word == "warns" {
            self.warns = Some(rest.to_owned());
            return;
        }
        assert!(matches!(word, "allowed" | "dropped"), "{comment}");
        let (to, port) = rest.rsplit_once(' ').expect("destination and port");
        self.verdicts
            .push((word == "allowed", to.to_owned(), port.to_owned()));
    }

    fn check(&self, file: &Path) {
        let heading = &self.heading;
        fs::write(file, &self.policy).expect("the file of the policy");
        let file = file.to_str().expect("UTF-8");
        let (code, said) = run(&["policy", "validate", file]);
        assert_eq!(code, Some(0), "{heading}: {said}");
        for line in said.lines().filter(|line| line.contains("warning: ")) {
            let expected = self.warns.as_ref().is_some_and(|text| line.contains(text));
            assert!(expected, "{heading}: {line}");
        }
        if let Some(text) = &self.warns {
            assert!(said.contains(text), "{heading} does not warn: {said}");
        }
        for (passes, to, port) in &self.verdicts {
            let trace = ["policy", "trace", "--policy-file", file, "--from", FROM];
            let (_, said) = run(&[&trace[..], &["--to", to, "--port", port]].concat());
            let verdict = if *passes { "allowed" } else { "not allowed" };
            let found = said.lines().any(|line| line == verdict);
            assert!(found, "{heading}: to {to} {port}, not `{verdict}`: {said}");
        }
    }
}

/// Runs the agent. Returns its exit code and all output.
fn run(arguments: &[&str]) -> (Option<i32>, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = Command::new(env!("CARGO_BIN_EXE_holdfast-agent"))
        .args(arguments)
        .env_clear()
        .output()
        .expect("holdfast-agent runs");
    let text = [stdout, stderr].concat();
    (status.code(), String::from_utf8_lossy(&text).into_owned())
}

#[test]
fn every_policy_is_valid_and_has_the_verdicts_of_the_page() {
    let directory = tempfile::tempdir().expect("a directory");
    let recipes = recipes(PAGE);
    assert!(recipes.len() >= 12, "{} recipes", recipes.len());
    for recipe in &recipes {
        assert!(
            !recipe.verdicts.is_empty() || recipe.warns.is_some(),
            "{}: no verdict is checked",
            recipe.heading
        );
        recipe.check(&directory.path().join("policy.yaml"));
    }
}

#[test]
#[should_panic(expected = "not `allowed`")]
fn a_wrong_verdict_fails() {
    let page = PAGE.replacen("<!-- dropped: ", "<!-- allowed: ", 1);
    let directory = tempfile::tempdir().expect("a directory");
    for recipe in recipes(&page) {
        recipe.check(&directory.path().join("policy.yaml"));
    }
}
