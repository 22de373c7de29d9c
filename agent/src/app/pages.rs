//! Starts what answers people, the CNI plugin and Prometheus.

use std::sync::Arc;

use super::{Rim, listeners::PageListeners, sources};
use crate::{
    admin::server::Admin,
    cni::{failures::AddFailures, install::CniCondition, server::CniServer},
    config::Config,
    datapath::upkeep::Conditions,
    dnsproxy::BuiltinProxy,
    events::Events,
    health::Health,
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
}

/// Starts them.
pub(super) fn start(config: Config, rim: &Rim, about: About, listeners: PageListeners) {
    let About {
        sources: sources::Started { endpoints, cluster },
        damaged,
        conditions,
        builtin,
        resolver,
    } = about;
    let (tasks, stop) = (&rim.tasks, &rim.stop);
    let events = Events::default();
    tasks.spawn(events.clone().follow(rim.maps.clone(), stop.clone()));
    let cni = CniCondition::default();
    let add_failures = AddFailures::default();
    let admin = Admin {
        cni: cni.clone(),
        core: rim.core.clone(),
        proxies: rim.proxies.clone(),
        endpoints: Arc::clone(&endpoints),
        epoch: rim.epoch.clone(),
        events,
        maps: rim.maps.clone(),
        builtin: describe(builtin.clone()),
        damaged: Arc::clone(&damaged),
        conditions: conditions.clone(),
        cluster: cluster.clone(),
        resolver: resolver.clone(),
    };
    tasks.spawn(admin.serve(listeners.admin, tasks.clone(), stop.clone()));
    if let Some(listener) = listeners.cni {
        let failures = add_failures.clone();
        let server = CniServer::new(rim.core.clone(), Arc::clone(&endpoints), failures);
        tasks.spawn(server.serve(listener, tasks.clone(), stop.clone()));
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
        };
        tasks.spawn(health.serve(listener, tasks.clone(), stop.clone()));
    }
}

fn describe(builtin: Option<Arc<BuiltinProxy>>) -> Arc<dyn Fn() -> String + Send + Sync> {
    Arc::new(move || {
        builtin
            .as_ref()
            .map_or_else(|| "disabled".to_owned(), |proxy| proxy.describe())
    })
}
