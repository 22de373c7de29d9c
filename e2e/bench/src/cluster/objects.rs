//! Objects of a large cluster in the form of an API server. They also have the fields that an agent
//! does not use, because it has to skip these.

use std::net::Ipv4Addr;

use serde_json::{Value, json};

/// Number of namespaces that the pods are spread over.
pub(crate) const NAMESPACES: usize = 50;
/// Number of pods that have equal labels.
const REPLICAS: usize = 10;
/// Number of backends of each Service.
const BACKENDS: usize = 5;

/// How many objects there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size {
    pub(crate) pods: usize,
    pub(crate) nodes: usize,
    pub(crate) services: usize,
}

/// Namespace of pod or Service `number`.
pub(crate) fn namespace_of(number: usize) -> String {
    format!("ns-{}", number / REPLICAS % NAMESPACES)
}

pub(crate) fn pod_name(number: usize) -> String {
    format!("app-{}-5d9c7b8f6d-{number:05}", number / REPLICAS)
}

pub(crate) fn address(number: usize) -> Ipv4Addr {
    Ipv4Addr::from_bits(0x0a80_0000 + u32::try_from(number).unwrap_or(u32::MAX))
}

pub(crate) fn service_address(number: usize) -> Ipv4Addr {
    Ipv4Addr::from_bits(0x0a60_0000 + u32::try_from(number).unwrap_or(u32::MAX))
}

pub(crate) fn node_address(number: usize) -> Ipv4Addr {
    Ipv4Addr::from_bits(0x0ac0_0000 + u32::try_from(number).unwrap_or(u32::MAX))
}

pub(crate) fn namespace(number: usize) -> Value {
    let name = format!("ns-{number}");
    json!({
        "apiVersion": "v1", "kind": "Namespace",
        "metadata": {"name": name, "labels": {
            "kubernetes.io/metadata.name": name,
            "team": format!("team-{}", number % 7),
            "pod-security.kubernetes.io/enforce": "baseline",
        }},
    })
}

/// A pod of another node. Its label `track` is `track`.
pub(crate) fn pod(number: usize, track: &str) -> Value {
    let address = address(number).to_string();
    let app = number / REPLICAS;
    let conditions = ["Initialized", "Ready", "ContainersReady", "PodScheduled"].map(|kind| {
        json!({
            "type": kind, "status": "True", "lastProbeTime": null,
            "lastTransitionTime": "2026-01-31T10:00:00Z",
        })
    });
    let statuses = ["server", "sidecar"].map(|name| {
        json!({
            "name": name, "ready": true, "started": true, "restartCount": 0,
            "image": format!("registry.example.org/team/{name}:v1.2.3"),
            "imageID": format!("registry.example.org/team/{name}@sha256:{number:064x}"),
            "containerID": format!("containerd://{number:064x}"),
            "state": {"running": {"startedAt": "2026-01-31T10:00:00Z"}},
        })
    });
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "namespace": namespace_of(number),
            "name": pod_name(number),
            "generateName": format!("app-{app}-5d9c7b8f6d-"),
            "labels": {
                "app": format!("app-{app}"),
                "app.kubernetes.io/name": format!("app-{app}"),
                "app.kubernetes.io/component": "server",
                "track": track,
                "pod-template-hash": "5d9c7b8f6d",
            },
            "annotations": {"checksum/config": format!("{number:064x}")},
            "ownerReferences": [{
                "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": format!("app-{app}-5d9c7b8f6d"),
                "uid": format!("00000000-0000-4000-9000-{app:012x}"), "controller": true,
                "blockOwnerDeletion": true,
            }],
            "managedFields": managed_fields(),
        },
        "spec": {
            "nodeName": format!("node-{}", number % 5000),
            "serviceAccountName": format!("app-{app}"),
            "containers": [container("server", 8080), container("sidecar", 9090)],
            "volumes": [{"name": "kube-api-access-x7k2p", "projected": {"defaultMode": 420, "sources": [
                {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
                {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
            ]}}],
            "tolerations": [
                {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300},
                {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300},
            ],
            "restartPolicy": "Always", "dnsPolicy": "ClusterFirst", "schedulerName": "default-scheduler",
        },
        "status": {
            "phase": "Running", "podIP": address, "podIPs": [{"ip": address}],
            "hostIP": node_address(number % 5000).to_string(),
            "conditions": conditions,
            "containerStatuses": statuses,
        },
    })
}

fn container(name: &str, port: u16) -> Value {
    let variables: Vec<Value> = (0..12)
        .map(|n| json!({"name": format!("SETTING_{n}"), "value": format!("value-of-setting-{n}")}))
        .collect();
    json!({
        "name": name, "image": format!("registry.example.org/team/{name}:v1.2.3"),
        "imagePullPolicy": "IfNotPresent",
        "ports": [{"name": if port == 8080 { "http" } else { "metrics" }, "containerPort": port, "protocol": "TCP"}],
        "env": variables,
        "resources": {"limits": {"cpu": "1", "memory": "256Mi"}, "requests": {"cpu": "100m", "memory": "128Mi"}},
        "readinessProbe": {"httpGet": {"path": "/ready", "port": port, "scheme": "HTTP"}, "periodSeconds": 10},
        "volumeMounts": [{"name": "kube-api-access-x7k2p", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "readOnly": true}],
    })
}

/// Three kilobytes that each object carries about the programs that wrote it.
fn managed_fields() -> Value {
    let fields: serde_json::Map<String, Value> = (0..24)
        .map(|n| {
            let owned =
                json!({".": {}, "f:name": {}, "f:value": {}, "f:valueFrom": {"f:fieldRef": {}}});
            (format!("k:{{\"name\":\"SETTING_{n}\"}}"), owned)
        })
        .collect();
    json!([{
        "manager": "kube-controller-manager", "operation": "Update", "apiVersion": "v1",
        "time": "2026-01-31T10:00:00Z", "fieldsType": "FieldsV1",
        "fieldsV1": {"f:metadata": {"f:labels": {}}, "f:spec": {"f:containers": fields}},
    }])
}

pub(crate) fn service(number: usize) -> Value {
    let address = service_address(number).to_string();
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {
            "namespace": namespace_of(number * REPLICAS), "name": format!("svc-{number}"),
            "labels": {"app": format!("app-{number}")},
        },
        "spec": {
            "type": "ClusterIP", "clusterIP": address, "clusterIPs": [address],
            "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack",
            "internalTrafficPolicy": "Cluster", "sessionAffinity": "None",
            "selector": {"app": format!("app-{number}")},
            "ports": [{"name": "http", "protocol": "TCP", "port": 80, "targetPort": "http"}],
        },
        "status": {"loadBalancer": {}},
    })
}

/// The slice of Service `number`: five of the first `pods` pods. `rolled` of them have been
/// replaced.
pub(crate) fn slice(number: usize, pods: usize, rolled: usize) -> Value {
    let backends: Vec<Value> = (0..BACKENDS)
        .map(|n| {
            let shift = if n < rolled { REPLICAS / 2 } else { 0 };
            let pod = (number * REPLICAS + n + shift) % pods.max(1);
            json!({
                "addresses": [address(pod).to_string()],
                "conditions": {"ready": true, "serving": true, "terminating": false},
                "nodeName": format!("node-{}", pod % 5000),
                "targetRef": {
                    "kind": "Pod", "namespace": namespace_of(pod), "name": pod_name(pod),
                    "uid": format!("00000000-0000-4000-8000-{pod:012x}"),
                },
            })
        })
        .collect();
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "namespace": namespace_of(number * REPLICAS), "name": format!("svc-{number}-x2k4p"),
            "generateName": format!("svc-{number}-"),
            "labels": {
                "kubernetes.io/service-name": format!("svc-{number}"),
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
            },
        },
        "addressType": "IPv4",
        "endpoints": backends,
        "ports": [{"name": "http", "protocol": "TCP", "port": 8080}],
    })
}

/// A node, with one address more if it is given.
pub(crate) fn node(number: usize, more: Option<Ipv4Addr>) -> Value {
    let block = Ipv4Addr::from_bits(0x6440_0000 + (u32::try_from(number).unwrap_or(0) << 8));
    let mut addresses = vec![
        json!({"type": "InternalIP", "ip": node_address(number).to_string()}),
        json!({"type": "CiliumInternalIP", "ip": Ipv4Addr::from_bits(block.to_bits() + 1).to_string()}),
    ];
    addresses.extend(more.map(|ip| json!({"type": "InternalIP", "ip": ip.to_string()})));
    json!({
        "apiVersion": "cilium.io/v2", "kind": "CiliumNode",
        "metadata": {
            "name": format!("node-{number}"),
            "labels": {"kubernetes.io/hostname": format!("node-{number}"), "kubernetes.io/os": "linux"},
            "ownerReferences": [{
                "apiVersion": "v1", "kind": "Node", "name": format!("node-{number}"),
                "uid": format!("00000000-0000-4000-a000-{number:012x}"),
            }],
        },
        "spec": {"addresses": addresses, "ipam": {"podCIDRs": [format!("{block}/24")]}},
    })
}

/// Web may reach a part of the pods, by labels.
pub(crate) fn policy() -> Value {
    json!({
        "apiVersion": "cilium.io/v2", "kind": "CiliumNetworkPolicy",
        "metadata": {"name": "web", "namespace": "ns-0"},
        "spec": {
            "endpointSelector": {"matchLabels": {"app": "web"}},
            "egress": [
                {"toEndpoints": [{"matchLabels": {
                    "track": "stable",
                    "k8s:io.cilium.k8s.namespace.labels.team": "team-1",
                }}]},
                {
                    "toEndpoints": [{"matchLabels": {"track": "canary"}}],
                    "toPorts": [{"ports": [{"port": "8080", "protocol": "TCP"}]}],
                },
            ],
        },
    })
}
