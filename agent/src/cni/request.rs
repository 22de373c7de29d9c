//! Requests of `holdfast-cni`, as JSON.

use std::{net::IpAddr, path::PathBuf};

use serde::Deserialize;

/// A request of `holdfast-cni`: a CNI command with its arguments.
#[derive(Debug, Deserialize)]
#[serde(tag = "command", rename_all_fields = "camelCase")]
pub(super) enum CniRequest {
    /// A pod gets an interface.
    #[serde(rename = "ADD")]
    Add {
        /// The runtime's name of the pod's sandbox.
        container_id: String,
        /// Path of its network namespace.
        netns: PathBuf,
        /// Name of the interface in the pod.
        ifname: String,
        /// Kubernetes namespace of the pod.
        namespace: String,
        pod: String,
        /// Uid of the pod; absent if the runtime gives none.
        uid: Option<String>,
        /// Addresses that the interface was given.
        addresses: Vec<IpAddr>,
        /// How many milliseconds the plugin waits for the answer.
        wait_ms: u64,
        /// How many namespaces its configuration lets start without the agent; 0 from a plugin of an
        /// earlier release.
        #[serde(default)]
        fail_open_namespaces: usize,
    },
    /// A pod's interface is about to be removed.
    #[serde(rename = "DEL")]
    Delete {
        /// The runtime's name of the pod's sandbox.
        container_id: String,
        ifname: String,
        /// Path of its network namespace, if the runtime gives it.
        #[serde(default)]
        netns: Option<PathBuf>,
    },
    /// Asks whether a pod's interface is under policy.
    #[serde(rename = "CHECK")]
    Check {
        /// The runtime's name of the pod's sandbox.
        container_id: String,
        ifname: String,
        /// Path of its network namespace.
        #[serde(default)]
        netns: Option<PathBuf>,
    },
    /// Interfaces that are not in the list are gone.
    #[serde(rename = "GC")]
    Collect {
        /// All interfaces that the runtime has.
        valid: Vec<Valid>,
    },
}

/// An interface that the runtime has.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Valid {
    /// The runtime's name of the pod's sandbox.
    pub(super) container_id: String,
    pub(super) ifname: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The texts are requests that the plugin writes; the plugin's tests have the same texts.
    #[test]
    fn the_plugins_requests_are_read() {
        let add = r#"{"command":"ADD","containerId":"2d1a","netns":"/var/run/netns/cni-5503",
            "ifname":"eth0","namespace":"shop","pod":"web-1","uid":null,
            "addresses":["10.244.1.2"],"failOpenNamespaces":1,"waitMs":20000}"#;
        let of_before = add.replace(r#""failOpenNamespaces":1,"#, "");
        for (text, namespaces) in [(add, 1), (&of_before, 0)] {
            assert!(matches!(
                serde_json::from_str(text).unwrap(),
                CniRequest::Add {
                    uid: None,
                    wait_ms: 20_000,
                    fail_open_namespaces,
                    ..
                } if fail_open_namespaces == namespaces
            ));
        }
        for (text, is_it) in [
            (
                r#"{"command":"DEL","containerId":"a","ifname":"eth0"}"#,
                (|request| matches!(request, CniRequest::Delete { .. })) as fn(&CniRequest) -> bool,
            ),
            (
                r#"{"command":"DEL","containerId":"a","ifname":"eth0","netns":"/run/netns/a"}"#,
                |request| matches!(request, CniRequest::Delete { netns: Some(_), .. }),
            ),
            (
                r#"{"command":"CHECK","containerId":"a","ifname":"eth0"}"#,
                |request| matches!(request, CniRequest::Check { .. }),
            ),
            (
                r#"{"command":"GC","valid":[{"containerId":"a","ifname":"eth0"}]}"#,
                |request| matches!(request, CniRequest::Collect { valid } if valid.len() == 1),
            ),
        ] {
            assert!(is_it(&serde_json::from_str(text).unwrap()), "{text}");
        }
    }
}
