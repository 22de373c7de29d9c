//! The base network of the runtime's pods, made by Debian's reference plugins.

use serde_json::{Value, json};

/// Plugins of Debian that the tests use.
pub(super) const PLUGINS: [&str; 5] = ["ptp", "bridge", "tuning", "host-local", "loopback"];
/// Directory of Debian's CNI plugins.
pub(super) const DEBIAN: &str = "/usr/lib/cni";
/// Name of the base's configuration file.
pub(super) const FILE: &str = "10-base.conflist";

/// Subnet that pods get their addresses from.
pub const SUBNET: &str = "10.99.0.0/24";

/// A network of the reference plugins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    /// A routed veth for each pod, as kindnet and GKE have it.
    Ptp,
    /// Veths at a bridge that is the pods' gateway, as flannel and k3s have it; IPv4 and IPv6.
    Bridge,
}

impl Base {
    pub fn name(self) -> &'static str {
        match self {
            Self::Ptp => "routed",
            Self::Bridge => "bridged",
        }
    }

    /// Configuration of the base's plugin, which gives pods addresses of `subnet`.
    pub fn plugin(self, subnet: &str) -> Value {
        match self {
            Self::Ptp => json!({
                "type": "ptp",
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": subnet}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            }),
            Self::Bridge => json!({
                "type": "bridge",
                "bridge": "cni0",
                "isGateway": true,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": subnet}], [{"subnet": "fd99::/64"}]],
                    "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
                },
            }),
        }
    }

    /// Configuration list that has only the base's plugin.
    pub fn conflist(self) -> Value {
        json!({"cniVersion": "1.0.0", "name": self.name(), "plugins": [self.plugin(SUBNET)]})
    }
}
