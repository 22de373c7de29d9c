//! The answer to `status`: the state of the agent, and its problems.

use agent_cluster::{health::ClusterHealth, own_interfaces};
use agent_core::core::{Core, snapshot::Summary};
use agent_datapath::{features::KernelView, quota, tunnel::TunnelStatus, upkeep::Part};

use super::{model::Status, problems, server::Admin};
use crate::{
    dir_writers::OwnDirectory, endpoint::source::Unresolved, identities::view::Identities,
    netns_lock, proxies::ProxyView, refusal::Refusal,
};

impl Admin {
    /// The state of the agent.
    pub(super) async fn status(&self) -> Result<Status, Refusal> {
        // The core handles all earlier events before it answers this. `ready` is read next, and the
        // counts of `summary` after that: so they include the first documents of an agent that is
        // ready.
        let mut warnings = self.core.inspect(|core| core.policy_warnings()).await?;
        let netpol = netns_lock::has_netpol();
        warnings.extend(netpol.ok().and_then(problems::beside_netpol));
        let ready = self.proxies.watch_rules().borrow().ready;
        let summary = self.core.summary().await?;
        let unresolved = self.endpoints.unresolved();
        let proxies = self.proxies.views();
        let builtin = (self.builtin)();
        let mut problems = self.problems(&summary, &unresolved, &proxies);
        let cluster = self.cluster.as_ref().map(ClusterHealth::view);
        problems.extend(cluster.iter().flat_map(problems::cluster_source));
        problems.extend(cluster.iter().filter_map(problems::not_reported));
        let left = self.core.inspect(Core::left_behind).await?;
        problems.extend(problems::left_behind(&left, own_interfaces::name));
        problems.extend(cluster.iter().filter_map(problems::tainted));
        problems.extend(cluster.iter().filter_map(problems::without_agent));
        let resolver = self.resolver_state(&mut problems).await;
        let identities = self.identities.as_ref().map(Identities::view);
        problems.extend(identities.iter().flat_map(problems::identities));
        let tunnel = self.tunnel.as_ref().map(TunnelStatus::view);
        problems.extend(tunnel.iter().flat_map(problems::tunnel::of_view));
        let has_api = cluster.is_some();
        let alone = |tunnel| problems::tunnel::other_nodes_unknown(tunnel, has_api);
        problems.extend(tunnel.iter().filter_map(alone));
        if let Some(tunnel) = &tunnel {
            let unknown = self.core.inspect(Core::without_shared_number).await?;
            problems.extend(problems::tunnel::numbers_not_shared(
                tunnel, &summary, &unknown,
            ));
        }
        let limits = self.core.inspect(Core::limits).await?;
        let endpoints = self.core.inspect(Core::endpoint_keys).await?;
        let quotas = quota::reached(&self.maps, endpoints).unwrap_or_else(|error| {
            problems.push(format!("quotas of endpoints cannot be read: {error}"));
            Vec::new()
        });
        let standby = self.succession.standby().await;
        problems.extend(self.succession.problem(standby.as_ref()));
        Ok(Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            epoch: self.epoch.clone(),
            ready,
            summary,
            proxies,
            builtin_dns_proxy: builtin,
            endpoints_unresolved: unresolved,
            damaged_files: (*self.damaged).clone(),
            problems,
            warnings,
            limits,
            repairs: Part::ALL.map(|part| self.conditions.repairs(part)).to_vec(),
            quotas,
            kernel: self.kernel().await,
            cluster,
            resolver,
            identities,
            tunnel,
            awaited: self.endpoints.awaited(),
            owner: self.succession.record.view(),
            standby,
            started_open: self.endpoints.started_open(),
        })
    }

    /// How programs are attached, and which other programs the interfaces have.
    async fn kernel(&self) -> KernelView {
        let (maps, kernel) = (self.maps.clone(), self.conditions.kernel().clone());
        let looked = tokio::task::spawn_blocking(move || kernel.look(&maps)).await;
        looked.unwrap_or_else(|_| self.conditions.kernel().clone())
    }

    fn problems(
        &self,
        summary: &Summary,
        unresolved: &[Unresolved],
        proxies: &[ProxyView],
    ) -> Vec<String> {
        let mut problems = Vec::new();
        problems.extend(problems::policies_refused(summary));
        problems.extend(problems::steps_pending(summary));
        problems.extend(
            unresolved
                .iter()
                .map(|u| format!("endpoint {}: {}", u.key, u.reason)),
        );
        let unmanaged = self.endpoints.unmanaged();
        problems.extend(unmanaged.iter().map(problems::not_under_policy));
        problems.extend(self.endpoints.further_interfaces());
        problems.extend(self.endpoints.foreign_addresses());
        problems.extend(self.endpoints.not_stored());
        problems.extend(self.endpoints.blind());
        problems.extend(self.endpoints.open_names());
        problems.extend(self.endpoints.containers_unseen());
        problems.extend(self.few_descriptors.clone());
        problems.extend(self.conditions.faults());
        problems.extend(self.cni.problem());
        problems.extend(summary.endpoint_problems.iter().cloned());
        problems.extend(self.damaged.iter().cloned());
        problems.extend(proxies.iter().filter_map(|proxy| {
            proxy
                .nack
                .as_ref()
                .map(|why| format!("proxy {} refused {why}", proxy.instance))
        }));
        problems.extend(problems::other_state_dirs(proxies, &self.state_dir));
        problems.extend(problems::ipcache_full(summary));
        problems.extend(problems::names_limited(summary));
        problems.extend(problems::names_closed(summary));
        problems.extend(problems::to_fqdns_closed(summary));
        problems.extend(problems::pods_outside(summary));
        problems.extend(problems::objects_left_out(summary));
        let directories = self.directories.iter();
        problems.extend(directories.filter_map(OwnDirectory::problem));
        problems.extend(problems::nothing_learned(proxies, self.started.elapsed()));
        problems
    }
}
