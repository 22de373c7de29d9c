//! Composition root of `netpol run`.

use std::{
    fs::DirBuilder, io::Write as _, os::unix::fs::DirBuilderExt as _, path::Path, sync::Arc,
    time::Duration,
};

use agent_cluster::{
    Here, Watches,
    api::{
        client::{self, Api},
        own_set::OwnSet,
        startup_taint::StartupTaint,
    },
    health::ClusterHealth,
    listing_file::Origin,
    relay,
    resource::OF_NETWORK_POLICIES,
};
use agent_core::high_scale::scope::PodScope;
use agent_datapath::nf_tables::Connection;
use anyhow::{Context as _, Result, bail};
use daemon::{descriptors::Descriptors, http_server, service_manager::ServiceManager};
use netpol::render::{change::Change, ruleset::Table};
use parking_lot::Mutex;
use tokio::{
    net::UnixListener,
    signal::unix::{SignalKind, signal},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    admin::{Listeners, Pages, Plugin},
    attached_file::AttachedFile,
    drops,
    enforcer::{Enforcer, Kernel, lacks_frames},
    export_task::{self, Target},
    exports::Exports,
    feed::NetpolFeed,
    handover::remove_table,
    metrics::Counters,
    owners::Owners,
    plugin::PluginPods,
    service,
    state::Shared,
};
use crate::{
    cni::{
        install::{self, CniCondition},
        server::CniServer,
    },
    config::NetpolConfig,
    document_source::{self, Sources},
    endpoint::link_events::LinkEvents,
    epoch::StateDirLock,
    grpc::peer,
    listener,
    netns_lock::NetnsLock,
    policy_dir::PolicyDir,
    watched_dir::WatchedDir,
};

/// Longest time for tasks to stop.
const GRACE: Duration = Duration::from_secs(5);
/// Pause between two checks whether the state is known, or the policies are in force.
const POLL: Duration = Duration::from_millis(200);
/// How long `--dry-run` waits for the objects of the cluster.
const LISTING: Duration = Duration::from_mins(1);

/// Runs until SIGTERM or SIGINT. The table stays in force.
///
/// # Errors
/// The kernel or a flag's value cannot be used, or another process enforces policy here.
pub async fn run(config: NetpolConfig) -> Result<()> {
    let manager = ServiceManager::of_environment().context("NOTIFY_SOCKET")?;
    let api = match &config.kubernetes {
        Some(settings) => Some(Api::connect(settings).await?),
        None => None,
    };
    if config.flags.dry_run {
        return dry_run(&config, api).await;
    }
    if let Some(directory) = &config.flags.vpp_export_dir {
        export_task::check(directory)?;
    }
    Descriptors::raise();
    let lock = NetnsLock::of_netpol()?;
    let kernel = Kernel::open()?;
    let drops = config.flags.log_drops.then(drops::open).transpose();
    let drops = drops
        .context("--log-drops: the kernel needs nfnetlink_log (CONFIG_NETFILTER_NETLINK_LOG)")?;
    make_dir(&config.flags.state_dir)?;
    let state_lock = StateDirLock::take(&config.flags.state_dir)?;
    let listeners = Listeners {
        admin: peer::bind(&config.flags.admin_socket, None).context("--admin-socket")?,
        metrics: http_server::bind_metrics(&config.metrics_address).await?,
        cni: peer::bind_some(config.flags.plugin.socket()).context("--cni-socket")?,
    };
    let set = config.flags.source.daemonset.clone().zip(api.clone());
    let set = set.map(|(name, api)| OwnSet::start(api, &name));
    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    let enforcer = start(&config, api, listeners, &tasks, &stop)?;
    tracing::info!(
        node = config.node_name,
        "enforcing NetworkPolicies with nftables"
    );
    let shared = Arc::clone(&enforcer.shared);
    tasks.spawn(service::report(manager.clone(), shared, stop.clone()));
    if let Some(packets) = drops {
        let shared = Arc::clone(&enforcer.shared);
        tasks.spawn(drops::run(packets, shared, stop.clone()));
    }
    let enforced = tasks.spawn(enforcer.run(kernel, stop.clone()));
    tokio::select! {
        ended = asked_to_stop() => ended?,
        _ = enforced => bail!("the task that writes the table ended; see the log"),
    }
    manager.stopping();
    stop.cancel();
    tasks.close();
    let _late = tokio::time::timeout(GRACE, tasks.wait()).await;
    leave(&config, set).await?;
    drop((state_lock, lock));
    Ok(())
}

/// The table stays in force, unless the DaemonSet was deleted or the flags say otherwise.
async fn leave(config: &NetpolConfig, set: Option<OwnSet>) -> Result<()> {
    let is_uninstalled = match set {
        Some(set) => set.was_deleted().await,
        None => false,
    };
    if is_uninstalled || config.flags.flush_on_exit {
        open_pods(config)?;
    } else {
        tracing::info!("stopped; the table remains in force");
    }
    if is_uninstalled {
        std::fs::remove_dir_all(&config.flags.state_dir)?;
    }
    Ok(())
}

/// Returns after SIGTERM or SIGINT.
async fn asked_to_stop() -> Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}

/// Opens every pod, and lets new ones start without this process.
fn open_pods(config: &NetpolConfig) -> Result<()> {
    // First: pods that start now would wait for an answer.
    if let Some(dir) = &config.flags.plugin.cni_conf_dir {
        install::withdraw(dir).with_context(|| format!("--cni-conf-dir {}", dir.display()))?;
    }
    remove_table()?;
    tracing::info!("stopped; the table is deleted, and every pod is open");
    Ok(())
}

/// Starts everything except the enforcer, which it returns.
fn start(
    config: &NetpolConfig,
    api: Option<Api>,
    listeners: Listeners,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) -> Result<Enforcer> {
    let shared = Arc::new(Shared::new(&config.node_name));
    let mut damaged = Vec::new();
    let cni = start_plugin(config, &shared, listeners.cni, &mut damaged, tasks, stop)?;
    let dir = config.flags.policy_dir.as_deref();
    let directory = document_source::directory(dir, &config.flags.state_dir, &mut damaged)?;
    let owners = Owners::open(&config.flags.state_dir, &mut damaged);
    let watches = api
        .as_ref()
        .map(|api| watches(config, api, false, tasks, stop));
    let cluster = watches.as_ref().map(|watches| watches.health.clone());
    let sources = Sources {
        directory,
        cluster: watches,
        stored: api
            .as_ref()
            .map(|api| (config.flags.state_dir.clone(), origin(config, api))),
        reports: |key| key.starts_with("NetworkPolicy/"),
        pods: PodScope::All,
    };
    document_source::start(sources, NetpolFeed(Arc::clone(&shared)), tasks, stop);
    if let (Some(api), Some(health)) = (api, cluster.clone())
        && let Some(taint) = startup_taint(config, api, health)
    {
        let places = config.flags.plugin.places();
        let ready = ready_with_plugin(Arc::clone(&shared), places.map(|_| cni.condition.clone()));
        tasks.spawn(taint.run(ready, stop.clone()));
    }
    if let Some(target) = exported(config) {
        shared.state.lock().exports = Some(Exports::new(&target.directory));
        tasks.spawn(export_task::run(target, Arc::clone(&shared), stop.clone()));
    }
    let counters = Counters::default();
    let pages = Pages {
        shared: Arc::clone(&shared),
        counters: counters.clone(),
        cluster,
        damaged: Arc::new(damaged),
        cni,
    };
    pages.start(listeners.admin, listeners.metrics, tasks, stop);
    Ok(Enforcer {
        shared,
        counters,
        links: LinkEvents::watch(tasks, stop.clone()),
        sets_bridge_sysctls: config.flags.set_bridge_sysctls,
        logs_drops: config.flags.log_drops,
        owners: Mutex::new(owners),
    })
}

/// The taint that is taken off this node when policy is in force; none without its flag.
fn startup_taint(config: &NetpolConfig, api: Api, health: ClusterHealth) -> Option<StartupTaint> {
    let key = config.flags.source.startup_taint()?;
    Some(StartupTaint {
        api,
        node: config.node_name.clone(),
        key: key.to_owned(),
        health,
    })
}

/// What `--vpp-export-dir` exports; `None` without the flag.
fn exported(config: &NetpolConfig) -> Option<Target> {
    let flags = &config.flags;
    let directory = flags.vpp_export_dir.clone()?;
    Some(Target {
        directory,
        nat_loopback: flags.vswitch.nat_loopback,
        node_interfaces: flags.vswitch.interfaces(),
    })
}

/// Starts what answers the CNI plugin, if it is wanted. Pods that it added in an earlier run are taken in
/// before the first document.
fn start_plugin(
    config: &NetpolConfig,
    shared: &Arc<Shared>,
    listener: Option<UnixListener>,
    damaged: &mut Vec<String>,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) -> Result<Plugin> {
    let plugin = Plugin::default();
    let file = AttachedFile::in_dir(&config.flags.state_dir);
    let Some(listener) = listener else {
        file.remove()?;
        return Ok(plugin);
    };
    let pods = PluginPods::open(Arc::clone(shared), file, damaged)?;
    tasks.spawn(pods.clone().forget_ended(stop.clone()));
    let server = CniServer::new(pods, plugin.reports.clone());
    let admission = listener::plugin_admission();
    tasks.spawn(server.serve(listener, admission, tasks.clone(), stop.clone()));
    if let Some(places) = config.flags.plugin.places() {
        let ready = in_force(Arc::clone(shared));
        tasks.spawn(places.run(plugin.condition.clone(), ready, stop.clone()));
    }
    Ok(plugin)
}

/// Prints the change that the documents would make, and asks the kernel whether it would accept it.
async fn dry_run(config: &NetpolConfig, api: Option<Api>) -> Result<()> {
    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    let shared = Arc::new(Shared::new(&config.node_name));
    if config.flags.plugin.socket().is_some() {
        let file = AttachedFile::in_dir(&config.flags.state_dir);
        shared.state.lock().take_in(file.look()?);
    }
    let directory = config.flags.policy_dir.as_deref();
    let sources = Sources {
        directory: directory.map(|dir| (WatchedDir::new(dir), PolicyDir::new(dir))),
        cluster: api.map(|api| watches(config, &api, true, &tasks, &stop)),
        stored: None,
        reports: |_| false,
        pods: PodScope::All,
    };
    document_source::start(sources, NetpolFeed(Arc::clone(&shared)), &tasks, &stop);
    let listed = async {
        while !shared.state.lock().is_listed() {
            tokio::time::sleep(POLL).await;
        }
    };
    let listed = tokio::time::timeout(LISTING, listed).await;
    stop.cancel();
    listed.map_err(|_| {
        anyhow::anyhow!("not every kind of object was listed within {LISTING:?}; see the log")
    })?;
    let waits = shared.state.lock().waits();
    let tables = planned(&shared).await?;
    if let Some(why) = waits {
        println!("nothing would change: the table of the last run stays: {why}");
        return Ok(());
    }
    let tables = drops::logged(tables, config.flags.log_drops);
    let mut kernel = Connection::open()?;
    let replacements: Vec<Change> = tables.iter().map(Change::replacement).collect();
    kernel.dry_run(&replacements)?;
    let mut out = std::io::stdout().lock();
    let mut is_same = true;
    for table in &tables {
        let Some(difference) = kernel.difference(table)? else {
            continue;
        };
        is_same = false;
        let family = table.family;
        writeln!(
            out,
            "# {family}: {difference}; the kernel would accept this change:"
        )?;
        let change = Change::between(&kernel.outline(table)?, table);
        write!(out, "{change}")?;
    }
    if is_same {
        writeln!(out, "the table in force is the same")?;
    }
    Ok(())
}

/// The tables that the documents need.
async fn planned(shared: &Shared) -> Result<Vec<Table>> {
    let (mut ways, addresses) = {
        let mut state = shared.state.lock();
        for refused in &state.refused {
            eprintln!("refused: {refused}");
        }
        state.commit()?;
        (state.ways.clone(), state.addresses())
    };
    // Without them the table would lack its guard against false sources.
    let looked = ways.look(&addresses).await;
    looked.context("asking for the routes to pods")?;
    let mut state = shared.state.lock();
    state.set_ways(ways);
    state.commit()?;
    state.lacks_frames = lacks_frames(&mut Connection::open()?);
    if let Some(problem) = state.open_to_frames() {
        eprintln!("PROBLEM: {problem}");
    }
    Ok(state.tables())
}

/// Waits until the policies are in force.
async fn in_force(shared: Arc<Shared>) -> bool {
    while !shared.state.lock().is_ready() {
        tokio::time::sleep(POLL).await;
    }
    true
}

/// Waits until the policies are in force and the plugin, if it is wanted, is in its place.
async fn ready_with_plugin(shared: Arc<Shared>, plugin: Option<CniCondition>) -> bool {
    let is_ready = in_force(shared).await;
    if let Some(plugin) = plugin {
        plugin.in_place().await;
    }
    is_ready
}

/// Reads the cluster from the API server, or from relays.
fn watches(
    config: &NetpolConfig,
    api: &Api,
    reads_only: bool,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) -> Watches {
    let here = Here {
        high_scale: None,
        node: config.node_name.clone(),
        resources: OF_NETWORK_POLICIES,
        reads_only,
        has_service_blocks: true,
        pods: PodScope::All,
    };
    match config.relays.clone() {
        Some(relays) => relay::start::follow(api, relays, here, tasks, stop),
        None => client::start(api, here, tasks, stop),
    }
}

/// The cluster that a stored list describes.
fn origin(config: &NetpolConfig, api: &Api) -> Origin {
    Origin {
        server: api.server().to_owned(),
        cluster: config.flags.source.cluster_name.clone(),
        authorities: api.authorities().to_vec(),
    }
}

fn make_dir(dir: &Path) -> Result<()> {
    let mut builder = DirBuilder::new();
    builder.recursive(true).mode(0o750);
    let made = builder.create(dir);
    made.map_err(|error| {
        let of = match dir.exists() {
            true => "it is not a directory".to_owned(),
            false => error.to_string(),
        };
        anyhow::anyhow!(
            "--state-dir {}: {of}; give a directory that exists or can be made",
            dir.display()
        )
    })
}
