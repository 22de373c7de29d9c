//! A session of the native service: two connections, two streams.

use std::path::{Path, PathBuf};

use fqdn_proto::native as wire;
use hyper_util::rt::TokioIo;
use tokio::{net::UnixStream, time::timeout};
use tonic::transport::{Channel, Endpoint, Uri};
use wire::fqdn_policy_client::FqdnPolicyClient;

use super::{
    ANSWER_WITHIN, Link, SessionError, answered,
    board::{Connection, Service},
    convert, mapping_stream, rules_stream,
};
use crate::config::AgentAddress;

/// Agents send chunks of 1 MiB at most.
const LARGEST_MESSAGE: usize = 16 << 20;

pub(super) type Client = FqdnPolicyClient<Channel>;

/// Runs one session; returns when it is over.
pub(super) async fn session(link: &Link, address: &AgentAddress, path: &Path) -> SessionError {
    match begin(link, address, path).await {
        Ok(never) => match never {},
        Err(error) => error,
    }
}

/// What ends only with an error.
pub(super) enum Never {}

async fn begin(link: &Link, address: &AgentAddress, path: &Path) -> Result<Never, SessionError> {
    let (mut mappings, mut rules) = (connect(path).await?, connect(path).await?);
    let hello = hello(link, &mut mappings).await?;
    self::hello(link, &mut rules).await?;
    let opened = mapping_stream::open(&mut mappings).await?;
    let epoch = opened.epoch().clone();
    let agent_port = u16::try_from(hello.proxy_port)
        .ok()
        .filter(|port| *port != 0);
    let other_proxy_port = agent_port.filter(|port| *port != link.proxy_port);
    if let Some(port) = other_proxy_port {
        tracing::error!(
            ours = link.proxy_port,
            agents = port,
            "the agent redirects queries to another port: give both the same --tofqdns-proxy-port"
        );
    }
    tracing::info!(%address, agent = hello.version, start = epoch.start, "connected to the agent");
    link.sink.agent_up(epoch.clone(), Some(hello.min_ttl));
    link.board.connected(Connection {
        address: address.to_string(),
        service: Service::Native,
        agent_version: hello.version,
        epoch,
        other_proxy_port,
    });
    tokio::select! {
        ended = opened.run(link) => ended,
        ended = rules_stream::run(link, &mut rules) => ended,
    }
}

async fn connect(path: &Path) -> Result<Client, SessionError> {
    let path: PathBuf = path.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://agent.invalid");
    let channel = timeout(ANSWER_WITHIN, endpoint.connect_with_connector(connector))
        .await
        .map_err(|_| SessionError::Silent { what: "connecting" })?
        .map_err(|error| SessionError::Connect(innermost(&error)))?;
    Ok(Client::new(channel).max_decoding_message_size(LARGEST_MESSAGE))
}

fn innermost(error: &dyn std::error::Error) -> String {
    let mut at = error;
    while let Some(source) = at.source() {
        at = source;
    }
    at.to_string()
}

async fn hello(link: &Link, client: &mut Client) -> Result<wire::HelloResponse, SessionError> {
    let request = wire::HelloRequest {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        instance: link.instance.clone(),
        capabilities: Vec::new(),
        proxy_port: link.proxy_port.into(),
    };
    let response = answered("Hello", client.hello(request)).await?.into_inner();
    match response.epoch.clone().map(convert::epoch) {
        Some(_) => Ok(response),
        None => Err(SessionError::Protocol("a Hello without an epoch".into())),
    }
}
