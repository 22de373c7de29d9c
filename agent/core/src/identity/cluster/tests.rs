//! Tests of numbers of the cluster.

use super::*;

mod cluster_identities;
