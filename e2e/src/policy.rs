//! Policy documents the scenarios share.

/// Labels given to pod a.
pub const WEB: &str = "k8s:app=web,k8s:io.kubernetes.pod.namespace=default";
/// Labels given to pod b.
pub const CLIENT: &str = "k8s:app=client,k8s:io.kubernetes.pod.namespace=default";

/// A CiliumNetworkPolicy named `name` for pods `app: <app>` with these egress
/// rules (YAML list items at no indentation).
pub fn egress(name: &str, app: &str, rules: &str) -> String {
    format!(
        r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {{name: {name}, namespace: default}}
spec:
  endpointSelector: {{matchLabels: {{app: {app}}}}}
  egress:
{}",
        indent(rules)
    )
}

/// A rule of an EgressFirewall: queries over UDP to the lab's first DNS server, which is outside of
/// the cluster.
pub const TO_DNS: &str =
    "{type: Allow, to: {cidrSelector: 192.0.2.53/32}, ports: [{protocol: UDP, port: 53}]}";
/// Last rule of an EgressFirewall, which denies everything that no earlier rule allows.
pub const NOTHING_ELSE: &str = "{type: Deny, to: {cidrSelector: 0.0.0.0/0}}";

/// The EgressFirewall of a namespace with these rules, each of them a YAML mapping.
pub fn firewall(namespace: &str, rules: &[&str]) -> String {
    let rules: String = rules.iter().map(|rule| format!("  - {rule}\n")).collect();
    format!(
        r"
---
apiVersion: k8s.ovn.org/v1
kind: EgressFirewall
metadata: {{name: default, namespace: {namespace}}}
spec:
  egress:
{rules}"
    )
}

/// DNS queries to the lab's first server for names of `pattern`, over UDP and
/// TCP, IPv4 and IPv6.
pub fn dns(pattern: &str) -> String {
    dns_to(pattern, &["192.0.2.53/32", "2001:db8:53::53/128"])
}

/// DNS queries to these prefixes for names of `pattern`.
pub fn dns_to(pattern: &str, servers: &[&str]) -> String {
    format!(
        r#"
- toCIDR: [{}]
  toPorts:
  - ports: [{{port: "53", protocol: ANY}}]
    rules: {{dns: [{{matchPattern: "{pattern}"}}]}}
"#,
        servers
            .iter()
            .map(|s| format!("\"{s}\""))
            .collect::<Vec<_>>()
            .join(", ")
    )
}

/// Traffic to the addresses of names of `pattern`: TCP port 80 and the UDP echo.
pub fn names(pattern: &str) -> String {
    format!(
        r#"
- toFQDNs: [{{matchPattern: "{pattern}"}}]
  toPorts:
  - ports: [{{port: "80", protocol: TCP}}, {{port: "7777", protocol: UDP}}]
"#
    )
}

/// Traffic to a prefix: TCP port 80.
pub fn cidr(prefix: &str) -> String {
    format!(
        r#"
- toCIDR: ["{prefix}"]
  toPorts:
  - ports: [{{port: "80", protocol: TCP}}]
"#
    )
}

/// The usual policy of pod a: queries for names below `good.test`, and traffic to their addresses.
pub fn good_names() -> String {
    only_names("*.good.test")
}

/// Like [`good_names`], for names of another pattern.
pub fn only_names(pattern: &str) -> String {
    egress("good-names", "web", &(dns(pattern) + &names(pattern)))
}

fn indent(rules: &str) -> String {
    rules.lines().map(|line| format!("  {line}\n")).collect()
}
