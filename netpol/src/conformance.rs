//! The conformance cases in `conformance/cases.yaml`, for the tests of every enforcement.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
};

use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    policy::Protocol,
    read::{API_VERSION, KIND},
};

/// The cases, one YAML document each; [`Case::read`] reads one.
pub const CASES: &str = include_str!("../conformance/cases.yaml");
/// Names of the namespaces that every case has.
pub const NAMESPACES: [&str; 3] = ["x", "y", "z"];
/// The pods of each namespace.
pub const PODS: [&str; 3] = ["a", "b", "c"];
/// The ports of each pod, on each protocol.
pub const PORTS: [u16; 2] = [80, 81];

/// One case of Kubernetes' network policy suite, as a document of [`CASES`].
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Case {
    /// Protocol of the case's section in the suite, and its number there.
    pub id: String,
    /// Description of the policy under test, for messages.
    pub case: String,
    /// Whether the case's blocks cover pods, so that its verdicts differ from those that Kubernetes
    /// expects.
    #[serde(default)]
    pub blocks_of_pods: bool,
    /// Changes, each with the verdicts that are expected after it.
    pub steps: Vec<Step>,
}

/// Changes, and the reachability after them.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Step {
    /// Specs of policies, by `namespace/name`.
    #[serde(default)]
    pub apply: BTreeMap<String, Value>,
    /// Policies that the step removes, as `namespace/name`.
    #[serde(default)]
    pub delete: BTreeSet<String>,
    /// Labels by the name of a namespace, whose labels they replace.
    #[serde(default)]
    pub namespaces: BTreeMap<String, BTreeMap<String, String>>,
    /// Labels by `namespace/name` of a pod, whose labels they replace.
    #[serde(default)]
    pub pods: BTreeMap<String, BTreeMap<String, String>>,
    /// Expected verdicts after the step.
    pub expect: Vec<Expectation>,
    /// Verdicts that Kubernetes expects for IPv4 packets, if they differ because blocks also mean
    /// pods.
    #[serde(default)]
    kubernetes: Vec<Expectation>,
}

/// The reachability on some ports.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expectation {
    /// Ports such as `80/TCP`. If the list is empty: all ports that no other expectation of the
    /// step names.
    #[serde(default)]
    on: Vec<String>,
    #[serde(default)]
    closed: Vec<String>,
    #[serde(default)]
    open: Vec<String>,
}

/// One of the nine pods, displayed as `namespace/name`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pod {
    /// One of [`NAMESPACES`], in which the pod runs.
    pub namespace: &'static str,
    /// One of [`PODS`]. Pods of different namespaces have the same names.
    pub name: &'static str,
}

impl Pod {
    /// All nine pods, ordered by namespace and name.
    pub fn all() -> impl Iterator<Item = Self> {
        let of = |namespace| PODS.map(|name| Self { namespace, name });
        NAMESPACES.into_iter().flat_map(of)
    }

    /// Labels of the pod before any step.
    pub fn labels(self) -> BTreeMap<String, String> {
        [("pod".to_owned(), self.name.to_owned())].into()
    }

    /// Whether a pattern such as `x/*` matches this pod.
    fn is_meant(self, pattern: &str) -> bool {
        let (namespace, name) = pattern.split_once('/').unwrap_or((pattern, "*"));
        let meant = |pattern: &str, is: &str| pattern == "*" || pattern == is;
        meant(namespace, self.namespace) && meant(name, self.name)
    }
}

impl fmt::Display for Pod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The document of a pod that serves [`PORTS`], with these labels and addresses.
pub fn pod_document(pod: Pod, labels: &BTreeMap<String, String>, addresses: &[IpAddr]) -> Value {
    let ports = Port::all().map(
        |port| json!({"name": port.name(), "containerPort": port.number, "protocol": port.protocol.as_str()}),
    );
    let addresses = addresses.iter().map(|address| json!({"ip": address}));
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": pod.namespace, "name": pod.name, "labels": labels},
        "spec": {"containers": [{"name": "server", "ports": ports.collect::<Vec<_>>()}]},
        "status": {"phase": "Running", "podIPs": addresses.collect::<Vec<_>>()},
    })
}

/// The document of a namespace with these labels, and with the label that the API server adds.
pub fn namespace_document(name: &str, labels: &BTreeMap<String, String>) -> Value {
    let mut labels = labels.clone();
    labels.insert("kubernetes.io/metadata.name".to_owned(), name.to_owned());
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
}

/// Labels of a namespace before any step.
pub fn namespace_labels(namespace: &str) -> BTreeMap<String, String> {
    [("ns".to_owned(), namespace.to_owned())].into()
}

/// A port and its protocol: `80/TCP`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Port {
    /// Port number on every pod, 80 or 81.
    pub number: u16,
    /// Protocol of the transport, such as SCTP.
    pub protocol: Protocol,
}

impl Port {
    /// All ports of a pod.
    pub fn all() -> impl Iterator<Item = Self> {
        let of = |protocol| PORTS.map(|number| Self { number, protocol });
        Protocol::ALL.into_iter().flat_map(of)
    }

    /// The name of the container port.
    pub fn name(self) -> String {
        format!(
            "serve-{}-{}",
            self.number,
            self.protocol.as_str().to_ascii_lowercase()
        )
    }
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.number, self.protocol.as_str())
    }
}

impl Case {
    /// Reads a document of [`CASES`]. `address` gives the address of a pod.
    pub fn read(document: &Value, address: impl Fn(Pod) -> String) -> serde_json::Result<Self> {
        let mut text = document.to_string();
        for pod in Pod::all() {
            text = text.replace(&format!("{{{pod}}}"), &address(pod));
        }
        serde_json::from_str(&text)
    }
}

impl Step {
    /// Documents of the policies to apply, by `namespace/name`.
    pub fn policies(&self) -> impl Iterator<Item = (&str, Value)> {
        self.apply.iter().map(|(key, spec)| {
            let (namespace, name) = key.split_once('/').unwrap_or(("default", key));
            let document = json!({
                "apiVersion": API_VERSION,
                "kind": KIND,
                "metadata": {"namespace": namespace, "name": name},
                "spec": spec,
            });
            (key.as_str(), document)
        })
    }

    /// Whether packets of a pod reach a port of another pod; `None` if no expectation names the
    /// port. A pod always reaches itself.
    pub fn is_open(&self, from: Pod, to: Pod, port: Port) -> Option<bool> {
        verdict(&self.expect, from, to, port)
    }

    /// Like [`Self::is_open`], by what Kubernetes expects between addresses of the family of
    /// `to_address`.
    pub fn is_open_by_address(
        &self,
        from: Pod,
        to: Pod,
        port: Port,
        to_address: IpAddr,
    ) -> Option<bool> {
        match self.kubernetes.is_empty() || to_address.is_ipv6() {
            true => self.is_open(from, to, port),
            false => verdict(&self.kubernetes, from, to, port),
        }
    }
}

fn verdict(expectations: &[Expectation], from: Pod, to: Pod, port: Port) -> Option<bool> {
    let text = port.to_string();
    let mut named = expectations.iter().filter(|e| e.on.contains(&text));
    let mut others = expectations.iter().filter(|e| e.on.is_empty());
    let expected = named.next().or_else(|| others.next())?;
    let about = |list: &[String]| {
        list.iter().any(|pair| {
            let pair = pair.split_once(" > ");
            pair.is_some_and(|(one, other)| from.is_meant(one) && to.is_meant(other))
        })
    };
    Some(from == to || about(&expected.open) || !about(&expected.closed))
}
