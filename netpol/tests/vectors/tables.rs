//! Tables of pods and of the node, and the tables that a change affects.

use std::collections::{BTreeMap, BTreeSet};

use netpol::{
    contiv::Flow,
    pod::PodId,
    render::tables::{Tables, View},
    rule::Rule,
};
use serde_json::Value;

use super::read::{
    all_pod_rules, cases, fields, list, number, orientation, pod, pod_rules, pods, rules,
};

/// The tables of a case, as if they were read back from the data plane.
fn view(value: &Value) -> View {
    let mut view = View {
        global: rules(&value["global"]).into(),
        ..View::default()
    };
    for (id, of) in fields(&value["local"]) {
        view.local
            .entry(rules(of).into())
            .or_default()
            .insert(pod(id));
    }
    view
}

fn check(view: &View, expect: &Value, id: &Value) {
    let tables = fields(&expect["local_tables"]).map(|(id, of)| (pod(id), rules(of)));
    let wanted: BTreeMap<PodId, Vec<Rule>> = tables.collect();
    let isolated: BTreeSet<PodId> = view.local.values().flatten().cloned().collect();
    assert_eq!(isolated, pods(&expect["isolated_pods"]), "{id}");
    for (pod, rules) in &wanted {
        assert_eq!(view.local_of(pod).unwrap().to_vec(), *rules, "{id} {pod}");
    }
    assert_eq!(view.global.to_vec(), rules(&expect["global_table"]), "{id}");
}

#[test]
fn changes_of_tables() {
    for case in cases(include_str!("tables.json"), 9) {
        let mut tables = Tables::new(orientation(&case));
        for step in list(&case["steps"]) {
            if !step["resync_tables"].is_null() {
                tables.resync(view(&step["resync_tables"])).unwrap();
                continue;
            }
            let expect = &step["expect"];
            let mut change = tables.begin();
            for (id, of) in fields(&step["update"]) {
                change.update(pod(id), pod_rules(of));
            }
            let after = change.view();
            let changes = change.changes(&after);
            assert_eq!(
                changes.len(),
                number(&expect["number_of_changes"]),
                "{}",
                case["id"]
            );
            check(&after, expect, &case["id"]);
            change.commit(after);
            check(tables.view(), expect, &case["id"]);
            let tracked: BTreeSet<PodId> = tables.pods().cloned().collect();
            assert_eq!(tracked, pods(&expect["tracked_pods"]), "{}", case["id"]);
            // The same change comes once more.
            let mut change = tables.begin();
            for (id, of) in fields(&step["update"]) {
                change.update(pod(id), pod_rules(of));
            }
            assert_eq!(change.changes(&change.view()), []);
        }
    }
}

#[test]
fn a_pod_in_two_tables_is_refused() {
    let case = &cases(include_str!("tables.json"), 9)[0];
    let update = fields(&case["steps"][0]["update"]).next().unwrap();
    let mut tables = Tables::new(Flow::Ingress);
    let mut change = tables.begin();
    change.update(pod(update.0), pod_rules(update.1));
    let good = change.view();
    change.commit(good.clone());
    let mut bad = good.clone();
    bad.local
        .insert([Rule::DENY_ALL].into(), [pod(update.0)].into());
    let error = tables.resync(bad).unwrap_err().to_string();
    assert_eq!(error, "pod default/pod1 has two local tables: remove one");
    assert_eq!(*tables.view(), good);
    assert_eq!(tables.pods().count(), 1);
}

#[test]
fn both_sides_are_combined() {
    for case in cases(include_str!("tables_of_pods.json"), 3) {
        let view = View::of(&all_pod_rules(&case["given"]["pods"]), orientation(&case));
        for (name, wanted) in fields(&case["expect"]) {
            let found = match name.strip_prefix("local_table_of_") {
                Some(id) => view
                    .local_of(&pod(id))
                    .map_or(Vec::new(), |rules| rules.to_vec()),
                None => view.global.to_vec(),
            };
            assert_eq!(found, rules(wanted), "{} {name}", case["id"]);
        }
    }
}
