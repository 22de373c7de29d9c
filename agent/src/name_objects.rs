//! DNSNameResolver objects and the names in them, as values: policies, the core and the resolver use
//! them.

pub(crate) mod dns_name;
pub mod object;

use std::collections::BTreeSet;

use dns_policy::name::Fqdn;

/// Names that EgressFirewalls use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WantedNames {
    /// Lower case, with the final dot; `*.` at the beginning means one label.
    pub names: BTreeSet<Fqdn>,
    /// Every policy document was read: no firewall uses a name that is not here. Until then no
    /// object is removed.
    pub is_complete: bool,
}
