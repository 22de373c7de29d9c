//! Pods of the cluster at random.

use proptest::{prelude::*, sample::select};

use super::{
    language::{ADDRESSES, PORT_NAMES},
    pod::{Pod, namespace},
};
pub(in crate::core::tests) use crate::core::testing::cluster::{Cluster, ClusterPod};

pub(super) fn cluster_pod() -> impl Strategy<Value = ClusterPod> {
    let pods = (
        namespace(),
        any::<bool>(),
        select(PORT_NAMES),
        select(ADDRESSES),
    );
    pods.prop_map(|(namespace, web, ports, address)| ClusterPod {
        pod: Pod {
            namespace,
            web,
            ports,
            mode: None,
        },
        address,
    })
}
