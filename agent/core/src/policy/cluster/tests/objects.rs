//! What objects mean.

use std::sync::Arc;

use super::read;
use crate::policy::{
    cluster::{endpoint::CiliumEndpoint, pod::Pod, service::Service, slice::EndpointSlice},
    document::Body,
};

fn pod(text: &str) -> Arc<Pod> {
    match read(text).unwrap().body {
        Body::Pod(pod) => pod,
        other => panic!("{other:?}"),
    }
}

fn service(text: &str) -> Arc<Service> {
    match read(text).unwrap().body {
        Body::Service(service) => service,
        other => panic!("{other:?}"),
    }
}

fn slice(text: &str) -> Arc<EndpointSlice> {
    match read(text).unwrap().body {
        Body::Slice(slice) => slice,
        other => panic!("{other:?}"),
    }
}

fn endpoint(text: &str) -> Arc<CiliumEndpoint> {
    match read(text).unwrap().body {
        Body::Endpoint(endpoint) => endpoint,
        other => panic!("{other:?}"),
    }
}

/// As `kubectl get pods -o yaml` writes it, shortened.
const POD: &str = r#"
apiVersion: v1
kind: Pod
metadata:
  annotations: {kubectl.kubernetes.io/restartedAt: "2026-11-01T09:00:00Z"}
  creationTimestamp: "2026-11-22T10:00:00Z"
  generateName: web-
  labels: {app: web, pod-template-hash: 6c4b}
  name: web-6c4b-x2x9q
  namespace: shop
  ownerReferences: [{apiVersion: apps/v1, kind: ReplicaSet, name: web-6c4b, uid: 1-2}]
  resourceVersion: "812"
  uid: 9a1e
spec:
  containers:
  - image: registry.test/web:1
    name: main
    ports:
    - {containerPort: 8080, name: http, protocol: TCP}
    - {containerPort: 9000, protocol: TCP}
    resources: {limits: {memory: 64Mi}}
  initContainers:
  - name: once
    ports: [{containerPort: 1, name: never}]
  - name: mesh
    restartPolicy: Always
    ports: [{containerPort: 15090, name: metrics}]
  nodeName: worker-2
  restartPolicy: Always
  serviceAccount: shopper
  serviceAccountName: shopper
  tolerations: [{effect: NoExecute, key: node.kubernetes.io/not-ready, operator: Exists, tolerationSeconds: 300}]
status:
  conditions: [{lastProbeTime: null, status: "True", type: Ready}]
  containerStatuses: [{name: main, ready: true, restartCount: 0, state: {running: {startedAt: "2026-11-22T10:00:02Z"}}}]
  hostIP: 192.0.2.2
  phase: Running
  podIP: 10.2.0.9
  podIPs: [{ip: 10.2.0.9}, {ip: "2001:db8:2::9"}]
  qosClass: Burstable
"#;

#[test]
fn a_pod_has_labels_addresses_and_named_ports() {
    let pod = pod(POD);
    assert_eq!((&*pod.namespace, &*pod.name), ("shop", "web-6c4b-x2x9q"));
    assert_eq!(pod.labels["app"], "web");
    assert_eq!(pod.service_account.as_deref(), Some("shopper"));
    assert_eq!(pod.node.as_deref(), Some("worker-2"));
    let addresses: Vec<String> = pod.addresses.iter().map(ToString::to_string).collect();
    assert_eq!(addresses, ["10.2.0.9", "2001:db8:2::9"]);
    assert_eq!(pod.ports.texts(), ["http=8080/TCP", "metrics=15090/TCP"]);
    assert_eq!(pod.created, Some(1_795_341_600_000_000_000));
}

#[test]
fn pods_on_the_hosts_network_and_pods_that_ended_have_no_address() {
    for (from, to) in [
        ("nodeName: worker-2", "hostNetwork: true"),
        ("phase: Running", "phase: Succeeded"),
        ("phase: Running", "phase: Failed"),
        (
            "podIP: 10.2.0.9\n  podIPs: [{ip: 10.2.0.9}, {ip: \"2001:db8:2::9\"}]",
            "podIP: \"\"",
        ),
    ] {
        assert_eq!(
            pod(&POD.replacen(from, to, 1)).addresses,
            [] as [std::net::IpAddr; 0],
            "{to}"
        );
    }
    let bare = "apiVersion: v1\nkind: Pod\nmetadata: {name: web-0}\n";
    assert_eq!(pod(bare).namespace, "default");
}

#[test]
fn of_two_containers_that_name_different_ports_alike_the_first_counts() {
    let text = POD.replacen("15090, name: metrics", "15090, name: http", 1);
    let document = read(&text).unwrap();
    let [warning] = document.warnings.as_slice() else {
        panic!("{:?}", document.warnings);
    };
    assert!(
        warning.starts_with("spec.initContainers[1].ports[0].name: `http`"),
        "{warning}"
    );
    assert_eq!(pod(&text).ports.texts(), ["http=8080/TCP"]);
}

const SERVICE: &str = r#"
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  clusterIP: 10.96.0.9
  clusterIPs: [10.96.0.9, "fd00:96::9"]
  externalIPs: [192.0.2.77]
  selector: {app: web}
  ports:
  - {name: http, port: 80, targetPort: http, nodePort: 30080}
  - {name: dns, port: 53, protocol: UDP}
status:
  loadBalancer:
    ingress: [{ip: 192.0.2.80, ipMode: VIP}, {ip: 192.0.2.81, ipMode: Proxy}, {hostname: lb.test}]
"#;

#[test]
fn a_service_has_every_address_that_nodes_translate() {
    let text = SERVICE;
    let service = service(text);
    let texts = |all: &[std::net::IpAddr]| all.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(texts(&service.cluster_ips), ["10.96.0.9", "fd00:96::9"]);
    assert_eq!(texts(&service.external_ips), ["192.0.2.77"]);
    assert_eq!(texts(&service.load_balancer_ips), ["192.0.2.80"]);
    let ports: Vec<_> = service
        .ports
        .iter()
        .map(|port| (&*port.name, port.port))
        .collect();
    assert_eq!(ports, [("http", 80), ("dns", 53)]);
    let headless = "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {clusterIP: None, clusterIPs: [None]}\n";
    assert_eq!(texts(&self::service(headless).cluster_ips), [] as [&str; 0]);
}

const SLICE: &str = r#"
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-abc, namespace: shop, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
endpoints:
- addresses: [10.2.0.9]
  conditions: {ready: true, serving: true, terminating: false}
  nodeName: worker-2
  targetRef: {kind: Pod, name: web-0, namespace: shop, uid: 9a1e}
- addresses: [10.2.0.10]
  conditions: {ready: false, serving: true, terminating: true}
- addresses: [10.2.0.11]
ports: [{name: http, port: 8080, protocol: TCP}, {name: all, port: null}]
"#;

#[test]
fn a_slice_names_its_service_and_its_backends() {
    let text = SLICE;
    let slice = slice(text);
    assert_eq!(slice.service.as_deref(), Some("web"));
    assert!(!slice.is_of_api_servers());
    let [first, second, third] = slice.backends.as_slice() else {
        panic!("{slice:?}");
    };
    assert_eq!(first.pod.as_deref(), Some("shop/web-0"));
    assert!(second.terminating && second.serving && !second.ready);
    assert!(third.ready && third.pod.is_none());
    let ports: Vec<_> = slice
        .ports
        .iter()
        .map(|port| (&*port.name, port.port))
        .collect();
    assert_eq!(ports, [("http", Some(8080)), ("all", None)]);
    assert!(read(text).unwrap().labels(None, &|_| false).1.is_empty());
}

#[test]
fn a_slice_without_a_service_means_nothing_and_says_so() {
    let text = r"
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: x}
addressType: FQDN
endpoints: [{addresses: [db.test]}]
";
    let document = read(text).unwrap();
    assert_eq!(document.warnings.len(), 2, "{:?}", document.warnings);
    assert!(slice(text).backends.is_empty());
}

const ENDPOINT: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumEndpoint
metadata: {name: web-0, namespace: shop}
status:
  id: 1711
  identity: {id: 4242, labels: ["k8s:app=web", "k8s:io.kubernetes.pod.namespace=shop"]}
  named-ports: [{name: http, port: 8080, protocol: TCP}]
  networking: {addressing: [{ipv4: 10.2.0.9, ipv6: "fd00::9"}], node: 192.0.2.2}
  state: ready
"#;

#[test]
fn an_endpoint_of_cilium_has_the_labels_of_its_identity() {
    let text = ENDPOINT;
    let endpoint = endpoint(text);
    assert_eq!(
        endpoint.labels.texts(),
        ["k8s:app=web", "k8s:io.kubernetes.pod.namespace=shop"]
    );
    assert_eq!(endpoint.addresses.len(), 2);
    assert_eq!(endpoint.ports.texts(), ["http=8080/TCP"]);
    let fresh = "apiVersion: cilium.io/v2\nkind: CiliumEndpoint\nmetadata: {name: web-0}\nstatus: {state: creating}\n";
    assert!(self::endpoint(fresh).addresses.is_empty());
}

const NODE: &str = r#"
apiVersion: v1
kind: Node
metadata: {name: worker-2}
spec: {podCIDR: 10.2.0.0/24, podCIDRs: [10.2.0.0/24, "fd00:2::/64"]}
status:
  addresses:
  - {address: 192.0.2.2, type: InternalIP}
  - {address: worker-2, type: Hostname}
  capacity: {cpu: "4"}
"#;

#[test]
fn a_node_of_kubernetes_is_a_node() {
    let text = NODE;
    let document = read(text).unwrap();
    let labels = document.labels(None, &|_| false).1;
    let labels: Vec<String> = labels
        .iter()
        .map(|(at, labels)| format!("{at} {}", labels.texts().join(",")))
        .collect();
    assert_eq!(
        labels,
        [
            "10.2.0.0/24 reserved:unmanaged",
            "192.0.2.2/32 reserved:remote-node",
            "fd00:2::/64 reserved:unmanaged"
        ]
    );
    let Body::Node(node) = document.body else {
        panic!("not a node");
    };
    assert_eq!(node.pod_blocks.len(), 2);
}

/// The last good version of a document consists of the fields that are kept of it.
#[test]
fn what_is_kept_of_an_object_is_read_as_the_object() {
    for text in [POD, SERVICE, SLICE, ENDPOINT, NODE] {
        let document = read(text).unwrap();
        let value = limits::yaml::documents(text)[0].value().unwrap();
        let kept = crate::policy::kinds::kept(&value);
        let again = crate::policy::parse::parse_value(&kept, "test").unwrap();
        assert_eq!(again, document);
    }
    let value = limits::yaml::documents(POD)[0].value().unwrap();
    let kept = crate::policy::kinds::kept(&value).to_string();
    assert!(
        kept.contains("podIPs") && !kept.contains("tolerations"),
        "{kept}"
    );
}
