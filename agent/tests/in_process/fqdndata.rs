//! Cilium's service against a real core.

use std::{net::SocketAddr, time::Duration};

use fqdn_proto::fqdndata::{
    DnsResponseData, FqdnMapping, MetricsData, fqdn_data_client::FqdnDataClient,
};
use holdfast_agent::{
    core::{
        Event,
        event::{EndpointSpec, SourceEvent},
    },
    grpc::fqdndata::{FqdnDataService, Manners},
    policy::parse::{PolicyDocument, parse_documents},
};
use shared_maps::user::ipcache_key;
use tokio::{net::TcpListener, time::timeout};
use tonic::Code;

use crate::{
    cilium_proxy::{CiliumProxy, Memory},
    lab::{Lab, PATIENCE, pod, policy},
};

const UDP: u32 = 17;
/// An address of the world.
const SERVER: &str = "9.9.9.9";
const SERVER6: &str = "2001:db8::9";

/// As in the product, only sooner.
fn brisk() -> Manners {
    Manners {
        pace: Duration::from_millis(50),
        ping: Duration::from_millis(200),
        ..Manners::default()
    }
}

async fn serve(lab: &Lab, manners: Manners) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = FqdnDataService::start(
        lab.core.clone(),
        lab.proxies.clone(),
        Duration::from_secs(5),
        lab.tasks.clone(),
        lab.stop.clone(),
    );
    let service = service.await.with_manners(manners);
    lab.tasks.spawn(service.serve(listener));
    address
}

fn dual_stack() -> EndpointSpec {
    EndpointSpec {
        addresses: vec!["10.0.0.2".parse().unwrap(), "fd00::2".parse().unwrap()],
        ..pod()
    }
}

/// Under no policy.
fn bystander() -> EndpointSpec {
    EndpointSpec {
        key: "dir/other.yaml".to_owned(),
        labels: vec!["k8s:app=other".to_owned()],
        ifindex: 43,
        ifname: "lxc43".to_owned(),
        addresses: vec!["10.0.0.3".parse().unwrap()],
        ..pod()
    }
}

/// Learned addresses are open on one port, which is not that of DNS: no DNS rule tells them
/// from the rest of the world.
fn narrow(pattern: &str) -> PolicyDocument {
    let text = format!(
        r#"
apiVersion: cilium.io/v2
kind: CiliumClusterwideNetworkPolicy
metadata: {{name: web}}
spec:
  endpointSelector: {{matchLabels: {{app: web}}}}
  egress:
  - toEntities: [world]
    toPorts:
    - ports: [{{port: "53", protocol: UDP}}]
      rules: {{dns: [{{matchPattern: "{pattern}"}}]}}
  - toFQDNs: [{{matchPattern: "*.example.com"}}]
    toPorts: [{{ports: [{{port: "443", protocol: TCP}}]}}]
"#
    );
    parse_documents(&text, "test").pop().unwrap().unwrap()
}

async fn set_policy(lab: &Lab, pattern: &str) {
    apply(lab, policy(pattern)).await;
}

async fn apply(lab: &Lab, document: PolicyDocument) {
    let event = SourceEvent::Apply(document);
    lab.core.tell(Event::Policies(event)).await.unwrap();
}

async fn drop_policy(lab: &Lab) {
    let event = SourceEvent::Delete(policy("x").key);
    lab.core.tell(Event::Policies(event)).await.unwrap();
}

fn asks(memory: &Memory, name: &str) -> bool {
    memory.allows("10.0.0.2", SERVER, UDP, name)
}

fn is_open(memory: &Memory) -> bool {
    memory.knows("10.0.0.2") && asks(memory, "www.example.com.")
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

    // A query of a pod that went may still be in the proxy's socket.
    set_policy(&lab, "*.example.com").await;
    proxy.until("rules again", is_open).await;
    let gone = SourceEvent::Delete(dual_stack().key);
    lab.core.tell(Event::Endpoints(gone)).await.unwrap();
    proxy
        .until("the end of its rules", |memory| !is_open(memory))
        .await;
    assert!(proxy.memory.knows("10.0.0.2") && proxy.memory.knows("fd00::2"));
}

#[tokio::test]
async fn rules_that_went_while_a_proxy_of_cilium_was_away_are_revoked() {
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

    // The agent is replaced, and the policy has gone meanwhile.
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
    let defaults = Manners::default();
    assert!(defaults.ping < Duration::from_secs(10), "its own come then");
}

#[tokio::test]
async fn a_state_too_large_goes_without_what_decides_nothing() {
    const SIZE: usize = 1000;
    let lab = Lab::start();
    let manners = Manners {
        limit: SIZE,
        ..brisk()
    };
    let agent = serve(&lab, manners).await;
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
    assert!(Manners::default().limit < received);
}

#[tokio::test]
async fn a_state_that_is_too_large_even_so_is_counted() {
    let lab = Lab::start();
    let manners = Manners {
        limit: 20,
        ..brisk()
    };
    let agent = serve(&lab, manners).await;
    let proxy = CiliumProxy::start(agent).await;
    lab.sync(vec![policy("*.example.com")], vec![pod()]).await;
    let counted = async {
        while lab.proxies.oversized() == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(PATIENCE, counted).await.unwrap();
    assert!(!proxy.memory.knows("10.0.0.2"), "it keeps what it has");
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

#[tokio::test]
async fn a_mapping_is_realised_before_it_is_answered() {
    let lab = Lab::start();
    let agent = serve(&lab, brisk()).await;
    let mut client = FqdnDataClient::connect(format!("http://{agent}"))
        .await
        .unwrap();
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
