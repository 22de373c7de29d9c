//! Session rules as JSON.

use serde_json::{Value, json};

use super::{Scope, SessionRule};
use crate::{
    field::{Checked, Field},
    pod::PodId,
    policy::Protocol,
    rule::Action,
};

/// Scopes as VPP numbers them.
const GLOBAL: u64 = 1;
const LOCAL: u64 = 2;
/// Actions as VPP numbers them.
const DENY: u64 = u32::MAX as u64 - 1;
const ALLOW: u64 = u32::MAX as u64 - 2;

/// The document `session-rules.json`.
pub fn to_json(rules: &[SessionRule]) -> Value {
    let rules = rules.iter().map(|rule| {
        let (scope, pod) = match &rule.scope {
            Scope::Global => (GLOBAL, None),
            Scope::Local(pod) => (LOCAL, Some(pod.to_string())),
        };
        json!({
            "scope": scope,
            "pod": pod,
            "protocol": rule.protocol.number(),
            "lcl": rule.local.map(|net| net.to_string()),
            "lcl_port": rule.local_port,
            "rmt": rule.remote.to_string(),
            "rmt_port": rule.remote_port,
            "action_index": match rule.action {
                Action::Deny => DENY,
                Action::Permit => ALLOW,
            },
            "tag": rule.tag,
        })
    });
    json!({"session_rules": rules.collect::<Vec<_>>()})
}

/// Reads `session-rules.json`.
pub fn from_json(document: &Value) -> Checked<Vec<SessionRule>> {
    let rules = Field::top(document).get("session_rules").items()?;
    rules.map(|rule| read(&rule)).collect()
}

fn read(rule: &Field<'_>) -> Checked<SessionRule> {
    let port = |name: &str| {
        let number = number(&rule.get(name))?;
        let port = u16::try_from(number);
        port.map_err(|_| rule.get(name).fault("is not a port", "write 0 to 65535"))
    };
    let net = |field: Field<'_>| {
        let net = field.text()?.parse();
        net.map_err(|_| field.fault("is not an IPv4 prefix", "write for example 10.0.0.0/8"))
    };
    let local = rule.get("lcl").present().map(net).transpose()?;
    Ok(SessionRule {
        scope: scope(rule)?,
        protocol: match number(&rule.get("protocol"))? {
            6 => Protocol::Tcp,
            17 => Protocol::Udp,
            _ => {
                return rule
                    .get("protocol")
                    .refuse("is neither TCP nor UDP", "write 6 or 17");
            }
        },
        local,
        local_port: port("lcl_port")?,
        remote: net(rule.get("rmt"))?,
        remote_port: port("rmt_port")?,
        action: match number(&rule.get("action_index"))? {
            DENY => Action::Deny,
            ALLOW => Action::Permit,
            _ => {
                let remedy = format!("write {DENY} (deny) or {ALLOW} (allow)");
                return rule
                    .get("action_index")
                    .refuse("is neither deny nor allow", remedy);
            }
        },
        tag: rule.get("tag").text()?.to_owned(),
    })
}

fn scope(rule: &Field<'_>) -> Checked<Scope> {
    let (scope, pod) = (rule.get("scope"), rule.get("pod"));
    match number(&scope)? {
        GLOBAL => Ok(Scope::Global),
        LOCAL => {
            let id = PodId::parse(pod.text()?);
            let id = id.ok_or_else(|| pod.fault("is not a pod", "write namespace/name"))?;
            Ok(Scope::Local(id))
        }
        _ => scope.refuse("is not a scope", "write 1 (global) or 2 (local)"),
    }
}

fn number(field: &Field<'_>) -> Checked<u64> {
    let number = field.value.and_then(Value::as_u64);
    number.ok_or_else(|| field.fault("is not a number", "write a number"))
}
