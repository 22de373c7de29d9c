//! Checks which modules use which: there is no circle between the top-level modules of a crate, and
//! no new use of the proxy's crate in the agent.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use anyhow::Result;

use crate::{repository, workspace};

/// Files of the agent that may use `holdfast_sdp`, and why.
const USES_PROXY: [(&str, &str); 3] = [
    ("agent/src/dnsproxy.rs", "the built-in proxy"),
    ("agent/src/health.rs", "counters of the built-in proxy"),
    ("agent/src/metrics.rs", "counters of the built-in proxy"),
];

/// Everything that breaks a rule, one line each.
pub(super) fn problems() -> Result<Vec<String>> {
    let mut edges: BTreeMap<String, Edges> = BTreeMap::new();
    let mut problems = Vec::new();
    let mut uses_proxy = BTreeSet::new();
    for file in workspace::files()? {
        if file.extension().is_none_or(|ext| ext != "rs") {
            continue;
        }
        let Ok(text) = fs::read_to_string(repository::root().join(&file)) else {
            continue;
        };
        let code = without_comments(&text);
        let Some((dir, inner)) = workspace::crate_of(&file) else {
            continue;
        };
        let Ok(inner) = inner.strip_prefix("src") else {
            continue;
        };
        if file.starts_with("agent") && code.contains("holdfast_sdp::") {
            uses_proxy.insert(file.display().to_string());
        }
        // The programs of bpf/ are functions that call each other. A test may use all of its crate.
        if dir == Path::new("bpf") || workspace::is_test_file(inner) {
            continue;
        }
        let module = top_module(inner);
        let edges = edges.entry(dir.display().to_string()).or_default();
        for used in used_modules(&code) {
            if used != module {
                let files = edges.entry(module.clone()).or_default();
                files
                    .entry(used)
                    .or_insert_with(|| file.display().to_string());
            }
        }
    }
    for (krate, edges) in &edges {
        for circle in circles(edges) {
            problems.push(describe(krate, edges, &circle));
        }
    }
    for file in &uses_proxy {
        if !USES_PROXY.iter().any(|(allowed, _)| allowed == file) {
            problems.push(format!(
                "{file}: uses holdfast_sdp; types of both programs belong to dns-policy, dns-wire or daemon"
            ));
        }
    }
    for (allowed, _) in USES_PROXY {
        if !uses_proxy.contains(allowed) {
            problems.push(format!(
                "{allowed}: does not use holdfast_sdp any more; remove it from the lint's list"
            ));
        }
    }
    Ok(problems)
}

/// Module → modules that it uses, each with a file that contains the use.
pub(super) type Edges = BTreeMap<String, BTreeMap<String, String>>;

pub(super) fn describe(krate: &str, edges: &Edges, circle: &BTreeSet<String>) -> String {
    let inside = circle.iter().flat_map(|from| {
        let used = edges.get(from).into_iter().flatten();
        used.filter(|(to, _)| circle.contains(*to))
            .map(move |(to, file)| format!("{from} → {to} ({file})"))
    });
    format!(
        "{krate}: modules use each other in a circle: {}; move what both need to a module of its own",
        inside.collect::<Vec<_>>().join(", ")
    )
}

/// `config/args.rs` → `config`. Binaries and the crate root stand for themselves.
fn top_module(inner: &Path) -> String {
    let first = inner.components().next();
    let first = first.map(|part| part.as_os_str().to_string_lossy().into_owned());
    first
        .map(|name| name.trim_end_matches(".rs").to_owned())
        .unwrap_or_default()
}

/// The top-level modules in `crate::…` paths, grouped imports included.
fn used_modules(code: &str) -> BTreeSet<String> {
    let mut used = BTreeSet::new();
    for (at, found) in code.match_indices("crate::") {
        let before = code[..at].chars().next_back();
        if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == '$') {
            continue;
        }
        let rest = &code[at + found.len()..];
        match rest.strip_prefix('{') {
            Some(group) => used.extend(first_segments(group)),
            None => used.extend(segment(rest)),
        }
    }
    used
}

/// First path segments of the items of an import group. `group` is the text after its brace.
fn first_segments(group: &str) -> Vec<String> {
    let mut segments = Vec::new();
    let mut depth = 0;
    let mut starts = true;
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => starts = true,
            c if starts && !c.is_whitespace() => {
                segments.extend(segment(&group[at..]));
                starts = false;
            }
            _ => {}
        }
    }
    segments
}

/// The module at the start of a path; `None` for items of the crate root (`crate::Error`).
fn segment(path: &str) -> Option<String> {
    let name: String = path
        .chars()
        .take_while(|c| c.is_alphanumeric() || *c == '_')
        .collect();
    let is_module = name.starts_with(|c: char| c.is_ascii_lowercase()) && name != "self";
    is_module.then_some(name)
}

fn without_comments(text: &str) -> String {
    let lines = text
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default());
    lines.collect::<Vec<_>>().join("\n")
}

/// Groups of at least two modules that reach each other.
pub(super) fn circles(edges: &Edges) -> BTreeSet<BTreeSet<String>> {
    let reached: BTreeMap<&String, BTreeSet<&String>> = edges
        .keys()
        .map(|from| (from, reach(edges, from)))
        .collect();
    let mut circles = BTreeSet::new();
    for (from, to) in &reached {
        let back = |other: &&&String| reached.get(**other).is_some_and(|to| to.contains(*from));
        let mut circle: BTreeSet<String> = to.iter().filter(back).map(|m| (*m).clone()).collect();
        circle.insert((*from).clone());
        if circle.len() > 1 {
            circles.insert(circle);
        }
    }
    circles
}

fn reach<'e>(edges: &'e Edges, from: &'e String) -> BTreeSet<&'e String> {
    let mut reached = BTreeSet::new();
    let mut open = vec![from];
    while let Some(module) = open.pop() {
        for used in edges.get(module).into_iter().flat_map(BTreeMap::keys) {
            if reached.insert(used) {
                open.push(used);
            }
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edges(of: &[(&str, &[&str])]) -> Edges {
        of.iter()
            .map(|(from, to)| {
                let to = to.iter().map(|to| ((*to).to_owned(), format!("{from}.rs")));
                ((*from).to_owned(), to.collect())
            })
            .collect()
    }

    #[test]
    fn imports_are_read_with_their_groups() {
        let code = "use crate::{a::{b, c}, d, E};\nuse crate::f::g;\npub(in crate::h) fn i() {}\n";
        let used = used_modules(&without_comments(&format!("{code}// crate::comment::x\n")));
        assert_eq!(used.into_iter().collect::<Vec<_>>(), ["a", "d", "f", "h"]);
    }

    #[test]
    fn a_circle_over_three_modules_is_found_and_described() {
        let of = edges(&[("a", &["b"]), ("b", &["c"]), ("c", &["a", "d"]), ("d", &[])]);
        let circles: Vec<_> = circles(&of).into_iter().collect();
        let [circle] = circles.as_slice() else {
            panic!("{circles:?}");
        };
        assert_eq!(circle.iter().collect::<Vec<_>>(), ["a", "b", "c"]);
        assert!(describe("x", &of, circle).contains("c → a (c.rs)"));
        assert!(super::circles(&edges(&[("a", &["b"]), ("b", &["c"])])).is_empty());
    }

    #[test]
    fn files_belong_to_their_top_folder() {
        assert_eq!(top_module(Path::new("config/args.rs")), "config");
        assert_eq!(top_module(Path::new("config.rs")), "config");
    }
}
