//! Labels: `source:key[=value]`, and sorted sets of them.

use std::{borrow::Borrow, fmt, sync::Arc};

/// Source of labels that policy and identities treat specially: CIDR blocks.
pub(crate) const CIDR: &str = "cidr";
/// Source of labels of named groups of CIDR blocks.
pub(crate) const CIDR_GROUP: &str = "cidrgroup";
/// Source of labels that name an FQDN selector.
pub const FQDN: &str = "fqdn";
/// Source of labels that name a DNS name of an EgressFirewall.
pub(crate) const DNS_NAME: &str = "dnsname";
/// Source of labels of a DNS name of an EgressFirewall, for addresses that no answer may open.
pub(crate) const CLOSED_NAME: &str = "dnsname-closed";
/// Source of labels of blocks of addresses that nodes are in.
pub(crate) const NODE_CIDR: &str = "node-cidr";
/// Source of labels of nodes.
pub(crate) const NODE: &str = "node";
/// Source of the reserved labels (`reserved:world`, …).
pub(crate) const RESERVED: &str = "reserved";
/// Source of labels that pods and their namespaces have.
pub(crate) const K8S: &str = "k8s";
/// Source of the label of a Service, `service:namespace/name`.
pub(crate) const SERVICE: &str = "service";
/// Source of labels that the agent makes.
pub const GENERATED: &str = "gen";
/// Source of a label whose text names no source.
pub(crate) const UNSPEC: &str = "unspec";
/// Sources of labels that only the agent gives, to addresses of what is no pod. Besides these, the
/// agent makes the labels of [`GENERATED`] itself.
const GIVEN_BY_AGENT: [&str; 9] = [
    RESERVED,
    CIDR,
    CIDR_GROUP,
    FQDN,
    DNS_NAME,
    CLOSED_NAME,
    NODE_CIDR,
    NODE,
    SERVICE,
];
/// Key under which a pod carries its namespace.
pub(crate) const NAMESPACE_KEY: &str = "io.kubernetes.pod.namespace";
/// Key prefix under which a pod carries the labels of its namespace.
pub(crate) const NAMESPACE_LABELS: &str = "io.cilium.k8s.namespace.labels.";
/// The label that the API server gives to every namespace, with the namespace's name as value.
pub(crate) const NAMESPACE_NAME: &str = "kubernetes.io/metadata.name";

/// Namespace of an endpoint whose labels name none.
const DEFAULT_NAMESPACE: &str = "default";

/// A label in the form `source:key[=value]`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Label {
    source: Arc<str>,
    key: Arc<str>,
    value: Arc<str>,
}

impl Label {
    pub fn new(source: &str, key: &str, value: &str) -> Self {
        Self {
            source: source.into(),
            key: key.into(),
            value: value.into(),
        }
    }

    /// Reads `source:key[=value]`; without a source it is `UNSPEC`.
    pub fn parse(text: &str) -> Result<Self, LabelError> {
        let text = text.trim();
        let (head, value) = text.split_once('=').unwrap_or((text, ""));
        let (source, key) = head.split_once(':').unwrap_or((UNSPEC, head));
        if key.is_empty() || source.is_empty() || text.chars().any(char::is_whitespace) {
            return Err(LabelError(text.to_owned()));
        }
        Ok(Self::new(source, key, value))
    }

    /// The source, for example `k8s` or `reserved`.
    pub fn source(&self) -> &str {
        &self.source
    }

    pub fn key(&self) -> &str {
        &self.key
    }

    /// Whether it is the reserved label `key`.
    pub fn is_reserved(&self, key: &str) -> bool {
        &*self.source == RESERVED && &*self.key == key
    }

    /// Whether only the agent gives it, and never to a pod: to the world and the node, to blocks, names,
    /// nodes or Services.
    pub fn is_given_by_agent(&self) -> bool {
        GIVEN_BY_AGENT.contains(&&*self.source)
    }

    /// Whether it says that something is outside the cluster, in either family or both.
    pub fn is_world(&self) -> bool {
        ["world", "world-ipv4", "world-ipv6"]
            .iter()
            .any(|key| self.is_reserved(key))
    }

    /// Value, empty if it has none.
    pub fn value(&self) -> &str {
        &self.value
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.source, self.key)?;
        if self.value.is_empty() {
            Ok(())
        } else {
            write!(f, "={}", self.value)
        }
    }
}

/// A text that is no label.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a label: write source:key=value, for example k8s:app=web")]
pub struct LabelError(pub String);

/// A sorted set of labels without duplicates; cheap to clone.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LabelSet(Arc<[Label]>);

impl LabelSet {
    /// Sorts the labels and removes duplicates.
    pub fn new(mut labels: Vec<Label>) -> Self {
        labels.sort_unstable();
        labels.dedup();
        Self(labels.into())
    }

    /// Reads a list of label texts.
    pub fn parse<S: AsRef<str>>(texts: &[S]) -> Result<Self, LabelError> {
        let labels = texts.iter().map(|text| Label::parse(text.as_ref()));
        Ok(Self::new(labels.collect::<Result<_, _>>()?))
    }

    pub fn iter(&self) -> impl Iterator<Item = &Label> {
        self.0.iter()
    }

    pub fn as_slice(&self) -> &[Label] {
        &self.0
    }

    /// Whether it has no label.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether it has the reserved label `key`.
    pub fn has_reserved(&self, key: &str) -> bool {
        self.iter().any(|label| label.is_reserved(key))
    }

    /// The namespace of pods with these labels.
    pub fn namespace(&self) -> Option<&str> {
        let label = self.iter().find(|label| label.key() == NAMESPACE_KEY);
        label.map(Label::value)
    }

    /// The labels as texts, each in the form `source:key[=value]`.
    pub fn texts(&self) -> Vec<String> {
        self.iter().map(Label::to_string).collect()
    }
}

impl Borrow<[Label]> for LabelSet {
    fn borrow(&self) -> &[Label] {
        &self.0
    }
}

impl fmt::Debug for LabelSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set()
            .entries(self.iter().map(ToString::to_string))
            .finish()
    }
}

/// Labels of an endpoint; without a namespace it is in [`DEFAULT_NAMESPACE`].
pub(crate) fn in_namespace(mut labels: Vec<Label>) -> LabelSet {
    if !labels.iter().any(|label| label.key() == NAMESPACE_KEY) {
        labels.push(Label::new(K8S, NAMESPACE_KEY, DEFAULT_NAMESPACE));
    }
    LabelSet::new(labels)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_and_writes_labels() {
        let label = Label::parse("k8s:app=web").unwrap();
        assert_eq!(
            (label.source(), label.key(), label.value()),
            ("k8s", "app", "web")
        );
        assert_eq!(label.to_string(), "k8s:app=web");
        assert_eq!(Label::parse("role").unwrap().to_string(), "unspec:role");
        assert_eq!(Label::parse("cidr:10.0.0.0/8").unwrap().value(), "");
        assert!(Label::parse(":x").is_err());
        assert!(Label::parse("k8s:").is_err());
    }

    #[test]
    fn sets_compare_without_order() {
        let one = LabelSet::parse(&["k8s:b=2", "k8s:a=1", "k8s:a=1"]).unwrap();
        assert_eq!(one, LabelSet::parse(&["k8s:a=1", "k8s:b=2"]).unwrap());
    }
}
