//! The kinds that the server serves: Kubernetes' own kinds, and the kinds of the CRDs that it was
//! given.

use anyhow::{Context as _, Result};
use serde_json::Value;

/// Group, version, kind, plural, whether its objects have a namespace, whether status is a
/// subresource.
type Row = (
    &'static str,
    &'static str,
    &'static str,
    &'static str,
    bool,
    bool,
);

const BUILT_IN: &[Row] = &[
    ("", "v1", "Pod", "pods", true, true),
    ("", "v1", "Namespace", "namespaces", false, true),
    ("", "v1", "Node", "nodes", false, true),
    ("", "v1", "Service", "services", true, true),
    ("", "v1", "Event", "events", true, false),
    ("apps", "v1", "DaemonSet", "daemonsets", true, true),
    ("coordination.k8s.io", "v1", "Lease", "leases", true, false),
    (
        "discovery.k8s.io",
        "v1",
        "EndpointSlice",
        "endpointslices",
        true,
        false,
    ),
    ("events.k8s.io", "v1", "Event", "events", true, false),
    (
        "networking.k8s.io",
        "v1",
        "NetworkPolicy",
        "networkpolicies",
        true,
        false,
    ),
    (
        "networking.k8s.io",
        "v1",
        "ServiceCIDR",
        "servicecidrs",
        false,
        true,
    ),
];

/// A kind of objects that the server serves.
#[derive(Clone, Debug)]
pub struct Kind {
    /// API group; empty for the core group.
    pub group: String,
    /// The only version that is served.
    pub version: String,
    /// Name of the kind, as in `kind` of a document.
    pub kind: String,
    /// Plural name, as in a URL and in a role.
    pub plural: String,
    /// Whether its objects are in namespaces.
    pub namespaced: bool,
    /// Whether `status` is written through a subresource of its own.
    pub status: bool,
    /// Schema of a custom resource.
    pub(super) schema: Option<Value>,
}

impl Kind {
    /// The kinds of Kubernetes itself.
    pub(super) fn built_in() -> Vec<Self> {
        let kinds = BUILT_IN.iter();
        let kinds = kinds.map(|&(group, version, kind, plural, namespaced, status)| Self {
            group: group.to_owned(),
            version: version.to_owned(),
            kind: kind.to_owned(),
            plural: plural.to_owned(),
            namespaced,
            status,
            schema: None,
        });
        kinds.collect()
    }

    /// The kind that a CustomResourceDefinition defines, in its storage version.
    pub(super) fn of_crd(crd: &Value) -> Result<Self> {
        let spec = &crd["spec"];
        let text = |value: &Value, field: &str| -> Result<String> {
            let text = value.as_str().map(str::to_owned);
            text.with_context(|| format!("the CRD has no spec.{field}"))
        };
        let versions = spec["versions"].as_array();
        let version = versions
            .and_then(|all| all.iter().find(|v| v["storage"] == true))
            .context("the CRD has no version that is stored")?;
        Ok(Self {
            group: text(&spec["group"], "group")?,
            version: text(&version["name"], "versions.name")?,
            kind: text(&spec["names"]["kind"], "names.kind")?,
            plural: text(&spec["names"]["plural"], "names.plural")?,
            namespaced: spec["scope"] == "Namespaced",
            status: version["subresources"]["status"].is_object(),
            schema: Some(version["schema"]["openAPIV3Schema"].clone()),
        })
    }

    /// `apiVersion` of its objects: `v1`, or `group/version`.
    pub(super) fn api_version(&self) -> String {
        match self.group.as_str() {
            "" => self.version.clone(),
            group => format!("{group}/{}", self.version),
        }
    }

    /// Identifies the kind: `pods`, or `leases.coordination.k8s.io`.
    pub(super) fn id(&self) -> String {
        match self.group.as_str() {
            "" => self.plural.clone(),
            group => format!("{}.{group}", self.plural),
        }
    }

    /// Whether a CRD defines the kind.
    pub(super) fn is_custom(&self) -> bool {
        self.schema.is_some()
    }

    /// Whether this is the kind of `plural` in the group and version of a URL.
    pub(super) fn is(&self, group: &str, version: &str, plural: &str) -> bool {
        self.group == group && self.version == version && self.plural == plural
    }
}
