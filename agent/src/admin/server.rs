//! Requests to the admin socket.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use agent_cluster::health::ClusterHealth;
use agent_core::{
    core::{
        Core, Event,
        clean::Unrevoked,
        event::CleanNames,
        snapshot::{ENDPOINT, EndpointView},
    },
    policy::{
        ask::Trace,
        trace::{FlowDirection, Port},
    },
};
use agent_datapath::{tunnel::TunnelStatus, upkeep::Conditions};
use daemon::http_server::{self, Admission, Socket};
use dns_policy::{boot_time::BootTime, epoch::Epoch, pattern, rule::NameRule};
use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
};
use serde::{Serialize, de::DeserializeOwned};
use shared_maps::user::Globals;
use tokio::net::UnixListener;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{
    clean,
    model::{Done, Policies, Why},
    problems,
    query::parameter,
    standby::{OWNER, STEP_ASIDE, Succession},
    why::{self, Question},
};
use crate::{
    cni::install::CniCondition,
    dir_writers::OwnDirectory,
    endpoint::source::{EndpointBook, EndpointDocument},
    events::{Events, Packets},
    identities::view::Identities,
    proxies::Proxies,
    refusal::{self, Refusal},
    resolver::task::ResolverHandle,
    runner::{CoreAway, CoreHandle},
};

/// Maximum bytes of a request's body.
const BODY: usize = 64 << 10;
/// How long `fqdn cache clean` waits until proxies gave their leases back.
const GIVE_BACK: Duration = Duration::from_secs(1);
/// How long a change waits until the core has carried it out.
const SETTLE: Duration = Duration::from_secs(5);
/// Maximum seconds that a request for events waits.
const LONG_POLL: u64 = 10;
const POLL: Duration = Duration::from_millis(10);

/// Data and actions of the interface.
#[derive(Clone)]
pub struct Admin {
    pub core: CoreHandle,
    pub proxies: Proxies,
    pub endpoints: Arc<EndpointBook>,
    pub epoch: Epoch,
    pub started: Instant,
    /// Packets that the datapath reported.
    pub events: Events,
    pub maps: Globals,
    /// State of the built-in proxy, as text.
    pub builtin: Arc<dyn Fn() -> String + Send + Sync>,
    /// Files found damaged at the start.
    pub damaged: Arc<Vec<String>>,
    pub state_dir: PathBuf,
    /// Who owned the node before, and who does next.
    pub succession: Succession,
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
    /// Why new pods may not get the CNI plugin.
    pub cni: CniCondition,
    /// The limit on descriptors is too low: why, and the remedy.
    pub few_descriptors: Option<String>,
    /// Directories whose files decide what the agent does.
    pub directories: Vec<OwnDirectory>,
}

impl Admin {
    /// Serves connections of `listener` until stopped; each on a task of `tasks`.
    pub async fn serve(
        self,
        listener: UnixListener,
        admission: Admission,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) {
        let service = move |request| {
            let admin = self.clone();
            async move { admin.answer(request).await }
        };
        http_server::serve(Socket::Unix(listener), admission, service, tasks, stop).await;
    }

    async fn answer(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        refusal::answer(self.route(request).await)
    }

    async fn route(&self, request: Request<Incoming>) -> Result<Vec<u8>, Refusal> {
        let method = request.method().clone();
        let path = request.uri().path().to_owned();
        let query = request.uri().query().map(str::to_owned);
        let get = method == Method::GET;
        match path.as_str() {
            "/v1/status" if get => render(&self.status().await?),
            STEP_ASIDE if method == Method::POST => render(&self.succession.step_aside().await?),
            OWNER if get => render(&self.succession.record.view()),
            "/v1/endpoints" if get => render(&self.core.snapshot().await?.endpoints),
            "/v1/endpoint" if get => {
                let called = required(query.as_deref(), "called")?;
                render(&self.endpoint(&called).await?)
            }
            "/v1/policies" if get => {
                let snapshot = self.core.snapshot().await?;
                render(&Policies {
                    policies: snapshot.policies,
                    rejected: snapshot.rejected,
                })
            }
            "/v1/identities" if get => render(&self.core.snapshot().await?.identities),
            "/v1/ipcache" if get => render(&self.core.snapshot().await?.ipcache),
            "/v1/selectors" if get => render(&self.core.snapshot().await?.selectors),
            "/v1/names" if get => render(&self.core.snapshot().await?.names),
            "/v1/events" if get => render(&self.events_after(query.as_deref()).await?),
            "/v1/resolver" if get => render(&self.resolver_objects().await?),
            "/v1/resolver/lookup" if get => {
                let name = required(query.as_deref(), "name")?;
                render(&self.resolver_lookup(&name).await?)
            }
            "/v1/trace" if get => render(&self.trace(query.as_deref()).await?),
            "/v1/why" if get => render(&self.why(query.as_deref()).await?),
            "/v1/endpoints" if method == Method::POST => {
                let document = body(request, "an endpoint").await?;
                render(&self.add(document).await?)
            }
            "/v1/containers" if method == Method::POST => self.containers(request).await,
            "/v1/endpoints" if method == Method::DELETE => {
                let endpoint = required(query.as_deref(), "endpoint")?;
                render(&self.remove(&endpoint).await?)
            }
            "/v1/names" if method == Method::DELETE => {
                render(&self.clean(parameter(query.as_deref(), "pattern")).await?)
            }
            _ => Err(Refusal::not_found(format!(
                "{method} {path} is not known; is the client of the same release?"
            ))),
        }
    }

    async fn events_after(&self, query: Option<&str>) -> Result<Packets, Refusal> {
        let number = |name| parameter(query, name).and_then(|n| n.parse().ok());
        let wait = Duration::from_secs(number("wait").unwrap_or(0).min(LONG_POLL));
        let mut found = self.events.after(number("after").unwrap_or(0), wait).await;
        if !found.packets.is_empty() {
            let mut packets = std::mem::take(&mut found.packets);
            let describe = move |core: &Core| {
                core.describe(&mut packets);
                packets
            };
            found.packets = self.core.inspect(describe).await?;
        }
        Ok(found)
    }

    async fn trace(&self, query: Option<&str>) -> Result<Trace, Refusal> {
        let port = required(query, "port")?.parse::<Port>();
        let port = port.map_err(|error| Refusal::bad_request(error.to_string()))?;
        let (from, to) = (required(query, "from")?, required(query, "to")?);
        Ok(why::trace(&self.core, &from, &to, port).await?)
    }

    async fn why(&self, query: Option<&str>) -> Result<Why, Refusal> {
        let bad = |reason: String| Refusal::bad_request(reason);
        let port = parameter(query, "port");
        let port = port.map(|text| text.parse::<Port>()).transpose();
        let direction = match parameter(query, "direction").as_deref() {
            None | Some("egress") => FlowDirection::Egress,
            Some("ingress") => FlowDirection::Ingress,
            Some(other) => return Err(bad(format!("direction {other} is not known"))),
        };
        let question = Question {
            endpoint: required(query, "endpoint")?,
            target: why::target(&self.core, &required(query, "target")?).await?,
            port: port.map_err(|error| bad(error.to_string()))?,
            direction,
        };
        let learning = problems::learning(&self.proxies.views());
        Ok(why::answer(&self.core, &self.maps, learning, question).await?)
    }

    /// Adds an endpoint and waits until the datapath enforces its policy.
    async fn add(&self, document: EndpointDocument) -> Result<EndpointView, Refusal> {
        let endpoints = Arc::clone(&self.endpoints);
        let spec = tokio::task::spawn_blocking(move || endpoints.add(document))
            .await
            .map_err(|error| Refusal::internal(&error))??;
        let deadline = BootTime::now().nanos() + nanoseconds(SETTLE);
        loop {
            let key = spec.key.clone();
            let look = move |core: &Core| (core.snapshot(), core.awaits_number(&key));
            let (snapshot, awaits_number) = self.core.inspect(look).await?;
            if awaits_number && BootTime::now().nanos() <= deadline {
                // What the endpoint waits for comes soon, from the cluster or from this node.
                tokio::time::sleep(POLL).await;
                continue;
            }
            let refused = snapshot.rejected.into_iter().find(|refused| {
                refused.source == ENDPOINT && refused.key.as_ref() == Some(&spec.key)
            });
            if let Some(refused) = refused {
                return Err(Refusal::new(
                    StatusCode::CONFLICT,
                    format!(
                        "endpoint {} is added, but not in force: {}",
                        spec.key, refused.reason
                    ),
                ));
            }
            let found = snapshot
                .endpoints
                .into_iter()
                .find(|view| view.key == spec.key && view.state == "ready");
            match found {
                Some(view) => {
                    return match &view.problem {
                        None => Ok(view),
                        Some(problem) => Err(Refusal::new(
                            StatusCode::INTERNAL_SERVER_ERROR,
                            format!(
                                "endpoint {} is added, but not in force: {problem}; it is tried again",
                                view.id
                            ),
                        )),
                    };
                }
                None if BootTime::now().nanos() > deadline => {
                    return Err(Refusal::new(
                        StatusCode::GATEWAY_TIMEOUT,
                        format!(
                            "endpoint {} is added, but not in force after {} s; see `status`",
                            spec.key,
                            SETTLE.as_secs()
                        ),
                    ));
                }
                None => tokio::time::sleep(POLL).await,
            }
        }
    }

    /// The endpoint with this name or number.
    async fn endpoint(&self, text: &str) -> Result<EndpointView, Refusal> {
        let id = why::called(&self.core, text).await?;
        let view = match id {
            Some(id) => {
                self.core
                    .inspect(move |core| core.endpoint_view(id))
                    .await?
            }
            None => None,
        };
        match view {
            Some(view) => Ok(view),
            None => Err(why::no_endpoint(&self.core, text.to_owned()).await.into()),
        }
    }

    /// Removes an endpoint. If it is not in force, only its key names it.
    async fn remove(&self, endpoint: &str) -> Result<Done, Refusal> {
        let unresolved = self.endpoints.unresolved();
        let key = match unresolved.iter().any(|one| one.key == endpoint) {
            true => endpoint.to_owned(),
            false => self.endpoint(endpoint).await?.key,
        };
        let endpoints = Arc::clone(&self.endpoints);
        let removed = key.clone();
        tokio::task::spawn_blocking(move || endpoints.remove(&key))
            .await
            .map_err(|error| Refusal::internal(&error))??;
        // The core handles its queue in order: an answer means that the removal was carried out.
        self.core.summary().await?;
        Ok(Done {
            message: format!("removed {removed}"),
            ..Done::default()
        })
    }

    async fn clean(&self, pattern: Option<String>) -> Result<Done, Refusal> {
        if let Some(pattern) = &pattern {
            let valid = pattern::validate_rule(&NameRule::Pattern(pattern.clone()));
            valid.map_err(|error| Refusal::bad_request(error.to_string()))?;
        }
        let before = self.core.summary().await?.names_live;
        let clean = CleanNames {
            pattern: pattern.clone(),
            endpoint: None,
        };
        self.core.send(Event::CleanNames(clean)).await?;
        let after = self.core.summary().await?.names_live;
        let forgot = clean::forgot(pattern.as_deref(), before, after);
        let left = self.unrevoked(pattern).await?;
        Ok(clean::done(forgot, &left, &self.proxies.views()))
    }

    /// Cleaned pairs that are still open after the proxies had time to return their leases.
    async fn unrevoked(&self, pattern: Option<String>) -> Result<Vec<Unrevoked>, CoreAway> {
        let deadline = BootTime::now().nanos() + nanoseconds(GIVE_BACK);
        loop {
            let pattern = pattern.clone();
            let unrevoked = move |core: &Core| core.unrevoked(pattern.as_deref());
            let left = self.core.inspect(unrevoked).await?;
            if left.is_empty() || BootTime::now().nanos() > deadline {
                return Ok(left);
            }
            tokio::time::sleep(POLL).await;
        }
    }
}

fn required(query: Option<&str>, name: &str) -> Result<String, Refusal> {
    let missing = || Refusal::bad_request(format!("parameter {name} is missing"));
    parameter(query, name).ok_or_else(missing)
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

pub(super) fn render(value: &impl Serialize) -> Result<Vec<u8>, Refusal> {
    serde_json::to_vec(value).map_err(|error| Refusal::internal(&error))
}

pub(super) async fn body<T: DeserializeOwned>(
    request: Request<Incoming>,
    what: &str,
) -> Result<T, Refusal> {
    let body = refusal::body(request, BODY).await?;
    let bad = |error| Refusal::bad_request(format!("the request is not {what}: {error}"));
    serde_json::from_slice(&body).map_err(bad)
}
