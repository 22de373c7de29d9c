//! Transparent mode: queries go to servers from the address of the pod that sent them.
//!
//! ```text
//!  pod 10.0.0.5:40000 ─► proxy ─► 10.0.0.5:51234 ─► server
//!                          ▲                           │
//!                          └── marked by the datapath ◄┘ to 10.0.0.5:51234
//! ```
//! On holdfast-agent's datapath, the kernel selects the port. Everything that the pod sends to the
//! server goes through the proxy, so no flow of the pod has the same port.
//!
//! Cilium's datapath returns an answer to the proxy by the conntrack entry of the pod's own query.
//! So with Cilium's datapath, the proxy uses the pod's port as well.
//!
//! An answer must come from the queried address, and go to the address that sent the query. For
//! servers outside of the cluster, the node may translate either address (masquerading, Services),
//! and undoes that only after the datapath has seen the answer. So queries to such servers are sent
//! from the node's address.

use std::{
    io,
    net::SocketAddr,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use nix::errno::Errno;
use rand::Rng;
use serde::{Deserialize, Serialize};
use shared_maps::{IdentityId, fragment, pin, user::Globals};

use crate::stats::Fallback;

/// Number of random ports that are tried after the kernel found none.
const RANDOM_PORTS: usize = 8;

/// Addresses to try, in this order, for a query from `source`. With port 0, the kernel chooses
/// first, and random ports follow. A port of the pod has no replacement.
pub(crate) fn sources(source: SocketAddr, random: &mut impl Rng) -> Vec<SocketAddr> {
    let others = if is_flow(source) { 0 } else { RANDOM_PORTS };
    let mut all = vec![source];
    all.extend((0..others).map(|_| {
        let port = random.random_range(1024..=u16::MAX);
        SocketAddr::new(source.ip(), port)
    }));
    all
}

/// Whether `source` has a port of the pod, so that each flow of the pod has its own socket.
pub(crate) fn is_flow(source: SocketAddr) -> bool {
    source.port() != 0
}

/// Whether the mode is wanted, and whether answers would come back.
#[derive(Clone, Debug, Default)]
pub struct Transparent {
    wanted: bool,
    outside: bool,
    blocked: Arc<AtomicBool>,
    /// Whether queries are sent from the pod's port.
    pod_port: Arc<AtomicBool>,
}

/// State of transparent mode on this node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    #[default]
    Off,
    /// Servers receive queries from the pods' addresses.
    On,
    /// Wanted, but the datapath of this node would bring the answers to the pods.
    Blocked,
}

impl Transparent {
    /// The configured mode. With `outside`, it is also for servers outside of the cluster. It is
    /// assumed that answers come back.
    pub fn new(wanted: bool, outside: bool) -> Self {
        Self {
            wanted,
            outside,
            blocked: Arc::default(),
            pod_port: Arc::default(),
        }
    }

    /// The address from which to send a query of `client`. Port 0: the kernel selects one.
    pub(crate) fn source(&self, client: SocketAddr) -> SocketAddr {
        let port = match self.pod_port.load(Ordering::Relaxed) {
            true => client.port(),
            false => 0,
        };
        SocketAddr::new(client.ip(), port)
    }

    /// Whether queries to a server of this identity are sent from the pod's address. Not for the
    /// node itself: its answers come from its own address, and the network stack accepts no such
    /// packet from an interface. Not for a Service, whose address is always translated.
    pub fn is_for(&self, server: IdentityId) -> bool {
        if server.is_service() {
            return false;
        }
        let is_outside =
            server == IdentityId::UNKNOWN || server.is_world() || server.is_local_scope();
        self.wanted && server != IdentityId::HOST && (self.outside || !is_outside)
    }

    /// Detects whether the datapath under `bpf_root` is holdfast-agent's, and whether it returns
    /// answers to the proxy, which it does only if the agent has the same flag. Any other datapath
    /// counts as Cilium's. Returns whether the mode changed.
    pub fn detect(&self, bpf_root: &Path) -> bool {
        // Only holdfast-agent makes this map.
        let is_ours = Globals::new(bpf_root).path(fragment::NAME).exists();
        self.pod_port.store(!is_ours, Ordering::Relaxed);
        let blocked = self.wanted && is_ours && !bpf_root.join(pin::TRANSPARENT).is_dir();
        self.blocked.swap(blocked, Ordering::Relaxed) != blocked
    }

    pub fn mode(&self) -> Mode {
        match (self.wanted, self.blocked.load(Ordering::Relaxed)) {
            (false, _) => Mode::Off,
            (true, false) => Mode::On,
            (true, true) => Mode::Blocked,
        }
    }
}

impl Mode {
    /// The mode in words, for `status`.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::On => "servers are asked under pods' addresses",
            Self::Blocked => {
                "blocked: servers are asked under the node's address, as holdfast-agent has not \
                 made its datapath bring answers back (the same flag there)"
            }
        }
    }
}

impl Fallback {
    /// Why a socket with a pod's address could not be opened.
    pub(crate) fn of(error: &io::Error) -> Self {
        match error.raw_os_error().map(Errno::from_raw) {
            Some(Errno::EADDRINUSE | Errno::EADDRNOTAVAIL | Errno::EAGAIN) => Self::NoPort,
            Some(Errno::EMFILE | Errno::ENFILE | Errno::ENOBUFS | Errno::ENOMEM) => {
                Self::TooManySockets
            }
            Some(Errno::EPERM | Errno::EACCES) => Self::NotPermitted,
            _ => Self::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn servers_that_the_node_may_translate_do_not_see_the_pod() {
        let [off, inside, all] = [(false, true), (true, false), (true, true)]
            .map(|(wanted, outside)| Transparent::new(wanted, outside));
        let outside = [
            IdentityId::UNKNOWN,
            IdentityId::WORLD,
            IdentityId::WORLD_IPV4,
            IdentityId::WORLD_IPV6,
            IdentityId::LOCAL_MIN,
            IdentityId::LOCAL_MAX,
        ];
        let cluster = [
            IdentityId::ENDPOINT_MIN,
            IdentityId(41_053),
            // An identity of another cluster of a mesh.
            IdentityId(0x0003_0100),
            IdentityId::REMOTE_NODE,
        ];
        for server in outside {
            assert_eq!(
                [&off, &inside, &all].map(|mode| mode.is_for(server)),
                [false, false, true],
                "{server}"
            );
        }
        for server in cluster {
            assert!(inside.is_for(server) && all.is_for(server), "{server}");
            assert!(!off.is_for(server));
        }
        assert!(!all.is_for(IdentityId::HOST));
        assert!(!all.is_for(IdentityId::SERVICE_MIN));
    }

    #[test]
    fn the_pod_s_port_is_used_where_the_datapath_is_not_holdfast_agent_s() {
        let root = tempfile::tempdir().unwrap();
        let mode = Transparent::new(true, false);
        let client = SocketAddr::from(([10, 0, 0, 5], 40_000));
        let kernel_s = SocketAddr::from(([10, 0, 0, 5], 0));
        assert_eq!(mode.source(client), kernel_s, "before it looked");
        mode.detect(root.path());
        assert_eq!(mode.source(client), client);
        let globals = Globals::new(root.path());
        fs::create_dir_all(globals.dir()).unwrap();
        fs::write(globals.path(fragment::NAME), "").unwrap();
        mode.detect(root.path());
        assert_eq!(mode.source(client), kernel_s);
    }

    #[test]
    fn only_the_kernel_s_port_has_replacements() {
        let mut random = rand::rng();
        let of_pod = SocketAddr::from(([10, 0, 0, 5], 40_000));
        assert_eq!(sources(of_pod, &mut random), [of_pod]);
        let of_kernel = SocketAddr::from(([10, 0, 0, 5], 0));
        let all = sources(of_kernel, &mut random);
        assert_eq!((all[0], all.len()), (of_kernel, 1 + RANDOM_PORTS));
        assert!(all[1..].iter().all(|at| at.port() >= 1024));
    }

    #[test]
    fn an_agent_without_the_setting_blocks_it() {
        let root = tempfile::tempdir().unwrap();
        let (on, off) = (
            Transparent::new(true, false),
            Transparent::new(false, false),
        );
        // With another agent's datapath, only its operator knows whether answers come back.
        assert!(!on.detect(root.path()));
        assert_eq!((on.mode(), off.mode()), (Mode::On, Mode::Off));
        let globals = Globals::new(root.path());
        fs::create_dir_all(globals.dir()).unwrap();
        fs::write(globals.path(fragment::NAME), "").unwrap();
        assert!(on.detect(root.path()) && !on.detect(root.path()));
        assert!(!off.detect(root.path()));
        assert_eq!((on.mode(), off.mode()), (Mode::Blocked, Mode::Off));
        fs::create_dir_all(root.path().join(pin::TRANSPARENT)).unwrap();
        assert!(on.clone().detect(root.path()));
        assert_eq!(on.mode(), Mode::On);
    }
}
