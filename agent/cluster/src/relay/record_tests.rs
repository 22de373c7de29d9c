//! Objects become frames, and an agent that gets the frames has what its own watches would have given it.

use agent_core::{
    high_scale::scope::PodScope,
    policy::{document::PolicyDocument, source::cluster::ClusterDocuments},
    source_event::SourceEvent,
};
use fqdn_proto::{
    frames::position,
    relay::{Frame, Hello},
};
use proptest::prelude::*;
use prost::Message as _;
use serde_json::json;

use super::*;
use crate::{relay::receive::Receiver, resource::RESOURCES};

/// What a watch saw, before it is read.
#[derive(Clone, Debug)]
enum Saw {
    Put(&'static str, u8, u8),
    Gone(&'static str, u8),
    /// A list with these objects, all of one variant.
    List(&'static str, Vec<u8>, u8),
}

fn object(kind: &str, n: u8, variant: u8) -> Value {
    match kind {
        "Pod" => json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": format!("p{n}"), "namespace": "shop", "labels": {"app": format!("a{}", variant % 2)}},
            "spec": {"nodeName": "n1", "serviceAccountName": format!("s{}", variant % 2)},
            // Every third variant is malformed, and refused.
            "status": {"podIP": if variant == 2 { "x".to_owned() } else { format!("10.2.{n}.{variant}") }},
        }),
        "Namespace" => json!({
            "apiVersion": "v1", "kind": "Namespace",
            "metadata": {"name": format!("p{n}"), "labels": {"v": format!("{variant}")}},
        }),
        _ => json!({
            "apiVersion": "cilium.io/v2", "kind": "CiliumNetworkPolicy",
            "metadata": {"name": format!("p{n}"), "namespace": "shop"},
            "spec": {"endpointSelector": {}, "egress": [{"toCIDR": [format!("192.0.2.{variant}/32")]}]},
        }),
    }
}

fn key(kind: &str, n: u8) -> String {
    match kind {
        "Namespace" => format!("Namespace/p{n}"),
        _ => format!("{kind}/shop/p{n}"),
    }
}

fn batch<T>(saw: &Saw, read: impl Fn(&Value, &str) -> T) -> Batch<T> {
    let put = |kind: &str, n: u8, variant: u8| {
        let object = object(kind, n, variant);
        Seen::Put {
            digest: u64::from(n) << 8 | u64::from(variant),
            document: read(&object, &key(kind, n)),
            key: key(kind, n),
            is_marked: false,
            json: None,
        }
    };
    match saw {
        Saw::Put(kind, n, variant) => Batch {
            kind,
            seen: vec![put(kind, *n, *variant)],
        },
        Saw::Gone(kind, n) => Batch {
            kind,
            seen: vec![Seen::Gone(key(kind, *n))],
        },
        Saw::List(kind, all, variant) => {
            let mut seen = vec![Seen::Listing];
            seen.extend(all.iter().map(|n| put(kind, *n, *variant)));
            seen.push(Seen::Listed);
            Batch { kind, seen }
        }
    }
}

/// Documents as the core gets them.
struct Documents {
    cluster: ClusterDocuments,
    all: BTreeMap<String, PolicyDocument>,
}

impl Documents {
    fn new() -> Self {
        Self {
            cluster: ClusterDocuments::new(RESOURCES.iter().map(|one| one.kind)),
            all: BTreeMap::new(),
        }
    }

    fn take(&mut self, batch: Batch) {
        let events = self.cluster.take(batch);
        if self.cluster.is_complete() {
            for document in self.cluster.begin() {
                self.all.insert(document.key.clone(), document);
            }
        }
        for event in events {
            match event {
                SourceEvent::Apply(document) => {
                    self.all.insert(document.key.clone(), document);
                }
                SourceEvent::Delete(key) => drop(self.all.remove(&key)),
                other => panic!("{other:?}"),
            }
        }
    }

    fn refused(&self) -> BTreeSet<String> {
        self.cluster.refused().map(ToString::to_string).collect()
    }
}

/// An agent that follows a record.
struct Agent {
    receiver: Receiver,
    documents: Documents,
    /// Position of the agent's stream; `None` = it has no stream.
    at: Option<u64>,
    snapshots: usize,
}

impl Agent {
    fn new() -> Self {
        Self {
            receiver: Receiver::of(RESOURCES, PodScope::All),
            documents: Documents::new(),
            at: None,
            snapshots: 0,
        }
    }

    fn frame(&mut self, parts: &[Bytes]) {
        let frame = Frame::decode(parts.concat().as_slice()).unwrap();
        for batch in self.receiver.take(frame).unwrap().batches {
            self.documents.take(batch);
        }
    }

    fn hello(&mut self, continues: bool) {
        let kinds = RESOURCES.iter().map(|one| one.kind.to_owned());
        self.frame(&[part_of(step::Step::Hello(Hello {
            version: "1".to_owned(),
            epoch: "e".to_owned(),
            kinds: kinds.collect(),
            continues,
        }))]);
    }

    /// Takes everything that the record has for the agent.
    fn follow(&mut self, record: &mut Record) {
        if self.at.is_none() {
            let after = self.receiver.begin().map(|position| position.sequence);
            self.at = after.filter(|after| record.reaches(*after));
            if self.at.is_some() {
                self.hello(true);
            }
        }
        loop {
            let portion = self.at.map(|at| record.after(at));
            match portion {
                Some(Ok(portion)) if portion.parts.is_empty() => return,
                Some(Ok(portion)) => {
                    let mut parts = portion.parts;
                    parts.push(position(portion.sequence));
                    self.frame(&parts);
                    self.at = Some(portion.sequence);
                }
                None | Some(Err(TooFarBehind)) => {
                    self.snapshots += 1;
                    let snapshot = record.snapshot();
                    self.hello(false);
                    for frame in &snapshot.frames {
                        self.frame(std::slice::from_ref(frame));
                    }
                    self.frame(&[position(snapshot.sequence)]);
                    self.at = Some(snapshot.sequence);
                }
            }
        }
    }
}

fn listed_record(bytes: usize) -> Record {
    let mut record = Record::with_log(RESOURCES.iter().map(|one| one.kind), bytes);
    for resource in RESOURCES {
        record.take(batch(&Saw::List(resource.kind, Vec::new(), 0), read));
    }
    record
}

const KINDS: [&str; 3] = ["Pod", "Namespace", "CiliumNetworkPolicy"];

fn saw() -> impl Strategy<Value = Saw> {
    let kind = || (0..KINDS.len()).prop_map(|n| KINDS[n]);
    prop_oneof![
        4 => (kind(), 0..5_u8, 0..4_u8).prop_map(|(kind, n, variant)| Saw::Put(kind, n, variant)),
        2 => (kind(), 0..5_u8).prop_map(|(kind, n)| Saw::Gone(kind, n)),
        1 => (kind(), prop::collection::btree_set(0..5_u8, 0..5), 0..4_u8)
            .prop_map(|(kind, all, variant)| Saw::List(kind, all.into_iter().collect(), variant)),
    ]
}

/// What happens to the agent after a change.
#[derive(Clone, Copy, Debug)]
enum Then {
    Follows,
    Slow,
    Reconnects,
}

fn then() -> impl Strategy<Value = Then> {
    prop_oneof![
        Just(Then::Follows),
        Just(Then::Slow),
        Just(Then::Reconnects)
    ]
}

proptest! {
    #[test]
    fn an_agent_has_what_its_own_watches_would_give(
        history in prop::collection::vec((saw(), then()), 1..60),
        bytes in prop_oneof![Just(300), Just(LOG_MAX)],
    ) {
        let mut record = listed_record(bytes);
        let mut direct = Documents::new();
        for resource in RESOURCES {
            direct.take(batch(&Saw::List(resource.kind, Vec::new(), 0), parse_object));
        }
        let mut agent = Agent::new();
        agent.follow(&mut record);
        for (saw, then) in &history {
            record.take(batch(saw, read));
            direct.take(batch(saw, parse_object));
            match then {
                Then::Follows => agent.follow(&mut record),
                Then::Slow => {}
                Then::Reconnects => agent.at = None,
            }
        }
        agent.follow(&mut record);
        prop_assert_eq!(agent.documents.refused(), direct.refused());
        // The last good version of an object that is refused may be older if the agent was away.
        let is_refused = |key: &String| {
            let mut refused = direct.cluster.refused();
            refused.any(|error| error.key.as_ref() == Some(key))
        };
        direct.all.retain(|key, _| !is_refused(key));
        agent.documents.all.retain(|key, _| !is_refused(key));
        prop_assert_eq!(&agent.documents.all, &direct.all);
        // Nothing is left of templates that no object has.
        let pods = record.kinds.get("Pod").unwrap().objects.len();
        prop_assert!(record.templates.encoded.len() <= pods);
    }
}

#[test]
fn an_agent_that_comes_back_soon_gets_only_what_it_missed() {
    let mut record = listed_record(LOG_MAX);
    record.take(batch(&Saw::List("Pod", vec![0, 1], 0), read));
    let mut agent = Agent::new();
    agent.follow(&mut record);
    agent.at = None;
    record.take(batch(&Saw::Put("Pod", 2, 0), read));
    agent.follow(&mut record);
    assert_eq!((agent.snapshots, agent.documents.all.len()), (1, 3));
}

#[test]
fn a_change_that_leaves_nothing_to_send_is_not_sent() {
    let mut record = listed_record(LOG_MAX);
    record.take(batch(&Saw::Put("Pod", 0, 0), read));
    let sequence = record.sequence();
    let mut same = batch(&Saw::Put("Pod", 0, 0), read);
    if let Some(Seen::Put { digest, .. }) = same.seen.first_mut() {
        // A field that no agent reads changed.
        *digest += 1_000_000;
    }
    record.take(same);
    assert_eq!(record.sequence(), sequence);
}

#[test]
fn agents_share_a_snapshot_and_it_has_no_frame_of_more_than_its_bound() {
    let mut record = listed_record(LOG_MAX);
    let mut list = batch(&Saw::List("Pod", Vec::new(), 0), read);
    let all = (0..4000_u32).map(|n| {
        let name = format!("pod-with-a-long-name-{n}");
        let object = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": "shop", "labels": {"app": "web"}},
            "spec": {"nodeName": "node-1"}, "status": {"podIP": format!("10.2.{}.{}", n / 250, n % 250 + 1)},
        });
        let key = format!("Pod/shop/{name}");
        Seen::Put { digest: u64::from(n), document: read(&object, &key), key, is_marked: false, json: None }
    });
    list.seen.splice(1..1, all);
    record.take(list);
    let first = record.snapshot();
    assert!(Arc::ptr_eq(&first, &record.snapshot()));
    assert!(first.frames.len() > 1, "{}", first.frames.len());
    assert!(first.frames.iter().all(|frame| frame.len() <= CHUNK));
    let bytes: usize = first.frames.iter().map(Bytes::len).sum();
    // One template for all; the name, the node and the address are each pod's own.
    assert!(bytes / 4000 < 130, "{} bytes for each pod", bytes / 4000);
    assert_eq!(record.templates.encoded.len(), 1);
}

#[test]
fn refused_objects_are_reported_by_the_relay_once_every_kind_is_listed() {
    let mut record = Record::new(RESOURCES.iter().map(|one| one.kind));
    record.take(batch(&Saw::Put("Pod", 0, 2), read));
    assert_eq!(record.take_refusals(), None);
    for resource in RESOURCES {
        let all = if resource.kind == "Pod" {
            vec![0]
        } else {
            Vec::new()
        };
        record.take(batch(&Saw::List(resource.kind, all, 2), read));
    }
    assert_eq!(record.awaited(), None);
    let refusals = record.take_refusals().unwrap();
    assert_eq!(refusals.refused.keys().collect::<Vec<_>>(), ["Pod/shop/p0"]);
    record.take(batch(&Saw::Put("Pod", 0, 0), read));
    assert_eq!(record.take_refusals().unwrap().refused.len(), 0);
}
