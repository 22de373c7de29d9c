//! The main path: from a query to its answer, free of sockets.

mod notices;
pub mod stats;
mod stopwatch;

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use dns_policy::{
    boot_time::BootTime,
    mapping::{EndpointInstance, Mapping, Realised, Refusal},
    name::NameBuf,
    reject_code::RejectCode,
    rule::Transport,
    table::{PolicyHandle, Question},
    verdict::{DenyReason, Verdict},
    wall_time,
};
use shared_maps::{EndpointId, IdentityId};

pub use stats::Stats;

use self::{
    stats::{AnswerResult, Fallback, Label as _, QueryResult},
    stopwatch::Stopwatch,
};
use crate::{
    mapping::{MappingSink, OnRealised, Release},
    notice::{Failure, Notices},
    query_log::{End, Entry, QueryLog},
    resolve::{Looked, Resolver, Who},
    transparent::{Mode, Transparent},
    wire::{
        Rcode, answer,
        edns::Edns,
        labels,
        query::{Query, Unfit},
        reply::{self, Kept},
    },
};

/// Settings of the main path.
#[derive(Clone, Debug)]
pub struct ProxyConfig {
    /// Port the listeners are bound to: never a server's.
    pub port: u16,
    /// Answer to a name that policy does not allow.
    pub reject: RejectCode,
    /// How long an answer waits for the agent at most.
    pub max_delay: Duration,
    /// How long a query waits for its server at most.
    pub timeout: Duration,
    /// A TCP connection on which nothing happens for so long is closed (RFC 7766, 6.2.3).
    pub tcp_idle: Duration,
    /// When the process leaves: how long each TCP connection may still send one more query. The
    /// answer ends the connection.
    pub tcp_last_query: Duration,
    /// Queries in flight at most, all workers and endpoints together.
    pub in_flight: usize,
    /// How long a query waits for a place in flight before it is refused.
    pub in_flight_grace: Duration,
    /// How long a query of an endpoint without rules waits for them before it is refused.
    pub rules_wait: Duration,
    /// Bytes of memory for messages on TCP connections, all together, beyond a small allowance
    /// of each.
    pub tcp_memory: usize,
    /// Whether servers are asked under the address of the pod that asks.
    pub transparent: Transparent,
    /// Whether servers may be at a loopback address (tests; a loop is possible then).
    pub loopback_servers: bool,
}

impl Default for ProxyConfig {
    fn default() -> Self {
        Self {
            port: 10094,
            reject: RejectCode::Refused,
            max_delay: Duration::from_millis(100),
            timeout: Duration::from_secs(10),
            tcp_idle: Duration::from_secs(10),
            tcp_last_query: Duration::from_secs(1),
            in_flight: 65_536,
            in_flight_grace: Duration::ZERO,
            rules_wait: Duration::from_secs(2),
            tcp_memory: 64 << 20,
            transparent: Transparent::default(),
            loopback_servers: false,
        }
    }
}

/// How a query came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Who sent it.
    pub client: SocketAddr,
    /// The server it was meant for.
    pub server: SocketAddr,
    /// Transport.
    pub transport: Transport,
}

/// What is to be done with a query.
#[derive(Debug)]
pub enum Outcome<'a> {
    /// Send it on.
    Forward(Forward<'a>),
    /// Send our own answer.
    Reply,
    /// The endpoint has no rules yet: judge the query again when it has some. The datapath
    /// sends an endpoint's queries here because policy restricts them, so its rules exist, and a
    /// Cilium agent sends them to the proxy up to a second after the endpoint is ready.
    AwaitRules(EndpointInstance),
    /// Nothing.
    Ignore,
}

/// Whether a query may wait for the rules of its endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// It may.
    Waits,
    /// It has waited long enough, or there is no room for it.
    Over,
}

/// A query that is to be sent on.
#[derive(Debug)]
pub struct Forward<'a> {
    /// The client's message id, flags and EDNS.
    pub kept: Kept,
    /// Question as sent: name, type, class.
    pub question: &'a [u8],
    /// Its OPT record, if it carries an option that must not be passed on.
    pub hop_by_hop: Option<Edns>,
    /// Who asks.
    pub endpoint: EndpointInstance,
    /// Of both sides; that of who asks goes into the mark.
    pub identities: Identities,
    /// The address to ask under, if not the node's. Port 0 is the kernel's choice.
    pub source: Option<SocketAddr>,
    /// For the query log, if it wants this query.
    pub logged: Option<Box<Entry>>,
    /// How long asking policy took, if that was measured ([`crate::notice`]).
    pub policy_check: Duration,
}

/// Identities, as they were when the query came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identities {
    /// Of who asks.
    pub client: IdentityId,
    /// Of the server.
    pub server: IdentityId,
}

/// A question that was sent on.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// Question as sent.
    pub question: &'a [u8],
    /// Who asked.
    pub endpoint: EndpointInstance,
    /// From where.
    pub client: SocketAddr,
    /// Server it was sent to.
    pub server: SocketAddr,
    /// Transport.
    pub transport: Transport,
    /// As in [`Forward`].
    pub identities: Identities,
    /// As in [`Forward`].
    pub policy_check: Duration,
    /// Since it was sent on.
    pub waited: Duration,
}

/// What is to be done with an answer.
#[derive(Clone, Debug)]
pub struct Answered {
    /// Release, hold or replace.
    pub fate: Fate,
    /// Its OPT record, if it carries an option that must not be passed on.
    pub hop_by_hop: Option<Edns>,
}

/// Whether an answer may go to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Now; to be counted as this once sent.
    Release(AnswerResult),
    /// When the callback was called, or after the response max delay.
    Hold,
    /// Never: SERVFAIL instead.
    Malformed,
}

impl QueryResult {
    fn of_unfit(code: Rcode) -> Self {
        match code {
            Rcode::NotImp => Self::NotImp,
            _ => Self::FormErr,
        }
    }

    fn of_denied(reason: DenyReason) -> Self {
        match reason {
            DenyReason::NoRules | DenyReason::NoRulesForPort => Self::DeniedNoRules,
            DenyReason::ServerNotSelected => Self::DeniedServer,
            DenyReason::NameNotAllowed => Self::DeniedName,
        }
    }
}

impl AnswerResult {
    /// Of an answer that was held.
    pub(crate) fn of(realised: Realised) -> Self {
        match realised {
            Realised::Yes => Self::Realised,
            Realised::No(Refusal::Rejected) => Self::Rejected,
            Realised::No(_) => Self::NotRealised,
            Realised::AgentAway => Self::AgentAway,
        }
    }
}

/// What the query log tells of who asks and who is asked.
struct Asker<'a> {
    from: &'a Arrival,
    endpoint: Option<(EndpointId, IdentityId)>,
    server: Option<IdentityId>,
}

impl Asker<'_> {
    fn entry(&self, query: &Query<'_>, rule: Option<(String, String)>) -> Entry {
        Entry {
            time: wall_time::now(),
            asked: Instant::now(),
            endpoint: self.endpoint.map(|(id, identity)| (id.0, identity.0)),
            pod: self.from.client.ip(),
            name: query.name.as_str().to_owned(),
            qtype: query.qtype,
            transport: self.from.transport,
            allowed: true,
            server: self.from.server,
            server_identity: self.server.map(|identity| identity.0),
            rule,
            end: End::default(),
        }
    }
}

/// Judges queries and learns from answers. Shared by all workers.
pub struct Proxy {
    config: ProxyConfig,
    resolver: Arc<dyn Resolver>,
    policy: Arc<PolicyHandle>,
    sink: Arc<dyn MappingSink>,
    stats: Stats,
    query_log: Option<Arc<QueryLog>>,
    notices: Arc<Notices>,
}

impl Proxy {
    /// With its four neighbours.
    pub fn new(
        config: ProxyConfig,
        resolver: Arc<dyn Resolver>,
        policy: Arc<PolicyHandle>,
        sink: Arc<dyn MappingSink>,
        stats: Stats,
    ) -> Self {
        Self {
            config,
            resolver,
            policy,
            sink,
            stats,
            notices: Arc::default(),
            query_log: None,
        }
    }

    /// Tells `notices` of every query and answer while somebody listens there.
    #[must_use]
    pub fn with_notices(self, notices: Arc<Notices>) -> Self {
        Self { notices, ..self }
    }

    /// The same, with a query log.
    #[must_use]
    pub fn with_query_log(self, query_log: Option<Arc<QueryLog>>) -> Self {
        Self { query_log, ..self }
    }

    /// Judges what a client sent: may it go on to its server?
    ///
    /// An answer of our own is written to `own`.
    pub fn query<'a>(
        &self,
        message: &'a [u8],
        from: &Arrival,
        patience: Patience,
        own: &mut Vec<u8>,
    ) -> Outcome<'a> {
        self.query_of_batch(message, from, (&mut Looked::default(), patience), own)
    }

    /// Whether the endpoint has rules.
    pub fn has_rules(&self, endpoint: EndpointId) -> bool {
        self.policy.load().has_rules(endpoint)
    }

    /// As [`Self::query`], for one of several that came together.
    pub fn query_of_batch<'a>(
        &self,
        message: &'a [u8],
        from: &Arrival,
        (looked, patience): (&mut Looked, Patience),
        own: &mut Vec<u8>,
    ) -> Outcome<'a> {
        let timed = Stopwatch::of(message);
        let began = self.notices.wants_one().then(Instant::now);
        let query = match Query::decode(message) {
            Ok(query) => query,
            Err(Unfit::Ignore) => return self.outcome(QueryResult::Ignored, Outcome::Ignore),
            Err(Unfit::Answer(code)) => {
                reply::to_unfit(message, code, own);
                return self.outcome(QueryResult::of_unfit(code), Outcome::Reply);
            }
        };
        let asker = |endpoint, server| Asker {
            from,
            endpoint,
            server,
        };
        if self.leads_back(from.server) {
            return self.refuse(&query, QueryResult::Loop, &asker(None, None), own);
        }
        let (id, identity, ifindex) = match looked.who(&*self.resolver, from.client.ip()) {
            Who::Endpoint {
                id,
                identity,
                ifindex,
            } => (id, identity, ifindex),
            Who::Host => {
                return self.refuse(&query, QueryResult::HostSource, &asker(None, None), own);
            }
            Who::Unknown => {
                return self.refuse(&query, QueryResult::UnknownSource, &asker(None, None), own);
            }
        };
        let whom = looked.whom(&*self.resolver, from.server.ip());
        let question = Question {
            endpoint: id,
            port: from.server.port(),
            transport: from.transport,
            server: whom,
            address: from.server.ip(),
            name: query.name.as_str(),
        };
        let judging = timed.as_ref().map(Stopwatch::lap);
        let asking = began.map(|_| Instant::now());
        let table = self.policy.load();
        let verdict = table.check(&question);
        let endpoint = EndpointInstance {
            id,
            client: from.client.ip(),
            ifindex,
        };
        if verdict == Verdict::Deny(DenyReason::NoRules) && patience == Patience::Waits {
            return Outcome::AwaitRules(endpoint);
        }
        let policy_check = asking.map_or(Duration::ZERO, |since| since.elapsed());
        if let (Some(timed), Some(judging)) = (timed, judging) {
            timed.observe(&judging, verdict == Verdict::Allow, &self.stats.stages);
        }
        let identities = Identities {
            client: identity,
            server: whom,
        };
        if let Some(began) = began {
            let is_allowed = verdict == Verdict::Allow;
            let times = (began, policy_check);
            self.notice_query(&query, (from, identities), is_allowed, times);
        }
        if let Verdict::Deny(reason) = verdict {
            let asker = asker(Some((id, identity)), Some(whom));
            return self.refuse(&query, QueryResult::of_denied(reason), &asker, own);
        }
        let logged = self.query_log.as_ref().filter(|log| log.takes(true));
        let logged = logged.map(|_| {
            let asker = asker(Some((id, identity)), Some(whom));
            Box::new(asker.entry(&query, table.matched(&question)))
        });
        self.outcome(
            QueryResult::Forwarded,
            Outcome::Forward(Forward {
                kept: Kept {
                    id: query.header.id,
                    flags: query.header.flags,
                    edns: query.edns.as_ref().map(|e| e.dnssec_ok),
                },
                question: query.question(),
                hop_by_hop: query.edns.filter(Edns::has_keepalive),
                endpoint,
                identities,
                source: self.source(from.client, whom),
                logged,
                policy_check,
            }),
        )
    }

    /// Whether an answer is to be read for a notice of it, also if it was learned a moment ago.
    pub(crate) fn wants_notice(&self) -> bool {
        self.notices.is_wanted()
    }

    /// Learns from a server's answer to a question that was sent on: may it be released?
    ///
    /// `on_realised` is made only if there is something to learn, and called
    /// only if the answer is to be held.
    pub fn answer(
        &self,
        asked: &Asked<'_>,
        message: &[u8],
        now: BootTime,
        on_realised: impl FnOnce() -> OnRealised,
    ) -> Answered {
        let Ok(reading) = answer::read(message) else {
            self.notice_failure(asked, Failure::Undecodable);
            return Answered {
                fate: Fate::Malformed,
                hop_by_hop: None,
            };
        };
        let mut name = NameBuf::default();
        let notice = self.answer_notice(asked, message, reading.learned.as_ref());
        let fate = match reading.learned {
            Some(learned) if labels::read(asked.question, 0, &mut name).is_some() => {
                let left_out = learned.left_out;
                if left_out > 0 {
                    let left_out = u64::try_from(left_out).unwrap_or(u64::MAX);
                    self.stats.addresses_left_out.add(left_out);
                }
                let mapping = Mapping {
                    endpoint: asked.endpoint,
                    name: name.to_fqdn(),
                    addresses: learned.addresses,
                    ttl: learned.ttl,
                    seen_at: now,
                    rcode: 0,
                    server: asked.server,
                    transport: asked.transport,
                    replayed: false,
                };
                let notice = notice.map(Box::new);
                match self.sink.learn_noticed(mapping, notice, on_realised()) {
                    Release::Leased => Fate::Release(AnswerResult::Released),
                    Release::AgentAway => Fate::Release(AnswerResult::AgentAway),
                    Release::Held => Fate::Hold,
                }
            }
            _ => {
                notice
                    .into_iter()
                    .for_each(|notice| self.notices.put(notice));
                Fate::Release(AnswerResult::Released)
            }
        };
        Answered {
            fate,
            hop_by_hop: reading.hop_by_hop,
        }
    }

    /// The address to ask `server` under on behalf of `client`, if not the node's.
    fn source(&self, client: SocketAddr, server: IdentityId) -> Option<SocketAddr> {
        if !self.config.transparent.is_for(server) {
            return None;
        }
        match self.config.transparent.mode() {
            Mode::On => Some(self.config.transparent.source(client)),
            Mode::Off => None,
            Mode::Blocked => {
                self.stats.fallbacks.inc(Fallback::NoReturnPath);
                None
            }
        }
    }

    /// Whether a query sent on to `server` could come back to us, or go nowhere.
    pub(crate) fn leads_back(&self, server: SocketAddr) -> bool {
        let ip = server.ip().to_canonical();
        let multicast = match ip {
            IpAddr::V4(ip) => ip.is_multicast() || ip.is_broadcast(),
            IpAddr::V6(ip) => ip.is_multicast(),
        };
        ip.is_unspecified()
            || multicast
            || server.port() == 0
            || server.port() == self.config.port
            || (ip.is_loopback() && !self.config.loopback_servers)
    }

    fn refuse<'a>(
        &self,
        query: &Query<'_>,
        why: QueryResult,
        asker: &Asker<'_>,
        own: &mut Vec<u8>,
    ) -> Outcome<'a> {
        let by_policy = matches!(why, QueryResult::DeniedName | QueryResult::DeniedServer);
        let extended = if by_policy {
            reply::EDE_BLOCKED
        } else {
            reply::EDE_PROHIBITED
        };
        let (code, extended) = match self.config.reject {
            // Whatever else is wrong: it is for the client to ask in a way we know.
            _ if query.edns.as_ref().is_some_and(|e| e.version > 0) => (Rcode::BadVers, None),
            RejectCode::NameError if by_policy => (Rcode::NxDomain, Some(extended)),
            _ => (Rcode::Refused, Some(extended)),
        };
        reply::to_query(query, code, extended, own);
        if let Some(log) = &self.query_log
            && log.takes(false)
        {
            let mut entry = asker.entry(query, None);
            entry.allowed = false;
            entry.end = End::own(why.text(), code);
            log.submit(Box::new(entry));
        }
        self.outcome(why, Outcome::Reply)
    }

    fn outcome<'a>(&self, result: QueryResult, outcome: Outcome<'a>) -> Outcome<'a> {
        self.stats.queries.inc(result);
        outcome
    }

    /// Ends an entry of the query log: `end` is told of the query, now.
    pub(crate) fn log(&self, mut entry: Box<Entry>, end: End, now: Instant) {
        if let Some(log) = &self.query_log {
            let took = now.saturating_duration_since(entry.asked);
            entry.end = End { took, ..end };
            log.submit(entry);
        }
    }

    /// Settings.
    pub fn config(&self) -> &ProxyConfig {
        &self.config
    }

    /// Counters.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Who and whom.
    pub fn resolver(&self) -> &dyn Resolver {
        &*self.resolver
    }

    /// Rules in force.
    pub fn policy(&self) -> &PolicyHandle {
        &self.policy
    }

    /// Where mappings go.
    pub fn sink(&self) -> &dyn MappingSink {
        &*self.sink
    }
}
