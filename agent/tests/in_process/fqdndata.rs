//! Cilium's service against a real core.

use std::time::Duration;

use fqdn_proto::fqdndata::{
    DnsResponseData, FqdnMapping, MetricsData, PolicyState, PolicyStateResponse,
    fqdn_data_client::FqdnDataClient,
};
use holdfast_agent::{
    core::{Event, event::SourceEvent},
    grpc::fqdndata::FqdnDataService,
};
use shared_maps::user::ipcache_key;
use tokio::{net::TcpListener, sync::mpsc, time::timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Streaming, transport::Channel};

use crate::lab::{Lab, PATIENCE, pod, policy};

async fn serve(lab: &Lab) -> FqdnDataClient<Channel> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = FqdnDataService::start(
        lab.core.clone(),
        lab.proxies.clone(),
        Duration::from_secs(5),
        lab.tasks.clone(),
        lab.stop.clone(),
    );
    lab.tasks.spawn(service.await.serve(listener));
    FqdnDataClient::connect(format!("http://{address}"))
        .await
        .unwrap()
}

async fn next(states: &mut Streaming<PolicyState>) -> PolicyState {
    timeout(PATIENCE, states.message())
        .await
        .unwrap()
        .unwrap()
        .unwrap()
}

#[tokio::test]
async fn snapshots_come_one_at_a_time_and_say_what_is_revoked() {
    let lab = Lab::start();
    let mut client = serve(&lab).await;
    let (acks, requests) = mpsc::channel(4);
    let stream = client
        .stream_policy_state(ReceiverStream::new(requests))
        .await;
    let mut states = stream.unwrap().into_inner();
    lab.sync(vec![policy("*.example.com")], vec![pod()]).await;
    let first = next(&mut states).await;
    assert!(!first.request_id.is_empty());
    let rules = &first.egress_l7_dns_policy;
    assert!(
        rules
            .iter()
            .any(|rule| rule.dns_pattern == ["*.example.com"]),
        "{rules:?}"
    );
    let infos: Vec<_> = first
        .identity_to_endpoint_mapping
        .iter()
        .flat_map(|m| &m.endpoint_info)
        .collect();
    assert_eq!(infos[0].ip, [vec![10, 0, 0, 2]]);
    acks.send(PolicyStateResponse::default()).await.unwrap();

    lab.core
        .tell(Event::Policies(SourceEvent::Delete(policy("x").key)))
        .await
        .unwrap();
    let second = next(&mut states).await;
    let [rule] = second.egress_l7_dns_policy.as_slice() else {
        panic!("{second:?}");
    };
    assert_eq!(rule.dns_pattern, ["."]);
    assert_eq!(rule.dns_servers[0].dns_server_identity, 0);
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
    let mut client = serve(&lab).await;
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
