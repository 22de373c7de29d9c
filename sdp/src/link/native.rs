//! A session of the native service: two connections, two streams.

use fqdn_proto::native as wire;
use tonic::transport::Channel;
use wire::fqdn_policy_client::FqdnPolicyClient;

use super::{
    Link, SessionError, answered,
    board::{Connection, Service},
    connect, convert, mapping_stream, rules_stream,
};
use crate::config::AgentAddress;

/// Agents send chunks of 1 MiB at most.
const LARGEST_MESSAGE: usize = 16 << 20;

pub(super) type Client = FqdnPolicyClient<Channel>;

/// Runs one session; returns when it is over.
pub(super) async fn session(link: &Link, address: &AgentAddress) -> SessionError {
    match begin(link, address).await {
        Ok(never) => match never {},
        Err(error) => error,
    }
}

/// What ends only with an error.
pub(super) enum Never {}

async fn begin(link: &Link, address: &AgentAddress) -> Result<Never, SessionError> {
    let (mut mappings, mut rules) = (client(address).await?, client(address).await?);
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

async fn client(address: &AgentAddress) -> Result<Client, SessionError> {
    Ok(Client::new(connect(address).await?).max_decoding_message_size(LARGEST_MESSAGE))
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
