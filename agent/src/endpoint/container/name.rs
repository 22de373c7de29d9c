//! Names of containers, as documents have them: `podman/web`.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// What runs a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Runtime {
    /// podman of root.
    Podman,
    Docker,
}

impl Runtime {
    const ALL: [Self; 2] = [Self::Podman, Self::Docker];

    fn text(self) -> &'static str {
        match self {
            Self::Podman => "podman",
            Self::Docker => "docker",
        }
    }
}

/// A container by its runtime and its name there.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ContainerName {
    runtime: Runtime,
    name: String,
}

/// A text that names no container.
#[derive(Debug, thiserror::Error)]
#[error(
    "container: `{}` names no container; write the runtime, podman or docker, and the name of the \
     container, for example podman/web",
    .0.escape_debug()
)]
pub struct ContainerNameError(String);

impl ContainerName {
    /// `None` if no container can have this name.
    pub(super) fn new(runtime: Runtime, name: String) -> Option<Self> {
        let known = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
        let good = name.bytes().all(known)
            && name.starts_with(|first: char| first.is_ascii_alphanumeric());
        good.then_some(Self { runtime, name })
    }

    pub(super) fn runtime(&self) -> Runtime {
        self.runtime
    }

    /// The container's name within the runtime.
    pub(super) fn name(&self) -> &str {
        &self.name
    }
}

impl fmt::Display for ContainerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.runtime.text(), self.name)
    }
}

impl FromStr for ContainerName {
    type Err = ContainerNameError;

    fn from_str(text: &str) -> Result<Self, ContainerNameError> {
        let parts = text.split_once('/');
        let found = parts.and_then(|(runtime, name)| {
            let mut all = Runtime::ALL.into_iter();
            Self::new(all.find(|known| known.text() == runtime)?, name.to_owned())
        });
        found.ok_or_else(|| ContainerNameError(text.to_owned()))
    }
}

impl TryFrom<String> for ContainerName {
    type Error = ContainerNameError;

    fn try_from(text: String) -> Result<Self, ContainerNameError> {
        text.parse()
    }
}

impl From<ContainerName> for String {
    fn from(name: ContainerName) -> Self {
        name.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_runtime_and_a_name_name_a_container() {
        for text in ["podman/web", "docker/web-1", "podman/0a_B.c"] {
            assert_eq!(text.parse::<ContainerName>().unwrap().to_string(), text);
        }
        for text in [
            "web",
            "lxc/web",
            "podman/",
            "podman/-web",
            "podman/a/b",
            "podman/a b",
            "podman/../x",
        ] {
            let error = text.parse::<ContainerName>().unwrap_err().to_string();
            assert!(
                error.contains(text) && error.contains("podman/web"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_line_feed_in_a_refused_name_is_escaped() {
        let error = "podman/web\nok: fine".parse::<ContainerName>().unwrap_err();
        let error = error.to_string();
        assert!(
            error.starts_with(r"container: `podman/web\nok: fine` names"),
            "{error}"
        );
        assert!(!error.contains('\n'), "{error}");
    }
}
