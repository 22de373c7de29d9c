//! Puts chunks of rules together until a revision is complete.

use std::collections::{BTreeMap, BTreeSet};

use dns_policy::{
    epoch::Epoch,
    rule::{EndpointRules, RulesOf},
};
use fqdn_proto::native as wire;
use shared_maps::EndpointId;

use super::{SessionError, convert, convert::RulesError};

/// A revision of the rules whose chunks have all arrived.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Complete {
    pub(super) epoch: Epoch,
    pub(super) revision: u64,
    pub(super) content: Result<Content, RulesError>,
}

/// The rules of one revision, in full or as changes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// All rules; endpoints that are not listed have none.
    Snapshot(Vec<RulesOf>),
    /// The changed endpoints have these rules, the removed endpoints have none any more, and all
    /// others keep theirs.
    Delta {
        changed: Vec<RulesOf>,
        removed: Vec<EndpointId>,
    },
}

/// Chunks of one stream so far.
#[derive(Debug, Default)]
pub(super) struct Assembly {
    had_snapshot: bool,
    part: Option<Part>,
}

#[derive(Debug, Default)]
struct Part {
    revision: u64,
    changed: BTreeMap<EndpointId, EndpointRules>,
    removed: BTreeSet<EndpointId>,
    error: Option<RulesError>,
}

impl Assembly {
    /// Takes the next message. Returns the revision if the message completes one.
    pub(super) fn push(
        &mut self,
        update: wire::DnsRulesUpdate,
    ) -> Result<Option<Complete>, SessionError> {
        let odd = |what: &str| SessionError::Protocol(format!("a rules update {what}"));
        let epoch = convert::epoch(update.epoch.ok_or_else(|| odd("without an epoch"))?);
        let revision = update.revision;
        match update.kind {
            // A kind of message that a later version added.
            None => Ok(None),
            Some(wire::dns_rules_update::Kind::Endpoints(chunk)) => {
                let part = self.part.get_or_insert_with(|| Part {
                    revision,
                    ..Part::default()
                });
                if self.had_snapshot && part.revision != revision {
                    return Err(odd("of another revision before the last one was complete"));
                }
                let more = chunk.more;
                part.take(chunk);
                if more || !self.had_snapshot {
                    return Ok(None);
                }
                let content = self.part.take().unwrap_or_default().delta();
                Ok(Some(Complete {
                    epoch,
                    revision,
                    content,
                }))
            }
            // A second one follows a refused revision: every chunk before it said that more chunks
            // follow.
            Some(wire::dns_rules_update::Kind::SnapshotDone(_)) => {
                self.had_snapshot = true;
                let content = self.part.take().unwrap_or_default().snapshot();
                Ok(Some(Complete {
                    epoch,
                    revision,
                    content,
                }))
            }
        }
    }
}

impl Part {
    fn take(&mut self, chunk: wire::EndpointRulesChunk) {
        for removed in chunk.removed {
            match convert::endpoint_id(removed) {
                Ok(id) => {
                    self.changed.remove(&id);
                    self.removed.insert(id);
                }
                Err(error) => self.error = self.error.take().or(Some(error)),
            }
        }
        for endpoint in chunk.endpoints {
            match convert::rules(endpoint) {
                Ok(of) => {
                    self.removed.remove(&of.endpoint);
                    self.changed.insert(of.endpoint, of.rules);
                }
                Err(error) => self.error = self.error.take().or(Some(error)),
            }
        }
    }

    fn changed(changed: BTreeMap<EndpointId, EndpointRules>) -> Vec<RulesOf> {
        changed
            .into_iter()
            .map(|(endpoint, rules)| RulesOf { endpoint, rules })
            .collect()
    }

    fn snapshot(self) -> Result<Content, RulesError> {
        match self.error {
            Some(error) => Err(error),
            None => Ok(Content::Snapshot(Self::changed(self.changed))),
        }
    }

    fn delta(self) -> Result<Content, RulesError> {
        match self.error {
            Some(error) => Err(error),
            None => Ok(Content::Delta {
                changed: Self::changed(self.changed),
                removed: self.removed.into_iter().collect(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use wire::dns_rules_update::Kind;

    use super::*;

    fn update(revision: u64, kind: Kind) -> wire::DnsRulesUpdate {
        let epoch = wire::AgentEpoch {
            boot_id: "b".into(),
            start: 1,
        };
        wire::DnsRulesUpdate {
            epoch: Some(epoch),
            revision,
            kind: Some(kind),
        }
    }

    fn chunk(revision: u64, ids: &[u32], removed: &[u32], more: bool) -> wire::DnsRulesUpdate {
        let endpoints = ids.iter().map(|id| wire::EndpointDnsRules {
            endpoint_id: *id,
            ports: vec![],
        });
        update(
            revision,
            Kind::Endpoints(wire::EndpointRulesChunk {
                endpoints: endpoints.collect(),
                removed: removed.to_vec(),
                more,
            }),
        )
    }

    fn done(revision: u64) -> wire::DnsRulesUpdate {
        update(revision, Kind::SnapshotDone(wire::SnapshotDone {}))
    }

    fn ids(rules: &[RulesOf]) -> Vec<u16> {
        rules.iter().map(|of| of.endpoint.0).collect()
    }

    #[test]
    fn a_snapshot_is_complete_only_when_done() {
        let mut assembly = Assembly::default();
        assert_eq!(assembly.push(chunk(3, &[1], &[], true)).unwrap(), None);
        assert_eq!(assembly.push(chunk(3, &[2], &[], false)).unwrap(), None);
        let complete = assembly.push(done(3)).unwrap().unwrap();
        assert_eq!(complete.revision, 3);
        let Ok(Content::Snapshot(all)) = complete.content else {
            panic!("no snapshot")
        };
        assert_eq!(ids(&all), [1, 2]);
    }

    #[test]
    fn deltas_follow_and_one_bad_endpoint_refuses_the_revision() {
        let mut assembly = Assembly::default();
        assembly.push(done(1)).unwrap();
        assert_eq!(
            assembly.push(chunk(2, &[1, 70_000], &[], true)).unwrap(),
            None
        );
        let complete = assembly.push(chunk(2, &[2], &[9], false)).unwrap().unwrap();
        assert_eq!(complete.content, Err(RulesError::Endpoint(70_000)));
        let complete = assembly.push(chunk(3, &[2], &[9], false)).unwrap().unwrap();
        let Ok(Content::Delta { changed, removed }) = complete.content else {
            panic!("no delta")
        };
        assert_eq!((ids(&changed), removed), (vec![2], vec![EndpointId(9)]));
    }

    #[test]
    fn a_second_snapshot_replaces_the_first() {
        let mut assembly = Assembly::default();
        assembly.push(done(1)).unwrap();
        assert_eq!(assembly.push(chunk(2, &[1], &[], true)).unwrap(), None);
        let complete = assembly.push(done(2)).unwrap().unwrap();
        let Ok(Content::Snapshot(all)) = complete.content else {
            panic!("no snapshot")
        };
        assert_eq!(ids(&all), [1]);
    }

    #[test]
    fn a_malformed_message_ends_the_session() {
        let mut assembly = Assembly::default();
        assert!(assembly.push(wire::DnsRulesUpdate::default()).is_err());
        assembly.push(done(1)).unwrap();
        assembly.push(chunk(2, &[1], &[], true)).unwrap();
        assert!(assembly.push(chunk(3, &[1], &[], false)).is_err());
    }
}
