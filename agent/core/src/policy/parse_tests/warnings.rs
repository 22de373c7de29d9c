//! Warnings about documents, and documents that say too little or too much.

use super::*;

#[test]
fn warns_of_names_nobody_learns_and_of_servers_anyone_may_be() {
    let unlearned = |documents: &[PolicyDocument]| {
        let all: Vec<&PolicyDocument> = documents.iter().collect();
        lint::unlearned_in(all[0], &all)
    };
    let names = |subject: &str| {
        let spec = format!("endpointSelector: {subject}\negress:\n- toFQDNs: [{{matchName: a.b}}]");
        with_spec(&spec).unwrap()
    };
    let dns = |subject: &str| {
        let rules = "rules: {dns: [{matchPattern: \"*\"}]}";
        let spec = format!(
            "endpointSelector: {subject}\negress:\n- toCIDR: [10.0.0.53/32]\n  toPorts:\n  - ports: [{{port: 53}}]\n    {rules}"
        );
        with_spec(&spec).unwrap()
    };
    let web = "{matchLabels: {app: web}}";
    let warned = unlearned(&[names(web)]).unwrap();
    assert!(
        warned.starts_with("spec.egress[0]: toFQDNs without any DNS rule"),
        "{warned}"
    );
    assert!(unlearned(&[names(web), dns("{matchLabels: {app: db}}")]).is_some());
    assert_eq!(unlearned(&[names(web), dns(web)]), None);
    assert_eq!(unlearned(&[names(web), dns("{}")]), None);
    let labels = LabelSet::parse(&["k8s:app=web", "k8s:io.kubernetes.pod.namespace=default"]);
    let of = |documents: &[PolicyDocument]| {
        let mut repository = Repository::default();
        for (n, document) in documents.iter().enumerate() {
            let key = n.to_string();
            repository.insert(Arc::new(PolicyDocument {
                key,
                ..document.clone()
            }));
        }
        lint::unlearned(&EndpointPolicy::of(labels.as_ref().unwrap(), &repository))
    };
    assert!(of(&[names(web)]).unwrap().contains("0 spec.egress[0]"));
    assert_eq!(of(&[names(web), dns("{}")]), None);
    assert!(of(&[names(web), dns("{matchLabels: {app: db}}")]).is_some());
    let document = with_spec(
        "endpointSelector: {}\negress:\n- toPorts:\n  - ports: [{port: 53}]\n    rules: {dns: [{matchPattern: \"*\"}]}",
    )
    .unwrap();
    assert!(
        document.warnings[0].contains("any server"),
        "{:?}",
        document.warnings
    );
}

#[test]
fn an_empty_rule_denies_and_allows_nothing() {
    let document = with_spec("endpointSelector: {}\negress:\n- {}").unwrap();
    assert!(document.rules()[0].egress.default_deny);
    assert!(document.rules()[0].egress.peers.is_empty());
}

#[test]
fn a_rule_that_says_nothing_is_refused() {
    // A file that was cut off behind its selector ends like this.
    for rest in [
        "",
        "egress:",
        "egress: []\ningress: []",
        "description: nothing",
    ] {
        refused(&format!("endpointSelector: {{}}\n{rest}"), "spec");
    }
    with_spec("endpointSelector: {}\negress: [{}]").unwrap();
    with_spec("endpointSelector: {}\nenableDefaultDeny: {egress: true}").unwrap();
}

#[test]
fn a_pattern_of_every_name_is_warned_about() {
    let egress = |name: &str| {
        let spec = format!("endpointSelector: {{}}\negress:\n- toFQDNs: [{{{name}}}]");
        with_spec(&spec).unwrap().warnings
    };
    for every in ["matchPattern: '*'", "matchPattern: '**'"] {
        assert!(egress(every)[0].contains("rebinding"), "{every}");
    }
    for some in ["matchPattern: '*.example.com'", "matchName: example.com"] {
        assert!(egress(some).is_empty(), "{some}");
    }
}

#[test]
fn limits_are_of_each_object_and_name_it() {
    let policy = |name: &str, text: &str| {
        format!(
            r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {{name: {name}}}
spec:
  description: "{text}"
  endpointSelector: {{}}
  egress: [{{}}]
"#
        )
    };
    let large = "x".repeat(limits::yaml::MAX_OBJECT);
    let deep = "[".repeat(200_000) + "\n";
    let text = [policy("a", ""), policy("b", &large), deep, policy("c", "")].join("---\n");
    let found = parse_documents(&text, "all.yaml");
    assert!(found[0].is_ok() && found[3].is_ok());
    let error = found[1].as_ref().unwrap_err();
    assert_eq!(error.key.as_deref(), Some("CiliumNetworkPolicy/default/b"));
    assert!(
        error.to_string().contains("an object may have 3145728"),
        "{error}"
    );
    let error = found[2].as_ref().unwrap_err().to_string();
    let says = "all.yaml: document 3: is nested more than 64 levels deep; remove the nesting";
    assert!(error.starts_with(says), "{error}");
    assert_eq!(found.len(), 4);
}

#[test]
fn a_dns_rule_of_the_whole_cluster_that_names_no_namespace_is_warned_about() {
    let of = |labels: &str| {
        let text = format!(
            r"
apiVersion: cilium.io/v2
kind: CiliumClusterwideNetworkPolicy
metadata: {{name: dns}}
spec:
  endpointSelector: {{}}
  egress:
  - toEndpoints: [{{matchLabels: {labels}}}]
    toPorts: [{{ports: [{{port: '53'}}], rules: {{dns: [{{matchPattern: '*'}}]}}}}]
"
        );
        parse_documents(&text, "test").remove(0).unwrap().warnings
    };
    let warned = of("{k8s-app: kube-dns}");
    assert!(warned[0].contains("pods of every namespace"), "{warned:?}");
    let one = of("{k8s-app: kube-dns, 'k8s:io.kubernetes.pod.namespace': kube-system}");
    assert!(one.is_empty(), "{one:?}");
}
