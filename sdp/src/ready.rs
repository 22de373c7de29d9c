//! Readiness as a list of named requirements that are not met yet.

use std::{collections::BTreeMap, fmt, sync::Arc};

use parking_lot::Mutex;

shared_maps::words! {
    /// A condition that must hold before the proxy is ready.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Need {
        /// The sockets of the listeners are bound and read.
        Listeners => "listeners",
        /// Rules, from the agent or from disk.
        Rules => "rules",
        /// The pinned maps, or the agent's tables in their place.
        Endpoints => "endpoints",
        /// A slot, where the datapath steers packets by slots: without one none comes here.
        Steering => "steering",
        /// The process is not draining.
        Staying => "staying",
    }
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The missing requirements with their reasons. Cheap to clone; all clones share one state.
#[derive(Clone, Debug, Default)]
pub struct Readiness {
    missing: Arc<Mutex<BTreeMap<Need, String>>>,
}

impl Readiness {
    /// Notes that `need` is missing.
    pub fn block(&self, need: Need, reason: impl Into<String>) {
        self.missing.lock().insert(need, reason.into());
    }

    /// Notes that `need` is met.
    pub fn unblock(&self, need: Need) {
        self.missing.lock().remove(&need);
    }

    pub fn is_ready(&self) -> bool {
        self.missing.lock().is_empty()
    }

    pub fn is_missing(&self, need: Need) -> bool {
        self.missing.lock().contains_key(&need)
    }

    /// The missing requirements with their reasons. Slots are taken only when there are rules and
    /// endpoints. While one of these is missing, steering is not listed.
    pub fn missing(&self) -> Vec<(Need, String)> {
        let missing = self.missing.lock();
        let follows = [Need::Rules, Need::Endpoints]
            .iter()
            .any(|need| missing.contains_key(need));
        missing
            .iter()
            .filter(|(need, _)| !(follows && **need == Need::Steering))
            .map(|(need, why)| (*need, why.clone()))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_when_nothing_is_missing() {
        let ready = Readiness::default();
        ready.block(Need::Rules, "no agent yet");
        ready.block(Need::Listeners, "not bound");
        ready.clone().unblock(Need::Listeners);
        assert!(!ready.is_ready());
        assert_eq!(ready.missing(), [(Need::Rules, "no agent yet".to_owned())]);
        ready.unblock(Need::Rules);
        assert!(ready.is_ready());
    }

    #[test]
    fn steering_is_named_when_rules_and_endpoints_exist() {
        let ready = Readiness::default();
        ready.block(Need::Steering, "it waits for rules");
        ready.block(Need::Rules, "no agent yet");
        assert_eq!(ready.missing(), [(Need::Rules, "no agent yet".to_owned())]);
        ready.unblock(Need::Rules);
        assert!(!ready.is_ready());
        let waits = (Need::Steering, "it waits for rules".to_owned());
        assert_eq!(ready.missing(), [waits]);
    }
}
