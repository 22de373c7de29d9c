//! Joins, one by one; and random histories compared with a join of all documents at once.

use proptest::prelude::*;

use super::*;
use crate::policy::parse::parse_documents;

fn read(text: &str) -> PolicyDocument {
    parse_documents(text, "test").remove(0).unwrap()
}

fn pod(name: &str, address: &str, created: &str, label: &str) -> PolicyDocument {
    read(&format!(
        r#"
apiVersion: v1
kind: Pod
metadata:
  name: {name}
  namespace: shop
  creationTimestamp: "{created}"
  labels: {{app: {label}}}
status: {{podIP: {address}}}
"#
    ))
}

fn namespace(label: &str) -> PolicyDocument {
    read(&format!(
        "apiVersion: v1\nkind: Namespace\nmetadata: {{name: shop, labels: {{team: {label}}}}}\n"
    ))
}

fn book() -> Book {
    Book::new(LabelFilter::default(), "default")
}

fn lines(changes: &Changes) -> Vec<String> {
    let pods = changes.pods.iter().map(|change| match change {
        SourceEvent::Apply(pod) => {
            let addresses: Vec<String> = pod.addresses.iter().map(ToString::to_string).collect();
            format!(
                "{} {} {}",
                pod.document,
                addresses.join(","),
                pod.labels.texts().join(",")
            )
        }
        SourceEvent::Delete(key) => format!("gone {key}"),
        other => panic!("{other:?}"),
    });
    pods.collect()
}

#[test]
fn pods_of_this_node_are_those_that_its_kubelet_gives_an_address() {
    let on = |name: &str, node: &str, more: &str| {
        read(&format!(
            r"
apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: shop, uid: of-api, annotations: {{{more}}}}}
spec: {{nodeName: {node}, hostNetwork: {}}}
status: {{podIP: 10.2.0.{}}}
",
            name == "host",
            name.len()
        ))
    };
    let mut book = book().on_node("n1");
    assert_eq!(book.take_local(), None);
    for (name, node, more) in [
        ("a", "n1", ""),
        ("static", "n1", "kubernetes.io/config.mirror: of-node"),
        ("elsewhere", "n2", ""),
        ("host", "n1", ""),
    ] {
        book.put(&on(name, node, more));
    }
    book.changes();
    let local = book.take_local().unwrap();
    let uids = local
        .iter()
        .map(|(name, pod)| (&**name, pod.uid.as_deref()));
    let expected = [("shop/a", Some("of-api")), ("shop/static", Some("of-node"))];
    assert_eq!(uids.collect::<Vec<_>>(), expected);
    assert_eq!(book.take_local(), None);
    // The pod has ended.
    book.remove("Pod/shop/a");
    book.changes();
    assert_eq!(book.take_local().unwrap().len(), 1);
}

const MORNING: &str = "2026-11-22T08:00:00Z";
const NOON: &str = "2026-11-22T12:00:00Z";
const FIXED: &str = "k8s:io.cilium.k8s.policy.cluster=default,k8s:io.kubernetes.pod.namespace=shop";

#[test]
fn a_namespaces_labels_reach_its_pods() {
    let mut book = book();
    book.put(&pod("web-0", "10.2.0.9", NOON, "web"));
    assert_eq!(
        lines(&book.changes()),
        [format!("Pod/shop/web-0 10.2.0.9 k8s:app=web,{FIXED}")]
    );
    let [(key, warning)] = book.warnings().try_into().unwrap();
    assert_eq!(key, "Pod/shop/web-0");
    assert!(
        warning.contains("no Namespace document for shop"),
        "{warning}"
    );
    book.put(&namespace("a"));
    const NAMESPACE: &str = "k8s:io.cilium.k8s.namespace.labels";
    let team = |team| {
        format!(
            "Pod/shop/web-0 10.2.0.9 k8s:app=web,{NAMESPACE}.kubernetes.io/metadata.name=shop,{NAMESPACE}.team={team},{FIXED}"
        )
    };
    assert_eq!(lines(&book.changes()), [team("a")]);
    assert!(book.warnings().is_empty());
    book.put(&namespace("b"));
    assert_eq!(lines(&book.changes()), [team("b")]);
    book.put(&namespace("b"));
    assert_eq!(lines(&book.changes()), [] as [&str; 0]);
}

#[test]
fn of_two_pods_with_one_address_the_younger_counts_and_both_are_named() {
    let mut book = book();
    let (old, young) = (
        pod("a", "10.2.0.9", MORNING, "old"),
        pod("b", "10.2.0.9", NOON, "young"),
    );
    book.put(&old);
    book.changes();
    book.put(&young);
    assert_eq!(
        lines(&book.changes()),
        [
            format!("Pod/shop/b 10.2.0.9 k8s:app=young,{FIXED}"),
            format!("Pod/shop/a  k8s:app=old,{FIXED}"),
        ]
    );
    let (key, warning) = book.warnings().remove(0);
    assert_eq!(key, "Pod/shop/b");
    assert!(warning.contains("Pod/shop/a"), "{warning}");
    book.remove(&young.key);
    assert_eq!(
        lines(&book.changes()),
        [
            format!("Pod/shop/a 10.2.0.9 k8s:app=old,{FIXED}"),
            "gone shop/b".to_owned()
        ]
    );
    // Without a time the first by name counts.
    let without = |name| {
        read(&format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: shop}}\nstatus: {{podIP: 10.2.0.9}}\n"
        ))
    };
    let mut book = self::book();
    book.put(&without("b"));
    book.put(&without("a"));
    let found = lines(&book.changes());
    assert!(found[0].starts_with("Pod/shop/a 10.2.0.9"), "{found:?}");
}

#[test]
fn a_pod_document_overrides_its_ciliumendpoint() {
    let mut book = book();
    let endpoint = read(
        r#"
apiVersion: cilium.io/v2
kind: CiliumEndpoint
metadata: {name: web-0, namespace: shop}
status:
  identity: {labels: ["k8s:app=web"]}
  networking: {addressing: [{ipv4: 10.2.0.9}]}
"#,
    );
    book.put(&endpoint);
    assert_eq!(
        lines(&book.changes()),
        ["CiliumEndpoint/shop/web-0 10.2.0.9 k8s:app=web"]
    );
    let pod = pod("web-0", "10.2.0.8", NOON, "web");
    book.put(&pod);
    assert_eq!(
        lines(&book.changes()),
        [format!("Pod/shop/web-0 10.2.0.8 k8s:app=web,{FIXED}")]
    );
    book.remove(&pod.key);
    assert_eq!(
        lines(&book.changes()),
        ["CiliumEndpoint/shop/web-0 10.2.0.9 k8s:app=web"]
    );
}

fn service(ports: &str) -> PolicyDocument {
    read(&format!(
        r"
apiVersion: v1
kind: Service
metadata: {{name: web, namespace: shop}}
spec: {{clusterIP: 10.96.0.9, ports: [{ports}]}}
"
    ))
}

fn slice(name: &str, service: &str, address: &str) -> PolicyDocument {
    read(&format!(
        r"
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: {name}
  namespace: shop
  labels: {{kubernetes.io/service-name: {service}}}
addressType: IPv4
endpoints:
- {{addresses: [{address}], targetRef: {{kind: Pod, namespace: shop, name: web-0}}}}
ports: [{{name: http, port: 8080}}]
"
    ))
}

fn backends(changes: &Changes) -> Vec<String> {
    let services = changes.services.iter().map(|change| match change {
        SourceEvent::Apply(service) => {
            let ports = service.ports.iter().map(|port| {
                let backends = port.backends.iter();
                let backends = backends.map(|b| format!("{}:{}", b.address, b.port.unwrap_or(0)));
                format!("{} → {}", port.port, backends.collect::<Vec<_>>().join(","))
            });
            format!("{}: {}", service.key, ports.collect::<Vec<_>>().join("; "))
        }
        SourceEvent::Delete(key) => format!("gone {key}"),
        other => panic!("{other:?}"),
    });
    services.collect()
}

#[test]
fn a_slice_waits_for_its_service_and_may_change_to_another() {
    let mut book = book();
    book.put(&slice("web-1", "web", "10.2.0.9"));
    assert_eq!(backends(&book.changes()), [] as [&str; 0]);
    let web = service("{name: http, port: 80}, {name: other, port: 81}");
    book.put(&web);
    assert_eq!(
        backends(&book.changes()),
        ["shop/web: 80 → 10.2.0.9:8080; 81 → "]
    );
    book.put(&slice("web-2", "web", "10.2.0.10"));
    assert_eq!(
        backends(&book.changes()),
        ["shop/web: 80 → 10.2.0.9:8080,10.2.0.10:8080; 81 → "]
    );
    book.put(&slice("web-1", "elsewhere", "10.2.0.9"));
    assert_eq!(
        backends(&book.changes()),
        ["shop/web: 80 → 10.2.0.10:8080; 81 → "]
    );
    book.remove(&web.key);
    assert_eq!(backends(&book.changes()), ["gone shop/web"]);
}

fn identity(number: u32, created: Option<&str>) -> PolicyDocument {
    let created = created.map(|time| format!(", creationTimestamp: {time}"));
    let created = created.unwrap_or_default();
    let document = read(&format!(
        r#"
apiVersion: cilium.io/v2
kind: CiliumIdentity
metadata:
  {{name: "{number}", uid: u-{number}, annotations: {{holdfast.io/made-by: holdfast}}{created}}}
security-labels: {{"k8s:app": web}}
"#
    ));
    PolicyDocument {
        source: CLUSTER.to_owned(),
        ..document
    }
}

fn numbers(changes: &Changes) -> Vec<String> {
    let identities = changes.identities.iter().map(|change| match change {
        SourceEvent::Apply(object) if object.is_duplicate => format!("second {}", object.id),
        SourceEvent::Apply(object) => object.id.0.to_string(),
        SourceEvent::Delete(key) => format!("gone {key}"),
        other => panic!("{other:?}"),
    });
    identities.collect()
}

#[test]
fn of_two_objects_with_one_label_set_the_older_counts_in_both_orders() {
    let cases = [
        // The first identity of each pair is the one that counts.
        (identity(6000, Some(MORNING)), identity(5000, Some(NOON))),
        (identity(5000, Some(NOON)), identity(6000, Some(NOON))),
        (identity(6000, Some(NOON)), identity(5000, None)),
        (identity(5000, None), identity(6000, None)),
    ];
    for (counts, other) in cases {
        let number = |document: &PolicyDocument| document.key.replace("CiliumIdentity/", "");
        let (first, second) = (number(&counts), number(&other));
        let mut book = book();
        book.put(&counts);
        assert_eq!(numbers(&book.changes()), std::slice::from_ref(&first));
        book.put(&other);
        assert_eq!(numbers(&book.changes()), [format!("second {second}")]);
        let mut book = self::book();
        book.put(&other);
        assert_eq!(numbers(&book.changes()), std::slice::from_ref(&second));
        book.put(&counts);
        let moved = [format!("second {second}"), first.clone()];
        assert_eq!(numbers(&book.changes()), moved);
        let (key, warning) = book.warnings().remove(0);
        assert_eq!(key, counts.key);
        assert!(
            warning.contains(&format!("{} has the same", other.key)),
            "{warning}"
        );
        // The one that counted is removed: the other takes its place.
        book.remove(&counts.key);
        assert_eq!(numbers(&book.changes()), [format!("gone {first}"), second]);
    }
}

#[test]
fn of_two_documents_with_one_label_set_the_second_gives_nothing() {
    let written = |number| PolicyDocument {
        source: "web.yaml".to_owned(),
        ..identity(number, None)
    };
    let mut book = book();
    book.put(&written(5000));
    book.put(&written(6000));
    assert_eq!(numbers(&book.changes()), ["5000"]);
    assert_eq!(book.warnings().len(), 1);
}

#[test]
fn an_object_has_its_time_its_uid_and_its_maker() {
    let mut book = book();
    book.put(&identity(5000, Some("2026-11-23T12:00:00Z")));
    let changes = book.changes();
    let [SourceEvent::Apply(object)] = &changes.identities[..] else {
        panic!("{changes:?}");
    };
    assert_eq!(object.created, Some(1_795_435_200));
    assert!(object.is_ours);
    assert_eq!(object.uid.as_deref(), Some("u-5000"));
    // The object is made again under the same name.
    book.put(&identity(5000, Some("2026-11-23T12:00:01Z")));
    assert_eq!(numbers(&book.changes()), ["5000"]);
}

/// A document to put or to remove.
fn acts() -> impl Strategy<Value = Vec<(bool, PolicyDocument)>> {
    let pods =
        (0..3_u8, 0..3_u8, any::<bool>(), 0..2_u8).prop_map(|(name, address, noon, label)| {
            let created = if noon { NOON } else { MORNING };
            pod(
                &format!("p{name}"),
                &format!("10.2.0.{address}"),
                created,
                &format!("l{label}"),
            )
        });
    let namespaces = (0..3_u8).prop_map(|label| namespace(&format!("t{label}")));
    let services = (0..2_u8).prop_map(|port| service(&format!("{{name: http, port: 8{port}}}")));
    let slices = (0..2_u8, 0..2_u8, 0..3_u8).prop_map(|(name, of, address)| {
        let of = if of == 0 { "web" } else { "other" };
        slice(&format!("s{name}"), of, &format!("10.2.0.{address}"))
    });
    let documents = prop_oneof![4 => pods, 1 => namespaces, 1 => services, 2 => slices];
    proptest::collection::vec((proptest::bool::weighted(0.7), documents), 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    /// After any history, with changes read at any moment, what was returned is what a book
    /// returns that gets the remaining documents at once.
    #[test]
    fn any_history_ends_in_the_state_of_a_single_read(acts in acts(), reads in any::<u64>()) {
        let mut book = book();
        let mut documents: BTreeMap<String, PolicyDocument> = BTreeMap::new();
        let (mut pods, mut services) = (BTreeMap::new(), BTreeMap::new());
        let mut follow = |changes: Changes| {
            for change in changes.pods {
                match change {
                    SourceEvent::Apply(pod) => drop(pods.insert(pod.key.clone(), pod)),
                    SourceEvent::Delete(key) => assert!(pods.remove(&*key).is_some()),
                    other => panic!("{other:?}"),
                }
            }
            for change in changes.services {
                match change {
                    SourceEvent::Apply(service) => drop(services.insert(service.key.clone(), service)),
                    SourceEvent::Delete(key) => assert!(services.remove(&*key).is_some()),
                    other => panic!("{other:?}"),
                }
            }
            (pods.clone(), services.clone())
        };
        for (n, (put, document)) in acts.iter().enumerate() {
            if *put {
                book.put(document);
                documents.insert(document.key.clone(), document.clone());
            } else {
                documents.remove(&document.key);
                book.remove(&document.key);
            }
            if reads >> (n % 64) & 1 == 1 {
                follow(book.changes());
            }
        }
        let (pods, services) = follow(book.changes());
        let mut whole = self::book();
        for document in documents.values() {
            whole.put(document);
        }
        let whole = whole.changes();
        let expected: BTreeMap<_, _> = whole.pods.into_iter().map(|change| match change {
            SourceEvent::Apply(pod) => (pod.key.clone(), pod),
            other => panic!("{other:?}"),
        }).collect();
        prop_assert_eq!(pods, expected);
        let expected: BTreeMap<_, _> = whole.services.into_iter().map(|change| match change {
            SourceEvent::Apply(service) => (service.key.clone(), service),
            other => panic!("{other:?}"),
        }).collect();
        prop_assert_eq!(services, expected);
    }
}
