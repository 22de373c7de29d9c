//! What an earlier run left behind: files and pinned maps, read once at the start.
//!
//! A damaged file is set aside as `….corrupt`, reported and counted, and the start
//! goes on without it. A file of a later release prevents the start: going on
//! would overwrite what that release knows.

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    fs, io, panic,
    path::{Path, PathBuf},
    thread,
};

use agent_core::{
    core::Restored,
    endpoint::config_file::{self, FileError},
    fqdn::{
        cleaned::{self, CleanedError},
        pre_cache,
    },
    identity::{
        checkpoint::{self, CheckpointError},
        endpoint_checkpoint,
    },
    labels::LabelSet,
};
use agent_datapath::{
    files::{ENDPOINT_FILE, StateFiles},
    hook,
    program::Programs,
};
use daemon::{
    lookup::{Lookup, present},
    regular_file,
    state_file::{self, Content},
};
use dns_policy::{boot_time::BootTime, wall_time};
use shared_maps::{
    EndpointId, IdentityId, pin,
    policy::{self, PolicyKey, PolicyValue},
    user::{Access, Entries, Globals, MapError},
};

/// Why the agent must not start on what it found.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// A later release wrote the file.
    #[error("{path}: {reason}; run the newer release, or move the file away", path = .path.display())]
    Newer {
        path: PathBuf,
        /// What is newer about the file, as text.
        reason: String,
    },
    /// A file or directory cannot be read or set aside.
    #[error("{path}: {source}", path = .path.display())]
    File { path: PathBuf, source: io::Error },
    /// A pinned map cannot be read.
    #[error(transparent)]
    Map(#[from] MapError),
    /// The node's interfaces cannot be listed.
    #[error("listing the interfaces: {0}")]
    Interfaces(io::Error),
}

/// What was found, and what could not be used.
#[derive(Debug, Default)]
pub struct Found {
    /// State that the core starts with.
    pub restored: Restored,
    /// Damaged files with what is wrong with them.
    pub damaged: Vec<String>,
}

impl Found {
    fn note_damage(&mut self, path: &Path, why: &str) {
        let text = format!("{}: {why}", path.display());
        tracing::error!("{text}");
        self.damaged.push(text);
    }

    /// Reads `--tofqdns-pre-cache`. Errors are reported and do not stop the start, because names
    /// also open when a pod looks them up.
    pub fn read_pre_cache(&mut self, path: &Path) {
        let error = match regular_file::read(path) {
            Ok(text) => {
                let (known, error) = pre_cache::parse(&text);
                self.restored.pre_cache = known;
                error.map(|error| error.to_string())
            }
            Err(error) => Some(format!(
                "cannot be read: {error}; correct the flag or the file, and restart the agent"
            )),
        };
        if let Some(error) = error {
            let text = format!("--tofqdns-pre-cache {} {error}", path.display());
            tracing::error!("{text}");
            self.damaged.push(text);
        }
    }

    /// Removes the entries of `--tofqdns-pre-cache` beyond its share of an ipcache of `max`
    /// entries, and reports their number.
    pub fn bound_pre_cache(&mut self, path: &Path, max: u32) {
        let max = usize::try_from(max).unwrap_or(usize::MAX);
        let known = &mut self.restored.pre_cache;
        let (most, left_out) = pre_cache::bound(known, wall_time::now(), max);
        if left_out > 0 {
            let text = format!(
                "--tofqdns-pre-cache {} has {left_out} addresses more than the {most} that are used \
                 (1/16 of the ipcache): the last ones open when a pod looks them up; \
                 shorten the file",
                path.display()
            );
            tracing::error!("{text}");
            self.damaged.push(text);
        }
    }
}

/// Reads files, pinned maps, interfaces and programs of the last run.
pub fn read(files: &StateFiles, maps: &Globals, now: BootTime) -> Result<Found, RestoreError> {
    let mut found = Found::default();
    found.restored.now = now;
    // Files and kernel take about the same time, and everything waits for both.
    let kernel = thread::scope(|scope| {
        let kernel = scope.spawn(|| read_kernel(maps));
        let files = read_files(files, &mut found);
        let kernel = kernel.join();
        let kernel = kernel.unwrap_or_else(|panic| panic::resume_unwind(panic));
        files.and(kernel)
    })?;
    found.restored = Restored {
        ipcache: kernel.ipcache,
        lxc: kernel.lxc,
        policy_maps: kernel.policy_maps,
        policy_map_sizes: kernel.policy_map_sizes,
        interfaces: kernel.interfaces,
        programs: kernel.programs,
        ..std::mem::take(&mut found.restored)
    };
    found.restored.under_programs = under_programs(maps, &found.restored);
    tracing::info!(
        endpoints = found.restored.endpoints.len(),
        identities =
            found.restored.local_identities.len() + found.restored.endpoint_identities.len(),
        ipcache = found.restored.ipcache.len(),
        damaged = found.damaged.len(),
        "state of the previous run restored"
    );
    Ok(found)
}

/// Reads only the files, and adds their content to `found`.
pub fn read_files(files: &StateFiles, found: &mut Found) -> Result<(), RestoreError> {
    found.restored.local_identities =
        identities(&files.checkpoint(), checkpoint::parse_local, found)?;
    let added = files.added_endpoint_identities();
    let whole = |text: &str| Ok::<_, Infallible>(text.to_owned());
    let added = parsed(&added, found, |error| match *error {}, whole)?;
    let parse = |whole: &str| endpoint_checkpoint::parse(whole, added.as_deref());
    found.restored.endpoint_identities = identities(&files.endpoint_checkpoint(), parse, found)?;
    let is_newer = |error: &CleanedError| matches!(error, CleanedError::Newer(_));
    let cleaned = parsed(&files.cleaned(), found, is_newer, cleaned::parse)?;
    found.restored.cleaned = cleaned.unwrap_or_default();
    let dir = files.dir();
    let failed = failed_at(dir);
    for entry in fs::read_dir(dir).map_err(&failed)? {
        let path = entry.map_err(&failed)?.path();
        let number = path.file_name().and_then(|name| name.to_str());
        if number.is_none_or(|number| number.parse::<u16>().is_err()) {
            continue;
        }
        if let Lookup::Found(entry) = Lookup::of_path(fs::metadata(&path))
            && !entry.is_dir()
        {
            let aside = state_file::set_aside(&path).map_err(failed_at(&path))?;
            let error = io::Error::from(io::ErrorKind::NotADirectory);
            let why = format!("{error}; set aside as {}", aside.display());
            found.note_damage(&path, &why);
            continue;
        }
        let is_newer = |error: &FileError| matches!(error, FileError::Newer(_));
        let path = path.join(ENDPOINT_FILE);
        let endpoint = parsed(&path, found, is_newer, config_file::parse)?;
        found.restored.endpoints.extend(endpoint);
    }
    found.restored.endpoints.sort_by_key(|endpoint| endpoint.id);
    Ok(())
}

type Identities = Vec<(IdentityId, LabelSet)>;

fn identities(
    path: &Path,
    parse: impl Fn(&str) -> Result<Identities, CheckpointError>,
    found: &mut Found,
) -> Result<Identities, RestoreError> {
    let is_newer = |error: &CheckpointError| {
        matches!(
            error,
            CheckpointError::Newer(_) | CheckpointError::NewerLogic(_)
        )
    };
    Ok(parsed(path, found, is_newer, parse)?.unwrap_or_default())
}

/// Reads a file; bytes that are not UTF-8 become text that cannot be parsed. `None` if there is no
/// file, or if the file is damaged: then it is set aside.
fn parsed<T, E: std::error::Error>(
    path: &Path,
    found: &mut Found,
    is_newer: impl Fn(&E) -> bool,
    parse: impl FnOnce(&str) -> Result<T, E>,
) -> Result<Option<T>, RestoreError> {
    let read = state_file::read(path, |bytes| match parse(&String::from_utf8_lossy(bytes)) {
        Err(error) if is_newer(&error) => Ok(Err(RestoreError::Newer {
            path: path.to_owned(),
            reason: error.to_string(),
        })),
        parsed => parsed.map(Ok),
    });
    match read.map_err(failed_at(path))? {
        Content::Found(content) => content.map(Some),
        Content::Absent => Ok(None),
        Content::Damaged(damage) => {
            let why = damage
                .set_aside("; set aside as")
                .map_err(failed_at(path))?;
            found.note_damage(path, &why);
            Ok(None)
        }
    }
}

fn failed_at(path: &Path) -> impl Fn(io::Error) -> RestoreError {
    |source| RestoreError::File {
        path: path.to_owned(),
        source,
    }
}

/// What the kernel has: maps, interfaces and attached programs.
fn read_kernel(maps: &Globals) -> Result<Restored, RestoreError> {
    let mut restored = Restored::default();
    read_maps(maps, &mut restored)?;
    restored.interfaces = interfaces().map_err(RestoreError::Interfaces)?;
    restored.programs = programs(maps)?;
    Ok(restored)
}

fn read_maps(maps: &Globals, restored: &mut Restored) -> Result<(), RestoreError> {
    if let Some(map) = there(maps.ipcache(Access::ReadOnly))? {
        restored.ipcache = whole("ipcache", map.entries()?);
    }
    if let Some(map) = there(maps.lxc(Access::ReadOnly))? {
        restored.lxc = whole("lxc", map.entries()?);
    }
    for endpoint in policy_maps(maps)? {
        if let Some(map) = there(maps.policy(endpoint, Access::ReadOnly))? {
            let entries: Vec<(PolicyKey, PolicyValue)> = whole("policy", map.entries()?);
            restored.policy_maps.push((endpoint, entries));
            let size = usize::try_from(map.max_entries()).unwrap_or(usize::MAX);
            restored.policy_map_sizes.insert(endpoint, size);
        }
    }
    Ok(())
}

/// Endpoints that have a pinned policy map, ascending.
pub fn policy_maps(maps: &Globals) -> Result<Vec<EndpointId>, RestoreError> {
    let dir = maps.dir();
    let failed = failed_at(&dir);
    let listing = present(fs::read_dir(&dir)).map_err(&failed)?;
    let mut found = Vec::new();
    for entry in listing.into_iter().flatten() {
        let name = entry.map_err(&failed)?.file_name();
        let number = name
            .to_str()
            .and_then(|name| name.strip_prefix(policy::NAME_PREFIX));
        found.extend(number.and_then(|n| n.parse().ok()).map(EndpointId));
    }
    found.sort();
    Ok(found)
}

/// Interfaces to which pinned programs of each endpoint are attached.
fn programs(maps: &Globals) -> Result<BTreeMap<EndpointId, BTreeSet<u32>>, RestoreError> {
    let dir = maps.root().join(pin::LINKS);
    let mut found: BTreeMap<EndpointId, BTreeSet<u32>> = BTreeMap::new();
    for path in entries(&dir)? {
        let name = path.file_name().and_then(|name| name.to_str());
        let Some(number) = name.and_then(|name| name.parse().ok()) else {
            continue;
        };
        for pin in entries(&path)? {
            let place = hook::place(&pin).map_err(failed_at(&pin))?;
            if let Some((ifindex, _)) = place {
                found.entry(EndpointId(number)).or_default().insert(ifindex);
            }
        }
    }
    Ok(found)
}

/// Endpoints whose programs are all attached, first, and at an interface in the group. An endpoint that cannot be
/// inspected is left out: it gets its programs with the first plan.
fn under_programs(maps: &Globals, restored: &Restored) -> BTreeSet<(EndpointId, u32)> {
    let files = restored.endpoints.iter();
    let places = files.map(|file| (file.id, file.interface.ifindex));
    let attached = places.filter(|(id, ifindex)| {
        let has = restored.programs.get(id);
        has.is_some_and(|interfaces| interfaces.contains(ifindex))
    });
    attached
        .filter(|(id, ifindex)| Programs::faults(maps, *id, *ifindex, None).is_empty())
        .collect()
}

/// The entries of a directory; empty if it does not exist.
fn entries(dir: &Path) -> Result<Vec<PathBuf>, RestoreError> {
    let failed = failed_at(dir);
    let listing = present(fs::read_dir(dir)).map_err(&failed)?;
    let entries = listing.into_iter().flatten();
    let paths = entries.map(|entry| Ok(entry.map_err(&failed)?.path()));
    paths.collect()
}

fn there<T>(opened: Result<T, MapError>) -> Result<Option<T>, MapError> {
    match opened {
        Err(MapError::NotPinned(_)) => Ok(None),
        other => other.map(Some),
    }
}

fn whole<K, V>(map: &str, entries: Entries<K, V>) -> Vec<(K, V)> {
    if !entries.complete {
        tracing::warn!(
            map,
            "the map changed while it was read; missing entries are written again"
        );
    }
    entries.found
}

/// Indexes of the interfaces of this network namespace.
pub fn interfaces() -> io::Result<BTreeSet<u32>> {
    let listing = nix::net::if_::if_nameindex()?;
    Ok(listing
        .iter()
        .map(nix::net::if_::Interface::index)
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pre_cache_that_cannot_be_read_is_reported() {
        let mut found = Found::default();
        found.read_pre_cache(Path::new("/no/such/file"));
        let [text] = found.damaged.as_slice() else {
            panic!("{:?}", found.damaged);
        };
        assert!(text.starts_with("--tofqdns-pre-cache /no/such/file cannot be read: "));
        assert!(found.restored.pre_cache.is_empty());
    }
}
