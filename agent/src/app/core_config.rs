//! Settings and restored rules of the core.

use agent_core::core::CoreConfig;
use dns_policy::{boot_time::BootTime, epoch::Epoch, rule::RulesOf, wall_time};

use crate::{config::Config, restore::Found};

/// The core's settings that follow from the flags and from this run.
pub(super) fn of(config: &Config, epoch: &Epoch) -> CoreConfig {
    CoreConfig {
        boot_id: epoch.boot_id.clone(),
        start: epoch.start,
        boot_unix_ns: boot_unix_ns(),
        ..config.core.clone()
    }
}

/// Unix time at CLOCK_BOOTTIME 0.
fn boot_unix_ns() -> u64 {
    wall_time::now().saturating_sub(BootTime::now().nanos())
}

/// DNS rules in the files of the last run.
pub(super) fn restored_rules(found: &Found) -> Vec<RulesOf> {
    let endpoints = found.restored.endpoints.iter();
    endpoints
        .filter_map(|endpoint| {
            endpoint.rules.as_ref().map(|file| RulesOf {
                endpoint: endpoint.id,
                rules: file.rules.clone(),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::Parser as _;

    use super::*;
    use crate::config::{Cli, Command};

    #[test]
    fn the_core_gets_the_values_of_the_flags() {
        let line = [
            "holdfast-agent",
            "run",
            "--identity-restore-grace-period=10m",
            "--tofqdns-preallocate-identities=false",
            "--dns-max-ips-per-restored-rule=7",
            "--tofqdns-endpoint-max-ip-per-hostname=8",
            "--tofqdns-refuse-prefix=10.96.0.0/12,192.0.2.1",
            "--tofqdns-refuse-prefix=fd00::/8",
        ];
        let Command::Run(args) = Cli::try_parse_from(line).unwrap().command else {
            panic!("not run");
        };
        let epoch = Epoch {
            boot_id: "b".to_owned(),
            start: 3,
        };
        let core = of(&Config::try_from(*args).unwrap(), &epoch);
        assert_eq!(core.restore_grace, Duration::from_secs(600));
        assert!(!core.preallocate_identities);
        let refused = |text: &str| {
            core.refused_prefixes
                .covering(text.parse().unwrap())
                .is_some()
        };
        assert!(refused("10.100.0.1") && refused("192.0.2.1") && refused("fd00::1"));
        assert!(!refused("169.254.169.254"));
        assert_eq!(core.max_fqdn_identities, Some(8192));
        assert_eq!(core.max_ips_per_restored_rule, 7);
        assert_eq!(core.max_ips_per_name, 8);
        assert_eq!((core.boot_id.as_str(), core.start), ("b", 3));
    }
}
