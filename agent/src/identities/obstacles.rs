//! Texts that explain why objects are not made, with the remedy.

use std::collections::BTreeMap;

use agent_cluster::api::client::RequestError;
use agent_core::{
    identity::cluster::{WantedIdentities, WantedIdentity},
    labels::LabelSet,
};

/// What keeps objects from being made at present.
#[derive(Debug, Default)]
pub(super) struct Obstacles {
    /// Why no object at all can be created.
    of_all: Option<String>,
    /// Why the object of one label set cannot be created.
    of_one: BTreeMap<LabelSet, String>,
}

impl Obstacles {
    /// Notes why no object at all is made.
    pub(super) fn stop_all(&mut self, reason: String) {
        self.of_all = Some(reason);
    }

    /// Notes that objects can be made again.
    pub(super) fn let_all(&mut self) {
        self.of_all = None;
    }

    /// Notes why the object of these labels is not made.
    pub(super) fn stop(&mut self, labels: &LabelSet, reason: String) {
        self.of_one.insert(labels.clone(), reason);
    }

    /// Notes that the object of these labels was made.
    pub(super) fn made(&mut self, labels: &LabelSet) {
        self.of_all = None;
        self.of_one.remove(labels);
    }

    /// Takes the label sets that lack an object now.
    pub(super) fn follow(&mut self, wanted: &WantedIdentities) {
        self.of_one.retain(|labels, _| wanted.contains_key(labels));
    }

    /// The first obstacle, for `status`.
    pub(super) fn first(&self) -> Option<String> {
        let of_one = self.of_one.values().next();
        self.of_all.as_ref().or(of_one).cloned()
    }
}

/// Whether a request for any other object would fail too. Otherwise the API server may have refused the labels of one
/// tenant, for example because they are too long. Objects of other tenants do not wait for such an object.
pub(super) fn concerns_all(error: &RequestError) -> bool {
    let of_all = [401, 403, 404, 408, 429, 502, 503, 504];
    error.code().is_none_or(|code| of_all.contains(&code))
}

/// Why a label set gets no number, and the remedy.
pub(super) fn full(labels: &LabelSet, one: &WantedIdentity) -> String {
    if one.is_beyond_share {
        let namespace = labels.namespace().unwrap_or("(none)");
        return format!(
            "namespace {namespace} has as many CiliumIdentities as there are free numbers, and gets no more: exclude \
             labels that differ from pod to pod with --labels, or use a larger --identity-range"
        );
    }
    let labels = labels.texts().join(",");
    format!(
        "other labels have every number that {labels} may get: use a larger --identity-range, or delete \
         CiliumIdentities that no pod needs"
    )
}

/// The failure, and its remedy.
pub(super) fn explain(error: &RequestError) -> String {
    let remedy = match error.code() {
        Some(403) if error.to_string().contains("ValidatingAdmissionPolicy") => {
            "; --identity-range has to be the chart's identities.range"
        }
        Some(403) => {
            "; add the ClusterRole holdfast-identities of the chart (identities.mode=cluster)"
        }
        Some(404) => {
            "; install the CRD ciliumidentities.cilium.io (chart values identities.mode=cluster and crds.install)"
        }
        _ => "; the agent tries again",
    };
    format!("{error}{remedy}")
}

/// Why no object is made beside a Cilium operator with this Lease.
pub(super) fn beside_operator(lease: &str) -> String {
    format!(
        "a Cilium operator runs in this cluster ({lease}) and deletes CiliumIdentities that no CiliumEndpoint uses, so \
         --identity-allocation=cluster is refused and no object is made: set --identity-allocation=node (chart value \
         identities.mode=node), or uninstall Cilium"
    )
}

/// The reason while it is not certain whether the operator runs.
pub(super) const LOOKING: &str =
    "a Lease of a Cilium operator exists; the agent looks for 30 s whether it is renewed";

#[cfg(test)]
mod tests {
    use shared_maps::IdentityId;

    use super::*;

    fn set(app: &str) -> LabelSet {
        let namespace = "k8s:io.kubernetes.pod.namespace=greedy";
        LabelSet::parse(&[&format!("k8s:app={app}"), namespace]).unwrap()
    }

    fn wanted(is_beyond_share: bool) -> WantedIdentity {
        WantedIdentity {
            choices: vec![IdentityId(300)],
            is_of_pod: true,
            vanished: false,
            is_beyond_share,
        }
    }

    #[test]
    fn each_refusal_is_explained_with_its_remedy() {
        for (code, message, remedy) in [
            (
                403,
                "ValidatingAdmissionPolicy 'holdfast-identities'",
                "identities.range",
            ),
            (403, "cannot create", "ClusterRole holdfast-identities"),
            (404, "the server could not find", "install the CRD"),
            (500, "etcd", "tries again"),
        ] {
            let text = explain(&RequestError::Refused {
                code,
                message: message.to_owned(),
            });
            assert!(text.contains(remedy) && text.contains(message), "{text}");
        }
        let text = full(&set("web"), &wanted(false));
        assert!(
            text.contains("every number that k8s:app=web") && text.contains("--identity-range"),
            "{text}"
        );
        let text = full(&set("web"), &wanted(true));
        assert!(
            text.contains("namespace greedy") && text.contains("--labels"),
            "{text}"
        );
    }

    #[test]
    fn an_obstacle_of_one_label_set_stays_until_that_one_has_its_object() {
        let [web, db] = ["web", "db"].map(set);
        let mut obstacles = Obstacles::default();
        obstacles.stop(&web, "422".to_owned());
        obstacles.stop_all("503".to_owned());
        assert_eq!(obstacles.first().unwrap(), "503");
        obstacles.made(&db);
        assert_eq!(obstacles.first().unwrap(), "422");
        let list: WantedIdentities = [(web.clone(), wanted(false))].into();
        obstacles.follow(&list);
        assert_eq!(obstacles.first().unwrap(), "422");
        obstacles.made(&web);
        assert_eq!(obstacles.first(), None);
        obstacles.stop(&web, "422".to_owned());
        obstacles.follow(&WantedIdentities::new());
        assert_eq!(obstacles.first(), None);
    }
}
