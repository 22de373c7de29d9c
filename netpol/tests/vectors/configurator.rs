//! Rules from policies, and that all renderers get the same rules.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
    sync::Arc,
};

use netpol::{
    cache::Object,
    configurator::{Configurator, PodRules},
    contiv::{ContivPolicy, Flow, InNamespaces, Match, MatchPeers, PodSet, PolicyId, PolicyType},
    pipeline::Pipeline,
    pod::{Pod, PodId},
    policy::{Block, Port, PortRange, Ports},
    processor::PodPolicies,
    render::nft::Limits,
    renderer::{self, RenderError, Renderer, Txn},
    rule::{self, Action},
    selector::{Condition, Requirement, Selector},
};
use serde_json::Value;

use super::read::{cases, fields, list, number, packet, pod, protocol, rules, text};

/// A label that only the pod of this name has.
const ONLY: &str = "only";

/// The pods of a case, each with its own label.
fn cluster(ips: &Value) -> Pipeline {
    let mut pipeline = Pipeline::new("node", Limits::default());
    for (id, address) in fields(ips) {
        let id = pod(id);
        pipeline.put(Object::Pod(Arc::new(Pod {
            labels: BTreeMap::from([(ONLY.to_owned(), id.to_string().replace('/', "."))]),
            id,
            node: Some("node".into()),
            addresses: vec![text(address).parse().unwrap()],
            created: None,
            ports: BTreeMap::new(),
        })));
    }
    pipeline
}

fn group(id: &Value) -> PodSet {
    let requirement = Requirement {
        key: ONLY.to_owned(),
        condition: Condition::In([text(id).replace('/', ".")].into()),
    };
    PodSet {
        namespaces: InNamespaces::Selected(Selector::default()),
        pods: Selector::new([requirement].into()),
    }
}

fn block(value: &Value) -> Block {
    let net = |value: &Value| text(value).parse().unwrap();
    let except: Vec<_> = list(&value["except"]).map(net).collect();
    Block::new("", net(&value["cidr"]), &except).unwrap()
}

fn port(value: &Value) -> Port {
    let number = number(&value["port"]).try_into().unwrap();
    Port {
        protocol: protocol(text(&value["proto"])).unwrap(),
        ports: PortRange::numbers(number, number).unwrap_or(PortRange::All),
    }
}

fn one_match(value: &Value) -> Match {
    let (pods, blocks) = (&value["pods"], &value["ipBlocks"]);
    let items = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let ports: Vec<Port> = list(&value["ports"]).map(port).collect();
    Match {
        flow: match text(&value["direction"]) {
            "INGRESS" => Flow::Ingress,
            _ => Flow::Egress,
        },
        path: String::new(),
        peers: match pods.is_null() && blocks.is_null() {
            true => MatchPeers::Everyone,
            false => MatchPeers::Of {
                groups: items(pods).iter().map(group).collect(),
                blocks: items(blocks).iter().map(block).collect(),
            },
        },
        ports: match ports.is_empty() {
            true => Ports::Any,
            false => Ports::Of(ports),
        },
    }
}

fn policy(value: &Value) -> ContivPolicy {
    ContivPolicy {
        id: PolicyId {
            namespace: text(&value["namespace"]).into(),
            name: text(&value["name"]).into(),
        },
        restricts: match text(&value["type"]) {
            "INGRESS" => PolicyType::Ingress,
            "EGRESS" => PolicyType::Egress,
            _ => PolicyType::All,
        },
        matches: list(&value["matches"]).map(one_match).collect(),
    }
}

/// Keeps the last rules of each pod.
struct Recorder {
    fails: bool,
    rules: Rc<RefCell<BTreeMap<PodId, PodRules>>>,
}

impl Renderer for Recorder {
    fn commit(&mut self, txn: &Txn<'_>) -> Result<(), RenderError> {
        for (pod, rules) in txn.rules() {
            self.rules.borrow_mut().insert(pod.clone(), rules.unwrap());
        }
        match self.fails {
            false => Ok(()),
            true => Err(RenderError {
                renderer: "recorder",
                reason: "fails".to_owned(),
            }),
        }
    }
}

#[test]
fn policies_become_rules() {
    let mut probes = 0;
    for case in cases(include_str!("configurator.json"), 7) {
        let (given, expect) = (&case["given"], &case["expect"]);
        let pods = cluster(&given["pod_ips"]);
        let policies: Vec<Arc<ContivPolicy>> = list(&given["policies"])
            .map(|one| Arc::new(policy(one)))
            .collect();
        let selected: BTreeMap<PodId, PodPolicies> = fields(&given["configure"])
            .map(|(id, selecting)| {
                let names: BTreeSet<&str> = list(selecting).map(text).collect();
                let of_pod = policies
                    .iter()
                    .filter(|p| names.contains(&*p.id.to_string()));
                let policies = PodPolicies {
                    addresses: pods.cache().pod(&pod(id)).unwrap().addresses.clone(),
                    ports: BTreeMap::new(),
                    policies: of_pod.cloned().collect(),
                };
                (pod(id), policies)
            })
            .collect();
        let configurator = Configurator {
            cache: pods.cache(),
            nat_loopback: given["nat_loopback_ip"]
                .as_str()
                .map(|a| a.parse().unwrap()),
        };
        let mut txn = Txn::new(configurator, true);
        for (id, policies) in &selected {
            txn.put(id.clone(), Some(policies));
        }
        // The second of three recorders fails.
        let recorded = [(); 3].map(|()| Rc::default());
        let mut recorders = [0, 1, 2].map(|n| Recorder {
            fails: n == 1,
            rules: Rc::clone(&recorded[n]),
        });
        let mut renderers = recorders.each_mut().map(|r| r as &mut dyn Renderer);
        assert!(renderer::commit(&mut renderers, &txn).is_err());
        for recorded in &recorded {
            let recorded = recorded.borrow();
            for (id, wanted) in fields(&expect["rules_derived"]) {
                let found = &recorded[&pod(id)];
                let [to, from] = ["vswitch-egress", "vswitch-ingress"];
                assert_eq!(
                    found.ingress,
                    rules(&wanted[to]),
                    "{} {id} {to}",
                    case["id"]
                );
                assert_eq!(
                    found.egress,
                    rules(&wanted[from]),
                    "{} {id} {from}",
                    case["id"]
                );
            }
            for probe in list(&expect["probes"]) {
                probes += 1;
                check_probe(&recorded, probe);
            }
        }
    }
    assert!(probes >= 261, "{probes}");
}

fn check_probe(recorded: &BTreeMap<PodId, PodRules>, probe: &Value) {
    let packet = packet(text(&probe["src"]), text(&probe["dst"]), probe);
    let rules = recorded[&pod(text(&probe["pod"]))].of(match text(&probe["side"]) {
        "vswitch-egress" => Flow::Ingress,
        _ => Flow::Egress,
    });
    let found = match rule::first(rules, &packet).map(|rule| rule.action) {
        None => "UNMATCHED",
        Some(Action::Permit) => "ALLOWED",
        Some(Action::Deny) => "DENIED",
    };
    assert_eq!(found, text(&probe["expect"]), "{probe}");
}
