//! Whether endpoints are restricted: `--enable-policy`, and an endpoint's own `enable-policy`.
//!
//! An endpoint's own mode is a label that the agent makes, so that endpoints with different modes
//! have different identities, and policy stays a function of labels.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::labels::{GENERATED, Label, LabelSet};

const KEY: &str = "holdfast.enable-policy";

/// When an endpoint is restricted (Cilium's names and meanings).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum PolicyMode {
    /// In each direction once a policy restricts it
    #[default]
    Default,
    /// Always: without a policy nothing passes but what the node itself sends
    Always,
    /// Never: policies have no effect
    Never,
}

impl PolicyMode {
    const ALL: [Self; 3] = [Self::Default, Self::Always, Self::Never];

    /// The name, as flags and labels spell it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Always => "always",
            Self::Never => "never",
        }
    }

    /// The label that gives it to an endpoint.
    pub fn label(self) -> Label {
        Label::new(GENERATED, KEY, self.as_str())
    }

    /// Whether a label gives an endpoint a mode of its own.
    pub fn is_label(label: &Label) -> bool {
        label.source() == GENERATED && label.key() == KEY
    }

    /// The mode that an endpoint's labels give it.
    pub fn of(labels: &LabelSet) -> Option<Self> {
        let label = labels.iter().find(|label| Self::is_label(label))?;
        let mut modes = Self::ALL.into_iter();
        modes.find(|mode| mode.as_str() == label.value())
    }

    /// Whether a direction is restricted.
    pub fn enforces(self, policy_restricts: bool) -> bool {
        match self {
            Self::Default => policy_restricts,
            Self::Always => true,
            Self::Never => false,
        }
    }
}

impl fmt::Display for PolicyMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mode_is_read_back_from_its_label() {
        for mode in PolicyMode::ALL {
            let labels = LabelSet::new(vec![mode.label(), Label::new("k8s", "app", "web")]);
            assert_eq!(PolicyMode::of(&labels), Some(mode));
        }
        let other = LabelSet::new(vec![Label::new("k8s", KEY, "always")]);
        assert_eq!(PolicyMode::of(&other), None);
    }
}
