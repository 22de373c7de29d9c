//! From the flags of `run` to checked settings.

use std::{net::IpAddr, ops::RangeInclusive, path::PathBuf, time::Duration};

use agent_cluster::ApiSettings;
use agent_core::{core::CoreConfig, fqdn::refused::RefusedPrefixes};
use agent_datapath::kernel::MapSizes;

use super::{
    ClusterArgs, Config, ConfigError, FollowArgs, RunArgs, ServiceAlias, host_name::host_name,
    metrics_address::metrics_address, relay_args,
};

/// Entries that a conntrack map may have; Cilium's bounds.
const CONNTRACK_ENTRIES: RangeInclusive<u32> = 1 << 10..=1 << 24;
/// Prefixes that the ipcache may take: at least the node's own, the world's and some blocks.
const IPCACHE_ENTRIES: RangeInclusive<u32> = 64..=1 << 24;
/// Addresses that `cilium_lxc` may take: at least one endpoint's; Cilium's size at most.
const LXC_ENTRIES: RangeInclusive<u32> = 2..=65535;
/// Entries that a policy map may have; Cilium's bounds.
const POLICY_ENTRIES: RangeInclusive<u32> = 256..=65536;

/// Refuses values that the types of the flags allow.
fn check(args: &RunArgs) -> Result<(), ConfigError> {
    check_families(args)?;
    check_ports(args)?;
    check_directories(args)?;
    check_intervals(args)
}

impl TryFrom<RunArgs> for Config {
    type Error = ConfigError;

    fn try_from(args: RunArgs) -> Result<Self, ConfigError> {
        check(&args)?;
        let map_sizes = map_sizes(&args)?;
        let fqdndata_port = fqdndata_port(&args);
        let kubernetes = kubernetes(&args.cluster, &args.follow)?;
        let netns_dir = netns_dir(&args)?;
        let core = core(&args)?;
        let node_name = node_name(&args.cluster);
        Ok(Self {
            core,
            bpf_root: args.bpf_root,
            state_dir: args.state_dir,
            policy_dir: args.policy_dir,
            kubernetes,
            relays: relay_args::relays(args.follow)?,
            resolver: args.resolver.settings(args.cluster.kubernetes)?,
            daemonset: args.cluster.daemonset.clone(),
            node_name,
            startup_taint: Some(args.cluster.agent_not_ready_taint_key)
                .filter(|key| !key.is_empty()),
            cluster_name: args.cluster.cluster_name,
            label_rules: args.cluster.labels,
            has_service_blocks: !args.cluster.k8s_service_cidr.is_empty(),
            endpoint_dir: args.endpoint_dir,
            endpoint_store: args.endpoint_store,
            sdp_socket: args.sdp_socket,
            sdp_group: args.sdp_group,
            admin_socket: args.admin_socket,
            cni_socket: args.cni.socket(),
            cni_places: args.cni.places(),
            netns_dir,
            metrics_address: metrics_address(&args.metrics_address)?,
            disable_builtin_dns_proxy: args.disable_builtin_dns_proxy,
            fqdndata_port,
            pre_cache: args.tofqdns_pre_cache,
            response_max_delay: args.tofqdns_proxy_response_max_delay,
            reject_code: args.tofqdns_dns_reject_response_code,
            transparent: args.dnsproxy_enable_transparent_mode,
            tcx: args.enable_tcx,
            transparent_outside: args.transparent_mode_outside_cluster,
            hold_proxy_port: args.hold_proxy_port,
            map_sizes,
            dns_quota: args.endpoint_dns_quota,
            deny_responses: args.deny.responses(),
            conntrack_gc_interval: args.conntrack_gc_interval,
        })
    }
}

/// The core's settings, except for boot and start.
fn core(args: &RunArgs) -> Result<CoreConfig, ConfigError> {
    let cluster = &args.cluster;
    let trusted = args.firewalls.settings()?;
    let entries = |size: u32| usize::try_from(size).unwrap_or(usize::MAX);
    Ok(CoreConfig {
        names_kept_later: true,
        node_name: Some(node_name(cluster)),
        cluster_blocks: [&cluster.k8s_service_cidr[..], &cluster.pod_cidr].concat(),
        pod_blocks: cluster.pod_cidr.clone(),
        service_aliases: by_address(&cluster.k8s_dns_alias),
        dns_servers: trusted.given,
        with_dns_service: trusted.with_service,
        name_servers: args.tofqdns_servers,
        dns_service: trusted.service,
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
        policy_map_max: entries(args.bpf_policy_map_max),
        ipcache_max: entries(args.bpf_ipcache_map_max),
        reconcile_interval: args.reconcile_interval,
        ..CoreConfig::default()
    })
}

fn node_name(args: &ClusterArgs) -> String {
    args.node_name.clone().unwrap_or_else(host_name)
}

/// TTLs are whole seconds: rounded up.
fn whole_seconds(duration: Duration) -> u32 {
    let rest = u64::from(duration.subsec_nanos() > 0);
    u32::try_from(duration.as_secs().saturating_add(rest)).unwrap_or(u32::MAX)
}

fn refused_prefixes(args: &RunArgs) -> Result<RefusedPrefixes, ConfigError> {
    RefusedPrefixes::of(&args.tofqdns_refuse_prefix).map_err(|reason| ConfigError {
        flag: "tofqdns-refuse-prefix",
        reason,
    })
}

/// Port of Cilium's FQDNData, if it is served.
fn fqdndata_port(args: &RunArgs) -> Option<u16> {
    let port = args.standalone_dns_proxy_server_port;
    (args.enable_standalone_dns_proxy && port != 0).then_some(port)
}

fn netns_dir(args: &RunArgs) -> Result<Option<PathBuf>, ConfigError> {
    let refused = |reason: &str| ConfigError {
        flag: "cni-netns-dir",
        reason: reason.to_owned(),
    };
    match &args.cni.cni_netns_dir {
        Some(_) if !args.cluster.kubernetes => Err(refused(
            "has no effect without --kubernetes, because pods are found by their addresses in the \
             API; add that, or leave this out",
        )),
        Some(dir) if !dir.is_absolute() => Err(refused(
            "is not an absolute path; write for example /run/netns",
        )),
        _ => Ok(args.cni.netns_dir().filter(|_| args.cluster.kubernetes)),
    }
}

fn kubernetes(args: &ClusterArgs, follow: &FollowArgs) -> Result<Option<ApiSettings>, ConfigError> {
    if args.kubernetes && cfg!(not(feature = "kubernetes")) {
        return Err(ConfigError {
            flag: "kubernetes",
            reason:
                "this program was built without the feature kubernetes; build it with `cargo build \
                     -p holdfast-agent --features kubernetes`"
                    .to_owned(),
        });
    }
    if args.kubernetes {
        return Ok(Some(ApiSettings {
            kubeconfig: args.kubeconfig.clone(),
            server: args.k8s_api_server.clone(),
        }));
    }
    let given = [
        ("kubeconfig", args.kubeconfig.is_some()),
        ("k8s-api-server", args.k8s_api_server.is_some()),
        ("daemonset", args.daemonset.is_some()),
        ("k8s-relay", !follow.k8s_relay.is_empty()),
    ];
    match given.into_iter().find(|(_, is_given)| *is_given) {
        None => Ok(None),
        Some((flag, _)) => Err(ConfigError {
            flag,
            reason: "has no effect without --kubernetes; add that, or leave this out".to_owned(),
        }),
    }
}

fn by_address(aliases: &[ServiceAlias]) -> Vec<(IpAddr, String)> {
    let aliases = aliases.iter();
    aliases
        .map(|alias| (alias.address, alias.service.clone()))
        .collect()
}

fn check_families(args: &RunArgs) -> Result<(), ConfigError> {
    if !args.enable_ipv4 && !args.enable_ipv6 {
        return Err(ConfigError {
            flag: "enable-ipv4",
            reason: "both address families are off; leave one of --enable-ipv4, --enable-ipv6 on"
                .to_owned(),
        });
    }
    Ok(())
}

fn check_ports(args: &RunArgs) -> Result<(), ConfigError> {
    if args.tofqdns_proxy_port == 0 {
        return Err(ConfigError {
            flag: "tofqdns-proxy-port",
            reason: "0 is not a port; agent and proxies must agree on one (default 10094)"
                .to_owned(),
        });
    }
    if args.enable_standalone_dns_proxy
        && args.standalone_dns_proxy_server_port == args.tofqdns_proxy_port
    {
        return Err(ConfigError {
            flag: "standalone-dns-proxy-server-port",
            reason: "is the same as --tofqdns-proxy-port; choose another".to_owned(),
        });
    }
    Ok(())
}

fn check_directories(args: &RunArgs) -> Result<(), ConfigError> {
    for (flag, dir) in [
        ("policy-dir", &args.policy_dir),
        ("endpoint-dir", &args.endpoint_dir),
    ] {
        if let Some(dir) = dir
            && !dir.is_dir()
        {
            return Err(ConfigError {
                flag,
                reason: format!("{} is not a directory; create it first", dir.display()),
            });
        }
    }
    Ok(())
}

fn check_intervals(args: &RunArgs) -> Result<(), ConfigError> {
    for (flag, interval) in [
        ("conntrack-gc-interval", args.conntrack_gc_interval),
        ("reconcile-interval", args.reconcile_interval),
    ] {
        if interval < Duration::from_millis(10) {
            return Err(ConfigError {
                flag,
                reason: "must be at least 10ms".to_owned(),
            });
        }
    }
    Ok(())
}

fn map_sizes(args: &RunArgs) -> Result<MapSizes, ConfigError> {
    let size = |flag, entries: u32, range: RangeInclusive<u32>| {
        if range.contains(&entries) {
            return Ok(entries);
        }
        Err(ConfigError {
            flag,
            reason: format!("{entries} is not from {} to {}", range.start(), range.end()),
        })
    };
    let (tcp, any) = (args.bpf_ct_global_tcp_max, args.bpf_ct_global_any_max);
    Ok(MapSizes {
        conntrack_tcp: size("bpf-ct-global-tcp-max", tcp, CONNTRACK_ENTRIES)?,
        conntrack_any: size("bpf-ct-global-any-max", any, CONNTRACK_ENTRIES)?,
        ipcache: size(
            "bpf-ipcache-map-max",
            args.bpf_ipcache_map_max,
            IPCACHE_ENTRIES,
        )?,
        lxc: size("bpf-lxc-map-max", args.bpf_lxc_map_max, LXC_ENTRIES)?,
        policy: size(
            "bpf-policy-map-max",
            args.bpf_policy_map_max,
            POLICY_ENTRIES,
        )?,
        ..MapSizes::default()
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::{
        super::{Cli, Command},
        *,
    };

    fn run(flags: &[&str]) -> Result<Config, ConfigError> {
        let line = ["holdfast-agent", "run"].iter().chain(flags);
        let Command::Run(args) = Cli::try_parse_from(line).unwrap().command else {
            panic!("not run");
        };
        Config::try_from(*args)
    }

    #[test]
    fn defaults_are_the_documented_ones() {
        let config = run(&[]).unwrap();
        assert_eq!(config.core.proxy_port, 10094);
        assert_eq!(
            config.metrics_address.unwrap().to_string(),
            "127.0.0.1:9962"
        );
        assert_eq!(config.core.lease_slack, Duration::from_secs(60));
        assert_eq!(config.response_max_delay, Duration::from_millis(100));
        assert_eq!(config.fqdndata_port, None);
        assert!(config.core.enable_ipv4 && config.core.enable_ipv6);
        assert_eq!(config.map_sizes, MapSizes::default());
        assert_eq!(config.core.restore_grace, Duration::from_secs(30));
    }

    #[test]
    fn the_startup_taint_has_a_default_and_may_be_none() {
        let key = |flags: &[&str]| run(flags).unwrap().startup_taint;
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
            let error = run(flags).unwrap_err().to_string();
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
        assert_eq!(config.map_sizes, sizes);
        for (flag, entries) in [
            ("bpf-ct-global-tcp-max", "1023"),
            ("bpf-ct-global-tcp-max", "16777217"),
            ("bpf-ct-global-any-max", "0"),
        ] {
            let error = run(&[&format!("--{flag}={entries}")]).unwrap_err();
            assert_eq!(error.flag, flag);
            assert!(error.to_string().contains("1024 to 16777216"), "{error}");
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
        assert_eq!(config.fqdndata_port, Some(10095));
    }

    #[test]
    fn contradictions_name_the_flag() {
        let error = run(&["--enable-ipv6=false", "--enable-ipv4=false"]).unwrap_err();
        assert_eq!(error.flag, "enable-ipv4");
        let error = run(&["--metrics-address", "nonsense"]).unwrap_err();
        assert_eq!(error.flag, "metrics-address");
        let error = run(&["--policy-dir", "/does/not/exist"]).unwrap_err();
        assert!(error.to_string().contains("/does/not/exist"));
    }

    #[test]
    fn a_floor_is_rounded_up_to_seconds() {
        assert_eq!(whole_seconds(Duration::ZERO), 0);
        assert_eq!(whole_seconds(Duration::from_millis(500)), 1);
        assert_eq!(whole_seconds(Duration::from_secs(300)), 300);
        assert_eq!(whole_seconds(Duration::MAX), u32::MAX);
    }
}
