//! Pods, Services and policies about them, as YAML.

use super::VIP;

pub(in crate::core::tests) fn egress(rules: &str) -> String {
    format!(
        r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {{name: web}}
spec:
  endpointSelector: {{matchLabels: {{app: web}}}}
  egress: {rules}
"
    )
}

pub(in crate::core::tests) fn to(app: &str, port: u16, protocol: &str) -> String {
    format!(
        "{{toEndpoints: [{{matchLabels: {{app: {app}}}}}], toPorts: [{{ports: [{{port: \"{port}\", protocol: {protocol}}}]}}]}}"
    )
}

pub(in crate::core::tests) fn pod(name: &str, app: &str, address: &str) -> String {
    format!(
        r"
---
apiVersion: v1
kind: Pod
metadata: {{name: {name}, labels: {{app: {app}}}}}
status: {{phase: Running, podIPs: [{{ip: {address}}}]}}
"
    )
}

pub(in crate::core::tests) fn service(name: &str, spec: &str, ports: &str) -> String {
    format!(
        "---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec: {{{spec}, ports: [{ports}]}}\n"
    )
}

/// Backends by pod name and address.
pub(in crate::core::tests) fn slice(of: &str, backends: &[(&str, &str)], ports: &str) -> String {
    let family = match backends.first() {
        Some((_, address)) if address.contains(':') => "IPv6",
        _ => "IPv4",
    };
    let endpoints = backends.iter().map(|(pod, address)| match *pod {
        "" => format!("{{addresses: [\"{address}\"]}}"),
        pod => format!(
            "{{addresses: [\"{address}\"], targetRef: {{kind: Pod, namespace: default, name: {pod}}}}}"
        ),
    });
    let endpoints: Vec<String> = endpoints.collect();
    format!(
        r"
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{name: {of}-{}, labels: {{kubernetes.io/service-name: {of}}}}}
addressType: {family}
endpoints: [{}]
ports: [{ports}]
",
        family.to_lowercase(),
        endpoints.join(", ")
    )
}

/// `db`, port 80 to 8080, with these backends.
pub(in crate::core::tests) fn db(backends: &[(&str, &str)]) -> String {
    service("db", &format!("clusterIP: {VIP}"), "{port: 80}")
        + &slice("db", backends, "{port: 8080}")
}
