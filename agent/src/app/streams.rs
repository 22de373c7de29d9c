//! Starts what serves DNS proxies: the built-in one, and the streams of others.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use dns_policy::rule::RulesOf;
use tokio::net::{TcpListener, UnixListener};

use super::Rim;
use crate::{
    config::Config,
    dnsproxy::{BuiltinProxy, Ports},
    grpc::{
        fqdndata::FqdnDataService,
        peer::Allowed,
        server::{About, Native},
    },
    lane::Lane,
    listener::{Listener, Listeners},
};

/// Starts the built-in proxy with the rules of the last run; `None` if it is disabled.
pub(super) fn builtin(
    config: &Config,
    rim: &Rim,
    restored: &[RulesOf],
) -> Result<Option<Arc<BuiltinProxy>>> {
    if config.flags.disable_builtin_dns_proxy {
        return Ok(None);
    }
    let ports = Ports {
        core: rim.core.clone(),
        proxies: rim.proxies.clone(),
        epoch: rim.epoch.clone(),
    };
    let started = BuiltinProxy::start(config, ports, restored, &rim.tasks, &rim.rim_stop);
    let started = started.with_context(|| {
        format!(
            "the built-in DNS proxy on port {}; stop what has the port, choose another \
             --tofqdns-proxy-port, or turn it off with --disable-builtin-dns-proxy",
            config.core.proxy_port
        )
    })?;
    Ok(Some(started))
}

/// Serves holdfast-sdp on a thread of its own, and FQDNData.
pub(super) async fn start(
    config: &Config,
    rim: &Rim,
    limits: &Listeners,
    sdp: UnixListener,
    fqdndata: Option<TcpListener>,
) -> Result<Lane> {
    let about = About {
        epoch: rim.epoch.clone(),
        proxy_port: config.core.proxy_port,
        min_ttl: config.core.min_ttl,
        state_dir: config.flags.state_dir.clone(),
    };
    let native = Native::new(
        about,
        rim.core.clone(),
        rim.proxies.clone(),
        rim.tasks.clone(),
        rim.rim_stop.clone(),
    )
    .with_guests(limits.guests(Listener::Sdp));
    let allowed = Allowed {
        group: Some(config.flags.sdp_group),
    };
    let streams = Lane::start("streams").context("starting the thread of proxies' streams")?;
    rim.tasks
        .spawn_on(native.serve(sdp, allowed), streams.handle());
    if let Some(listener) = fqdndata {
        let service = FqdnDataService::start(
            rim.core.clone(),
            rim.proxies.clone(),
            config.flags.tofqdns_proxy_response_max_delay,
            rim.tasks.clone(),
            rim.rim_stop.clone(),
        );
        let service = service.await.with_guests(limits.guests(Listener::Fqdndata));
        rim.tasks.spawn(service.serve(listener));
    }
    Ok(streams)
}
