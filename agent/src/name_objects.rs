//! DNSNameResolver objects and the names in them, as values: policies, the core and the resolver use
//! them.

pub mod dns_name;
pub mod object;

use std::collections::BTreeSet;

use dns_policy::name::Fqdn;

/// Names that EgressFirewalls use: lower case, with the final dot; `*.` at the beginning means one
/// label.
pub type WantedNames = BTreeSet<Fqdn>;
