//! A client of a container runtime's socket.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use prost::Message;
use serde_json::Value;
use tokio::runtime::Runtime;
use tonic::Status;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;

use super::message::{
    Empty, Linux, List, Metadata, RunRequest, SandboxConfig, SandboxId, SandboxStatusRequest,
    SandboxStatusResponse, StatusRequest, StatusResponse, Version,
};
use super::node::PodName;

/// Longest time of a call. ADD waits 20 seconds for an agent.
const LIMIT: Duration = Duration::from_secs(120);

/// A connection to the runtime.
#[derive(Debug)]
pub(super) struct Cri {
    runtime: Runtime,
    channel: Channel,
    cgroups: String,
}

/// A sandbox as the runtime describes it.
#[derive(Clone, Debug)]
pub(super) struct Described {
    pub(super) addresses: Vec<String>,
    /// Path of its network namespace, as the runtime sees it.
    pub(super) netns: PathBuf,
}

/// The network that the runtime uses for new pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loaded {
    pub name: String,
    pub plugins: Vec<String>,
}

impl Cri {
    /// Connects to `socket`; fails if no runtime answers there. Pods get cgroups below `cgroups`.
    pub(super) fn connect(socket: &Path, cgroups: &str) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display()))?;
        let channel = runtime.block_on(endpoint.timeout(LIMIT).connect())?;
        let cri = Self {
            runtime,
            channel,
            cgroups: cgroups.to_owned(),
        };
        cri.version()?;
        Ok(cri)
    }

    /// Name and version of the runtime.
    pub(super) fn version(&self) -> Result<String> {
        let version: Version = self.call("Version", Empty {})?;
        Ok(format!("{} {}", version.name, version.version))
    }

    /// Starts a pod, and returns its id. The error is the runtime's.
    pub(super) fn run(&self, pod: &PodName) -> Result<String, Status> {
        let metadata = Metadata {
            name: pod.name.clone(),
            uid: pod.uid.clone(),
            namespace: pod.namespace.clone(),
            attempt: pod.attempt,
        };
        let config = SandboxConfig {
            metadata: Some(metadata),
            hostname: pod.name.clone(),
            linux: Some(Linux {
                cgroup_parent: self.cgroups.clone(),
            }),
        };
        let request = RunRequest {
            config: Some(config),
        };
        let sandbox: SandboxId = self.call("RunPodSandbox", request)?;
        Ok(sandbox.id)
    }

    /// Stops a pod. Its sandbox stays until [`Self::remove`].
    pub(super) fn stop(&self, id: &str) -> Result<(), Status> {
        let id = id.to_owned();
        self.call("StopPodSandbox", SandboxId { id })
            .map(|_: Empty| ())
    }

    /// Removes a pod that has ended.
    pub(super) fn remove(&self, id: &str) -> Result<(), Status> {
        let id = id.to_owned();
        self.call("RemovePodSandbox", SandboxId { id })
            .map(|_: Empty| ())
    }

    /// Ids of all sandboxes, including stopped ones.
    pub(super) fn list(&self) -> Result<Vec<String>, Status> {
        let list: List = self.call("ListPodSandbox", Empty {})?;
        Ok(list.items.into_iter().map(|item| item.id).collect())
    }

    pub(super) fn describe(&self, id: &str) -> Result<Described> {
        let request = SandboxStatusRequest {
            id: id.to_owned(),
            verbose: true,
        };
        let response: SandboxStatusResponse = self.call("PodSandboxStatus", request)?;
        let network = response.status.and_then(|status| status.network);
        let network = network.context("the sandbox has no network")?;
        let mut addresses = vec![network.address];
        addresses.extend(network.further.into_iter().map(|further| further.address));
        let info = response.info.get("info").context("no info")?;
        let info: Value = serde_json::from_str(info)?;
        let namespaces = info["runtimeSpec"]["linux"]["namespaces"].as_array();
        let namespaces = namespaces.context("no namespaces")?;
        let netns = namespaces.iter().find(|of| of["type"] == "network");
        let netns = netns.and_then(|netns| netns["path"].as_str());
        Ok(Described {
            addresses,
            netns: netns.context("no network namespace")?.into(),
        })
    }

    /// The network of new pods; `None` if the runtime has no usable configuration.
    pub(super) fn network(&self) -> Result<Option<Loaded>> {
        let request = StatusRequest { verbose: true };
        let response: StatusResponse = self.call("Status", request)?;
        let config = response.info.get("cniconfig").context("no cniconfig")?;
        let config: Value = serde_json::from_str(config)?;
        let networks = config["Networks"].as_array().into_iter().flatten();
        // The loopback interface has its own network, which does not count.
        let network = networks
            .map(|network| &network["Config"])
            .find(|network| network["Name"] != "cni-loopback");
        let Some(network) = network else {
            return Ok(None);
        };
        let plugins = network["Plugins"].as_array().into_iter().flatten();
        let kind = |plugin: &Value| Some(plugin["Network"]["type"].as_str()?.to_owned());
        Ok(Some(Loaded {
            name: network["Name"].as_str().context("no name")?.to_owned(),
            plugins: plugins.filter_map(kind).collect(),
        }))
    }

    fn call<Q, A>(&self, method: &str, request: Q) -> Result<A, Status>
    where
        Q: Message + Clone + 'static,
        A: Message + Default + 'static,
    {
        let mut client = Grpc::new(self.channel.clone());
        let path = format!("/runtime.v1.RuntimeService/{method}");
        let path = PathAndQuery::try_from(path).map_err(|e| Status::internal(e.to_string()))?;
        self.runtime.block_on(async {
            let ready = client.ready().await;
            ready.map_err(|error| Status::unavailable(error.to_string()))?;
            let codec: ProstCodec<Q, A> = ProstCodec::default();
            let response = client
                .unary(tonic::Request::new(request), path, codec)
                .await;
            response.map(tonic::Response::into_inner)
        })
    }
}
