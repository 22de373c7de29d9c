//! Access lists: their names, where they are applied, and which connections pass.

use std::collections::BTreeMap;

use netpol::{
    configurator::PodRules,
    contiv::Flow,
    pod::PodId,
    render::{
        tables::Tables,
        vpp::acl::{self, Acl, Interface},
    },
    verdict::{Local, by_acls, by_rules, by_tables},
};
use serde_json::Value;

use super::read::{cases, fields, list, number, packet, pod, pod_rules, pods, text};

/// A vswitch with the result of the last change.
struct Vswitch {
    tables: Tables,
    pods: BTreeMap<PodId, PodRules>,
    acls: Vec<Acl>,
    commits: usize,
    /// Number of lists that were written or removed.
    changes: usize,
}

impl Vswitch {
    /// A vswitch that already has these lists when the program starts.
    fn with(acls: Vec<Acl>) -> Self {
        let mut tables = Tables::new(Flow::Ingress);
        tables.resync(acl::import(&acls)).unwrap();
        Self {
            tables,
            pods: BTreeMap::new(),
            acls,
            commits: 0,
            changes: 0,
        }
    }

    fn update(&mut self, pods: &Value, is_whole: bool) {
        let gone: Vec<PodId> = match is_whole {
            true => self.pods.keys().cloned().collect(),
            false => Vec::new(),
        };
        let named = fields(pods).map(|(id, of)| (pod(id), pod_rules(of)));
        let mut txn = self.tables.begin();
        for (id, rules) in gone.into_iter().map(|id| (id, None)).chain(named) {
            match rules.clone() {
                Some(rules) => self.pods.insert(id.clone(), rules),
                None => self.pods.remove(&id),
            };
            txn.update(id, rules);
        }
        let view = txn.view();
        self.commits += usize::from(!txn.changes(&view).is_empty());
        txn.commit(view);
        let acls = acl::export(self.tables.view(), &["uplink".to_owned()].into());
        let written = acls.iter().filter(|acl| !self.acls.contains(acl));
        let removed = self
            .acls
            .iter()
            .filter(|old| !acls.iter().any(|acl| acl.name == old.name));
        self.changes += written.count() + removed.count();
        assert_eq!(acl::import(&acls), *self.tables.view());
        assert_eq!(acl::from_json(&acl::to_json(&acls)).unwrap(), acls);
        self.acls = acls;
    }

    fn check(&self, expect: &Value, id: &Value) {
        if let Some(wanted) = expect["number_of_acls"].as_u64() {
            assert_eq!(self.acls.len() as u64, wanted, "{id}");
        }
        if let Some(wanted) = expect["acl_changes_so_far"].as_u64() {
            assert_eq!(self.changes as u64, wanted, "{id}");
        }
        if let Some(wanted) = expect["global_table_present"].as_bool() {
            assert_eq!(!self.tables.view().global.is_empty(), wanted, "{id}");
        }
        let reflected = self
            .acls
            .iter()
            .find(|acl| acl.name == "contiv-policy-REFLECTION");
        let is_reflected =
            |interface: &Interface| reflected.is_some_and(|acl| acl.input.contains(interface));
        for wanted in expect["reflective"].as_array().into_iter().flatten() {
            let of_pod = Interface::Pod(pod(text(&wanted["pod"])));
            assert_eq!(is_reflected(&of_pod), wanted["present"], "{id}");
            let of_node = Interface::Node("uplink".to_owned());
            assert_eq!(
                is_reflected(&of_node),
                wanted["also_on_node_interfaces"],
                "{id}"
            );
        }
    }
}

#[test]
fn connections_pass_as_expected() {
    let mut connections = 0;
    for case in cases(include_str!("acls.json"), 5) {
        let ips: BTreeMap<&str, &str> = fields(&case["pod_ips"])
            .map(|(id, address)| (id, text(address)))
            .collect();
        let local = local(&case);
        let mut vswitch = Vswitch::with(Vec::new());
        for step in list(&case["steps"]) {
            let expect = &step["expect"];
            let is_whole = text(&step["transaction"]) == "resync";
            if is_whole && number(&expect["committed_transactions"]) == 1 {
                vswitch = Vswitch::with(vswitch.acls);
            }
            vswitch.update(&step["pods"], is_whole);
            assert_eq!(
                vswitch.commits,
                number(&expect["committed_transactions"]),
                "{case}"
            );
            vswitch.check(expect, &case["id"]);
            for connection in list(&expect["connections"]) {
                connections += 1;
                check_connection(&vswitch, &local, &ips, connection);
            }
        }
    }
    assert!(connections >= 150, "{connections}");
}

/// The pods of the node, including pods that have no rules.
fn local(case: &Value) -> Local {
    let others = pods(&case["pods_on_another_node"]);
    let local = fields(&case["pod_ips"]).map(|(id, address)| (text(address), pod(id)));
    let local = local.filter(|(_, pod)| !others.contains(pod));
    local
        .map(|(address, pod)| (address.parse().unwrap(), pod))
        .collect()
}

fn check_connection(
    vswitch: &Vswitch,
    local: &Local,
    ips: &BTreeMap<&str, &str>,
    connection: &Value,
) {
    let address = |side: &str| {
        let side = text(&connection[side]);
        *ips.get(side).unwrap_or(&side)
    };
    let packet = packet(address("from"), address("to"), connection);
    let by_tables = by_tables(vswitch.tables.view(), Flow::Ingress, local, &packet);
    let by_acls = by_acls(&vswitch.acls, local, &packet);
    let mut verdicts = vec![("tables", by_tables), ("ACLs", by_acls)];
    // A table knows what a pod may send only if the receiving pod also has rules.
    let receiver = PodId::parse(text(&connection["to"]));
    if receiver.is_none_or(|pod| vswitch.pods.contains_key(&pod)) {
        verdicts.push(("rules", by_rules(&vswitch.pods, local, &packet)));
    }
    let wanted = text(&connection["expect"]) == "ALLOW";
    for (judge, verdict) in verdicts {
        assert_eq!(
            verdict.passes, wanted,
            "{judge} {connection} {:?}",
            verdict.by
        );
    }
}
