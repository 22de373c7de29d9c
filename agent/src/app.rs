//! Composition root: everything the agent is made of, in start order.

use std::{os::unix::net::UnixStream, path::Path, sync::Arc, time::Duration};

use anyhow::{Context as _, Result, bail};
use dns_policy::{boot_time::BootTime, epoch::Epoch, rule::RulesOf, wall_time};
use holdfast_sdp::descriptors::Descriptors;
use shared_maps::{pin, user::Globals};
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::watch,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    admin::server::Admin,
    cleanup::{self, Places},
    cni::{failures::AddFailures, install::CniCondition, server::CniServer},
    config::Config,
    core::{Core, CoreConfig, Event},
    datapath::{
        closed::{ClosedInterfaces, Gate},
        files::{StateFiles, background::BackgroundFiles},
        interfaces::Interfaces,
        kernel::{KernelConfig, KernelDatapath},
        notrack,
        plan::Datapath,
        root::BpfRootLock,
        routing,
        upkeep::{self, Conditions, Upkeep},
    },
    dnsproxy::{BuiltinProxy, Ports},
    document_source::{self, Sources},
    endpoint::{
        config_file::EndpointFile,
        source::{EndpointBook, cli::CliFile, polls, taken_in::PodSource},
        spec::EndpointSpec,
    },
    epoch::{self, StateDirLock},
    events::Events,
    grpc::{
        fqdndata::FqdnDataService,
        peer::{self, Allowed},
        server::{About, Native},
    },
    health::{self, Health},
    kubernetes::{
        Here,
        book::Book,
        client::{self, Api},
        labels::LabelFilter,
        listing_file::Origin,
        own_set::OwnSet,
    },
    lane::Lane,
    liveness, node,
    own_interfaces::{self, OwnInterfaces},
    policy::source::{dir::PolicyDir, last_good::LastGood},
    proxies::{Proxies, RulesTable},
    relay,
    restore::{self, Found},
    runner::{self, CoreHandle, CoreThread, Inbox},
    watched_dir::WatchedDir,
};

/// Socket of a Cilium agent.
const CILIUM_SOCKET: &str = "/var/run/cilium/cilium.sock";
/// Longest time for tasks to stop.
const GRACE: Duration = Duration::from_secs(5);

/// Runs until SIGTERM or SIGINT. The datapath stays attached.
pub async fn run(mut config: Config) -> Result<()> {
    Descriptors::raise();
    let api = match &config.kubernetes {
        Some(settings) => Some(Api::connect(settings).await?),
        None => None,
    };
    let lock = StateDirLock::take(&config.state_dir)?;
    let bpf_root = config.bpf_root.clone();
    refuse_beside_cilium(&config.bpf_root)?;
    let root_lock = BpfRootLock::take(&config.bpf_root)?;
    let files = StateFiles::open(&config.state())
        .with_context(|| format!("--state-dir {}", config.state_dir.display()))?;
    let maps = Globals::new(&config.bpf_root);
    let mut found = restore::read(&files, &maps, BootTime::now())?;
    if let Some(path) = &config.pre_cache {
        found.read_pre_cache(path);
    }
    let kernel = KernelConfig {
        bpf_root: config.bpf_root.clone(),
        ipv4: config.ipv4,
        ipv6: config.ipv6,
        sizes: config.map_sizes,
        transparent: config.transparent,
        dns_quota: config.dns_quota,
        sdp_group: config.sdp_group,
    };
    let channel = runner::channel();
    let core = channel.0.clone();
    let send = move |result| {
        // The core may stop before this thread; the event is then not needed.
        let _gone = core.send_blocking(Event::NamesKept(result));
    };
    let written =
        BackgroundFiles::start(files.clone(), send).context("starting the files' thread")?;
    let datapath = Box::new(KernelDatapath::prepare(&kernel, Box::new(written))?);
    config.map_sizes.ipcache = datapath.ipcache_max();
    if let Some(path) = &config.pre_cache {
        found.bound_pre_cache(path, config.map_sizes.ipcache);
    }
    let mut gate = ClosedInterfaces::new(datapath.programs().clone(), maps.clone());
    gate.load()?;
    routing::install(config.ipv4, config.ipv6).await?;
    if let Err(error) = notrack::install() {
        tracing::error!(%error, "cannot install the nftables rules; DNS queries to addresses that this node translates will time out");
    }
    let interfaces = if config.transparent {
        let mut interfaces = Interfaces::new(datapath.programs().clone(), maps.clone());
        match interfaces.refresh().await {
            Err(error) if error.is_passing() => {
                tracing::warn!(%error, "transparent mode: the interfaces cannot be prepared yet; the agent tries again");
            }
            looked_after => looked_after.context("transparent mode")?,
        }
        Some(interfaces)
    } else {
        Interfaces::withdraw(&maps)?;
        None
    };
    let conditions = Conditions::default();
    let upkeep = Upkeep::new(
        upkeep::Node {
            ipv4: config.ipv4,
            ipv6: config.ipv6,
            globals: maps.clone(),
            sdp_group: config.sdp_group,
            steering: datapath.steering(),
            port: config.hold_proxy_port.then_some(config.proxy_port),
        },
        conditions.clone(),
    );
    let interval = config.reconcile_interval;
    let set = config.daemonset.clone().zip(api.clone());
    let places = Places {
        bpf_root: config.bpf_root.clone(),
        state_dir: config.state_dir.clone(),
        cni_conf_dir: config
            .cni_places
            .as_ref()
            .and_then(|cni| cni.conf_dir.clone()),
    };
    let agent = Agent::start(
        config,
        Parts {
            files,
            maps,
            found,
            datapath,
            channel,
            conditions,
            gate: Some(Box::new(gate)),
            api,
        },
    )
    .await?;
    let stop = agent.stop.clone();
    let set = set.map(|(name, api)| OwnSet::start(api, &name, &agent.tasks, &stop));
    agent.tasks.spawn(upkeep.run(interval, stop.clone()));
    match interfaces {
        Some(interfaces) => {
            let mut rules = agent.rules.clone();
            let ready = async move { rules.wait_for(|rules| rules.ready).await.is_ok() };
            agent.tasks.spawn(interfaces.run(ready, stop))
        }
        None => agent
            .tasks
            .spawn(Interfaces::clear(Globals::new(&bpf_root), stop)),
    };
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        () = agent.core_stopped() => bail!("the core's thread ended; see the log"),
    }
    tracing::info!("stopping; programs and maps remain in force");
    if let Err(error) = agent.stop().await {
        tracing::warn!(%error);
    }
    if let Some(set) = set
        && set.is_gone().await
    {
        tracing::info!("the DaemonSet was deleted; everything is taken off this node");
        cleanup::everything(&places).await?;
    }
    drop((root_lock, lock));
    Ok(())
}

/// Dependencies of an agent: those of the kernel, or of a test.
pub struct Parts {
    /// State directory.
    pub files: StateFiles,
    /// Pinned maps.
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
    /// Client of the API server; `None` = no cluster.
    pub api: Option<Api>,
}

/// Tasks of an agent that did not end.
#[derive(Debug, thiserror::Error)]
#[error("{0} tasks did not stop within {GRACE:?}; they end with the process")]
pub struct TasksLeft(usize);

/// A running agent.
pub struct Agent {
    core: CoreHandle,
    rules: watch::Receiver<Arc<RulesTable>>,
    thread: CoreThread,
    builtin: Option<Arc<BuiltinProxy>>,
    /// Mapping and rules streams of proxies: clients of other services do not delay them.
    streams: Lane,
    tasks: TaskTracker,
    stop: CancellationToken,
    rim_stop: CancellationToken,
}

impl Agent {
    /// Binds everything, starts the core, then what feeds it, then what serves from it.
    pub async fn start(config: Config, parts: Parts) -> Result<Self> {
        let Parts {
            files,
            maps,
            found,
            datapath,
            channel,
            conditions,
            gate,
            api,
        } = parts;
        let epoch = epoch::begin(files.dir())?;
        let sdp_listener =
            peer::bind(&config.sdp_socket, Some(config.sdp_group)).context("--sdp-socket")?;
        let admin_listener = peer::bind(&config.admin_socket, None).context("--admin-socket")?;
        let cni_listener = match &config.cni_socket {
            Some(socket) => Some(peer::bind(socket, None).context("--cni-socket")?),
            None => None,
        };
        let metrics_listener = match config.metrics_address {
            Some(address) => Some(health::bind(address).await.map_err(anyhow::Error::msg)?),
            None => None,
        };

        let fqdndata_listener = match config.fqdndata_port {
            Some(port) => Some(TcpListener::bind(("127.0.0.1", port)).await.with_context(|| {
                format!("--standalone-dns-proxy-server-port {port}: choose another, or stop what has it")
            })?),
            None => None,
        };

        let restored_rules = restored_rules(&found);
        let endpoint_files = found.restored.endpoints.iter();
        let of_boot = endpoint_files.filter(|file| file.is_of_boot(&epoch.boot_id));
        let restored_endpoints = of_boot.map(EndpointFile::spec).collect();
        let mut damaged = found.damaged;
        let policies = match &config.policy_dir {
            Some(dir) => {
                let kept = LastGood::open(files.dir(), dir, &mut damaged)?;
                Some((WatchedDir::new(dir), PolicyDir::with_last_good(dir, kept)))
            }
            None => None,
        };
        let damaged = Arc::new(damaged);
        let proxies = Proxies::default();
        let core = Core::new(core_config(&config, &epoch), found.restored);
        let (core, thread) = runner::start(channel, core, datapath, proxies.clone())
            .context("starting the core's thread")?;
        let tasks = TaskTracker::new();
        let stop = CancellationToken::new();
        let rim_stop = CancellationToken::new();
        tracing::info!(start = epoch.start, ?config, "agent starting");

        let interfaces = own_interfaces::list().context("listing the node's addresses")?;
        for event in node::changes(&OwnInterfaces::default(), &interfaces) {
            core.send(event).await?;
        }
        tasks.spawn(node::run(core.clone(), interfaces, stop.clone()));
        let (local, pods) = watch::channel(Arc::default());
        let endpoints = endpoint_source(
            &config,
            files.dir(),
            restored_endpoints,
            gate,
            &core,
            &tasks,
            &stop,
        )?;
        if api.is_some() {
            let netns_dir = config.netns_dir.clone();
            endpoints.take_in_from(PodSource { pods, netns_dir });
        }
        let filter = LabelFilter::new(config.label_rules.clone());
        let book = Book::new(filter, &config.cluster_name).on_node(&config.node_name);
        let origin = Origin {
            server: api
                .as_ref()
                .map(|api| api.server().to_owned())
                .unwrap_or_default(),
            cluster: config.cluster_name.clone(),
            authorities: api
                .as_ref()
                .map(|api| api.authorities().to_vec())
                .unwrap_or_default(),
        };
        let watches = api.map(|api| {
            let here = Here {
                node: config.node_name.clone(),
                has_service_blocks: config.has_service_blocks,
            };
            match config.relays.clone() {
                Some(relays) => relay::start::follow(&api, relays, here, &tasks, &stop),
                None => client::start(&api, here, &tasks, &stop),
            }
        });
        let cluster = watches.as_ref().map(|watches| watches.health.clone());
        let sources = Sources {
            directory: policies,
            cluster: watches,
            stored: (files.dir().to_owned(), origin),
            local,
        };
        document_source::start(sources, book, &core, &tasks, &stop);
        tasks.spawn(liveness::run(
            maps.clone(),
            core.clone(),
            config.conntrack_gc_interval,
            stop.clone(),
        ));

        let builtin = if config.disable_builtin_dns_proxy {
            None
        } else {
            let ports = Ports {
                core: core.clone(),
                proxies: proxies.clone(),
                epoch: epoch.clone(),
            };
            let started = BuiltinProxy::start(&config, ports, &restored_rules, &tasks, &rim_stop);
            Some(started.with_context(|| {
                format!(
                    "the built-in DNS proxy on port {}; stop what has the port, choose another \
                     --tofqdns-proxy-port, or turn it off with --disable-builtin-dns-proxy",
                    config.proxy_port
                )
            })?)
        };

        let about = About {
            epoch: epoch.clone(),
            proxy_port: config.proxy_port,
            min_ttl: config.min_ttl_seconds(),
        };
        let native = Native::new(
            about,
            core.clone(),
            proxies.clone(),
            tasks.clone(),
            rim_stop.clone(),
        );
        let allowed = Allowed {
            group: Some(config.sdp_group),
        };
        let streams = Lane::start("streams").context("starting the thread of proxies' streams")?;
        tasks.spawn_on(native.serve(sdp_listener, allowed), streams.handle());
        if let Some(listener) = fqdndata_listener {
            let service = FqdnDataService::start(
                core.clone(),
                proxies.clone(),
                config.response_max_delay,
                tasks.clone(),
                rim_stop.clone(),
            );
            tasks.spawn(service.await.serve(listener));
        }
        let rules = proxies.watch_rules();
        let events = Events::default();
        tasks.spawn(events.clone().follow(maps.clone(), stop.clone()));
        let cni = CniCondition::default();
        let add_failures = AddFailures::default();
        let admin = Admin {
            cni: cni.clone(),
            core: core.clone(),
            proxies: proxies.clone(),
            endpoints: Arc::clone(&endpoints),
            epoch,
            events,
            maps: Globals::new(&config.bpf_root),
            builtin: describe(builtin.clone()),
            damaged: Arc::clone(&damaged),
            conditions: conditions.clone(),
            cluster: cluster.clone(),
        };
        tasks.spawn(admin.serve(admin_listener, tasks.clone(), stop.clone()));
        if let Some(listener) = cni_listener {
            let failures = add_failures.clone();
            let server = CniServer::new(core.clone(), Arc::clone(&endpoints), failures);
            tasks.spawn(server.serve(listener, tasks.clone(), stop.clone()));
        }
        if let Some(places) = config.cni_places {
            let mut rules = rules.clone();
            let ready = async move { rules.wait_for(|rules| rules.ready).await.is_ok() };
            tasks.spawn(places.run(cni, ready, stop.clone()));
        }
        if let Some(listener) = metrics_listener {
            let health = Health {
                core: core.clone(),
                proxies,
                endpoints,
                add_failures,
                damaged: damaged.len(),
                maps,
                builtin: builtin.as_ref().map(|proxy| proxy.stats().clone()),
                conditions,
                cluster,
            };
            tasks.spawn(health.serve(listener, tasks.clone(), stop.clone()));
        }
        Ok(Self {
            core,
            rules,
            thread,
            builtin,
            streams,
            tasks,
            stop,
            rim_stop,
        })
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

fn core_config(config: &Config, epoch: &Epoch) -> CoreConfig {
    CoreConfig {
        names_kept_later: true,
        boot_id: epoch.boot_id.clone(),
        start: epoch.start,
        boot_unix_ns: boot_unix_ns(),
        node_name: Some(config.node_name.clone()),
        cluster_blocks: config.cluster_blocks.clone(),
        pod_blocks: config.pod_blocks.clone(),
        service_aliases: config.service_aliases.clone(),
        external_ips: config.external_ips,
        proxy_port: config.proxy_port,
        enable_policy: config.enable_policy,
        enable_ipv4: config.ipv4,
        enable_ipv6: config.ipv6,
        min_ttl: config.min_ttl_seconds(),
        lease_slack: config.lease_slack,
        max_ips_per_name: config.max_ips_per_hostname,
        max_deferred_deletes: config.max_deferred_connection_deletes,
        idle_grace: config.idle_connection_grace,
        restore_grace: config.identity_restore_grace,
        preallocate_identities: config.preallocate_identities,
        max_fqdn_identities: config.max_fqdn_identities,
        refused_prefixes: config.refused_prefixes.clone(),
        max_ips_per_restored_rule: config.max_ips_per_restored_rule,
        policy_map_max: usize::try_from(config.map_sizes.policy).unwrap_or(usize::MAX),
        ipcache_max: usize::try_from(config.map_sizes.ipcache).unwrap_or(usize::MAX),
        reconcile_interval: config.reconcile_interval,
        ..CoreConfig::default()
    }
}

/// Unix time at CLOCK_BOOTTIME 0.
fn boot_unix_ns() -> u64 {
    wall_time::now().saturating_sub(BootTime::now().0)
}

fn restored_rules(found: &Found) -> Vec<RulesOf> {
    let endpoints = found.restored.endpoints.iter();
    endpoints
        .filter_map(|endpoint| {
            endpoint.rules.as_ref().map(|file| RulesOf {
                endpoint: endpoint.id,
                rules: file.rules.clone(),
            })
        })
        .collect()
}

fn describe(builtin: Option<Arc<BuiltinProxy>>) -> Arc<dyn Fn() -> String + Send + Sync> {
    Arc::new(move || {
        builtin
            .as_ref()
            .map_or_else(|| "disabled".to_owned(), |proxy| proxy.describe())
    })
}

fn endpoint_source(
    config: &Config,
    state: &Path,
    restored: Vec<EndpointSpec>,
    gate: Option<Box<dyn Gate>>,
    core: &CoreHandle,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) -> Result<Arc<EndpointBook>> {
    let handle = core.clone();
    let book = EndpointBook::open(
        config.endpoint_dir.clone(),
        CliFile::in_dir(state),
        restored,
        gate,
        move |event| {
            // A stopped core means that the agent is stopping: nothing is lost.
            let _stopped = handle.send_blocking(Event::Endpoints(event));
        },
    )?;
    // Without a directory there is still what was added by command and cannot be resolved yet.
    let watched = config.endpoint_dir.as_deref().unwrap_or(state);
    polls::run(Arc::clone(&book), watched, tasks, stop.clone());
    Ok(book)
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

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::config::{Cli, Command};

    #[test]
    fn the_core_gets_the_values_of_the_flags() {
        let line = [
            "holdfast-agent",
            "run",
            "--identity-restore-grace-period=10m",
            "--tofqdns-preallocate-identities=false",
            "--dns-max-ips-per-restored-rule=7",
            "--tofqdns-endpoint-max-ip-per-hostname=8",
            "--tofqdns-refuse-prefix=10.96.0.0/12,192.0.2.1",
            "--tofqdns-refuse-prefix=fd00::/8",
        ];
        let Command::Run(args) = Cli::try_parse_from(line).unwrap().command else {
            panic!("not run");
        };
        let epoch = Epoch {
            boot_id: "b".to_owned(),
            start: 3,
        };
        let core = core_config(&Config::try_from(*args).unwrap(), &epoch);
        assert_eq!(core.restore_grace, Duration::from_secs(600));
        assert!(!core.preallocate_identities);
        let refused = |text: &str| {
            core.refused_prefixes
                .covering(text.parse().unwrap())
                .is_some()
        };
        assert!(refused("10.100.0.1") && refused("192.0.2.1") && refused("fd00::1"));
        assert!(!refused("169.254.169.254"));
        assert_eq!(core.max_fqdn_identities, Some(8192));
        assert_eq!(core.max_ips_per_restored_rule, 7);
        assert_eq!(core.max_ips_per_name, 8);
        assert_eq!((core.boot_id.as_str(), core.start), ("b", 3));
    }
}
