//! What an earlier run left behind: files and pinned maps, read once at the start.
//!
//! A damaged file is set aside as `….corrupt`, said and counted, and the start
//! goes on without it. A file of a later release stops the start: going on
//! would overwrite what that release knows.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
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
    files::{self, ENDPOINT_FILE, StateFiles},
    hook,
};
use daemon::{lookup::Lookup, regular_file};
use dns_policy::{boot_time::BootTime, wall_time};
use shared_maps::{
    EndpointId, IdentityId, pin,
    policy::{self, PolicyKey, PolicyValue},
    user::{Access, Entries, Globals, MapError},
};

use crate::endpoint::source::without;

/// Why the agent must not start on what it found.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// A file of a later release.
    #[error("{path}: {reason}; run the newer release, or move the file away", path = .path.display())]
    Newer {
        path: PathBuf,
        /// What it says of itself.
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
    read_files(files, &mut found)?;
    read_maps(maps, &mut found.restored)?;
    found.restored.interfaces = interfaces().map_err(RestoreError::Interfaces)?;
    found.restored.programs = programs(maps)?;
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
    let added = text(&files.added_endpoint_identities(), found)?;
    let parse = |whole: &str| endpoint_checkpoint::parse(whole, added.as_deref());
    found.restored.endpoint_identities = identities(&files.endpoint_checkpoint(), parse, found)?;
    if let Some(text) = text(&files.cleaned(), found)? {
        let path = files.cleaned();
        match cleaned::parse(&text) {
            Ok(names) => found.restored.cleaned = names,
            Err(error @ CleanedError::Newer(_)) => return Err(newer(path, &error)),
            Err(error) => set_aside(&path, &error, found)?,
        }
    }
    let dir = files.dir();
    let failed = |source| RestoreError::File {
        path: dir.to_owned(),
        source,
    };
    for entry in fs::read_dir(dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let number = path.file_name().and_then(|name| name.to_str());
        if number.is_none_or(|number| number.parse::<u16>().is_err()) {
            continue;
        }
        if let Lookup::Found(entry) = Lookup::of_path(fs::metadata(&path))
            && !entry.is_dir()
        {
            let error = io::Error::from(io::ErrorKind::NotADirectory);
            set_aside(&path, &error, found)?;
            continue;
        }
        let path = path.join(ENDPOINT_FILE);
        let Some(text) = text(&path, found)? else {
            continue;
        };
        match config_file::parse(&text) {
            Ok(mut endpoint) => {
                let left_out = endpoint.leave_out();
                if !left_out.is_empty() {
                    let left_out: Vec<&str> = left_out.iter().map(String::as_str).collect();
                    let remedy = "give it labels of its own";
                    let text = format!("endpoint {}: {}", endpoint.key, without(&left_out, remedy));
                    tracing::error!("{text}");
                    found.damaged.push(text);
                }
                found.restored.endpoints.push(endpoint);
            }
            Err(error @ FileError::Newer(_)) => {
                return Err(newer(path, &error));
            }
            Err(error) => set_aside(&path, &error, found)?,
        }
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
    let Some(text) = text(path, found)? else {
        return Ok(Vec::new());
    };
    match parse(&text) {
        Ok(identities) => Ok(identities),
        Err(error @ (CheckpointError::Newer(_) | CheckpointError::NewerLogic(_))) => {
            Err(newer(path.to_owned(), &error))
        }
        Err(error) => {
            set_aside(path, &error, found)?;
            Ok(Vec::new())
        }
    }
}

/// Text of a file; bytes that are no UTF-8 become text that parses as nothing. An unreadable file is
/// set aside, unless the agent may be able to read it a moment later.
fn text(path: &Path, found: &mut Found) -> Result<Option<String>, RestoreError> {
    match regular_file::look(path) {
        Lookup::Found(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
        Lookup::Gone => Ok(None),
        Lookup::Unknown(source) if regular_file::is_passing(&source) => Err(RestoreError::File {
            path: path.to_owned(),
            source,
        }),
        Lookup::Unknown(error) => {
            set_aside(path, &error, found)?;
            Ok(None)
        }
    }
}

fn newer(path: PathBuf, error: &dyn std::error::Error) -> RestoreError {
    RestoreError::Newer {
        path,
        reason: error.to_string(),
    }
}

fn set_aside(
    path: &Path,
    error: &dyn std::error::Error,
    found: &mut Found,
) -> Result<(), RestoreError> {
    let aside = files::set_aside(path).map_err(|source| RestoreError::File {
        path: path.to_owned(),
        source,
    })?;
    let text = format!(
        "{}: {error}; set aside as {}",
        path.display(),
        aside.display()
    );
    tracing::error!("{text}");
    found.damaged.push(text);
    Ok(())
}

fn read_maps(maps: &Globals, restored: &mut Restored) -> Result<(), RestoreError> {
    if let Some(map) = there(maps.ipcache(Access::ReadOnly))? {
        restored.ipcache = whole("ipcache", map.entries()?);
    } else if let Some(map) = there(maps.ipcache_v1(Access::ReadOnly))? {
        let entries = whole("older ipcache", map.entries()?).into_iter();
        let entries = entries.map(|(key, value)| (key, IdentityId(value.sec_identity)));
        restored.older_ipcache = entries.collect();
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
    let listing = match fs::read_dir(&dir) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other,
    };
    let failed = |source| RestoreError::File {
        path: dir.clone(),
        source,
    };
    let mut found = Vec::new();
    for entry in listing.map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
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
            let place = hook::place(&pin).map_err(|source| RestoreError::File {
                path: pin.clone(),
                source,
            })?;
            if let Some((ifindex, _)) = place {
                found.entry(EndpointId(number)).or_default().insert(ifindex);
            }
        }
    }
    Ok(found)
}

/// What a directory has; nothing if there is none.
fn entries(dir: &Path) -> Result<Vec<PathBuf>, RestoreError> {
    let failed = |source| RestoreError::File {
        path: dir.to_owned(),
        source,
    };
    let listing = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        listing => listing.map_err(failed)?,
    };
    let paths = listing.map(|entry| Ok(entry.map_err(failed)?.path()));
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
