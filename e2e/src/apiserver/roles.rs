//! Which requests a user may make: ClusterRoles and Roles as a chart renders them, and their
//! bindings.

use serde_json::Value;

use super::failure::Failure;
use super::kind::Kind;

/// A user, whom a bearer token identifies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum User {
    /// Every request of this user is allowed.
    Admin,
    /// A ServiceAccount, whose requests its roles must allow.
    ServiceAccount {
        namespace: String,
        name: String,
        /// The node of the pod to which the token belongs.
        node: Option<String>,
    },
}

/// One request, as roles see it.
#[derive(Clone, Debug)]
pub(super) struct Asked<'a> {
    pub(super) verb: &'static str,
    pub(super) kind: &'a Kind,
    pub(super) subresource: Option<&'a str>,
    pub(super) namespace: Option<&'a str>,
    pub(super) name: Option<&'a str>,
}

/// The rules of one user.
#[derive(Clone, Debug, Default)]
pub(super) struct Roles {
    rules: Vec<Rule>,
}

#[derive(Clone, Debug)]
struct Rule {
    /// The rule applies only in this namespace; everywhere if `None`.
    namespace: Option<String>,
    groups: Vec<String>,
    resources: Vec<String>,
    verbs: Vec<String>,
    names: Vec<String>,
}

impl Roles {
    /// The rules of `user` in documents of roles and bindings. If there is no binding at all, every
    /// role applies to every ServiceAccount.
    pub(super) fn of(documents: &[Value], user: &User) -> Self {
        let bindings: Vec<&Value> = documents.iter().filter(|d| is_binding(d)).collect();
        let mut rules = Vec::new();
        for role in documents {
            let bound = match role["kind"].as_str() {
                Some("ClusterRole") => bindings.iter().find(|b| binds(b, role, user)),
                Some("Role") => bindings.iter().find(|b| binds(b, role, user)),
                _ => continue,
            };
            if bound.is_none() && !bindings.is_empty() {
                continue;
            }
            let of_binding = bound.is_some_and(|b| b["kind"] == "RoleBinding");
            let namespace = (of_binding || role["kind"] == "Role").then(|| {
                let holder = bound.map_or(role, |b| b);
                let namespace = holder["metadata"]["namespace"].as_str();
                namespace.unwrap_or_default().to_owned()
            });
            for rule in role["rules"].as_array().into_iter().flatten() {
                rules.push(Rule {
                    namespace: namespace.clone(),
                    groups: texts(&rule["apiGroups"]),
                    resources: texts(&rule["resources"]),
                    verbs: texts(&rule["verbs"]),
                    names: texts(&rule["resourceNames"]),
                });
            }
        }
        Self { rules }
    }

    /// Refuses a request that no rule allows, in the server's words.
    pub(super) fn check(&self, user: &User, asked: &Asked<'_>) -> Result<(), Failure> {
        if *user == User::Admin || self.rules.iter().any(|rule| rule.allows(asked)) {
            return Ok(());
        }
        Err(refusal(user, asked))
    }
}

impl Rule {
    fn allows(&self, asked: &Asked<'_>) -> bool {
        let resource = match asked.subresource {
            Some(part) => format!("{}/{part}", asked.kind.plural),
            None => asked.kind.plural.clone(),
        };
        let has = |all: &[String], one: &str| all.iter().any(|each| each == one || each == "*");
        let place = match &self.namespace {
            Some(namespace) => asked.namespace == Some(namespace.as_str()),
            None => true,
        };
        let named = match asked.name {
            _ if self.names.is_empty() => true,
            Some(name) => self.names.iter().any(|each| each == name),
            None => false,
        };
        place
            && named
            && has(&self.groups, &asked.kind.group)
            && has(&self.resources, &resource)
            && has(&self.verbs, asked.verb)
    }
}

/// The refusal of a request. A fault that removes a right uses it, too.
pub(super) fn refusal(user: &User, asked: &Asked<'_>) -> Failure {
    let user = match user {
        User::Admin => "admin".to_owned(),
        User::ServiceAccount {
            namespace, name, ..
        } => {
            format!("system:serviceaccount:{namespace}:{name}")
        }
    };
    let name = asked.name.map(|name| format!(" \"{name}\""));
    let place = match asked.namespace {
        Some(namespace) => format!("in the namespace \"{namespace}\""),
        None => "at the cluster scope".to_owned(),
    };
    let part = asked.subresource.map(|part| format!("/{part}"));
    Failure::forbidden(format!(
        "{}{} is forbidden: User \"{user}\" cannot {} resource \"{}{}\" in API group \"{}\" {place}",
        asked.kind.id(),
        name.unwrap_or_default(),
        asked.verb,
        asked.kind.plural,
        part.unwrap_or_default(),
        asked.kind.group,
    ))
}

fn is_binding(document: &Value) -> bool {
    let kind = document["kind"].as_str();
    matches!(kind, Some("ClusterRoleBinding" | "RoleBinding"))
}

fn binds(binding: &Value, role: &Value, user: &User) -> bool {
    let User::ServiceAccount {
        namespace, name, ..
    } = user
    else {
        return false;
    };
    let reference = &binding["roleRef"];
    let is_role = reference["kind"] == role["kind"]
        && reference["name"] == role["metadata"]["name"]
        && (role["kind"] == "ClusterRole"
            || role["metadata"]["namespace"] == binding["metadata"]["namespace"]);
    let mut subjects = binding["subjects"].as_array().into_iter().flatten();
    is_role
        && subjects.any(|subject| {
            subject["kind"] == "ServiceAccount"
                && subject["name"] == name.as_str()
                && subject["namespace"] == namespace.as_str()
        })
}

fn texts(value: &Value) -> Vec<String> {
    let values = value.as_array().into_iter().flatten();
    values
        .filter_map(Value::as_str)
        .map(str::to_owned)
        .collect()
}
