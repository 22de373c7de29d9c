//! Policy documents the scenarios share.

/// Labels given to pod a.
pub const WEB: &str = "k8s:app=web,k8s:io.kubernetes.pod.namespace=default";
/// Labels given to pod b.
pub const CLIENT: &str = "k8s:app=client,k8s:io.kubernetes.pod.namespace=default";

/// A CiliumNetworkPolicy named `name` for pods `app: <app>` with these egress
/// rules (YAML list items at no indentation).
pub fn egress(name: &str, app: &str, rules: &str) -> String {
    format!(
        "apiVersion: cilium.io/v2\n\
         kind: CiliumNetworkPolicy\n\
         metadata: {{name: {name}, namespace: default}}\n\
         spec:\n\
         \x20 endpointSelector: {{matchLabels: {{app: {app}}}}}\n\
         \x20 egress:\n{}",
        indent(rules)
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
        "- toCIDR: [{}]\n\
         \x20 toPorts:\n\
         \x20 - ports: [{{port: \"53\", protocol: ANY}}]\n\
         \x20   rules: {{dns: [{{matchPattern: \"{pattern}\"}}]}}\n",
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
        "- toFQDNs: [{{matchPattern: \"{pattern}\"}}]\n\
         \x20 toPorts:\n\
         \x20 - ports: [{{port: \"80\", protocol: TCP}}, {{port: \"7777\", protocol: UDP}}]\n"
    )
}

/// Traffic to a prefix: TCP port 80.
pub fn cidr(prefix: &str) -> String {
    format!(
        "- toCIDR: [\"{prefix}\"]\n\
         \x20 toPorts:\n\
         \x20 - ports: [{{port: \"80\", protocol: TCP}}]\n"
    )
}

/// The usual policy of pod a: queries for names below `good.test`, and connections to them.
pub fn good_names() -> String {
    only_names("*.good.test")
}

/// The same for names of another pattern only.
pub fn only_names(pattern: &str) -> String {
    egress("good-names", "web", &(dns(pattern) + &names(pattern)))
}

fn indent(rules: &str) -> String {
    rules.lines().map(|line| format!("  {line}\n")).collect()
}
