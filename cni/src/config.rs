//! The configuration on standard input: our own settings, and the result of the previous plugins.

use std::{net::IpAddr, path::PathBuf, time::Duration};

use serde_json::Value;

use crate::{VERSIONS, failure::Failure};

const SOCKET: &str = "/run/holdfast/cni.sock";
/// For how many seconds ADD waits for the agent by default.
const WAIT: u64 = 20;
/// The longest wait that can be set, in seconds.
const LONGEST: u64 = 120;

/// The configuration of one command.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// Version of the CNI specification (`cniVersion`); 0.3.1 if absent.
    pub(crate) version: String,
    /// The agent's socket; a default path if the entry names none.
    pub(crate) socket: PathBuf,
    /// How long ADD waits for the agent.
    pub(crate) wait: Duration,
    open: Vec<String>,
    whole: Value,
}

impl Config {
    /// Reads and checks the JSON of standard input.
    pub(crate) fn parse(text: &str) -> Result<Self, Failure> {
        let whole: Value = serde_json::from_str(text).map_err(|error| {
            let text = format!("standard input is not the JSON of a CNI configuration: {error}");
            Failure::input(&text)
        })?;
        let field = |name: &str| whole.get(name).filter(|value| !value.is_null());
        let wrong = |name: &str, want: &str| {
            let text = format!("{name} of the entry of type holdfast-cni has to be {want}");
            Failure::config(&text)
        };
        let version = field("cniVersion").and_then(Value::as_str);
        let socket = match field("socket") {
            None => SOCKET,
            Some(value) => value
                .as_str()
                .ok_or_else(|| wrong("socket", "the path of the agent's --cni-socket"))?,
        };
        let wait = match field("wait") {
            None => WAIT,
            Some(value) => value
                .as_u64()
                .filter(|seconds| *seconds <= LONGEST)
                .ok_or_else(|| wrong("wait", "a number of seconds, at most 120"))?,
        };
        let open = field("failOpenNamespaces").map_or(Ok(Vec::new()), |value| {
            let names = value.as_array().map(|names| {
                let names = names.iter().map(|name| name.as_str().map(str::to_owned));
                names.collect::<Option<Vec<_>>>()
            });
            let list = "a list of namespaces' names";
            names
                .flatten()
                .ok_or_else(|| wrong("failOpenNamespaces", list))
        })?;
        Ok(Self {
            version: version.unwrap_or(VERSIONS[1]).to_owned(),
            socket: PathBuf::from(socket),
            wait: Duration::from_secs(wait),
            open,
            whole,
        })
    }

    /// Fails if the version is not one of ours.
    pub(crate) fn check_version(&self) -> Result<(), Failure> {
        match VERSIONS.contains(&self.version.as_str()) {
            true => Ok(()),
            false => Err(Failure::version(&format!(
                "cniVersion is {}; write one of {}",
                self.version,
                VERSIONS.join(", ")
            ))),
        }
    }

    /// Whether pods of a namespace start while no agent answers.
    pub(crate) fn is_open(&self, namespace: Option<&str>) -> bool {
        namespace.is_some_and(|namespace| self.open.iter().any(|open| open == namespace))
    }

    /// How many namespaces have pods that start while no agent answers.
    pub(crate) fn open_namespaces(&self) -> usize {
        self.open.len()
    }

    /// Addresses that the previous plugins gave to the interface.
    pub(crate) fn addresses(&self, ifname: &str) -> Result<Vec<IpAddr>, Failure> {
        let result = self.before()?;
        let list = |name: &str| result.get(name).and_then(Value::as_array);
        let interfaces = list("interfaces").map(Vec::as_slice).unwrap_or_default();
        let is_of = |entry: &Value| {
            let index = entry.get("interface").and_then(Value::as_u64);
            let index = index.and_then(|index| usize::try_from(index).ok());
            let Some(interface) = index.and_then(|index| interfaces.get(index)) else {
                return true;
            };
            interface.get("name").and_then(Value::as_str) == Some(ifname)
        };
        let mut found = Vec::new();
        for entry in list("ips").into_iter().flatten().filter(|e| is_of(e)) {
            let text = entry.get("address").and_then(Value::as_str);
            let text = text.unwrap_or_default();
            let address = text.split('/').next().unwrap_or_default();
            let address = address.parse().map_err(|_| {
                let text = format!("prevResult.ips has `{text}`, which is not an address");
                Failure::config(&text)
            })?;
            if !found.contains(&address) {
                found.push(address);
            }
        }
        if found.is_empty() {
            let text = format!(
                "the plugins before gave {ifname} no address (prevResult.ips); holdfast-cni needs a \
                 plugin with address management before it"
            );
            return Err(Failure::config(&text));
        }
        Ok(found)
    }

    /// The result of the previous plugins, which is ours as well.
    pub(crate) fn result(&self) -> Result<String, Failure> {
        let mut result = self.before()?.clone();
        if let Some(fields) = result.as_object_mut() {
            let version = Value::String(self.version.clone());
            fields.entry("cniVersion").or_insert(version);
        }
        Ok(result.to_string())
    }

    /// The valid attachments of a GC.
    pub(crate) fn valid_attachments(&self) -> Option<&Vec<Value>> {
        self.whole.get("cni.dev/valid-attachments")?.as_array()
    }

    fn before(&self) -> Result<&Value, Failure> {
        let result = self.whole.get("prevResult");
        result.filter(|result| result.is_object()).ok_or_else(|| {
            Failure::config(
                "there is no prevResult: holdfast-cni makes no interfaces. Make it the last entry of \
                 `plugins` in a conflist, behind the plugin that does",
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn config(value: &Value) -> Config {
        Config::parse(&value.to_string()).unwrap()
    }

    /// Results as the plugins print them.
    fn results() -> [(&'static str, Value, &'static [&'static str]); 5] {
        [
            (
                "ptp",
                json!({
                    "cniVersion": "1.0.0",
                    "interfaces": [
                        {"name": "vetha83a366d", "mac": "0a:58:0a:f4:01:01"},
                        {"name": "eth0", "mac": "0a:58:0a:f4:01:02", "sandbox": "/var/run/netns/cni-5503"}
                    ],
                    "ips": [{"interface": 1, "address": "10.244.1.2/24", "gateway": "10.244.1.1"}],
                    "routes": [{"dst": "0.0.0.0/0"}], "dns": {}
                }),
                &["10.244.1.2"],
            ),
            (
                "calico",
                json!({
                    "cniVersion": "0.3.1",
                    "interfaces": [{"name": "cali0ef24ba9e05"}],
                    "ips": [{"version": "4", "address": "192.168.1.7/32"}], "dns": {}
                }),
                &["192.168.1.7"],
            ),
            (
                "aws-vpc",
                json!({
                    "cniVersion": "0.4.0",
                    "interfaces": [
                        {"name": "eni5a2f"},
                        {"name": "eth0", "sandbox": "/var/run/netns/cni-1"},
                        {"name": "dummy5a2f", "mac": "0", "sandbox": "0"}
                    ],
                    "ips": [{"version": "4", "interface": 1, "address": "10.0.3.9/32"}]
                }),
                &["10.0.3.9"],
            ),
            (
                "azure",
                json!({
                    "cniVersion": "0.3.0",
                    "interfaces": [{"name": "eth0"}],
                    "ips": [
                        {"version": "4", "interface": 0, "address": "10.240.0.9/16"},
                        {"version": "6", "interface": 0, "address": "fd00::9/64"}
                    ]
                }),
                &["10.240.0.9", "fd00::9"],
            ),
            (
                "a second interface",
                json!({
                    "interfaces": [{"name": "veth1"}, {"name": "eth0"}, {"name": "v4if0"}],
                    "ips": [
                        {"interface": 1, "address": "2600::9/128"},
                        {"interface": 2, "address": "169.254.172.9/22"}
                    ]
                }),
                &["2600::9"],
            ),
        ]
    }

    #[test]
    fn addresses_are_those_of_the_pods_interface_in_each_plugins_result() {
        for (plugin, result, want) in results() {
            let config = config(&json!({"type": "holdfast-cni", "prevResult": result}));
            let found = config.addresses("eth0").unwrap();
            let found: Vec<String> = found.iter().map(ToString::to_string).collect();
            assert_eq!(found, want, "{plugin}");
            let printed: Value = serde_json::from_str(&config.result().unwrap()).unwrap();
            assert_eq!(printed["ips"], result["ips"], "{plugin}");
            assert!(printed["cniVersion"].is_string(), "{plugin}");
        }
    }

    #[test]
    fn a_result_that_is_missing_or_without_address_is_refused_with_the_remedy() {
        for (input, wants) in [
            (json!({}), "behind the plugin that does"),
            (json!({"prevResult": null}), "there is no prevResult"),
            (json!({"prevResult": {"ips": []}}), "no address"),
            (
                json!({"prevResult": {"ips": [{"address": "10.0.0"}]}}),
                "10.0.0",
            ),
            (
                json!({"prevResult": {
                    "interfaces": [{"name": "net1"}],
                    "ips": [{"interface": 0, "address": "10.0.0.1/8"}]}}),
                "gave eth0 no address",
            ),
        ] {
            let failure = config(&input).addresses("eth0").unwrap_err();
            assert_eq!(failure.code, 7, "{input}");
            assert!(failure.text.contains(wants), "{failure:?}");
        }
    }

    #[test]
    fn settings_have_defaults_and_wrong_ones_are_named() {
        let own = config(&json!({"cniVersion": "1.0.0"}));
        assert_eq!(own.socket, PathBuf::from("/run/holdfast/cni.sock"));
        assert_eq!(own.wait, Duration::from_secs(20));
        let own = json!({"socket": "/a", "wait": 1, "failOpenNamespaces": ["kube-system"]});
        let own = config(&own);
        assert!(
            own.is_open(Some("kube-system")) && !own.is_open(Some("shop")) && !own.is_open(None)
        );
        for (field, value) in [
            ("socket", json!(7)),
            ("wait", json!("20s")),
            ("wait", json!(121)),
            ("failOpenNamespaces", json!("kube-system")),
            ("failOpenNamespaces", json!([1])),
        ] {
            let failure = Config::parse(&json!({field: value}).to_string()).unwrap_err();
            assert!(failure.text.contains(field), "{failure:?}");
        }
        assert_eq!(Config::parse("{").unwrap_err().code, 6);
        let failure = config(&json!({"cniVersion": "0.2.0"})).check_version();
        assert_eq!(failure.unwrap_err().code, 1);
    }
}
