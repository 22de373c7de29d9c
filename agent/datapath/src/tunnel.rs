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
mod outside;

pub use self::{device::default_device, error::TunnelError, outside::Blocks};

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use aya::{Ebpf, programs::TcAttachType};
use daemon::lookup::present;
use rtnetlink::Handle;
use shared_maps::{
    pin, sources,
    tunnel::{self, GUARD, TunnelConfig, UNWRAP, WRAP},
    user::{Globals, Map, MapError, MapKind},
    world::{self, WorldKey},
};
use tokio_util::sync::CancellationToken;

use self::device::{Link, NAME};
use super::{
    filter::Order,
    hook::{self, Hook, put},
    program::{Programs, program},
};

/// How long a new native device may be without the programs.
const INTERVAL: Duration = Duration::from_secs(1);

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

/// Part of a node in the tunnel. A cluster goes from one to the next, so that no node sends what
/// another does not unwrap yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TunnelMode {
    /// Pods may not send to the tunnel's port: other nodes may unwrap already.
    Off,
    /// Packets of the tunnel are unwrapped, too.
    DecapOnly,
    /// Packets to pods of other nodes are wrapped, too.
    Full,
}

impl TunnelMode {
    /// The flags of the node that the programs read.
    pub fn flags(self) -> u32 {
        match self {
            Self::Off => GUARD,
            Self::DecapOnly => GUARD | UNWRAP,
            Self::Full => GUARD | UNWRAP | WRAP,
        }
    }
}

/// How the tunnel is set up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TunnelSettings {
    pub mode: TunnelMode,
    /// Names of the devices that lead to other nodes.
    pub devices: Vec<String>,
    /// UDP port of the tunnel.
    pub port: u16,
    /// Blocks of addresses outside of the cluster. Nothing is wrapped while they are not known: it
    /// would be what goes to the Internet.
    pub outside: Option<Blocks>,
}

/// Maps that exist with a mode only.
pub const PINS: [&str; 3] = [world::NAME, sources::NAME, tunnel::NAME];

/// Makes the maps of the tunnel that are not there yet.
pub(super) fn make_maps(globals: &Globals) -> Result<(), MapError> {
    blocks(globals)?;
    Map::<sources::SourceKey, sources::SourceValue>::open_or_create(
        &globals.path(sources::NAME),
        MapKind::LruHash,
        sources::MAX_ENTRIES,
        0,
    )?;
    settings(globals)?;
    Ok(())
}

/// The blocks of addresses outside of the cluster.
pub fn blocks(globals: &Globals) -> Result<Map<WorldKey, u8>, MapError> {
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
        let wraps = settings.mode == TunnelMode::Full;
        if wraps && !Programs::takes_outer_source(&mut loaded)? {
            return Err(TunnelError::NoOuterSource);
        }
        if let Some(outside) = &settings.outside {
            outside.write(&blocks(&globals)?)?;
        }
        Ok(Self {
            map: self::settings(&globals)?,
            settings,
            programs,
            globals,
            loaded,
        })
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
            flags: 0,
        };
        Ok(self.map.set(&0, &config)?)
    }

    /// Whether packets are to be wrapped, and are not because the blocks outside are unknown.
    pub fn wraps_nothing(&self) -> bool {
        self.settings.mode == TunnelMode::Full && self.settings.outside.is_none()
    }

    /// Keeps the programs attached until stopped.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut ticker = tokio::time::interval(INTERVAL);
        let mut said = None;
        loop {
            tokio::select! {
                _ = ticker.tick() => {}
                () = stop.cancelled() => return,
            }
            let fault = self.refresh().await.err().map(|error| error.to_string());
            if fault != said
                && let Some(error) = &fault
            {
                tracing::error!(error, "the tunnel between nodes is not as it should be");
            }
            said = fault;
        }
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
        let knows_outside = self.settings.outside.is_some();
        let mtu = devices.iter().map(|link| link.mtu).min();
        self.tell(
            if knows_outside { wrapper } else { 0 },
            mtu.unwrap_or_default(),
        )?;
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

    /// The native devices.
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

/// Removes what a node with a mode has: first what wraps, then what unwraps, then the maps.
pub async fn clear(globals: &Globals) -> Result<(), TunnelError> {
    let directory = |name| globals.root().join(name);
    if !globals.path(tunnel::NAME).exists() {
        return Ok(());
    }
    let none = BTreeSet::new();
    forget(&directory(pin::TO_NET_LINKS), TO_NET, &none)?;
    with_netlink(async |handle| {
        let links = device::list(&handle).await?;
        remove_wrapper(&handle, &links, globals).await
    })
    .await?;
    forget(&directory(pin::FROM_NET_LINKS), FROM_NET, &none)?;
    for name in [pin::TO_NET_LINKS, pin::FROM_NET_LINKS] {
        remove(&directory(name), |path| fs::remove_dir(path))?;
    }
    for name in PINS {
        remove(&globals.path(name), |path| fs::remove_file(path))?;
    }
    Ok(())
}

async fn remove_wrapper(
    handle: &Handle,
    links: &[Link],
    globals: &Globals,
) -> Result<(), TunnelError> {
    let dir = globals.root().join(pin::TUNNEL_LINKS);
    if !dir.exists() {
        // Another one's device of this name.
        return Ok(());
    }
    if let Some(link) = links.iter().find(|link| link.name == NAME) {
        device::delete(handle, link.index).await?;
    }
    forget(&dir, FROM_TUNNEL, &BTreeSet::new())?;
    remove(&dir, |path| fs::remove_dir(path))
}

async fn with_netlink<T>(
    work: impl AsyncFnOnce(Handle) -> Result<T, TunnelError>,
) -> Result<T, TunnelError> {
    let (connection, handle, _messages) =
        rtnetlink::new_connection().map_err(TunnelError::Socket)?;
    tokio::select! {
        done = work(handle) => done,
        () = connection => Err(TunnelError::Socket(io::ErrorKind::BrokenPipe.into())),
    }
}

/// Removes links of devices that are not wanted.
fn forget(dir: &Path, hook: Hook, wanted: &BTreeSet<u32>) -> Result<(), TunnelError> {
    let failed = |source| directory_error(dir, source);
    let entries = present(fs::read_dir(dir)).map_err(failed)?;
    for entry in entries.into_iter().flatten() {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let ifindex = name.to_str().and_then(|name| {
            let number = name.strip_prefix(hook.program)?.strip_prefix('_')?;
            number.parse::<u32>().ok()
        });
        if ifindex.is_some_and(|ifindex| !wanted.contains(&ifindex)) {
            hook::remove(&entry.path())?;
        }
    }
    Ok(())
}

fn make(path: &Path) -> Result<(), TunnelError> {
    fs::create_dir_all(path).map_err(|source| directory_error(path, source))
}

fn remove(path: &Path, with: impl FnOnce(&Path) -> io::Result<()>) -> Result<(), TunnelError> {
    present(with(path)).map_err(|source| directory_error(path, source))?;
    Ok(())
}

fn directory_error(path: &Path, source: io::Error) -> TunnelError {
    let path: PathBuf = path.to_owned();
    TunnelError::Directory { path, source }
}

/// Interfaces whose `from_net` does the work of `to_proxy`.
pub(super) fn unwrapping(globals: &Globals) -> BTreeSet<u32> {
    let dir = globals.root().join(pin::FROM_NET_LINKS);
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| {
        let name = entry.file_name();
        let (program, number) = name.to_str()?.rsplit_once('_')?;
        (program == FROM_NET.program).then(|| number.parse().ok())?
    });
    numbers.collect()
}
