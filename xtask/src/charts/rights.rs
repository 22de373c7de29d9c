//! Checks the table of rights in docs/src/security.md against the rendered roles and admission
//! policies.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::{read, render::Rendered};
use crate::repository;

const PAGE: &str = "docs/src/security.md";
const HEAD: &str = "| Role | Of the account | In | Verbs | Resources | What admission policies leave of the right |";
/// Begins the last cell of a right to write that no policy restricts; a reason follows.
const UNRESTRICTED: &str = "all: ";
const READS: [&str; 3] = ["get", "list", "watch"];

/// One rule of a role: all cells of its row except the account and the last cell.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Right {
    role: String,
    place: &'static str,
    verbs: String,
    resources: String,
    /// Whether it is a right to write objects of any name.
    writes_any: bool,
}

/// Rights that the table lacks, superfluous rows, and rights that the table wrongly calls
/// restricted.
pub(super) fn problems(rendered: &[Rendered]) -> Result<Vec<String>> {
    let mut rights: BTreeMap<Right, BTreeSet<String>> = BTreeMap::new();
    let mut policies: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for set in rendered.iter().filter(|set| has_default_names(set)) {
        for (right, account) in rights_of(set)? {
            rights.entry(right).or_default().insert(account);
        }
        for policy in set.of_kind("ValidatingAdmissionPolicy") {
            let rules = &policy["spec"]["matchConstraints"]["resourceRules"];
            let resources = list(rules).flat_map(resources);
            policies.insert(name(policy)?, resources.collect());
        }
    }
    let page = read(&repository::root().join(PAGE))?;
    Ok(compare(&rights, &policies, &page))
}

/// Whether the objects of a set have the names of the table.
fn has_default_names(set: &Rendered) -> bool {
    let mut sets = set.of_kind("DaemonSet");
    sets.any(|one| one["metadata"]["name"] == "holdfast-agent")
}

fn rights_of(set: &Rendered) -> Result<Vec<(Right, String)>> {
    let mut found = Vec::new();
    for (kind, place) in [
        ("ClusterRoleBinding", "the cluster"),
        ("RoleBinding", "one namespace"),
    ] {
        for binding in set.of_kind(kind) {
            let reference = &binding["roleRef"];
            let of_kind = reference["kind"].as_str().context("roleRef.kind")?;
            let mut roles = set.of_kind(of_kind);
            let role = roles.find(|role| role["metadata"]["name"] == reference["name"]);
            let role = role.with_context(|| format!("no role {reference}"))?;
            for rule in list(&role["rules"]) {
                for subject in list(&binding["subjects"]) {
                    let account = subject["name"].as_str().context("a subject's name")?;
                    found.push((right(name(role)?, place, rule), account.to_owned()));
                }
            }
        }
    }
    Ok(found)
}

fn right(role: String, place: &'static str, rule: &Value) -> Right {
    let mut names = code(texts(&rule["resourceNames"]));
    if !names.is_empty() {
        names = format!(" named {names}");
    }
    let writes = texts(&rule["verbs"]).any(|verb| !READS.contains(&verb));
    Right {
        role,
        place,
        verbs: texts(&rule["verbs"]).collect::<Vec<_>>().join(", "),
        resources: format!(
            "{}{names}",
            code(resources(rule).iter().map(String::as_str))
        ),
        writes_any: writes && names.is_empty(),
    }
}

/// Resources with their groups, as `kubectl` writes them.
fn resources(rule: &Value) -> Vec<String> {
    let groups = texts(&rule["apiGroups"]);
    let named = groups.flat_map(|group| {
        texts(&rule["resources"]).map(move |resource| match (group, resource.split_once('/')) {
            ("", _) => resource.to_owned(),
            (_, Some((resource, part))) => format!("{resource}.{group}/{part}"),
            (_, None) => format!("{resource}.{group}"),
        })
    });
    named.collect()
}

fn compare(
    rights: &BTreeMap<Right, BTreeSet<String>>,
    policies: &BTreeMap<String, BTreeSet<String>>,
    page: &str,
) -> Vec<String> {
    let mut problems = Vec::new();
    let mut rows = rows(page);
    for (right, accounts) in rights {
        let accounts = code(accounts.iter().map(String::as_str));
        let wanted = format!(
            "| `{}` | {accounts} | {} | {} | {} |",
            right.role, right.place, right.verbs, right.resources
        );
        let Some(found) = rows.iter().position(|row| row.starts_with(&wanted)) else {
            problems.push(format!(
                "{PAGE}: the table of rights lacks the row {wanted} … |"
            ));
            continue;
        };
        let row = rows.swap_remove(found);
        let left = row[wanted.len()..].trim_matches([' ', '|']);
        let is_covered = policies.iter().any(|(policy, covered)| {
            left.contains(&format!("`{policy}`"))
                && covered
                    .iter()
                    .any(|one| right.resources.contains(&format!("`{one}`")))
        });
        if right.writes_any && !is_covered && !left.starts_with(UNRESTRICTED) {
            problems.push(format!(
                "{PAGE}: no policy in the last cell restricts {wanted}: name one, or write \
                 \"{UNRESTRICTED}\" and why"
            ));
        }
    }
    problems.extend(
        rows.iter()
            .map(|row| format!("{PAGE}: no role has the right {row}")),
    );
    let missing = policies
        .keys()
        .filter(|policy| !page.contains(policy.as_str()));
    problems.extend(missing.map(|policy| format!("{PAGE}: does not name the policy {policy}")));
    problems
}

fn rows(page: &str) -> Vec<String> {
    let table = page.lines().skip_while(|line| *line != HEAD).skip(2);
    table
        .take_while(|line| line.starts_with('|'))
        .map(ToOwned::to_owned)
        .collect()
}

fn name(object: &Value) -> Result<String> {
    let name = object["metadata"]["name"].as_str().context("no name")?;
    Ok(name.to_owned())
}

fn code<'a>(texts: impl Iterator<Item = &'a str>) -> String {
    texts
        .map(|text| format!("`{text}`"))
        .collect::<Vec<_>>()
        .join(", ")
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn texts(value: &Value) -> impl Iterator<Item = &str> {
    list(value).filter_map(Value::as_str)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_right_without_a_row_a_row_without_a_right_and_a_claim_without_a_policy_are_reported() {
        let rule = json!({"apiGroups": [""], "resources": ["nodes"], "verbs": ["patch"]});
        let rights = BTreeMap::from([(
            right("r".to_owned(), "the cluster", &rule),
            BTreeSet::from(["a".to_owned()]),
        )]);
        let policies = BTreeMap::from([("p".to_owned(), BTreeSet::from(["nodes".to_owned()]))]);
        let with = |row: &str| compare(&rights, &policies, &format!("{HEAD}\n|---|\n{row}\np\n"));
        let row = "| `r` | `a` | the cluster | patch | `nodes` |";
        assert!(with(&format!("{row} `p`: labels |")).is_empty());
        assert!(with(&format!("{row} all: because |")).is_empty());
        assert_eq!(with(&format!("{row} – |")).len(), 1);
        assert_eq!(
            with("| `r` | `b` | the cluster | patch | `nodes` | `p` |").len(),
            2
        );
    }

    #[test]
    fn a_rule_with_names_and_parts_is_a_right_to_these_alone() {
        let rule = json!({
            "apiGroups": ["x.io"], "resources": ["things/status"], "resourceNames": ["one"],
            "verbs": ["get", "patch"],
        });
        let right = right("r".to_owned(), "one namespace", &rule);
        assert_eq!(right.resources, "`things.x.io/status` named `one`");
        assert_eq!(right.verbs, "get, patch");
        assert!(!right.writes_any);
    }
}
