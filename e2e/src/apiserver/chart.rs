//! Roles and CRDs of the chart. A right that the agent needs and the chart does not give is a 403
//! in the tests too.

use anyhow::{Result, ensure};
use serde_json::Value;

use super::documents;

/// Templates of roles and bindings.
const ROLES: [&str; 8] = [
    include_str!("../../../charts/holdfast/templates/agent-clusterrole.yaml"),
    include_str!("../../../charts/holdfast/templates/agent-clusterrolebinding.yaml"),
    include_str!("../../../charts/holdfast/templates/agent-role.yaml"),
    include_str!("../../../charts/holdfast/templates/agent-rolebinding.yaml"),
    include_str!("../../../charts/holdfast/templates/reader-clusterrole.yaml"),
    include_str!("../../../charts/holdfast/templates/reader-clusterrolebinding.yaml"),
    include_str!("../../../charts/holdfast/templates/reader-role.yaml"),
    include_str!("../../../charts/holdfast/templates/reader-rolebinding.yaml"),
];

/// The subjects of bindings of `holdfast-reader`.
const READERS: &str = "{{- include \"holdfast.readers\" . | trim | nindent 2 }}";

const CRDS: [&str; 4] = [
    include_str!("../../../charts/holdfast/files/crds/ciliumcidrgroups.yaml"),
    include_str!("../../../charts/holdfast/files/crds/ciliumclusterwidenetworkpolicies.yaml"),
    include_str!("../../../charts/holdfast/files/crds/ciliumnetworkpolicies.yaml"),
    include_str!("../../../charts/holdfast/files/crds/ciliumnodes.yaml"),
];

/// Documents of a release in `namespace`; the program of `reader` reads the cluster.
///
/// The templates of roles are simple: the namespace of the release, the ServiceAccount, and lines for
/// labels, which do not matter here. Other directives are refused.
pub(super) fn of_release(namespace: &str, account: &str, reader: &str) -> Result<Vec<Value>> {
    let mut all = Vec::new();
    for template in ROLES {
        let text = template.replace("{{ .Release.Namespace }}", namespace);
        let text = text.replace("{{ .Values.agent.serviceAccount.name }}", account);
        let readers = format!("- {{kind: ServiceAccount, name: {reader}, namespace: {namespace}}}");
        let text = text.replace(READERS, &readers);
        let lines = text
            .lines()
            .filter(|line| !line.contains("holdfast.labels"));
        let text: Vec<&str> = lines.collect();
        let text = text.join("\n");
        ensure!(
            !text.contains("{{"),
            "a directive that the tests cannot render: {text}"
        );
        all.extend(documents(&text)?);
    }
    for crd in CRDS {
        all.extend(documents(crd)?);
    }
    Ok(all)
}
