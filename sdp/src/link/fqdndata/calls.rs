//! Mappings and reports to a Cilium agent, one unary call each, in the order of the events.
//!
//! The agent answers a call when it has plumbed the addresses. Most of the concurrent calls are for
//! answers that pods wait for. Few are for repeated mappings, so that no client waits behind them.

use std::{collections::VecDeque, future::poll_fn, pin::Pin, task::Poll, time::Duration};

use dns_policy::{boot_time::BootTime, mapping::Refusal};
use fqdn_proto::fqdndata as wire;
use shared_maps::IdentityId;
use tokio::{
    task::JoinSet,
    time::{MissedTickBehavior, interval, sleep, timeout},
};
use tonic::{Code, Status};

use super::{Client, broken, convert};
use crate::{
    link::{Link, SessionError, native::Never},
    query_report::{ALLOW_EVERY, QueryReports},
    resolve::{QueryClient, Resolver},
    sink::{Grant, MappingResult, Outgoing, Promise, Room},
};

const UPDATE: &str = "UpdateMappingRequest";
/// Maximum number of concurrent calls for answers that pods wait for.
const LIVE: usize = 64;
/// Maximum number of concurrent calls for mappings that no client waits for.
const REPLAYS: usize = 16;
/// Maximum number of concurrent calls for reports.
const MAX_REPORTS: usize = 32;
/// The first report waits this long for others, so that one wake-up sends all of them. A report
/// never waits behind its answer: mappings are sent after all reports.
const GATHER: Duration = Duration::from_millis(2);
/// Time limit of a call. By then, the DNS answer that it is about was released long ago.
const CALL_WITHIN: Duration = Duration::from_secs(5);
/// How often the link notes that it has read all results, while an answer waits for a result.
const BEAT: Duration = Duration::from_millis(10);

/// Content of a call, with the sequence number of its mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CallKind {
    /// A mapping that a pod waits for.
    Live(u64),
    /// A mapping that no client waits for.
    Replay(u64),
    /// An event for the agent's log.
    Report,
}

/// The response to a call; `None` if none came in time.
type CallResult = Option<Result<wire::ResponseCode, Status>>;
type Call = Pin<Box<dyn Future<Output = CallResult> + Send>>;

/// Sends until the session is over.
pub(super) async fn send(link: &Link, client: Client) -> Result<Never, SessionError> {
    let mut sender = Sender {
        link,
        client,
        calls: JoinSet::new(),
        live: 0,
        replays: 0,
        reports: 0,
        waiting: VecDeque::new(),
        again: VecDeque::new(),
    };
    let mut allow = interval(ALLOW_EVERY);
    let mut beat = interval(BEAT);
    allow.set_missed_tick_behavior(MissedTickBehavior::Delay);
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let _listening = link.reports.listen();
    loop {
        sender.open().await;
        let waits = link.sink.is_waiting();
        tokio::select! {
            // Results come before beats, so that every result is taken when a beat is noted.
            biased;
            // Comes before branches that may always have work. It is due only once per interval.
            _ = allow.tick() => link.reports.allow_more(),
            Some(done) = sender.calls.join_next(), if !sender.calls.is_empty() => {
                let (kind, came) =
                    done.map_err(|error| SessionError::Protocol(error.to_string()))?;
                sender.done(kind, came)?;
            }
            _ = beat.tick(), if waits => link.sink.read_all(BootTime::now()),
            () = link.sink.has_work() => {}
            // The other branches cancel this one without loss: `open` sends what was gathered.
            () = gather_reports(&link.reports) => {}
        }
    }
}

async fn gather_reports(reports: &QueryReports) {
    reports.has_work().await;
    sleep(GATHER).await;
}

struct Sender<'l> {
    link: &'l Link,
    client: Client,
    calls: JoinSet<(CallKind, CallResult)>,
    live: usize,
    replays: usize,
    reports: usize,
    /// Mappings from the sink for which no call is open yet.
    waiting: VecDeque<Outgoing>,
    again: VecDeque<Outgoing>,
}

impl Sender<'_> {
    /// Opens as many calls as there is room for.
    async fn open(&mut self) {
        // Reports come first: a query is reported before its answer.
        while self.reports < MAX_REPORTS
            && let Some(report) = self.link.reports.take()
        {
            self.reports += 1;
            self.link.reports.stats().sent.add(1);
            let call = self.call(convert::report_out(&report));
            self.start(CallKind::Report, call).await;
        }
        loop {
            while self.live < LIVE
                && let Some(out) = self.waiting.pop_front()
            {
                self.live += 1;
                let call = self.mapping(&out);
                self.start(CallKind::Live(out.sequence), call).await;
            }
            while self.replays < REPLAYS
                && let Some(out) = self.again.pop_front()
            {
                self.replays += 1;
                let call = self.mapping(&out);
                self.start(CallKind::Replay(out.sequence), call).await;
            }
            if !self.waiting.is_empty() {
                return;
            }
            let room = Room {
                live: LIVE.saturating_sub(self.live),
                others: REPLAYS.saturating_sub(self.replays + self.again.len()),
            };
            let batch = self.link.sink.next_batch_in(BootTime::now(), room);
            if batch.mappings.is_empty() {
                return;
            }
            for out in batch.mappings {
                if out.leased || out.mapping.replayed {
                    self.again.push_back(out);
                } else {
                    self.waiting.push_back(out);
                }
            }
            if self.live >= LIVE && self.replays >= REPLAYS {
                return;
            }
        }
    }

    /// Starts a call. It is polled once here, so that calls are opened in order: tasks start in any
    /// order.
    async fn start(&mut self, kind: CallKind, mut call: Call) {
        let first = poll_fn(|context| Poll::Ready(call.as_mut().poll(context))).await;
        self.calls.spawn(async move {
            let came = match first {
                Poll::Ready(came) => came,
                Poll::Pending => call.await,
            };
            (kind, came)
        });
    }

    fn mapping(&self, out: &Outgoing) -> Call {
        if let Some(report) = &out.report {
            return self.call(convert::report_out(report));
        }
        let (maps, mapping) = (&self.link.maps, &out.mapping);
        let identity = match maps.client(mapping.endpoint.client) {
            QueryClient::Endpoint { identity, .. } => identity,
            QueryClient::Host | QueryClient::Unknown => IdentityId::UNKNOWN,
        };
        let server = maps.server(mapping.server.ip());
        self.call(convert::mapping_out(
            mapping,
            identity,
            server,
            BootTime::now(),
        ))
    }

    fn call(&self, message: wire::FqdnMapping) -> Call {
        let mut client = self.client.clone();
        Box::pin(async move {
            let response = timeout(CALL_WITHIN, client.update_mapping_request(message));
            let response = response.await.ok()?;
            Some(response.map(|response| response.into_inner().response()))
        })
    }

    fn done(&mut self, kind: CallKind, came: CallResult) -> Result<(), SessionError> {
        let sequence = match kind {
            CallKind::Live(sequence) => {
                self.live -= 1;
                sequence
            }
            CallKind::Replay(sequence) => {
                self.replays -= 1;
                sequence
            }
            CallKind::Report => {
                self.reports -= 1;
                if let Some(Err(status)) = came {
                    tracing::debug!(%status, "the agent refused a report of a query");
                }
                return Ok(());
            }
        };
        match came {
            Some(came) => self.link.sink.results(vec![result(sequence, came)?]),
            None => self.link.sink.no_result(sequence),
        }
        Ok(())
    }
}

/// The result of a mapping; an error ends the session.
fn result(
    sequence: u64,
    came: Result<wire::ResponseCode, Status>,
) -> Result<MappingResult, SessionError> {
    let grant = Grant {
        // The agent keeps realised mappings in files of its own.
        durable: true,
        promise: Promise::ForItsTtl,
        revision: 0,
    };
    let result = match came {
        Ok(wire::ResponseCode::NoError) => Ok(grant),
        Ok(wire::ResponseCode::ErrorEndpointNotFound) => Err(Refusal::EndpointUnknown),
        Ok(_) => Err(Refusal::NotRealised),
        Err(status) => Err(refusal(status)?),
    };
    Ok(MappingResult { sequence, result })
}

/// Sorts an error: the connection is of no use, the agent has trouble (the answer is released, and
/// its mapping is sent again), or the agent rejects the mapping. Cilium's agent returns UNKNOWN for
/// every error of its handler, even for an endpoint that it has not restored yet.
fn refusal(status: Status) -> Result<Refusal, SessionError> {
    match status.code() {
        Code::Unavailable | Code::Unimplemented => Err(broken(UPDATE, status)),
        Code::Unknown
        | Code::Internal
        | Code::Cancelled
        | Code::DeadlineExceeded
        | Code::ResourceExhausted => {
            tracing::debug!(%status, "the agent did not accept a mapping");
            Ok(Refusal::EndpointUnknown)
        }
        _ => {
            tracing::warn!(%status, "the agent rejected a mapping");
            Ok(Refusal::Rejected)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_release_reject_or_end_the_session() {
        let of = |code| refusal(Status::new(code, "x")).ok();
        for code in [
            Code::Unknown,
            Code::Internal,
            Code::Cancelled,
            Code::DeadlineExceeded,
        ] {
            assert_eq!(of(code), Some(Refusal::EndpointUnknown), "{code}");
        }
        for code in [
            Code::InvalidArgument,
            Code::PermissionDenied,
            Code::FailedPrecondition,
        ] {
            assert_eq!(of(code), Some(Refusal::Rejected), "{code}");
        }
        for code in [Code::Unavailable, Code::Unimplemented] {
            assert_eq!(of(code), None, "{code}");
        }
    }
}
