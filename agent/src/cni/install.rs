//! Keeps the plugin and its configuration in place on this node, once the agent is ready.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use daemon::{
    lookup::Lookup,
    regular_file,
    state_file::{rename_synced, sync_dir, write_atomic},
    unix_socket::connect_now,
};
use tokio::{sync::watch, time::sleep};
use tokio_util::sync::CancellationToken;

use super::conflist::{self, BaseError, FILE};
use crate::watched_dir::WatchedDir;

/// Pause before the next attempt, if the directory cannot be read or written.
const AGAIN: Duration = Duration::from_secs(5);
const PLUGIN: &str = "holdfast-cni";

/// Directories of the plugin and of its configuration.
#[derive(Clone, Debug)]
pub(crate) struct CniPlaces {
    /// Directory of CNI configurations (`--cni-conf-dir`); `None` = none is written.
    pub conf_dir: Option<PathBuf>,
    /// Directory of CNI plugins (`--cni-bin-dir`); `None` = the plugin is not installed.
    pub bin_dir: Option<PathBuf>,
    /// The agent's socket, which the configuration names.
    pub socket: PathBuf,
}

/// Whether new pods get the plugin: for `status`.
#[derive(Clone, Debug, Default)]
pub struct CniCondition(Arc<watch::Sender<Place>>);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Place {
    /// The agent is not ready yet.
    #[default]
    Awaited,
    There,
    /// Why the plugin may not be in place.
    Failed(String),
}

impl CniCondition {
    /// The problem, if there is one.
    pub(crate) fn problem(&self) -> Option<String> {
        match &*self.0.borrow() {
            Place::Failed(problem) => Some(problem.clone()),
            Place::Awaited | Place::There => None,
        }
    }

    /// Waits until the plugin and its configuration are in place.
    pub(crate) async fn in_place(&self) {
        let mut place = self.0.subscribe();
        // Waiting cannot fail: `self` holds the sender.
        let _there = place.wait_for(|place| *place == Place::There).await;
    }

    fn set(&self, now: Place) {
        self.0.send_if_modified(|known| {
            if *known == now {
                return false;
            }
            match (&now, &known) {
                (Place::Failed(problem), _) => tracing::warn!("{problem}"),
                (Place::There, Place::Failed(_)) => {
                    tracing::info!("the CNI configuration is in place");
                }
                _ => {}
            }
            *known = now;
            true
        });
    }
}

/// Why the plugin or its configuration is not in place.
#[derive(Debug, thiserror::Error)]
enum InstallError {
    #[error("{path}: {source}; correct {flag}, or let the agent write there", path = .path.display())]
    Io {
        path: PathBuf,
        flag: &'static str,
        source: io::Error,
    },
    #[error(
        "{dir} has no CNI configuration: install the cluster's network; holdfast-cni is added to it then",
        dir = .0.display()
    )]
    NoBase(PathBuf),
    #[error(
        "{path} sorts before {FILE}, so runtimes use it, and pods are not under policy from their start; \
         rename it, for example to 10-{name}",
        path = .path.display(), name = .path.file_name().unwrap_or_default().display()
    )]
    Earlier { path: PathBuf },
    #[error("{path} {source}; {FILE} stays as it is", path = .path.display())]
    Base { path: PathBuf, source: BaseError },
}

impl CniPlaces {
    /// Installs once `ready` ends with true, then follows changes of the directory until stopped.
    pub(crate) async fn run(
        self,
        condition: CniCondition,
        ready: impl Future<Output = bool>,
        stop: CancellationToken,
    ) {
        if stop.run_until_cancelled(ready).await != Some(true) {
            return;
        }
        let watched = self.conf_dir.as_deref().map(WatchedDir::new);
        loop {
            let places = self.clone();
            let installed = tokio::task::spawn_blocking(move || places.install()).await;
            let place = match installed {
                Ok(Ok(())) => Place::There,
                Ok(Err(error)) => Place::Failed(format!("CNI: {error}")),
                Err(_) => return,
            };
            let pause = async {
                match &watched {
                    Some(watched) => watched.changed().await,
                    None => sleep(AGAIN).await,
                }
            };
            condition.set(place);
            if stop.run_until_cancelled(pause).await.is_none() {
                return;
            }
        }
    }

    fn install(&self) -> Result<(), InstallError> {
        // The plugin first: with a configuration that names a missing plugin, no pod starts.
        if let Some(dir) = &self.bin_dir {
            install_plugin(dir)?;
        }
        match &self.conf_dir {
            Some(dir) => write_list(dir, &self.socket),
            None => Ok(()),
        }
    }
}

fn failed(flag: &'static str, path: &Path) -> impl FnOnce(io::Error) -> InstallError + use<> {
    let path = path.to_owned();
    move |source| InstallError::Io { path, flag, source }
}

/// Copies the plugin from the directory of this program, unless the same one is there already.
fn install_plugin(dir: &Path) -> Result<(), InstallError> {
    let failed = |path: &Path| failed("--cni-bin-dir", path);
    let own = std::env::current_exe().map_err(failed(Path::new("/proc/self/exe")))?;
    let from = own.with_file_name(PLUGIN);
    let wanted = fs::read(&from).map_err(failed(&from))?;
    let to = dir.join(PLUGIN);
    if regular_file::read(&to).is_ok_and(|present| present == wanted) {
        return Ok(());
    }
    // Runtimes may start the plugin at any time, so it gets its name only when it is whole. No runtime lists this
    // directory, so the temporary name does no harm.
    let temporary = dir.join(format!(".{PLUGIN}.new"));
    let written = (|| {
        fs::write(&temporary, &wanted)?;
        fs::set_permissions(&temporary, fs::Permissions::from_mode(0o755))?;
        rename_synced(&fs::File::open(&temporary)?, &temporary, &to)
    })();
    written.map_err(failed(&to))?;
    tracing::info!(path = %to.display(), "installed the CNI plugin");
    Ok(())
}

fn write_list(dir: &Path, socket: &Path) -> Result<(), InstallError> {
    let failed = |path: &Path| failed("--cni-conf-dir", path);
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(failed(dir))? {
        let name = entry.map_err(failed(dir))?.file_name();
        names.extend(name.into_string().ok());
    }
    let base = conflist::base(names.iter().map(String::as_str));
    let base = base.ok_or_else(|| InstallError::NoBase(dir.to_owned()))?;
    let path = dir.join(base);
    if base < FILE {
        return Err(InstallError::Earlier { path });
    }
    let text = regular_file::read(&path).map_err(|error| failed(&path)(error.into()))?;
    let own = dir.join(FILE);
    let before = regular_file::read(&own).ok();
    let wanted = conflist::chained(&text, before.as_deref(), socket)
        .map_err(|source| InstallError::Base { path, source })?;
    if before.is_some_and(|before| before == wanted.as_bytes()) {
        return Ok(());
    }
    write_atomic(&own, wanted.as_bytes()).map_err(failed(&own))?;
    tracing::info!(path = %own.display(), base, "wrote the CNI configuration");
    Ok(())
}

/// Removes our configuration. The plugin stays: the runtime calls it when pods made with it end.
/// Returns whether the configuration was there.
///
/// # Errors
/// The file could not be removed.
pub(crate) fn withdraw(dir: &Path) -> io::Result<bool> {
    let own = dir.join(FILE);
    let ours = match regular_file::look(&own) {
        Lookup::Found(text) => conflist::is_ours(&text),
        Lookup::Gone => false,
        Lookup::Unknown(error) => return Err(error),
    };
    if ours {
        fs::remove_file(&own)?;
        sync_dir(dir)?;
    }
    Ok(ours)
}

/// Whether a process has the socket, also if it accepts no connections now.
pub(crate) fn is_open(socket: &Path) -> bool {
    match connect_now(socket) {
        Ok(_) => true,
        Err(error) => error.kind() == io::ErrorKind::WouldBlock,
    }
}

/// Whether a process answers the plugin of our configuration in the directory.
pub(crate) fn is_answered(dir: &Path) -> bool {
    let Lookup::Found(text) = regular_file::look(&dir.join(FILE)) else {
        return false;
    };
    conflist::socket(&text).is_some_and(|socket| is_open(&socket))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: &str = r#"{"name":"net","cniVersion":"1.0.0","plugins":[{"type":"ptp"}]}"#;

    fn write(dir: &Path) -> Result<(), String> {
        write_list(dir, Path::new("/run/holdfast/cni.sock")).map_err(|error| error.to_string())
    }

    #[test]
    fn our_list_follows_its_base_and_is_withdrawn_without_it() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join(FILE);
        let error = write(dir.path()).unwrap_err();
        assert!(
            error.contains("no CNI configuration") && !own.exists(),
            "{error}"
        );
        let base = dir.path().join("10-net.conflist");
        fs::write(&base, BASE).unwrap();
        write(dir.path()).unwrap();
        let mode = fs::metadata(&own).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600);
        let first = fs::read_to_string(&own).unwrap();
        fs::write(&base, BASE.replace("ptp", "bridge")).unwrap();
        write(dir.path()).unwrap();
        let second = fs::read_to_string(&own).unwrap();
        assert!(first.contains("ptp") && second.contains("bridge") && !second.contains("ptp"));
        // A torn or missing base leaves ours in force.
        fs::write(&base, "{").unwrap();
        assert!(
            write(dir.path())
                .unwrap_err()
                .contains("10-net.conflist is not JSON")
        );
        fs::remove_file(&base).unwrap();
        write(dir.path()).unwrap_err();
        assert_eq!(fs::read_to_string(&own).unwrap(), second);
        assert!(withdraw(dir.path()).unwrap());
        assert!(!own.exists() && !withdraw(dir.path()).unwrap());
    }

    #[test]
    fn a_file_of_our_name_that_is_not_ours_is_not_withdrawn() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(FILE), BASE).unwrap();
        assert!(!withdraw(dir.path()).unwrap());
        assert!(dir.path().join(FILE).exists());
    }

    #[test]
    fn a_base_that_sorts_before_ours_is_named() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("00-multus.conf"), BASE).unwrap();
        let error = write(dir.path()).unwrap_err();
        assert!(error.contains("00-multus.conf sorts before"), "{error}");
        let error = write(&dir.path().join("missing")).unwrap_err();
        assert!(error.contains("--cni-conf-dir"), "{error}");
    }
}
