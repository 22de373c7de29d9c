//! `/metrics`, `/healthz` and `/readyz`.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use agent_cluster::health::ClusterHealth;
use agent_core::core::Core;
use agent_datapath::{
    events::Counters,
    tunnel::TunnelStatus,
    upkeep::{Conditions, Part},
};
use daemon::{
    descriptors::Descriptors,
    http_server::{self, OPENMETRICS, Socket, TEXT, answer},
};
use dns_policy::boot_time::BootTime;
use holdfast_sdp::stats::Stats;
use http_body_util::Full;
use hyper::{Request, Response, StatusCode, body::Bytes};
use shared_maps::user::Globals;
use tokio::net::TcpListener;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    admin::standby::Succession,
    cni::reports::PluginReports,
    endpoint::source::EndpointBook,
    identities::view::Identities,
    listener::{Listener, Listeners},
    metrics::{self, Scrape, owner::OwnerScrape, resolver::ResolverScrape},
    proxies::Proxies,
    resolver::task::ResolverHandle,
    runner::CoreHandle,
};

/// A core that answers later than this is not healthy.
const ALIVE: Duration = Duration::from_secs(5);

/// Sources of `/metrics`, `/healthz` and `/readyz`.
#[derive(Clone)]
pub(crate) struct Health {
    pub core: CoreHandle,
    pub proxies: Proxies,
    pub endpoints: Arc<EndpointBook>,
    /// What the CNI plugin reports.
    pub plugin: PluginReports,
    /// Damaged files set aside at the start.
    pub damaged: usize,
    /// Pinned maps, for the datapath's counters.
    pub maps: Globals,
    /// Counters of the built-in proxy, where one runs.
    pub builtin: Option<Stats>,
    /// State of the node's part of the datapath.
    pub conditions: Conditions,
    /// State of the watches, if the cluster is a source.
    pub cluster: Option<ClusterHealth>,
    /// Where names of EgressFirewalls are refreshed.
    pub resolver: Option<ResolverHandle>,
    /// What makes CiliumIdentity objects.
    pub identities: Option<Identities>,
    /// The tunnel between nodes; `None` = this node has no part in it.
    pub tunnel: Option<TunnelStatus>,
    /// Limits and counters of the connections of every socket.
    pub listeners: Listeners,
    /// Who owned the node before, and who does next.
    pub succession: Succession,
}

impl Health {
    /// Serves until stopped. Its limits keep descriptors free for the agent's own work.
    pub(crate) async fn serve(
        self,
        listener: TcpListener,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) {
        let admission = self.listeners.admission(Listener::Metrics);
        let service = move |request| {
            let health = self.clone();
            async move { health.answer(&request).await }
        };
        http_server::serve(Socket::Tcp(listener), admission, service, tasks, stop).await;
    }

    async fn answer<B>(&self, request: &Request<B>) -> Response<Full<Bytes>> {
        match request.uri().path() {
            "/metrics" => self.metrics().await,
            "/healthz" => match tokio::time::timeout(ALIVE, self.core.summary()).await {
                Ok(Ok(_)) => answer(StatusCode::OK, TEXT, "ok\n"),
                Ok(Err(error)) => {
                    answer(StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("{error}\n"))
                }
                Err(_) => answer(
                    StatusCode::SERVICE_UNAVAILABLE,
                    TEXT,
                    "the core did not answer within 5 s\n",
                ),
            },
            "/readyz" if self.ready() => answer(
                StatusCode::OK,
                TEXT,
                format!(
                    "ready: sources are synced, rules are published\n{}",
                    self.kernel()
                ),
            ),
            "/readyz" => answer(
                StatusCode::SERVICE_UNAVAILABLE,
                TEXT,
                format!(
                    "not ready: policies or endpoints are not synced yet\n{}",
                    self.kernel()
                ),
            ),
            _ => answer(
                StatusCode::NOT_FOUND,
                TEXT,
                "there is /metrics, /healthz and /readyz\n",
            ),
        }
    }

    async fn resolver(&self) -> Option<ResolverScrape> {
        let resolver = self.resolver.as_ref()?;
        Some(ResolverScrape {
            view: resolver.state().await.unwrap_or_default(),
            counters: Arc::clone(resolver.counters()),
        })
    }

    async fn owner(&self) -> OwnerScrape {
        let takeovers = self.succession.record.takeovers();
        OwnerScrape {
            standby_missing: self.succession.is_missing().await,
            ..OwnerScrape::of(&takeovers, BootTime::now())
        }
    }

    /// How programs are attached, and what the kernel lacks.
    fn kernel(&self) -> String {
        let kernel = self.conditions.kernel();
        let lacks = kernel.lacks.iter().map(|lack| format!("{}\n", lack.line()));
        format!("programs: {}\n{}", kernel.line(), lacks.collect::<String>())
    }

    fn ready(&self) -> bool {
        self.proxies.watch_rules().borrow().ready
    }

    async fn metrics(&self) -> Response<Full<Bytes>> {
        let summary = match self.core.summary().await {
            Ok(summary) => summary,
            Err(error) => {
                return answer(StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("{error}\n"));
            }
        };
        let without = match self.cluster {
            Some(_) => self.core.inspect(Core::pods_without_endpoint).await,
            None => Ok(BTreeSet::new()),
        };
        let mut unmanaged = without.unwrap_or_default();
        let lacking = self.endpoints.unmanaged().into_iter();
        unmanaged.extend(lacking.map(|lacking| lacking.pod.to_string()));
        let scrape = Scrape {
            summary,
            unmanaged: unmanaged.len(),
            started_open: self.endpoints.started_open().len(),
            nodes_without_agent: self
                .cluster
                .as_ref()
                .map_or(0, |cluster| cluster.nodes_without_agent().len()),
            add_failures: self.plugin.failures.clone(),
            fail_open_namespaces: self.plugin.fail_open(),
            ready: self.ready(),
            damaged: self.damaged,
            packets: Counters::open(&self.maps)
                .and_then(|counters| counters.read())
                .unwrap_or_default(),
            unresolved: self.endpoints.unresolved().len(),
            closed_interfaces: self.endpoints.closed_interfaces(),
            unguarded_pods: self.endpoints.further_interfaces().len(),
            conditions: Part::ALL
                .map(|part| (part, self.conditions.of(part)))
                .to_vec(),
            resolver: self.resolver().await,
            identities: self.identities.clone(),
            tunnel: self.tunnel.clone(),
            owner: self.owner().await,
            listeners: self.listeners.counts(),
            open_descriptors: Descriptors::open().ok(),
            max_descriptors: self.listeners.limit(),
            watches: self
                .cluster
                .as_ref()
                .map(ClusterHealth::watches)
                .unwrap_or_default(),
        };
        match metrics::text(scrape, &self.proxies, self.builtin.as_ref()) {
            Ok(text) => answer(StatusCode::OK, OPENMETRICS, text),
            Err(_) => answer(
                StatusCode::INTERNAL_SERVER_ERROR,
                TEXT,
                "the metrics cannot be written\n",
            ),
        }
    }
}
