//! The node's CNI configuration with `holdfast-cni` as one more plugin. Nothing here reads or writes files.
//!
//! The first configuration of the directory, the base, stays as it is: ours is a copy of it in a file that sorts
//! before it. Ours has the base's name, because plugins keep leases of addresses under it.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use serde_json::{Map, Value, json};

/// Our file. Runtimes take the first file by name.
pub(super) const FILE: &str = "05-holdfast.conflist";
/// `type` of our entry in a plugin list: the file name of the plugin.
pub(super) const TYPE: &str = "holdfast-cni";
/// The lowest CNI version in which a plugin gets the result of the plugins before it.
const LOWEST: &str = "0.3.1";

/// Why a base cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum BaseError {
    /// The file is not valid JSON.
    #[error("is not JSON ({0}); correct it, or wait until its owner has written it")]
    Json(String),
    /// The file describes neither a list nor a plugin.
    #[error("has no {0}; correct it, or wait until its owner has written it")]
    Lacks(&'static str),
}

/// Whether runtimes take a file of this name as a configuration.
pub(super) fn is_config(name: &str) -> bool {
    let ending = Path::new(name)
        .extension()
        .and_then(|ending| ending.to_str());
    matches!(ending, Some("conf" | "conflist" | "json")) && !name.starts_with('.')
}

/// The base among the files of a directory: the first that is not ours.
pub(super) fn base<'a>(names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let names = names.into_iter();
    names.filter(|name| is_config(name) && *name != FILE).min()
}

/// Our configuration: `base` with our entry for the agent at `socket`. `before` is our file as it is
/// now: entries that another program added to it stay, unless the base had them.
pub(super) fn chained(
    base: &[u8],
    before: Option<&[u8]>,
    socket: &Path,
) -> Result<String, BaseError> {
    let mut list = list(base)?;
    let mut plugins = plugins(&list);
    plugins.retain(|plugin| kind(plugin) != TYPE);
    if plugins.is_empty() {
        return Err(BaseError::Lacks("plugins"));
    }
    let types: BTreeSet<String> = plugins
        .iter()
        .map(|plugin| kind(plugin).to_owned())
        .collect();
    let own = json!({"type": TYPE, "socket": socket, "baseTypes": types});
    let (first, last) = foreign(before, &types);
    plugins.extend(first);
    plugins.push(own);
    plugins.extend(last);
    list.insert("plugins".to_owned(), Value::Array(plugins));
    let version = list.get("cniVersion").and_then(Value::as_str);
    if version.is_none_or(|version| ["", "0.1.0", "0.2.0", "0.3.0"].contains(&version)) {
        list.insert("cniVersion".to_owned(), json!(LOWEST));
    }
    let mut text =
        serde_json::to_string_pretty(&list).map_err(|e| BaseError::Json(e.to_string()))?;
    text.push('\n');
    Ok(text)
}

/// A list as it is, or a single plugin as a list of one.
fn list(base: &[u8]) -> Result<Map<String, Value>, BaseError> {
    let parsed = serde_json::from_slice(base).map_err(|e| BaseError::Json(e.to_string()))?;
    let Value::Object(fields) = parsed else {
        return Err(BaseError::Lacks("fields"));
    };
    let name = fields.get("name").and_then(Value::as_str);
    let name = name.filter(|name| !name.is_empty());
    let name = name.ok_or(BaseError::Lacks("name"))?.to_owned();
    if fields.contains_key("plugins") {
        return Ok(fields);
    }
    if !fields.contains_key("type") {
        return Err(BaseError::Lacks("plugins"));
    }
    let mut list = Map::new();
    list.insert("name".to_owned(), Value::String(name));
    if let Some(version) = fields.get("cniVersion") {
        list.insert("cniVersion".to_owned(), version.clone());
    }
    list.insert("plugins".to_owned(), json!([fields]));
    Ok(list)
}

/// Entries of our file that came neither from us nor from the base of that time: those before our entry, and those
/// behind it.
fn foreign(before: Option<&[u8]>, types: &BTreeSet<String>) -> (Vec<Value>, Vec<Value>) {
    let before: Option<Map<String, Value>> =
        before.and_then(|before| serde_json::from_slice(before).ok());
    let plugins = before.as_ref().map(plugins).unwrap_or_default();
    let Some(own) = plugins.iter().position(|plugin| kind(plugin) == TYPE) else {
        return (Vec::new(), Vec::new());
    };
    let base = plugins.get(own).and_then(|own| own.get("baseTypes"));
    let base = base.and_then(Value::as_array).cloned().unwrap_or_default();
    let is_foreign = |plugin: &&Value| {
        let of = kind(plugin);
        of != TYPE && !types.contains(of) && !base.iter().any(|base| base == of)
    };
    let (first, last) = plugins.split_at(own);
    let kept = |part: &[Value]| part.iter().filter(is_foreign).cloned().collect();
    (kept(first), kept(last))
}

/// Whether a configuration has our entry.
pub(super) fn is_ours(text: &[u8]) -> bool {
    let list: Option<Map<String, Value>> = serde_json::from_slice(text).ok();
    let list = list.as_ref().map(plugins).unwrap_or_default();
    list.iter().any(|plugin| kind(plugin) == TYPE)
}

/// The socket that our plugin connects to, by our configuration.
pub(super) fn socket(text: &[u8]) -> Option<PathBuf> {
    let list: Map<String, Value> = serde_json::from_slice(text).ok()?;
    let plugins = plugins(&list);
    let own = plugins.iter().find(|plugin| kind(plugin) == TYPE)?;
    own.get("socket")?.as_str().map(PathBuf::from)
}

fn plugins(list: &Map<String, Value>) -> Vec<Value> {
    let plugins = list.get("plugins").and_then(Value::as_array);
    plugins.cloned().unwrap_or_default()
}

fn kind(plugin: &Value) -> &str {
    plugin
        .get("type")
        .and_then(Value::as_str)
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Configurations as each network writes them, with the name and version that ours must have.
    const BASES: [(&str, &str, &str, &str); 6] = [
        (
            "flannel",
            r#"{"name":"cbr0","cniVersion":"0.3.1","plugins":[
                {"type":"flannel","delegate":{"hairpinMode":true,"isDefaultGateway":true}},
                {"type":"portmap","capabilities":{"portMappings":true}}]}"#,
            "cbr0",
            "0.3.1",
        ),
        (
            "calico",
            r#"{"name":"k8s-pod-network","cniVersion":"0.3.1","plugins":[
                {"type":"calico","log_level":"info","datastore_type":"kubernetes","nodename":"n1","mtu":0,
                 "ipam":{"type":"calico-ipam"},"policy":{"type":"k8s"},
                 "kubernetes":{"kubeconfig":"/etc/cni/net.d/calico-kubeconfig"}},
                {"type":"portmap","snat":true,"capabilities":{"portMappings":true}},
                {"type":"bandwidth","capabilities":{"bandwidth":true}}]}"#,
            "k8s-pod-network",
            "0.3.1",
        ),
        (
            "aws-vpc",
            r#"{"cniVersion":"0.4.0","name":"aws-cni","disableCheck":true,"plugins":[
                {"name":"aws-cni","type":"aws-cni","vethPrefix":"eni","mtu":"9001",
                 "podSGEnforcingMode":"strict","pluginLogFile":"/var/log/aws-routed-eni/plugin.log"},
                {"type":"portmap","capabilities":{"portMappings":true},"snat":true}]}"#,
            "aws-cni",
            "0.4.0",
        ),
        (
            "azure",
            r#"{"cniVersion":"0.3.0","name":"azure","plugins":[
                {"type":"azure-vnet","mode":"transparent","ipsToRouteViaHost":["169.254.20.10"],
                 "ipam":{"type":"azure-vnet-ipam"}},
                {"type":"portmap","capabilities":{"portMappings":true},"snat":true}]}"#,
            "azure",
            "0.3.1",
        ),
        (
            "kindnet",
            r#"{"cniVersion":"0.3.1","name":"kindnet","plugins":[
                {"type":"ptp","ipMasq":false,"mtu":1500,"ipam":{"type":"host-local","dataDir":"/run/cni-ipam-state",
                 "routes":[{"dst":"0.0.0.0/0"}],"ranges":[[{"subnet":"10.244.0.0/24"}]]}},
                {"type":"portmap","capabilities":{"portMappings":true}}]}"#,
            "kindnet",
            "0.3.1",
        ),
        (
            "bridge, a single plugin",
            r#"{"cniVersion":"0.2.0","name":"mynet","type":"bridge","bridge":"cni0","isGateway":true,
                "ipam":{"type":"host-local","subnet":"10.22.0.0/16"}}"#,
            "mynet",
            "0.3.1",
        ),
    ];

    fn made(base: &str, before: Option<&str>) -> Value {
        let socket = Path::new("/run/holdfast/cni.sock");
        let text = chained(base.as_bytes(), before.map(str::as_bytes), socket).unwrap();
        serde_json::from_str(&text).unwrap()
    }

    fn types(list: &Value) -> Vec<&str> {
        let plugins = list["plugins"].as_array().unwrap();
        plugins.iter().map(kind).collect()
    }

    #[test]
    fn every_networks_list_gets_our_entry_last_and_keeps_its_own() {
        for (network, base, name, version) in BASES {
            let list = made(base, None);
            assert_eq!(list["name"], name, "{network}");
            assert_eq!(list["cniVersion"], version, "{network}");
            let plugins = list["plugins"].as_array().unwrap();
            let (own, others) = plugins.split_last().unwrap();
            assert_eq!(kind(own), TYPE, "{network}");
            assert_eq!(own["socket"], "/run/holdfast/cni.sock");
            let named = socket(list.to_string().as_bytes());
            assert_eq!(named.as_deref(), own["socket"].as_str().map(Path::new));
            let base: Value = serde_json::from_str(base).unwrap();
            match base["plugins"].as_array() {
                Some(before) => assert_eq!(others, before, "{network}"),
                None => assert_eq!(others, [base], "{network}"),
            }
            // Other fields of a list, for example disableCheck, stay.
            assert_eq!(
                list["disableCheck"],
                base_field(base_of(network), "disableCheck")
            );
            // If the configuration is made again from itself, it stays the same.
            assert_eq!(
                made(base_of(network), Some(&list.to_string())),
                list,
                "{network}"
            );
        }
    }

    fn base_of(network: &str) -> &'static str {
        BASES.iter().find(|(of, ..)| *of == network).unwrap().1
    }

    fn base_field(base: &str, field: &str) -> Value {
        serde_json::from_str::<Value>(base).unwrap()[field].clone()
    }

    #[test]
    fn entries_of_other_programs_in_our_file_stay_and_those_of_an_earlier_base_go() {
        let mut before = made(base_of("calico"), None);
        let plugins = before["plugins"].as_array_mut().unwrap();
        plugins.insert(1, json!({"type": "linkerd-cni"}));
        plugins.push(json!({"type": "istio-cni", "log_level": "info"}));
        let now = made(base_of("flannel"), Some(&before.to_string()));
        assert_eq!(
            types(&now),
            ["flannel", "portmap", "linkerd-cni", TYPE, "istio-cni"]
        );
        assert_eq!(now["plugins"][4]["log_level"], "info");
    }

    #[test]
    fn a_base_that_is_torn_or_empty_is_refused() {
        let socket = Path::new("/s");
        for (base, wants) in [
            ("", "JSON"),
            ("{\"name\":\"a\",\"plugins\":[", "JSON"),
            ("[]", "fields"),
            ("{\"plugins\":[{\"type\":\"ptp\"}]}", "name"),
            ("{\"name\":\"a\"}", "plugins"),
            ("{\"name\":\"a\",\"plugins\":[]}", "plugins"),
            (
                "{\"name\":\"a\",\"plugins\":[{\"type\":\"holdfast-cni\"}]}",
                "plugins",
            ),
        ] {
            let error = chained(base.as_bytes(), None, socket).unwrap_err();
            assert!(error.to_string().contains(wants), "{base}: {error}");
        }
    }

    #[test]
    fn the_base_is_the_first_configuration_that_is_not_ours() {
        let names = [
            "05-holdfast.conflist",
            "87-podman-bridge.conflist",
            "10-flannel.conflist.swp",
            ".10-a.conf",
            "10-flannel.conflist",
            "calico-kubeconfig",
        ];
        assert_eq!(base(names), Some("10-flannel.conflist"));
        assert_eq!(base(["05-holdfast.conflist"]), None);
    }
}
