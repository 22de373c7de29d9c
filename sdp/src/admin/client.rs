//! The subcommands: requests to running proxies through their admin sockets.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use daemon::http_client::{self, AnswerLimits};
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
    args::{Command, Output, Settings},
};

/// Longest time for an answer; a proxy that needs longer hangs.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// Bytes of an answer: far more than the rules of one endpoint have. The process behind the socket
/// may be any that runs as the proxies' user.
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
        Command::Status(output) => status(settings, output.output).await,
        Command::Ready => probe(settings, "/readyz").await,
        Command::Alive => probe(settings, "/healthz").await,
        Command::Drain(output) => {
            let socket = the_only_one(settings)?;
            let leaving: DrainStarted = call(&socket, Method::POST, "/drain", &()).await?;
            let took = wait_gone(&socket, leaving.limit).await?;
            print(
                output.output,
                &serde_json::json!({"left": true, "took": took}),
                || format!("left after {took:?}\n"),
            )
        }
        Command::Policy(arguments) => {
            let question = PolicyQuestion {
                endpoint: arguments.endpoint,
            };
            let socket = any_one(settings)?;
            let answer: PolicyAnswer = call(&socket, Method::POST, "/policy", &question).await?;
            print(arguments.output.output, &answer, || answer.text())
        }
        Command::Explain(arguments) => {
            let question = ExplainQuestion {
                client: arguments.client,
                name: arguments.question.clone(),
                server: arguments.server,
                port: arguments.port,
                tcp: arguments.tcp,
            };
            let socket = any_one(settings)?;
            let answer: Explanation = call(&socket, Method::POST, "/explain", &question).await?;
            print(arguments.output.output, &answer, || answer.text())
        }
    }
}

/// Prints the text of a health page, or fails with it.
async fn probe(settings: &Settings, page: &str) -> anyhow::Result<()> {
    let socket = the_only_one(settings)?;
    let bytes = request(&socket, Method::GET, page, &()).await?;
    print(Output::Text, &(), || {
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

async fn status(settings: &Settings, output: Output) -> anyhow::Result<()> {
    if let Some(socket) = named(settings) {
        let status: Status = call(&socket, Method::GET, "/status", &()).await?;
        return print(output, &status, || status.text());
    }
    let mut all: Vec<Status> = Vec::new();
    let mut silent = Vec::new();
    for socket in sockets()? {
        match call(&socket, Method::GET, "/status", &()).await {
            Ok(status) => all.push(status),
            Err(error) => silent.push(format!("{error:#}")),
        }
    }
    print(output, &all, || {
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
        eprintln!("holdfast-sdp: {error}");
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

/// Sockets of proxies, without those of killed proxies.
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
    exchange(socket, method, path, question)
        .await
        .with_context(|| format!("{}", socket.display()))
}

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
        bail!("{code}: {}", String::from_utf8_lossy(&bytes).trim());
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
    text: impl FnOnce() -> String,
) -> anyhow::Result<()> {
    let text = match output {
        Output::Text => text(),
        Output::Json => serde_json::to_string_pretty(value)? + "\n",
    };
    match io::Write::write_all(&mut io::stdout().lock(), text.as_bytes()) {
        // A reader that closed the pipe has read enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other.context("standard output"),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn sockets_of_killed_proxies_are_passed_over() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let _live = UnixListener::bind(at("one.sock")).unwrap();
        // The file stays, as after kill -9.
        drop(UnixListener::bind(at("killed.sock")).unwrap());
        drop(UnixListener::bind(at("other")).unwrap());
        assert_eq!(sockets_in(directory.path()).unwrap(), [at("one.sock")]);
    }
}
