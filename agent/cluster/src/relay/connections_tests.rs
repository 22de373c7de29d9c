//! Connections that use up a relay, over loopback.

use std::{collections::VecDeque, net::Ipv4Addr, sync::atomic::Ordering};

use fqdn_proto::relay::{
    FollowRequest, Frame, cluster_relay_client::ClusterRelayClient, step::Step,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpSocket,
};
use tonic::{Status, Streaming as Messages, transport::Endpoint};

use super::*;
use crate::relay::{
    bounds::Bounds,
    lab::{Authority, Relay, Secret, follow, follow_with, pods, start, start_with},
};

/// Timeout of the waits in these tests, far longer than any of them takes.
const LIMIT: Duration = Duration::from_secs(60);

/// A host of loopback that is not the agents'.
const STRANGER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 7);

async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    let done = tokio::time::timeout(LIMIT, future).await;
    done.unwrap_or_else(|_| panic!("not within {LIMIT:?}: {what}"))
}

/// Opens a TCP connection from the address [`STRANGER`].
async fn connect(relay: &Relay) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((STRANGER, 0).into()).unwrap();
    let connected = socket.connect(relay.address.parse().unwrap());
    connected.await.unwrap()
}

/// A stream of [`STRANGER`], whose frames are not read.
async fn stream(relay: &Relay) -> Result<Messages<Frame>, Status> {
    let endpoint = Endpoint::from_shared(format!("http://{}", relay.address)).unwrap();
    let endpoint = endpoint.local_address(Some(STRANGER.into()));
    let channel = endpoint.connect().await.unwrap();
    let mut client = ClusterRelayClient::new(channel);
    let frames = client.follow(FollowRequest::default()).await?;
    Ok(frames.into_inner())
}

async fn refused(relay: &Relay, refusal: Refusal) -> u64 {
    relay.shared.counters.refused.get(refusal)
}

async fn until_refused(relay: &Relay, refusal: Refusal, least: u64) {
    let what = format!("{refusal:?} is counted {least} times");
    polling::until_awaited(&what, || refused(relay, refusal), |count| *count >= least).await;
}

async fn is_closed(mut connection: TcpStream) {
    let mut rest = Vec::new();
    // A connection that is closed with bytes unread is reset.
    let _ended = soon("the connection ends", connection.read_to_end(&mut rest)).await;
}

#[tokio::test]
async fn connections_without_a_request_give_way_to_an_agent_and_to_each_other() {
    let bounds = Bounds {
        waiting: 8,
        handshake: LIMIT * 2,
        request: LIMIT * 2,
        ..Bounds::agents(9)
    };
    let relay = start("127.0.0.1:0", bounds, &pods(3)).await;
    let mut idle = VecDeque::new();
    for _ in 0..40 {
        idle.push_back(connect(&relay).await);
    }
    until_refused(&relay, Refusal::Crowded, 32).await;
    let mut agent = follow(&[&relay.address]);
    agent.until_pods(3).await;
    agent.until_fresh().await;
    // The oldest gave way. The agent's connection no longer counts once it has its stream.
    is_closed(idle.pop_front().unwrap()).await;
    for _ in 0..8 {
        idle.push_back(connect(&relay).await);
    }
    until_refused(&relay, Refusal::Crowded, 40).await;
    relay.shared.take(crate::relay::lab::change(3, "web"));
    agent.until_pods(4).await;
    assert_eq!(agent.listings, crate::resource::RESOURCES.len());
}

#[tokio::test]
async fn a_connection_that_sends_no_request_is_closed_in_time_at_every_step() {
    let bounds = Bounds {
        handshake: Duration::from_millis(200),
        request: Duration::from_millis(200),
        ..Bounds::agents(9)
    };
    let plain = start("127.0.0.1:0", bounds, &pods(1)).await;
    // The client sends nothing at all.
    is_closed(connect(&plain).await).await;
    until_refused(&plain, Refusal::Handshake, 1).await;
    // The client begins HTTP/2, and sends no request.
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    let mut half = connect(&plain).await;
    half.write_all(preface).await.unwrap();
    is_closed(half).await;
    until_refused(&plain, Refusal::NoRequest, 1).await;
    // The client sends a request whose body does not end.
    let mut request = connect(&plain).await;
    request.write_all(preface).await.unwrap();
    let path = b"/holdfast.relay.v1.ClusterRelay/Follow";
    let mut headers = vec![0x83, 0x86, 0x44, u8::try_from(path.len()).unwrap()];
    headers.extend(path);
    let length = u8::try_from(headers.len()).unwrap();
    let head = [0, 0, length, 1, 4, 0, 0, 0, 1];
    request.write_all(&head).await.unwrap();
    request.write_all(&headers).await.unwrap();
    is_closed(request).await;
    until_refused(&plain, Refusal::NoRequest, 2).await;

    // The client begins a handshake of TLS that does not go on.
    let secret = Secret::new(&Authority::new().issue());
    let relay = start_with("127.0.0.1:0", bounds, &pods(1), Some(&secret.files())).await;
    let mut slow = connect(&relay).await;
    slow.write_all(&[TLS_RECORD, 3, 1, 2, 0, 1]).await.unwrap();
    is_closed(slow).await;
    until_refused(&relay, Refusal::Handshake, 1).await;
    let mut agent = follow_with(&[&relay.address], Some(&secret.files()));
    agent.until_pods(1).await;
}

#[tokio::test]
async fn one_address_does_not_take_the_places_of_others() {
    let relay = start("127.0.0.1:0", Bounds::agents(8), &pods(2)).await;
    let mut streams = Vec::new();
    let refused = loop {
        match soon("an answer", stream(&relay)).await {
            Ok(stream) => streams.push(stream),
            Err(status) => break status,
        }
    };
    assert_eq!(streams.len(), 4);
    let text = refused.message();
    assert!(
        text.contains("serves 4 agents of 127.0.0.7 already") && text.contains("--max-agents"),
        "{text}"
    );
    let mut agents: Vec<_> = (0..2).map(|_| follow(&[&relay.address])).collect();
    for agent in &mut agents {
        agent.until_pods(2).await;
    }
    until_refused(&relay, Refusal::Agents, 1).await;
    assert_eq!(relay.shared.agents(), 6);
    drop(streams);
    let agents = async || relay.shared.agents();
    polling::until_awaited("places are free again", agents, |agents| *agents == 2).await;
}

#[tokio::test]
async fn an_agent_that_only_keeps_its_connection_open_is_closed() {
    let bounds = Bounds {
        silent: Duration::from_millis(300),
        ..Bounds::agents(9)
    };
    let relay = start("127.0.0.1:0", bounds, &pods(1)).await;
    let mut stopped = connect(&relay).await;
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    stopped.write_all(preface).await.unwrap();
    is_closed(stopped).await;
    until_refused(&relay, Refusal::Silent, 1).await;
}

/// Copies with a bounded speed.
async fn slow_copy(mut from: TcpStream, mut to: TcpStream, bytes: usize, pause: Duration) {
    let mut buffer = vec![0; bytes];
    let (mut reader, mut back) = to.split();
    let (mut source, mut sink) = from.split();
    let forth = async {
        loop {
            tokio::time::sleep(pause).await;
            match source.read(&mut buffer).await {
                Ok(bytes @ 1..) => back.write_all(&buffer[..bytes]).await.unwrap(),
                _ => return,
            }
        }
    };
    let requests = tokio::io::copy(&mut reader, &mut sink);
    tokio::join!(forth, requests).1.unwrap_or_default();
}

/// Starts a link to the relay with a bounded speed. Gives its address.
async fn slow_link(relay: &Relay, bytes: usize, pause: Duration) -> String {
    let link = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = link.local_addr().unwrap().to_string();
    let to = relay.address.parse().unwrap();
    relay.shared.tasks().spawn(async move {
        let (agent, _) = link.accept().await.unwrap();
        let socket = TcpSocket::new_v4().unwrap();
        // The kernel holds little, so that the relay sees how slow the link is.
        socket.set_recv_buffer_size(16 << 10).unwrap();
        let relay = socket.connect(to).await.unwrap();
        slow_copy(relay, agent, bytes, pause).await;
    });
    address
}

#[tokio::test]
async fn an_agent_behind_a_slow_link_gets_its_whole_snapshot() {
    // A frame takes longer than the time after which an agent that takes nothing is cut off.
    let bounds = Bounds {
        slow: Duration::from_secs(1),
        silent: Duration::from_secs(1),
        ..Bounds::agents(9)
    };
    let relay = start("127.0.0.1:0", bounds, &pods(9000)).await;
    let link = slow_link(&relay, 8 << 10, Duration::from_millis(40)).await;
    let endpoint = Endpoint::from_shared(format!("http://{link}")).unwrap();
    let endpoint = endpoint.initial_stream_window_size(65_535);
    let mut client = ClusterRelayClient::new(endpoint.connect().await.unwrap());
    let frames = client.follow(FollowRequest::default()).await.unwrap();
    let mut frames = frames.into_inner();
    let mut pods = 0;
    while let Some(frame) = soon("a frame", frames.message()).await.unwrap() {
        let steps = || frame.steps.iter().filter_map(|step| step.step.as_ref());
        pods += steps().filter(|step| matches!(step, Step::Put(_))).count();
        if steps().any(|step| matches!(step, Step::View(_))) {
            break;
        }
    }
    assert_eq!(pods, 9000);
    assert_eq!(relay.shared.counters.cut.load(Ordering::Relaxed), 0);
    assert_eq!(relay.shared.counters.snapshots.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn renewed_certificates_are_used_without_a_restart_and_torn_ones_are_not() {
    let authority = Authority::new();
    let mut of_relay = Secret::new(&authority.issue());
    let mut of_agent = Secret::new(&authority.issue());
    let files = of_relay.files();
    let relay = start_with("127.0.0.1:0", Bounds::agents(9), &pods(2), Some(&files)).await;
    let mut agent = follow_with(&[&relay.address], Some(&of_agent.files()));
    agent.until_pods(2).await;

    // The certificate of one renewal and the key of another.
    let (renewed, other) = (authority.issue(), authority.issue());
    let [ca, certificate, key] = renewed.clone();
    let torn = [ca.clone(), certificate, other[2].clone()];
    of_relay.replace(&torn);
    of_agent.replace(&torn);
    let stale = async || relay.shared.certificates.seconds();
    polling::until_awaited("the relay reports it", stale, |seconds| *seconds > 0).await;
    let problem = async || agent.health.view().relay_certificates.unwrap_or_default();
    let named = |text: &String| {
        text.contains("tls.crt: it is not the certificate of the private key in")
            && text.contains("tls.key")
    };
    polling::until_awaited("the agent reports it", problem, named).await;
    let of_others = Secret::new(&other);
    let mut second = follow_with(&[&relay.address], Some(&of_others.files()));
    second.until_pods(2).await;
    // The certificate's file is gone.
    of_relay.replace(&[ca, key]);
    let mut third = follow_with(&[&relay.address], Some(&of_others.files()));
    third.until_pods(2).await;
    assert!(relay.shared.certificates.seconds() > 0);

    // Relay and agent get files of another authority, without a restart.
    let authority = Authority::new();
    of_relay.replace(&authority.issue());
    of_agent.replace(&authority.issue());
    polling::until_awaited("the relay uses them", stale, |seconds| *seconds == 0).await;
    second.until_reason("relay").await;
    until_refused(&relay, Refusal::Certificate, 2).await;
    relay.shared.take(crate::relay::lab::change(2, "web"));
    agent.until_pods(3).await;
    agent.until_fresh().await;
    assert_eq!(agent.health.view().relay_certificates, None);
    assert_eq!(relay.shared.agents(), 1);
}

#[tokio::test]
async fn an_agent_and_a_relay_that_disagree_about_tls_name_the_flags() {
    let secret = Secret::new(&Authority::new().issue());
    let files = secret.files();
    let relay = start_with("127.0.0.1:0", Bounds::agents(9), &pods(1), Some(&files)).await;
    let agent = follow(&[&relay.address]);
    let flags = "give the agent --k8s-relay-ca, --k8s-relay-cert and --k8s-relay-key in the place of \
                 --k8s-relay-plaintext";
    agent.until_reason(flags).await;
    until_refused(&relay, Refusal::Handshake, 1).await;

    let relay = start("127.0.0.1:0", Bounds::agents(9), &pods(1)).await;
    let agent = follow_with(&[&relay.address], Some(&files));
    agent.until_reason("it does not answer with TLS: ").await;
    agent
        .until_reason("started with --plaintext, start it with --tls-cert")
        .await;
    until_refused(&relay, Refusal::Handshake, 1).await;
}
