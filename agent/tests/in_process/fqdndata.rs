//! Cilium's service against a real core.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use agent_core::{
    core::{
        Event,
        event::{MappingResult, StreamId},
    },
    endpoint::spec::EndpointSpec,
    policy::document::PolicyDocument,
    source_event::SourceEvent,
};
use dns_policy::mapping::Realised;
use fqdn_proto::fqdndata::{
    DnsResponseData, FqdnMapping, MetricsData, fqdn_data_client::FqdnDataClient,
};
use holdfast_agent::grpc::fqdndata::{FqdnDataService, Timings};
use polling::until_async;
use shared_maps::user::ipcache_key;
use tokio::{net::TcpListener, sync::oneshot, time::timeout};
use tonic::{Code, transport::Channel};

use crate::{
    cilium_proxy::{CiliumProxy, Memory},
    lab::{Lab, TEST_TIMEOUT, pod, policy, policy_with},
};

const UDP: u32 = 17;
/// An address outside of the cluster.
const SERVER: &str = "9.9.9.9";
const SERVER6: &str = "2001:db8::9";

/// Timings as in the product, but shorter.
fn brisk() -> Timings {
    Timings {
        pace: Duration::from_millis(50),
        ping: Duration::from_millis(200),
        ..Timings::default()
    }
}

async fn serve(lab: &Lab, timings: Timings) -> SocketAddr {
    serve_within(lab, timings, Duration::from_secs(5)).await
}

async fn serve_within(lab: &Lab, timings: Timings, max_delay: Duration) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = FqdnDataService::start(
        lab.core.clone(),
        lab.proxies.clone(),
        max_delay,
        lab.tasks.clone(),
        lab.stop.clone(),
    );
    let service = service.await.with_timings(timings);
    lab.tasks.spawn(service.serve(listener));
    address
}

fn dual_stack() -> EndpointSpec {
    EndpointSpec {
        addresses: vec!["10.0.0.2".parse().unwrap(), "fd00::2".parse().unwrap()],
        ..pod()
    }
}

/// An endpoint that no policy selects.
fn bystander() -> EndpointSpec {
    let mut spec = EndpointSpec {
        key: "dir/other.yaml".to_owned(),
        labels: vec!["k8s:app=other".to_owned()],
        addresses: vec!["10.0.0.3".parse().unwrap()],
        ..pod()
    };
    spec.interface.ifindex = 43;
    spec.interface.ifname = "lxc43".to_owned();
    spec
}

/// Learned addresses are open on one port, which is not the port of DNS. Without a DNS rule they
/// cannot be told apart from the rest of the world.
fn narrow(pattern: &str) -> PolicyDocument {
    policy_with(
        pattern,
        r#"toFQDNs: [{matchPattern: "*.example.com"}]
    toPorts: [{ports: [{port: "443", protocol: TCP}]}]"#,
    )
}

async fn set_policy(lab: &Lab, pattern: &str) {
    apply(lab, policy(pattern)).await;
}

async fn apply(lab: &Lab, document: PolicyDocument) {
    let event = SourceEvent::Apply(document);
    lab.core.send(Event::Policies(event)).await.unwrap();
}

async fn drop_policy(lab: &Lab) {
    let event = SourceEvent::Delete(policy("x").key);
    lab.core.send(Event::Policies(event)).await.unwrap();
}

fn asks(memory: &Memory, name: &str) -> bool {
    memory.allows("10.0.0.2", SERVER, UDP, name)
}

fn is_open(memory: &Memory) -> bool {
    memory.has_client("10.0.0.2") && asks(memory, "www.example.com.")
}

#[tokio::test]
async fn a_proxy_of_cilium_follows_policy() {
    let lab = Lab::start();
    let agent = serve(&lab, brisk()).await;
    let mut proxy = CiliumProxy::start(agent).await;
    let endpoints = vec![dual_stack(), bystander()];
    lab.sync(vec![policy("*.example.com")], endpoints).await;
    proxy.until("the first state", is_open).await;
    let memory = &proxy.memory;
    assert!(!asks(memory, "www.example.org."));
    assert!(memory.allows("fd00::2", SERVER6, UDP, "www.example.com."));
    assert!(!memory.allows("fd00::2", "fd00::2", UDP, "www.example.com."));
    assert!(!memory.allows("10.0.0.2", SERVER, 6, "www.example.com."));
    assert!(!memory.allows("10.0.0.3", SERVER, UDP, "www.example.com."));

    set_policy(&lab, "*.example.org").await;
    let changed = |memory: &Memory| asks(memory, "www.example.org.");
    proxy.until("the change", changed).await;
    assert!(!is_open(&proxy.memory));

    drop_policy(&lab).await;
    let shut = |memory: &Memory| !asks(memory, "www.example.org.");
    proxy.until("the revocation", shut).await;

    // A query of a removed pod may still be in the proxy's socket.
    set_policy(&lab, "*.example.com").await;
    proxy.until("rules again", is_open).await;
    let gone = SourceEvent::Delete(dual_stack().key);
    lab.core.send(Event::Endpoints(gone)).await.unwrap();
    proxy
        .until("the end of its rules", |memory| !is_open(memory))
        .await;
    assert!(proxy.memory.has_client("10.0.0.2") && proxy.memory.has_client("fd00::2"));
}

#[tokio::test]
async fn rules_removed_while_a_proxy_of_cilium_was_disconnected_are_revoked() {
    let lab = Lab::start();
    let agent = serve(&lab, brisk()).await;
    let rules = vec![policy("*.example.com")];
    lab.sync(rules, vec![dual_stack(), bystander()]).await;
    let mut proxy = CiliumProxy::start(agent).await;
    proxy.until("the first state", is_open).await;
    drop_policy(&lab).await;
    let mut proxy = proxy.reconnect(agent).await;
    proxy.until("the revocation", |m| !is_open(m)).await;
    set_policy(&lab, "*.example.com").await;
    proxy.until("rules again", is_open).await;

    // The agent is replaced, and the policy is removed in between.
    let (dir, memory) = lab.stop().await;
    let lab = Lab::start_in(dir, memory);
    let agent = serve(&lab, brisk()).await;
    let mut proxy = proxy.reconnect(agent).await;
    lab.sync(Vec::new(), vec![dual_stack(), bystander()]).await;
    proxy
        .until("the revocation of the run before", |m| !is_open(m))
        .await;
}

#[tokio::test]
async fn a_silent_connection_is_pinged_and_stays() {
    let lab = Lab::start();
    let agent = serve(&lab, brisk()).await;
    lab.sync(vec![policy("*.example.com")], vec![pod()]).await;
    let mut proxy = CiliumProxy::start(agent).await;
    proxy.until("the first state", is_open).await;
    proxy.pinged(8).await;
    set_policy(&lab, "*.example.org").await;
    proxy
        .until("a state by the same connection", |memory| !is_open(memory))
        .await;
    let defaults = Timings::default();
    assert!(defaults.ping < Duration::from_secs(10), "its own come then");
}

#[tokio::test]
async fn a_state_that_is_too_large_is_sent_without_entries_that_decide_nothing() {
    const SIZE: usize = 1000;
    let lab = Lab::start();
    let timings = Timings {
        limit: SIZE,
        ..brisk()
    };
    let agent = serve(&lab, timings).await;
    lab.sync(vec![narrow("*.example.com")], vec![pod()]).await;
    let mut proxy = CiliumProxy::start(agent).await;
    proxy.until("the first state", is_open).await;
    for n in 0..100u8 {
        let mut answer = answer(&format!("n{n}.example.com."));
        answer.record_ip = (0..4)
            .map(|m| format!("192.0.{m}.{n}").into_bytes())
            .collect();
        proxy.report(answer).await.unwrap();
    }
    apply(&lab, narrow("*.example.org")).await;
    let changed = |memory: &Memory| asks(memory, "www.example.org.");
    proxy.until("the change", changed).await;
    let memory = &proxy.memory;
    assert!(memory.size <= SIZE && !is_open(memory));
    assert!(memory.prefixes() < 100, "{}", memory.prefixes());
    assert!(lab.datapath.memory.lock().ipcache.len() > 400);
    assert_eq!(lab.proxies.oversized(), 0);
    let received = 4 << 20;
    assert!(Timings::default().limit < received);
}

#[tokio::test]
async fn a_state_that_is_still_too_large_is_counted() {
    let lab = Lab::start();
    let timings = Timings {
        limit: 20,
        ..brisk()
    };
    let agent = serve(&lab, timings).await;
    let proxy = CiliumProxy::start(agent).await;
    lab.sync(vec![policy("*.example.com")], vec![pod()]).await;
    let counted = || lab.proxies.oversized();
    until_async("the state is counted", counted, |counted| *counted > 0).await;
    assert!(!proxy.memory.has_client("10.0.0.2"), "it keeps what it has");
}

#[tokio::test]
async fn proxies_are_served_side_by_side_and_one_that_never_acknowledges_gets_no_more() {
    let lab = Lab::start();
    let agent = serve(&lab, brisk()).await;
    let mut silent = CiliumProxy::start(agent).await;
    let mut one = CiliumProxy::start(agent).await;
    let mut two = CiliumProxy::start(agent).await;
    lab.sync(vec![policy("*.example.com")], vec![pod()]).await;
    timeout(TEST_TIMEOUT, silent.receive()).await.unwrap();
    for proxy in [&mut one, &mut two] {
        proxy.until("the first state", is_open).await;
    }
    for domain in ["org", "net"] {
        set_policy(&lab, &format!("*.example.{domain}")).await;
        let name = format!("www.example.{domain}.");
        for proxy in [&mut one, &mut two] {
            proxy
                .until("the change", |memory| asks(memory, &name))
                .await;
        }
    }
    let reported = tokio::join!(
        one.report(answer("www.example.net.")),
        two.report(answer("api.example.net."))
    );
    reported.0.unwrap();
    reported.1.unwrap();

    silent.acknowledge().await;
    timeout(TEST_TIMEOUT, silent.receive()).await.unwrap();
    let current = |memory: &Memory| asks(memory, "www.example.net.");
    assert!(
        current(&silent.memory),
        "the states in between were not sent"
    );
    drop(silent);
    let streams = || {
        let views = lab.proxies.views().into_iter();
        views
            .filter(|view| view.instance == "fqdndata-rules")
            .count()
    };
    until_async("its place is free", streams, |streams| *streams <= 2).await;
}

fn answer(name: &str) -> FqdnMapping {
    FqdnMapping {
        fqdn: name.to_owned(),
        record_ip: vec![b"192.0.2.9".to_vec()],
        ttl: 300,
        source_ip: b"10.0.0.2".to_vec(),
        metrics_data: Some(MetricsData {
            dns_response_data: Some(DnsResponseData {
                is_response: true,
                ..DnsResponseData::default()
            }),
            server_addr: "9.9.9.9:53".to_owned(),
            protocol: "udp".to_owned(),
            ..MetricsData::default()
        }),
        ..FqdnMapping::default()
    }
}

async fn client_of(agent: SocketAddr) -> FqdnDataClient<Channel> {
    FqdnDataClient::connect(format!("http://{agent}"))
        .await
        .unwrap()
}

#[tokio::test]
async fn a_mapping_is_realised_before_it_is_answered() {
    let lab = Lab::start();
    let agent = serve(&lab, brisk()).await;
    let mut client = client_of(agent).await;
    lab.sync(vec![policy("*.example.com")], vec![pod()]).await;
    client
        .update_mapping_request(answer("www.example.com."))
        .await
        .unwrap();
    let key = ipcache_key([192, 0, 2, 9].into(), 32);
    assert!(lab.datapath.memory.lock().ipcache.contains_key(&key));

    let refused = client
        .update_mapping_request(answer("www.example.org."))
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::Unknown);
    let mut stranger = answer("www.example.com.");
    stranger.source_ip = b"10.9.9.9".to_vec();
    let refused = client.update_mapping_request(stranger).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unknown);
}

#[tokio::test]
async fn the_first_answers_of_a_new_pod_are_realised() {
    let lab = Lab::start();
    let agent = serve(&lab, brisk()).await;
    let mut client = client_of(agent).await;
    lab.sync(vec![policy("*.example.com")], vec![pod()]).await;
    client
        .update_mapping_request(answer("www.example.com."))
        .await
        .unwrap();
    let mut of_new = answer("new.example.com.");
    of_new.source_ip = b"10.0.0.3".to_vec();
    let new = EndpointSpec {
        labels: pod().labels,
        ..bystander()
    };
    // The endpoint is added, and another endpoint replaces it.
    for ifindex in [43, 44] {
        let mut spec = new.clone();
        spec.interface.ifindex = ifindex;
        for event in [
            SourceEvent::Delete(spec.key.clone()),
            SourceEvent::Apply(spec),
        ] {
            lab.core.send(Event::Endpoints(event)).await.unwrap();
        }
        client.update_mapping_request(of_new.clone()).await.unwrap();
    }
}

#[tokio::test]
async fn a_call_ends_in_time_whatever_the_core_waits_for() {
    let lab = Lab::start();
    let agent = serve_within(&lab, brisk(), Duration::from_millis(100)).await;
    let mut client = client_of(agent).await;
    lab.sync(vec![policy("*.example.com")], vec![pod()]).await;
    let shared = Arc::clone(&lab.datapath.memory);
    let (locked, is_locked) = oneshot::channel();
    let (release, released) = oneshot::channel::<()>();
    lab.tasks.spawn_blocking(move || {
        let _maps = shared.lock();
        locked.send(()).unwrap();
        let _over = released.blocking_recv();
    });
    is_locked.await.unwrap();
    set_policy(&lab, "*.example.org").await;
    let call = client.update_mapping_request(answer("www.example.com."));
    let refused = timeout(TEST_TIMEOUT, call).await.unwrap().unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    assert_eq!(refused.message(), "not realised in time");
    release.send(()).unwrap();
}

#[tokio::test]
async fn calls_return_results_again_after_a_pause_of_the_reader() {
    let lab = Lab::start();
    let agent = serve(&lab, brisk()).await;
    let mut client = client_of(agent).await;
    lab.sync(vec![policy("*.example.com")], vec![pod()]).await;
    client
        .update_mapping_request(answer("www.example.com."))
        .await
        .unwrap();
    let views = lab.proxies.views();
    let shared = views.iter().find(|view| view.instance == "fqdndata");
    let result = MappingResult {
        stream: StreamId(shared.unwrap().stream),
        sequence: u64::MAX,
        realised: Realised::Yes,
        durable: true,
        lease_end: None,
        revision: 1,
    };
    // Nothing else runs on this thread during the loop.
    for _ in 0..100_000 {
        lab.proxies.results(vec![result.clone()]);
    }
    assert_eq!(lab.proxies.closed_slow(), 1);
    let realised = async {
        let call = answer("api.example.com.");
        while client.update_mapping_request(call.clone()).await.is_err() {}
    };
    timeout(TEST_TIMEOUT, realised).await.expect("it goes on");
}
