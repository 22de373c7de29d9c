//! The OCI hook: has the agent put a container under policy before its program starts.
//!
//! ```text
//!  podman (network) ─► runc create ─► createRuntime: oci-hook ─► agent
//!                      pid, id         standard input              name, document, interface
//! ```
//! Only the id and the process id that the runtime gives are used. Annotations, which an image may set,
//! are not read.

use std::{
    io::Read as _,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use holdfast_agent::{
    admin::{
        client::{Client, ClientError},
        containers::{MayStart, Starting},
    },
    config::container_args::OciHookArgs,
    endpoint::container::{Containers, NamedContainers},
};
use nix::unistd::Uid;
use serde::Deserialize;

/// Maximum bytes of the runtime's state.
const INPUT: u64 = 4 << 20;
/// Pause between two requests to an agent that does not answer.
const PAUSE: Duration = Duration::from_millis(200);
/// The longest time that a container waits for the answer if no document is known to name it. An agent needs a tenth
/// of a second to answer.
const UNNAMED: Duration = Duration::from_secs(5);
/// How much later than it promised an agent may answer.
const GRACE: Duration = Duration::from_secs(2);
/// The fields of `/proc/self/uid_map` in the first user namespace.
const ALL_USERS: [&str; 3] = ["0", "0", "4294967295"];

/// The fields of the runtime's state that are used.
#[derive(Deserialize)]
struct State {
    id: String,
    pid: u32,
}

/// Succeeds if the container may start.
pub(super) async fn run(args: &OciHookArgs) -> Result<()> {
    if is_rootless()? {
        // The container's packets are those of the user's own processes, and no interface of the host leads to it.
        return Ok(());
    }
    let mut input = String::new();
    std::io::stdin()
        .take(INPUT)
        .read_to_string(&mut input)
        .context("the container's state on standard input")?;
    let state: State = serde_json::from_str(&input).context(
        "standard input is not the state of a container: an OCI runtime runs this command as a hook, with the stage \
         createRuntime",
    )?;
    let deadline = Instant::now() + args.wait;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let starting = Starting {
            id: state.id.clone(),
            pid: state.pid,
            wait_ms: u64::try_from(left.as_millis()).unwrap_or(u64::MAX),
        };
        // An agent that hangs must not hold up containers that it has nothing to do with.
        let patience = match without_agent(args, &state) {
            None => left.min(UNNAMED),
            Some(_) => left,
        };
        let client = Client::new(&args.admin_socket);
        let answer = client.post::<MayStart>("/v1/containers", &starting);
        let error = match tokio::time::timeout(patience + GRACE, answer).await {
            Ok(Ok(_)) => return Ok(()),
            Ok(Err(ClientError::Refused(reason))) => {
                bail!("the container does not start: {reason}")
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!(
                "no agent answers on {} although one is there: see its log",
                args.admin_socket.display()
            ),
        };
        match without_agent(args, &state) {
            None => return Ok(()),
            Some(_) if Instant::now() + PAUSE < deadline => tokio::time::sleep(PAUSE).await,
            Some(reason) => bail!("the container does not start: {reason}, and {error}"),
        }
    }
}

/// Why a container must not start while no agent answers; `None` if no document names it.
fn without_agent(args: &OciHookArgs, State { id, pid }: &State) -> Option<String> {
    let named = match NamedContainers::read(&args.endpoint_store) {
        Ok(named) => named,
        Err(error) => return Some(format!("it may have a document ({error})")),
    };
    if named.is_empty() {
        return None;
    }
    match named.bridge_of(*pid) {
        Ok(None) => {}
        Ok(Some(bridge)) => {
            return Some(format!(
                "it is connected to {bridge}, whose ports have a document"
            ));
        }
        Err(error) => {
            return Some(format!(
                "it may be connected to a bridge whose ports have a document ({error})"
            ));
        }
    }
    if !named.has_containers() {
        return None;
    }
    match Containers::of(&args.podman_root).name_of(id) {
        Ok(Some(name)) if named.has(&name) => Some(format!("{name} has a document")),
        Ok(Some(_)) => None,
        Ok(None) if !Containers::may_have_name(id) => None,
        Ok(None) => Some(format!(
            "{id} is not in podman's store, and others have documents"
        )),
        Err(error) => Some(format!("podman's store cannot be read ({error})")),
    }
}

/// Whether the runtime is rootless: it runs as another user than root, or as root in a user namespace.
fn is_rootless() -> Result<bool> {
    if !Uid::effective().is_root() {
        return Ok(true);
    }
    let map = std::fs::read_to_string("/proc/self/uid_map").context("/proc/self/uid_map")?;
    Ok(!map.split_whitespace().eq(ALL_USERS))
}
