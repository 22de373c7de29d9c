//! Golden cases: the labels that Cilium gives a pod.

use super::*;
use crate::labels::LabelSet;

fn with(rules: &[&str]) -> LabelFilter {
    LabelFilter::new(rules.iter().map(|rule| rule.parse().unwrap()).collect())
}

fn keeps(filter: &LabelFilter, text: &str) -> bool {
    filter.keeps(&Label::parse(text).unwrap())
}

#[test]
fn labels_that_differ_from_pod_to_pod_make_no_identity() {
    let filter = LabelFilter::default();
    for (label, kept) in [
        ("k8s:app=web", true),
        ("k8s:app.kubernetes.io/name=web", true),
        ("k8s:app.kubernetes.io/version=1.2", true),
        ("k8s:io.kubernetes.pod.namespace=shop", true),
        ("k8s:io.kubernetes.pod.uid=1", false),
        (
            "k8s:io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name=shop",
            true,
        ),
        (
            "k8s:io.cilium.k8s.namespace.labels.pod-template-hash=1",
            true,
        ),
        ("k8s:io.cilium.k8s.policy.cluster=default", true),
        ("k8s:io.cilium.k8s.policy.serviceaccount=shopper", true),
        ("k8s:kubernetes.io/os=linux", false),
        ("k8s:statefulset.kubernetes.io/pod-name=db-0", false),
        ("k8s:apps.kubernetes.io/pod-index=0", false),
        ("k8s:batch.kubernetes.io/job-completion-index=3", false),
        ("k8s:batch.kubernetes.io/controller-uid=1", false),
        ("k8s:batch.kubernetes.io/job-name=once", true),
        ("k8s:beta.kubernetes.io/arch=amd64", false),
        ("k8s:failure-domain.beta.kubernetes.io/zone=a", false),
        ("k8s:node.kubernetes.io/instance=x", true),
        ("k8s:topology.kubernetes.io/zone=a", false),
        ("k8s:k8s.io/x=y", false),
        ("k8s:k8s-app=kube-dns", true),
        ("k8s:x-k8s.io/y=z", true),
        ("k8s:pod-template-hash=6c4b", false),
        ("k8s:pod-template-generation=2", false),
        ("k8s:controller-revision-hash=1", false),
        ("k8s:controller-uid=1", false),
        ("k8s:annotation.x=y", false),
        ("k8s:annotations=y", false),
        ("k8s:etcd_node=a", false),
        ("k8s:etcd_nodes=a", false),
        ("k8s:my-pod-template-hash=1", true),
        ("reserved:host", true),
    ] {
        assert_eq!(keeps(&filter, label), kept, "{label}");
    }
}

#[test]
fn extra_rules_are_added_to_the_default_ones() {
    let excluding = with(&["!k8s:build-.*", "k8s:!rev"]);
    assert!(!keeps(&excluding, "k8s:build-id=7") && !keeps(&excluding, "k8s:revision=7"));
    assert!(keeps(&excluding, "k8s:app=web") && keeps(&excluding, "cidr:build-id=7"));
    // With one including rule, labels that no rule includes are left out.
    let including = with(&["k8s:app"]);
    assert!(keeps(&including, "k8s:app=web") && keeps(&including, "k8s:application=web"));
    assert!(!keeps(&including, "k8s:tier=b"));
    assert!(keeps(&including, "k8s:io.kubernetes.pod.namespace=shop"));
    // The longer including match beats an exclusion.
    let both = with(&[r"k8s:statefulset\.kubernetes\.io/pod-name-of"]);
    assert!(keeps(&both, "k8s:statefulset.kubernetes.io/pod-name-of=x"));
    assert!(!keeps(&both, "k8s:statefulset.kubernetes.io/pod-name=x"));
    for bad in ["k8s:", "!", "k8s:(", "k8s:!"] {
        assert!(bad.parse::<LabelRule>().is_err(), "{bad}");
    }
}

#[test]
fn a_pod_has_its_own_labels_its_namespaces_its_account_and_its_cluster() {
    let pairs = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
        let pairs = pairs.iter();
        pairs
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect()
    };
    let own = pairs(&[
        ("app", "web"),
        ("pod-template-hash", "6c4b"),
        // A pod cannot give itself another namespace, account or cluster.
        ("io.kubernetes.pod.namespace", "kube-system"),
        ("io.cilium.k8s.policy.serviceaccount", "admin"),
        ("io.cilium.k8s.policy.cluster", "other"),
        ("io.cilium.k8s.namespace.labels.team", "b"),
    ]);
    let namespace = pairs(&[("kubernetes.io/metadata.name", "shop"), ("team", "a")]);
    let filter = LabelFilter::default();
    let texts = |account, namespace| {
        let labels = of_pod(&filter, "default", "shop", &own, account, namespace);
        LabelSet::new(labels).texts()
    };
    assert_eq!(
        texts(Some("shopper"), Some(&namespace)),
        [
            "k8s:app=web",
            "k8s:io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name=shop",
            "k8s:io.cilium.k8s.namespace.labels.team=a",
            "k8s:io.cilium.k8s.policy.cluster=default",
            "k8s:io.cilium.k8s.policy.serviceaccount=shopper",
            "k8s:io.kubernetes.pod.namespace=shop",
        ]
    );
    assert_eq!(
        texts(None, None),
        [
            "k8s:app=web",
            "k8s:io.cilium.k8s.policy.cluster=default",
            "k8s:io.kubernetes.pod.namespace=shop",
        ]
    );
}
