//! The subcommands: requests to running proxies through their admin sockets.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use daemon::{
    command_line::{
        failure,
        health::{Health, Running, Versions},
        output::{self, Output},
    },
    http_client::{self, AnswerLimits},
};
use dns_policy::rule::Transport;
use http_body_util::Full;
use hyper::{Method, Request, body::Bytes};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{
    as_owner,
    explain::{ExplainQuestion, Explanation},
    policy::{PolicyAnswer, PolicyQuestion},
    server::is_left,
    status::Status,
};
use crate::config::{
    ADMIN_DIR, admin_socket_of,
    args::{Command, Settings},
};

/// Time limit for an answer. A proxy that takes longer counts as hanging.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// Maximum length of an answer, in bytes: far more than the rules of one endpoint need. Any process
/// of the proxies' user may serve the socket, so its answers need a limit.
const LARGEST_ANSWER: usize = 16 << 20;
/// Interval between two checks whether a draining proxy has exited.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// A proxy's answer to `drain`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct DrainStarted {
    /// The proxy exits within this time.
    pub limit: Duration,
}

/// Carries out a subcommand and prints its result to standard output.
pub fn run(settings: &Settings, command: &Command) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(execute(settings, command))
}

async fn execute(settings: &Settings, command: &Command) -> anyhow::Result<()> {
    match command {
        Command::Status(form) => status(settings, form.output).await,
        Command::Health { what, form } => show_health(settings, what.live, form.output).await,
        Command::Alive => show_health(settings, true, Output::Table).await,
        Command::Version(form) => {
            let versions = Versions {
                program: "holdfast-sdp",
                version: env!("CARGO_PKG_VERSION"),
                running: running(settings).await,
            };
            print(form.output, &versions, Versions::text)
        }
        Command::Drain(arguments) => {
            let socket = the_only_one(settings)?;
            refuse_unknown(settings, &socket, || sockets().unwrap_or_default())?;
            if !arguments.force {
                refuse_last(&socket).await?;
            }
            let leaving: DrainStarted = call(&socket, Method::POST, "/drain", &()).await?;
            let took = wait_gone(&socket, leaving.limit).await?;
            let left = serde_json::json!({"left": true, "took": took});
            print(arguments.form.output, &left, |_| {
                format!("left after {took:?}\n")
            })
        }
        Command::Policy(arguments) => {
            let question = PolicyQuestion {
                endpoint: arguments.filter.endpoint.clone(),
            };
            let socket = any_one(settings)?;
            let answer: PolicyAnswer = call(&socket, Method::POST, "/policy", &question).await?;
            print(arguments.form.output, &answer, PolicyAnswer::text)
        }
        Command::Explain(arguments) => {
            let question = ExplainQuestion {
                client: arguments.client.endpoint.clone(),
                name: arguments.question.clone(),
                server: arguments.server,
                port: arguments.port.number,
                tcp: arguments.tcp || arguments.port.transport == Transport::Tcp,
            };
            let socket = any_one(settings)?;
            let answer: Explanation = call(&socket, Method::POST, "/explain", &question).await?;
            print(arguments.form.output, &answer, Explanation::text)?;
            if !answer.is_allowed() {
                bail!("the query is refused: {}", answer.reason);
            }
            Ok(())
        }
    }
}

async fn show_health(settings: &Settings, live: bool, output: Output) -> anyhow::Result<()> {
    let health = health(&the_only_one(settings)?, live).await?;
    print(output, &health, Health::text)?;
    if !health.healthy {
        bail!("not ready: {}", health.missing.join("; "));
    }
    Ok(())
}

async fn health(socket: &Path, live: bool) -> anyhow::Result<Health> {
    let status: Status = call(socket, Method::GET, "/status", &()).await?;
    if live {
        return Ok(Health::live());
    }
    let missing = status.missing.iter();
    Ok(Health {
        healthy: status.ready,
        missing: missing
            .map(|missing| format!("{}: {}", missing.need, missing.reason))
            .collect(),
    })
}

/// The proxies that answer. Errors are ignored: `version` also works if no proxy runs.
async fn running(settings: &Settings) -> Vec<Running> {
    let sockets = match named(settings) {
        Some(socket) => vec![socket],
        None => sockets().unwrap_or_default(),
    };
    let mut running = Vec::new();
    for socket in sockets {
        let status = call::<Status>(&socket, Method::GET, "/status", &()).await;
        running.extend(status.map(|status| Running {
            name: status.name,
            pid: status.pid,
            version: status.version,
        }));
    }
    running
}

/// Fails if `--name` was given and there is no socket of that name. `others` gives the sockets of
/// this node.
fn refuse_unknown(
    settings: &Settings,
    socket: &Path,
    others: impl FnOnce() -> Vec<PathBuf>,
) -> anyhow::Result<()> {
    let Some(name) = settings.name.as_deref() else {
        return Ok(());
    };
    let is_missing =
        fs::symlink_metadata(socket).is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
    if settings.admin_socket.is_some() || !is_missing {
        return Ok(());
    }
    let others = others();
    let names: Vec<_> = others
        .iter()
        .filter_map(|path| path.file_stem()?.to_str())
        .collect();
    let running = match names.is_empty() {
        true => "none runs on this node".to_owned(),
        false => format!("give one of {}", names.join(", ")),
    };
    bail!(
        "--name {name}: no holdfast-sdp has this name; {running}. The built-in proxy of holdfast-agent cannot be \
         drained: it answers queries only while no holdfast-sdp does. To turn it off, start holdfast-agent with \
         --disable-builtin-dns-proxy=true"
    )
}

/// Fails if no other proxy of this node would get the queries of the proxy at `socket`.
async fn refuse_last(socket: &Path) -> anyhow::Result<()> {
    let status: Status = call(socket, Method::GET, "/status", &()).await?;
    let has_slots = status.replicas.iter().any(|replica| replica.is_this);
    let mut others = status.replicas.iter().filter(|other| !other.is_this);
    if others.any(|other| other.live) {
        return Ok(());
    }
    // Without slots the kernel's hash selects a proxy.
    if !has_slots {
        for other in sockets().unwrap_or_default() {
            let other = match other == socket {
                true => continue,
                false => call::<Status>(&other, Method::GET, "/status", &()).await,
            };
            let serves = |other: &Status| {
                other.ready && !other.leaving && other.proxy_port == status.proxy_port
            };
            if other.as_ref().is_ok_and(serves) {
                return Ok(());
            }
        }
    }
    bail!(
        "{} is the last proxy of this node: without it, queries of restricted endpoints get no answer. \
         Start another proxy first, or give --force",
        status.name
    )
}

async fn status(settings: &Settings, output: Output) -> anyhow::Result<()> {
    if let Some(socket) = named(settings) {
        let status: Status = call(&socket, Method::GET, "/status", &()).await?;
        return print(output, &status, Status::text);
    }
    let mut all: Vec<Status> = Vec::new();
    let mut silent = Vec::new();
    for socket in sockets()? {
        match call(&socket, Method::GET, "/status", &()).await {
            Ok(status) => all.push(status),
            Err(error) => silent.push(format!("{error:#}")),
        }
    }
    print(output, &all, |all| {
        let texts: Vec<_> = all.iter().map(Status::text).collect();
        texts.join("\n")
    })?;
    if all.is_empty() {
        bail!(
            "no proxy answers on a socket in {ADMIN_DIR}; {OTHER_SOCKET}{}",
            silent.iter().fold(String::new(), |a, e| a + "\n  " + e)
        );
    }
    for error in silent {
        failure::note("holdfast-sdp", &error);
    }
    Ok(())
}

/// How to reach a proxy whose socket is not in the usual place.
const OTHER_SOCKET: &str =
    "for a proxy with another socket, give --name NAME or --admin-socket PATH";

fn named(settings: &Settings) -> Option<PathBuf> {
    let by_name = || settings.name.as_deref().map(admin_socket_of);
    settings.admin_socket.clone().or_else(by_name)
}

fn sockets() -> anyhow::Result<Vec<PathBuf>> {
    match sockets_in(Path::new(ADMIN_DIR)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            bail!(
                "no holdfast-sdp runs on this node: the directory of their sockets, {ADMIN_DIR}, \
                 does not exist; {OTHER_SOCKET}"
            )
        }
        found => found.context(ADMIN_DIR),
    }
}

/// Sockets of proxies, without the sockets of killed proxies.
fn sockets_in(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let is_named = path.extension().is_some_and(|e| e == "sock");
        // A socket that cannot be inspected stays in the list: the request to it reports why.
        if is_named && !is_left(&path).unwrap_or(false) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn live() -> anyhow::Result<Vec<PathBuf>> {
    let answers = |path: &PathBuf| as_owner::connect_now(path).is_ok();
    let found: Vec<_> = sockets()?.into_iter().filter(answers).collect();
    if found.is_empty() {
        bail!("no proxy answers on a socket in {ADMIN_DIR}; {OTHER_SOCKET}");
    }
    Ok(found)
}

fn any_one(settings: &Settings) -> anyhow::Result<PathBuf> {
    match named(settings) {
        Some(socket) => Ok(socket),
        None => live()?.into_iter().next().with_context(|| {
            format!("no proxy answers on a socket in {ADMIN_DIR}; {OTHER_SOCKET}")
        }),
    }
}

fn the_only_one(settings: &Settings) -> anyhow::Result<PathBuf> {
    if let Some(socket) = named(settings) {
        return Ok(socket);
    }
    let mut found = live()?;
    match (found.pop(), found.len()) {
        (Some(socket), 0) => Ok(socket),
        (Some(socket), others) => {
            found.push(socket);
            let names: Vec<_> = found
                .iter()
                .filter_map(|path| path.file_stem()?.to_str())
                .collect();
            bail!(
                "{} proxies run on this node; choose one with --name: {}",
                others + 1,
                names.join(", ")
            )
        }
        (None, _) => bail!("no proxy answers on a socket in {ADMIN_DIR}; {OTHER_SOCKET}"),
    }
}

async fn call<T: DeserializeOwned>(
    socket: &Path,
    method: Method,
    path: &str,
    question: &impl Serialize,
) -> anyhow::Result<T> {
    let bytes = request(socket, method, path, question).await?;
    serde_json::from_slice(&bytes).with_context(|| format!("{}", socket.display()))
}

async fn request(
    socket: &Path,
    method: Method,
    path: &str,
    question: &impl Serialize,
) -> anyhow::Result<Vec<u8>> {
    let answer = exchange(socket, method, path, question).await;
    answer.map_err(|error| match error.is::<Refused>() {
        true => error,
        false => error.context(socket.display().to_string()),
    })
}

/// Why the proxy does not answer the question, in the proxy's words.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refused(String);

async fn exchange(
    socket: &Path,
    method: Method,
    path: &str,
    question: &impl Serialize,
) -> anyhow::Result<Vec<u8>> {
    let stream = as_owner::connect(socket)
        .await
        .with_context(|| {
            format!("cannot connect: no proxy runs with this socket, or this user may not connect (root may); {OTHER_SOCKET}")
        })?;
    let body = Full::new(Bytes::from(serde_json::to_vec(question)?));
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", "sdp")
        .body(body)?;
    let limits = AnswerLimits {
        body: LARGEST_ANSWER,
        begins_within: ANSWER_WITHIN,
        within: ANSWER_WITHIN,
    };
    let response = http_client::exchange(stream, request, limits).await?;
    let code = response.status();
    let bytes = response.into_body();
    if !code.is_success() {
        return Err(Refused(String::from_utf8_lossy(&bytes).trim().to_owned()).into());
    }
    Ok(bytes)
}

async fn wait_gone(socket: &Path, limit: Duration) -> anyhow::Result<Duration> {
    let begun = Instant::now();
    while begun.elapsed() < limit + ANSWER_WITHIN {
        if as_owner::connect(socket).await.is_err() {
            return Ok(begun.elapsed());
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    bail!(
        "the proxy at {} has not exited after {:?}",
        socket.display(),
        begun.elapsed()
    )
}

fn print<T: Serialize>(
    output: Output,
    value: &T,
    table: impl FnOnce(&T) -> String,
) -> anyhow::Result<()> {
    Ok(output::print(output, value, table)?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use clap::Parser as _;

    use super::*;
    use crate::config::args::Cli;

    #[test]
    fn a_name_that_no_proxy_has_is_refused_with_the_names_of_the_others() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(format!("{name}.sock"));
        let _live = UnixListener::bind(at("a")).unwrap();
        let refused = |name: &str, others: Vec<PathBuf>| {
            let line = ["holdfast-sdp", "--name", name];
            let settings = Cli::try_parse_from(line).unwrap().settings;
            refuse_unknown(&settings, &at(name), || others).map_err(|error| error.to_string())
        };
        let error = refused("builtin", vec![at("a"), at("b")]).unwrap_err();
        for part in [
            "--name builtin: no holdfast-sdp has this name; give one of a, b",
            "built-in proxy of holdfast-agent cannot be drained",
            "--disable-builtin-dns-proxy=true",
        ] {
            assert!(error.contains(part), "{error}");
        }
        let error = refused("builtin", Vec::new()).unwrap_err();
        assert!(error.contains("none runs on this node"), "{error}");
        assert_eq!(refused("a", vec![at("a")]), Ok(()));
    }

    #[test]
    fn sockets_of_killed_proxies_are_passed_over() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let _live = UnixListener::bind(at("one.sock")).unwrap();
        // Dropping the listener leaves its file behind, as `kill -9` does.
        drop(UnixListener::bind(at("killed.sock")).unwrap());
        drop(UnixListener::bind(at("other")).unwrap());
        assert_eq!(sockets_in(directory.path()).unwrap(), [at("one.sock")]);
    }
}
