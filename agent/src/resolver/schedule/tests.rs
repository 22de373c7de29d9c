//! Names that the schedule has no room for.

use super::*;
use crate::resolver::object::{NameStatus, Version};

/// An object of a wildcard that found this many names.
fn wildcard(key: &str, names: usize) -> Resolver {
    let entry = |n| NameStatus {
        name: Fqdn::normalise(&format!("n{n}.{key}.test")),
        addresses: Vec::new(),
        failures: 0,
        degraded: None,
    };
    Resolver {
        key: ObjectKey {
            namespace: "n".to_owned(),
            name: key.to_owned(),
        },
        version: Version::default(),
        name: Fqdn::normalise(&format!("*.{key}.test")),
        status: Status {
            names: (0..names).map(entry).collect(),
        },
    }
}

#[test]
fn names_without_room_are_counted_while_their_object_has_them() {
    let mut schedule = Schedule::new(Settings::default());
    schedule.apply(&wildcard("many", MAX_PLANNED - 1), UnixTime(0));
    assert_eq!(schedule.left_out(), 0);
    let found = wildcard("more", 3);
    schedule.apply(&found, UnixTime(0));
    schedule.apply(&found, UnixTime(1));
    assert_eq!(schedule.left_out(), 3);
    schedule.remove(&found.key);
    assert_eq!(schedule.left_out(), 0);
}
