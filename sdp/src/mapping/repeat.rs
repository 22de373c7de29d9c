//! Answers that were released under a lease a moment ago. If the same bytes come again, the worker
//! sends them without parsing them, and without calling the sink.

use std::{hash::BuildHasher, net::SocketAddr, time::Duration};

use dns_policy::{boot_time::BootTime, mapping::EndpointInstance};
use foldhash::quality::RandomState;

/// Time for which the same answer is not passed to the sink again. The mapping in the sink can
/// therefore be older than the last released answer by this time.
pub(crate) const WITHIN: Duration = Duration::from_millis(250);

/// Number of sets. One worker remembers [`WAYS`] answers in each set. The print of an answer
/// selects its set.
const SETS: usize = 1024;

/// Number of answers in one set. With only one, two popular answers of the same set would displace
/// each other, and would be passed to the sink every time.
const WAYS: usize = 4;

/// The recent answers of one worker.
#[derive(Debug)]
pub(crate) struct Repeats {
    hasher: RandomState,
    sets: Vec<[SeenAnswer; WAYS]>,
}

/// An answer that was released under a lease.
#[derive(Clone, Copy, Debug, Default)]
struct SeenAnswer {
    print: u64,
    /// Version of the leases, as for [`Repeats::leased`].
    version: u64,
    /// Time until which the answer is not passed to the sink again.
    until: BootTime,
}

/// A hash of an answer of one server to one endpoint, without the message's id. Two different
/// answers have the same print with a probability of 2^-64. The second of them would then be
/// released without being learned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Print(u64);

impl Repeats {
    pub(crate) fn new() -> Self {
        Self {
            hasher: RandomState::default(),
            sets: vec![<[SeenAnswer; WAYS]>::default(); SETS],
        }
    }

    pub(crate) fn print(
        &self,
        endpoint: EndpointInstance,
        server: SocketAddr,
        message: &[u8],
    ) -> Print {
        let but_id = message.get(2..).unwrap_or_default();
        Print(self.hasher.hash_one((endpoint, server, but_id)))
    }

    /// Whether the answer was released under a lease less than [`WITHIN`] ago, and the leases have
    /// not changed since. `version` is the present version of the leases.
    pub(crate) fn is_leased(&self, print: Print, version: Option<u64>, now: BootTime) -> bool {
        let is_leased = |answer: &SeenAnswer| {
            answer.print == print.0 && Some(answer.version) == version && now < answer.until
        };
        let set = self.sets.get(set_of(print));
        set.is_some_and(|answers| answers.iter().any(is_leased))
    }

    /// Notes that an answer was released under a lease. `version` is the version of the leases, read
    /// before the sink was called: a change during the call then makes this note void. The note
    /// replaces an earlier one of the same answer, or the oldest one of its set.
    pub(crate) fn leased(&mut self, print: Print, version: Option<u64>, now: BootTime) {
        let (Some(version), Some(answers)) = (version, self.sets.get_mut(set_of(print))) else {
            return;
        };
        let place = answers
            .iter_mut()
            .min_by_key(|answer| (answer.print != print.0, answer.until));
        if let Some(answer) = place {
            *answer = SeenAnswer {
                print: print.0,
                version,
                until: now.plus(WITHIN),
            };
        }
    }
}

fn set_of(print: Print) -> usize {
    usize::try_from(print.0 % SETS as u64).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::pairs::tests::mapping;

    #[test]
    fn only_the_same_answer_soon_and_under_the_same_leases_is_a_repeat() {
        let of = mapping("a.", &[1], 60, 1);
        let (endpoint, server) = (of.endpoint, of.server);
        let mut repeats = Repeats::new();
        let print = repeats.print(endpoint, server, b"\x01\x02answer");
        let now = BootTime::from_nanos(1_000);
        assert!(!repeats.is_leased(print, Some(7), now));
        repeats.leased(print, Some(7), now);
        assert!(repeats.is_leased(print, Some(7), now));
        assert!(!repeats.is_leased(print, Some(8), now), "leases changed");
        assert!(!repeats.is_leased(print, None, now));
        assert!(!repeats.is_leased(print, Some(7), now.plus(WITHIN)));

        assert_eq!(print, repeats.print(endpoint, server, b"\x03\x04answer"));
        assert_ne!(print, repeats.print(endpoint, server, b"\x01\x02Answer"));
        let other = EndpointInstance {
            ifindex: endpoint.ifindex + 1,
            ..endpoint
        };
        assert_ne!(print, repeats.print(other, server, b"\x01\x02answer"));
    }

    #[test]
    fn answers_of_one_set_do_not_replace_each_other_until_it_is_full() {
        let mut repeats = Repeats::new();
        let print = |n: usize| Print((n * SETS) as u64 + 5);
        let at = |n: usize| BootTime::from_nanos(1_000 + n as u64);
        let is_leased = |repeats: &Repeats, n| repeats.is_leased(print(n), Some(7), at(100));
        for n in [0, 1, 0, 2, 3, 2] {
            repeats.leased(print(n), Some(7), at(n));
        }
        assert!((0..WAYS).all(|n| is_leased(&repeats, n)));
        repeats.leased(print(0), Some(7), at(WAYS));
        repeats.leased(print(WAYS), Some(7), at(WAYS));
        let remembered: Vec<_> = (0..=WAYS).filter(|n| is_leased(&repeats, *n)).collect();
        assert_eq!(remembered, [0, 2, 3, 4], "the oldest is replaced");
    }
}
