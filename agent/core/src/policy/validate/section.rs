//! Which fields a rule may have, by its direction and its document.

/// Where the selectors of a document apply.
#[derive(Clone, Debug)]
pub(crate) struct Scope {
    /// Namespace of the document; `None` = cluster-wide.
    pub namespace: Option<String>,
}

/// A section of a rule: its direction, whether it denies, and the names of its fields.
pub(crate) struct Section {
    pub(crate) cidr: &'static str,
    pub(crate) cidr_set: &'static str,
    pub(crate) endpoints: &'static str,
    pub(crate) entities: &'static str,
    pub(crate) fqdns: Option<&'static str>,
    pub(crate) unsupported: &'static [&'static str],
    pub(crate) egress: bool,
    pub(crate) deny: bool,
}

pub(crate) const fn section(egress: bool, deny: bool) -> Section {
    if egress {
        Section {
            cidr: "toCIDR",
            cidr_set: "toCIDRSet",
            endpoints: "toEndpoints",
            entities: "toEntities",
            fqdns: Some("toFQDNs"),
            unsupported: &[
                "toServices",
                "toGroups",
                "toNodes",
                "toRequires",
                "authentication",
            ],
            egress,
            deny,
        }
    } else {
        Section {
            cidr: "fromCIDR",
            cidr_set: "fromCIDRSet",
            endpoints: "fromEndpoints",
            entities: "fromEntities",
            fqdns: None,
            unsupported: &["fromGroups", "fromNodes", "fromRequires", "authentication"],
            egress,
            deny,
        }
    }
}
