//! From the flags of `run` to checked settings.

use std::{path::PathBuf, time::Duration};

use agent_core::{core::CoreConfig, fqdn::refused::RefusedPrefixes};
use agent_datapath::tunnel;

use super::{
    Config, ConfigError, IdentityAllocation, RunArgs, high_scale_args::NodeSettings, relay_args,
};

impl TryFrom<RunArgs> for Config {
    type Error = ConfigError;

    fn try_from(args: RunArgs) -> Result<Self, ConfigError> {
        check_families(&args)?;
        check_ports(&args)?;
        Ok(Self {
            core: core(&args)?,
            kubernetes: args.cluster.source.kubernetes(&args.follow)?,
            relays: relay_args::relays(args.follow.clone())?,
            resolver: args.resolver.settings(args.cluster.source.kubernetes)?,
            tunnel: args.high_scale.settings(&node_settings(&args))?,
            node_name: args.cluster.source.node_name(),
            netns_dir: netns_dir(&args)?,
            metrics_address: args.metrics_address.clone(),
            flags: args,
        })
    }
}

/// The core's settings, except for boot and start.
fn core(args: &RunArgs) -> Result<CoreConfig, ConfigError> {
    let cluster = &args.cluster;
    let entries = |size: u32| usize::try_from(size).unwrap_or(usize::MAX);
    Ok(CoreConfig {
        names_kept_later: true,
        node_name: Some(cluster.source.node_name()),
        cluster_blocks: [&cluster.k8s_service_cidr[..], &cluster.pod_cidr].concat(),
        pod_blocks: cluster.pod_cidr.clone(),
        service_aliases: cluster.k8s_dns_alias.clone(),
        dns_servers: args.firewalls.servers(),
        with_dns_service: args.firewalls.with_service(),
        name_servers: args.tofqdns_servers,
        dns_service: args.firewalls.dns_service.clone(),
        cluster_identities: args.identities.range(cluster.source.kubernetes)?,
        high_scale: args.high_scale.mode(),
        pods: args.high_scale.pods(cluster.source.node_name()),
        external_ips: cluster.k8s_external_ips,
        proxy_port: args.tofqdns_proxy_port,
        enable_policy: args.enable_policy,
        enable_ipv4: args.enable_ipv4,
        enable_ipv6: args.enable_ipv6,
        min_ttl: whole_seconds(args.tofqdns_min_ttl),
        lease_slack: args.mapping_lease_slack,
        max_ips_per_name: args.tofqdns_endpoint_max_ip_per_hostname,
        max_deferred_deletes: args.tofqdns_max_deferred_connection_deletes,
        idle_grace: args.tofqdns_idle_connection_grace_period,
        restore_grace: args.identity_restore_grace_period,
        preallocate_identities: args.tofqdns_preallocate_identities,
        max_fqdn_identities: args.tofqdns_max_identities.0,
        refused_prefixes: refused_prefixes(args)?,
        max_ips_per_restored_rule: args.dns_max_ips_per_restored_rule,
        policy_map_max: entries(args.map_sizes.policy),
        ipcache_max: entries(args.map_sizes.ipcache),
        reconcile_interval: args.reconcile_interval,
        ..CoreConfig::default()
    })
}

pub(super) fn node_settings(args: &RunArgs) -> NodeSettings {
    let is_cluster = args.identities.identity_allocation == IdentityAllocation::Cluster;
    NodeSettings {
        ipv4: args.enable_ipv4,
        ipv6: args.enable_ipv6,
        has_shared_identities: is_cluster || args.policy_dir.is_some(),
        knows_pod_blocks: args.cluster.source.kubernetes || !args.cluster.pod_cidr.is_empty(),
        default_device: tunnel::default_device,
    }
}

/// TTLs are whole seconds: rounded up.
fn whole_seconds(duration: Duration) -> u32 {
    let rest = u64::from(duration.subsec_nanos() > 0);
    u32::try_from(duration.as_secs().saturating_add(rest)).unwrap_or(u32::MAX)
}

fn refused_prefixes(args: &RunArgs) -> Result<RefusedPrefixes, ConfigError> {
    RefusedPrefixes::of(&args.tofqdns_refuse_prefix)
        .map_err(|reason| ConfigError::new("tofqdns-refuse-prefix", reason))
}

fn netns_dir(args: &RunArgs) -> Result<Option<PathBuf>, ConfigError> {
    let refused = |reason: &str| ConfigError::new("cni-netns-dir", reason);
    match &args.cni.cni_netns_dir {
        Some(_) if !args.cluster.source.kubernetes => Err(refused(
            "has no effect without --kubernetes, because pods are found by their addresses in the \
             API; add that, or leave this out",
        )),
        Some(dir) if !dir.is_absolute() => Err(refused(
            "is not an absolute path; write for example /run/netns",
        )),
        _ => Ok(args
            .cni
            .netns_dir()
            .filter(|_| args.cluster.source.kubernetes)),
    }
}

fn check_families(args: &RunArgs) -> Result<(), ConfigError> {
    if !args.enable_ipv4 && !args.enable_ipv6 {
        return Err(ConfigError::new(
            "enable-ipv4",
            "both address families are off; leave one of --enable-ipv4, --enable-ipv6 on",
        ));
    }
    Ok(())
}

fn check_ports(args: &RunArgs) -> Result<(), ConfigError> {
    if args.enable_standalone_dns_proxy
        && args.standalone_dns_proxy_server_port == args.tofqdns_proxy_port
    {
        return Err(ConfigError::new(
            "standalone-dns-proxy-server-port",
            "is the same as --tofqdns-proxy-port; choose another",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use agent_datapath::{kernel::MapSizes, tunnel::TunnelMode};

    use super::{super::parsed::run, *};

    #[test]
    fn high_scale_flags_are_refused_where_they_cannot_work() {
        let mode = ["--high-scale-ipcache=full", "--high-scale-device=eth0"];
        let four = [&mode[..], &["--enable-ipv6=false", "--policy-dir=/etc"]].concat();
        let config = run(&four).unwrap();
        let tunnel = config.tunnel.unwrap();
        assert_eq!(
            (tunnel.devices, tunnel.port),
            (vec!["eth0".to_owned()], 8472)
        );
        assert_eq!(config.core.high_scale, Some(TunnelMode::Full));
        assert!(run(&[]).unwrap().tunnel.is_none());
        for (flags, text) in [
            (
                [&mode[..], &["--policy-dir=/etc"]].concat(),
                "--high-scale-ipcache: carries IPv4 only; add --enable-ipv6=false",
            ),
            (
                [&mode[..], &["--enable-ipv6=false", "--enable-ipv4=false"]].concat(),
                "--enable-ipv4: both",
            ),
            (
                [&mode[..], &["--enable-ipv6=false"]].concat(),
                "full needs numbers that mean the same on all nodes; add --identity-allocation=cluster",
            ),
            (
                vec!["--high-scale-device=eth0"],
                "--high-scale-device: has no effect",
            ),
            (vec!["--tunnel-port=4789"], "--tunnel-port: has no effect"),
            (
                vec!["--high-scale-prune"],
                "--high-scale-prune: has no effect",
            ),
            (
                vec![
                    "--high-scale-ipcache=decap-only",
                    "--high-scale-device=eth0",
                    "--enable-ipv6=false",
                    "--high-scale-prune",
                ],
                "--high-scale-prune: needs --high-scale-ipcache=full",
            ),
            (
                [&four[..], &["--high-scale-keep=a in (b)"]].concat(),
                "write KEY=VALUE",
            ),
            (
                [&four[..], &["--tunnel-port=0"]].concat(),
                "invalid value '0'",
            ),
        ] {
            let error = run(&flags).err().unwrap();
            assert!(error.contains(text), "{error}");
        }
    }

    #[test]
    fn defaults_are_the_documented_ones() {
        let config = run(&[]).unwrap();
        assert_eq!(config.core.proxy_port, 10094);
        assert_eq!(config.metrics_address.to_string(), "127.0.0.1:9962");
        assert_eq!(config.core.lease_slack, Duration::from_secs(60));
        assert_eq!(
            config.flags.tofqdns_proxy_response_max_delay,
            Duration::from_millis(100)
        );
        assert_eq!(config.fqdndata_port(), None);
        assert!(config.core.enable_ipv4 && config.core.enable_ipv6);
        assert_eq!(config.flags.map_sizes, MapSizes::default());
        assert_eq!(config.core.restore_grace, Duration::from_secs(30));
    }

    #[test]
    fn the_startup_taint_has_a_default_and_may_be_none() {
        let key = |flags: &[&str]| run(flags).unwrap().startup_taint().map(str::to_owned);
        assert_eq!(key(&[]).unwrap(), "holdfast.io/agent-not-ready");
        assert_eq!(key(&["--agent-not-ready-taint-key="]), None);
    }

    #[test]
    fn a_flag_that_needs_another_names_it() {
        for (flags, missing) in [
            (&["--k8s-relay=192.0.2.1:9971"][..], "--kubernetes"),
            (&["--daemonset=holdfast-agent"], "--kubernetes"),
            (&["--kubernetes=false", "--kubeconfig=FILE"], "--kubernetes"),
            (&["--kubernetes", "--k8s-relay-ca=FILE"], "--k8s-relay"),
            (&["--kubernetes", "--k8s-relay-plaintext"], "--k8s-relay"),
        ] {
            let error = run(flags).unwrap_err();
            let reason = format!(": has no effect without {missing}; add that");
            assert!(error.contains(&reason), "{flags:?}: {error}");
        }
    }

    #[test]
    fn conntrack_sizes_are_accepted_within_bounds() {
        let config = run(&[
            "--bpf-ct-global-tcp-max=524288",
            "--bpf-ct-global-any-max=1024",
        ])
        .unwrap();
        let sizes = MapSizes {
            conntrack_tcp: 524_288,
            conntrack_any: 1024,
            ..MapSizes::default()
        };
        assert_eq!(config.flags.map_sizes, sizes);
        for (flag, entries) in [
            ("bpf-ct-global-tcp-max", "1023"),
            ("bpf-ct-global-tcp-max", "16777217"),
            ("bpf-ct-global-any-max", "0"),
        ] {
            let error = run(&[&format!("--{flag}={entries}")]).unwrap_err();
            assert!(error.contains(&format!("--{flag}")), "{error}");
            assert!(error.contains("from 1024 to 16777216"), "{error}");
        }
    }

    #[test]
    fn booleans_take_a_value_and_durations_a_unit() {
        let config = run(&[
            "--enable-ipv6=false",
            "--tofqdns-min-ttl",
            "5m",
            "--enable-standalone-dns-proxy",
        ])
        .unwrap();
        assert!(!config.core.enable_ipv6);
        assert_eq!(config.core.min_ttl, 300);
        assert_eq!(config.fqdndata_port(), Some(10095));
    }

    #[test]
    fn contradictions_name_the_flag() {
        let error = run(&["--enable-ipv6=false", "--enable-ipv4=false"]).unwrap_err();
        assert!(error.starts_with("--enable-ipv4: "), "{error}");
        let error = run(&["--metrics-address", "nonsense"]).unwrap_err();
        assert!(error.contains("--metrics-address"), "{error}");
        let error = run(&["--policy-dir", "/does/not/exist"]).unwrap_err();
        assert!(
            error.contains("--policy-dir") && error.contains("/does/not/exist is not a directory")
        );
    }

    #[test]
    fn a_floor_is_rounded_up_to_seconds() {
        assert_eq!(whole_seconds(Duration::ZERO), 0);
        assert_eq!(whole_seconds(Duration::from_millis(500)), 1);
        assert_eq!(whole_seconds(Duration::from_secs(300)), 300);
        assert_eq!(whole_seconds(Duration::MAX), u32::MAX);
    }
}
