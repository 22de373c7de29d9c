//! What the kernel has before the core starts: maps, programs, routes, rules and interfaces.

use std::time::{Duration, Instant};

use agent_cluster::api::client::Api;
use agent_core::core::Event;
use agent_datapath::{
    closed::ClosedInterfaces,
    features::KernelView,
    files::{StateFiles, background::BackgroundFiles},
    interfaces::Interfaces,
    kernel::KernelDatapath,
    nftables, routing,
    tunnel::{self, Tunnel},
    unclaimed::ClosedNames,
    upkeep::{self, Conditions, Upkeep},
};
use anyhow::{Context as _, Result};
use dns_policy::boot_time::BootTime;
use shared_maps::user::Globals;

use super::Parts;
use crate::{
    config::Config,
    owner::OwnerRecord,
    restore,
    runner::{self, CoreHandle},
    standby::Begin,
};

/// What is looked after while the agent runs.
pub(super) struct NodeParts {
    pub(super) upkeep: Upkeep,
    /// Time between two checks of the node's parts (`--reconcile-interval`).
    pub(super) interval: Duration,
    /// Interfaces that are no pod's, in transparent mode.
    pub(super) interfaces: Option<Interfaces>,
    /// The tunnel between nodes, if this node has a part in it.
    pub(super) tunnel: Option<Tunnel>,
    pub(super) maps: Globals,
}

/// Reads what the last run left, and prepares the node. Gives the settings with the sizes that maps
/// have.
pub(super) async fn prepare(
    mut config: Config,
    api: Option<Api>,
    (begin, record): (Begin, OwnerRecord),
) -> Result<(Config, Parts, NodeParts)> {
    let files = StateFiles::open(&config.state())
        .with_context(|| format!("--state-dir {}", config.flags.state_dir.display()))?;
    let maps = Globals::new(&config.flags.bpf_root);
    let mut found = restore::read(&files, &maps, BootTime::now())?;
    if let Some(path) = &config.flags.tofqdns_pre_cache {
        found.read_pre_cache(path);
    }
    let begun = Instant::now();
    let (keeps_endpoints, warm) = match begin {
        Begin::Start => (false, None),
        Begin::Takeover {
            warm,
            keeps_endpoints,
        } => (keeps_endpoints, warm.map(|warm| *warm)),
    };
    let channel = runner::channel();
    let written = write_names(&files, &channel.0)?;
    // Before the programs, which need the types of connection tracking: the rules load that module.
    if let Err(error) = nftables::install_missing() {
        tracing::error!(%error, "cannot install the nftables rules: DNS queries to addresses that this node translates time out, and a pod with NET_ADMIN and an ifb device can bypass its policy");
    }
    let loaded = warm.and_then(|warm| warm.current(&maps));
    let (programs, closed_program) = loaded.unzip();
    let datapath = Box::new(KernelDatapath::prepare_warm(
        &config.kernel(),
        Box::new(written),
        programs,
    )?);
    tracing::debug!(took = ?begun.elapsed(), "maps and programs are loaded");
    // The map of an earlier run keeps its size.
    let ipcache_max = datapath.ipcache_max();
    config.core.ipcache_max = usize::try_from(ipcache_max).unwrap_or(usize::MAX);
    if let Some(path) = &config.flags.tofqdns_pre_cache {
        found.bound_pre_cache(path, ipcache_max);
    }
    let closed = ClosedNames::begin(config.flags.containers.closed_bridges())
        .context("--unknown-containers")?;
    let programs = datapath.programs().clone();
    let mut gate =
        ClosedInterfaces::new(programs, maps.clone(), closed.clone()).with(closed_program);
    gate.load()?;
    routing::install(config.core.enable_ipv4, config.core.enable_ipv6).await?;
    let interfaces = interfaces(&config, &datapath, &maps).await?;
    let tunnel = tunnel(&config, &datapath, &maps).await?;
    tracing::debug!(took = ?begun.elapsed(), "the node is prepared");
    let conditions = Conditions::on(KernelView::new(datapath.found()));
    let node = NodeParts {
        upkeep: upkeep(&config, &datapath, closed, &conditions),
        interval: config.core.reconcile_interval,
        interfaces,
        tunnel,
        maps: maps.clone(),
    };
    let parts = Parts {
        files,
        maps,
        found,
        datapath,
        channel,
        conditions,
        gate: Some(Box::new(gate)),
        tunnel: node.tunnel.as_ref().map(Tunnel::status),
        api,
        keeps_endpoints,
        owner: record,
    };
    Ok((config, parts, node))
}

/// Starts the thread that writes the learned names. `core` receives the results.
fn write_names(files: &StateFiles, core: &CoreHandle) -> Result<BackgroundFiles> {
    let core = core.clone();
    let send = move |result| {
        // The core may stop before this thread; the event is then not needed.
        let _gone = core.send_blocking(Event::NamesKept(result));
    };
    BackgroundFiles::start(files.clone(), send).context("starting the files' thread")
}

fn upkeep(
    config: &Config,
    datapath: &KernelDatapath,
    closed: ClosedNames,
    conditions: &Conditions,
) -> Upkeep {
    let node = upkeep::Node {
        ipv4: config.core.enable_ipv4,
        ipv6: config.core.enable_ipv6,
        globals: Globals::new(&config.flags.bpf_root),
        closed,
        sdp_group: config.flags.sdp_group,
        steering: datapath.steering(),
        port: config
            .flags
            .hold_proxy_port
            .then_some(config.core.proxy_port),
    };
    Upkeep::new(node, conditions.clone())
}

/// Prepares interfaces that are no pod's for transparent mode, or withdraws what it left there.
async fn interfaces(
    config: &Config,
    datapath: &KernelDatapath,
    maps: &Globals,
) -> Result<Option<Interfaces>> {
    if !config.flags.dnsproxy_enable_transparent_mode {
        Interfaces::withdraw(maps)?;
        return Ok(None);
    }
    let mut interfaces = Interfaces::new(datapath.programs().clone(), maps.clone());
    match interfaces.refresh().await {
        Err(error) if error.is_passing() => {
            tracing::warn!(%error, "transparent mode: the interfaces cannot be prepared yet; the agent tries again");
        }
        looked_after => looked_after.context("transparent mode")?,
    }
    Ok(Some(interfaces))
}

/// Prepares the tunnel between nodes, or removes what an earlier run left of it.
async fn tunnel(
    config: &Config,
    datapath: &KernelDatapath,
    maps: &Globals,
) -> Result<Option<Tunnel>> {
    let Some(settings) = &config.tunnel else {
        tunnel::clear(maps)
            .await
            .context("removing the tunnel between nodes, which has no mode any more")?;
        return Ok(None);
    };
    let programs = datapath.programs().clone();
    let mut tunnel = Tunnel::new(programs, maps.clone(), settings.clone())?;
    match tunnel.refresh().await {
        Err(error) if error.is_passing() => {
            tracing::warn!(%error, "the tunnel between nodes cannot be prepared yet; the agent tries again");
        }
        prepared => prepared?,
    }
    Ok(Some(tunnel))
}
