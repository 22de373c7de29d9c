//! `status`: how packets find this proxy, and what happens when a proxy leaves or hangs.

use std::fs;

use serde::{Deserialize, Serialize};

use crate::steering::SteeringStatus;

/// Setting of the kernel: whether connections that a closing listener has not accepted go to
/// another listener.
const MIGRATE: &str = "/proc/sys/net/ipv4/tcp_migrate_req";

/// Steering, for people and programs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Steering {
    /// Whether slots decide which packets come to this proxy.
    pub on: bool,
    /// Slots of this proxy; empty where the kernel's hash distributes packets.
    pub slots: Vec<u32>,
    /// Whether a replica loses no query when it leaves while another one runs.
    pub replacement_loses_nothing: bool,
    /// Whether a replica that hangs or was killed gets no new packets.
    pub failed_are_bypassed: bool,
    /// The state in a sentence, with the consequences and the remedy.
    pub text: String,
}

impl Steering {
    /// Derives the view from the state of the member, and from `net.ipv4.tcp_migrate_req`.
    pub(super) fn of(status: &SteeringStatus) -> Self {
        Self::judge(status, connections_migrate())
    }

    fn judge(status: &SteeringStatus, migrates: bool) -> Self {
        let without = |mut text: String| {
            text.push_str(
                "; the kernel's hash spreads queries over all proxies of the port, one that \
                 hangs keeps its share of them",
            );
            if !migrates {
                text.push_str(
                    "; one that leaves resets TCP connections it has not accepted yet, because \
                     net.ipv4.tcp_migrate_req is 0: set it to 1",
                );
            }
            (Vec::new(), migrates, false, text)
        };
        let (slots, replacement, failed, text) = match status {
            SteeringStatus::Joined(slots) => {
                (slots.clone(), true, true, format!("on: slots {slots:?}"))
            }
            SteeringStatus::Unavailable(why) => without(format!("none: {why}")),
            SteeringStatus::Full(why) => (Vec::new(), true, true, format!("none: {why}")),
            SteeringStatus::Waiting(why) => (
                Vec::new(),
                true,
                true,
                format!("none: no slot is taken before queries can be answered: {why}"),
            ),
            SteeringStatus::Off => without("off".to_owned()),
            SteeringStatus::Left => (
                Vec::new(),
                true,
                true,
                "left: the slots were given up".to_owned(),
            ),
        };
        Self {
            on: matches!(status, SteeringStatus::Joined(_)),
            slots,
            replacement_loses_nothing: replacement,
            failed_are_bypassed: failed,
            text,
        }
    }
}

/// Whether the kernel gives connections of a closing listener to another listener of its group.
pub(crate) fn connections_migrate() -> bool {
    fs::read_to_string(MIGRATE).is_ok_and(|value| value.trim() != "0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_slots_the_status_names_the_missing_properties() {
        let none = SteeringStatus::Unavailable("no pins".to_owned());
        let off = Steering::judge(&none, false);
        assert!(!off.replacement_loses_nothing && !off.failed_are_bypassed);
        assert!(off.text.contains("no pins") && off.text.contains("tcp_migrate_req"));
        let on = Steering::judge(&none, true);
        assert!(on.replacement_loses_nothing && !on.failed_are_bypassed);
        assert!(!on.text.contains("tcp_migrate_req"));
        let joined = Steering::judge(&SteeringStatus::Joined(vec![3]), false);
        assert!(joined.replacement_loses_nothing && joined.failed_are_bypassed);
    }
}
