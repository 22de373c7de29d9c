//! Messages of CRI v1, with the fields that the tests use. The field numbers are from
//! `k8s.io/cri-api/pkg/apis/runtime/v1/api.proto`.

use std::collections::HashMap;

use prost::Message;

/// A message whose fields the tests do not read.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Empty {}

/// `PodSandboxMetadata`.
#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct Metadata {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) uid: String,
    #[prost(string, tag = "3")]
    pub(super) namespace: String,
    #[prost(uint32, tag = "4")]
    pub(super) attempt: u32,
}

/// `LinuxPodSandboxConfig`.
#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct Linux {
    #[prost(string, tag = "1")]
    pub(super) cgroup_parent: String,
}

/// `PodSandboxConfig`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct SandboxConfig {
    #[prost(message, optional, tag = "1")]
    pub(super) metadata: Option<Metadata>,
    #[prost(string, tag = "2")]
    pub(super) hostname: String,
    #[prost(message, optional, tag = "8")]
    pub(super) linux: Option<Linux>,
}

/// `RunPodSandboxRequest`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct RunRequest {
    #[prost(message, optional, tag = "1")]
    pub(super) config: Option<SandboxConfig>,
}

/// Response of `RunPodSandbox`, and request of `StopPodSandbox` and `RemovePodSandbox`.
#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct SandboxId {
    #[prost(string, tag = "1")]
    pub(super) id: String,
}

/// `PodSandboxStatusRequest`.
#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct SandboxStatusRequest {
    #[prost(string, tag = "1")]
    pub(super) id: String,
    #[prost(bool, tag = "2")]
    pub(super) verbose: bool,
}

/// `PodSandboxNetworkStatus`, and also `PodIP`, which has the same first field.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Network {
    #[prost(string, tag = "1")]
    pub(super) address: String,
    #[prost(message, repeated, tag = "2")]
    pub(super) further: Vec<Network>,
}

/// `PodSandboxStatus`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct SandboxStatus {
    #[prost(message, optional, tag = "5")]
    pub(super) network: Option<Network>,
}

/// `PodSandboxStatusResponse`. `info` is JSON in the runtime's own format.
#[derive(Clone, PartialEq, Message)]
pub(super) struct SandboxStatusResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) status: Option<SandboxStatus>,
    #[prost(map = "string, string", tag = "2")]
    pub(super) info: HashMap<String, String>,
}

/// `PodSandbox`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Listed {
    #[prost(string, tag = "1")]
    pub(super) id: String,
}

/// `ListPodSandboxResponse`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct List {
    #[prost(message, repeated, tag = "1")]
    pub(super) items: Vec<Listed>,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct StatusRequest {
    #[prost(bool, tag = "1")]
    pub(super) verbose: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct StatusResponse {
    #[prost(map = "string, string", tag = "2")]
    pub(super) info: HashMap<String, String>,
}

/// `VersionResponse`.
#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct Version {
    #[prost(string, tag = "2")]
    pub(super) name: String,
    #[prost(string, tag = "3")]
    pub(super) version: String,
}
