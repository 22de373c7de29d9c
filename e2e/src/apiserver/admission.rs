//! ValidatingAdmissionPolicies of a chart: their CEL expressions are evaluated for each write, as the API
//! server does. An expression that cannot be evaluated refuses the write (`failurePolicy: Fail`).

use anyhow::{Context as _, Result, ensure};
use cel::{Context, Program, Value as Cel};
use serde_json::{Value, json};

use super::failure::Failure;
use super::kind::Kind;
use super::roles::User;

/// Extra field of a user whose token belongs to a pod: the node of the pod.
const NODE: &str = "authentication.kubernetes.io/node-name";

/// Every policy that a binding enforces.
#[derive(Debug, Default)]
pub(super) struct Admission {
    policies: Vec<Policy>,
}

#[derive(Debug)]
struct Policy {
    name: String,
    rules: Vec<Value>,
    conditions: Vec<Program>,
    validations: Vec<Validation>,
}

#[derive(Debug)]
struct Validation {
    expression: Program,
    message: String,
}

/// A write before it is stored.
#[derive(Clone, Copy, Debug)]
pub(super) struct Writing<'a> {
    pub(super) user: &'a User,
    pub(super) kind: &'a Kind,
    pub(super) subresource: Option<&'a str>,
    /// `None`: the object is created.
    pub(super) old: Option<&'a Value>,
    /// `None`: the object is deleted.
    pub(super) new: Option<&'a Value>,
}

impl Admission {
    /// The admission policies in documents. Documents of other kinds are ignored.
    pub(super) fn of(documents: &[Value]) -> Result<Self> {
        let of_kind = |kind: &'static str| documents.iter().filter(move |one| one["kind"] == kind);
        let mut policies = Vec::new();
        for policy in of_kind("ValidatingAdmissionPolicy") {
            let name = policy["metadata"]["name"].as_str().context("no name")?;
            let mut bindings = of_kind("ValidatingAdmissionPolicyBinding");
            let is_bound = bindings.any(|binding| {
                binding["spec"]["policyName"] == name
                    && binding["spec"]["validationActions"] == json!(["Deny"])
            });
            ensure!(is_bound, "no binding of {name} denies");
            policies.push(Policy::of(name, &policy["spec"]).with_context(|| name.to_owned())?);
        }
        Ok(Self { policies })
    }

    /// Refuses a write that a policy forbids, in the server's words.
    pub(super) fn check(&self, writing: Writing<'_>) -> Result<(), Failure> {
        let mut policies = self
            .policies
            .iter()
            .filter(|policy| policy.is_about(&writing));
        policies.try_for_each(|policy| policy.check(&writing))
    }
}

impl Policy {
    fn of(name: &str, spec: &Value) -> Result<Self> {
        ensure!(spec["failurePolicy"] == "Fail", "failurePolicy is not Fail");
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let compiled = |value: &Value| -> Result<Program> {
            let text = value["expression"].as_str().context("no expression")?;
            Program::compile(text).with_context(|| text.to_owned())
        };
        let conditions = list(&spec["matchConditions"]);
        let conditions = conditions.iter().map(compiled);
        let validations = list(&spec["validations"]);
        let validations = validations.iter().map(|one| {
            ensure!(
                one["reason"] == "Forbidden",
                "another reason than Forbidden"
            );
            Ok(Validation {
                expression: compiled(one)?,
                message: one["message"].as_str().context("no message")?.to_owned(),
            })
        });
        Ok(Self {
            name: name.to_owned(),
            rules: list(&spec["matchConstraints"]["resourceRules"]),
            conditions: conditions.collect::<Result<_>>()?,
            validations: validations.collect::<Result<_>>()?,
        })
    }

    fn is_about(&self, writing: &Writing<'_>) -> bool {
        let operation = match (writing.old, writing.new) {
            (None, _) => "CREATE",
            (Some(_), Some(_)) => "UPDATE",
            (Some(_), None) => "DELETE",
        };
        let has = |rule: &Value, field: &str, value: &str| {
            let mut values = rule[field].as_array().into_iter().flatten();
            values.any(|one| one == value || one == "*")
        };
        let resource = match writing.subresource {
            Some(part) => format!("{}/{part}", writing.kind.plural),
            None => writing.kind.plural.clone(),
        };
        self.rules.iter().any(|rule| {
            has(rule, "apiGroups", &writing.kind.group)
                && has(rule, "apiVersions", &writing.kind.version)
                && has(rule, "resources", &resource)
                && has(rule, "operations", operation)
        })
    }

    fn check(&self, writing: &Writing<'_>) -> Result<(), Failure> {
        let object = writing.new.or(writing.old).unwrap_or(&Value::Null);
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let denied = |message: &str| {
            Failure::forbidden(format!(
                "{} \"{name}\" is forbidden: ValidatingAdmissionPolicy '{}' with binding '{}' denied \
                 request: {message}",
                writing.kind.id(),
                self.name,
                self.name
            ))
        };
        let context = context(writing).map_err(|error| denied(&error.to_string()))?;
        let holds = |program: &Program| match program.execute(&context) {
            Ok(Cel::Bool(holds)) => Ok(holds),
            other => Err(denied(&format!("evaluated to {other:?}"))),
        };
        for condition in &self.conditions {
            if !holds(condition)? {
                return Ok(());
            }
        }
        for validation in &self.validations {
            if !holds(&validation.expression)? {
                return Err(denied(&validation.message));
            }
        }
        Ok(())
    }
}

fn context(writing: &Writing<'_>) -> Result<Context<'static, 'static>> {
    let user = match writing.user {
        User::Admin => json!({"username": "admin"}),
        User::ServiceAccount {
            namespace,
            name,
            node,
        } => {
            let mut user = json!({"username": format!("system:serviceaccount:{namespace}:{name}")});
            if let Some(node) = node {
                user["extra"] = json!({NODE: [node]});
            }
            user
        }
    };
    let mut context = Context::default();
    for (name, value) in [
        ("request", &json!({"userInfo": user})),
        ("object", writing.new.unwrap_or(&Value::Null)),
        ("oldObject", writing.old.unwrap_or(&Value::Null)),
    ] {
        let value = cel::to_value(value).with_context(|| format!("{name} as a value of CEL"))?;
        context.add_variable_from_value(name, value);
    }
    Ok(context)
}
