//! Starts what answers people, the CNI plugin and Prometheus.

use std::{sync::Arc, time::Instant};

use agent_cluster::api::{client::Api, startup_taint::StartupTaint};
use agent_datapath::{tunnel::TunnelStatus, upkeep::Conditions};
use tokio::net::{TcpListener, UnixListener};

use super::{Rim, listeners::PageListeners, sources};
use crate::{
    admin::{server::Admin, standby::Succession},
    cni::{endpoints::Endpoints, install::CniCondition, reports::PluginReports, server::CniServer},
    config::Config,
    dir_writers::OwnDirectory,
    dnsproxy::BuiltinProxy,
    events::Events,
    health::Health,
    identities::view::Identities,
    listener::{Listener, Listeners},
    resolver::task::ResolverHandle,
};

/// What the pages are about, in addition to the core and the proxies.
pub(super) struct About {
    pub(super) sources: sources::Started,
    /// Files found damaged at the start.
    pub(super) damaged: Arc<Vec<String>>,
    pub(super) conditions: Conditions,
    pub(super) builtin: Option<Arc<BuiltinProxy>>,
    /// Where names of EgressFirewalls are refreshed.
    pub(super) resolver: Option<ResolverHandle>,
    /// What makes CiliumIdentity objects; none = this agent makes none.
    pub(super) identities: Option<Identities>,
    /// The tunnel between nodes; none = this node has no part in it.
    pub(super) tunnel: Option<TunnelStatus>,
    /// Limits on the connections of each socket.
    pub(super) limits: Listeners,
    pub(super) api: Option<Api>,
    /// Who owned the node before, and who does next.
    pub(super) succession: Succession,
}

/// Starts the admin interface, and the CNI and metrics servers if they are configured.
pub(super) fn start(config: Config, rim: &Rim, about: About, listeners: PageListeners) {
    let cni = CniCondition::default();
    let reports = PluginReports::default();
    serve_admin(&config, rim, &about, cni.clone(), listeners.admin);
    if let Some(listener) = listeners.cni {
        serve_cni(rim, &about, reports.clone(), listener);
    }
    let places = config.flags.cni.plugin.places();
    let in_place = places.is_some().then(|| cni.clone());
    let cluster = about.sources.cluster.clone();
    let key = config.startup_taint().map(str::to_owned);
    if let (Some(api), Some(health), Some(key)) = (about.api.clone(), cluster, key) {
        let taint = StartupTaint {
            api,
            node: config.node_name,
            key,
            health,
        };
        let ready = ready_with_cni(rim, in_place);
        rim.tasks.spawn(taint.run(ready, rim.stop.clone()));
    }
    if let Some(places) = places {
        let ready = ready_with_cni(rim, None);
        rim.tasks.spawn(places.run(cni, ready, rim.stop.clone()));
    }
    if let Some(listener) = listeners.metrics {
        serve_metrics(rim, about, reports, listener);
    }
}

fn serve_admin(
    config: &Config,
    rim: &Rim,
    about: &About,
    cni: CniCondition,
    listener: UnixListener,
) {
    let (tasks, stop) = (&rim.tasks, &rim.stop);
    let events = Events::default();
    tasks.spawn(events.clone().follow(rim.maps.clone(), stop.clone()));
    let admin = Admin {
        directories: directories(config),
        cni,
        core: rim.core.clone(),
        proxies: rim.proxies.clone(),
        endpoints: Arc::clone(&about.sources.endpoints),
        epoch: rim.epoch.clone(),
        started: Instant::now(),
        events,
        maps: rim.maps.clone(),
        builtin: describe(about.builtin.clone()),
        damaged: Arc::clone(&about.damaged),
        state_dir: config.flags.state_dir.clone(),
        succession: about.succession.clone(),
        conditions: about.conditions.clone(),
        cluster: about.sources.cluster.clone(),
        resolver: about.resolver.clone(),
        identities: about.identities.clone(),
        tunnel: about.tunnel.clone(),
        few_descriptors: about.limits.problem(),
    };
    let admission = about.limits.admission(Listener::Admin);
    tasks.spawn(admin.serve(listener, admission, tasks.clone(), stop.clone()));
}

fn serve_cni(rim: &Rim, about: &About, reports: PluginReports, listener: UnixListener) {
    let (tasks, stop) = (&rim.tasks, &rim.stop);
    let endpoints = Endpoints {
        core: rim.core.clone(),
        book: Arc::clone(&about.sources.endpoints),
    };
    let server = CniServer::new(endpoints, reports);
    let admission = about.limits.admission(Listener::Cni);
    tasks.spawn(server.serve(listener, admission, tasks.clone(), stop.clone()));
}

fn serve_metrics(rim: &Rim, about: About, reports: PluginReports, listener: TcpListener) {
    let health = Health {
        core: rim.core.clone(),
        proxies: rim.proxies.clone(),
        endpoints: about.sources.endpoints,
        plugin: reports,
        damaged: about.damaged.len(),
        maps: rim.maps.clone(),
        builtin: about.builtin.as_ref().map(|proxy| proxy.stats().clone()),
        conditions: about.conditions,
        cluster: about.sources.cluster,
        resolver: about.resolver,
        identities: about.identities,
        tunnel: about.tunnel,
        listeners: about.limits,
        succession: about.succession,
    };
    let (tasks, stop) = (&rim.tasks, &rim.stop);
    tasks.spawn(health.serve(listener, tasks.clone(), stop.clone()));
}

/// Waits until the agent is ready, and the CNI plugin is in its place if `cni` is given. The result
/// is false if the agent stops before that.
fn ready_with_cni(
    rim: &Rim,
    cni: Option<CniCondition>,
) -> impl Future<Output = bool> + Send + 'static + use<> {
    let mut rules = rim.proxies.watch_rules();
    async move {
        let is_ready = rules.wait_for(|rules| rules.ready).await.is_ok();
        if let Some(cni) = cni.filter(|_| is_ready) {
            cni.in_place().await;
        }
        is_ready
    }
}

/// Directories whose files decide what the agent does. The proxies' group may write into that of the
/// state: it has directories of its own there.
fn directories(config: &Config) -> Vec<OwnDirectory> {
    let policies = config.flags.policy_dir.iter().map(|path| OwnDirectory {
        flag: "--policy-dir",
        path: path.clone(),
        group: None,
        effect: "decides policy",
    });
    let endpoints = config.flags.endpoint_dir.iter().map(|path| OwnDirectory {
        flag: "--endpoint-dir",
        path: path.clone(),
        group: None,
        effect: "decides which pods are under policy, and with which labels",
    });
    let state = OwnDirectory {
        flag: "--state-dir",
        path: config.flags.state_dir.clone(),
        group: Some(config.flags.sdp_group),
        effect: "decides what a restart restores",
    };
    policies.chain(endpoints).chain([state]).collect()
}

fn describe(builtin: Option<Arc<BuiltinProxy>>) -> Arc<dyn Fn() -> String + Send + Sync> {
    Arc::new(move || {
        builtin
            .as_ref()
            .map_or_else(|| "disabled".to_owned(), |proxy| proxy.describe())
    })
}
