//! Which objects should exist: one for each name that EgressFirewalls use.

use std::collections::{BTreeMap, BTreeSet};

use agent_core::name_objects::MAX_OBJECTS;
use dns_policy::name::Fqdn;

use super::object::ObjectKey;

/// Maximum number of object names that are tried for one DNS name if the first is taken.
const COLLISIONS: u64 = 10;
/// Letters and digits of which no words can be made.
const ALPHABET: &[u8; 27] = b"bcdfghjklmnpqrstvwxz2456789";

/// Objects to make and to remove.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Objects to make, each with its DNS name.
    pub create: Vec<(ObjectKey, Fqdn)>,
    /// Objects that no EgressFirewall needs, or that are about the name of another object.
    pub delete: Vec<ObjectKey>,
    /// Names that get no object: there are too many, or the names of their objects are taken.
    pub left_out: usize,
}

/// The objects to make and to remove, so that each wanted DNS name has one object in `namespace`.
/// `objects` are the existing objects, each with its DNS name.
pub fn plan(wanted: &BTreeSet<Fqdn>, objects: &BTreeMap<ObjectKey, Fqdn>, namespace: &str) -> Plan {
    let mut plan = Plan::default();
    let mut missing = wanted.clone();
    let mut first = objects.iter().collect::<Vec<_>>();
    // If two objects have one DNS name, the object stays whose own name is derived from the DNS name.
    first.sort_by_cached_key(|(key, name)| key.name != object_name(name, 0));
    for (key, name) in first {
        if !missing.remove(name) {
            plan.delete.push(key.clone());
        }
    }
    let mut taken: BTreeSet<String> = objects.keys().map(|key| key.name.clone()).collect();
    for name in missing {
        let has_room = taken.len() < MAX_OBJECTS;
        let mut names = (0..=COLLISIONS).map(|count| object_name(&name, count));
        let free = names.find(|name| !taken.contains(name));
        let Some(free) = free.filter(|_| has_room) else {
            plan.left_out += 1;
            continue;
        };
        taken.insert(free.clone());
        let key = ObjectKey {
            namespace: namespace.to_owned(),
            name: free,
        };
        plan.create.push((key, name));
    }
    plan
}

/// `metadata.name` of the object of a name, as OVN-Kubernetes makes it; `collisions` is the number
/// of names that were taken by other objects.
pub(crate) fn object_name(name: &Fqdn, collisions: u64) -> String {
    let mut hash = 0x811c_9dc5_u32;
    let mut add = |bytes: &[u8]| {
        for byte in bytes {
            hash = (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
        }
    };
    add(b"(string)");
    add(name.as_str().as_bytes());
    if collisions > 0 {
        add(&collisions.to_le_bytes());
    }
    let letter = |digit: u8| char::from(ALPHABET[usize::from(digit) % ALPHABET.len()]);
    let digits = hash.to_string();
    format!("dns-{}", digits.bytes().map(letter).collect::<String>())
}
