//! Starts what feeds the core: the node's addresses, endpoints, documents and the cluster.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use agent_cluster::{
    Here, Watches,
    api::client::{self, Api},
    health::ClusterHealth,
    listing_file::Origin,
    own_interfaces::{self, OwnInterfaces},
    relay, resource,
};
use agent_core::{
    core::{Event, router::Router},
    endpoint::spec::EndpointSpec,
    high_scale::objects::HighScaleView,
    kubernetes::{book::Book, labels::LabelFilter, local_pods::LocalPods, unattended::Unattended},
    tunnel_mode::TunnelMode,
};
use agent_datapath::closed::Gate;
use anyhow::{Context as _, Result};
use tokio::sync::{oneshot, watch};

use super::Rim;
use crate::{
    config::Config,
    document_source::{self, Sources, core_feed::CoreFeed},
    endpoint::{
        container::Containers,
        source::{EndpointBook, cli::CliFile, polls, taken_in::PodSource},
    },
    node,
    policy_dir::PolicyDir,
    resolver::store::feed::Feed,
    watched_dir::WatchedDir,
};

/// Inputs of the sources that feed the core.
pub(super) struct From {
    pub(super) state: PathBuf,
    /// Watch and reader of `--policy-dir`; `None` = the flag is not given.
    pub(super) policies: Option<(WatchedDir, PolicyDir)>,
    /// Endpoints of the last run on this boot.
    pub(super) endpoints: Vec<EndpointSpec>,
    pub(super) gate: Option<Box<dyn Gate>>,
    /// Takes DNSNameResolver objects of the cluster.
    pub(super) names: Option<Arc<Feed>>,
    pub(super) api: Option<Api>,
    /// The first listing has the endpoints where another agent had them until just now.
    pub(super) keeps_endpoints: bool,
}

/// What others ask the sources for.
pub(super) struct Started {
    pub(super) endpoints: Arc<EndpointBook>,
    /// The watches; none without a cluster.
    pub(super) cluster: Option<ClusterHealth>,
    /// The pods of this node.
    pub(super) local: watch::Receiver<Arc<LocalPods>>,
    /// Objects about the tunnel between nodes.
    pub(super) high_scale: watch::Receiver<HighScaleView>,
}

/// Starts every source. The core has the node's addresses when this returns. The receiver says when each endpoint of
/// the first listing has been looked at.
pub(super) async fn start(
    config: &Config,
    rim: &Rim,
    from: From,
) -> Result<(Started, oneshot::Receiver<()>)> {
    let From {
        state,
        policies,
        endpoints,
        gate,
        names,
        api,
        keeps_endpoints,
    } = from;
    let changed = node::events(&rim.tasks, rim.stop.clone());
    let interfaces = own_interfaces::list().context("listing the node's addresses")?;
    for event in node::changes(&OwnInterfaces::default(), &interfaces) {
        rim.core.send(event).await?;
    }
    let following = node::run(rim.core.clone(), interfaces, changed);
    let stop = rim.stop.clone();
    rim.tasks.spawn(stop.run_until_cancelled_owned(following));
    let (local, pods) = watch::channel(Arc::<LocalPods>::default());
    let of_node = pods.clone();
    let restored = (endpoints, keeps_endpoints);
    let (endpoints, looked) = endpoint_source(config, rim, &state, restored, gate)?;
    if api.is_some() {
        let netns_dir = config.netns_dir.clone();
        endpoints.take_in_from(PodSource { pods, netns_dir });
    }
    // Only agents of a DaemonSet are pods.
    let unattended = api
        .as_ref()
        .filter(|_| config.flags.cluster.source.daemonset.is_some());
    let unattended = unattended.map(|api| Unattended::new(&config.node_name, api.namespace()));
    let filter = LabelFilter::new(config.flags.cluster.labels.clone());
    let book =
        Book::new(filter, &config.flags.cluster.source.cluster_name).on_node(&config.node_name);
    let origin = origin(config, api.as_ref());
    let watches = api.map(|api| watches(config, rim, &api));
    let cluster = watches.as_ref().map(|watches| watches.health.clone());
    let router = Router::new(book)
        .with_unattended(unattended)
        .with_pods(config.core.pods.clone());
    let router = match config.core.high_scale {
        Some(_) => router.with_high_scale(&config.node_name),
        None => router,
    };
    let (high_scale, of_tunnel) = watch::channel(HighScaleView::default());
    let feed = CoreFeed {
        router,
        core: rim.core.clone(),
        local,
        high_scale,
        names,
        health: cluster.clone(),
    };
    let sources = Sources {
        directory: policies,
        cluster: watches,
        stored: Some((state, origin)),
        reports: |_| true,
        pods: config.core.pods.clone(),
    };
    document_source::start(sources, feed, &rim.tasks, &rim.stop);
    let started = Started {
        endpoints,
        cluster,
        local: of_node,
        high_scale: of_tunnel,
    };
    Ok((started, looked))
}

/// Which cluster a stored list is of.
fn origin(config: &Config, api: Option<&Api>) -> Origin {
    let server = api.map(|api| api.server().to_owned());
    let authorities = api.map(|api| api.authorities().to_vec());
    Origin {
        server: server.unwrap_or_default(),
        cluster: config.flags.cluster.source.cluster_name.clone(),
        authorities: authorities.unwrap_or_default(),
    }
}

/// Reads the cluster from the API server, or from relays.
fn watches(config: &Config, rim: &Rim, api: &Api) -> Watches {
    let (identities, mode) = (config.core.cluster_identities, config.core.high_scale);
    let resources = resource::watched(identities.is_some(), mode.is_some());
    let here = Here {
        node: config.node_name.clone(),
        high_scale: mode.map(TunnelMode::as_str),
        resources,
        reads_only: false,
        has_service_blocks: !config.flags.cluster.k8s_service_cidr.is_empty(),
        pods: config.core.pods.clone(),
    };
    match config.relays.clone() {
        Some(relays) => relay::start::follow(api, relays, here, &rim.tasks, &rim.stop),
        None => client::start(api, here, &rim.tasks, &rim.stop),
    }
}

fn endpoint_source(
    config: &Config,
    rim: &Rim,
    state: &Path,
    (restored, keeps_endpoints): (Vec<EndpointSpec>, bool),
    gate: Option<Box<dyn Gate>>,
) -> Result<(Arc<EndpointBook>, oneshot::Receiver<()>)> {
    let handle = rim.core.clone();
    let book = EndpointBook::open(
        config.flags.endpoint_dir.clone(),
        CliFile::in_dir(state).stored_in(&config.flags.endpoint_store),
        Containers::of(&config.flags.containers.podman_root),
        restored,
        gate,
        move |event| {
            // A stopped core means that the agent is stopping: nothing is lost.
            let _stopped = handle.send_blocking(Event::Endpoints(event));
        },
    )?;
    if keeps_endpoints {
        book.keep_found();
    }
    // Without a directory there is still what was added by command and cannot be resolved yet.
    let watched = config.flags.endpoint_dir.as_deref().unwrap_or(state);
    let looked = polls::run(Arc::clone(&book), watched, &rim.tasks, rim.stop.clone());
    Ok((book, looked))
}
