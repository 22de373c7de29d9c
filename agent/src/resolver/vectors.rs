//! The cases of `core/tests/data/dnsnameresolver.json`: results of the components of OpenShift and
//! OVN-Kubernetes for the same input.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use dns_policy::name::Fqdn;
use rand::{SeedableRng as _, rngs::StdRng};
use serde_json::{Value, json};

use super::{
    dns_name, names,
    object::{
        API_VERSION, AddressFilter, AddressStatus, KIND, ObjectKey, Resolver, Settings, Status,
        UnixTime,
    },
    observe::{self, Failure, Outcome, observe},
    schedule::{self, Ended, Schedule},
};

pub(crate) const NOW: UnixTime = UnixTime(1_764_000_000);
/// Groups that other tests run.
const ELSEWHERE: [&str; 3] = [
    // agent/core/src/core/tests/firewall_vectors.rs
    "egressfirewall_destination",
    "egressfirewall_names",
    // agent/src/config/resolver_args.rs
    "plugin_config",
];

pub(crate) fn cases() -> Vec<Value> {
    let text = include_str!("../../core/tests/data/dnsnameresolver.json");
    let mut document: Value = serde_json::from_str(text).unwrap();
    let Value::Array(cases) = document["cases"].take() else {
        panic!("not a list of cases");
    };
    cases
}

#[test]
fn every_case_of_the_components_that_users_come_from_holds() {
    let mut count = BTreeMap::<String, usize>::new();
    for case in cases() {
        let (given, expect) = (&case["given"], &case["expect"]);
        let group = case["group"].as_str().unwrap();
        *count.entry(group.to_owned()).or_default() += 1;
        let id = case["id"].as_str().unwrap();
        match group {
            "plugin_lookup_to_status" => lookup_to_status(id, &case),
            "is_wildcard" => {
                assert_eq!(
                    *expect,
                    json!(dns_name::is_wildcard(text(&given["name"]))),
                    "{id}"
                );
            }
            "wildcard_of" => {
                assert_eq!(
                    text(expect),
                    dns_name::wildcard_of(text(&given["name"])),
                    "{id}"
                );
            }
            "same_next_lookup_time" => same_next(id, given, expect),
            "configured_namespace" => configured_namespace(id, given, expect),
            "expired_ip_removal" => expired(id, given, expect),
            "requeue_after" => {
                let status = status("*.example.com.", given);
                let after = requeue_after(&status);
                assert_eq!(json!(after), expect["after_seconds"], "{id}");
                assert_eq!(json!(after.is_some()), expect["requeue"], "{id}");
            }
            "resolver_schedule" => scheduled(id, given, expect),
            "time_till_next_lookup" => wait(id, given, expect),
            "resolver_fanout" => fan_out(id, given, expect),
            "cluster_manager_lifecycle" => lifecycle(id, given, expect),
            "cr_name" => {
                let name =
                    names::object_name(&fqdn(&given["dnsName"]), number(&given["collisionCount"]));
                assert_eq!(text(expect), name, "{id}");
            }
            "dnsnameresolver_name_validation" => {
                let accepted = dns_name::parse(text(&given["name"])).is_ok();
                assert_eq!(expect["accepted_by_crd"], json!(accepted), "{id}");
            }
            "spec_name_immutable" => {
                let error = renamed(text(&given["old"]), text(&given["new"]));
                assert_eq!(text(&expect["error"]), error, "{id}");
            }
            "consumer_address_set" => address_set(id, given, expect),
            group => assert!(ELSEWHERE.contains(&group), "unknown group {group}"),
        }
    }
    assert_eq!(count.values().sum::<usize>(), 118, "{count:?}");
}

fn text(value: &Value) -> &str {
    value
        .as_str()
        .unwrap_or_else(|| panic!("not a text: {value}"))
}

fn number(value: &Value) -> u64 {
    value
        .as_u64()
        .unwrap_or_else(|| panic!("not a number: {value}"))
}

fn small(value: &Value) -> u32 {
    u32::try_from(number(value)).unwrap()
}

fn fqdn(value: &Value) -> Fqdn {
    Fqdn::normalise(text(value))
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// A status with the entries in `resolvedNames` of `holder`. Each address was looked up last
/// `secondsSinceLastLookup` seconds before [`NOW`].
fn status(spec: &str, holder: &Value) -> Status {
    let entries: Vec<Value> = list(&holder["resolvedNames"]).to_vec();
    object("n", "o", spec, entries).status
}

pub(crate) fn object(namespace: &str, name: &str, spec: &str, mut entries: Vec<Value>) -> Resolver {
    let mut spec = Fqdn::normalise(spec);
    for entry in &mut entries {
        for address in entry["resolvedAddresses"].as_array_mut().unwrap() {
            let age = address["secondsSinceLastLookup"].as_u64().unwrap_or(0);
            let at = dns_policy::wall_time::render((NOW.0 - age) * 1_000_000_000);
            address["lastLookupTime"] = json!(at);
        }
        if !dns_name::matches(&spec, &fqdn(&entry["dnsName"])) {
            spec = fqdn(&entry["dnsName"]);
        }
    }
    let document = json!({
        "apiVersion": API_VERSION, "kind": KIND,
        "metadata": {"namespace": namespace, "name": name},
        "spec": {"name": spec.as_str()},
        "status": {"resolvedNames": entries},
    });
    let read = Resolver::read(&document, "n").unwrap();
    assert!(read.flaws.is_empty(), "{:?}", read.flaws);
    read.object
}

pub(crate) fn settings(params: &Value) -> Settings {
    Settings {
        min_ttl: small(&params["minTTL"]),
        failure_threshold: small(&params["failureThreshold"]),
        tolerance: small(&params["nextLookupToleranceSeconds"]),
    }
}

pub(crate) fn outcome(lookup: &Value) -> Outcome {
    let code = match text(&lookup["rcode"]) {
        "NOERROR" => 0,
        "SERVFAIL" => 2,
        "NXDOMAIN" => 3,
        other => panic!("unknown code {other}"),
    };
    let records: Vec<(IpAddr, u32)> = list(&lookup["answers"])
        .iter()
        .map(|record| {
            let words: Vec<&str> = text(record).split(' ').collect();
            (words[4].parse().unwrap(), words[1].parse().unwrap())
        })
        .collect();
    match code {
        0 if records.is_empty() => Outcome::NoData,
        0 => Outcome::Found(records),
        code => Outcome::Failed(Failure::Code(code)),
    }
}

/// A status without times, its addresses in order.
pub(crate) fn shown(status: &Status) -> Value {
    let mut document = status.document()["resolvedNames"].take();
    for entry in document.as_array_mut().unwrap() {
        for condition in entry["conditions"].as_array_mut().unwrap() {
            condition
                .as_object_mut()
                .unwrap()
                .remove("lastTransitionTime");
        }
        let addresses = entry["resolvedAddresses"].as_array_mut().unwrap();
        for address in &mut *addresses {
            address.as_object_mut().unwrap().remove("lastLookupTime");
        }
        addresses.sort_by_key(|address| address["ip"].to_string());
    }
    document
}

fn lookup_to_status(id: &str, case: &Value) {
    let settings = settings(&case["params"]);
    let mut objects: Vec<Resolver> = list(&case["given"])
        .iter()
        .map(|given| {
            let entries = list(&given["status_before"]).to_vec();
            object(
                text(&given["namespace"]),
                text(&given["name"]),
                text(&given["spec_name"]),
                entries,
            )
        })
        .collect();
    for lookup in list(&case["lookups"]) {
        // Only A and AAAA questions are looked at.
        if !["A", "AAAA"].contains(&text(&lookup["qtype"])) {
            continue;
        }
        for object in &mut objects {
            let name = fqdn(&lookup["qname"]);
            let change = observe(
                &object.status,
                &object.name,
                &name,
                &outcome(lookup),
                NOW,
                &settings,
            );
            if let Some(status) = change.status {
                assert_ne!(status, object.status, "{id}: a change that changes nothing");
                object.status = status;
            }
        }
    }
    for expected in list(&case["expect"]) {
        let mut objects = objects.iter();
        let object = objects.find(|object| object.key.to_string() == text(&expected["object"]));
        assert_eq!(
            shown(&object.unwrap().status),
            expected["resolvedNames"],
            "{id}"
        );
    }
}

fn same_next(id: &str, given: &Value, expect: &Value) {
    let existing = AddressStatus {
        ip: IpAddr::from([192, 0, 2, 1]),
        ttl: small(&given["existing_ttl"]),
        last: UnixTime(NOW.0 - number(&given["existing_last_lookup_seconds_ago"])),
    };
    let (ttl, tolerance) = (
        small(&given["current_ttl"]),
        small(&given["tolerance_seconds"]),
    );
    let same = observe::is_same_next(&existing, ttl, NOW, tolerance);
    assert_eq!(*expect, json!(same), "{id}");
}

/// The setting of OpenShift's CoreDNS plugin is a list of namespaces, and an empty list means all of them. The agent's
/// flag (`--resolver-namespace`) names exactly one.
fn configured_namespace(id: &str, given: &Value, expect: &Value) {
    let configured = list(&given["configured"]).first();
    let store = configured.map_or_else(|| text(&given["namespace"]), text);
    let key = object(text(&given["namespace"]), "o", "a.b.", Vec::new()).key;
    assert_eq!(*expect, json!(key.namespace == store), "{id}");
}

fn expired(id: &str, given: &Value, expect: &Value) {
    let before = status("*.example.com.", given);
    let after = schedule::expire(&before, NOW, |_| Some(NOW));
    assert_eq!(json!(after.is_some()), expect["removed_any"], "{id}");
    let left = after.unwrap_or(before);
    let names: Vec<Value> = left
        .names
        .iter()
        .map(|entry| {
            let addresses = entry.addresses.iter();
            let addresses = addresses.map(|address| json!({"ip": address.ip, "ttlSeconds": address.ttl}));
            json!({"dnsName": entry.name.as_str(), "resolvedAddresses": addresses.collect::<Vec<_>>()})
        })
        .collect();
    assert_eq!(json!(names), expect["resolvedNames"], "{id}");
}

fn scheduled(id: &str, given: &Value, expect: &Value) {
    let mut schedule = Schedule::new(Settings::default());
    let mut objects = BTreeMap::<String, Vec<Value>>::new();
    let actions = list(&given["actions"]);
    for (action, expected) in actions.iter().zip(list(&expect["after_each_action"])) {
        let key = text(&action["object"]).to_owned();
        if action["op"] == "delete" {
            schedule.remove(&object("n", &key, "a.b.", Vec::new()).key);
        } else {
            let entries = objects.entry(key.clone()).or_default();
            entries.push(
                json!({"dnsName": action["dnsName"], "resolvedAddresses": action["addresses"]}),
            );
            let spec = match action["matchesRegular"].as_bool() {
                Some(true) => text(&action["dnsName"]),
                _ => "*.example.com.",
            };
            schedule.apply(&object("n", &key, spec, entries.clone()), NOW);
        }
        let next = schedule
            .next()
            .map(|(at, name)| (at.since(NOW), name.clone()));
        assert_eq!(expected["exists"], json!(next.is_some()), "{id}");
        if let Some((seconds, name)) = next {
            assert_eq!(text(&expected["nextName"]), name.as_str(), "{id}");
            assert_eq!(number(&expected["nextLookupInSeconds"]), seconds, "{id}");
            assert_eq!(
                expected["numIPs"],
                json!(schedule.addresses_of(&name)),
                "{id}"
            );
        }
    }
}

/// Seconds until the first address leaves, among the addresses whose look-up is due.
fn requeue_after(status: &Status) -> Option<u64> {
    let addresses = status.names.iter().flat_map(|entry| &entry.addresses);
    let expired = addresses.filter(|address| address.next() < NOW);
    expired
        .map(|address| schedule::leaves_at(address).since(NOW))
        .min()
}

fn wait(id: &str, given: &Value, expect: &Value) {
    let remaining = given["remaining_seconds"].as_f64().unwrap().max(0.0);
    let exists = given["name_exists"] == json!(true);
    let remaining = exists.then(|| Duration::from_secs_f64(remaining));
    let wait = schedule::wait(remaining, &Settings::default());
    assert_eq!(number(&expect["wait_seconds"]), wait.as_secs(), "{id}");
    assert_eq!(wait.subsec_nanos(), 0, "{id}");
}

fn fan_out(id: &str, given: &Value, expect: &Value) {
    let server = |n| SocketAddr::from(([192, 0, 2, u8::try_from(n).unwrap()], 53));
    let servers: BTreeSet<_> = (0..number(&given["ready_dns_servers"]))
        .map(server)
        .collect();
    let known = usize::try_from(number(&given["known_ips_of_name"])).unwrap();
    let asked = schedule::servers_to_ask(known, &servers, &mut StdRng::seed_from_u64(1));
    match asked {
        Err(error) => assert!(
            error.to_string().starts_with(text(&expect["error"])),
            "{id}"
        ),
        Ok(asked) => {
            assert_eq!(
                expect["servers_asked_per_record_type"],
                json!(asked.len()),
                "{id}"
            );
            assert_eq!(
                asked.iter().collect::<BTreeSet<_>>().len(),
                asked.len(),
                "{id}: distinct"
            );
        }
    }
}

fn names_of(objects: &BTreeMap<ObjectKey, Resolver>) -> BTreeMap<ObjectKey, Fqdn> {
    let objects = objects.iter();
    objects
        .map(|(key, object)| (key.clone(), object.name.clone()))
        .collect()
}

fn lifecycle(id: &str, given: &Value, expect: &Value) {
    let mut firewalls = BTreeMap::<String, Fqdn>::new();
    let mut objects = BTreeMap::<ObjectKey, Resolver>::new();
    let mut runs = false;
    for step in list(&given["steps"]) {
        let word = |n: usize| text(&step[n]);
        match word(0) {
            "given_ef" | "create_ef" | "update_ef" => {
                firewalls.insert(word(1).to_owned(), fqdn(&step[2]));
            }
            "delete_ef" => {
                firewalls.remove(word(1));
            }
            "given_cr" | "create_cr" => {
                let object = object("n", word(1), word(2), Vec::new());
                objects.insert(object.key.clone(), object);
            }
            "delete_cr" => objects.retain(|key, _| key.name != word(1)),
            "start" => runs = true,
            other => panic!("{id}: unknown step {other}"),
        }
        if !runs {
            continue;
        }
        let wanted = firewalls.values().cloned().collect();
        let plan = names::plan(&wanted, &names_of(&objects), "n");
        for key in plan.delete {
            objects.remove(&key);
        }
        for (key, name) in plan.create {
            let object = object("n", &key.name, name.as_str(), Vec::new());
            assert!(objects.insert(key, object).is_none());
        }
        assert_eq!(
            names::plan(&wanted, &names_of(&objects), "n"),
            names::Plan::default(),
            "{id}: it settles"
        );
    }
    let expected = list(&expect["crs"]);
    assert_eq!(objects.len(), expected.len(), "{id}");
    for (object, expected) in objects.values().zip(expected) {
        assert_eq!(text(&expected["spec_name"]), object.name.as_str(), "{id}");
        if let Some(name) = expected["name"].as_str() {
            assert_eq!(name, object.key.name, "{id}");
        }
    }
}

fn address_set(id: &str, given: &Value, expect: &Value) {
    let mode = text(&given["ipMode"]);
    let subnets = list(&given["clusterSubnets"]).iter();
    let is_ignored = given["ignoreClusterSubnet"] == json!(true);
    let filter = AddressFilter {
        ipv4: mode != "v6",
        ipv6: mode != "v4",
        left_out: subnets
            .filter(|_| is_ignored)
            .map(|subnet| text(subnet).parse().unwrap())
            .collect(),
    };
    let address = |ip: &Value| json!({"ip": ip, "ttlSeconds": 30});
    let addresses: Vec<_> = list(&given["addresses"]).iter().map(address).collect();
    let entry = json!({"dnsName": "www.example.com.", "resolvedAddresses": addresses});
    let object = object("n", "o", "www.example.com.", vec![entry]);
    let set = list(&expect["set"]).iter();
    let set: BTreeSet<IpAddr> = set.map(|ip| text(ip).parse().unwrap()).collect();
    assert_eq!(object.addresses(&filter), set, "{id}");
}

/// The error about a document that has the key of an existing object and another name: the name of an object cannot
/// change.
fn renamed(old: &str, new: &str) -> String {
    let (old, new) = (
        object("n", "o", old, Vec::new()),
        object("n", "o", new, Vec::new()),
    );
    old.check_successor(&new).unwrap_err().to_string()
}

#[test]
fn a_silent_server_is_tried_again_soon_and_a_name_that_does_not_exist_after_half_an_hour() {
    let mut schedule = Schedule::new(Settings::default());
    let object = object("n", "o", "www.example.com.", Vec::new());
    schedule.apply(&object, NOW);
    let mut now = NOW;
    let mut waits = Vec::new();
    for _ in 0..12 {
        let due = schedule.take_due(now, 16);
        assert_eq!(due, [(object.name.clone(), 0)]);
        assert_eq!(
            schedule.next(),
            None,
            "a name has at most one look-up at a time"
        );
        schedule.ended(&object.name, Ended::Failed, now);
        let (next, _) = schedule.next().unwrap();
        waits.push(next.since(now));
        now = next;
    }
    assert_eq!(
        waits,
        [5, 10, 20, 40, 80, 160, 320, 640, 1280, 1800, 1800, 1800]
    );
    schedule.take_due(now, 16);
    schedule.ended(&object.name, Ended::Answered, now);
    assert_eq!(schedule.next().unwrap().0.since(now), 1800);
}
