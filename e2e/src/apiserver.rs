//! An API server of Kubernetes for tests, in memory: TLS, tokens, roles, lists in pages, watches,
//! writes, and the faults that a test sets.
//!
//! ```text
//!  test ── handle: put, delete, faults ──► store ◄── server ◄── listener ◄── TLS ── agent
//!       ◄─ requests that were answered       └─ history ──► watch ──► lines of JSON
//! ```
//!
//! It behaves as a kube-apiserver 1.36 was observed to behave (`e2e/tests/netns/apiserver.rs`). It
//! refuses each request that no role allows.

mod admission;
mod chart;
mod credentials;
mod discovery;
mod failure;
mod fault;
mod handle;
mod json_patch;
mod kind;
mod listener;
mod read;
mod roles;
mod schema;
mod selection;
mod server;
mod store;
mod target;
mod watch;
mod write;

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result};
use parking_lot::Mutex;
use serde::Deserialize as _;
use serde_json::Value;
use tokio::sync::watch as channel;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use self::credentials::{Files, kubeconfig};
pub use self::fault::Refusal;
pub use self::handle::{namespace, pod, web_policy};
pub use self::kind::Kind;
pub use self::server::{Answered, Options, StreamingLists};

use self::admission::Admission;
use self::chart::ResolverRole;
use self::fault::Conditions;
use self::roles::User;
use self::server::Shared;
use self::store::Store;
use crate::netns::Netns;

/// The chart's default of `agentNotReadyTaintKey`.
pub const STARTUP_TAINT: &str = "holdfast.io/agent-not-ready";
/// Namespace of the agents and their ServiceAccount.
pub const NAMESPACE: &str = "kube-system";
/// Name of the ServiceAccount of the agents.
const ACCOUNT: &str = "holdfast-agent";
/// First token of the agent.
const TOKEN: &str = "token-of-the-agent";
/// Token of the user that may do everything.
const ADMIN: &str = "token-of-the-admin";

/// A running server. Dropping it ends the server.
#[derive(Debug)]
pub struct ApiServer {
    shared: Arc<Shared>,
    files: Files,
    netns: Option<String>,
    address: SocketAddr,
    listeners: channel::Sender<Option<Arc<std::net::TcpListener>>>,
    stop: CancellationToken,
    thread: Option<JoinHandle<()>>,
}

/// The default: roles and CRDs of the chart.
impl Default for Options {
    fn default() -> Self {
        Self::read_by(ACCOUNT, ResolverRole::Unbound)
    }
}

impl Options {
    /// The agents may not read the cluster, because relays read it. In tests, relays are users that
    /// may do everything.
    pub fn with_relays() -> Self {
        Self::read_by("holdfast-relay", ResolverRole::Unbound)
    }

    /// The agents may write DNSNameResolvers in [`NAMESPACE`], as with the chart's value
    /// `resolver.mode: kube`.
    pub fn with_resolver() -> Self {
        Self::read_by(ACCOUNT, ResolverRole::Bound)
    }

    /// The agents may remove the startup taint of their nodes, as with the chart's value
    /// `agentNotReadyTaintKey`. `node` is the node that their token names, if any.
    pub fn with_startup_taint(node: Option<&str>) -> Self {
        let mut options = Self::default();
        let documents = chart::of_startup_taint(NAMESPACE, ACCOUNT, STARTUP_TAINT);
        options
            .documents
            .extend(documents.expect("the chart has YAML"));
        options.node = node.map(str::to_owned);
        options
    }

    /// Adds the chart's value `identities.mode: cluster`: CiliumIdentities, and the rights to
    /// create and delete them.
    pub fn and_identities(mut self) -> Self {
        let documents = chart::of_identities(NAMESPACE, ACCOUNT, &self.reader);
        self.documents
            .extend(documents.expect("the chart has YAML"));
        self
    }

    /// Adds the chart's value `highScale.mode`: CiliumWorldCIDRs, and the right to read them.
    pub fn and_high_scale(mut self) -> Self {
        let documents = chart::of_high_scale(NAMESPACE, ACCOUNT, &self.reader);
        self.documents
            .extend(documents.expect("the chart has YAML"));
        self
    }

    fn read_by(reader: &str, resolver: ResolverRole) -> Self {
        let documents = chart::of_release(NAMESPACE, ACCOUNT, reader, resolver);
        Self {
            documents: documents.expect("the chart has YAML"),
            bookmarks_every: Duration::from_secs(1),
            streaming_lists: StreamingLists::default(),
            starts_for: Duration::from_secs(1),
            account: (NAMESPACE.to_owned(), ACCOUNT.to_owned()),
            node: None,
            reader: reader.to_owned(),
        }
    }

    /// Uses only the roles and CRDs in `yaml`, as `helm template` prints them. Documents of other
    /// kinds are ignored.
    pub fn with_documents(mut self, yaml: &str) -> Result<Self> {
        self.documents = documents(yaml)?;
        Ok(self)
    }
}

/// All documents of a YAML text, except empty ones.
pub fn documents(yaml: &str) -> Result<Vec<Value>> {
    let documents = serde_yaml_ng::Deserializer::from_str(yaml);
    let documents: Vec<Value> = documents
        .map(Value::deserialize)
        .collect::<Result<_, _>>()?;
    let documents = documents.into_iter().filter(|document| !document.is_null());
    Ok(documents.collect())
}

impl ApiServer {
    /// Starts a server on the loopback interface of `netns`, or of the test's namespace. It writes
    /// the files for clients to `directory`.
    pub fn start(netns: Option<&Netns>, directory: &Path, options: Options) -> Result<Self> {
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        Self::start_at(netns, any, directory, options)
    }

    /// Like [`Self::start`], at another address. Port 0 means any port.
    pub fn start_at(
        netns: Option<&Netns>,
        at: SocketAddr,
        directory: &Path,
        options: Options,
    ) -> Result<Self> {
        let mut kinds = Kind::built_in();
        for document in &options.documents {
            if document["kind"] == "CustomResourceDefinition" {
                kinds.push(Kind::of_crd(document)?);
            }
        }
        std::fs::create_dir_all(directory)
            .with_context(|| format!("create {}", directory.display()))?;
        let files = Files::in_directory(directory);
        let listener = listener::bind(netns, at)?;
        let address = listener.local_addr()?;
        let tls = credentials::issue(&files.ca, address.ip())?;
        files.write(&url(address), TOKEN, ADMIN)?;
        let (namespace, name) = options.account.clone();
        let node = options.node.clone();
        let agent = User::ServiceAccount {
            namespace,
            name,
            node,
        };
        let admission = Admission::of(&options.documents)?;
        let tokens = HashMap::from([(TOKEN.to_owned(), agent), (ADMIN.to_owned(), User::Admin)]);
        let shared = Arc::new(Shared {
            options,
            store: Mutex::new(Store::new(kinds)),
            conditions: channel::Sender::new(Conditions::default()),
            tokens: Mutex::new(tokens),
            roles: Mutex::default(),
            admission,
            answered: Mutex::default(),
            unauthorized: AtomicUsize::default(),
            tasks: TaskTracker::new(),
        });
        let (listeners, received) = channel::channel(Some(Arc::new(listener)));
        let stop = CancellationToken::new();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let serving = listener::serve(received, tls, shared.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            if let Err(error) = runtime.block_on(serving) {
                eprintln!("the API server of the test ended: {error:#}");
            }
        });
        Ok(Self {
            shared,
            files,
            netns: netns.map(|netns| netns.name().to_owned()),
            address,
            listeners,
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn url(address: SocketAddr) -> String {
    format!("https://{address}")
}
