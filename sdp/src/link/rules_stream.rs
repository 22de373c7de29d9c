//! The stream that receives rules and acknowledges them.

use fqdn_proto::native as wire;
use tokio::{sync::mpsc, task::spawn_blocking};
use tokio_stream::wrappers::ReceiverStream;

use super::{
    Link, SessionError,
    assembly::{Assembly, Complete, Content},
    convert,
    native::{Client, Never},
};

const CALL: &str = "UpdateDNSRules";
const ACKS_AHEAD: usize = 16;

/// Applies and acknowledges rules until the stream ends.
///
/// The first message has no time limit, because the agent publishes nothing before it knows
/// everything. Its Hello has shown that it is alive.
pub(super) async fn run(link: &Link, client: &mut Client) -> Result<Never, SessionError> {
    let broken = |status| SessionError::Status {
        what: CALL,
        status: Box::new(status),
    };
    let session = link.state.sessions();
    let (acks, sent) = mpsc::channel(ACKS_AHEAD);
    let call = client.update_dns_rules(ReceiverStream::new(sent));
    let mut down = call.await.map_err(broken)?.into_inner();
    let mut assembly = Assembly::default();
    loop {
        let message = down.message().await.map_err(broken)?;
        let update = message.ok_or(SessionError::Closed { what: CALL })?;
        let Some(complete) = assembly.push(update)? else {
            continue;
        };
        // This runs on another thread, because compiling rules may take seconds and mappings must
        // go on.
        let to = link.clone();
        let applied = spawn_blocking(move || apply(&to, session, complete));
        let applied = applied
            .await
            .map_err(|error| SessionError::Protocol(error.to_string()))?;
        let Some(ack) = applied else {
            return Err(SessionError::Closed { what: CALL });
        };
        let acked = ack.nack.is_empty().then_some(ack.revision);
        acks.send(ack)
            .await
            .map_err(|_| SessionError::Closed { what: CALL })?;
        if let Some(revision) = acked {
            link.state.acked(revision);
        }
    }
}

/// Puts a revision in force. Returns `None` if the session has ended, because the rules in force
/// are then newer.
fn apply(link: &Link, session: u64, complete: Complete) -> Option<wire::RulesAck> {
    let Complete {
        epoch,
        revision,
        content,
    } = complete;
    let mut ack = wire::RulesAck {
        epoch: Some(convert::epoch_out(&epoch)),
        revision,
        nack: String::new(),
    };
    let content = match content {
        Ok(content) => content,
        Err(error) => {
            ack.nack = error.to_string();
            tracing::error!(
                revision,
                reason = ack.nack,
                "rules refused; the previous ones remain in force"
            );
            link.state.rules_refused(revision, &ack.nack);
            return Some(ack);
        }
    };
    let mut writing = link.state.writing_rules();
    if link.state.sessions() != session {
        return None;
    }
    // Called first, because from here on a lease of an older revision must not release an answer.
    link.sink.rules_applied(epoch.clone(), revision);
    let errors = match &content {
        Content::Snapshot(all) => {
            writing.forget();
            link.state.rules_kept(0);
            link.policy.replace_all(all)
        }
        Content::Delta { changed, removed } => link.policy.apply(changed, removed),
    };
    for error in &errors {
        tracing::error!(revision, %error, "a rule of the agent allows nothing");
    }
    tracing::debug!(
        revision,
        snapshot = matches!(content, Content::Snapshot(_)),
        "rules applied"
    );
    link.state.rules_from_agent(epoch, revision);
    link.maps.set_agent_ready(true);
    Some(ack)
}
