//! The link to the agent: finds it, keeps two streams to it, and survives its absence.
//!
//! ```text
//!  run ─► session ─► native: Hello on two connections
//!           │          ├─ mapping_stream ◄──► sink
//!           │          └─ rules_stream   ───► policy::table
//!           └─► fqdndata: a Cilium agent's service, where there is no native one
//! ```
//! Only `convert` and the stream modules know the generated messages.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    process,
    sync::Arc,
    thread,
    time::Duration,
};

use daemon::link_stream::{LinkStream, ReadNow};
use dns_policy::table::PolicyHandle;
use hyper_util::rt::TokioIo;
use tokio::{
    net::UnixStream,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint, Uri};

use crate::{
    config::AgentAddress, maps::PinnedMaps, query_report::QueryReports,
    rules_journal::RulesJournal, sink::LinkSink,
};

mod assembly;
mod backoff;
pub mod convert;
mod fqdndata;
mod mapping_stream;
mod native;
mod rules_stream;
pub mod state;

use state::LinkState;

/// Time limit for an answer. Connecting to a stopped process succeeds, so an agent counts as
/// present only when it has answered.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);
/// After a native session ended, only its address is tried for this long: an agent
/// that restarts binds its sockets one after the other.
const STAY_NATIVE: Duration = Duration::from_secs(30);

/// The settings of the link, and the parts of the proxy to which it brings data.
#[derive(Clone, Debug)]
pub struct Link {
    /// Addresses of the agent, in the order in which they are tried.
    pub addresses: Vec<AgentAddress>,
    /// Name of this proxy (`--name`), which the agent shows.
    pub instance: String,
    /// Port this proxy listens on.
    pub proxy_port: u16,
    /// Directory in which this proxy looks for the agent's files.
    pub state_dir: PathBuf,
    /// Rules in force, which the link replaces when the agent sends new ones.
    pub policy: Arc<PolicyHandle>,
    pub sink: Arc<LinkSink>,
    /// Receives a Cilium agent's tables.
    pub maps: Arc<PinnedMaps>,
    /// Query reports for a Cilium agent.
    pub reports: Arc<QueryReports>,
    /// File with a Cilium agent's rules, for a start without the agent.
    pub rules_journal: Arc<RulesJournal>,
    pub state: Arc<LinkState>,
}

/// Why a session ended, or never began.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionError {
    /// No connection could be opened. The text is the innermost error.
    #[error("cannot connect: {0}")]
    Connect(String),
    /// The agent did not answer within [`ANSWER_WITHIN`].
    #[error("no answer to {what} within {ANSWER_WITHIN:?}: the agent hangs or is suspended")]
    Silent {
        /// Call or step that was not answered.
        what: &'static str,
    },
    /// The agent refused a call or broke a stream.
    #[error("{what}: {status}")]
    Status {
        /// Call or stream that failed.
        what: &'static str,
        status: Box<tonic::Status>,
    },
    /// The agent ended a stream.
    #[error("the agent closed {what}")]
    Closed {
        /// Stream that the agent ended without an error.
        what: &'static str,
    },
    /// A message of the agent cannot be decoded.
    #[error("the agent sent {0}")]
    Protocol(String),
}

impl SessionError {
    fn is_unimplemented(&self) -> bool {
        matches!(self, Self::Status { status, .. } if status.code() == tonic::Code::Unimplemented)
    }
}

impl Link {
    /// Keeps the link until `stop`, on a thread of its own: messages of the agent are read however
    /// busy the process is with clients. So a busy process is not mistaken for a silent agent.
    pub fn start(self, stop: CancellationToken) -> io::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let thread = thread::Builder::new().name("link".to_owned());
        thread.spawn(move || or_abort(|| runtime.block_on(self.run(stop))))?;
        Ok(())
    }

    /// Keeps the link until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        stop.run_until_cancelled(self.keep()).await;
        self.sink.agent_down();
        self.state.disconnected("the proxy is leaving");
    }

    async fn keep(&self) {
        let mut delays = backoff::delays();
        let mut native_until: Option<Instant> = None;
        loop {
            let mut errors = Vec::new();
            for address in &self.addresses {
                let native_only = native_until.is_some_and(|until| Instant::now() < until);
                if native_only && matches!(address, AgentAddress::Tcp(_)) {
                    continue;
                }
                let before = self.state.sessions();
                let begun = Instant::now();
                let error = self.session(address).await;
                self.sink.agent_down();
                self.end_session();
                if self.state.sessions() == before {
                    errors.push(format!("{address}: {error}"));
                    continue;
                }
                tracing::warn!(%address, %error, "connection to the agent lost; the proxy continues without it");
                self.state.disconnected(&error.to_string());
                if begun.elapsed() >= backoff::SETTLED {
                    delays = backoff::delays();
                }
                if matches!(address, AgentAddress::Unix(_)) {
                    native_until = Some(Instant::now() + STAY_NATIVE);
                }
                errors.clear();
                break;
            }
            self.state.nobody(&errors);
            sleep(delays.next().unwrap_or(backoff::MAX_DELAY)).await;
        }
    }

    /// Notes that no agent confirms the rules. The rules in force remain.
    fn end_session(&self) {
        self.maps.set_agent_ready(false);
        self.rules_journal.end_session();
        self.state.writing_rules().end_session();
    }

    /// Runs one session until it ends.
    async fn session(&self, address: &AgentAddress) -> SessionError {
        let error = match address {
            AgentAddress::Unix(_) => native::session(self, address).await,
            AgentAddress::Tcp(_) => return self.fqdndata(address).await,
        };
        if error.is_unimplemented() {
            self.fqdndata(address).await
        } else {
            error
        }
    }

    async fn fqdndata(&self, address: &AgentAddress) -> SessionError {
        match connect(address).await {
            Ok(channel) => fqdndata::session(self, address, channel).await,
            Err(error) => error,
        }
    }
}

/// Runs `work`, and ends the process if it panics: without the link, each answer would wait for the
/// agent as long as it may. A new process has a link.
fn or_abort(work: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(work)).is_err() {
        tracing::error!(
            "the thread of the link to the agent panicked (a bug); the process exits, so that it is \
             started again. Report the lines before this one"
        );
        process::abort();
    }
}

/// Connects to an agent, within [`ANSWER_WITHIN`].
async fn connect(address: &AgentAddress) -> Result<Channel, SessionError> {
    connect_with(address, |endpoint| endpoint, ReadNow::default()).await
}

/// Like [`connect`], with an endpoint that `set` has changed. With `read_now`, another thread can
/// make the stream look for data on a unix socket at once, without a wake-up by the kernel.
async fn connect_with(
    address: &AgentAddress,
    set: impl FnOnce(Endpoint) -> Endpoint,
    read_now: ReadNow,
) -> Result<Channel, SessionError> {
    let connected = async {
        match address {
            AgentAddress::Unix(path) => {
                let path = path.clone();
                let connector = tower::service_fn(move |_: Uri| {
                    let (path, read_now) = (path.clone(), read_now.clone());
                    async move {
                        let stream = UnixStream::connect(path).await?;
                        LinkStream::with_read_now(stream, read_now).map(TokioIo::new)
                    }
                });
                let endpoint = set(Endpoint::from_static("http://agent.invalid"));
                endpoint.connect_with_connector(connector).await
            }
            AgentAddress::Tcp(target) => {
                set(Endpoint::from_shared(format!("http://{target}"))?)
                    .tcp_nodelay(true)
                    .connect()
                    .await
            }
        }
    };
    timeout(ANSWER_WITHIN, connected)
        .await
        .map_err(|_| SessionError::Silent { what: "connecting" })?
        .map_err(|error| SessionError::Connect(innermost(&error)))
}

fn innermost(error: &dyn std::error::Error) -> String {
    let mut at = error;
    while let Some(source) = at.source() {
        at = source;
    }
    at.to_string()
}

/// Waits for an answer, [`ANSWER_WITHIN`] at most.
async fn answered<T>(
    what: &'static str,
    call: impl Future<Output = Result<T, tonic::Status>>,
) -> Result<T, SessionError> {
    match timeout(ANSWER_WITHIN, call).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(status)) => Err(SessionError::Status {
            what,
            status: Box::new(status),
        }),
        Err(_) => Err(SessionError::Silent { what }),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        env,
        os::unix::process::ExitStatusExt as _,
        process::{Command, Stdio},
    };

    use super::*;

    /// Environment variable of the process that panics.
    const PANICS: &str = "HOLDFAST_TEST_LINK_PANICS";

    #[test]
    #[expect(clippy::disallowed_methods, reason = "a switch of this test only")]
    fn a_panic_of_the_links_thread_ends_the_process() {
        if env::var_os(PANICS).is_some() {
            let thread = thread::spawn(|| or_abort(|| panic!("on purpose")));
            let _ = thread.join();
            return;
        }
        let name = "link::tests::a_panic_of_the_links_thread_ends_the_process";
        let status = Command::new(env::current_exe().unwrap())
            .args(["--exact", name])
            .env(PANICS, "1")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .unwrap();
        assert_eq!(status.signal(), Some(nix::libc::SIGABRT), "{status}");
    }
}
