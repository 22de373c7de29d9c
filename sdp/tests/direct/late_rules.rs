//! Queries of an endpoint whose rules have not reached the proxy yet.

use std::time::Duration;

use hickory_proto::{op::ResponseCode, rr::RecordType};
use holdfast_sdp::stats::{Protocol, QueryResult};
use polling::until;
use socket2::SockRef;

use crate::bench::{
    Bench, NEIGHBOUR, Options, TEST_TIMEOUT, answer, query, rcode, receive, receive_frame,
    send_frames,
};

fn bench(rules_wait: Duration) -> Bench {
    let mut options = Options::default();
    options.config.rules_wait = rules_wait;
    let bench = Bench::new(options);
    bench.remove_neighbour_rules();
    bench
}

fn another_endpoint_is_answered(bench: &Bench) {
    let other = bench.client();
    other
        .send(&query(4, "www.good.example", RecordType::A))
        .unwrap();
    bench.serve("192.0.2.1");
    assert_eq!(rcode(&receive(&other)), ResponseCode::NoError);
}

fn denied(bench: &Bench) -> u64 {
    bench.stats.queries.get(QueryResult::DeniedNoRules)
}

#[test]
fn a_query_before_the_rules_is_answered_when_they_arrive() {
    let bench = bench(60 * TEST_TIMEOUT);
    let udp = bench.client_from(NEIGHBOUR);
    udp.send(&query(1, "www.good.example", RecordType::A))
        .unwrap();
    udp.send(&query(2, "www.bad.example", RecordType::A))
        .unwrap();
    let tcp = bench.tcp_client_from(NEIGHBOUR);
    send_frames(&tcp, &[&query(3, "www.good.example", RecordType::A)]);
    let transports = &bench.stats.transports;
    until(
        "two queries over UDP and one over TCP have come",
        || (transports.get(Protocol::Udp), transports.get(Protocol::Tcp)),
        |seen| *seen == (2, 1),
    );
    // Other endpoints do not wait.
    another_endpoint_is_answered(&bench);
    assert_eq!(denied(&bench), 0);

    bench.set_neighbour_rules();
    bench.serve("192.0.2.2");
    let codes = [receive(&udp), receive(&udp)].map(|answer| (answer[1], rcode(&answer)));
    assert!(codes.contains(&(1, ResponseCode::NoError)), "{codes:?}");
    assert!(codes.contains(&(2, ResponseCode::Refused)), "{codes:?}");
    let at_server = bench.tcp_at_server();
    let asked = receive_frame(&at_server).unwrap();
    send_frames(&at_server, &[&answer(&asked, &["192.0.2.3"])]);
    let answered = receive_frame(&tcp).unwrap();
    assert_eq!(rcode(&answered), ResponseCode::NoError);
    assert_eq!(denied(&bench), 0);
}

#[test]
fn a_query_whose_rules_never_arrive_is_refused() {
    let bench = bench(Duration::from_millis(50));
    let udp = bench.client_from(NEIGHBOUR);
    udp.send(&query(1, "www.good.example", RecordType::A))
        .unwrap();
    assert_eq!(rcode(&receive(&udp)), ResponseCode::Refused);
    let tcp = bench.tcp_client_from(NEIGHBOUR);
    send_frames(&tcp, &[&query(2, "www.good.example", RecordType::A)]);
    let answered = receive_frame(&tcp).unwrap();
    assert_eq!(rcode(&answered), ResponseCode::Refused);
    assert_eq!(denied(&bench), 2);
}

#[test]
fn queries_without_rules_take_a_bounded_share_of_memory() {
    let bench = bench(60 * TEST_TIMEOUT);
    let udp = bench.client_from(NEIGHBOUR);
    let question = query(1, "www.good.example", RecordType::A);
    let denied_of_more = || {
        for _ in 0..100 {
            udp.send(&question).unwrap();
        }
        denied(&bench)
    };
    until("a query is refused at once", denied_of_more, |denied| {
        *denied > 0
    });
    another_endpoint_is_answered(&bench);
}

#[test]
fn new_rules_release_any_number_of_waiting_queries() {
    // More than one turn retries, and fewer than the server's socket can hold.
    const WAITING: u16 = 400;
    let bench = bench(60 * TEST_TIMEOUT);
    let server = SockRef::from(&bench.server);
    server.set_recv_buffer_size(212_992).unwrap();
    let udp = bench.client_from(NEIGHBOUR);
    for id in 0..WAITING {
        let name = format!("x{id}.good.example");
        udp.send(&query(id, &name, RecordType::A)).unwrap();
        until(
            "the query has come",
            || bench.stats.transports.get(Protocol::Udp),
            |seen| *seen > u64::from(id),
        );
    }
    bench.set_neighbour_rules();
    for _ in 0..WAITING {
        bench.serve("192.0.2.1");
        assert_eq!(rcode(&receive(&udp)), ResponseCode::NoError);
    }
    assert_eq!(denied(&bench), 0);
}
