//! All renderings of the policies of one node's pods.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use crate::{
    cache::Object,
    configurator::{Configurator, PodRules},
    contiv::{Flow, PolicyId},
    packet::Packet,
    pipeline::Pipeline,
    pod::PodId,
    render::{
        nft::{Limits, TooLarge},
        ruleset::Table,
        tables::View,
        vpp::{
            acl::{self, Acl},
            sessions::{self, NoSessionRules, SessionRule},
        },
    },
    set_aside::SetAside,
    verdict::{self, Local, Verdict},
};

/// What renderings need to know about a node in addition to its pods.
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    /// Interfaces that lead to other nodes, by their names in the vswitch.
    pub node_interfaces: BTreeSet<String>,
    /// The source of packets that a pod sends to itself through a Service.
    pub nat_loopback: Option<IpAddr>,
}

/// The rules of a node's pods, from which exports are made.
#[derive(Debug)]
pub struct NodeRules {
    /// The rules of each pod that has an address.
    pub pods: BTreeMap<PodId, PodRules>,
    /// Why there are no session rules.
    refused: Option<NoSessionRules>,
}

impl NodeRules {
    /// The rules as of the last commit of a pipeline.
    pub fn of(pipeline: &Pipeline, nat_loopback: Option<IpAddr>) -> Self {
        let configurator = Configurator {
            cache: pipeline.cache(),
            nat_loopback,
        };
        let pods = pipeline.pods().iter();
        let mut all = pipeline.pods().iter();
        Self {
            pods: pods
                .map(|(id, pod)| (id.clone(), configurator.rules(pod)))
                .collect(),
            refused: all.find_map(|(id, pod)| sessions::refusal(id, pod)),
        }
    }

    /// Tables of these rules. Its local tables are for traffic of this direction.
    pub fn tables(&self, flow: Flow) -> View {
        View::of(&self.pods, flow)
    }

    /// Lists of VPP's ACL plugin: for the pods, and one for interfaces that lead to other nodes.
    pub fn acls(&self, node_interfaces: &BTreeSet<String>) -> Vec<Acl> {
        acl::export(&self.tables(Flow::Ingress), node_interfaces)
    }

    /// Session rules of tables whose local tables are for traffic from pods.
    pub fn sessions(&self, tables: &View) -> Result<Vec<SessionRule>, NoSessionRules> {
        if let Some(refused) = &self.refused {
            return Err(refused.clone());
        }
        let pods = self.pods.iter();
        let addresses = pods.map(|(id, pod)| (id.clone(), pod.addresses.clone()));
        sessions::export(tables, &addresses.collect())
    }
}

/// The policies of a node's pods in every form.
#[derive(Debug)]
pub struct Node {
    /// The rules of each pod that has an address.
    pub pods: BTreeMap<PodId, PodRules>,
    /// The table of nf_tables.
    pub nft: Table,
    /// Tables whose local tables are for traffic to pods.
    pub tables: View,
    /// Access lists of these tables.
    pub acls: Vec<Acl>,
    /// Tables whose local tables are for traffic from pods.
    pub session_tables: View,
    /// Session rules of these tables, or why there are none.
    pub sessions: Result<Vec<SessionRule>, NoSessionRules>,
    /// The policies that allow nothing in any form, because they do not fit into the table.
    pub set_aside: BTreeMap<PolicyId, SetAside>,
    local: Local,
}

impl Node {
    /// The policies of the node with this name. `objects` are all objects of the cluster.
    pub fn new(name: &str, objects: &[Object], around: &Surroundings) -> Result<Self, TooLarge> {
        Self::within(Limits::default(), name, objects, around)
    }

    /// Like [`Self::new`], with other limits of the table.
    pub fn within(
        limits: Limits,
        name: &str,
        objects: &[Object],
        around: &Surroundings,
    ) -> Result<Self, TooLarge> {
        let mut pipeline = Pipeline::new(name, limits);
        pipeline.replace(objects.to_vec());
        pipeline.commit()?;
        let rules = NodeRules::of(&pipeline, around.nat_loopback);
        let tables = rules.tables(Flow::Ingress);
        let session_tables = rules.tables(Flow::Egress);
        let sessions = rules.sessions(&session_tables);
        let pods = rules.pods;
        let claims = pods
            .iter()
            .flat_map(|(id, pod)| pod.addresses.iter().map(|address| (*address, id.clone())));
        Ok(Self {
            acls: acl::export(&tables, &around.node_interfaces),
            nft: pipeline.table(),
            local: claims.collect(),
            pods,
            tables,
            session_tables,
            sessions,
            set_aside: pipeline.set_aside().clone(),
        })
    }

    /// How each rendering judges a packet, with the name of the rendering. Session rules are
    /// omitted if there are none, or if they do not apply to such packets.
    pub fn judge(&self, packet: &Packet) -> Vec<(&'static str, Verdict<'_>)> {
        let local = &self.local;
        let mut verdicts = vec![
            ("rules", verdict::by_rules(&self.pods, local, packet)),
            ("nft", verdict::by_table(&self.nft, packet)),
            (
                "tables",
                verdict::by_tables(&self.tables, Flow::Ingress, local, packet),
            ),
            ("acl", verdict::by_acls(&self.acls, local, packet)),
        ];
        let sessions = self.sessions.iter();
        let sessions = sessions.filter_map(|rules| verdict::by_sessions(rules, local, packet));
        verdicts.extend(sessions.map(|verdict| ("sessions", verdict)));
        verdicts
    }
}
