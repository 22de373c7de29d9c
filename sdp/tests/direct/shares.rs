//! One pod uses all that it can get. The other pod still gets answers, and memory stays bounded.

use std::{
    io::{ErrorKind, Read, Write},
    net::{IpAddr, Ipv4Addr, TcpStream},
    time::Duration,
};

use hickory_proto::{op::ResponseCode, rr::RecordType};
use holdfast_sdp::stats::{Protocol, QueryResult};
use polling::until;

use crate::bench::{
    Bench, NEIGHBOUR, Options, TEST_TIMEOUT, answer, query, rcode, receive_frame, send_frames,
};

/// Another address of the endpoint of most tests.
const SECOND_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 9));
/// Bytes: more than the kernel's buffers on the path and the proxy's share can hold together.
const FAR_TOO_MUCH: usize = 128 << 20;

/// A proxy with `limit` places for queries in flight.
fn with_in_flight(limit: usize) -> Bench {
    with(|options| options.config.in_flight = limit)
}

/// A proxy with one place for a query in flight. Other queries wait for it longer than any test
/// lasts.
fn with_one_place() -> Bench {
    with(|options| {
        options.config.in_flight = 1;
        options.config.in_flight_grace = 60 * TEST_TIMEOUT;
    })
}

fn with(change: impl FnOnce(&mut Options)) -> Bench {
    let mut options = Options::default();
    change(&mut options);
    Bench::new(options)
}

/// Sends `queries` different questions that the server does not answer.
fn ask_in_vain(client: &TcpStream, queries: u16) {
    for id in 0..queries {
        let name = format!("x{id}.good.example");
        send_frames(client, &[&query(id, &name, RecordType::A)]);
    }
}

/// Answers the next query of a connection at the server.
fn serve(at_server: &TcpStream, address: &str) {
    let asked = receive_frame(at_server).expect("a query");
    send_frames(at_server, &[&answer(&asked, &[address])]);
}

/// The code of the next answer.
fn next_code(client: &TcpStream) -> ResponseCode {
    rcode(&receive_frame(client).expect("an answer"))
}

/// Queries a zone, receives the query at the server, and returns the server's side with the
/// beginning of its answer.
fn transfer(bench: &Bench, client: &TcpStream) -> (TcpStream, Vec<u8>) {
    send_frames(client, &[&query(1, "www.good.example", RecordType::AXFR)]);
    let server = bench.tcp_at_server();
    let asked = receive_frame(&server).expect("a query");
    // The SOA of an unfinished zone transfer, so that more messages belong to it.
    let mut first = answer(&asked, &[]);
    first[7] = 1;
    first.extend_from_slice(&[0xc0, 12, 0, 6, 0, 1, 0, 0, 0, 60, 0, 22, 0, 0]);
    first.extend_from_slice(&[0; 20]);
    (server, first)
}

/// A large message in the middle of a zone transfer, with its length: no records of interest.
fn middle(first: &[u8]) -> Vec<u8> {
    const RECORD: [u8; 16] = [0, 0, 1, 0, 1, 0, 0, 0, 60, 0, 5, 0, 0, 0, 0, 0];
    let mut message = first[..2].to_vec();
    message.extend_from_slice(&[0x84, 0, 0, 0]);
    let records = u16::try_from(60_000 / RECORD.len()).expect("few");
    message.extend_from_slice(&records.to_be_bytes());
    message.extend_from_slice(&[0; 4]);
    for _ in 0..records {
        message.extend_from_slice(&RECORD);
    }
    let length = u16::try_from(message.len()).expect("a frame");
    [&length.to_be_bytes(), &message[..]].concat()
}

/// Sends `message` repeatedly until the peer has read nothing for a while, or has read far too
/// much. Returns the number of bytes that it read.
fn flood(mut server: &TcpStream, message: &[u8]) -> usize {
    const NO_MORE: Duration = Duration::from_millis(300);
    server.set_write_timeout(Some(NO_MORE)).expect("a timeout");
    let mut sent = 0;
    while sent < FAR_TOO_MUCH {
        let rest = message.get(sent % message.len()..).expect("the rest");
        match server.write(rest) {
            Ok(length) => sent += length,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => panic!("the proxy closed the connection: {error}"),
        }
    }
    sent
}

#[test]
fn a_server_is_not_read_while_its_answers_wait_for_a_client_that_does_not_read() {
    let bench = Bench::new(Options::default());
    let client = bench.tcp_client();
    let (server, first) = transfer(&bench, &client);
    send_frames(&server, &[&first]);
    let message = middle(&first);
    let sent = flood(&server, &message);
    assert!(sent < FAR_TOO_MUCH, "the proxy took {sent} bytes");
    // No message is lost: when the client reads, all of them arrive.
    drop(receive_frame(&client).unwrap());
    let mut left = sent / message.len() * message.len();
    let mut taken = vec![0; 1 << 16];
    while left > 0 {
        let most = left.min(taken.len());
        left -= (&client).read(&mut taken[..most]).unwrap();
    }
}

#[test]
fn connections_that_read_nothing_use_no_more_memory_than_their_pods_share() {
    const MEMORY: usize = 2 << 20;
    const CONNECTIONS: usize = 16;
    let bench = with(|options| {
        options.tcp_connections = 64;
        options.config.tcp_memory = MEMORY;
    });
    let most = u64::try_from(MEMORY / 2).unwrap();
    std::thread::scope(move |scope| {
        for _ in 0..CONNECTIONS {
            let client = bench.tcp_client();
            let (mut server, first) = transfer(&bench, &client);
            scope.spawn(move || {
                send_frames(&server, &[&first]);
                let message = middle(&first);
                server.set_write_timeout(Some(TEST_TIMEOUT)).unwrap();
                // Sends as much as the proxy reads, or until it closes the connection.
                let enough = (16 << 20) / message.len();
                (0..enough).all(|_| server.write_all(&message).is_ok());
                drop(client);
            });
        }
        let used_and_overdrawn = || {
            let used = bench.stats.tcp_bytes.get();
            assert!(used <= most, "{used} of {most} bytes");
            (used, bench.stats.tcp_overdrawn.get())
        };
        until(
            "the share is used up",
            used_and_overdrawn,
            |(_, overdrawn)| *overdrawn > 0,
        );
        // The neighbour has a share of its own.
        let neighbour = bench.tcp_client_from(NEIGHBOUR);
        send_frames(&neighbour, &[&query(1, "a.good.example", RecordType::A)]);
        serve(&bench.tcp_at_server(), "192.0.2.1");
        assert_eq!(next_code(&neighbour), ResponseCode::NoError);
        let stats = bench.stats.clone();
        drop(bench);
        until(
            "all memory is free",
            || stats.tcp_bytes.get(),
            |used| *used == 0,
        );
    });
}

#[test]
fn unanswered_queries_over_tcp_leave_places_for_another_pod() {
    let bench = with_in_flight(8);
    let greedy = bench.tcp_client();
    ask_in_vain(&greedy, 8);
    let at_server = bench.tcp_at_server();
    for _ in 0..4 {
        receive_frame(&at_server).unwrap();
    }
    for _ in 0..4 {
        assert_eq!(next_code(&greedy), ResponseCode::ServFail);
    }
    // A second connection from another address belongs to the same pod.
    let more = bench.tcp_client_from(SECOND_ADDRESS);
    ask_in_vain(&more, 1);
    assert_eq!(next_code(&more), ResponseCode::ServFail);
    let neighbour = bench.tcp_client_from(NEIGHBOUR);
    ask_in_vain(&neighbour, 1);
    serve(&bench.tcp_at_server(), "192.0.2.1");
    assert_eq!(next_code(&neighbour), ResponseCode::NoError);
    assert_eq!(bench.stats.queries.get(QueryResult::Shed), 5);
}

#[test]
fn a_query_that_waits_for_a_place_gets_the_one_that_another_connection_frees() {
    let bench = with_one_place();
    let first = bench.tcp_client();
    ask_in_vain(&first, 1);
    let at_server = bench.tcp_at_server();
    let asked = receive_frame(&at_server).unwrap();
    let second = bench.tcp_client();
    ask_in_vain(&second, 1);
    until(
        "the second query has come",
        || bench.stats.transports.get(Protocol::Tcp),
        |seen| *seen == 2,
    );
    send_frames(&at_server, &[&answer(&asked, &["192.0.2.1"])]);
    receive_frame(&first).unwrap();
    until(
        "the second query is sent on",
        || bench.stats.in_flight.get(),
        |seen| *seen == 1,
    );
    serve(&at_server, "192.0.2.2");
    assert_eq!(next_code(&second), ResponseCode::NoError);
}

#[test]
fn a_query_that_waits_for_a_connection_gets_the_one_that_another_query_frees() {
    // The pod may have one connection.
    let bench = with(|options| options.tcp_connections = 2);
    let client = bench.tcp_client();
    ask_in_vain(&client, 1);
    let at_server = bench.tcp_at_server();
    let asked = receive_frame(&at_server).unwrap();
    send_frames(&client, &[&query(7, "z.good.example", RecordType::AXFR)]);
    until(
        "the transfer has come",
        || bench.stats.transports.get(Protocol::Tcp),
        |seen| *seen == 2,
    );
    assert_eq!(bench.stats.server_connections.get(), 1);
    // The neighbour has a share of its own.
    let neighbour = bench.tcp_client_from(NEIGHBOUR);
    ask_in_vain(&neighbour, 1);
    serve(&bench.tcp_at_server(), "192.0.2.1");
    assert_eq!(next_code(&neighbour), ResponseCode::NoError);
    send_frames(&at_server, &[&answer(&asked, &["192.0.2.1"])]);
    assert_eq!(next_code(&client), ResponseCode::NoError);
    serve(&bench.tcp_at_server(), "192.0.2.2");
    assert_eq!(receive_frame(&client).unwrap()[..2], [0, 7]);
    assert_eq!(bench.stats.server_connections_made.get(), 3);
    drop(client);
    let stats = bench.stats.clone();
    drop((bench, neighbour));
    until(
        "all places are free",
        || stats.server_connections.get(),
        |open| *open == 0,
    );
}

#[test]
fn a_large_query_that_waits_for_a_place_counts_as_its_pods_memory() {
    const PADDING: u16 = 60_000;
    let bench = with_one_place();
    let first = bench.tcp_client();
    ask_in_vain(&first, 1);
    receive_frame(&bench.tcp_at_server()).unwrap();
    let mut large = query(2, "a.good.example", RecordType::A);
    // One OPT record with one padding option.
    large[11] = 1;
    large.extend_from_slice(&[0, 0, 41, 4, 208, 0, 0, 0, 0]);
    for number in [PADDING + 4, 12, PADDING] {
        large.extend_from_slice(&number.to_be_bytes());
    }
    large.resize(large.len() + usize::from(PADDING), 0);
    let second = bench.tcp_client();
    send_frames(&second, &[&large]);
    // Two copies are in buffers and the third one waits. The allowance is less than half of one.
    until(
        "all three copies count",
        || bench.stats.tcp_bytes.get(),
        |seen| *seen > u64::from(PADDING) * 5 / 2,
    );
}

#[test]
fn unanswered_queries_over_both_transports_leave_places_for_another_pod() {
    let bench = with_in_flight(16);
    let greedy = bench.tcp_client();
    ask_in_vain(&greedy, 16);
    // Simultaneous queries over UDP may get places in addition to those over TCP.
    until(
        "the connection has half of the places",
        || bench.stats.queries.get(QueryResult::Shed),
        |seen| *seen == 8,
    );
    let udp = bench.client();
    for id in 0..16 {
        let name = format!("u{id}.good.example");
        udp.send(&query(id, &name, RecordType::A)).unwrap();
    }
    until(
        "the pod has its share",
        || bench.stats.queries.get(QueryResult::Shed),
        |seen| *seen == 20,
    );
    assert_eq!(bench.stats.in_flight.get(), 12);
    let over_tcp = bench.tcp_client_from(NEIGHBOUR);
    ask_in_vain(&over_tcp, 1);
    let neighbour = bench.client_from(NEIGHBOUR);
    neighbour
        .send(&query(1, "n.good.example", RecordType::A))
        .unwrap();
    until(
        "the neighbour's queries are sent on",
        || bench.stats.in_flight.get(),
        |seen| *seen == 14,
    );
    assert_eq!(bench.stats.queries.get(QueryResult::Shed), 20);
}

#[test]
fn connections_are_counted_by_pod_and_not_by_address() {
    let bench = Bench::new(Options::default());
    let mut all: Vec<_> = (0..4).map(|_| bench.tcp_client()).collect();
    until(
        "half of them are open",
        || bench.stats.tcp_connections.get(),
        |seen| *seen == 4,
    );
    let refused = bench.tcp_client_from(SECOND_ADDRESS);
    assert_eq!(receive_frame(&refused), None);
    all.push(bench.tcp_client_from(NEIGHBOUR));
    until(
        "the neighbour has one",
        || bench.stats.tcp_connections.get(),
        |seen| *seen == 5,
    );
    assert_eq!(bench.stats.tcp_refused.get(), 1);
}

#[test]
fn a_connection_to_a_loopback_address_is_closed_at_once_and_takes_no_seat() {
    let bench = with(|options| options.config.loopback_servers = false);
    let all: Vec<_> = (0..16)
        .map(|last| bench.tcp_client_from(Ipv4Addr::new(127, 0, 1, last).into()))
        .collect();
    for client in &all {
        assert_eq!(receive_frame(client), None);
    }
    assert_eq!(bench.stats.tcp_refused.get(), 16);
    assert_eq!(bench.stats.tcp_connections.get(), 0);
}
