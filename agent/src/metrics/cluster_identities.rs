//! Metrics of numbers that label sets have in the whole cluster.

use std::fmt;

use daemon::{families, metrics::Families};

use super::Sample;

impl Sample {
    pub(super) fn cluster_identities(&self, out: &mut Families<'_, '_>) -> fmt::Result {
        let Some(identities) = &self.scrape.identities else {
            return Ok(());
        };
        let counts = self.scrape.summary.cluster_identities.unwrap_or_default();
        let view = identities.view();
        families! { out;
            /// Label sets of pods that have a number of the cluster (CiliumIdentity), as this agent
            /// knows them
            gauge identities_known = counts.known;
            /// Label sets in use on this node or seen by it that have a number of the node, because the
            /// cluster has none for them yet; `holdfast-agent status` says why
            gauge identities_local = counts.local;
            /// Label sets that wait for a number, for 2 seconds at most
            gauge identities_waiting = counts.waiting;
            /// Attempts to make a CiliumIdentity, by outcome
            counter_by identity_creates = |outcome| identities.creates().get(outcome);
            /// CiliumIdentities without a pod that this agent deleted
            counter identity_deletes = identities.deletes();
            /// CiliumIdentities in use that another program deleted and this agent made again
            counter identities_vanished = view.vanished;
            /// 1 on the agent that deletes unused CiliumIdentities; 0 on the others
            gauge identities_leads = view.leads;
        }
    }
}
