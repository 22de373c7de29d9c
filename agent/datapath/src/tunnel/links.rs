//! Links of the tunnel's programs, below the BPF root, and their removal.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use daemon::lookup::present;
use rtnetlink::Handle;
use shared_maps::{pin, tunnel, user::Globals};

use super::{
    super::hook::{self, Hook},
    FROM_NET, FROM_TUNNEL, PINS, TO_NET, TunnelError,
    device::{self, Link, NAME},
};

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

pub(super) async fn remove_wrapper(
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

pub(super) async fn with_netlink<T>(
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
pub(super) fn forget(dir: &Path, hook: Hook, wanted: &BTreeSet<u32>) -> Result<(), TunnelError> {
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

pub(super) fn make(path: &Path) -> Result<(), TunnelError> {
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
pub(in super::super) fn unwrapping(globals: &Globals) -> BTreeSet<u32> {
    let dir = globals.root().join(pin::FROM_NET_LINKS);
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| {
        let name = entry.file_name();
        let (program, number) = name.to_str()?.rsplit_once('_')?;
        (program == FROM_NET.program).then(|| number.parse().ok())?
    });
    numbers.collect()
}
