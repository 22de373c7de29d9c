//! The parts in which a watch reads a kind. A node that reads only some pods has several selectors for them, and the API
//! server takes one in each request.

use std::collections::{BTreeMap, BTreeSet};

use agent_core::high_scale::scope::PodScope;

use crate::resource::Resource;

/// A part: what its lists and watches select.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) labels: Option<String>,
    pub(super) fields: Option<String>,
}

/// The parts of a kind on a node that reads these pods. There is at least one.
pub(super) fn parts(resource: &Resource, pods: &PodScope) -> Vec<Part> {
    match pods {
        PodScope::Kept { node, keep } if resource.kind == "Pod" => {
            let own = Part {
                labels: None,
                fields: Some(format!("spec.nodeName={node}")),
            };
            let kept = keep.iter().map(|keep| Part {
                labels: Some(keep.to_string()),
                fields: Some(format!("spec.nodeName!={node}")),
            });
            [own].into_iter().chain(kept).collect()
        }
        _ => {
            let selector = resource.selector;
            vec![Part {
                labels: (!selector.is_empty()).then(|| selector.to_owned()),
                fields: None,
            }]
        }
    }
}

/// Which parts have an object, by its key. An object that leaves one part may be in another.
#[derive(Debug, Default)]
pub(super) struct Holders(BTreeMap<String, Held>);

#[derive(Debug, Default)]
struct Held {
    parts: BTreeSet<usize>,
    /// The latest `metadata.resourceVersion` that a part has shown.
    version: u64,
}

impl Holders {
    /// The part has the object in this version. Gives whether no part has shown a later one: a part that lags behind
    /// the others shows objects as they were. `None`: the version is no number, and counts as the latest.
    pub(super) fn put(&mut self, part: usize, key: &str, version: Option<u64>) -> bool {
        let held = self.0.entry(key.to_owned()).or_default();
        held.parts.insert(part);
        let version = version.unwrap_or(held.version);
        let is_latest = version >= held.version;
        held.version = held.version.max(version);
        is_latest
    }

    /// The object left the part. Gives whether no part has it any more.
    pub(super) fn leave(&mut self, part: usize, key: &str) -> bool {
        let Some(held) = self.0.get_mut(key) else {
            return true;
        };
        held.parts.remove(&part);
        let is_gone = held.parts.is_empty();
        if is_gone {
            self.0.remove(key);
        }
        is_gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resource::WITH_IDENTITIES;

    fn of_kind(kind: &str) -> &'static Resource {
        WITH_IDENTITIES.iter().find(|one| one.kind == kind).unwrap()
    }

    #[test]
    fn only_pods_of_a_node_with_a_scope_have_several_parts() {
        let keep = ["k8s-app=kube-dns", "app=a,tier=b"].map(|text| text.parse().unwrap());
        let scope = PodScope::Kept {
            node: "n1".to_owned(),
            keep: keep.to_vec(),
        };
        let part = |labels: Option<&str>, fields: Option<&str>| Part {
            labels: labels.map(str::to_owned),
            fields: fields.map(str::to_owned),
        };
        let all = parts(of_kind("Pod"), &scope);
        let others = Some("spec.nodeName!=n1");
        let expected = [
            part(None, Some("spec.nodeName=n1")),
            part(Some("k8s-app=kube-dns"), others),
            part(Some("app=a,tier=b"), others),
        ];
        assert_eq!(all, expected);
        assert_eq!(parts(of_kind("Pod"), &PodScope::All), [Part::default()]);
        assert_eq!(parts(of_kind("Namespace"), &scope), [Part::default()]);
        let headless = part(Some("!service.kubernetes.io/headless"), None);
        assert_eq!(parts(of_kind("EndpointSlice"), &scope), [headless]);
    }

    #[test]
    fn an_object_is_gone_when_no_part_has_it() {
        let mut holders = Holders::default();
        assert!(holders.put(0, "a", Some(5)) && holders.put(1, "a", Some(5)));
        assert!(holders.put(1, "a", None) && !holders.put(1, "a", Some(4)));
        assert!(!holders.leave(1, "a") && !holders.leave(1, "a"));
        assert!(holders.leave(0, "a") && holders.leave(0, "a"));
        assert!(holders.0.is_empty());
    }
}
