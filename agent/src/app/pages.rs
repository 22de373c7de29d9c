//! Starts what answers people, the CNI plugin and Prometheus.

use std::{sync::Arc, time::Instant};

use agent_cluster::api::{client::Api, startup_taint::StartupTaint};
use agent_datapath::upkeep::Conditions;

use super::{Rim, listeners::PageListeners, sources};
use crate::{
    admin::server::Admin,
    cni::{failures::AddFailures, install::CniCondition, server::CniServer},
    config::Config,
    dir_writers::OwnDirectory,
    dnsproxy::BuiltinProxy,
    events::Events,
    health::Health,
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
    /// Limits of the sockets.
    pub(super) limits: Listeners,
    pub(super) api: Option<Api>,
}

/// Starts them.
pub(super) fn start(config: Config, rim: &Rim, about: About, listeners: PageListeners) {
    let About {
        sources: sources::Started { endpoints, cluster },
        damaged,
        conditions,
        builtin,
        resolver,
        limits,
        api,
    } = about;
    let (tasks, stop) = (&rim.tasks, &rim.stop);
    let events = Events::default();
    tasks.spawn(events.clone().follow(rim.maps.clone(), stop.clone()));
    let cni = CniCondition::default();
    let add_failures = AddFailures::default();
    let admin = Admin {
        directories: directories(&config),
        cni: cni.clone(),
        core: rim.core.clone(),
        proxies: rim.proxies.clone(),
        endpoints: Arc::clone(&endpoints),
        epoch: rim.epoch.clone(),
        started: Instant::now(),
        events,
        maps: rim.maps.clone(),
        builtin: describe(builtin.clone()),
        damaged: Arc::clone(&damaged),
        state_dir: config.state_dir.clone(),
        conditions: conditions.clone(),
        cluster: cluster.clone(),
        resolver: resolver.clone(),
        few_descriptors: limits.problem(),
    };
    let admission = limits.admission(Listener::Admin);
    tasks.spawn(admin.serve(listeners.admin, admission, tasks.clone(), stop.clone()));
    if let Some(listener) = listeners.cni {
        let failures = add_failures.clone();
        let server = CniServer::new(rim.core.clone(), Arc::clone(&endpoints), failures);
        let admission = limits.admission(Listener::Cni);
        tasks.spawn(server.serve(listener, admission, tasks.clone(), stop.clone()));
    }
    if let (Some(api), Some(health), Some(key)) = (api, cluster.clone(), config.startup_taint) {
        let taint = StartupTaint {
            api,
            node: config.node_name,
            key,
            health,
        };
        let installs = config.cni_places.is_some().then(|| cni.clone());
        let mut rules = rim.proxies.watch_rules();
        let ready = async move {
            let is_ready = rules.wait_for(|rules| rules.ready).await.is_ok();
            if let Some(cni) = installs.filter(|_| is_ready) {
                cni.in_place().await;
            }
            is_ready
        };
        tasks.spawn(taint.run(ready, stop.clone()));
    }
    if let Some(places) = config.cni_places {
        let mut rules = rim.proxies.watch_rules();
        let ready = async move { rules.wait_for(|rules| rules.ready).await.is_ok() };
        tasks.spawn(places.run(cni, ready, stop.clone()));
    }
    if let Some(listener) = listeners.metrics {
        let health = Health {
            core: rim.core.clone(),
            proxies: rim.proxies.clone(),
            endpoints,
            add_failures,
            damaged: damaged.len(),
            maps: rim.maps.clone(),
            builtin: builtin.as_ref().map(|proxy| proxy.stats().clone()),
            conditions,
            cluster,
            resolver,
            listeners: limits,
        };
        tasks.spawn(health.serve(listener, tasks.clone(), stop.clone()));
    }
}

/// Directories whose files decide what the agent does. The proxies' group may write into that of the
/// state: it has directories of its own there.
fn directories(config: &Config) -> Vec<OwnDirectory> {
    let policies = config.policy_dir.iter().map(|path| OwnDirectory {
        flag: "--policy-dir",
        path: path.clone(),
        group: None,
        effect: "decides policy",
    });
    let endpoints = config.endpoint_dir.iter().map(|path| OwnDirectory {
        flag: "--endpoint-dir",
        path: path.clone(),
        group: None,
        effect: "decides which pods are under policy, and with which labels",
    });
    let state = OwnDirectory {
        flag: "--state-dir",
        path: config.state_dir.clone(),
        group: Some(config.sdp_group),
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
