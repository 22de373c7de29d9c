//! A session of the FQDNData service of Cilium's agents (1.19 and later).
//!
//! The agent sends its whole state in each message, and waits for an answer before it sends the
//! next message. It does not mark the first complete state. An endpoint in the state gets its rules
//! at once, and an endpoint that is not in a state yet keeps its rules from before the session: see
//! [`crate::kept_rules`].

mod calls;
#[cfg(test)]
mod golden;

use std::{collections::BTreeSet, time::Duration};

use dns_policy::{
    epoch::Epoch,
    rule::RulesOf,
    table::{PolicyHandle, RuleError},
};
use fqdn_proto::{
    encoded::{Encoded, stream_policy_state},
    fqdndata as wire,
};
use tokio::{
    sync::mpsc,
    task::{JoinError, spawn_blocking},
    time::timeout,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Streaming, transport::Channel};
use wire::fqdn_data_client::FqdnDataClient;

use super::{
    Link, SessionError,
    convert::fqdndata as convert,
    native::Never,
    state::{Connection, Service},
};
use crate::{
    config::AgentAddress,
    kept_rules::{KeptRules, end_rules_of_lost_endpoints},
    maps::{AgentTables, PinnedMaps},
};

const STREAM: &str = "StreamPolicyState";
/// Maximum length of a message, in bytes. A state holds every prefix of the cluster.
const LARGEST_MESSAGE: usize = 512 << 20;
/// Time limit for the first state, which takes the agent a while to put together.
const FIRST_STATE_WITHIN: Duration = Duration::from_secs(10);

/// Longest time that rules wait to be written to the file for a start without an agent. A disk that
/// hangs must not keep rules from being used.
const WRITTEN_WITHIN: Duration = Duration::from_millis(100);

type Client = FqdnDataClient<Channel>;

/// Runs one session over `channel`; returns when it is over.
pub(super) async fn session(link: &Link, address: &AgentAddress, channel: Channel) -> SessionError {
    match begin(link, address, channel).await {
        Ok(never) => match never {},
        Err(error) => error,
    }
}

async fn begin(
    link: &Link,
    address: &AgentAddress,
    channel: Channel,
) -> Result<Never, SessionError> {
    let (acks, sent) = mpsc::channel(1);
    let first = async {
        let call = stream_policy_state(channel.clone(), ReceiverStream::new(sent), LARGEST_MESSAGE);
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
    // The service has no epochs: each session counts as one, so that all mappings are sent again.
    let epoch = Epoch {
        boot_id: String::new(),
        start: link.state.sessions() + 1,
    };
    tracing::info!(%address, "connected to the agent (FQDNData)");
    link.sink.agent_up(epoch.clone(), None);
    link.state.connected(Connection {
        address: address.to_string(),
        service: Service::FqdnData,
        agent_version: "unknown".to_owned(),
        epoch: epoch.clone(),
        other_proxy_port: None,
        other_state_dir: None,
    });
    link.maps.begin_agent_session();
    adopt_rules(link);
    let rules = Rules {
        link: link.clone(),
        epoch,
        states: 0,
        odd: BTreeSet::new(),
    };
    tokio::select! {
        ended = follow(rules, states, first, acks) => ended,
        ended = calls::send(link, Client::new(channel)) => ended,
    }
}

type State = Encoded<wire::PolicyState>;

async fn next(states: &mut Streaming<State>) -> Result<State, SessionError> {
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

/// Puts each state in force and acknowledges it.
async fn follow(
    mut rules: Rules,
    mut states: Streaming<State>,
    first: State,
    acks: mpsc::Sender<wire::PolicyStateResponse>,
) -> Result<Never, SessionError> {
    let mut state = first;
    loop {
        // Another thread does this, because the agent waits only one second for an answer to its
        // ping.
        let taken = spawn_blocking(move || rules.take(state));
        let (ack, back) = taken.await.map_err(|error| broke_off(&error))??;
        rules = back;
        acks.send(ack)
            .await
            .map_err(|_| SessionError::Closed { what: STREAM })?;
        rules.link.state.acked(rules.states);
        state = next(&mut states).await?;
    }
}

fn broke_off(error: &JoinError) -> SessionError {
    SessionError::Protocol(error.to_string())
}

/// Notes the endpoints whose rules are in force when the session begins.
fn adopt_rules(link: &Link) {
    let mut writing = link.state.writing_rules();
    let in_force = link.policy.load().endpoints();
    writing.adopt(in_force, &link.maps.instances().unwrap_or_default());
}

/// Puts the rules and tables of one state in force. Endpoints that the session has not named yet
/// keep their rules. `keep` is called before the rules can allow any query.
fn put_in_force(
    rules: &[RulesOf],
    tables: AgentTables,
    kept: &mut KeptRules,
    policy: &PolicyHandle,
    maps: &PinnedMaps,
    keep: impl FnOnce(&KeptRules),
) -> Vec<RuleError> {
    let gone = kept.named(rules.iter().map(|of| of.endpoint).collect());
    if let Some(now) = maps.instances() {
        kept.note_named(&now);
    }
    keep(kept);
    let errors = policy.apply(rules, &gone);
    // The tables are set right after the rules are in force, because compiling the rules takes
    // longer.
    maps.set_agent_tables(tables);
    end_rules_of_lost_endpoints(kept, maps, policy);
    if !rules.is_empty() {
        maps.set_agent_ready(true);
    }
    errors
}

struct Rules {
    link: Link,
    epoch: Epoch,
    states: u64,
    /// Unusable parts of the last state.
    odd: BTreeSet<String>,
}

impl Rules {
    /// Puts a state in force. Returns the answer to the state, and `self`.
    fn take(mut self, state: State) -> Result<(wire::PolicyStateResponse, Self), SessionError> {
        let mut state = state.decode().map_err(|error| {
            let error = format!("a state: {error}");
            self.link.state.rules_refused(self.states + 1, &error);
            SessionError::Protocol(error)
        })?;
        let ack = convert::ack(std::mem::take(&mut state.request_id));
        let state = convert::state(state);
        self.states += 1;
        let link = &self.link;
        let mut writing = link.state.writing_rules();
        if link.state.sessions() != self.epoch.start {
            // The session ended meanwhile, and another one has begun.
            return Err(SessionError::Closed { what: STREAM });
        }
        link.sink.rules_applied(self.epoch.clone(), self.states);
        let servers = state.servers();
        let errors = put_in_force(
            &state.rules,
            state.tables,
            &mut writing,
            &link.policy,
            &link.maps,
            |kept| {
                link.rules_journal.note(&state.rules, kept, servers);
                link.rules_journal.write_now(WRITTEN_WITHIN);
            },
        );
        link.state.rules_kept(writing.unconfirmed());
        for error in &errors {
            tracing::error!(%error, "a rule of the agent allows nothing");
        }
        link.state.rules_from_agent(self.epoch.clone(), self.states);
        drop(writing);
        link.state.rows_skipped(state.skipped);
        self.note_odd(state.odd.into_iter().collect());
        Ok((ack, self))
    }

    /// Reports the unusable parts of a state if they are new, because each state contains all of
    /// them again.
    fn note_odd(&mut self, odd: BTreeSet<String>) {
        let status = &self.link.state;
        for odd in odd.difference(&self.odd) {
            tracing::warn!(%odd, "a rule of the agent allows nothing");
        }
        if let Some(first) = odd.first() {
            let rows = if odd.len() == 1 {
                "row allows"
            } else {
                "rows allow"
            };
            let what = format!("{} {rows} nothing; {first}", odd.len());
            if odd == self.odd {
                status.rules_refused_still(self.states, &what);
            } else {
                status.rules_refused(self.states, &what);
            }
        }
        self.odd = odd;
    }
}
