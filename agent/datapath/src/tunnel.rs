//! The tunnel between nodes, whose packets carry the identity of their sender
//! (`--high-scale-ipcache`): programs at the native devices, and the device that wraps.
//!
//! ```text
//!  <bpf-root>/holdfast/links/from_net/from_net_<ifindex>    ingress of native devices: unwraps
//!                            to_net/to_net_<ifindex>        egress: guards, and wraps
//!                            tunnel/from_tunnel_<ifindex>   ingress of hf_vxlan: drops all
//! ```
//! Like the programs of endpoints, what is attached outlives the agent, and the next agent puts its
//! programs in place of the old ones.

mod device;
mod error;
mod links;
mod outside;
mod status;
mod task;

pub use self::{
    device::default_device,
    error::TunnelError,
    links::clear,
    status::{TunnelStatus, TunnelView},
};
pub use agent_core::tunnel_mode::TunnelMode;

use std::collections::BTreeSet;

use agent_core::high_scale::objects::World;
use aya::{Ebpf, programs::TcAttachType};
use rtnetlink::Handle;
use shared_maps::{
    pin, sources,
    tunnel::{self, BLOCKS_KNOWN, TunnelConfig},
    user::{Globals, Map, MapError, MapKind},
    world::{self, WorldKey},
};

pub(super) use self::links::unwrapping;
use self::{
    device::{Link, NAME},
    links::{forget, make, remove_wrapper, with_netlink},
};
use super::{
    filter::Order,
    hook::{Hook, put},
    program::{ProgramError, Programs, program},
};

const FROM_NET: Hook = Hook {
    program: "from_net",
    direction: TcAttachType::Ingress,
};
const TO_NET: Hook = Hook {
    program: "to_net",
    direction: TcAttachType::Egress,
};
const FROM_TUNNEL: Hook = Hook {
    program: "from_tunnel",
    direction: TcAttachType::Ingress,
};

/// How the tunnel is set up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TunnelSettings {
    pub mode: TunnelMode,
    /// Names of the devices that lead to other nodes.
    pub devices: Vec<String>,
    /// UDP port of the tunnel.
    pub port: u16,
    /// Blocks of pods are known: an address outside of them is no pod's.
    pub knows_pod_blocks: bool,
}

impl TunnelSettings {
    /// Refuses a kernel that cannot do what the mode needs. Only a node that wraps asks it.
    ///
    /// # Errors
    /// [`TunnelError::NoOuterSource`], or that of `takes_outer_source`.
    pub fn check_kernel(
        &self,
        takes_outer_source: impl FnOnce() -> Result<bool, ProgramError>,
    ) -> Result<(), TunnelError> {
        match self.mode == TunnelMode::Full && !takes_outer_source()? {
            true => Err(TunnelError::NoOuterSource),
            false => Ok(()),
        }
    }
}

/// Maps that exist with a mode only.
pub const PINS: [&str; 3] = [world::NAME, sources::NAME, tunnel::NAME];

/// Makes the maps of the tunnel that are not there yet.
pub(super) fn make_maps(globals: &Globals) -> Result<(), MapError> {
    blocks_map(globals)?;
    Map::<sources::SourceKey, sources::SourceValue>::open_or_create(
        &globals.path(sources::NAME),
        MapKind::LruHash,
        sources::MAX_ENTRIES,
        0,
    )?;
    settings(globals)?;
    Ok(())
}

/// The map of blocks outside of the cluster.
pub fn blocks_map(globals: &Globals) -> Result<Map<WorldKey, u8>, MapError> {
    Map::open_or_create(
        &globals.path(world::NAME),
        MapKind::LpmTrie,
        world::MAX_ENTRIES,
        world::FLAGS,
    )
}

fn settings(globals: &Globals) -> Result<Map<u32, TunnelConfig>, MapError> {
    Map::open_or_create(&globals.path(tunnel::NAME), MapKind::Array, 1, 0)
}

/// The tunnel of a node with a mode.
pub struct Tunnel {
    settings: TunnelSettings,
    programs: Programs,
    globals: Globals,
    loaded: Ebpf,
    map: Map<u32, TunnelConfig>,
    /// Packets to pods of other nodes are wrapped. Nothing is while blocks outside of the cluster are
    /// unknown: it would be what goes to the Internet.
    wraps: bool,
    world: World,
    status: TunnelStatus,
}

impl Tunnel {
    /// Makes the maps of the programs, and asks the kernel whether it can wrap, if it must. Nothing is
    /// attached yet. `programs` must be those of a node with this mode.
    pub fn new(
        programs: Programs,
        globals: Globals,
        settings: TunnelSettings,
    ) -> Result<Self, TunnelError> {
        let mut loaded = programs.object_without_endpoint(FROM_NET.program, 0)?;
        settings.check_kernel(|| Programs::takes_outer_source(&mut loaded))?;
        let map = self::settings(&globals)?;
        // An agent that wrapped before this one had the blocks, and they are in the map.
        let wrapped = map.get(&0)?.is_some_and(|before| before.device != 0);
        let wraps = settings.mode == TunnelMode::Full && wrapped;
        let status = TunnelStatus::default();
        status.change(|view| {
            settings.mode.as_str().clone_into(&mut view.mode);
            view.devices.clone_from(&settings.devices);
            view.port = settings.port;
        });
        let tunnel = Self {
            map,
            settings,
            programs,
            globals,
            loaded,
            wraps,
            world: World::Unknown,
            status,
        };
        tunnel.report_world(None);
        Ok(tunnel)
    }

    /// The programs, for tests that run them.
    pub fn loaded(&mut self) -> &mut Ebpf {
        &mut self.loaded
    }

    /// Tells the programs that the devices carry packets of `mtu` bytes and that device number
    /// `device` wraps, 0 for none.
    pub fn tell(&mut self, device: u32, mtu: u32) -> Result<(), TunnelError> {
        let config = TunnelConfig {
            device,
            mtu,
            port: self.settings.port,
            flags: match self.settings.knows_pod_blocks {
                true => BLOCKS_KNOWN,
                false => 0,
            },
        };
        Ok(self.map.set(&0, &config)?)
    }

    /// How the tunnel is.
    pub fn status(&self) -> TunnelStatus {
        self.status.clone()
    }

    /// Attaches the programs to the native devices as the mode wants it, and takes them from others.
    /// Makes or removes the device that wraps.
    ///
    /// A program that stays attached is replaced in its link, so that no packet passes without one.
    pub async fn refresh(&mut self) -> Result<(), TunnelError> {
        with_netlink(async |handle| self.refresh_by(&handle).await).await
    }

    async fn refresh_by(&mut self, handle: &Handle) -> Result<(), TunnelError> {
        let links = device::list(handle).await?;
        self.refuse_used_port(&links)?;
        let devices = self.devices(&links)?;
        let is_full = self.settings.mode == TunnelMode::Full;
        let wrapper = match is_full {
            true => self.wrapper(handle, &links).await?,
            false => 0,
        };
        let mtu = devices.iter().map(|link| link.mtu).min();
        let mtu = mtu.unwrap_or_default();
        self.tell(if self.wraps { wrapper } else { 0 }, mtu)?;
        self.status
            .change(|view| view.inner_mtu = mtu.saturating_sub(tunnel::OVERHEAD));
        let unwraps = self.settings.mode != TunnelMode::Off;
        let indices: BTreeSet<u32> = devices.iter().map(|link| link.index).collect();
        let none = BTreeSet::new();
        self.attach(
            FROM_NET,
            pin::FROM_NET_LINKS,
            match unwraps {
                true => &indices,
                false => &none,
            },
        )?;
        self.attach(TO_NET, pin::TO_NET_LINKS, &indices)?;
        if !is_full {
            remove_wrapper(handle, &links, &self.globals).await?;
        }
        Ok(())
    }

    /// Another tunnel would get this one's packets, or the other way round.
    fn refuse_used_port(&self, links: &[Link]) -> Result<(), TunnelError> {
        let port = self.settings.port;
        let is_other = |link: &&Link| link.tunnel_port == Some(port) && link.name != NAME;
        match links.iter().find(is_other) {
            Some(link) => Err(TunnelError::PortInUse {
                port,
                device: link.name.clone(),
            }),
            None => Ok(()),
        }
    }

    /// Devices that lead to other nodes, by the names in the settings. Each must have an Ethernet header.
    fn devices<'l>(&self, links: &'l [Link]) -> Result<Vec<&'l Link>, TunnelError> {
        let find = |name: &String| {
            let link = links.iter().find(|link| link.name == *name);
            let link = link.ok_or_else(|| TunnelError::NoDevice(name.clone()))?;
            match link.is_ethernet {
                true => Ok(link),
                false => Err(TunnelError::NotEthernet(name.clone())),
            }
        };
        self.settings.devices.iter().map(find).collect()
    }

    /// Makes the device that wraps, if it is not there as it should be. It is closed before it is up.
    async fn wrapper(&mut self, handle: &Handle, links: &[Link]) -> Result<u32, TunnelError> {
        let port = self.settings.port;
        let known = links.iter().find(|link| link.name == NAME);
        let is_good = |link: &&Link| link.tunnel_port == Some(port) && link.is_external;
        let index = match known.filter(is_good) {
            Some(link) => link.index,
            None => {
                if let Some(other) = known {
                    device::delete(handle, other.index).await?;
                }
                device::create(handle, port).await?
            }
        };
        self.attach(FROM_TUNNEL, pin::TUNNEL_LINKS, &BTreeSet::from([index]))?;
        device::set_up(handle, index).await?;
        Ok(index)
    }

    /// Attaches a program to these devices and to no others.
    fn attach(&mut self, hook: Hook, dir: &str, to: &BTreeSet<u32>) -> Result<(), TunnelError> {
        let dir = self.globals.root().join(dir);
        make(&dir)?;
        let attach = self.programs.attach_by();
        for ifindex in to {
            let path = dir.join(format!("{}_{ifindex}", hook.program));
            let program = program(&mut self.loaded, hook.program)?;
            put(program, (hook, attach), *ifindex, &path, Order::First)?;
        }
        forget(&dir, hook, to)
    }
}
