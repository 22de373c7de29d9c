//! `DNSNameResolver` of OpenShift (`network.openshift.io/v1alpha1`): addresses of a name.

use netpol::field::{Checked, Field};
use serde_json::Value;

pub(in crate::policy) use crate::name_objects::object::{API_VERSION, KIND};
use crate::{
    name_objects::object::{ObjectError, Resolver},
    policy::head::Head,
};

/// Fields that have a meaning. `metadata.resourceVersion` is one, because a new status is written only to
/// the version of the object from which it was computed.
pub(in crate::policy) const KEPT: &[&str] = &[
    "metadata.resourceVersion",
    "spec.name",
    "status.resolvedNames",
];

/// Reads a document. A part of its status that cannot be used is left out, with a warning.
pub(in crate::policy) fn read(
    head: &Head,
    value: &Value,
    warnings: &mut Vec<String>,
) -> Checked<Resolver> {
    let namespace = head.namespace.as_deref().unwrap_or_default();
    let read = Resolver::read(value, namespace).map_err(|error| {
        let top = Field::top(value);
        let field = match &error {
            ObjectError::Name { .. } => top.get("spec").get("name"),
            ObjectError::Kind { .. } => top.get("kind"),
            ObjectError::Shape(_) => top.get("spec"),
        };
        let remedy = "remove the object; the resolver makes it again if an EgressFirewall uses it";
        field.fault(error.to_string(), remedy)
    })?;
    warnings.extend(read.flaws);
    Ok(read.object)
}
