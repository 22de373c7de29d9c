//! The whole agent as its program composes it, with maps in memory and without the parts that use
//! the kernel.

use std::{fs, io::ErrorKind, os::unix::net::UnixStream, path::PathBuf, sync::Arc};

use agent_core::{
    core::{Event, snapshot::EndpointView},
    datapath::{
        map_query::{MapEntries, MapQuery},
        memory::MemoryDatapath,
        plan::{Datapath, Step, StepError},
    },
    source_event::SourceEvent,
};
use agent_datapath::{
    files::{StateFiles, background::BackgroundFiles},
    upkeep::Conditions,
};
use clap::Parser as _;
use holdfast_agent::{
    admin::{client::Client, model::Status},
    app::{Agent, Parts},
    config::{Cli, Command, Config},
    owner::OwnerRecord,
    runner::{self, CoreHandle},
};
use parking_lot::Mutex;
use polling::{until_async, until_awaited};
use serde_json::Value;
use shared_maps::user::{Globals, ipcache_key};
use tempfile::TempDir;
use tokio::runtime::Handle;

use crate::lab::{Mappings, connect_to, found, mapping, pod, policy_text, reaches};

/// Maps in memory, and the thread that writes files, as in the kernel's datapath.
struct InMemory {
    maps: Arc<Mutex<MemoryDatapath>>,
    files: BackgroundFiles,
}

impl Datapath for InMemory {
    fn apply(&mut self, step: &Step) -> Result<(), StepError> {
        self.files.apply(step)?;
        self.maps.lock().apply(step)
    }

    fn read_entries(&mut self, query: &MapQuery) -> Result<MapEntries, StepError> {
        self.maps.lock().read_entries(query)
    }
}

/// Directories and maps that outlive an agent.
struct Node {
    dir: TempDir,
    maps: Arc<Mutex<MemoryDatapath>>,
}

impl Node {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in ["policies", "endpoints", "bpf"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let maps = Arc::default();
        Self { dir, maps }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Endpoints with the label `app=web` may query and reach `pattern`.
    fn set_policy(&self, pattern: &str) {
        let text = policy_text(pattern, &reaches(pattern));
        fs::write(self.path("policies/web.yaml"), text).unwrap();
    }

    fn config(&self) -> Config {
        let flag = |flag: &str, name: &str| format!("--{flag}={}", self.path(name).display());
        let line = [
            "holdfast-agent".to_owned(),
            "run".to_owned(),
            flag("bpf-root", "bpf"),
            flag("state-dir", "lib"),
            flag("policy-dir", "policies"),
            flag("endpoint-dir", "endpoints"),
            flag("endpoint-store", "store"),
            flag("sdp-socket", "run/sdp.sock"),
            flag("admin-socket", "run/admin.sock"),
            format!("--sdp-group={}", nix::unistd::getgid()),
            "--metrics-address=off".to_owned(),
            // Its sockets need permission to bind any address.
            "--disable-builtin-dns-proxy".to_owned(),
        ];
        let Command::Run(arguments) = Cli::try_parse_from(line).unwrap().command else {
            panic!("not run");
        };
        Config::try_from(*arguments).unwrap()
    }

    /// Starts an agent. The handle sends the core the events that would need an interface in the
    /// kernel.
    async fn start(&self) -> (Agent, CoreHandle, Client) {
        let config = self.config();
        let files = StateFiles::open(&config.state()).unwrap();
        let channel = runner::channel();
        let (core, keeps) = (channel.0.clone(), channel.0.clone());
        let kept = move |written| {
            let _stopped = keeps.send_blocking(Event::NamesKept(written));
        };
        let parts = Parts {
            found: found(&files, &self.maps.lock()),
            maps: Globals::new(&config.flags.bpf_root),
            datapath: Box::new(InMemory {
                maps: Arc::clone(&self.maps),
                files: BackgroundFiles::start(files.clone(), kept).unwrap(),
            }),
            files,
            channel,
            conditions: Conditions::default(),
            gate: None,
            tunnel: None,
            api: None,
            keeps_endpoints: false,
            owner: OwnerRecord::default(),
        };
        let admin = Client::new(&config.flags.admin_socket);
        let agent = Agent::start(config, parts).await.unwrap();
        (agent, core, admin)
    }
}

async fn status(admin: &Client, what: &str, wanted: impl Fn(&Status) -> bool) -> Status {
    let status = async || admin.get::<Status>("/v1/status").await.unwrap();
    until_awaited(what, status, wanted).await
}

/// Stops the agent. All its tasks end, tracked or not, and also its sockets and its core.
async fn stop(node: &Node, agent: Agent, core: CoreHandle) {
    agent.stop().await.unwrap();
    let tasks = || Handle::current().metrics().num_alive_tasks();
    until_async("no task is left", tasks, |tasks| *tasks == 0).await;
    core.closed().await;
    for socket in ["run/sdp.sock", "run/admin.sock"] {
        let refused = UnixStream::connect(node.path(socket)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused, "{socket}");
    }
}

#[tokio::test]
async fn a_whole_agent_serves_stops_with_all_its_tasks_and_starts_again() {
    let node = Node::new();
    node.set_policy("*.example.com");
    let (agent, core, admin) = node.start().await;
    let first = status(&admin, "the agent is ready", |status| status.ready).await;
    assert_eq!((first.epoch.start, first.summary.policies), (1, 1));
    assert_eq!(first.builtin_dns_proxy, "disabled");

    let endpoint = Event::Endpoints(SourceEvent::Apply(pod()));
    core.send(endpoint).await.unwrap();
    let endpoints: Vec<EndpointView> = admin.get("/v1/endpoints").await.unwrap();
    let id = u32::from(endpoints[0].id);
    let mut stream = Mappings::open(connect_to(&node.path("run/sdp.sock")).await)
        .await
        .unwrap();
    assert_eq!(stream.start, 1);
    let address = [192, 0, 2, 7];
    let learned = mapping(id, 1, "www.example.com.", address);
    stream.send(vec![learned]).await;
    assert!(stream.result(1).await.realised);
    // The second result says that the name is on disk.
    assert!(stream.result(1).await.durable);
    let key = ipcache_key(address.into(), 32);
    assert!(node.maps.lock().ipcache.contains_key(&key));
    status(&admin, "the proxy is shown", |status| {
        status.proxies.iter().any(|proxy| proxy.kind == "mappings")
    })
    .await;

    node.set_policy("*.example.org");
    let selectors = async || admin.get::<Value>("/v1/selectors").await.unwrap();
    until_awaited("the change is in force", selectors, |selectors| {
        selectors.to_string().contains("*.example.org")
    })
    .await;
    drop(stream);
    drop(admin);
    stop(&node, agent, core).await;

    let (agent, core, admin) = node.start().await;
    let second = status(&admin, "the agent is ready again", |status| status.ready).await;
    assert_eq!((second.epoch.start, second.summary.policies), (2, 1));
    assert_eq!(second.damaged_files, [""; 0]);
    drop(admin);
    stop(&node, agent, core).await;
}
