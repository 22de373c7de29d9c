//! Merges the events in the queue of proxies' streams into as few events as their order permits.

use agent_core::core::event::Event;

use super::StreamEvent;

/// Mappings, or acknowledgements, of several events are planned together up to this many.
const BATCH: usize = 4096;

/// Passes the events to `step`. Successive mappings become one event, and so do successive
/// acknowledgements.
pub(super) fn merged(received: impl Iterator<Item = StreamEvent>, mut step: impl FnMut(Event)) {
    let mut last: Option<Event> = None;
    for (event, _room, _queued) in received {
        last = match (last.take(), event) {
            (Some(Event::Mappings(mut all)), Event::Mappings(more)) if all.len() < BATCH => {
                all.extend(more);
                Some(Event::Mappings(all))
            }
            (Some(Event::RevokeAcked(mut all)), Event::RevokeAcked(more)) if all.len() < BATCH => {
                all.extend(more);
                Some(Event::RevokeAcked(all))
            }
            (before, event) => {
                before.into_iter().for_each(&mut step);
                Some(event)
            }
        };
    }
    last.into_iter().for_each(step);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::shared::Shared;
    use agent_core::core::event::{RevokeAck, StreamId};

    fn ack(id: u64) -> Event {
        let stream = StreamId(id % 2);
        Event::RevokeAcked(vec![RevokeAck { stream, id }])
    }

    #[test]
    fn acknowledgements_of_two_streams_are_few_events_in_their_order() {
        let down = Event::StreamDown(StreamId(0));
        let received = (0..5_000).map(ack).chain([down]).chain([ack(5_000)]);
        let (mut events, mut ids) = (Vec::new(), Vec::new());
        let shared = Shared::default();
        let received = received.map(|event| (event, None, shared.queued()));
        merged(received, |event| events.push(event));
        let sizes = events.iter().map(|event| match event {
            Event::RevokeAcked(acks) => {
                ids.extend(acks.iter().map(|ack| ack.id));
                acks.len()
            }
            _ => 0,
        });
        assert_eq!(sizes.collect::<Vec<_>>(), [4096, 904, 0, 1]);
        assert!(ids.into_iter().eq(0..=5_000));
    }
}
