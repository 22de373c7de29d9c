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
            /// Label sets of pods for which this agent knows a cluster-wide number (CiliumIdentity)
            gauge identities_known = counts.known;
            /// Label sets that this node uses or has seen, and that have a number of the node
            /// because they have no cluster-wide number yet. `holdfast-agent status` gives the
            /// reason
            gauge identities_local = counts.local;
            /// Label sets that wait for a cluster-wide number. After 2 seconds they get a number of
            /// the node
            gauge identities_waiting = counts.waiting;
            /// Attempts to create a CiliumIdentity, by outcome
            counter_by identity_creates = |outcome| identities.creates().get(outcome);
            /// CiliumIdentities that this agent deleted because no pod used them
            counter identity_deletes = identities.deletes();
            /// CiliumIdentities in use that another program deleted and this agent created again
            counter identities_vanished = view.vanished;
            /// 1 on the agent that deletes unused CiliumIdentities, 0 on all others
            gauge identities_leads = view.leads;
        }
    }
}
