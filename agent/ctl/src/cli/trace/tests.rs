//! What `policy trace` prints of EgressFirewalls.

use agent_core::policy::parse::parse_documents;

use super::*;

const WEB: &str = "k8s:app=web,k8s:io.kubernetes.pod.namespace=shop";
const DB: &str = "k8s:app=db,k8s:io.kubernetes.pod.namespace=shop";

const POLICY: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: web, namespace: shop}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toEndpoints: [{matchLabels: {k8s-app: kube-dns, "k8s:io.kubernetes.pod.namespace": kube-system}}]
    toPorts: [{ports: [{port: "53"}], rules: {dns: [{matchPattern: "*.example.com"}]}}]
  - toFQDNs: [{matchPattern: "*.example.com"}]
    toPorts: [{ports: [{port: "443", protocol: TCP}]}]
  egressDeny:
  - toEntities: [world]
    toPorts: [{ports: [{port: "25", protocol: TCP}]}]
"#;

const FIREWALL: &str = r#"
apiVersion: k8s.ovn.org/v1
kind: EgressFirewall
metadata: {name: default, namespace: shop}
spec:
  egress:
  - {type: Allow, to: {dnsName: "*.example.com"}, ports: [{protocol: TCP, port: 443}]}
  - {type: Allow, to: {cidrSelector: 192.0.2.0/24}, ports: [{protocol: TCP, port: 25}, {protocol: TCP, port: 443}]}
  - {type: Deny, to: {cidrSelector: 192.0.2.0/25}}
  - {type: Deny, to: {cidrSelector: 0.0.0.0/0}}
"#;

fn ask(policy: &str, from: &str, to: &str, port: &str) -> Trace {
    let mut repository = Repository::default();
    for document in parse_documents(policy, "test") {
        repository.insert(document.unwrap().into());
    }
    let Peer::Labels(from) = Peer::parse(from).unwrap() else {
        panic!("{from} are no labels")
    };
    let to = Peer::parse(to).unwrap().into();
    ask::trace(&repository, &from, &to, port.parse().unwrap(), None)
}

/// The trace names the rule of the firewall first, and then the policy that decides on what the firewall passes.
#[test]
fn a_firewall_is_read_before_the_other_rules_and_named() {
    let both = format!("{POLICY}---\n{FIREWALL}");
    let firewall = "EgressFirewall/shop/default spec.egress";
    for (policy, to, port, said) in [
        (
            FIREWALL,
            "203.0.113.1",
            "80",
            format!("denied by {firewall}[3] (Deny 0.0.0.0/0)"),
        ),
        (
            FIREWALL,
            "192.0.2.1",
            "80",
            format!("denied by {firewall}[2] (Deny 192.0.2.0/25)"),
        ),
        (
            FIREWALL,
            "192.0.2.1",
            "443",
            format!(
                "passed on by {firewall}[1] (Allow 192.0.2.0/24; TCP 25, TCP 443), then not restricted"
            ),
        ),
        (
            FIREWALL,
            "www.example.com",
            "443",
            format!(
                "passed on by {firewall}[0] (Allow *.example.com; TCP 443), then not restricted"
            ),
        ),
        (
            FIREWALL,
            "a.b.example.com",
            "443",
            format!("denied by {firewall}[3] (Deny 0.0.0.0/0)"),
        ),
        (
            both.as_str(),
            "192.0.2.1",
            "443",
            format!(
                "passed on by {firewall}[1] (Allow 192.0.2.0/24; TCP 25, TCP 443), then no rule for this port"
            ),
        ),
        (
            both.as_str(),
            "192.0.2.1",
            "25",
            format!(
                "passed on by {firewall}[1] (Allow 192.0.2.0/24; TCP 25, TCP 443), then denied by CiliumNetworkPolicy/shop/web spec.egressDeny[0] (entity:world; TCP 25)"
            ),
        ),
        (
            both.as_str(),
            "www.example.com",
            "443",
            format!(
                "passed on by {firewall}[0] (Allow *.example.com; TCP 443), then allowed by CiliumNetworkPolicy/shop/web spec.egress[1] (fqdn:*.example.com; TCP 443)"
            ),
        ),
    ] {
        let trace = ask(policy, WEB, to, port);
        let text = text(&trace);
        assert!(text.contains(&said), "{to} {port}: {text}");
        assert_eq!(
            trace.allowed,
            !said.contains("denied") && !said.contains("no rule"),
            "{text}"
        );
        assert_eq!(text.contains("DROPPED  egress"), !trace.allowed, "{text}");
    }
    let trace = ask(FIREWALL, DB, "203.0.113.1", "53/UDP");
    assert_eq!(trace.steps[0].verdict, "denied");
    let trace = ask(FIREWALL, WEB, DB, "53/UDP");
    let names = "through the DNS proxy by EgressFirewall/shop/default spec.egress[0] (needs DNS answers for *.example.com)";
    assert!(text(&trace).contains(names));
}

#[test]
fn a_firewalls_block_of_all_addresses_means_nodes_that_only_a_label_names() {
    for node in ["reserved:remote-node", "reserved:host"] {
        let denied = ask(FIREWALL, WEB, node, "6443");
        assert!(!denied.allowed, "{}", text(&denied));
        assert!(text(&denied).contains("spec.egress[3] (Deny 0.0.0.0/0)"));
        let open = FIREWALL.replace(
            "Deny, to: {cidrSelector: 0.0.0.0/0}",
            "Allow, to: {cidrSelector: 0.0.0.0/0}",
        );
        assert!(ask(&open, WEB, node, "6443").allowed);
    }
}
