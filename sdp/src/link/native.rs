//! A session of the native service: two connections, two streams.

use daemon::{link_stream::ReadNow, state_dir::StateDir};
use fqdn_proto::native as wire;
use tokio::sync::oneshot;
use tonic::transport::{Channel, Endpoint};
use wire::fqdn_policy_client::FqdnPolicyClient;

use super::{
    Link, SessionError, answered, connect, connect_with, convert, mapping_stream, rules_stream,
    state::{Connection, Service, StateDirs},
};
use crate::{config::AgentAddress, shared_tasks::SharedTasks};

/// Maximum length of a message, in bytes. Agents send chunks of at most 1 MiB.
const LARGEST_MESSAGE: usize = 16 << 20;

pub(super) type Client = FqdnPolicyClient<Channel>;

/// Runs one session; returns when it is over.
pub(super) async fn session(link: &Link, address: &AgentAddress) -> SessionError {
    let tasks = SharedTasks::new();
    let _ends = EndWithSession {
        link,
        tasks: &tasks,
    };
    let ended = tokio::select! {
        never = tasks.run() => match never {},
        ended = begin(link, address, &tasks) => ended,
    };
    match ended {
        Ok(never) => match never {},
        Err(error) => error,
    }
}

/// Ends the tasks when the session ends or is cancelled.
struct EndWithSession<'a> {
    link: &'a Link,
    tasks: &'a SharedTasks,
}

impl Drop for EndWithSession<'_> {
    fn drop(&mut self) {
        self.link.sink.share_tasks(None);
        self.tasks.close();
    }
}

/// Type of a loop that ends only with an error.
pub(super) enum Never {}

/// The mapping stream runs in `tasks`, so that a worker that learned a mapping sends it itself.
async fn begin(
    link: &Link,
    address: &AgentAddress,
    tasks: &SharedTasks,
) -> Result<Never, SessionError> {
    let read_now = ReadNow::default();
    let executor = tasks.clone();
    let set = |endpoint: Endpoint| endpoint.executor(executor);
    let channel = connect_with(address, set, read_now.clone()).await?;
    let (mut mappings, mut rules) = (client(channel), client(connect(address).await?));
    let hello = hello(link, &mut mappings).await?;
    self::hello(link, &mut rules).await?;
    let opened = mapping_stream::open(&mut mappings).await?;
    let epoch = opened.epoch().clone();
    let other_proxy_port = other_proxy_port(link, hello.proxy_port);
    let other_state_dir = hello.state_dir.and_then(|dir| other_state_dir(link, dir));
    tracing::info!(%address, agent = hello.version, start = epoch.start, "connected to the agent");
    link.sink.agent_up(epoch.clone(), Some(hello.min_ttl));
    link.state.connected(Connection {
        address: address.to_string(),
        service: Service::Native,
        agent_version: hello.version,
        epoch,
        other_proxy_port,
        other_state_dir,
    });
    let (ends, ended) = oneshot::channel();
    tasks.spawn({
        let link = link.clone();
        async move {
            let _over = ends.send(opened.run(&link).await);
        }
    });
    link.sink.share_tasks(Some((tasks.clone(), read_now)));
    tokio::select! {
        ended = ended => ended.unwrap_or(Err(SessionError::Closed { what: "its own task" })),
        ended = rules_stream::run(link, &mut rules) => ended,
    }
}

/// The port to which the agent redirects queries, if it differs from the port of this proxy.
fn other_proxy_port(link: &Link, agents: u32) -> Option<u16> {
    let agents = u16::try_from(agents).ok().filter(|port| *port != 0);
    let other = agents.filter(|port| *port != link.proxy_port)?;
    tracing::error!(
        ours = link.proxy_port,
        agents = other,
        "the agent redirects queries to another port; give agent and proxy the same --tofqdns-proxy-port"
    );
    Some(other)
}

/// Both state directories, if the agent's differs from this proxy's.
fn other_state_dir(link: &Link, agents: wire::StateDir) -> Option<StateDirs> {
    let own = StateDir::look(&link.state_dir);
    let agents = convert::state_dir(agents);
    if !own.differs_from(&agents) {
        return None;
    }
    let dirs = StateDirs {
        agent: agents.path.display().to_string(),
        own: own.path.display().to_string(),
    };
    tracing::error!(
        ours = dirs.own,
        agents = dirs.agent,
        "the agent writes its files to another directory: a proxy that starts without the agent has \
         no rules; give agent and proxy the same --state-dir"
    );
    Some(dirs)
}

fn client(channel: Channel) -> Client {
    Client::new(channel).max_decoding_message_size(LARGEST_MESSAGE)
}

async fn hello(link: &Link, client: &mut Client) -> Result<wire::HelloResponse, SessionError> {
    let request = wire::HelloRequest {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        instance: link.instance.clone(),
        capabilities: Vec::new(),
        proxy_port: link.proxy_port.into(),
        state_dir: Some(convert::to_state_dir(&StateDir::look(&link.state_dir))),
    };
    let response = answered("Hello", client.hello(request)).await?.into_inner();
    match response.epoch.clone().map(convert::epoch) {
        Some(_) => Ok(response),
        None => Err(SessionError::Protocol("a Hello without an epoch".into())),
    }
}
