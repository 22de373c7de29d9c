//! `to_proxy` on every interface that does not lead to a pod, for transparent mode.
//!
//! ```text
//!  <bpf-root>/holdfast/links/to_proxy/to_proxy_<ifindex>   ingress
//!             holdfast/transparent                        tells the proxies about the mode
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::PathBuf,
    time::Duration,
};

use aya::Ebpf;
use daemon::lookup::present;
use rtnetlink::packet_route::link::LinkLayerType;
use shared_maps::{
    pin,
    user::{Access, Globals, MapError},
};
use tokio_stream::StreamExt as _;
use tokio_util::sync::CancellationToken;

use super::{
    hook,
    program::{ProgramError, Programs},
    tunnel,
};

/// How long a new interface may be without the program.
const INTERVAL: Duration = Duration::from_secs(1);
/// For how long answers still reach proxies after they were told to leave transparent mode. They look
/// once per second, and a query waits at most ten seconds for its answer.
const LAST_ANSWERS: Duration = Duration::from_secs(15);
/// Beginning of the links' names.
const PREFIX: &str = "to_proxy_";

/// Why the interfaces could not be looked after.
#[derive(Debug, thiserror::Error)]
pub enum InterfacesError {
    /// The netlink socket cannot be opened.
    #[error("netlink: {0}")]
    Socket(#[from] io::Error),
    /// The kernel does not say which interfaces there are.
    #[error("listing interfaces: {0}")]
    List(#[from] rtnetlink::Error),
    /// The map that says which interfaces are pods' cannot be read.
    #[error(transparent)]
    Map(#[from] MapError),
    /// The directory of the links cannot be used.
    #[error("{path}: {source}", path = .path.display())]
    Directory { path: PathBuf, source: io::Error },
    /// A program cannot be loaded, attached or pinned.
    #[error(transparent)]
    Program(#[from] ProgramError),
}

impl InterfacesError {
    /// Whether another attempt may succeed a moment later.
    pub fn is_passing(&self) -> bool {
        matches!(self, Self::Socket(_) | Self::List(_))
    }
}

/// Where packets of an interface begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Begin {
    Ethernet,
    Ip,
}

impl Begin {
    /// `None`: a kind of interface that carries nothing to pods.
    fn of(kind: LinkLayerType) -> Option<Self> {
        use LinkLayerType as Kind;
        match kind {
            Kind::Ether => Some(Self::Ethernet),
            Kind::None
            | Kind::Void
            | Kind::Rawip
            | Kind::Ppp
            | Kind::Tunnel
            | Kind::Tunnel6
            | Kind::Sit
            | Kind::Ipgre
            | Kind::Ip6gre => Some(Self::Ip),
            _ => None,
        }
    }
}

/// The interfaces that have the program.
pub struct Interfaces {
    programs: Programs,
    globals: Globals,
    loaded: BTreeMap<Begin, Ebpf>,
    /// Interfaces whose problem was logged.
    warned: BTreeSet<u32>,
}

impl Interfaces {
    /// Keeps links below the root of `globals`. Attaches nothing yet.
    pub fn new(programs: Programs, globals: Globals) -> Self {
        Self {
            programs,
            globals,
            loaded: BTreeMap::new(),
            warned: BTreeSet::new(),
        }
    }

    /// Tells proxies to ask under the node's address again.
    pub fn withdraw(globals: &Globals) -> Result<(), InterfacesError> {
        remove(globals.root().join(pin::TRANSPARENT))
    }

    /// Takes the program off every interface, once no answer for a proxy can arrive any more.
    pub async fn clear(globals: Globals, stop: CancellationToken) {
        let dir = directory(&globals);
        if !dir.exists() {
            return;
        }
        let answered = tokio::time::sleep(LAST_ANSWERS);
        if stop.run_until_cancelled(answered).await.is_none() {
            return;
        }
        if let Err(error) = forget(&dir, &BTreeMap::new()).and_then(|()| remove(dir)) {
            tracing::warn!(%error, "cannot remove the programs of transparent mode");
        }
    }

    /// Attaches the programs to interfaces until stopped. The mode is published to the proxies
    /// once the rules are `ready` (the programs of all endpoints then have the mode) and the
    /// interfaces are prepared. `ready` ends with false if the core is gone.
    pub async fn run(mut self, ready: impl Future<Output = bool>, stop: CancellationToken) {
        let mut ready = std::pin::pin!(ready);
        let mut ticker = tokio::time::interval(INTERVAL);
        let (mut is_ready, mut is_told) = (false, false);
        loop {
            tokio::select! {
                _ = ticker.tick() => {}
                rules_ready = &mut ready, if !is_ready => {
                    if !rules_ready {
                        return;
                    }
                    is_ready = true;
                }
                () = stop.cancelled() => return,
            }
            if let Err(error) = self.refresh().await {
                tracing::warn!(%error, "transparent mode: cannot update the interfaces");
                continue;
            }
            if is_ready && !is_told {
                match make(self.globals.root().join(pin::TRANSPARENT)) {
                    Ok(()) => is_told = true,
                    Err(error) => {
                        tracing::error!(%error, "transparent mode: cannot publish the setting to the proxies");
                    }
                }
            }
        }
    }

    /// Attaches the program where it is missing, and takes it from interfaces that have
    /// become a pod's or are gone. An interface that refuses the program does not hold up the others.
    ///
    /// Every link is tried: another interface may have got the number, or the
    /// link detached by force.
    pub async fn refresh(&mut self) -> Result<(), InterfacesError> {
        let dir = directory(&self.globals);
        make(dir.clone())?;
        let wanted = self.wanted().await?;
        let attach = self.programs.attach_by();
        for (ifindex, begin) in &wanted {
            let program = match self.loaded.entry(*begin) {
                std::collections::btree_map::Entry::Occupied(entry) => entry.into_mut(),
                std::collections::btree_map::Entry::Vacant(entry) => {
                    entry.insert(self.programs.load_to_proxy(*begin)?)
                }
            };
            let path = dir.join(format!("{PREFIX}{ifindex}"));
            match Programs::attach_to_proxy(program, attach, *ifindex, &path) {
                Ok(()) => {
                    self.warned.remove(ifindex);
                }
                Err(error) if self.warned.insert(*ifindex) => {
                    tracing::warn!(%error, "transparent mode: answers that arrive on this interface are lost");
                }
                Err(_) => {}
            }
        }
        self.warned.retain(|ifindex| wanted.contains_key(ifindex));
        forget(&dir, &wanted)
    }

    /// All interfaces except loopback, pods' interfaces, and interfaces whose `from_net` does the same work.
    async fn wanted(&self) -> Result<BTreeMap<u32, Begin>, InterfacesError> {
        let (connection, handle, _messages) = rtnetlink::new_connection()?;
        let list = async {
            let mut found = BTreeMap::new();
            let mut links = std::pin::pin!(handle.link().get().execute());
            while let Some(link) = links.try_next().await? {
                if let Some(begin) = Begin::of(link.header.link_layer_type) {
                    found.insert(link.header.index, begin);
                }
            }
            Ok::<_, rtnetlink::Error>(found)
        };
        let mut found = tokio::select! {
            found = list => found?,
            () = connection => return Err(io::Error::from(io::ErrorKind::BrokenPipe).into()),
        };
        if self.programs.unwraps() {
            let unwrapping = tunnel::unwrapping(&self.globals);
            found.retain(|ifindex, _| !unwrapping.contains(ifindex));
        }
        for (_, endpoint) in self.globals.lxc(Access::ReadOnly)?.entries()?.found {
            found.remove(&endpoint.ifindex);
        }
        Ok(found)
    }
}

fn directory(globals: &Globals) -> PathBuf {
    globals.root().join(pin::TO_PROXY_LINKS)
}

fn make(path: PathBuf) -> Result<(), InterfacesError> {
    fs::create_dir_all(&path).map_err(|source| InterfacesError::Directory { path, source })
}

fn remove(path: PathBuf) -> Result<(), InterfacesError> {
    let removed = present(fs::remove_dir_all(&path)).map(drop);
    removed.map_err(|source| InterfacesError::Directory { path, source })
}

/// Removes links of interfaces that are not wanted.
fn forget(dir: &PathBuf, wanted: &BTreeMap<u32, Begin>) -> Result<(), InterfacesError> {
    let failed = |source| InterfacesError::Directory {
        path: dir.clone(),
        source,
    };
    for entry in fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let ifindex = name
            .to_str()
            .and_then(|name| name.strip_prefix(PREFIX)?.parse().ok());
        if ifindex.is_some_and(|ifindex: u32| !wanted.contains_key(&ifindex)) {
            hook::remove(&entry.path())?;
        }
    }
    Ok(())
}
