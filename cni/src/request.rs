//! Requests to the agent.

use serde_json::{Value, json};

use crate::{command::Environment, config::Config, failure::Failure};

/// Asks to put a pod's interface under policy. The time that the agent may wait is added when the request is sent.
pub(crate) fn add(config: &Config, environment: &Environment) -> Result<Value, Failure> {
    let argument = |name: &str| {
        environment.argument(name).ok_or_else(|| {
            let text = format!(
                "CNI_ARGS has no {name}: holdfast-cni takes pods of Kubernetes only; remove it from \
                 the configuration of other networks"
            );
            Failure::environment(&text)
        })
    };
    Ok(json!({
        "command": "ADD",
        "containerId": environment.container,
        "netns": environment.netns,
        "ifname": environment.ifname,
        "namespace": argument("K8S_POD_NAMESPACE")?,
        "pod": argument("K8S_POD_NAME")?,
        "uid": environment.argument("K8S_POD_UID"),
        "addresses": config.addresses(&environment.ifname)?,
        "failOpenNamespaces": config.open_namespaces(),
    }))
}

/// Asks whether the pod's interface is under policy.
pub(crate) fn check(environment: &Environment) -> Value {
    attachment("CHECK", environment)
}

/// Reports that the pod's interface is about to go.
pub(crate) fn delete(environment: &Environment) -> Value {
    attachment("DEL", environment)
}

fn attachment(command: &str, environment: &Environment) -> Value {
    let netns = Some(&environment.netns).filter(|netns| !netns.is_empty());
    json!({
        "command": command,
        "containerId": environment.container,
        "ifname": environment.ifname,
        "netns": netns,
    })
}

/// All interfaces that the runtime has; `None` if it does not list them.
pub(crate) fn collect(config: &Config) -> Option<Value> {
    let valid = config.valid_attachments()?;
    let field =
        |entry: &Value, name: &str| entry.get(name).and_then(Value::as_str).map(str::to_owned);
    let valid: Vec<Value> = valid
        .iter()
        .map(|entry| {
            json!({
                "containerId": field(entry, "containerID"),
                "ifname": field(entry, "ifname"),
            })
        })
        .collect();
    Some(json!({"command": "GC", "valid": valid}))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(arguments: &str) -> Environment {
        Environment::read(|name| {
            let value = match name {
                "CNI_COMMAND" => "ADD",
                "CNI_CONTAINERID" => "2d1a",
                "CNI_NETNS" => "/var/run/netns/cni-5503",
                "CNI_IFNAME" => "eth0",
                "CNI_ARGS" => arguments,
                _ => return None,
            };
            Some(value.to_owned())
        })
        .unwrap()
    }

    #[test]
    fn a_pod_without_name_is_refused() {
        let input = json!({
            "prevResult": {"ips": [{"address": "10.244.1.2/24"}]},
            "failOpenNamespaces": ["kube-system"],
        });
        let config = Config::parse(&input.to_string()).unwrap();
        let failure = add(&config, &environment("K8S_POD_NAMESPACE=shop")).unwrap_err();
        assert_eq!(failure.code, 4);
        assert!(failure.text.contains("K8S_POD_NAME"), "{failure:?}");
        let body = add(
            &config,
            &environment("K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-1"),
        );
        assert_eq!(
            body.unwrap(),
            json!({
                "command": "ADD", "containerId": "2d1a", "netns": "/var/run/netns/cni-5503",
                "ifname": "eth0", "namespace": "shop", "pod": "web-1", "uid": null,
                "addresses": ["10.244.1.2"], "failOpenNamespaces": 1,
            })
        );
    }

    #[test]
    fn a_collection_without_a_list_of_attachments_removes_nothing() {
        let config = |value: Value| Config::parse(&value.to_string()).unwrap();
        assert_eq!(collect(&config(json!({}))), None);
        let one = json!({"containerID": "a", "ifname": "eth0"});
        let all = json!({"cni.dev/valid-attachments": [one]});
        assert_eq!(
            collect(&config(all)),
            Some(json!({"command": "GC", "valid": [{"containerId": "a", "ifname": "eth0"}]}))
        );
    }
}
