//! What `netpol run` answers: commands over its unix socket, probes and Prometheus over TCP.

use std::{collections::BTreeMap, sync::Arc};

use agent_cluster::{health::ClusterHealth, own_interfaces};
use agent_core::policy::trace::Port;
use agent_datapath::nf_tables::{Connection, NftablesError};
use daemon::http_server::{self, Admission, OPENMETRICS, Socket, TEXT, answer};
use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
};
use netpol::render::{nft::TABLE, ruleset::TableFamily};
use serde::Serialize;
use tokio::net::{TcpListener, UnixListener};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    metrics::{Counters, NetpolScrape},
    model::NetpolStatus,
    state::Shared,
};
use crate::{
    admin::{problems, query::parameter},
    cni::{install::CniCondition, reports::PluginReports},
    refusal::{self, Refusal},
};

/// Sources of all answers.
#[derive(Clone)]
pub(super) struct Pages {
    pub(super) shared: Arc<Shared>,
    pub(super) counters: Counters,
    /// The watches, if the cluster is a source.
    pub(super) cluster: Option<ClusterHealth>,
    /// Files found damaged at the start.
    pub(super) damaged: Arc<Vec<String>>,
    pub(super) cni: Plugin,
}

/// The CNI plugin's place on the node, and the counts of its requests.
#[derive(Clone, Debug, Default)]
pub(super) struct Plugin {
    /// Whether new pods get the plugin.
    pub(super) condition: CniCondition,
    pub(super) reports: PluginReports,
}

/// The sockets of `netpol run`.
pub(super) struct Listeners {
    pub(super) admin: UnixListener,
    pub(super) metrics: Option<TcpListener>,
    pub(super) cni: Option<UnixListener>,
}

impl Pages {
    /// Serves until stopped.
    pub(super) fn start(
        self,
        admin: UnixListener,
        metrics: Option<TcpListener>,
        tasks: &TaskTracker,
        stop: &CancellationToken,
    ) {
        let pages = self.clone();
        let commands = move |request| {
            let pages = pages.clone();
            async move { refusal::answer(pages.command(&request).await) }
        };
        let socket = Socket::Unix(admin);
        let served = http_server::serve(
            socket,
            Admission::default(),
            commands,
            tasks.clone(),
            stop.clone(),
        );
        tasks.spawn(served);
        if let Some(listener) = metrics {
            let probes = move |request| {
                let pages = self.clone();
                async move { pages.probe(&request).await }
            };
            let socket = Socket::Tcp(listener);
            let served = http_server::serve(
                socket,
                Admission::default(),
                probes,
                tasks.clone(),
                stop.clone(),
            );
            tasks.spawn(served);
        }
    }

    async fn command(&self, request: &Request<Incoming>) -> Result<Vec<u8>, Refusal> {
        let (path, query) = (request.uri().path(), request.uri().query());
        match path {
            _ if request.method() != Method::GET => Err(unknown(request)),
            "/v1/netpol/status" => render(&self.status().await),
            "/v1/netpol/pods" => render(&self.shared.state.lock().pods()),
            "/v1/netpol/why" => {
                let wanted = |name| {
                    let missing = || Refusal::bad_request(format!("parameter {name} is missing"));
                    parameter(query, name).ok_or_else(missing)
                };
                let (from, to) = (wanted("from")?, wanted("to")?);
                let port = parameter(query, "port").map(|port| port.parse::<Port>());
                let port = port.transpose();
                let port = port.map_err(|error| Refusal::bad_request(error.to_string()))?;
                let own = own_interfaces::list().map_err(|error| Refusal::internal(&error))?;
                let why = self.shared.state.lock().why(&own.own, &from, &to, port);
                render(&why.map_err(|error| Refusal::not_found(error.to_string()))?)
            }
            _ => Err(unknown(request)),
        }
    }

    async fn status(&self) -> NetpolStatus {
        let counted = tokio::task::spawn_blocking(counters).await;
        let mut status = self.shared.state.lock().status();
        status.dropped = counted.ok().and_then(Result::ok);
        status.repairs = self.counters.repairs();
        let cluster = self.cluster.as_ref().map(ClusterHealth::view);
        status
            .problems
            .extend(cluster.iter().flat_map(problems::cluster_source));
        status
            .problems
            .extend(cluster.iter().filter_map(problems::not_reported));
        status
            .problems
            .extend(cluster.iter().filter_map(problems::tainted));
        status.problems.extend(self.damaged.iter().cloned());
        status.problems.extend(self.cni.condition.problem());
        status.cluster = cluster;
        status
    }

    async fn probe(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        match request.uri().path() {
            "/metrics" => self.metrics().await,
            "/healthz" => {
                let is_alive = self.shared.state.lock().force.is_alive();
                match is_alive {
                    true => answer(StatusCode::OK, TEXT, "ok\n"),
                    false => answer(
                        StatusCode::SERVICE_UNAVAILABLE,
                        TEXT,
                        "the task that writes the table does not run\n",
                    ),
                }
            }
            "/readyz" => {
                let status = self.shared.state.lock().status();
                match status.ready {
                    true => answer(StatusCode::OK, TEXT, "ready: the policies are in force\n"),
                    false => {
                        let problems = status.problems.join("\n");
                        let text =
                            format!("not ready: the policies are not in force\n{problems}\n");
                        answer(StatusCode::SERVICE_UNAVAILABLE, TEXT, text)
                    }
                }
            }
            _ => answer(
                StatusCode::NOT_FOUND,
                TEXT,
                "there is /metrics, /healthz and /readyz\n",
            ),
        }
    }

    async fn metrics(&self) -> Response<Full<Bytes>> {
        let scrape = NetpolScrape {
            status: Arc::new(self.status().await),
            counters: self.counters.clone(),
            plugin: self.cni.reports.clone(),
            watches: self
                .cluster
                .as_ref()
                .map(ClusterHealth::watches)
                .unwrap_or_default(),
        };
        match scrape.text() {
            Ok(text) => answer(StatusCode::OK, OPENMETRICS, text),
            Err(_) => answer(
                StatusCode::INTERNAL_SERVER_ERROR,
                TEXT,
                "the metrics cannot be written\n",
            ),
        }
    }
}

/// Packets and frames that each counter of the tables has counted.
fn counters() -> Result<BTreeMap<String, u64>, NftablesError> {
    let mut kernel = Connection::open()?;
    let mut all = kernel.counters(TableFamily::Inet, TABLE)?;
    // A kernel without the family lists none.
    all.extend(
        kernel
            .counters(TableFamily::Bridge, TABLE)
            .into_iter()
            .flatten(),
    );
    Ok(all)
}

fn unknown(request: &Request<Incoming>) -> Refusal {
    let (method, path) = (request.method(), request.uri().path());
    Refusal::not_found(format!(
        "{method} {path} is not known; is the client of the same release, and the socket that of `netpol run`?"
    ))
}

fn render(value: &impl Serialize) -> Result<Vec<u8>, Refusal> {
    serde_json::to_vec(value).map_err(|error| Refusal::internal(&error))
}
