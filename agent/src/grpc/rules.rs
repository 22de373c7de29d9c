//! The rules stream of one proxy. The agent sends a snapshot and then deltas, and the proxy sends acknowledgements.

use std::sync::Arc;

use dns_policy::epoch::Epoch;
use fqdn_proto::native::{
    DnsRulesUpdate, EndpointDnsRules, EndpointRulesChunk, RulesAck, SnapshotDone,
    dns_rules_update::Kind,
};
use prost::Message as _;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tonic::{Status, Streaming};

use super::convert;
use crate::proxies::{RulesDelta, RulesTable, StreamGuard};

/// Maximum size of the encoded rules in a message, bytes.
pub(super) const CHUNK: usize = 1 << 20;

pub(super) type Updates = mpsc::Sender<Result<DnsRulesUpdate, Status>>;

/// Serves one stream until either end closes it. Nothing is sent before the
/// rules are complete.
pub(super) async fn serve(
    epoch: Epoch,
    guard: StreamGuard,
    mut table: watch::Receiver<Arc<RulesTable>>,
    mut acks: Streaming<RulesAck>,
    updates: Updates,
    stop: CancellationToken,
) {
    let (refused, mut refusals) = watch::channel(0_u64);
    let up = async {
        while let Ok(Some(ack)) = acks.message().await {
            let ours = ack
                .epoch
                .as_ref()
                .is_none_or(|e| *e == convert::epoch(&epoch));
            if !ours {
                continue;
            }
            if ack.nack.is_empty() {
                guard.acked(ack.revision);
            } else {
                tracing::warn!(stream = guard.id().0, revision = ack.revision, reason = %ack.nack, "the proxy refused the rules; the agent sends a full snapshot with the next change");
                guard.nacked(ack.revision, &ack.nack);
                refused.send_modify(|n| *n += 1);
            }
        }
    };
    let down = async {
        let mut sent: Option<Arc<RulesTable>> = None;
        loop {
            let now = Arc::clone(&table.borrow_and_update());
            if refusals.has_changed().unwrap_or(false) {
                refusals.mark_unchanged();
                sent = None;
            }
            if now.ready {
                for message in messages(&epoch, sent.as_deref(), &now) {
                    if updates.send(Ok(message)).await.is_err() {
                        return;
                    }
                }
                guard.sent(now.revision);
                sent = Some(now);
            }
            if table.changed().await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = up => {}
        () = down => {}
        () = stop.cancelled() => {}
    }
}

/// Messages that bring a proxy from the rules `sent` to the rules `now`. If nothing was sent yet, they are a snapshot.
fn messages(epoch: &Epoch, sent: Option<&RulesTable>, now: &RulesTable) -> Vec<DnsRulesUpdate> {
    let message = |kind| DnsRulesUpdate {
        epoch: Some(convert::epoch(epoch)),
        revision: now.revision,
        kind: Some(kind),
    };
    match sent {
        None => {
            let whole = now.since(&RulesTable::default());
            let mut messages: Vec<_> = chunks(&whole, true)
                .into_iter()
                .map(|chunk| message(Kind::Endpoints(chunk)))
                .collect();
            messages.push(message(Kind::SnapshotDone(SnapshotDone {})));
            messages
        }
        Some(before) => {
            let delta = now.since(before);
            let changed = delta != RulesDelta::default() || now.revision != before.revision;
            if !changed {
                return Vec::new();
            }
            // A revision without changed rules is sent too, because leases name revisions.
            chunks(&delta, false)
                .into_iter()
                .map(|chunk| message(Kind::Endpoints(chunk)))
                .collect()
        }
    }
}

/// The rules in chunks. A delta has at least one chunk; a snapshot without rules has none.
fn chunks(delta: &RulesDelta, snapshot: bool) -> Vec<EndpointRulesChunk> {
    let mut chunks = Vec::new();
    let mut current = EndpointRulesChunk {
        removed: delta.removed.iter().map(|id| u32::from(id.0)).collect(),
        ..EndpointRulesChunk::default()
    };
    let mut size = current.encoded_len();
    for (endpoint, rules) in &delta.changed {
        let rules: EndpointDnsRules = convert::endpoint_rules(*endpoint, rules);
        let more = rules.encoded_len() + 8;
        if size + more > CHUNK && !current.endpoints.is_empty() {
            current.more = true;
            chunks.push(std::mem::take(&mut current));
            size = 0;
        }
        size += more;
        current.endpoints.push(rules);
    }
    if snapshot {
        // SnapshotDone follows; without it a second snapshot would read as a delta.
        current.more = true;
        if current.endpoints.is_empty() && current.removed.is_empty() {
            return chunks;
        }
    }
    chunks.push(current);
    chunks
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use dns_policy::rule::{
        EndpointRules, NameRule, NameRules, PortRules, SelectorRule, Servers, Transport,
    };
    use shared_maps::EndpointId;

    use super::*;

    fn epoch() -> Epoch {
        Epoch {
            boot_id: "b".to_owned(),
            start: 1,
        }
    }

    fn rules(names: usize) -> Arc<EndpointRules> {
        let names = (0..names)
            .map(|n| NameRule::Name(format!("name-{n}.example.com")))
            .collect();
        Arc::new(EndpointRules {
            ports: vec![PortRules {
                port: 53,
                transport: Transport::Udp,
                rules: vec![SelectorRule {
                    selector: "s".to_owned(),
                    servers: Servers::Any,
                    names: NameRules::Names(names),
                }],
            }],
        })
    }

    fn table(revision: u64, endpoints: BTreeMap<EndpointId, Arc<EndpointRules>>) -> RulesTable {
        RulesTable {
            revision,
            ready: true,
            endpoints,
        }
    }

    #[test]
    fn a_snapshot_is_sent_in_chunks_and_ends_with_done() {
        let shared = rules(2000);
        let endpoints = (1..=100)
            .map(|id| (EndpointId(id), Arc::clone(&shared)))
            .collect();
        let messages = messages(&epoch(), None, &table(3, endpoints));
        assert!(messages.len() > 3);
        let mut seen = 0;
        for message in &messages {
            assert!(
                message.encoded_len() <= CHUNK + 64,
                "{}",
                message.encoded_len()
            );
            assert_eq!(message.revision, 3);
            if let Some(Kind::Endpoints(chunk)) = &message.kind {
                seen += chunk.endpoints.len();
            }
        }
        assert_eq!(seen, 100);
        assert!(matches!(
            messages.last().unwrap().kind,
            Some(Kind::SnapshotDone(_))
        ));
    }

    #[test]
    fn an_empty_snapshot_is_just_done() {
        let messages = messages(&epoch(), None, &table(1, BTreeMap::new()));
        assert_eq!(messages.len(), 1);
        assert!(matches!(messages[0].kind, Some(Kind::SnapshotDone(_))));
    }

    #[test]
    fn a_delta_names_changed_and_removed_endpoints() {
        let kept = rules(1);
        let before = table(
            1,
            [
                (EndpointId(1), Arc::clone(&kept)),
                (EndpointId(2), rules(1)),
            ]
            .into(),
        );
        let now = table(2, [(EndpointId(1), kept), (EndpointId(3), rules(1))].into());
        let messages = messages(&epoch(), Some(&before), &now);
        let [message] = messages.as_slice() else {
            panic!("{messages:?}");
        };
        let Some(Kind::Endpoints(chunk)) = &message.kind else {
            panic!("{message:?}");
        };
        assert_eq!(
            chunk
                .endpoints
                .iter()
                .map(|e| e.endpoint_id)
                .collect::<Vec<_>>(),
            [3]
        );
        assert_eq!(chunk.removed, [2]);
        assert!(!chunk.more);
        // The same rules at a later revision are sent as an empty delta.
        let later = table(3, now.endpoints.clone());
        assert_eq!(super::messages(&epoch(), Some(&now), &later).len(), 1);
        assert!(super::messages(&epoch(), Some(&later), &later).is_empty());
    }
}
