//! Takes everything that agents have put on this node off it.
//!
//! The CNI configuration goes first, so that new pods start without the agent. Then the programs: from
//! then on the pods are open. Then what only the programs need.

use std::{
    fs, io,
    os::unix::fs::FileTypeExt as _,
    path::{Path, PathBuf},
};

use shared_maps::{pin, policy};

use crate::{
    cni::install,
    datapath::{kernel::SHARED_PINS, notrack, root::BpfRootLock, routing},
    epoch::StateDirLock,
};

/// Beginning of the names of our own maps, of every release.
const NAMES_OF_OURS: &str = "hf_";
/// Directory of the proxies' sockets in the state directory. Proxies may still run.
const PROXIES: &str = "sdp";

/// Where agents of this node have their files.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    /// `--bpf-root`.
    pub(crate) bpf_root: PathBuf,
    /// `--state-dir`.
    pub(crate) state_dir: PathBuf,
    /// `--cni-conf-dir`; `None` = no CNI configuration was written.
    pub(crate) cni_conf_dir: Option<PathBuf>,
}

/// What could not be removed. The rest was.
#[derive(Debug, thiserror::Error)]
#[error("{}; remove it by hand, or run `holdfast-agent cleanup` again", .0.join("; "))]
pub(crate) struct Left(Vec<String>);

/// Cleans up after agents that have stopped.
///
/// # Errors
/// An agent runs, or something could not be removed.
pub(crate) async fn run(places: &Places) -> anyhow::Result<()> {
    let state = StateDirLock::take(&places.state_dir)?;
    let root = BpfRootLock::take(&places.bpf_root)?;
    let cleaned = everything(places).await;
    drop((root, state));
    Ok(cleaned?)
}

/// The same for a caller that holds the locks of both directories.
///
/// # Errors
/// Something could not be removed.
pub(crate) async fn everything(places: &Places) -> Result<(), Left> {
    let mut left = Vec::new();
    let mut failed = |what: String, error: &dyn std::error::Error| {
        left.push(format!("{what}: {error}"));
    };
    if let Some(dir) = &places.cni_conf_dir
        && let Err(error) = install::withdraw(dir)
    {
        failed(
            format!("the CNI configuration in {}", dir.display()),
            &error,
        );
    }
    let links = places.bpf_root.join("holdfast");
    if let Err(error) = present(fs::remove_dir_all(&links)) {
        failed(links.display().to_string(), &error);
    }
    if let Err(error) = notrack::remove() {
        failed("the nftables table".to_owned(), &error);
    }
    if let Err(error) = routing::remove().await {
        failed("the routing rules".to_owned(), &error);
    }
    let globals = places.bpf_root.join(pin::GLOBALS);
    if let Err(error) = remove_maps(&globals) {
        failed(globals.display().to_string(), &error);
    }
    if let Err(error) = remove_state(&places.state_dir) {
        failed(places.state_dir.display().to_string(), &error);
    }
    if left.is_empty() {
        Ok(())
    } else {
        Err(Left(left))
    }
}

/// Removes the maps, and the directories that are empty then.
fn remove_maps(globals: &Path) -> io::Result<()> {
    let Some(maps) = present(fs::read_dir(globals))? else {
        return Ok(());
    };
    for map in maps {
        let map = map?;
        if map.file_name().to_str().is_some_and(is_our_map) {
            present(fs::remove_file(map.path()))?;
        }
    }
    for dir in globals.ancestors().take(2) {
        // Not empty: another program has maps there.
        if fs::remove_dir(dir).is_err() {
            break;
        }
    }
    Ok(())
}

fn is_our_map(name: &str) -> bool {
    name.starts_with(NAMES_OF_OURS)
        || name.starts_with(policy::NAME_PREFIX)
        || SHARED_PINS.contains(&name)
}

/// Removes the agent's files. Its lock stays until the process ends, and so does the directory, which
/// may be a mount.
fn remove_state(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let path = entry.path();
        let kind = entry.file_type()?;
        if kind.is_dir() && entry.file_name() == PROXIES {
            continue;
        }
        if kind.is_dir() {
            present(fs::remove_dir_all(path))?;
        } else if kind.is_file() || kind.is_socket() {
            present(fs::remove_file(path))?;
        }
    }
    Ok(())
}

/// Nothing there is as good as removed.
fn present<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_and_files_of_the_agent_go_and_those_of_others_stay() {
        let dir = tempfile::tempdir().unwrap();
        let globals = dir.path().join(pin::GLOBALS);
        let state = dir.path().join("run");
        fs::create_dir_all(&globals).unwrap();
        fs::create_dir_all(state.join("state/7")).unwrap();
        fs::create_dir_all(state.join(PROXIES)).unwrap();
        let ours = ["cilium_lxc", "hf_redirect_v2", "cilium_policy_v2_00007"];
        for map in ours.iter().chain(&["cilium_lb4_services_v2"]) {
            fs::write(globals.join(map), "").unwrap();
        }
        for file in ["state/7/ep_config.json", "agent.lock", "sdp/one.sock"] {
            fs::write(state.join(file), "").unwrap();
        }
        remove_maps(&globals).unwrap();
        remove_state(&state).unwrap();
        let left = |dir: &Path| {
            let names = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name());
            names.collect::<Vec<_>>()
        };
        assert_eq!(left(&globals), ["cilium_lb4_services_v2"]);
        assert_eq!(left(&state), [PROXIES]);
        // Without the others' map the directories go as well; what is gone is no error.
        fs::remove_file(globals.join("cilium_lb4_services_v2")).unwrap();
        remove_maps(&globals).unwrap();
        remove_maps(&globals).unwrap();
        assert_eq!(left(dir.path()), ["run"]);
    }
}
