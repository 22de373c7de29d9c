//! What happens to a packet, as far as this node can decide.

use serde::{Deserialize, Serialize};

/// What happens to packets, from the worst to the best.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// Policy drops them, or a Service has no backend for them.
    #[default]
    Denied,
    /// A map that decides could not be read.
    Unknown,
    /// A Service passes them on to backends of which some accept them and some drop them.
    Depends,
    /// This node lets them pass. Another node judges the other side.
    Unchecked,
    /// Every policy that counts lets them pass.
    Allowed,
}

impl Outcome {
    /// The outcome at a side whose map was read; `None` if the map could not be read.
    pub const fn of(passes: Option<bool>) -> Self {
        match passes {
            Some(true) => Self::Allowed,
            Some(false) => Self::Denied,
            None => Self::Unknown,
        }
    }

    /// Whether every policy that this node can judge lets them pass.
    pub fn passes(self) -> bool {
        self >= Self::Unchecked
    }

    /// The outcome of packets that go to any one of these backends. Without a backend, the node refuses
    /// them.
    pub fn of_backends(outcomes: impl IntoIterator<Item = Self>) -> Self {
        let outcomes = outcomes.into_iter();
        let ends = outcomes.fold(None, |ends: Option<(Self, Self)>, one| {
            let (worst, best) = ends.unwrap_or((one, one));
            Some((worst.min(one), best.max(one)))
        });
        match ends {
            None => Self::Denied,
            Some((Self::Denied, best)) if best > Self::Denied => Self::Depends,
            Some((worst, _)) => worst,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Outcome::{self, Allowed, Denied, Depends, Unchecked, Unknown};

    #[test]
    fn a_service_is_as_open_as_all_of_its_backends_together() {
        for (backends, together) in [
            (&[][..], Denied),
            (&[Allowed, Allowed], Allowed),
            (&[Denied, Denied], Denied),
            (&[Allowed, Denied], Depends),
            (&[Denied, Unchecked], Depends),
            (&[Allowed, Unchecked], Unchecked),
            (&[Unknown, Unchecked], Unknown),
        ] {
            let found = Outcome::of_backends(backends.iter().copied());
            assert_eq!(found, together, "{backends:?}");
            assert_eq!(found.passes(), matches!(together, Allowed | Unchecked));
        }
    }
}
