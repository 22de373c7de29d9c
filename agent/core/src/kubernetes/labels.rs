//! Which labels make a pod's identity: Cilium's rules (`pkg/k8s` SanitizePodLabels,
//! `pkg/labelsfilter`).
//!
//! Without the filter a label that differs from pod to pod, such as the pod's name in a
//! StatefulSet, would make every pod an identity of its own.

use std::{collections::BTreeMap, str::FromStr};

use regex::Regex;

use crate::labels::{K8S, Label, NAMESPACE_KEY};

/// Keys that only the cluster may give: a pod that has such a label does not keep it.
const CILIUM_KEYS: &str = "io.cilium.k8s.";
/// Prefix of the key that a namespace's label has at the pods of the namespace.
pub(crate) const NAMESPACE_LABELS: &str = "io.cilium.k8s.namespace.labels";
const CLUSTER: &str = "io.cilium.k8s.policy.cluster";
const SERVICE_ACCOUNT: &str = "io.cilium.k8s.policy.serviceaccount";

/// Cilium's default rules, in the spelling of `--labels`: `!` excludes.
const DEFAULT_RULES: &[&str] = &[
    "reserved:.*",
    r"io\.kubernetes\.pod\.namespace",
    r"io\.cilium\.k8s\.namespace\.labels",
    r"app\.kubernetes\.io",
    r"io\.cilium\.k8s\.policy\.cluster",
    r"io\.cilium\.k8s\.policy\.serviceaccount",
    r"!io\.kubernetes",
    r"!kubernetes\.io",
    r"!statefulset\.kubernetes\.io/pod-name",
    r"!apps\.kubernetes\.io/pod-index",
    r"!batch\.kubernetes\.io/job-completion-index",
    r"!batch\.kubernetes\.io/controller-uid",
    r"!.*beta\.kubernetes\.io",
    r"!k8s\.io",
    "!pod-template-generation",
    "!pod-template-hash",
    "!controller-revision-hash",
    "!annotation.*",
    "!controller-uid",
    "!etcd_node",
    r"!topology\.kubernetes\.io",
];

/// A rule that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{rule}` is not a rule for labels: {reason}; write for example k8s:app or !k8s:build-.*")]
pub struct LabelRuleError {
    pub rule: String,
    pub reason: String,
}

/// Rules that decide which labels make an identity.
#[derive(Clone, Debug)]
pub struct LabelFilter {
    rules: Vec<LabelRule>,
    /// Whether a label that no rule matches is left out.
    only_included: bool,
}

/// A rule: labels that it matches make an identity, or do not.
#[derive(Clone, Debug)]
pub struct LabelRule {
    source: Option<String>,
    key: Regex,
    excludes: bool,
}

impl Default for LabelFilter {
    fn default() -> Self {
        Self::new(Vec::new())
    }
}

impl LabelFilter {
    /// Cilium's default rules and `more`. If one of `more` includes labels, a label that no rule
    /// matches is left out.
    pub fn new(more: Vec<LabelRule>) -> Self {
        let only_included = more.iter().any(|rule| !rule.excludes);
        let usual = DEFAULT_RULES.iter();
        let usual = usual.map(|text| text.parse().expect("a constant rule"));
        Self {
            rules: usual.chain(more).collect(),
            only_included,
        }
    }

    /// Whether a label makes an identity. If a rule excludes it, its longest including match has to be
    /// longer than its shortest excluding one. If no rule matches it, `only_included` decides.
    pub fn keeps(&self, label: &Label) -> bool {
        let (mut included, mut excluded): (usize, Option<usize>) = (0, None);
        for rule in &self.rules {
            let Some(length) = rule.length(label) else {
                continue;
            };
            if rule.excludes {
                excluded = Some(excluded.map_or(length, |shortest| shortest.min(length)));
            } else {
                included = included.max(length);
            }
        }
        match excluded {
            None => !self.only_included || included > 0,
            Some(excluded) => included > excluded,
        }
    }
}

/// In the grammar of Cilium's `--labels`: `[!][source:]regex`. The regex must match from the start
/// of a key.
impl FromStr for LabelRule {
    type Err = LabelRuleError;

    fn from_str(text: &str) -> Result<Self, LabelRuleError> {
        let refuse = |reason: String| LabelRuleError {
            rule: text.to_owned(),
            reason,
        };
        let (source, rest) = match text.split_once(':') {
            Some((source, rest)) => (source, rest),
            None => ("", text),
        };
        // Cilium has the `!` after the source; before the source it is accepted, too.
        let (source, before) = match source.strip_prefix('!') {
            Some(source) => (source, true),
            None => (source, false),
        };
        let (key, after) = match rest.strip_prefix('!') {
            Some(key) => (key, true),
            None => (rest, false),
        };
        if key.is_empty() {
            return Err(refuse("it has no key".to_owned()));
        }
        let regex = Regex::new(key).map_err(|error| refuse(error.to_string()))?;
        Ok(Self {
            source: (!source.is_empty()).then(|| source.to_owned()),
            key: regex,
            excludes: before || after,
        })
    }
}

impl LabelRule {
    /// How many bytes of the label's key it matches; `None` if it does not match.
    fn length(&self, label: &Label) -> Option<usize> {
        if self
            .source
            .as_ref()
            .is_some_and(|source| source != label.source())
        {
            return None;
        }
        let found = self.key.find(label.key())?;
        (found.start() == 0).then_some(found.end())
    }
}

/// Labels of a pod's identity before named ports. `of_namespace` are the labels of its namespace.
pub(crate) fn of_pod(
    filter: &LabelFilter,
    cluster: &str,
    namespace: &str,
    own: &BTreeMap<String, String>,
    service_account: Option<&str>,
    of_namespace: Option<&BTreeMap<String, String>>,
) -> Vec<Label> {
    let own = own
        .iter()
        .filter(|(key, _)| !key.starts_with(CILIUM_KEYS) && *key != NAMESPACE_KEY)
        .map(|(key, value)| Label::new(K8S, key, value));
    let of_namespace = of_namespace.into_iter().flatten().map(|(key, value)| {
        let key = format!("{NAMESPACE_LABELS}.{key}");
        Label::new(K8S, &key, value)
    });
    let account = service_account.map(|account| Label::new(K8S, SERVICE_ACCOUNT, account));
    let fixed = [
        Label::new(K8S, NAMESPACE_KEY, namespace),
        Label::new(K8S, CLUSTER, cluster),
    ];
    let all = own.chain(of_namespace).chain(account).chain(fixed);
    all.filter(|label| filter.keeps(label)).collect()
}

#[cfg(test)]
mod tests;
