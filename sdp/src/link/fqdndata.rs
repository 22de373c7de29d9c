//! A session of the FQDNData service of Cilium's agents (1.19 and later).
//!
//! The agent sends its whole state each time and waits for an answer before it
//! sends another; it never says that a state is the first complete one. So an
//! endpoint that is named gets its rules at once, and one that is not named
//! keeps what it had before the session, [`GRACE`] at most.

use std::{collections::BTreeSet, time::Duration};

use fqdn_proto::fqdndata as wire;
use shared_maps::{EndpointId, IdentityId};
use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{Instant, interval, sleep_until, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Streaming, transport::Channel};
use wire::fqdn_data_client::FqdnDataClient;

use super::{
    Link, SessionError,
    board::{Connection, Service},
    convert::fqdndata as convert,
    native::Never,
};
use crate::{
    config::AgentAddress,
    mapping::{
        BootTime, Refusal,
        sink::{Epoch, Outcome, Outgoing},
    },
    policy::rule::RulesOf,
    resolve::{Resolver, Who},
};

const STREAM: &str = "StreamPolicyState";
const UPDATE: &str = "UpdateMappingRequest";
/// A state holds every prefix of the cluster.
const LARGEST_MESSAGE: usize = 512 << 20;
/// The first state takes the agent a while to put together.
const FIRST_STATE_WITHIN: Duration = Duration::from_secs(10);
/// Rules of endpoints that no state of this session has named are kept this long.
const GRACE: Duration = Duration::from_secs(60);
/// Calls at once.
const CALLS: usize = 64;
/// A call the agent does not answer; the answer it is about was released long ago.
const CALL_WITHIN: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(100);

type Client = FqdnDataClient<Channel>;

/// Runs one session over `channel`; returns when it is over.
pub(super) async fn session(link: &Link, address: &AgentAddress, channel: Channel) -> SessionError {
    let client = Client::new(channel).max_decoding_message_size(LARGEST_MESSAGE);
    match begin(link, address, client).await {
        Ok(never) => match never {},
        Err(error) => error,
    }
}

async fn begin(
    link: &Link,
    address: &AgentAddress,
    mut client: Client,
) -> Result<Never, SessionError> {
    let (acks, sent) = mpsc::channel(1);
    let first = async {
        let call = client.stream_policy_state(ReceiverStream::new(sent));
        let mut states = call
            .await
            .map_err(|status| broken(STREAM, status))?
            .into_inner();
        let first = next(&mut states).await?;
        Ok::<_, SessionError>((states, first))
    };
    let (states, first) = timeout(FIRST_STATE_WITHIN, first)
        .await
        .map_err(|_| SessionError::Silent { what: STREAM })??;
    // It has no epochs: each session counts as one, so that all is sent again.
    let epoch = Epoch {
        boot_id: String::new(),
        start: link.board.sessions() + 1,
    };
    tracing::info!(%address, "connected to the agent (FQDNData)");
    link.sink.agent_up(epoch.clone(), None);
    link.board.connected(Connection {
        address: address.to_string(),
        service: Service::FqdnData,
        agent_version: "not said".to_owned(),
        epoch: epoch.clone(),
        other_proxy_port: None,
    });
    let rules = Rules {
        link,
        epoch,
        states: 0,
        named: BTreeSet::new(),
        latest: Vec::new(),
    };
    tokio::select! {
        ended = rules.follow(states, first, acks) => ended,
        ended = send(link, client) => ended,
    }
}

async fn next(
    states: &mut Streaming<wire::PolicyState>,
) -> Result<wire::PolicyState, SessionError> {
    let state = states
        .message()
        .await
        .map_err(|status| broken(STREAM, status))?;
    state.ok_or(SessionError::Closed { what: STREAM })
}

fn broken(what: &'static str, status: tonic::Status) -> SessionError {
    SessionError::Status {
        what,
        status: Box::new(status),
    }
}

struct Rules<'l> {
    link: &'l Link,
    epoch: Epoch,
    states: u64,
    /// Endpoints that a state of this session has named.
    named: BTreeSet<EndpointId>,
    latest: Vec<RulesOf>,
}

impl Rules<'_> {
    async fn follow(
        mut self,
        mut states: Streaming<wire::PolicyState>,
        first: wire::PolicyState,
        acks: mpsc::Sender<wire::PolicyStateResponse>,
    ) -> Result<Never, SessionError> {
        let grace_over = Instant::now() + GRACE;
        let mut graceful = true;
        let mut state = first;
        loop {
            let ack = convert::ack(std::mem::take(&mut state.request_id));
            self.take(state, graceful);
            acks.send(ack)
                .await
                .map_err(|_| SessionError::Closed { what: STREAM })?;
            self.link.board.acked(self.states);
            state = loop {
                tokio::select! {
                    next = next(&mut states) => break next?,
                    () = sleep_until(grace_over), if graceful => {
                        graceful = false;
                        self.retire();
                    }
                }
            };
        }
    }

    fn take(&mut self, state: wire::PolicyState, graceful: bool) {
        let state = convert::state(state);
        for odd in &state.odd {
            tracing::warn!(%odd, "a rule of the agent allows nothing");
        }
        self.states += 1;
        self.link.maps.set_agent_tables(Some(state.tables));
        let _writing = self.link.board.writing_rules();
        self.link
            .sink
            .rules_applied(self.epoch.clone(), self.states);
        let errors = if graceful {
            let now: BTreeSet<_> = state.rules.iter().map(|of| of.endpoint).collect();
            let gone: Vec<_> = self.named.difference(&now).copied().collect();
            self.named.extend(now);
            self.link.policy.apply(&state.rules, &gone)
        } else {
            self.link.policy.replace_all(&state.rules)
        };
        for error in &errors {
            tracing::error!(%error, "a rule allows nothing");
        }
        self.latest = if graceful { state.rules } else { Vec::new() };
        self.link
            .board
            .rules_from_agent(self.epoch.clone(), self.states);
    }

    /// What no state has named is gone.
    fn retire(&mut self) {
        let _writing = self.link.board.writing_rules();
        self.link
            .policy
            .replace_all(&std::mem::take(&mut self.latest));
    }
}

async fn send(link: &Link, client: Client) -> Result<Never, SessionError> {
    let mut calls = JoinSet::new();
    let mut look = interval(LOOK);
    let mut waiting: Vec<Outgoing> = Vec::new();
    loop {
        while calls.len() < CALLS
            && let Some(out) = waiting.pop()
        {
            let call = call(link, client.clone(), &out);
            calls.spawn(async move { (out.sequence, call.await) });
        }
        if waiting.is_empty() && calls.len() < CALLS {
            // Taken from the end: live mappings are first in a batch.
            waiting = link.sink.next_batch(BootTime::now()).mappings;
            waiting.reverse();
            if !waiting.is_empty() {
                continue;
            }
        }
        tokio::select! {
            Some(done) = calls.join_next(), if !calls.is_empty() => {
                let (sequence, result) =
                    done.map_err(|error| SessionError::Protocol(error.to_string()))?;
                link.sink.results(outcome(sequence, result)?.into_iter().collect());
            }
            () = link.sink.has_work(), if calls.len() < CALLS && waiting.is_empty() => {}
            _ = look.tick(), if calls.len() < CALLS && waiting.is_empty() => {}
        }
    }
}

type Called = Result<Result<tonic::Response<wire::UpdateMappingResponse>, tonic::Status>, ()>;

fn call(
    link: &Link,
    mut client: Client,
    out: &Outgoing,
) -> impl Future<Output = Called> + Send + 'static {
    let mapping = &out.mapping;
    let identity = match link.maps.who(mapping.endpoint.client) {
        Who::Endpoint { identity, .. } => identity,
        Who::Host | Who::Unknown => IdentityId::UNKNOWN,
    };
    let server = link.maps.whom(mapping.server.ip());
    let message = convert::mapping_out(mapping, identity, server, BootTime::now());
    async move {
        timeout(CALL_WITHIN, client.update_mapping_request(message))
            .await
            .map_err(|_| ())
    }
}

/// What became of a call; an error ends the session. No result: the agent did not answer.
fn outcome(sequence: u64, called: Called) -> Result<Option<Outcome>, SessionError> {
    let told = |realised| Outcome {
        sequence,
        realised,
        // It keeps what it took in files of its own.
        durable: realised,
        lease_end: None,
        revision: 0,
        refusal: Refusal::NotRealised,
    };
    match called {
        Err(()) => Ok(None),
        Ok(Ok(response)) => {
            let code = response.into_inner().response();
            Ok(Some(told(code == wire::ResponseCode::NoError)))
        }
        Ok(Err(status)) if matches!(status.code(), Code::Unavailable | Code::Unimplemented) => {
            Err(broken(UPDATE, status))
        }
        Ok(Err(status)) => {
            tracing::debug!(%status, "mapping refused");
            Ok(Some(told(false)))
        }
    }
}
