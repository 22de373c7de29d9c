//! The built-in DNS proxy: the same proxy as the standalone one, in this process.
//!
//! Its resolver reads the pinned maps, its rules come from the registry, its
//! mappings go to the core without a socket in between. In steering it is the
//! fallback: standalone proxies come first.

use std::{path::PathBuf, sync::Arc, time::Duration};

use agent_core::core::event::{Event, MappingEvent, MappingResult, RevokeAck};
use daemon::descriptors::Descriptors;
use dns_policy::{
    boot_time::BootTime,
    epoch::Epoch,
    mapping::{Realised, Refusal},
    rule::RulesOf,
    table::PolicyHandle,
};
use holdfast_sdp::{
    gate::Gate,
    listener::{ListenConfig, ListenError, Listeners, SocketOptions, Sockets},
    maps::{PinnedMaps, REFRESH},
    proxy::{Proxy, ProxyConfig},
    sink::{self, LinkSink, Promise},
    stats::Stats,
    steering::{SteeringConfig, SteeringStatus},
    transparent::Transparent,
};
use parking_lot::Mutex;
use shared_maps::steering;
use tokio::time::MissedTickBehavior;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    config::Config,
    lane::Lane,
    listener,
    proxies::{Proxies, Results, RulesTable, StreamGuard, StreamKind, ToStream},
    runner::CoreHandle,
};

/// Maximum TCP connections of clients.
const TCP_CONNECTIONS: usize = 1024;
/// How often the sink learns that no further result has come, while an answer waits for one.
const BEAT: Duration = Duration::from_millis(10);
/// Longest time that draining may take.
const DRAIN: Duration = Duration::from_secs(5);

/// The built-in DNS proxy while it runs.
#[derive(Debug)]
pub(crate) struct BuiltinProxy {
    listeners: Mutex<Option<Listeners>>,
    stats: Stats,
    /// Thread that takes its mappings to the core, so that TCP clients do not delay them.
    _lane: Lane,
}

/// The parts of the agent that the proxy is connected to.
#[derive(Clone, Debug)]
pub(crate) struct Ports {
    pub core: CoreHandle,
    /// Source of DNS rules and of results of mappings.
    pub proxies: Proxies,
    pub epoch: Epoch,
}

fn bind(config: &Config) -> Result<Sockets, ListenError> {
    Sockets::bind(&ListenConfig {
        port: config.core.proxy_port,
        ipv4: config.core.enable_ipv4,
        ipv6: config.core.enable_ipv6,
        workers: 1,
        options: SocketOptions::Transparent,
        steering: Some(SteeringConfig {
            gate: Gate::default(),
            bpf_root: config.flags.bpf_root.clone(),
            kind: steering::KIND_FALLBACK,
        }),
        tcp_connections: Descriptors::raise()
            .beside(listener::reserved())
            .tcp_connections(TCP_CONNECTIONS),
    })
}

fn proxy_config(config: &Config, transparent: Transparent) -> ProxyConfig {
    ProxyConfig {
        port: config.core.proxy_port,
        reject: config.flags.tofqdns_dns_reject_response_code,
        max_delay: config.flags.tofqdns_proxy_response_max_delay,
        transparent,
        ..ProxyConfig::default()
    }
}

impl BuiltinProxy {
    /// Binds, starts the workers, and connects them. `restored`: rules of an
    /// earlier run, in force until the core gives the first ones.
    pub(crate) fn start(
        config: &Config,
        ports: Ports,
        restored: &[RulesOf],
        tasks: &TaskTracker,
        stop: &CancellationToken,
    ) -> Result<Arc<Self>, ListenError> {
        let sockets = bind(config)?;
        let maps = Arc::new(PinnedMaps::open(
            &config.flags.bpf_root,
            config.core.enable_ipv4 && config.core.enable_ipv6,
        ));
        let policy = Arc::new(PolicyHandle::new());
        for error in policy.replace_all(restored) {
            tracing::warn!(%error, "a restored rule of the built-in proxy allows nothing");
        }
        let min_ttl = config.core.min_ttl;
        let sink = Arc::new(LinkSink::new(
            min_ttl,
            config.flags.tofqdns_proxy_response_max_delay,
        ));
        let stats = Stats::default();
        let transparent = Transparent::new(
            config.flags.dnsproxy_enable_transparent_mode,
            config.flags.transparent_mode_outside_cluster,
        );
        let maintenance = Maintenance {
            maps: Arc::clone(&maps),
            sink: Arc::clone(&sink),
            transparent: transparent.clone(),
            bpf_root: config.flags.bpf_root.clone(),
        };
        maintenance.detect_transparent();
        let proxy = Arc::new(Proxy::new(
            proxy_config(config, transparent),
            maps as _,
            Arc::clone(&policy),
            Arc::clone(&sink) as _,
            stats.clone(),
        ));
        let (guard, results) = ports
            .proxies
            .open_results(StreamKind::Builtin, "builtin", None);
        let connected = Connected {
            ports,
            guard,
            sink,
            policy,
            stop: stop.clone(),
        };
        let lane = Lane::start("builtin").map_err(ListenError::Worker)?;
        tasks.spawn_on(connected.run(results), lane.handle());
        tasks.spawn(maintenance.run(stop.clone()));
        let listeners = Listeners::start(&proxy, sockets, &tokio::runtime::Handle::current())?;
        Ok(Arc::new(Self {
            listeners: Mutex::new(Some(listeners)),
            stats,
            _lane: lane,
        }))
    }

    /// Counters of its main path.
    pub(crate) fn stats(&self) -> &Stats {
        &self.stats
    }

    /// `running` or `stopped`, with the reason if queries are not steered to it.
    pub(crate) fn describe(&self) -> String {
        match self.listeners.lock().as_ref().map(Listeners::steering) {
            None => "stopped".to_owned(),
            Some(SteeringStatus::Unavailable(why) | SteeringStatus::Full(why)) => {
                format!("running, not steered: {why}")
            }
            Some(_) => "running".to_owned(),
        }
    }

    /// Stops the proxy without losing a query.
    pub(crate) async fn drain(&self) {
        let listeners = self.listeners.lock().take();
        if let Some(listeners) = listeners {
            let report = listeners.drain(DRAIN).await;
            if report.abandoned > 0 || report.cut > 0 {
                tracing::warn!(
                    abandoned = report.abandoned,
                    cut = report.cut,
                    "the built-in proxy stopped before its work was done"
                );
            }
        }
    }
}

/// The proxy's side of rules and mappings.
struct Connected {
    ports: Ports,
    guard: StreamGuard,
    sink: Arc<LinkSink>,
    policy: Arc<PolicyHandle>,
    stop: CancellationToken,
}

impl Connected {
    async fn run(self, mut results: Results) {
        let epoch = Epoch {
            boot_id: self.ports.epoch.boot_id.clone(),
            start: self.ports.epoch.start,
        };
        if self
            .ports
            .core
            .send(Event::StreamUp(self.guard.id()))
            .await
            .is_err()
        {
            return;
        }
        self.sink.agent_up(epoch.clone(), None);
        let mut rules = self.ports.proxies.watch_rules();
        let mut applied: Option<Arc<RulesTable>> = None;
        self.apply(&mut applied, &rules.borrow_and_update(), &epoch);
        let mut beat = tokio::time::interval(BEAT);
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let waits = self.sink.is_waiting();
            tokio::select! {
                // Results come before a beat, because a beat says that there are none.
                biased;
                () = self.stop.cancelled() => break,
                result = results.recv() => match result {
                    Some(result) => self.result(result),
                    None => {
                        // The registry closed the stream: it gave up on this task.
                        tracing::error!("results for the built-in proxy were lost (queue full); it learns no names until the agent restarts");
                        break;
                    }
                },
                _ = beat.tick(), if waits => self.sink.read_all(BootTime::now()),
                changed = rules.changed() => {
                    if changed.is_err() {
                        break;
                    }
                    let table = Arc::clone(&rules.borrow_and_update());
                    self.apply(&mut applied, &table, &epoch);
                }
                () = self.sink.has_work() => {
                    if self.send().await.is_none() {
                        break;
                    }
                }
            }
        }
        // The sink drops its leases here: nothing is answered under them from now on.
        self.sink.agent_down();
        let stream = self.guard.id();
        for event in [Event::StreamDown(stream), Event::HolderEnded(vec![stream])] {
            let _stopped = self.ports.core.send(event).await;
        }
    }

    fn apply(&self, applied: &mut Option<Arc<RulesTable>>, table: &Arc<RulesTable>, epoch: &Epoch) {
        if !table.ready {
            return;
        }
        put_in_force(&self.sink, &self.policy, applied.as_deref(), table, epoch);
        // Only rules in force are acknowledged.
        self.guard.sent(table.revision);
        self.guard.acked(table.revision);
        *applied = Some(Arc::clone(table));
    }

    fn result(&self, message: ToStream) {
        match message {
            ToStream::Results(results) => {
                let results = results.iter().map(to_sink).collect();
                self.sink.results(results);
            }
            ToStream::Revoke(revocations) => {
                for revocation in revocations {
                    let (name, addresses) = (&revocation.name, &revocation.addresses);
                    self.sink.revoke(revocation.id, Some(name), addresses);
                }
            }
        }
    }

    async fn send(&self) -> Option<()> {
        let batch = self.sink.next_batch(BootTime::now());
        let stream = self.guard.id();
        if !batch.revoked.is_empty() {
            let acks = batch.revoked.into_iter();
            let acks = acks.map(|id| RevokeAck { stream, id }).collect();
            let event = Event::RevokeAcked(acks);
            self.ports.core.send(event).await.ok()?;
        }
        if !batch.mappings.is_empty() {
            self.guard.took(batch.mappings.len());
            let events = batch
                .mappings
                .into_iter()
                .map(|out| MappingEvent {
                    stream,
                    sequence: out.sequence,
                    mapping: out.mapping,
                })
                .collect();
            self.ports.core.send(Event::Mappings(events)).await.ok()?;
        }
        Some(())
    }
}

/// Puts a table of rules in force in place of `applied`.
fn put_in_force(
    sink: &LinkSink,
    policy: &PolicyHandle,
    applied: Option<&RulesTable>,
    table: &RulesTable,
    epoch: &Epoch,
) {
    let empty = RulesTable::default();
    let delta = table.since(applied.unwrap_or(&empty));
    let changed: Vec<RulesOf> = delta
        .changed
        .into_iter()
        .map(|(endpoint, rules)| RulesOf {
            endpoint,
            rules: (*rules).clone(),
        })
        .collect();
    // First: from here on a lease of an older revision must not release an answer.
    sink.rules_applied(epoch.clone(), table.revision);
    let errors = if applied.is_none() {
        policy.replace_all(&changed)
    } else {
        policy.apply(&changed, &delta.removed)
    };
    for error in errors {
        tracing::warn!(%error, "a rule of the built-in proxy allows nothing");
    }
}

/// Converts a result to the type of the proxy's sink.
fn to_sink(result: &MappingResult) -> sink::MappingResult {
    sink::MappingResult {
        sequence: result.sequence,
        result: match result.realised {
            Realised::Yes => Ok(sink::Grant {
                durable: result.durable,
                promise: Promise::of_lease(result.lease_end),
                revision: result.revision,
            }),
            Realised::No(refusal) => Err(refusal),
            Realised::AgentAway => Err(Refusal::NotRealised),
        },
    }
}

/// Parts that need periodic work.
struct Maintenance {
    maps: Arc<PinnedMaps>,
    sink: Arc<LinkSink>,
    transparent: Transparent,
    bpf_root: PathBuf,
}

impl Maintenance {
    async fn run(self, stop: CancellationToken) {
        let mut beat = tokio::time::interval(REFRESH);
        beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while stop.run_until_cancelled(beat.tick()).await.is_some() {
            let _change = self.maps.refresh();
            self.detect_transparent();
            self.sink.tick(BootTime::now());
        }
    }

    /// Transparent mode is on only once the programs of every endpoint let answers to pods' addresses come back.
    fn detect_transparent(&self) {
        if self.transparent.detect(&self.bpf_root) {
            let mode = self.transparent.mode();
            tracing::info!(?mode, "transparent mode of the built-in proxy");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeMap,
        sync::atomic::{AtomicBool, Ordering},
    };

    use holdfast_sdp::transparent::Mode;
    use polling::until_async;
    use shared_maps::{EndpointId, fragment, pin, user::Globals};

    use super::*;

    #[tokio::test]
    async fn pods_addresses_are_used_only_while_the_datapath_says_so() {
        let root = tempfile::tempdir().unwrap();
        let globals = Globals::new(root.path());
        std::fs::create_dir_all(globals.dir()).unwrap();
        std::fs::write(globals.path(fragment::NAME), "").unwrap();
        let transparent = Transparent::new(true, false);
        let maintenance = Maintenance {
            maps: Arc::new(PinnedMaps::open(root.path(), false)),
            sink: Arc::new(LinkSink::new(0, Duration::ZERO)),
            transparent: transparent.clone(),
            bpf_root: root.path().to_owned(),
        };
        let stop = CancellationToken::new();
        let until_mode = async |wanted| {
            let mode = || transparent.mode();
            until_async(&format!("{wanted:?}"), mode, |mode| *mode == wanted).await;
        };
        let mode_follows = async {
            until_mode(Mode::Blocked).await;
            std::fs::create_dir_all(root.path().join(pin::TRANSPARENT)).unwrap();
            until_mode(Mode::On).await;
            stop.cancel();
        };
        tokio::join!(maintenance.run(stop.clone()), mode_follows);
    }

    /// Another thread checks: a reader that sees a table must already find its
    /// revision in the sink, or a lease of older rules would release an answer.
    #[test]
    fn leases_are_judged_by_new_rules_before_these_are_in_force() {
        const REVISIONS: u16 = 20_000;
        let (sink, policy) = (LinkSink::new(0, Duration::ZERO), PolicyHandle::new());
        let epoch = Epoch {
            boot_id: "b".into(),
            start: 1,
        };
        // The endpoint's number tells the revision.
        let table = |revision: u16| RulesTable {
            revision: revision.into(),
            ready: true,
            endpoints: BTreeMap::from([(EndpointId(revision), Arc::default())]),
        };
        let done = AtomicBool::new(false);
        let behind = std::thread::scope(|scope| {
            let onlooker = scope.spawn(|| {
                let mut behind = None;
                while !done.load(Ordering::Acquire) && behind.is_none() {
                    let seen = policy.load().endpoints().last().copied();
                    let judged_by = sink.rules_revision();
                    behind = seen
                        .filter(|seen| judged_by < Some(seen.0.into()))
                        .map(|seen| (seen, judged_by));
                }
                behind
            });
            let mut applied: Option<RulesTable> = None;
            for revision in 1..=REVISIONS {
                let next = table(revision);
                put_in_force(&sink, &policy, applied.as_ref(), &next, &epoch);
                applied = Some(next);
            }
            done.store(true, Ordering::Release);
            onlooker.join().expect("the onlooker does not panic")
        });
        assert_eq!(behind, None);
    }
}
