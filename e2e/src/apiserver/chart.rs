//! Roles and CRDs of the chart. If the chart lacks a right that the agent needs, the agent gets a
//! 403 in tests, too.

use anyhow::{Result, ensure};
use serde_json::Value;

use super::documents;

/// Templates of roles, bindings and admission policies.
const ROLES: [&str; 11] = [
    include_str!("../../../charts/holdfast/templates/agent-clusterrole.yaml"),
    include_str!("../../../charts/holdfast/templates/agent-clusterrolebinding.yaml"),
    include_str!("../../../charts/holdfast/templates/agent-role.yaml"),
    include_str!("../../../charts/holdfast/templates/agent-rolebinding.yaml"),
    include_str!("../../../charts/holdfast/templates/reader-clusterrole.yaml"),
    include_str!("../../../charts/holdfast/templates/reader-clusterrolebinding.yaml"),
    include_str!("../../../charts/holdfast/templates/reader-role.yaml"),
    include_str!("../../../charts/holdfast/templates/reader-rolebinding.yaml"),
    include_str!("../../../charts/holdfast/templates/resolver-clusterrole.yaml"),
    include_str!("../../../charts/holdfast/templates/reader-admission.yaml"),
    include_str!("../../../charts/holdfast/templates/lease-admission.yaml"),
];

/// Conditions around whole templates. Here they are true.
const CONDITIONS: [&str; 6] = [
    "{{- if .Values.highScale.mode }}",
    "{{- if eq .Values.identities.mode \"cluster\" }}",
    "{{- if include \"holdfast.removesTaint\" . }}",
    "{{- if include \"holdfast.admission\" . }}",
    "{{- if eq .Values.resolver.mode \"kube\" }}",
    "{{- end }}",
];

/// Binding of the resolver's role.
const RESOLVER: &str = include_str!("../../../charts/holdfast/templates/resolver-rolebinding.yaml");
const RESOLVER_NAMESPACE: &str = "{{ include \"holdfast.resolver.namespace\" . }}";

/// The subjects of bindings of `holdfast-reader`.
const READERS: &str = "{{- include \"holdfast.readers\" . | trim | nindent 2 }}";
/// The names of these readers in requests.
const READERS_NAMES: &str = "{{ include \"holdfast.readers.usernames\" . }}";

/// What a release adds with `identities.mode: cluster`.
const IDENTITIES: [&str; 5] = [
    include_str!("../../../charts/holdfast/templates/identities-clusterrole.yaml"),
    include_str!("../../../charts/holdfast/templates/identities-clusterrolebinding.yaml"),
    include_str!("../../../charts/holdfast/templates/identities-role.yaml"),
    include_str!("../../../charts/holdfast/templates/identities-rolebinding.yaml"),
    include_str!("../../../charts/holdfast/templates/identities-admission.yaml"),
];
const IDENTITIES_CRD: &str =
    include_str!("../../../charts/holdfast/files/crds/ciliumidentities.yaml");
/// The bounds of `identities.range`: the text in the templates, and the value here.
const IDENTITIES_RANGE: [(&str, &str); 2] = [
    ("{{ include \"holdfast.identities.first\" . }}", "256"),
    ("{{ include \"holdfast.identities.last\" . }}", "61439"),
];

/// What a release adds with `highScale.mode`.
const HIGH_SCALE: [&str; 2] = [
    include_str!("../../../charts/holdfast/templates/high-scale-clusterrole.yaml"),
    include_str!("../../../charts/holdfast/templates/high-scale-clusterrolebinding.yaml"),
];
const WORLD_CRD: &str = include_str!("../../../charts/holdfast/files/crds/ciliumworldcidrs.yaml");

/// The right to remove the startup taint, and the policies that forbid other changes.
const STARTUP_TAINT: [&str; 4] = [
    include_str!("../../../charts/holdfast/templates/node-clusterrole.yaml"),
    include_str!("../../../charts/holdfast/templates/node-clusterrolebinding.yaml"),
    include_str!("../../../charts/holdfast/templates/node-admission.yaml"),
    include_str!("../../../charts/holdfast/templates/ciliumnode-admission.yaml"),
];

const CRDS: [&str; 6] = [
    include_str!("../../../charts/holdfast/files/crds/ciliumcidrgroups.yaml"),
    include_str!("../../../charts/holdfast/files/crds/ciliumclusterwidenetworkpolicies.yaml"),
    include_str!("../../../charts/holdfast/files/crds/ciliumnetworkpolicies.yaml"),
    include_str!("../../../charts/holdfast/files/crds/ciliumnodes.yaml"),
    include_str!("../../../charts/holdfast/files/crds/dnsnameresolvers.yaml"),
    include_str!("../../../charts/holdfast/files/crds/egressfirewalls.yaml"),
];

/// Effect of the chart's value `resolver.mode` on roles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum ResolverRole {
    /// Agents do not write DNSNameResolvers.
    #[default]
    Unbound,
    /// `kube`: agents write the DNSNameResolvers of the release's namespace.
    Bound,
}

/// Documents of a release in `namespace`. `reader` is the ServiceAccount of the program that reads
/// the cluster.
///
/// The templates of roles contain only directives for the release's namespace, for ServiceAccounts,
/// and for labels, which do not matter here. Any other directive is an error.
pub(super) fn of_release(
    namespace: &str,
    account: &str,
    reader: &str,
    resolver: ResolverRole,
) -> Result<Vec<Value>> {
    let readers = format!("- {{kind: ServiceAccount, name: {reader}, namespace: {namespace}}}");
    let readers_names = format!("[\"system:serviceaccount:{namespace}:{reader}\"]");
    let mut templates: Vec<String> = ROLES.iter().map(|text| (*text).to_owned()).collect();
    if resolver == ResolverRole::Bound {
        templates.push(RESOLVER.replace(RESOLVER_NAMESPACE, namespace));
    }
    let mut all = Vec::new();
    for template in templates {
        let text = template.replace(READERS, &readers);
        let text = text.replace(READERS_NAMES, &readers_names);
        all.extend(rendered(&text, namespace, account)?);
    }
    for crd in CRDS {
        all.extend(documents(crd)?);
    }
    Ok(all)
}

/// Documents that a release adds with the value `identities.mode: cluster`. `reader` is the
/// ServiceAccount of the program that reads the cluster.
pub(super) fn of_identities(namespace: &str, account: &str, reader: &str) -> Result<Vec<Value>> {
    let readers = format!("- {{kind: ServiceAccount, name: {reader}, namespace: {namespace}}}");
    let mut all = documents(IDENTITIES_CRD)?;
    for template in IDENTITIES {
        let mut text = template.replace(READERS, &readers);
        for (bound, value) in IDENTITIES_RANGE {
            text = text.replace(bound, value);
        }
        all.extend(rendered(&text, namespace, account)?);
    }
    Ok(all)
}

/// Documents that a release adds with `highScale.mode`. `reader` is the ServiceAccount of the
/// program that reads the cluster.
pub(super) fn of_high_scale(namespace: &str, account: &str, reader: &str) -> Result<Vec<Value>> {
    let readers = format!("- {{kind: ServiceAccount, name: {reader}, namespace: {namespace}}}");
    let mut all = documents(WORLD_CRD)?;
    for template in HIGH_SCALE {
        all.extend(rendered(
            &template.replace(READERS, &readers),
            namespace,
            account,
        )?);
    }
    Ok(all)
}

/// Documents that a release adds with the value `agentNotReadyTaintKey: key`.
pub(super) fn of_startup_taint(namespace: &str, account: &str, key: &str) -> Result<Vec<Value>> {
    let mut all = Vec::new();
    for template in STARTUP_TAINT {
        let text = template.replace("{{ .Values.agentNotReadyTaintKey }}", key);
        all.extend(rendered(&text, namespace, account)?);
    }
    Ok(all)
}

fn rendered(template: &str, namespace: &str, account: &str) -> Result<Vec<Value>> {
    let text = template.replace("{{ .Release.Namespace }}", namespace);
    let text = text.replace("{{ include \"holdfast.fullname\" $ }}", "holdfast");
    let text = text.replace("{{ .Values.agent.serviceAccount.name }}", account);
    let lines = text
        .lines()
        .filter(|line| !line.contains("holdfast.labels") && !CONDITIONS.contains(line));
    let text: Vec<&str> = lines.collect();
    let text = text.join("\n");
    ensure!(
        !text.contains("{{"),
        "a directive that the tests cannot render: {text}"
    );
    documents(&text)
}
