//! Composition root: all parts of the agent, in start order.
//!
//! ```text
//! run ─► kernel: maps, programs, routes ─► Agent::start
//!                                            listeners ─► core ─► sources ─► built-in proxy
//!                                                     ─► streams of proxies ─► pages for people
//! ```

mod core_config;
mod identity_tasks;
mod kernel;
mod listeners;
mod pages;
mod resolving;
mod service;
mod sources;
mod streams;

use std::{os::unix::net::UnixStream, path::Path, sync::Arc, time::Duration};

use agent_cluster::api::{client::Api, own_set::OwnSet};
use agent_core::{
    core::Core,
    datapath::plan::Datapath,
    endpoint::{config_file::EndpointFile, spec::EndpointSpec},
    high_scale::objects::HighScaleView,
    kubernetes::local_pods::LocalPods,
};
use agent_datapath::{
    closed::Gate, files::StateFiles, interfaces::Interfaces, root::BpfRootLock,
    tunnel::TunnelStatus, upkeep::Conditions,
};
use anyhow::{Context as _, Result, bail};
use daemon::{descriptors::Descriptors, service_manager::ServiceManager};
use dns_policy::epoch::Epoch;
use shared_maps::{pin, user::Globals};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{Notify, oneshot, watch},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use self::{kernel::NodeParts, listeners::Listeners, resolving::Resolving};
use crate::{
    admin::standby::Succession,
    cleanup::{self, Places},
    config::{Config, Settings},
    dnsproxy::BuiltinProxy,
    document_source,
    epoch::{self, StateDirLock},
    high_scale,
    lane::Lane,
    listener, liveness,
    netns_lock::NetnsLock,
    netpol,
    owner::OwnerRecord,
    ownership::{Owned, Ownership},
    proxies::{Proxies, RulesTable},
    restore::Found,
    runner::identity_feed::IdentityFeed,
    runner::{self, CoreHandle, CoreThread, Feeds, Inbox},
    standby::{self, Begin},
};

/// Socket of a Cilium agent.
const CILIUM_SOCKET: &str = "/var/run/cilium/cilium.sock";
/// Pause between two checks whether each pod is an endpoint.
const TAKEN_IN: Duration = Duration::from_secs(2);
/// Longest time for tasks to stop.
const GRACE: Duration = Duration::from_secs(5);

/// Runs until SIGTERM or SIGINT. The datapath stays attached. `settings` is what a standby compares.
pub async fn run(mut config: Config, settings: Settings) -> Result<()> {
    let manager = ServiceManager::of_environment().context("NOTIFY_SOCKET")?;
    Descriptors::raise();
    daemon::map_memory::lift_limit();
    if config.core.enable_ipv6 {
        daemon::ipv6::check()?;
    }
    let api = match &config.kubernetes {
        Some(settings) => Some(Api::connect(settings).await?),
        None => None,
    };
    refuse_beside_cilium(&config.flags.bpf_root)?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let (ownership, begin, record) = tokio::select! {
        owned = own(&config, &settings, &manager) => owned?,
        _ = terminate.recv() => return Ok(()),
        _ = interrupt.recv() => return Ok(()),
    };
    let stage = config.flags.high_scale.stage();
    let state_dir = config.state();
    let damaged = high_scale::check(&state_dir, stage, config.flags.high_scale.high_scale_force)?;
    if let Some(text) = &damaged {
        tracing::error!("{text}");
    }
    let presence =
        NetnsLock::of_run().context("the name of this agent in its network namespace")?;
    // One spelling of the root, whatever links lead to it: filters have it in their names.
    config.flags.bpf_root = std::fs::canonicalize(&config.flags.bpf_root)?;
    let set = config
        .flags
        .cluster
        .source
        .daemonset
        .clone()
        .zip(api.clone());
    let places = Places::of(&config);
    let ends_if_it_hangs = config.flags.standby.standby.is_some();
    let (config, mut parts, node) = kernel::prepare(config, api, (begin, record.clone())).await?;
    parts.found.damaged.extend(damaged);
    parts.datapath = Box::new(Owned::new(
        parts.datapath,
        ownership.clone(),
        parts.channel.0.pulse().clone(),
    ));
    let conditions = parts.conditions.clone();
    let agent = Agent::start(config, parts).await?;
    if ends_if_it_hangs {
        agent
            .core
            .end_if_it_hangs()
            .context("the watchdog's thread")?;
    }
    agent.keep(ownership.clone(), conditions);
    let set = set.map(|(name, api)| OwnSet::start(api, &name));
    agent.look_after(node);
    high_scale::note(&state_dir, stage).context("the note of --high-scale-ipcache")?;
    agent.report_to(manager.clone());
    let on_request = tokio::select! {
        _ = terminate.recv() => false,
        _ = interrupt.recv() => false,
        () = record.asked_to_end() => true,
        () = agent.core_stopped() => bail!("the core's thread ended; see the log"),
    };
    manager.stopping();
    tracing::info!("stopping; programs and maps remain in force");
    let stopped = agent.stop().await;
    if let Err(error) = &stopped {
        tracing::warn!(%error);
    }
    // Before the locks are free: the next owner reads it.
    let _panicked = tokio::task::spawn_blocking(move || record.stopped()).await;
    // A standby waits: so Holdfast is not being uninstalled.
    if let Some(set) = set.filter(|_| !on_request)
        && set.was_deleted().await
    {
        tracing::info!("the DaemonSet was deleted; everything is taken off this node");
        let cleaned = cleanup::everything(&places).await;
        for removed in &cleaned.removed {
            tracing::info!("removed {removed}");
        }
        cleaned.result()?;
    }
    match stopped {
        Ok(()) => drop((ownership, presence)),
        // A task may still write. The kernel frees the locks when the process has ended.
        Err(_) => std::mem::forget((ownership, presence)),
    }
    Ok(())
}

/// Takes what belongs to one agent: the state directory and the BPF root. A standby waits for them.
async fn own(
    config: &Config,
    settings: &Settings,
    manager: &ServiceManager,
) -> Result<(Ownership, Begin, OwnerRecord)> {
    let state_dir = &config.flags.state_dir;
    let (root, state, begin, former) = match config.flags.standby.standby {
        Some(_) => {
            let taken = standby::wait(config, settings, manager).await?;
            let state = standby::state_dir(config).await?;
            (taken.lock, state, taken.begin, taken.former)
        }
        None => {
            let state = StateDirLock::take(state_dir)?;
            let root = BpfRootLock::take(&config.flags.bpf_root)?;
            let former = standby::former(config);
            (root, state, Begin::Start, former)
        }
    };
    let is_takeover = matches!(begin, Begin::Takeover { .. });
    let (node, settings) = (&config.node_name, settings.clone());
    let record = OwnerRecord::begin(state_dir, node, settings, &former, is_takeover);
    Ok((Ownership::new(root, state), begin, record))
}

/// Dependencies of an agent, made for the kernel or for a test.
pub struct Parts {
    pub files: StateFiles,
    pub maps: Globals,
    /// State of the previous run.
    pub found: Found,
    /// Carries out the steps of plans.
    pub datapath: Box<dyn Datapath>,
    /// Channel of events to the core.
    pub channel: (CoreHandle, Inbox),
    /// State of the node's part of the datapath.
    pub conditions: Conditions,
    /// Closes interfaces of pods that are not found; `None` in tests without a kernel.
    pub gate: Option<Box<dyn Gate>>,
    /// The tunnel between nodes; `None` = this node has no part in it.
    pub tunnel: Option<TunnelStatus>,
    /// Client of the API server; `None` = no cluster.
    pub api: Option<Api>,
    /// The first listing has the endpoints where another agent had them until just now.
    pub keeps_endpoints: bool,
    /// What this agent notes about itself for the next owner.
    pub owner: OwnerRecord,
}

/// Number of tasks that did not end.
#[derive(Debug, thiserror::Error)]
#[error("{0} tasks did not stop within {GRACE:?}; they end with the process")]
pub struct TasksLeft(usize);

/// A running agent: the core's thread, the built-in proxy and all tasks.
pub struct Agent {
    core: CoreHandle,
    rules: watch::Receiver<Arc<RulesTable>>,
    /// Pods of this node.
    local: watch::Receiver<Arc<LocalPods>>,
    /// Objects about the tunnel between nodes.
    high_scale: watch::Receiver<HighScaleView>,
    thread: CoreThread,
    builtin: Option<Arc<BuiltinProxy>>,
    /// Mapping and rules streams of proxies: clients of other services do not delay them.
    streams: Lane,
    tasks: TaskTracker,
    stop: CancellationToken,
    rim_stop: CancellationToken,
}

/// What all parts around the core share.
struct Rim {
    core: CoreHandle,
    proxies: Proxies,
    maps: Globals,
    epoch: Epoch,
    tasks: TaskTracker,
    /// Ends the sources and the pages.
    stop: CancellationToken,
    /// Ends the tasks that serve proxies, after the sources.
    rim_stop: CancellationToken,
}

/// Receivers of the objects that parts of the agent follow.
struct Followed {
    local: watch::Receiver<Arc<LocalPods>>,
    high_scale: watch::Receiver<HighScaleView>,
}

impl Rim {
    fn new(core: CoreHandle, proxies: Proxies, maps: Globals, epoch: Epoch) -> Self {
        Self {
            core,
            proxies,
            maps,
            epoch,
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
            rim_stop: CancellationToken::new(),
        }
    }

    /// Notes for the next owner that the findings about all endpoints are in force.
    fn note_looked(
        &self,
        looked: oneshot::Receiver<()>,
        owner: OwnerRecord,
    ) -> impl Future<Output = ()> + Send + use<> {
        let (core, mut rules) = (self.core.clone(), self.proxies.watch_rules());
        let noting = async move {
            // The core answers after the events that were sent before.
            let is_known = looked.await.is_ok()
                && rules.wait_for(|rules| rules.ready).await.is_ok()
                && core.summary().await.is_ok();
            if is_known {
                let _panicked = tokio::task::spawn_blocking(move || owner.looked()).await;
            }
        };
        let stop = self.stop.clone();
        async move {
            stop.run_until_cancelled(noting).await;
        }
    }

    /// Starts the task that finds which learned addresses still have connections. `freed` wakes it.
    fn follow_connections(&self, config: &Config, freed: Arc<Notify>) {
        self.tasks.spawn(liveness::run(
            self.maps.clone(),
            self.core.clone(),
            config.flags.conntrack_gc_interval,
            freed,
            self.stop.clone(),
        ));
    }

    fn into_agent(
        self,
        thread: CoreThread,
        builtin: Option<Arc<BuiltinProxy>>,
        streams: Lane,
        followed: Followed,
    ) -> Agent {
        Agent {
            core: self.core,
            rules: self.proxies.watch_rules(),
            local: followed.local,
            high_scale: followed.high_scale,
            thread,
            builtin,
            streams,
            tasks: self.tasks,
            stop: self.stop,
            rim_stop: self.rim_stop,
        }
    }
}

impl Agent {
    /// Binds everything, starts the core, then what feeds it, then what serves from it.
    pub async fn start(config: Config, parts: Parts) -> Result<Self> {
        let Parts {
            files,
            maps,
            found,
            mut datapath,
            channel,
            conditions,
            gate,
            tunnel,
            api,
            keeps_endpoints,
            owner,
        } = parts;
        let mut damaged = found.damaged.clone();
        let epoch = epoch::begin_noting(files.dir(), &mut damaged)?;
        let bound = Listeners::bind(&config).await?;
        let limits = listener::Listeners::new(Descriptors::raise().limit());
        let rules = core_config::restored_rules(&found);
        let endpoints = endpoints_of_boot(&found, &epoch);
        let dir = config.flags.policy_dir.as_deref();
        let policies = document_source::directory(dir, files.dir(), &mut damaged)?;

        let freed = notify_freed(&mut *datapath);
        let resolving = Resolving::new(&config);
        let feeds = Feeds {
            resolver: resolving.feed.clone(),
            identities: IdentityFeed::default(),
        };
        let wanted = feeds.identities.clone();
        let proxies = Proxies::default();
        let core = Core::new(core_config::of(&config, &epoch), found.restored);
        let (core, thread) = runner::start(channel, core, datapath, proxies.clone(), feeds)
            .context("starting the core's thread")?;
        let rim = Rim::new(core, proxies, maps, epoch);
        tracing::info!(start = rim.epoch.start, "agent starting");
        tracing::debug!(?config, "settings of the agent");

        let resolver = resolving.start(&config, &rim, api.as_ref());
        let from = sources::From {
            names: resolver.objects,
            state: files.dir().to_owned(),
            policies,
            endpoints,
            gate,
            api: api.clone(),
            keeps_endpoints,
        };
        let (sources, looked) = sources::start(&config, &rim, from).await?;
        rim.tasks.spawn(rim.note_looked(looked, owner.clone()));
        damaged.extend_from_slice(sources.endpoints.damaged());
        let health = sources.cluster.as_ref();
        let identities = identity_tasks::start(&config, &rim, api.as_ref(), health, &wanted);
        rim.follow_connections(&config, freed);
        let builtin = streams::builtin(&config, &rim, &rules)?;
        let streams = streams::start(&config, &rim, &limits, bound.sdp, bound.fqdndata).await?;
        let followed = Followed {
            local: sources.local.clone(),
            high_scale: sources.high_scale.clone(),
        };
        let succession = Succession::new(
            owner,
            &config.flags.admin_socket,
            config.flags.standby.standby_expected,
        );
        let about = pages::About {
            sources,
            damaged: Arc::new(damaged),
            conditions,
            builtin: builtin.clone(),
            resolver: resolver.handle,
            identities,
            tunnel,
            limits,
            api,
            succession,
        };
        pages::start(config, &rim, about, bound.pages);
        Ok(rim.into_agent(thread, builtin, streams, followed))
    }

    /// Keeps the node's part of the datapath in its wanted state.
    fn look_after(&self, node: NodeParts) {
        let stop = self.stop.clone();
        self.tasks
            .spawn(netpol::take_over(self.pods_in_force(), stop.clone()));
        self.tasks
            .spawn(node.upkeep.run(node.interval, stop.clone()));
        if let Some(tunnel) = node.tunnel {
            let objects = self.high_scale.clone();
            self.tasks
                .spawn(tunnel.run(objects, self.is_ready(), stop.clone()));
        }
        match node.interfaces {
            Some(interfaces) => self.tasks.spawn(interfaces.run(self.is_ready(), stop)),
            None => self.tasks.spawn(Interfaces::clear(node.maps, stop)),
        };
    }

    /// Waits until the agent is ready. False: it stops.
    fn is_ready(&self) -> impl Future<Output = bool> + use<> {
        let mut rules = self.rules.clone();
        async move { rules.wait_for(|rules| rules.ready).await.is_ok() }
    }

    /// Ends the process if it loses what it owns.
    fn keep(&self, ownership: Ownership, conditions: Conditions) {
        self.tasks
            .spawn(ownership.watch(conditions, self.stop.clone()));
    }

    fn report_to(&self, manager: ServiceManager) {
        let (core, rules, stop) = (self.core.clone(), self.rules.clone(), self.stop.clone());
        self.tasks
            .spawn(service::report(manager, core, rules, stop));
    }

    /// Waits until each pod of this node is an endpoint that is in force. False: the agent stops.
    fn pods_in_force(&self) -> impl Future<Output = bool> + use<> {
        let (core, mut rules, local) = (self.core.clone(), self.rules.clone(), self.local.clone());
        async move {
            if rules.wait_for(|rules| rules.ready).await.is_err() {
                return false;
            }
            loop {
                // The first pods are known a moment after the agent is ready.
                tokio::time::sleep(TAKEN_IN).await;
                let pods = Arc::clone(&local.borrow());
                let Ok(in_force) = core.inspect(Core::addresses_in_force).await else {
                    continue;
                };
                let mut addresses = pods.values().flat_map(|pod| &pod.addresses);
                if addresses.all(|address| in_force.contains(address)) {
                    return true;
                }
            }
        }
    }

    /// Returns when the core's thread has ended by itself.
    pub async fn core_stopped(&self) {
        self.core.closed().await;
    }

    /// Stops: sources first, then proxies, then the core after the events that are queued.
    ///
    /// # Errors
    /// Some tasks did not end in time. The core has stopped all the same.
    pub async fn stop(self) -> Result<(), TasksLeft> {
        self.stop.cancel();
        if let Some(builtin) = &self.builtin {
            builtin.drain().await;
        }
        self.rim_stop.cancel();
        self.tasks.close();
        let ended = tokio::time::timeout(GRACE, self.tasks.wait()).await;
        let left = self.tasks.len();
        drop(self.streams);
        self.thread.stop().await;
        ended.map_err(|_| TasksLeft(left))
    }
}

/// Endpoints of the last run, if the node has not been rebooted since.
fn endpoints_of_boot(found: &Found, epoch: &Epoch) -> Vec<EndpointSpec> {
    let files = found.restored.endpoints.iter();
    let of_boot = files.filter(|file| file.is_of_boot(&epoch.boot_id));
    of_boot.map(EndpointFile::spec).collect()
}

/// The notification that the datapath sends when it frees an address.
fn notify_freed(datapath: &mut dyn Datapath) -> Arc<Notify> {
    let freed = Arc::new(Notify::new());
    let wake = Arc::clone(&freed);
    datapath.tell_freed_addresses(Box::new(move || wake.notify_one()));
    freed
}

/// A live Cilium agent owns the pins at the default root.
fn refuse_beside_cilium(bpf_root: &Path) -> Result<()> {
    if bpf_root == Path::new(pin::BPF_ROOT) && UnixStream::connect(CILIUM_SOCKET).is_ok() {
        bail!(
            "a Cilium agent answers on {CILIUM_SOCKET} and owns the maps under {}/{}; \
             stop it, or give this agent its own --bpf-root",
            bpf_root.display(),
            pin::GLOBALS
        );
    }
    Ok(())
}
