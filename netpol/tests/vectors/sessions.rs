//! Session rules of tables, and the number of them that a change writes or removes.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use netpol::{
    pod::PodId,
    render::{
        tables::Tables,
        vpp::sessions::{self, Scope, SessionRule},
    },
    rule::Action,
};
use serde_json::Value;

use super::read::{cases, fields, list, number, orientation, pod, pod_rules, protocol, text};

fn session_rule(value: &Value, scope: Scope) -> SessionRule {
    let net = |side: &str| text(&value[side]).parse().ok();
    SessionRule {
        scope,
        protocol: protocol(text(&value["proto"])).unwrap(),
        local: net("lcl"),
        local_port: number(&value["lcl_port"]).try_into().unwrap(),
        remote: net("rmt").unwrap(),
        remote_port: number(&value["rmt_port"]).try_into().unwrap(),
        action: match text(&value["action"]) {
            "DENY" => Action::Deny,
            _ => Action::Permit,
        },
        tag: text(&value["tag"]).to_owned(),
    }
}

fn wanted(expect: &Value) -> Vec<SessionRule> {
    let derived = &expect["session_rules_derived"];
    let local = fields(&derived["local"]).flat_map(|(id, rules)| {
        list(rules).map(move |rule| session_rule(rule, Scope::Local(pod(id))))
    });
    let global = list(&derived["global"]).map(|rule| session_rule(rule, Scope::Global));
    local.chain(global).collect()
}

#[test]
fn tables_become_session_rules() {
    for case in cases(include_str!("sessions.json"), 3) {
        let mut tables = Tables::new(orientation(&case));
        let mut before: Vec<SessionRule> = Vec::new();
        let mut requests = 0;
        for step in list(&case["steps"]) {
            let mut addresses: BTreeMap<PodId, Vec<IpAddr>> = BTreeMap::new();
            let mut change = tables.begin();
            for (id, of) in fields(&step["pods"]) {
                let rules = pod_rules(of).unwrap();
                addresses.insert(pod(id), rules.addresses.clone());
                change.update(pod(id), Some(rules));
            }
            let view = change.view();
            change.commit(view);
            let found = sessions::export(tables.view(), &addresses).unwrap();
            assert_eq!(found, wanted(&step["expect"]), "{}", case["id"]);
            let added = found.iter().filter(|rule| !before.contains(rule));
            let removed = before.iter().filter(|rule| !found.contains(rule));
            requests += added.count() + removed.count();
            assert_eq!(
                requests,
                number(&step["expect"]["requests_so_far"]),
                "{}",
                case["id"]
            );
            check_counts(&found, &step["expect"]);
            assert_eq!(
                sessions::from_json(&sessions::to_json(&found)).unwrap(),
                found
            );
            before = found;
        }
    }
}

fn check_counts(found: &[SessionRule], expect: &Value) {
    let of = |scope: &Scope| found.iter().filter(|rule| rule.scope == *scope).count();
    for (id, wanted) in fields(&expect["local"]) {
        assert_eq!(
            of(&Scope::Local(pod(id))),
            number(&wanted["number_of_rules"])
        );
        assert_eq!(
            list(&wanted["has"]).count(),
            number(&wanted["number_of_rules"])
        );
    }
    assert_eq!(
        of(&Scope::Global),
        number(&expect["global"]["number_of_rules"])
    );
    let scopes: BTreeSet<&Scope> = found.iter().map(|rule| &rule.scope).collect();
    assert!(scopes.len() <= 2);
}
