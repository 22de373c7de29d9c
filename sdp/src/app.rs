//! Composition root: everything the standalone proxy is made of, in start order.

mod rules;
mod service;

use std::{
    io,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Context;
use daemon::{
    descriptors::Descriptors, map_memory, service_manager::ServiceManager, steering_program,
};
use dns_policy::boot_time::BootTime;
use shared_maps::{steering, user::Globals};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use self::{
    rules::{end_lost_rules, first_rules, keep_rules, note_gate, others_first, restore_rules},
    service::Progress,
};
use crate::{
    admin::{self, Admin, AdminListeners, MetricsListener},
    config::{Config, SteeringMode},
    gate::{BoundPorts, Gate},
    link::Link,
    listener::{ListenConfig, ListenError, Listeners, SocketOptions, Unbound},
    maps::{Change, REFRESH},
    privileges::Sandbox,
    proxy::{Proxy, ProxyConfig},
    query_log::{QueryLog, QueryLogConfig, QueryLogStats, Target, Which},
    ready::Need,
    recent_warnings::RecentWarnings,
    shared_state::{Logs, Shared, note_maps},
    steering::{SteeringConfig, SteeringStatus},
};

/// Maximum number of TCP connections of clients.
pub(crate) const TCP_CONNECTIONS: usize = 4096;
/// Threads for TCP and housekeeping. UDP, the link to the agent and the journal have threads of
/// their own.
const RUNTIME_THREADS: usize = 2;

/// Time limit for an agent that answers nothing during a drain.
const SILENT: Duration = Duration::from_secs(2);
/// Time limit for writing the journal and the query log at the end.
const CLOSING: Duration = Duration::from_secs(1);

/// Runs until a drain is requested and has ended.
///
/// `recent_warnings`: recent warnings of the log, which `status` shows.
pub fn run(config: Config, recent_warnings: RecentWarnings) -> anyhow::Result<()> {
    let descriptors = Descriptors::raise();
    map_memory::lift_limit();
    if config.flags.enable_ipv6 {
        daemon::ipv6::check()?;
    }
    // Objects that need root come first and threads last, because threads inherit the privileges.
    let manager = ServiceManager::of_environment().context("NOTIFY_SOCKET")?;
    let metrics = MetricsListener::open(&config)?;
    let gate = Gate::default();
    let listen = listen_config(&config, descriptors, gate.clone());
    let sockets = listen
        .check_port()
        .and_then(|()| Unbound::open(&listen))
        .map_err(|e| explain_bind(&e, config.flags.tofqdns_proxy_port))?;
    let ports = bound_ports();
    provide_steering(&config);
    remove_left_socket(&config);
    let privileges = sandbox(&config).enter()?;
    let admin_listeners = AdminListeners::open(&config, metrics)?;
    // The log files are opened as the final user, so that they can also be reopened later.
    let logs = open_logs(&config, recent_warnings)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(RUNTIME_THREADS)
        .thread_name("sdp-rim")
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let shared = Shared::new(config, privileges, logs, gate);
    let shared = Arc::new(Shared { manager, ..shared });
    let outcome = runtime.block_on(serve(&shared, admin_listeners, sockets, ports));
    runtime.shutdown_timeout(Duration::from_millis(200));
    outcome
}

async fn serve(
    shared: &Arc<Shared>,
    admin_listeners: AdminListeners,
    sockets: Unbound,
    ports: BoundPorts,
) -> anyhow::Result<()> {
    let config = &shared.config;
    tracing::info!(
        name = config.name,
        port = config.flags.tofqdns_proxy_port,
        "proxy starting"
    );
    for note in &config.notes {
        tracing::info!("{note}");
    }
    let tasks = TaskTracker::new();
    let signals = Arc::clone(shared);
    tasks.spawn(async move {
        if let Err(error) = signals.drain.follow_signals().await {
            tracing::error!(%error, "cannot follow signals");
        }
    });

    open_journals(shared);
    let admin = Admin::start(admin_listeners, shared)?;
    restore_rules(shared);
    let stop = CancellationToken::new();
    if shared.transparent.detect(&config.flags.bpf_root) {
        tracing::warn!("transparent mode: {}", shared.transparent.mode().text());
    }
    tasks.spawn(run_maintenance(Arc::clone(shared), stop.clone()));
    link(shared)
        .start(stop.clone())
        .context("cannot start the link's thread")?;
    first_rules(shared).await;
    others_first(shared, ports).await;

    let sockets = sockets
        .bind()
        .map_err(|e| explain_bind(&e, config.flags.tofqdns_proxy_port))?;
    let proxy = build_proxy(shared);
    let listeners = Listeners::start(&proxy, sockets, &tokio::runtime::Handle::current())?;
    *shared.steering.lock() = listeners.steering();
    note_steering(shared);
    shared.ready.unblock(Need::Listeners);
    watch_steering(shared, &listeners).await;
    shared.ready.block(Need::Staying, "leaving");
    shared.manager.stopping();
    leave(shared, listeners).await;
    stop.cancel();
    drop(admin);
    Ok(())
}

fn open_journals(shared: &Shared) {
    let Shared { agent, config, .. } = shared;
    let sink = Arc::clone(&agent.sink);
    let directory = &config.flags.journal_dir;
    agent
        .journal
        .start(directory, &config.name, move |written| {
            sink.adopt(&written);
        });
    agent.rules_journal.open(directory, &config.name);
}

fn build_proxy(shared: &Shared) -> Arc<Proxy> {
    let proxy = Proxy::new(
        proxy_config(shared),
        Arc::clone(&shared.maps) as _,
        Arc::clone(&shared.policy),
        Arc::clone(&shared.agent.sink) as _,
        shared.stats.clone(),
    );
    let proxy = proxy
        .with_reports(Arc::clone(&shared.agent.reports))
        .with_query_log(shared.logs.queries.clone());
    Arc::new(proxy)
}

/// Beginning of the warning that no steering program is loaded. The warning is removed when an
/// agent that starts later loads one.
const NO_STEERING: &str = "no steering";

/// Loads the steering program, because a Cilium agent does not. The proxy also works without it.
fn provide_steering(config: &Config) {
    if config.flags.steering == SteeringMode::Off || !nix::unistd::Uid::effective().is_root() {
        return;
    }
    let globals = Globals::new(&config.flags.bpf_root);
    if let Err(error) = steering_program::provide(&globals, config.flags.user.group()) {
        tracing::warn!(
            %error,
            "{NO_STEERING}: the kernel's hash distributes queries over the proxies of the port \
             (set --steering=off if that is intended)"
        );
    }
}

/// Removes the admin socket of a killed proxy that ran as root. After this process has changed its
/// user, it may not connect to that socket, and could not tell whether a proxy still serves it.
fn remove_left_socket(config: &Config) {
    if !nix::unistd::Uid::effective().is_root() {
        return;
    }
    let path = &config.admin_socket;
    match admin::remove_left(path) {
        Ok(true) => tracing::info!(path = %path.display(), "removed the socket of a killed proxy"),
        Ok(false) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => tracing::warn!(
            path = %path.display(),
            %error,
            "--admin-socket: cannot find out whether the socket is in use; remove it if no proxy runs"
        ),
    }
}

fn sandbox(config: &Config) -> Sandbox {
    let admin = config.admin_socket.parent().map(Path::to_owned);
    let log = match &config.flags.query_log {
        QueryLogConfig {
            which: Which::Off, ..
        } => None,
        QueryLogConfig {
            target: Target::File(path),
            ..
        } => path.parent().map(Path::to_owned),
        _ => None,
    };
    Sandbox {
        appendable: log.into_iter().collect(),
        user: config.flags.user,
        readable: vec![config.state_dir.clone(), config.flags.bpf_root.clone()],
        writable: admin
            .into_iter()
            .chain([config.flags.journal_dir.clone()])
            .collect(),
    }
}

fn open_logs(config: &Config, recent_warnings: RecentWarnings) -> anyhow::Result<Logs> {
    let query_stats = QueryLogStats::default();
    let queries = match config.flags.query_log.which {
        Which::Off => None,
        _ => Some(Arc::new(
            QueryLog::open(&config.flags.query_log, &query_stats)
                .context("cannot start the query log")?,
        )),
    };
    Ok(Logs {
        recent_warnings,
        queries,
        query_stats,
    })
}

fn link(shared: &Shared) -> Link {
    Link {
        addresses: shared.config.agent.clone(),
        instance: shared.config.name.clone(),
        proxy_port: shared.config.flags.tofqdns_proxy_port,
        state_dir: shared.config.state_dir.clone(),
        policy: Arc::clone(&shared.policy),
        sink: Arc::clone(&shared.agent.sink),
        maps: Arc::clone(&shared.maps),
        reports: Arc::clone(&shared.agent.reports),
        rules_journal: Arc::clone(&shared.agent.rules_journal),
        state: Arc::clone(&shared.agent.link),
    }
}

fn listen_config(config: &Config, descriptors: Descriptors, gate: Gate) -> ListenConfig {
    ListenConfig {
        port: config.flags.tofqdns_proxy_port,
        ipv4: config.flags.enable_ipv4,
        ipv6: config.flags.enable_ipv6,
        workers: config.workers,
        options: SocketOptions::Transparent,
        steering: (config.flags.steering == SteeringMode::Auto).then(|| SteeringConfig {
            bpf_root: config.flags.bpf_root.clone(),
            kind: steering::KIND_SDP,
            gate,
        }),
        tcp_connections: descriptors.tcp_connections(TCP_CONNECTIONS),
    }
}

fn proxy_config(shared: &Shared) -> ProxyConfig {
    let config = &shared.config;
    let defaults = ProxyConfig::default();
    ProxyConfig {
        port: config.flags.tofqdns_proxy_port,
        reject: config.reject,
        max_delay: config.flags.tofqdns_proxy_response_max_delay,
        in_flight: match config.flags.dnsproxy_concurrency_limit {
            0 => defaults.in_flight,
            limit => usize::try_from(limit).unwrap_or(usize::MAX),
        },
        in_flight_grace: config.flags.dnsproxy_concurrency_processing_grace_period,
        transparent: shared.transparent.clone(),
        ..defaults
    }
}

/// The port of the proxies is bound by a program that does not share it.
#[derive(Debug, thiserror::Error)]
#[error(
    "{error}: another program holds the port and does not share it with this user (`ss -lntup sport \
     = :{port}` shows the process): stop it, or choose another --tofqdns-proxy-port here and in the \
     agent. If it is holdfast-agent, which holds the port so that no other user takes it, start this \
     proxy as root as well: it drops its privileges by itself"
)]
pub struct PortTaken {
    error: String,
    port: u16,
}

fn explain_bind(error: &ListenError, port: u16) -> anyhow::Error {
    let remedy = match error {
        ListenError::Socket { source, .. } => match source.kind() {
            io::ErrorKind::AddrInUse => {
                let error = error.to_string();
                return PortTaken { error, port }.into();
            }
            io::ErrorKind::PermissionDenied => {
                Some("run as root or with CAP_NET_ADMIN and CAP_NET_RAW".to_owned())
            }
            _ => None,
        },
        _ => None,
    };
    match remedy {
        Some(remedy) => anyhow::anyhow!("{error}: {remedy}"),
        None => anyhow::anyhow!("{error}"),
    }
}

/// If a steering program is active, a proxy without slots gets no packets.
fn note_steering(shared: &Shared) {
    let program = steering_program::link_pin(&Globals::new(&shared.config.flags.bpf_root));
    match &*shared.steering.lock() {
        SteeringStatus::Unavailable(why) if program.exists() => {
            shared.ready.block(Need::Steering, why.clone());
        }
        // A missing slot counts as missing even without the program: an agent that starts loads the
        // program and sends rules at once.
        SteeringStatus::Waiting(why) => shared.ready.block(Need::Steering, why.clone()),
        SteeringStatus::Joined(_) => {
            shared.ready.unblock(Need::Steering);
            shared.logs.recent_warnings.forget(NO_STEERING);
        }
        _ => shared.ready.unblock(Need::Steering),
    }
}

fn bound_ports() -> BoundPorts {
    BoundPorts::open().unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot read /proc/net/udp; starting without waiting for other proxies of the port");
        BoundPorts::unknown()
    })
}

/// Checks what changes without an event: pins and time.
async fn run_maintenance(shared: Arc<Shared>, stop: CancellationToken) {
    let mut beat = tokio::time::interval(REFRESH);
    beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while stop.run_until_cancelled(beat.tick()).await.is_some() {
        // A map that is replaced is read whole, which may take a second.
        let change = tokio::task::block_in_place(|| shared.maps.refresh());
        if change == Change::Reopened {
            tracing::info!(maps = ?shared.maps.status(), "pinned maps changed");
            restore_rules(&shared);
        } else if shared.ready.is_missing(Need::Rules) {
            // The agent makes the maps before it writes the first endpoint's file.
            restore_rules(&shared);
        }
        tokio::task::block_in_place(|| end_lost_rules(&shared));
        note_gate(&shared);
        keep_rules(&shared);
        // Steering comes first: when maps appear, a missing slot must be noted before the endpoints
        // count as present.
        note_steering(&shared);
        note_maps(&shared.ready, &shared.maps);
        if shared.transparent.detect(&shared.config.flags.bpf_root) {
            tracing::warn!("transparent mode: {}", shared.transparent.mode().text());
        }
        shared.agent.sink.tick(BootTime::now());
        service::report(&shared);
    }
}

/// Notes the state of steering, and that the workers run, until the drain begins.
async fn watch_steering(shared: &Shared, listeners: &Listeners) {
    let mut beat = tokio::time::interval(REFRESH);
    let mut progress = Progress::new(listeners, Instant::now());
    loop {
        tokio::select! {
            _ = beat.tick() => {
                *shared.steering.lock() = listeners.steering();
                note_steering(shared);
                progress.report(shared, listeners, Instant::now());
            }
            () = shared.drain.leaving() => return,
        }
    }
}

async fn leave(shared: &Shared, listeners: Listeners) {
    let limit = shared.config.flags.drain_timeout;
    let slots = matches!(*shared.steering.lock(), SteeringStatus::Joined(_));
    if !slots && !admin::steering::connections_migrate() {
        tracing::warn!(
            "draining without steering: TCP connections that are not accepted yet may be reset; set \
             net.ipv4.tcp_migrate_req=1"
        );
    }
    if slots {
        *shared.steering.lock() = SteeringStatus::Left;
    }
    let work = async {
        let report = listeners.drain(limit).await;
        if report.abandoned > 0 || report.cut > 0 {
            tracing::warn!(
                abandoned = report.abandoned,
                cut = report.cut,
                "the drain ended before all queries were answered"
            );
        }
        let unanswered = shared.agent.sink.finish(SILENT).await;
        if unanswered > 0 {
            tracing::warn!(
                unanswered,
                "the agent does not acknowledge mappings; stopping without its acknowledgement"
            );
        }
    };
    let done = shared.drain.within(limit, work).await;
    // Stored data is written even after an incomplete drain. The journal comes first, because the
    // query log may be blocked.
    let close = async {
        shared.agent.journal.close().await;
        if let Some(log) = &shared.logs.queries {
            log.close().await;
        }
    };
    if shared.drain.within(CLOSING, close).await && done {
        tracing::info!("proxy stopped; all queries are answered");
    } else {
        tracing::warn!(limit = ?limit, "proxy stopped before its work was done");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_taken_port_is_explained_with_every_possible_holder() {
        let error = ListenError::Socket {
            what: "cannot bind UDP",
            address: ([127, 0, 0, 1], 10_001).into(),
            source: io::ErrorKind::AddrInUse.into(),
        };
        let text = explain_bind(&error, 10_001).to_string();
        for part in [
            "--tofqdns-proxy-port",
            "sport = :10001",
            "holdfast-agent",
            "root",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
