//! The command and its parameters, from the environment.

use crate::failure::Failure;

/// A command of the specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Add,
    Del,
    Check,
    Gc,
    Status,
    Version,
}

/// Variables that a runtime sets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Environment {
    pub(crate) command: Command,
    pub(crate) container: String,
    pub(crate) netns: String,
    pub(crate) ifname: String,
    /// `CNI_ARGS`: pairs `KEY=value`, separated by semicolons.
    arguments: String,
}

impl Environment {
    /// Reads the variables by `variable`, and checks those that the command needs.
    pub(crate) fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Self, Failure> {
        let value = |name: &str| variable(name).unwrap_or_default();
        let command = match value("CNI_COMMAND").as_str() {
            "ADD" => Command::Add,
            "DEL" => Command::Del,
            "CHECK" => Command::Check,
            "GC" => Command::Gc,
            "STATUS" => Command::Status,
            "VERSION" => Command::Version,
            other => {
                let text = format!(
                    "CNI_COMMAND is `{other}`; a container runtime sets ADD, DEL, CHECK, GC, STATUS \
                     or VERSION: this program is a CNI plugin and is not run by hand"
                );
                return Err(Failure::environment(&text));
            }
        };
        let found = Self {
            command,
            container: value("CNI_CONTAINERID"),
            netns: value("CNI_NETNS"),
            ifname: value("CNI_IFNAME"),
            arguments: value("CNI_ARGS"),
        };
        let mut needed: Vec<(&str, &str)> = Vec::new();
        if matches!(command, Command::Add | Command::Check) {
            needed.push(("CNI_NETNS", &found.netns));
        }
        if matches!(command, Command::Add | Command::Check | Command::Del) {
            needed.push(("CNI_CONTAINERID", &found.container));
            needed.push(("CNI_IFNAME", &found.ifname));
        }
        if let Some((name, _)) = needed.iter().find(|(_, value)| value.is_empty()) {
            let text = format!("{name} is not set; the container runtime has to set it");
            return Err(Failure::environment(&text));
        }
        Ok(found)
    }

    /// Value of an argument in `CNI_ARGS`; `None` if it is absent or empty.
    pub(crate) fn argument(&self, name: &str) -> Option<&str> {
        let pairs = self.arguments.split(';');
        let mut pairs = pairs.filter_map(|pair| pair.split_once('='));
        let found = pairs.find(|(key, _)| *key == name);
        found
            .map(|(_, value)| value)
            .filter(|value| !value.is_empty())
    }

    /// Kubernetes namespace of the pod (`K8S_POD_NAMESPACE`).
    pub(crate) fn namespace(&self) -> Option<&str> {
        self.argument("K8S_POD_NAMESPACE")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Environment, Failure> {
        Environment::read(|name| {
            let found = variables.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn the_variables_of_containerd_are_read() {
        let environment = read(&[
            ("CNI_COMMAND", "ADD"),
            ("CNI_CONTAINERID", "2d1a"),
            ("CNI_NETNS", "/var/run/netns/cni-5503"),
            ("CNI_IFNAME", "eth0"),
            (
                "CNI_ARGS",
                "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-1;K8S_POD_UID=",
            ),
        ])
        .unwrap();
        assert_eq!(environment.command, Command::Add);
        assert_eq!(environment.namespace(), Some("shop"));
        assert_eq!(environment.argument("K8S_POD_UID"), None);
    }

    #[test]
    fn a_missing_variable_is_named_where_the_command_needs_it() {
        for (variables, missing) in [
            (&[("CNI_COMMAND", "ADD")][..], "CNI_NETNS"),
            (&[("CNI_COMMAND", "DEL")][..], "CNI_CONTAINERID"),
            (
                &[("CNI_COMMAND", "DEL"), ("CNI_CONTAINERID", "a")][..],
                "CNI_IFNAME",
            ),
            (&[][..], "CNI_COMMAND"),
        ] {
            let failure = read(variables).unwrap_err();
            assert_eq!(failure.code, 4);
            assert!(failure.text.contains(missing), "{failure:?}");
        }
        read(&[("CNI_COMMAND", "GC")]).unwrap();
        read(&[("CNI_COMMAND", "STATUS")]).unwrap();
    }
}
