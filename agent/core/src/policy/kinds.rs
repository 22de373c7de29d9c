//! The kinds of documents, in one table: which apiVersions a kind has, which fields may stand at
//! its top, and its reader.

use std::{borrow::Cow, sync::Arc};

use netpol::field::{Checked, Field};
use serde_json::Value;

use super::{
    cidr_group,
    cluster::{
        endpoint, identity, name_resolver, namespace, node, pod, service, service_cidr, slice,
        world_cidrs,
    },
    document::Body,
    egress_firewall, network_policy,
    prune::prune,
    rule::Rule,
    validate::{rule, warnings},
};
use crate::policy::{head::Head, validate::section::Scope};

/// Whether documents of a kind are in namespaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::policy) enum Placement {
    /// In `default` unless they name one.
    Namespaced,
    /// In no namespace. One that they name means nothing.
    ClusterWide,
    /// In no namespace, and they must not name one.
    NeverNamespaced,
}

/// Reads a document; adds to `warnings` the remarks for its author.
pub(in crate::policy) type Reader = fn(&Head, &Value, &mut Vec<String>) -> Checked<Body>;

/// A kind of document: its versions, its fields and its reader.
pub(in crate::policy) struct Kind {
    pub(in crate::policy) name: &'static str,
    /// Its apiVersions; the first is the one to write.
    pub(in crate::policy) versions: &'static [&'static str],
    pub(in crate::policy) placement: Placement,
    /// Fields beside apiVersion, kind and metadata.
    pub(in crate::policy) fields: &'static [&'static str],
    /// Paths of the fields that have a meaning ([`super::prune`]); empty = all of the document.
    pub(in crate::policy) kept: &'static [&'static str],
    pub(in crate::policy) read: Reader,
}

/// The namespace of documents that name none.
const DEFAULT: &str = "default";

/// The value of [`Kind::kept`] that keeps every field.
const ALL: &[&str] = &[];

/// Fields of every document that are kept.
const HEAD: [&str; 4] = ["apiVersion", "kind", "metadata.name", "metadata.namespace"];

/// Every kind that is read.
pub(in crate::policy) const KINDS: &[Kind] = &[
    Kind {
        name: "CiliumNetworkPolicy",
        versions: &["cilium.io/v2"],
        placement: Placement::Namespaced,
        fields: &["spec", "specs", "status"],
        kept: ALL,
        read: cilium_policy,
    },
    Kind {
        name: "CiliumClusterwideNetworkPolicy",
        versions: &["cilium.io/v2"],
        placement: Placement::NeverNamespaced,
        fields: &["spec", "specs", "status"],
        kept: ALL,
        read: cilium_policy,
    },
    Kind {
        name: netpol::read::KIND,
        versions: &[netpol::read::API_VERSION],
        placement: Placement::Namespaced,
        fields: &["spec", "status"],
        kept: ALL,
        read: |_, value, warnings| network_policy::read(value, warnings),
    },
    Kind {
        name: egress_firewall::KIND,
        versions: &[egress_firewall::API_VERSION],
        placement: Placement::Namespaced,
        fields: &["spec", "status"],
        // The status says whether the agents refused it.
        kept: &["spec", "status.status", "status.messages"],
        read: |head, value, warnings| {
            let rule = egress_firewall::read(head, value, warnings)?;
            Ok(Body::Rules(vec![rule]))
        },
    },
    Kind {
        name: name_resolver::KIND,
        versions: &[name_resolver::API_VERSION],
        placement: Placement::Namespaced,
        fields: &["spec", "status"],
        kept: name_resolver::KEPT,
        read: |head, value, warnings| {
            let object = name_resolver::read(head, value, warnings)?;
            Ok(Body::NameResolver(Arc::new(object)))
        },
    },
    Kind {
        name: cidr_group::KIND,
        versions: &["cilium.io/v2", "cilium.io/v2alpha1"],
        placement: Placement::ClusterWide,
        fields: &["spec", "status"],
        kept: ALL,
        read: |head, value, _| Ok(Body::Group(cidr_group::read(&head.name, value)?)),
    },
    Kind {
        name: "CiliumNode",
        versions: &["cilium.io/v2"],
        placement: Placement::ClusterWide,
        fields: &["spec", "status"],
        kept: ALL,
        read: |head, value, warnings| {
            Ok(Body::Node(node::read_cilium(&head.name, value, warnings)?))
        },
    },
    Kind {
        name: "CiliumEndpoint",
        versions: &["cilium.io/v2"],
        placement: Placement::Namespaced,
        fields: &["spec", "status"],
        kept: &[
            "metadata.creationTimestamp",
            "status.identity",
            "status.networking",
            "status.named-ports",
        ],
        read: |head, value, _| Ok(Body::Endpoint(Arc::new(endpoint::read(head, value)?))),
    },
    Kind {
        name: "CiliumIdentity",
        versions: &["cilium.io/v2"],
        placement: Placement::ClusterWide,
        fields: &["security-labels"],
        kept: identity::KEPT,
        read: |head, value, _| Ok(Body::Identity(identity::read(head, value)?)),
    },
    Kind {
        name: "CiliumWorldCIDRs",
        versions: &["cilium.io/v2alpha1"],
        placement: Placement::ClusterWide,
        fields: &["spec"],
        kept: world_cidrs::KEPT,
        read: |_, value, _| Ok(Body::World(world_cidrs::read(value)?)),
    },
    Kind {
        name: "Pod",
        versions: &["v1"],
        placement: Placement::Namespaced,
        fields: &["spec", "status"],
        kept: &[
            "metadata.labels",
            "metadata.uid",
            "metadata.annotations",
            "metadata.creationTimestamp",
            "spec.nodeName",
            "spec.hostNetwork",
            "spec.serviceAccountName",
            "spec.serviceAccount",
            "spec.containers[].ports",
            "spec.initContainers[].ports",
            "spec.initContainers[].restartPolicy",
            "status.phase",
            "status.podIP",
            "status.podIPs",
        ],
        read: |head, value, warnings| Ok(Body::Pod(Arc::new(pod::read(head, value, warnings)?))),
    },
    Kind {
        name: "Namespace",
        versions: &["v1"],
        placement: Placement::ClusterWide,
        fields: &["spec", "status"],
        kept: &["metadata.labels", "metadata.uid"],
        read: |head, value, _| Ok(Body::Namespace(Arc::new(namespace::read(head, value)?))),
    },
    Kind {
        name: "Node",
        versions: &["v1"],
        placement: Placement::ClusterWide,
        fields: &["spec", "status"],
        kept: &[
            "metadata.labels",
            "spec.podCIDR",
            "spec.podCIDRs",
            "status.addresses",
        ],
        read: |head, value, warnings| Ok(Body::Node(node::read(&head.name, value, warnings)?)),
    },
    Kind {
        name: "Service",
        versions: &["v1"],
        placement: Placement::Namespaced,
        fields: &["spec", "status"],
        kept: &[
            "metadata.labels",
            "spec.clusterIP",
            "spec.clusterIPs",
            "spec.externalIPs",
            "spec.ports",
            "spec.selector",
            "status.loadBalancer",
        ],
        read: |head, value, _| Ok(Body::Service(Arc::new(service::read(head, value)?))),
    },
    Kind {
        name: "ServiceCIDR",
        versions: &["networking.k8s.io/v1"],
        placement: Placement::ClusterWide,
        fields: &["spec", "status"],
        kept: &["spec.cidrs"],
        read: |_, value, _| Ok(Body::ServiceCidr(service_cidr::read(value)?)),
    },
    Kind {
        name: "EndpointSlice",
        versions: &["discovery.k8s.io/v1"],
        placement: Placement::Namespaced,
        fields: &["addressType", "endpoints", "ports"],
        kept: &[
            "metadata.labels",
            "addressType",
            "endpoints[].addresses",
            "endpoints[].conditions",
            "endpoints[].targetRef",
            "ports",
        ],
        read: |head, value, warnings| {
            Ok(Body::Slice(Arc::new(slice::read(head, value, warnings)?)))
        },
    },
];

/// Reads kind and metadata of a document: its kind, its key, and its head.
pub(in crate::policy) fn head(value: &Value) -> Checked<(&'static Kind, String, Head)> {
    let top = Field::top(value);
    if !top.is_mapping() {
        return top.refuse("is not a mapping", "start it with apiVersion and kind");
    }
    let text = |field: &Field<'_>| {
        let text = field.as_str().filter(|text| !text.is_empty());
        text.map(str::to_owned)
    };
    let (named, placed) = (
        top.get("metadata").get("name"),
        top.get("metadata").get("namespace"),
    );
    let kind = by_name(&top.get("kind"), text(&named))?;
    let known =
        |key: &str| ["apiVersion", "kind", "metadata"].contains(&key) || kind.fields.contains(&key);
    if let Some((word, other)) = top.entries().find(|(key, _)| !known(key)) {
        let fields = [&["apiVersion", "kind", "metadata"], kind.fields].concat();
        return other.refuse("is an unknown field", nearest::remedy(word, &fields));
    }
    let version = top.get("apiVersion");
    let written = version.as_str().unwrap_or_default();
    if !kind.versions.contains(&written) {
        let wanted = kind.versions.first().copied().unwrap_or_default();
        let remedy = format!(
            "write apiVersion: {wanted}, which is that of the {} read here",
            kind.name
        );
        return version.refuse(format!("is `{written}`"), remedy);
    }
    let name = text(&named).ok_or_else(|| named.fault("is missing", "give the document a name"))?;
    let namespace = match (kind.placement, text(&placed)) {
        (Placement::Namespaced, namespace) => namespace.or_else(|| Some(DEFAULT.to_owned())),
        (Placement::NeverNamespaced, Some(_)) => {
            let remedy = "remove it, or use kind CiliumNetworkPolicy";
            return placed.refuse("is set on a cluster-wide policy", remedy);
        }
        _ => None,
    };
    let key = key(kind.name, namespace.as_deref(), &name);
    Ok((kind, key, Head { namespace, name }))
}

fn key(kind: &str, namespace: Option<&str>, name: &str) -> String {
    match namespace {
        Some(namespace) => format!("{kind}/{namespace}/{name}"),
        None => format!("{kind}/{name}"),
    }
}

fn find(name: &str) -> Option<&'static Kind> {
    KINDS.iter().find(|kind| kind.name == name)
}

/// Groups of Kubernetes whose objects are no policies. kubectl prints them beside those that are
/// read.
const WITHOUT_POLICIES: [&str; 12] = [
    "", // v1
    "apiextensions.k8s.io",
    "apiregistration.k8s.io",
    "apps",
    "autoscaling",
    "batch",
    "coordination.k8s.io",
    "discovery.k8s.io",
    "events.k8s.io",
    "rbac.authorization.k8s.io",
    "scheduling.k8s.io",
    "storage.k8s.io",
];

/// Key of an object whose head is refused: of one of [`WITHOUT_POLICIES`] whose kind is not read, or
/// of a document with an unknown field.
pub(in crate::policy) fn key_of_refused(value: &Value) -> Option<String> {
    let text = |field: &str| value.get(field)?.as_str().filter(|text| !text.is_empty());
    let metadata = |field: &str| {
        let field = value.get("metadata")?.get(field)?.as_str();
        field.filter(|text| !text.is_empty())
    };
    let (kind, version) = (text("kind")?, text("apiVersion")?);
    let namespace = metadata("namespace");
    let namespace = match find(kind).map(|kind| (kind.placement, kind.versions)) {
        Some((_, versions)) if !versions.contains(&version) => return None,
        Some((Placement::Namespaced, _)) => namespace.or(Some(DEFAULT)),
        Some((Placement::NeverNamespaced, _)) if namespace.is_some() => return None,
        Some(_) => None,
        None => {
            let group = version.rsplit_once('/').map_or("", |(group, _)| group);
            if !WITHOUT_POLICIES.contains(&group) {
                return None;
            }
            namespace
        }
    };
    Some(key(kind, namespace, metadata("name")?))
}

/// Whether documents of this kind are read.
pub fn is_read(kind: &str) -> bool {
    find(kind).is_some()
}

/// The fields of a document that mean something: its reader reads the same from them.
pub(in crate::policy) fn kept(value: &Value) -> Cow<'_, Value> {
    let kind = value.get("kind").and_then(Value::as_str).and_then(find);
    match kind.filter(|kind| !kind.kept.is_empty()) {
        Some(kind) => Cow::Owned(prune(value, &[&HEAD, kind.kept].concat())),
        None => Cow::Borrowed(value),
    }
}

/// Paths of the fields of a kind that have a meaning; empty = all of the document.
pub fn kept_fields(kind: &str) -> &'static [&'static str] {
    find(kind).map_or(ALL, |kind| kind.kept)
}

fn by_name(field: &Field<'_>, of: Option<String>) -> Checked<&'static Kind> {
    let name = field.as_str().unwrap_or_default();
    if name.is_empty() {
        let reason = "is missing: the document ends early, or is no object of Kubernetes";
        let remedy = "write the file again, under another name, and rename it when it is complete";
        return field.refuse(reason, remedy);
    }
    find(name).ok_or_else(|| {
        let of = of.map(|of| format!(" {of}")).unwrap_or_default();
        let names: Vec<&str> = KINDS.iter().map(|kind| kind.name).collect();
        let names = names.join(", ");
        let remedy = format!("remove the document{of}, or write it as one of {names}");
        field.fault(format!("`{name}` is not supported"), remedy)
    })
}

/// Reads a `CiliumNetworkPolicy` or a `CiliumClusterwideNetworkPolicy`.
fn cilium_policy(head: &Head, value: &Value, found: &mut Vec<String>) -> Checked<Body> {
    let scope = Scope {
        namespace: head.namespace.clone(),
    };
    let top = Field::top(value);
    let (spec, specs) = (top.get("spec"), top.get("specs"));
    let rules: Vec<Rule> = match (spec.value, specs.value) {
        (Some(_), None) => vec![rule(&spec, &scope)?],
        (None, Some(Value::Array(all))) if !all.is_empty() => {
            let all = specs.items()?.map(|spec| rule(&spec, &scope));
            all.collect::<Checked<_>>()?
        }
        (Some(_), Some(_)) => return specs.refuse("stands beside spec", "use one of the two"),
        _ => return spec.refuse("is missing", "add spec with an endpointSelector"),
    };
    found.extend(warnings(&rules));
    Ok(Body::Rules(rules))
}
