//! Removes everything that agents have put on this node.
//!
//! The CNI configuration goes first, so that new pods start without the agent. Then the programs: from
//! then on the pods are open. Then what only the programs need.

use std::{
    fmt, fs,
    io::{self, Write as _},
    os::unix::fs::{FileTypeExt as _, chroot},
    path::{Path, PathBuf},
};

use agent_datapath::{
    filter::{self, Owner},
    group,
    kernel::SHARED_PINS,
    nftables::{self, Family},
    root::{BpfRootLock, RootError},
    routing, tunnel, unclaimed,
};
use daemon::lookup::present;
use shared_maps::{pin, policy, user::Globals};

use crate::{
    cni::install,
    config::Config,
    endpoint::source::store as stored,
    epoch::{LOCK_FILE, StateDirLock},
    netns_lock, netpol,
};

/// Beginning of the names of our own maps, of every release.
const NAMES_OF_OURS: &str = "hf_";
/// Directory of the proxies' sockets in the state directory. Proxies may still run.
const PROXIES: &str = "sdp";
/// The kinds of file systems that the kernel has.
const FILE_SYSTEMS: &str = "/proc/filesystems";
/// Names in the state directory that belong to `netpol run`.
const NETPOL: [&str; 2] = ["netpol", "netpol-admin.sock"];

/// Where agents of this node have their files.
#[derive(Clone, Debug)]
pub struct Places {
    pub bpf_root: PathBuf,
    pub state_dir: PathBuf,
    pub endpoint_store: PathBuf,
    /// `--cni-conf-dir`; `None` = no CNI configuration was written.
    pub cni_conf_dir: Option<PathBuf>,
}

impl Places {
    /// The places of an agent with these settings.
    pub(crate) fn of(config: &Config) -> Self {
        Self {
            bpf_root: config.flags.bpf_root.clone(),
            state_dir: config.flags.state_dir.clone(),
            endpoint_store: config.flags.endpoint_store.clone(),
            cni_conf_dir: config.flags.cni.plugin.cni_conf_dir.clone(),
        }
    }
}

/// What could not be removed. The rest was.
#[derive(Debug, thiserror::Error)]
#[error("{}; remove it by hand, or run `holdfast-agent cleanup` again", .0.join("; "))]
pub(crate) struct Left(Vec<String>);

/// Result of a clean-up: the removed and the remaining parts.
#[derive(Debug, Default)]
pub(crate) struct Cleaned {
    /// What was removed, a line each.
    pub(crate) removed: Vec<String>,
    /// What another program uses.
    kept: Vec<String>,
    /// What could not be removed, and why.
    left: Vec<String>,
}

impl Cleaned {
    /// Notes the result of a part: what was removed, or why it is left.
    fn part<E: fmt::Display>(&mut self, what: &str, result: Result<Option<String>, E>) {
        match result {
            Ok(removed) => self.removed.extend(removed),
            Err(error) => self.left.push(format!("{what}: {error}")),
        }
    }

    /// Notes whether a table of nftables was there and was removed.
    fn table<E: fmt::Display>(&mut self, what: &str, was_there: Result<bool, E>) {
        self.part(
            what,
            was_there.map(|was_there| was_there.then(|| what.to_owned())),
        );
    }

    /// # Errors
    /// Something is left.
    pub(crate) fn result(self) -> Result<(), Left> {
        match self.left.is_empty() {
            true => Ok(()),
            false => Err(Left(self.left)),
        }
    }
}

/// The node's root cannot be used.
#[derive(Debug, thiserror::Error)]
#[error(
    "--host-root {root}: {source}; give the directory that has the node's root: /host in a pod of \
     `kubectl debug node --profile=sysadmin`, / on the node itself",
    root = .root.display()
)]
pub struct HostRootError {
    root: PathBuf,
    source: io::Error,
}

/// Why a clean-up was refused. Nothing was removed.
#[derive(Debug, thiserror::Error)]
enum Refused {
    /// An agent runs, whose policy is in force.
    #[error(
        "an agent (pid {pid}) runs on the BPF root {root}; end it first: in a cluster take the node \
         from agent.nodeSelector, elsewhere stop its service",
        root = .root.display()
    )]
    AgentRuns { root: PathBuf, pid: String },
    /// The directories do not belong to the node, or cannot be used.
    #[error(
        "{0}; in a pod of `kubectl debug node` give --host-root /host, so that the directories are \
         the node's"
    )]
    Root(RootError),
    /// Only what `netpol run` left could be removed.
    #[error(
        "programs, maps and files of `holdfast-agent run` were not looked at: {0}; in a pod of `kubectl \
         debug node` give --host-root /host; where `holdfast-agent run` never ran there are none"
    )]
    NotLookedAt(RootError),
}

impl From<RootError> for Refused {
    fn from(error: RootError) -> Self {
        match error {
            RootError::Busy { root, pid } => Self::AgentRuns { root, pid },
            error => Self::Root(error),
        }
    }
}

/// Makes the node's root that of this process, so that links on the node lead to files of the node.
///
/// # Errors
/// The root is no directory, or this process lacks the right.
pub fn enter(host_root: &Path) -> Result<(), HostRootError> {
    if host_root == Path::new("/") {
        return Ok(());
    }
    let entered = chroot(host_root).and_then(|()| std::env::set_current_dir("/"));
    entered.map_err(|source| HostRootError {
        root: host_root.to_owned(),
        source,
    })
}

/// Cleans up after agents that have stopped, and prints what was removed.
///
/// # Errors
/// An agent runs, or something could not be removed.
pub async fn run(places: &Places) -> anyhow::Result<()> {
    let root = match BpfRootLock::take(&places.bpf_root) {
        Err(error @ RootError::NotBpffs(_)) => return without_bpf(places, error),
        root => root.map_err(Refused::from)?,
    };
    let state = StateDirLock::take(&places.state_dir)?;
    let cleaned = everything(places).await;
    drop((root, state));
    report(cleaned)
}

/// Removes what `netpol run` left, where there is no BPF file system: the rest cannot be looked at.
fn without_bpf(places: &Places, error: RootError) -> anyhow::Result<()> {
    if let Some(pid) = netns_lock::run()? {
        let root = places.bpf_root.clone();
        return Err(Refused::AgentRuns { root, pid }.into());
    }
    let mut cleaned = Cleaned::default();
    let runs = netns_lock::has_netpol();
    the_table(&runs, &mut cleaned);
    if matches!(runs, Ok(false)) {
        the_cni_configuration(places, &mut cleaned);
        let state = &places.state_dir;
        let removed = remove_netpol(state);
        let text = |count| counted(count, "file or directory", "of state", state);
        cleaned.part(&state.display().to_string(), removed.map(text));
    }
    report(cleaned)?;
    match fs::read_to_string(FILE_SYSTEMS) {
        Ok(known) if !known.lines().any(|line| line.ends_with("\tbpf")) => Ok(()),
        _ => Err(Refused::NotLookedAt(error).into()),
    }
}

/// Prints what was removed.
fn report(cleaned: Cleaned) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    for kept in &cleaned.kept {
        writeln!(out, "kept {kept}")?;
    }
    if cleaned.removed.is_empty() && cleaned.left.is_empty() && cleaned.kept.is_empty() {
        writeln!(out, "nothing of holdfast-agent was on this node")?;
    }
    for removed in &cleaned.removed {
        writeln!(out, "removed {removed}")?;
    }
    Ok(cleaned.result()?)
}

/// Cleans up for a caller that holds the locks of both directories.
pub(crate) async fn everything(places: &Places) -> Cleaned {
    let mut cleaned = Cleaned::default();
    the_cni_configuration(places, &mut cleaned);
    // First: without programs, an interface in the group would send nothing.
    cleaned.part("the group of interfaces", group::leave_all().map(|()| None));
    // Without its program, the device would unwrap what anybody sends to the node.
    let cleared = tunnel::clear(&Globals::new(&places.bpf_root)).await;
    cleaned.part("the tunnel between nodes", cleared.map(|()| None));
    let root = fs::canonicalize(&places.bpf_root);
    let removed = root.and_then(|root| filter::remove_all(&Owner::of(&root)));
    let text = |count| match count {
        0 => None,
        1 => Some("1 tc filter of programs".to_owned()),
        count => Some(format!("{count} tc filters of programs")),
    };
    cleaned.part("tc filters of programs", removed.map(text));
    let links = places.bpf_root.join("holdfast");
    let removed = remove_links(&links);
    let text = |count| counted(count, "pinned link", "of programs", &links);
    cleaned.part(&links.display().to_string(), removed.map(text));
    for family in Family::ALL {
        cleaned.table(
            &nftables::table(family).to_string(),
            nftables::remove(family),
        );
    }
    for family in unclaimed::FAMILIES {
        cleaned.table(
            &unclaimed::table(family).to_string(),
            unclaimed::remove(family),
        );
    }
    let netpol_runs = netns_lock::has_netpol();
    the_table(&netpol_runs, &mut cleaned);
    let removed = routing::remove().await;
    let text = |parts: Vec<&str>| (!parts.is_empty()).then(|| parts.join(", "));
    cleaned.part("the routing rules", removed.map(text));
    let globals = places.bpf_root.join(pin::GLOBALS);
    let removed = remove_maps(&globals);
    let text = |count| counted(count, "pinned map", "of the agent", &globals);
    cleaned.part(&globals.display().to_string(), removed.map(text));
    let store = &places.endpoint_store;
    // The path with which the agent stored them.
    let removed = stored::remove_all(store, &places.state_dir.join("state"));
    let text = |count| counted(count, "file", "of added endpoints", store);
    cleaned.part(&store.display().to_string(), removed.map(text));
    let state = &places.state_dir;
    // It may have started meanwhile.
    let netpol_runs = [netpol_runs, netns_lock::has_netpol()];
    let removed = remove_state(
        state,
        !netpol_runs.iter().all(|runs| matches!(runs, Ok(false))),
    );
    let text = |count| counted(count, "file or directory", "of state", state);
    cleaned.part(&state.display().to_string(), removed.map(text));
    cleaned
}

/// Removes the configuration of the CNI plugin, unless `netpol run` answers the plugin: the agent does not run. If no
/// process answers, no pod starts.
fn the_cni_configuration(places: &Places, cleaned: &mut Cleaned) {
    if let Some(dir) = &places.cni_conf_dir {
        let what = format!("the CNI configuration in {}", dir.display());
        if install::is_answered(dir) {
            cleaned.kept.push(format!(
                "{what}: `holdfast-agent netpol run` answers its plugin; stop that and run this again to remove it"
            ));
            return;
        }
        let withdrawn = install::withdraw(dir);
        cleaned.part(
            &what,
            withdrawn.map(|was_there| was_there.then(|| what.clone())),
        );
    }
}

/// Removes the table of `netpol run`, unless its process runs.
fn the_table(runs: &io::Result<bool>, cleaned: &mut Cleaned) {
    let what = "the nftables table of `netpol run`";
    match runs {
        Ok(true) => cleaned.kept.push(format!(
            "{what} (pid {}), which runs; stop it and run this again to remove it",
            netns_lock::holder()
        )),
        Ok(false) => cleaned.table(what, netpol::remove_table()),
        Err(error) => cleaned.left.push(format!("{what}: {error}")),
    }
}

/// Text such as `2 pinned links of programs in DIR`; `None` if `count` is 0.
fn counted(count: usize, one: &str, of: &str, dir: &Path) -> Option<String> {
    let several = match one {
        "file or directory" => "files and directories".to_owned(),
        one => format!("{one}s"),
    };
    let noun = if count == 1 { one } else { &several };
    (count > 0).then(|| format!("{count} {noun} {of} in {}", dir.display()))
}

/// Removes the pins of links and programs, which detaches the linked programs. Returns their number.
fn remove_links(dir: &Path) -> io::Result<usize> {
    let count = files_below(dir)?;
    present(fs::remove_dir_all(dir))?;
    Ok(count)
}

fn files_below(dir: &Path) -> io::Result<usize> {
    let mut count = 0;
    for entry in present(fs::read_dir(dir))?.into_iter().flatten() {
        let entry = entry?;
        count += match entry.file_type()?.is_dir() {
            true => files_below(&entry.path())?,
            false => 1,
        };
    }
    Ok(count)
}

/// Removes the maps, and the directories that are empty then. Gives how many maps there were.
fn remove_maps(globals: &Path) -> io::Result<usize> {
    let mut count = 0;
    let Some(maps) = present(fs::read_dir(globals))? else {
        return Ok(count);
    };
    for map in maps {
        let map = map?;
        if map.file_name().to_str().is_some_and(is_our_map) {
            count += usize::from(present(fs::remove_file(map.path()))?.is_some());
        }
    }
    for dir in globals.ancestors().take(2) {
        // Not empty: another program has maps there.
        if fs::remove_dir(dir).is_err() {
            break;
        }
    }
    Ok(count)
}

fn is_our_map(name: &str) -> bool {
    name.starts_with(NAMES_OF_OURS)
        || name.starts_with(policy::NAME_PREFIX)
        || SHARED_PINS.contains(&name)
}

/// Removes the agent's files. Its lock stays until the process ends, and so does the directory, which
/// may be a mount. With `netpol_runs`, the files of `netpol run` stay. Gives the number of removed entries.
fn remove_state(dir: &Path, netpol_runs: bool) -> io::Result<usize> {
    let mut count = 0;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let path = entry.path();
        let kind = entry.file_type()?;
        // A socket that answers, such as that for the CNI plugin, is `netpol run`'s: the agent does not run.
        let is_open = kind.is_socket() && install::is_open(&path);
        let is_netpols = NETPOL.iter().any(|name| entry.file_name() == *name);
        let is_proxies = kind.is_dir() && entry.file_name() == PROXIES;
        if is_proxies || is_open || netpol_runs && is_netpols {
            continue;
        }
        let removed = if kind.is_dir() {
            present(fs::remove_dir_all(path))?
        } else if kind.is_file() || kind.is_socket() {
            present(fs::remove_file(path))?
        } else {
            None
        };
        count += usize::from(removed.is_some() && entry.file_name() != LOCK_FILE);
    }
    Ok(count)
}

/// Removes the files of `netpol run`. Gives how many entries of the directory were removed.
fn remove_netpol(dir: &Path) -> io::Result<usize> {
    let mut count = 0;
    for path in NETPOL.iter().map(|name| dir.join(name)) {
        let removed = match path.is_dir() {
            true => present(fs::remove_dir_all(path))?,
            false => present(fs::remove_file(path))?,
        };
        count += usize::from(removed.is_some());
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_netpol_run_go_and_others_stay() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("netpol/state")).unwrap();
        for name in ["netpol-admin.sock", "agent.lock"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        assert_eq!(remove_netpol(dir.path()).unwrap(), 2);
        assert!(dir.path().join("agent.lock").exists());
        assert_eq!(remove_netpol(dir.path()).unwrap(), 0);
    }

    #[test]
    fn maps_and_files_of_the_agent_go_and_those_of_others_stay() {
        let dir = tempfile::tempdir().unwrap();
        let globals = dir.path().join(pin::GLOBALS);
        let state = dir.path().join("run");
        fs::create_dir_all(&globals).unwrap();
        fs::create_dir_all(state.join("state/7")).unwrap();
        fs::create_dir_all(state.join(PROXIES)).unwrap();
        let ours = ["cilium_lxc", "hf_redirect_v1", "cilium_policy_v2_00007"];
        for map in ours.iter().chain(&["cilium_lb4_services_v2"]) {
            fs::write(globals.join(map), "").unwrap();
        }
        for file in ["state/7/ep_config.json", "agent.lock", "sdp/one.sock"] {
            fs::write(state.join(file), "").unwrap();
        }
        // The lock is this process's own and does not count.
        assert_eq!(remove_maps(&globals).unwrap(), 3);
        assert_eq!(remove_state(&state, true).unwrap(), 1);
        let left = |dir: &Path| {
            let names = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name());
            names.collect::<Vec<_>>()
        };
        assert_eq!(left(&globals), ["cilium_lb4_services_v2"]);
        assert_eq!(left(&state), [PROXIES]);
        // Without the other program's map, the directories go too. Missing files are no error.
        fs::remove_file(globals.join("cilium_lb4_services_v2")).unwrap();
        assert_eq!(remove_maps(&globals).unwrap(), 0);
        assert_eq!(remove_maps(&globals).unwrap(), 0);
        assert_eq!(left(dir.path()), ["run"]);
    }
}
