//! Which pods of the cluster an agent reads (`--high-scale-prune`).

use std::{collections::BTreeMap, fmt, str::FromStr};

use crate::policy::document::{Body, PolicyDocument};

/// Labels of pods that every node reads, all of which a pod must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptLabels(BTreeMap<String, String>);

/// The text names no labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("write KEY=VALUE, several with commas, for example k8s-app=kube-dns")]
pub struct KeptLabelsError;

impl FromStr for KeptLabels {
    type Err = KeptLabelsError;

    fn from_str(text: &str) -> Result<Self, KeptLabelsError> {
        let pairs = text.split(',').map(|pair| {
            let (key, value) = pair.trim().split_once('=').ok_or(KeptLabelsError)?;
            // Labels of pods have this source everywhere else.
            let key = key.strip_prefix("k8s:").unwrap_or(key);
            match is_key(key) && (value.is_empty() || is_label(value)) {
                true => Ok((key.to_owned(), value.to_owned())),
                false => Err(KeptLabelsError),
            }
        });
        pairs.collect::<Result<_, _>>().map(Self)
    }
}

/// Whether a text may be a label's value, or the name of its key: the API server refuses a selector with any other.
fn is_label(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let ends = [text.bytes().next(), text.bytes().last()];
    let has_ends = ends
        .iter()
        .flatten()
        .filter(|byte| byte.is_ascii_alphanumeric())
        .count()
        == 2;
    has_ends && text.len() <= 63 && text.bytes().all(is_inner)
}

/// Whether a text may be a label's key: a name, which may follow a DNS name and a slash.
fn is_key(text: &str) -> bool {
    let (prefix, name) = match text.split_once('/') {
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, text),
    };
    let is_dns = |prefix: &str| {
        let mut parts = prefix.split('.');
        prefix.len() <= 253
            && !prefix
                .bytes()
                .any(|byte| byte.is_ascii_uppercase() || byte == b'_')
            && parts.all(is_label)
    };
    is_label(name) && prefix.is_none_or(is_dns)
}

impl fmt::Display for KeptLabels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pairs = self.0.iter().map(|(key, value)| format!("{key}={value}"));
        f.write_str(&pairs.collect::<Vec<_>>().join(","))
    }
}

/// Which pods an agent reads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PodScope {
    #[default]
    All,
    /// Those of a node, and those with labels of one of these sets.
    Kept { node: String, keep: Vec<KeptLabels> },
}

impl PodScope {
    /// Whether only some of the pods are read.
    pub fn prunes(&self) -> bool {
        *self != Self::All
    }

    /// The node whose pods are read; `None`: those of all nodes.
    pub fn node(&self) -> Option<&str> {
        match self {
            Self::All => None,
            Self::Kept { node, .. } => Some(node),
        }
    }

    /// Whether pods with these labels are read from all nodes.
    pub fn keeps<'a>(&self, label: impl Fn(&str) -> Option<&'a str>) -> bool {
        match self {
            Self::All => true,
            Self::Kept { keep, .. } => keep.iter().any(|keep| keep.select(&label)),
        }
    }

    /// Whether a document is read; it is no pod's, or of a pod in the scope.
    pub fn has(&self, document: &PolicyDocument) -> bool {
        let Some(node) = self.node() else {
            return true;
        };
        match &document.body {
            Body::Pod(pod) => {
                let label = |key: &str| pod.labels.get(key).map(String::as_str);
                pod.node.as_deref() == Some(node) || self.keeps(label)
            }
            // It does not say which node it is of. Pods of this node are known by other documents.
            Body::Endpoint(endpoint) => self.keeps(|key| {
                let mut labels = endpoint.labels.iter();
                Some(labels.find(|label| label.key() == key)?.value())
            }),
            _ => true,
        }
    }
}

impl KeptLabels {
    fn select<'a>(&self, label: impl Fn(&str) -> Option<&'a str>) -> bool {
        let mut wanted = self.0.iter();
        wanted.all(|(key, value)| label(key) == Some(value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::parse::parse_documents;

    fn document(kind: &str, rest: &str) -> PolicyDocument {
        let text = format!("apiVersion: v1\nkind: {kind}\n{rest}");
        let mut read = parse_documents(&text, "test.yaml");
        read.remove(0).unwrap_or_else(|error| panic!("{error}"))
    }

    fn pod(node: &str, labels: &str) -> PolicyDocument {
        let metadata = format!("metadata: {{name: p, namespace: default, labels: {{{labels}}}}}");
        document("Pod", &format!("{metadata}\nspec: {{{node}}}\n"))
    }

    #[test]
    fn high_scale_scope_is_the_node_and_what_is_kept() {
        let keep = ["k8s-app=kube-dns", "k8s:app=db,tier=a"];
        let keep = keep.map(|text| text.parse::<KeptLabels>().unwrap()).into();
        let scope = PodScope::Kept {
            node: "n1".to_owned(),
            keep,
        };
        for (node, labels, has) in [
            ("nodeName: n1", "app: web", true),
            ("nodeName: n2", "app: web", false),
            ("", "app: web", false),
            ("nodeName: n2", "k8s-app: kube-dns", true),
            ("", "k8s-app: kube-dns", true),
            ("nodeName: n2", "app: db", false),
            ("nodeName: n2", "app: db, tier: a, more: x", true),
        ] {
            let pod = pod(node, labels);
            assert_eq!(scope.has(&pod), has, "{node} {labels}");
            assert!(PodScope::All.has(&pod));
        }
        assert!(scope.has(&document("Namespace", "metadata: {name: a}")));
        assert!(scope.prunes() && !PodScope::All.prunes());
    }

    #[test]
    fn high_scale_labels_that_are_kept_are_pairs() {
        let texts = [
            "k8s-app=kube-dns",
            "a=b,c=d",
            "a=",
            "app.kubernetes.io/name=dns_1.x",
        ];
        for text in texts {
            assert_eq!(text.parse::<KeptLabels>().unwrap().to_string(), text);
        }
        let long = format!("a={}", "b".repeat(64));
        for text in [
            "", "a", "=b", "a!=b", "a in (b)", "a=b,", "a==b", "a=b*", "a=b/c", "a=-b", "a=b.",
            "-a=b", "A_b/c=d", "a/b/c=d", "/a=b", "a/=b", &long,
        ] {
            assert_eq!(text.parse::<KeptLabels>(), Err(KeptLabelsError), "{text}");
        }
    }
}
