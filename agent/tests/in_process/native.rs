//! The native service against a real core.

use std::{path::Path, sync::atomic::Ordering};

use agent_core::{
    core::Event, datapath::plan::Step, endpoint::spec::EndpointSpec, source_event::SourceEvent,
};
use daemon::state_dir::StateDir;
use fqdn_proto::native::{
    DnsRulesUpdate, EndpointDnsRules, HelloRequest, MappingRefusal, RulesAck,
    dns_rules_update::Kind,
};

use polling::until_async;
use shared_maps::user::ipcache_key;
use tokio::{sync::mpsc, time::timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use crate::lab::{Lab, Mappings, TEST_TIMEOUT, mapping, pod, policy};

/// A lab where the pod may reach `*.example.com`, with the pod's endpoint number and a stream of mappings.
async fn reporting() -> (Lab, u32, Mappings) {
    let lab = Lab::start_synced().await;
    let endpoint = lab.endpoint().await;
    let stream = lab.mappings().await;
    (lab, endpoint, stream)
}

/// Replaces the policy by one that allows this pattern.
async fn apply(lab: &Lab, pattern: &str) {
    let document = SourceEvent::Apply(policy(pattern));
    lab.core.send(Event::Policies(document)).await.unwrap();
}

/// The rules stream of one proxy.
struct Rules {
    acks: mpsc::Sender<RulesAck>,
    updates: Streaming<DnsRulesUpdate>,
}

impl Rules {
    async fn open(lab: &Lab) -> Self {
        let (acks, requests) = mpsc::channel(16);
        let answer = lab
            .connect()
            .await
            .update_dns_rules(ReceiverStream::new(requests))
            .await;
        Self {
            acks,
            updates: answer.unwrap().into_inner(),
        }
    }

    async fn next(&mut self) -> DnsRulesUpdate {
        timeout(TEST_TIMEOUT, self.updates.message())
            .await
            .unwrap()
            .unwrap()
            .unwrap()
    }

    /// Receives one whole snapshot: its revision and the rules.
    async fn snapshot(&mut self) -> (u64, Vec<EndpointDnsRules>) {
        let mut endpoints = Vec::new();
        loop {
            let update = self.next().await;
            match update.kind.unwrap() {
                Kind::Endpoints(chunk) => endpoints.extend(chunk.endpoints),
                Kind::SnapshotDone(_) => return (update.revision, endpoints),
            }
        }
    }

    /// The next delta that names rules.
    async fn delta(&mut self) -> (u64, Vec<EndpointDnsRules>, Vec<u32>) {
        loop {
            let update = self.next().await;
            let Kind::Endpoints(chunk) = update.kind.unwrap() else {
                panic!("a snapshot instead of a delta");
            };
            if !chunk.endpoints.is_empty() || !chunk.removed.is_empty() {
                return (update.revision, chunk.endpoints, chunk.removed);
            }
        }
    }

    async fn answer(&self, revision: u64, nack: &str) {
        let ack = RulesAck {
            revision,
            nack: nack.to_owned(),
            ..RulesAck::default()
        };
        self.acks.send(ack).await.unwrap();
    }
}

fn patterns(rules: &EndpointDnsRules) -> Vec<&str> {
    let selectors = rules.ports.iter().flat_map(|port| &port.rules);
    selectors
        .flat_map(|rule| &rule.names)
        .map(|name| name.match_pattern.as_str())
        .collect()
}

#[tokio::test]
async fn hello_contains_epoch_and_port() {
    let lab = Lab::start();
    let hello = HelloRequest {
        instance: "one".to_owned(),
        proxy_port: 10094,
        ..HelloRequest::default()
    };
    let answer = lab.connect().await.hello(hello).await.unwrap().into_inner();
    assert_eq!(answer.epoch.unwrap().start, 1);
    assert_eq!(answer.proxy_port, 10094);
}

#[tokio::test]
async fn hello_contains_the_state_directory_and_another_one_of_a_proxy_is_noted() {
    let lab = Lab::start();
    let dir = |path: &Path| {
        let dir = StateDir::look(path);
        let (device, inode) = dir.inode.unwrap();
        fqdn_proto::native::StateDir {
            path: dir.path.display().to_string(),
            device,
            inode,
        }
    };
    let own = dir(lab.dir.path());
    // A container may have the same directory at another path.
    let alias = fqdn_proto::native::StateDir {
        path: "/host/state".to_owned(),
        ..own.clone()
    };
    let elsewhere = dir(&lab.dir.path().join("state"));
    for (its, noted) in [
        (Some(own.clone()), None),
        (Some(alias), None),
        (Some(elsewhere.clone()), Some(elsewhere.path)),
        // An older proxy has no such field.
        (None, None),
    ] {
        let hello = HelloRequest {
            instance: "one".to_owned(),
            proxy_port: 10094,
            state_dir: its,
            ..HelloRequest::default()
        };
        let mut client = lab.connect().await;
        let answer = client.hello(hello).await.unwrap().into_inner();
        assert_eq!(answer.state_dir, Some(own.clone()));
        let stream = Mappings::open(client).await.unwrap();
        let views = lab.proxies.views();
        let of_it: Vec<_> = views.iter().map(|view| &view.other_state_dir).collect();
        assert_eq!(of_it, [&noted]);
        drop(stream);
        until_async(
            "the stream ends",
            || lab.proxies.views().len(),
            |left| *left == 0,
        )
        .await;
    }
}

#[tokio::test]
async fn no_rules_before_both_sources_are_synced() {
    let lab = Lab::start();
    let mut rules = Rules::open(&lab).await;
    for event in [
        Event::Policies(SourceEvent::Init),
        Event::Policies(SourceEvent::Apply(policy("*.example.com"))),
        Event::Policies(SourceEvent::InitDone),
        Event::Endpoints(SourceEvent::Init),
        Event::Endpoints(SourceEvent::Apply(pod())),
    ] {
        lab.core.send(event).await.unwrap();
    }
    // An answer means that the core has received all of them.
    lab.core.summary().await.unwrap();
    assert!(!lab.proxies.watch_rules().borrow().ready);
    lab.core
        .send(Event::Endpoints(SourceEvent::InitDone))
        .await
        .unwrap();
    let (_, endpoints) = rules.snapshot().await;
    assert_eq!(endpoints.len(), 1, "the first snapshot has everything");
    assert_eq!(patterns(&endpoints[0]), ["*.example.com"]);
}

#[tokio::test]
async fn a_change_of_policy_is_a_delta_and_a_refusal_brings_a_snapshot() {
    let lab = Lab::start();
    let mut rules = Rules::open(&lab).await;
    lab.sync(vec![policy("*.example.com")], vec![pod()]).await;
    let (revision, _) = rules.snapshot().await;
    rules.answer(revision, "").await;

    apply(&lab, "*.example.org").await;
    let (later, endpoints, _) = rules.delta().await;
    assert!(later > revision);
    assert_eq!(patterns(&endpoints[0]), ["*.example.org"]);
    rules.answer(later, "cannot").await;
    until_async(
        "a refusal is shown",
        || lab.proxies.views(),
        |views| views.iter().any(|view| view.nack.is_some()),
    )
    .await;

    apply(&lab, "*.example.net").await;
    let (_, endpoints) = rules.snapshot().await;
    assert_eq!(patterns(&endpoints[0]), ["*.example.net"]);

    lab.core
        .send(Event::Endpoints(SourceEvent::Delete(pod().key)))
        .await
        .unwrap();
    let (_, _, removed) = rules.delta().await;
    assert_eq!(removed.len(), 1);
}

#[tokio::test]
async fn an_allowed_answer_is_realised_in_the_ipcache_and_leased() {
    let (lab, endpoint, mut stream) = reporting().await;
    let address = [192, 0, 2, 7];
    stream
        .send(vec![mapping(endpoint, 1, "www.example.com.", address)])
        .await;
    let result = stream.result(1).await;
    assert!(result.realised, "{result:?}");
    assert!(result.lease_end > dns_policy::boot_time::BootTime::now().nanos());
    let memory = lab.datapath.memory.lock();
    let value = memory.ipcache[&ipcache_key(address.into(), 32)];
    let identity = shared_maps::IdentityId(value.sec_identity);
    assert!(identity.is_local_scope());
    let map = memory.policy.values().next().unwrap();
    assert!(
        map.keys().any(|key| key.sec_label == identity.0),
        "the policy map has it"
    );
}

#[tokio::test]
async fn an_answer_wakes_no_further_thread_of_the_agent_unless_a_file_is_to_be_written() {
    let (lab, endpoint, mut stream) = reporting().await;
    let new = |sequence: u8| {
        let address = [192, 0, 2, sequence];
        mapping(endpoint, sequence.into(), "www.example.com.", address)
    };
    // The identity of the name's addresses is new, so it must be on disk first.
    stream.send(vec![new(1)]).await;
    assert!(stream.result(1).await.realised);
    // The core has finished its other work after this.
    lab.core.summary().await.unwrap();
    let written = |step: &Step| matches!(step, Step::Checkpoint(_) | Step::WriteEndpoint(..));
    let steps = std::mem::take(&mut *lab.datapath.steps.lock());
    let files: Vec<_> = steps.iter().filter(|(step, _)| written(step)).collect();
    assert!(!files.is_empty() && files.iter().all(|(_, by_core)| *by_core));

    let mut by_stream = 0;
    for sequence in 2..=30 {
        stream.send(vec![new(sequence)]).await;
        assert!(stream.result(sequence.into()).await.realised);
        let steps = std::mem::take(&mut *lab.datapath.steps.lock());
        by_stream += steps.iter().filter(|(_, by_core)| !by_core).count();
        let written = steps
            .iter()
            .any(|(step, by_core)| written(step) && !by_core);
        assert!(!written, "{steps:?}");
    }
    assert!(by_stream > 0, "each answer waited for the core's thread");
}

#[tokio::test]
async fn a_panic_on_a_streams_thread_ends_the_core() {
    let (lab, endpoint, mut stream) = reporting().await;
    let new = |sequence: u64| {
        let [.., high, low] = sequence.to_be_bytes();
        mapping(endpoint, sequence, "www.example.com.", [198, 18, high, low])
    };
    stream.send(vec![new(1)]).await;
    assert!(stream.result(1).await.realised);
    lab.datapath.panics.store(true, Ordering::Relaxed);
    let ended = timeout(TEST_TIMEOUT, lab.core.closed());
    let sending = async {
        // The core's thread may carry out some of them.
        for sequence in 2.. {
            stream.offer(vec![new(sequence)]).await;
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        ended = ended => ended.expect("the core continues the change that a panic interrupted"),
        () = sending => {}
    }
}

#[tokio::test]
async fn mappings_that_policy_does_not_allow_are_refused_with_a_reason() {
    let (lab, endpoint, mut stream) = reporting().await;
    let denied = mapping(endpoint, 1, "www.example.org.", [192, 0, 2, 8]);
    let stranger = mapping(endpoint + 1, 2, "www.example.com.", [192, 0, 2, 8]);
    let mut reused = mapping(endpoint, 3, "www.example.com.", [192, 0, 2, 8]);
    reused.endpoint.as_mut().unwrap().ifindex = 43;
    let mut malformed = mapping(endpoint, 4, "www.example.com.", [192, 0, 2, 8]);
    malformed.addresses.clear();
    for (message, expected) in [
        (denied, MappingRefusal::NotAllowed),
        (stranger, MappingRefusal::EndpointUnknown),
        (reused, MappingRefusal::EndpointUnknown),
        (malformed, MappingRefusal::Invalid),
    ] {
        let sequence = message.sequence;
        stream.send(vec![message]).await;
        let result = stream.result(sequence).await;
        assert!(!result.realised);
        assert_eq!(result.refusal(), expected, "sequence {sequence}");
    }
    let memory = lab.datapath.memory.lock();
    assert!(
        !memory
            .ipcache
            .contains_key(&ipcache_key([192, 0, 2, 8].into(), 32))
    );
}

#[tokio::test]
async fn a_proxy_that_reads_nothing_does_not_hold_another_up() {
    let lab = Lab::start();
    let _stuck = Rules::open(&lab).await;
    let _mute = lab.mappings().await;
    let mut good = Rules::open(&lab).await;
    lab.sync(vec![policy("*.example.com")], vec![pod()]).await;
    good.snapshot().await;
    for round in 0..50 {
        apply(&lab, &format!("*.round{round}.example.com")).await;
    }
    let last = async {
        loop {
            let (_, endpoints, _) = good.delta().await;
            if patterns(&endpoints[0]) == ["*.round49.example.com"] {
                return;
            }
        }
    };
    timeout(TEST_TIMEOUT, last).await.unwrap();
    let specs: Vec<EndpointSpec> = vec![pod()];
    assert_eq!(lab.core.summary().await.unwrap().endpoints, specs.len());
}

/// Waits until `status` shows a rules stream for each of these acknowledged revisions, and no
/// other.
async fn acknowledged(lab: &Lab, mut wanted: Vec<(u64, bool)>) {
    wanted.sort_unstable();
    let shown = || {
        let views = lab.proxies.views();
        let rules = views.iter().filter(|view| view.kind == "rules");
        let mut shown: Vec<_> = rules
            .map(|view| (view.acked_revision, view.nack.is_some()))
            .collect();
        shown.sort_unstable();
        shown
    };
    until_async(&format!("{wanted:?}"), shown, |shown| *shown == wanted).await;
}

#[tokio::test]
async fn each_stream_has_its_own_revision_and_none_waits_for_another() {
    let lab = Lab::start();
    let mut good = Rules::open(&lab).await;
    let mut refusing = Rules::open(&lab).await;
    let mut silent = Rules::open(&lab).await;
    lab.sync(vec![policy("*.example.com")], vec![pod()]).await;
    let (first, _) = good.snapshot().await;
    for stream in [&mut refusing, &mut silent] {
        assert_eq!(stream.snapshot().await.0, first);
    }
    good.answer(first, "").await;
    refusing.answer(first, "").await;
    acknowledged(&lab, vec![(first, false), (first, false), (0, false)]).await;

    apply(&lab, "*.example.org").await;
    let (second, ..) = good.delta().await;
    good.answer(second, "").await;
    assert_eq!(refusing.delta().await.0, second);
    refusing.answer(second, "no room").await;
    acknowledged(&lab, vec![(second, false), (first, true), (0, false)]).await;

    // The stream that refused gets a snapshot, and its acknowledgements count again. The others continue.
    apply(&lab, "*.example.net").await;
    let (third, ..) = good.delta().await;
    good.answer(third, "").await;
    assert_eq!(refusing.snapshot().await.0, third);
    refusing.answer(third, "").await;
    acknowledged(&lab, vec![(third, false), (third, false), (0, false)]).await;
    assert_eq!(silent.delta().await.0, second);
}

#[tokio::test]
async fn after_a_restart_all_wait_for_the_sync_and_get_a_snapshot_at_once() {
    let lab = Lab::start_synced().await;
    let endpoint = lab.endpoint().await;
    let (dir, memory) = lab.stop().await;
    let lab = Lab::start_in(dir, memory);
    let mut streams = Vec::new();
    for _ in 0..3 {
        streams.push(Rules::open(&lab).await);
    }
    lab.core
        .send(Event::Policies(SourceEvent::Init))
        .await
        .unwrap();
    apply(&lab, "*.example.org").await;
    lab.core.summary().await.unwrap();
    // Endpoints of the previous run are restored, but none of their rules is sent yet.
    assert_eq!(lab.core.snapshot().await.unwrap().endpoints.len(), 1);
    assert!(!lab.proxies.watch_rules().borrow().ready);
    lab.sync(vec![policy("*.example.org")], vec![pod()]).await;
    for stream in &mut streams {
        let (_, endpoints) = stream.snapshot().await;
        let [rules] = endpoints.as_slice() else {
            panic!("{endpoints:?}");
        };
        assert_eq!(rules.endpoint_id, endpoint);
        assert_eq!(patterns(rules), ["*.example.org"]);
    }
}
