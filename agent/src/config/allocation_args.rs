//! Flags about the numbers of pods' label sets.

use std::time::Duration;

use agent_core::identity::cluster::IdentityRange;
use clap::{Args, ValueEnum};
use dns_policy::duration;

use super::ConfigError;

/// Numbers of pods' labels
#[derive(Clone, Debug, Args)]
pub struct AllocationArgs {
    /// Who gives the labels of pods their number. node: each agent by itself. cluster: the name of a CiliumIdentity,
    /// which the agents create: one number on every node. A label set that has none after 2 seconds gets a number of
    /// this node until then. Not beside a Cilium operator, which deletes the objects
    #[arg(long, value_enum, value_name = "WHO", default_value_t = IdentityAllocation::Node)]
    pub identity_allocation: IdentityAllocation,
    /// Numbers of new CiliumIdentities, FIRST-LAST, within 256-61439. Clusters of one mesh need ranges that do not
    /// overlap
    #[arg(long, value_name = "FIRST-LAST", default_value_t = IdentityRange::default())]
    pub identity_range: IdentityRange,
    /// With --identity-allocation=cluster: how long no pod of the cluster has had the labels of a CiliumIdentity that
    /// agents made before one agent deletes it; whole seconds, at least 1s
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "30m")]
    pub identity_unused_for: Duration,
    /// With --identity-allocation=cluster: how long the agent that deletes unused CiliumIdentities stays the only one
    /// if it does not renew its Lease holdfast-identities; whole seconds, 3s to 600s
    #[arg(long, value_name = "TIME", value_parser = duration::parse, default_value = "60s")]
    pub identity_lease: Duration,
}

/// `--identity-allocation`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum IdentityAllocation {
    /// Each agent gives numbers by itself.
    #[default]
    Node,
    /// Numbers are names of objects.
    Cluster,
}

impl AllocationArgs {
    /// The range of objects that are to be made; none = no objects are made.
    pub(super) fn range(&self, kubernetes: bool) -> Result<Option<IdentityRange>, ConfigError> {
        if self.identity_allocation == IdentityAllocation::Node {
            return Ok(None);
        }
        if !kubernetes {
            return Err(ConfigError::new(
                "identity-allocation",
                "cluster has no effect without --kubernetes, because the numbers are objects of the API server; add \
                 that, or leave this out and put the documents that `holdfast-agent identity assign` prints into \
                 the --policy-dir of each host",
            ));
        }
        let unused = self.identity_unused_for;
        if unused.subsec_nanos() != 0 || unused.as_secs() == 0 {
            let reason =
                format!("{unused:?} is not whole seconds from 1s on; write for example 30m");
            return Err(ConfigError::new("identity-unused-for", reason));
        }
        let lease = self.identity_lease;
        if lease.subsec_nanos() != 0 || !(3..=600).contains(&lease.as_secs()) {
            let reason = format!("{lease:?} is not 3 to 600 whole seconds; write for example 60s");
            return Err(ConfigError::new("identity-lease", reason));
        }
        Ok(Some(self.identity_range))
    }
}

#[cfg(test)]
mod tests {
    use super::super::parsed::run;

    #[test]
    fn numbers_of_the_cluster_need_an_api_server_and_a_range() {
        let range = |flags: &[&str]| run(flags).map(|config| config.core.cluster_identities);
        assert_eq!(range(&[]), Ok(None));
        let cluster = "--identity-allocation=cluster";
        assert_eq!(
            range(&["--kubernetes", cluster]),
            Ok(Some(Default::default()))
        );
        let given = range(&["--kubernetes", cluster, "--identity-range=300-400"]);
        assert_eq!(given, Ok(Some("300-400".parse().unwrap())));
        let error = range(&[cluster]).unwrap_err();
        assert!(
            error.contains("--kubernetes") && error.contains("identity assign"),
            "{error}"
        );
        for (flag, remedy) in [
            ("--identity-range=1-400", "256-61439"),
            ("--identity-unused-for=0s", "30m"),
            ("--identity-lease=1s", "60s"),
        ] {
            let error = run(&["--kubernetes", cluster, flag]).unwrap_err();
            assert!(error.contains(remedy), "{flag}: {error}");
        }
    }
}
