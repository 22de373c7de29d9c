//! Queries over UDP.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use dns_policy::{mapping::Realised, reject_code::RejectCode};
use hickory_proto::{
    op::{Message, ResponseCode},
    rr::RecordType,
};
use holdfast_sdp::{
    mapping::Release,
    proxy::ProxyConfig,
    stats::{AnswerResult, QueryResult},
};
use polling::until;

use crate::bench::{Bench, Options, answer, query, rcode, receive};

#[test]
fn an_allowed_query_goes_to_its_server_and_back_unchanged() {
    for v6 in [false, true] {
        let bench = Bench::new(Options {
            v6,
            workers: 2,
            ..Options::default()
        });
        let client = bench.client();
        let sent = query(0x1234, "wWw.Good.example", RecordType::A);
        client.send(&sent).unwrap();
        let forwarded = bench.serve("192.0.2.1");
        assert_eq!(forwarded[2..], sent[2..], "all but the id passes as it is");
        let mut expected = answer(&forwarded, &["192.0.2.1"]);
        expected[..2].copy_from_slice(&sent[..2]);
        assert_eq!(receive(&client), expected);
        let (mapping, _) = bench.sink.next();
        assert_eq!(mapping.name.as_str(), "www.good.example.");
        assert_eq!(
            mapping.addresses,
            ["192.0.2.1".parse::<std::net::IpAddr>().unwrap()]
        );
        assert_eq!((mapping.ttl, mapping.endpoint.ifindex), (300, 3));
        assert_eq!(mapping.server, bench.server_address);
    }
}

#[test]
fn a_refused_name_never_reaches_the_server() {
    let bench = Bench::new(Options::default());
    let client = bench.client();
    client
        .send(&query(1, "bad.example", RecordType::A))
        .unwrap();
    assert_eq!(rcode(&receive(&client)), ResponseCode::Refused);
    client
        .send(&query(2, "exact.example", RecordType::A))
        .unwrap();
    let forwarded = bench.serve("192.0.2.2");
    assert_eq!(
        Message::from_vec(&forwarded).unwrap().queries[0]
            .name()
            .to_ascii(),
        "exact.example."
    );
    receive(&client);
    assert_eq!(bench.stats.queries.get(QueryResult::DeniedName), 1);
    assert_eq!(bench.stats.queries.get(QueryResult::Forwarded), 1);
}

#[test]
fn a_refused_name_does_not_exist_where_so_configured() {
    let mut options = Options::default();
    options.config.reject = RejectCode::NameError;
    let bench = Bench::new(options);
    let client = bench.client();
    client
        .send(&query(1, "bad.example", RecordType::A))
        .unwrap();
    assert_eq!(rcode(&receive(&client)), ResponseCode::NXDomain);
}

#[test]
fn an_unknown_source_is_refused() {
    let unknown = Some("127.0.0.1".parse().unwrap());
    let bench = Bench::new(Options {
        unknown,
        ..Options::default()
    });
    let client = bench.client();
    client
        .send(&query(1, "exact.example", RecordType::A))
        .unwrap();
    assert_eq!(rcode(&receive(&client)), ResponseCode::Refused);
    assert_eq!(bench.stats.queries.get(QueryResult::UnknownSource), 1);
}

#[test]
fn loopback_servers_are_refused() {
    let mut options = Options::default();
    options.config.loopback_servers = false;
    let bench = Bench::new(options);
    let client = bench.client();
    client
        .send(&query(1, "exact.example", RecordType::A))
        .unwrap();
    assert_eq!(rcode(&receive(&client)), ResponseCode::Refused);
    assert_eq!(bench.stats.queries.get(QueryResult::Loop), 1);
}

#[test]
fn a_held_answer_waits_and_others_do_not() {
    let bench = Bench::new(Options::default());
    let client = bench.client();
    bench.sink.set_release(Release::Held);
    client
        .send(&query(1, "a.good.example", RecordType::A))
        .unwrap();
    bench.serve("192.0.2.1");
    let (_, on_realised) = bench.sink.next();
    until(
        "the answer is held",
        || bench.stats.held.get(),
        |seen| *seen == 1,
    );
    bench.sink.set_release(Release::Leased);
    client
        .send(&query(2, "a.good.example", RecordType::AAAA))
        .unwrap();
    bench.serve("2001:db8::1");
    assert_eq!(receive(&client)[..2], [0, 2]);
    on_realised.unwrap()(Realised::Yes);
    assert_eq!(receive(&client)[..2], [0, 1]);
    until(
        "the release is counted",
        || bench.stats.answers.get(AnswerResult::Realised),
        |seen| *seen == 1,
    );
    assert_eq!(bench.stats.held.get(), 0);
}

#[test]
fn a_late_answer_is_released_and_counted() {
    let mut options = Options::default();
    options.config.max_delay = Duration::from_millis(20);
    let bench = Bench::new(options);
    let client = bench.client();
    bench.sink.set_release(Release::Held);
    client
        .send(&query(1, "a.good.example", RecordType::A))
        .unwrap();
    bench.serve("192.0.2.1");
    let (_, on_realised) = bench.sink.next();
    assert_eq!(receive(&client)[..2], [0, 1]);
    until(
        "the late answer is counted",
        || bench.stats.answers.get(AnswerResult::Late),
        |seen| *seen == 1,
    );
    // This result comes too late and has no effect.
    on_realised.unwrap()(Realised::Yes);
}

#[test]
fn forged_answers_are_ignored() {
    let bench = Bench::new(Options::default());
    let client = bench.client();
    client
        .send(&query(1, "a.good.example", RecordType::A))
        .unwrap();
    let (asked, from) = bench.at_server();
    let mut wrong_id = answer(&asked, &["192.0.2.66"]);
    wrong_id[0] ^= 1;
    let mut other_case = answer(&asked, &["192.0.2.66"]);
    other_case[13] ^= 0x20;
    for forged in [wrong_id, other_case, asked.clone()] {
        bench.server.send_to(&forged, from).unwrap();
    }
    let stranger = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    stranger
        .send_to(&answer(&asked, &["192.0.2.66"]), from)
        .unwrap();
    bench
        .server
        .send_to(&answer(&asked, &["192.0.2.1"]), from)
        .unwrap();
    assert_eq!(receive(&client)[2..], answer(&asked, &["192.0.2.1"])[2..]);
    assert_eq!(bench.stats.answers.get(AnswerResult::Unexpected), 3);
    assert_eq!(bench.sink.next().0.addresses.len(), 1);
    assert!(bench.sink.is_empty());
}

#[test]
fn ports_and_ids_are_spread() {
    let bench = Bench::new(Options::default());
    let client = bench.client();
    let (mut ports, mut ids) = (HashSet::new(), HashSet::new());
    for id in 0..64 {
        let name = format!("x{id}.good.example");
        client.send(&query(id, &name, RecordType::A)).unwrap();
        let (asked, from) = bench.at_server();
        ports.insert(from.port());
        ids.insert([asked[0], asked[1]]);
    }
    assert!(ports.len() > 1, "one port for all");
    assert!(ids.len() > 60, "ids come again");
    let high: HashSet<_> = ids.iter().map(|id| id[0]).collect();
    assert!(high.len() > 16, "ids are close together");
}

/// Answers that arrive all at once must fit into the sockets' buffers.
#[test]
fn many_queries_in_flight_take_more_sockets() {
    let bench = Bench::new(Options::default());
    let client = bench.client();
    let mut in_flight: HashMap<u16, usize> = HashMap::new();
    for id in 0..700 {
        let name = format!("x{id}.good.example");
        client.send(&query(id, &name, RecordType::A)).unwrap();
        let (_, from) = bench.at_server();
        *in_flight.entry(from.port()).or_default() += 1;
    }
    assert!(in_flight.len() > 4, "{in_flight:?}");
    assert!(in_flight.values().all(|n| *n <= 128), "{in_flight:?}");
}

#[test]
fn an_undecodable_answer_becomes_servfail() {
    let bench = Bench::new(Options::default());
    let client = bench.client();
    client
        .send(&query(1, "a.good.example", RecordType::A))
        .unwrap();
    let (asked, from) = bench.at_server();
    let mut broken = answer(&asked, &["192.0.2.1"]);
    broken.truncate(broken.len() - 1);
    bench.server.send_to(&broken, from).unwrap();
    assert_eq!(rcode(&receive(&client)), ResponseCode::ServFail);
    assert!(bench.sink.is_empty());
}

#[test]
fn large_queries_and_answers_pass() {
    let bench = Bench::new(Options::default());
    let client = bench.client();
    let mut sent = query(1, "a.good.example", RecordType::A);
    // A record of unknown type and 60,000 bytes in the additional section.
    sent[11] = 1;
    sent.extend_from_slice(&[0, 0xff, 0, 0, 1, 0, 0, 0, 0, 0xea, 0x60]);
    sent.extend_from_slice(&vec![0xab; 60_000]);
    client.send(&sent).unwrap();
    let (asked, from) = bench.at_server();
    assert_eq!(asked[2..], sent[2..]);
    let mut big = asked;
    big[2] |= 0x80;
    bench.server.send_to(&big, from).unwrap();
    assert_eq!(receive(&client)[2..], big[2..]);
}

#[test]
fn each_fault_is_passed_or_refused() {
    let bench = Bench::new(Options::default());
    let client = bench.client();
    let good = query(9, "exact.example", RecordType::A);
    let changed = |at: usize, value: u8| {
        let mut bytes = good.clone();
        bytes[at] = value;
        bytes
    };
    // Neither of these messages is answered: one has no header, and one is a response.
    client.send(&good[..5]).unwrap();
    client.send(&changed(2, 0x81)).unwrap();
    for (bytes, expected) in [
        (changed(2, 0x11), ResponseCode::NotImp),
        (changed(5, 0), ResponseCode::FormErr),
        (changed(5, 2), ResponseCode::FormErr),
        (changed(7, 2), ResponseCode::FormErr),
        (good[..20].to_vec(), ResponseCode::FormErr),
    ] {
        client.send(&bytes).unwrap();
        let reply = receive(&client);
        assert_eq!(&reply[..2], &[0, 9]);
        assert_eq!(u16::from(reply[3] & 15), u16::from(expected), "{bytes:?}");
    }
    assert_eq!(bench.stats.queries.get(QueryResult::Ignored), 2);
}

#[test]
fn an_unanswered_query_ends_after_the_timeout_and_is_counted() {
    let mut options = Options::default();
    options.config.timeout = Duration::from_millis(20);
    let bench = Bench::new(options);
    let client = bench.client();
    client
        .send(&query(1, "exact.example", RecordType::A))
        .unwrap();
    let (asked, from) = bench.at_server();
    until(
        "the timeout is counted",
        || bench.stats.upstream_timeouts.get(),
        |seen| *seen == 1,
    );
    assert_eq!(bench.stats.in_flight.get(), 0);
    bench
        .server
        .send_to(&answer(&asked, &["192.0.2.1"]), from)
        .unwrap();
    until(
        "the answer after the timeout is counted",
        || bench.stats.answers.get(AnswerResult::Unexpected),
        |seen| *seen == 1,
    );
}

#[test]
fn queries_over_the_limit_in_flight_are_refused() {
    let config = ProxyConfig {
        in_flight: 8,
        ..Options::default().config
    };
    let bench = Bench::new(Options {
        config,
        ..Options::default()
    });
    let client = bench.client();
    for id in 0..8 {
        let name = format!("x{id}.good.example");
        client.send(&query(id, &name, RecordType::A)).unwrap();
    }
    // A single endpoint gets half of the places.
    for _ in 0..4 {
        assert_eq!(rcode(&receive(&client)), ResponseCode::ServFail);
    }
    for _ in 0..4 {
        bench.serve("192.0.2.1");
        assert_eq!(rcode(&receive(&client)), ResponseCode::NoError);
    }
    assert_eq!(bench.stats.queries.get(QueryResult::Shed), 4);
}

#[test]
fn a_drain_loses_nothing() {
    let bench = Bench::new(Options {
        workers: 2,
        ..Options::default()
    });
    let client = bench.client();
    let Bench {
        server,
        listeners,
        runtime,
        stats,
        ..
    } = bench;
    let count = 200;
    for id in 0..count {
        let name = format!("x{id}.good.example");
        client.send(&query(id, &name, RecordType::A)).unwrap();
    }
    let serving = std::thread::spawn(move || {
        let mut buffer = [0; 512];
        for _ in 0..count {
            let (len, from) = server.recv_from(&mut buffer).unwrap();
            server
                .send_to(&answer(&buffer[..len], &["192.0.2.1"]), from)
                .unwrap();
        }
    });
    let report = runtime.block_on(listeners.drain(Duration::from_secs(10)));
    assert_eq!(report.abandoned, 0);
    for _ in 0..count {
        receive(&client);
    }
    serving.join().unwrap();
    assert_eq!(stats.answers.get(AnswerResult::Released), u64::from(count));
    client
        .send(&query(1, "a.good.example", RecordType::A))
        .unwrap();
    assert!(client.recv(&mut [0; 512]).is_err(), "the port is closed");
}

#[test]
fn hop_by_hop_options_end_here_in_both_directions() {
    let bench = Bench::new(Options::default());
    let client = bench.client();
    let with_option = |mut message: Vec<u8>, options: &[u8]| {
        message[11] = 1;
        message.extend_from_slice(&[0, 0, 41, 4, 208, 0, 0, 0, 0, 0]);
        message.push(u8::try_from(options.len()).unwrap());
        message.extend_from_slice(options);
        message
    };
    let keepalive = [0, 11, 0, 2, 0, 100];
    let plain = query(1, "a.good.example", RecordType::A);
    client
        .send(&with_option(plain.clone(), &keepalive))
        .unwrap();
    let (asked, from) = bench.at_server();
    assert_eq!(asked[2..], with_option(plain, &[])[2..]);
    let mut bare = asked[..asked.len() - 11].to_vec();
    bare[11] = 0;
    let reply = answer(&bare, &["192.0.2.1"]);
    bench
        .server
        .send_to(&with_option(reply.clone(), &keepalive), from)
        .unwrap();
    assert_eq!(receive(&client)[2..], with_option(reply, &[])[2..]);
}

#[test]
fn the_same_question_in_flight_is_sent_once_and_answers_all() {
    let bench = Bench::new(Options::default());
    let (one, two) = (bench.client(), bench.client());
    one.send(&query(1, "a.good.example", RecordType::A))
        .unwrap();
    let (asked, from) = bench.at_server();
    two.send(&query(2, "a.good.example", RecordType::A))
        .unwrap();
    until(
        "the second joins",
        || bench.stats.joined.get(),
        |seen| *seen == 1,
    );
    // Another type is another question, and the first copy of a repeated query may be lost.
    one.send(&query(3, "a.good.example", RecordType::AAAA))
        .unwrap();
    bench.at_server();
    one.send(&query(1, "a.good.example", RecordType::A))
        .unwrap();
    bench.at_server();
    bench.sink.set_release(Release::Held);
    bench
        .server
        .send_to(&answer(&asked, &["192.0.2.1"]), from)
        .unwrap();
    bench.sink.next().1.unwrap()(Realised::Yes);
    let (first, second) = (receive(&one), receive(&two));
    assert_eq!((&first[..2], &second[..2]), (&[0, 1][..], &[0, 2][..]));
    assert_eq!(first[2..], second[2..]);
    assert!(bench.sink.is_empty());
}

#[test]
fn answers_of_the_proxy_have_edns_if_the_query_has() {
    let config = ProxyConfig {
        in_flight: 1,
        ..Options::default().config
    };
    let bench = Bench::new(Options {
        config,
        ..Options::default()
    });
    let client = bench.client();
    let mut first = query(1, "exact.example", RecordType::A);
    first[11] = 1;
    first.extend_from_slice(&[0, 0, 41, 4, 208, 0, 0, 0x80, 0, 0, 0]);
    client.send(&first).unwrap();
    bench.at_server();
    client.send(&first).unwrap();
    let shed = Message::from_vec(&receive(&client)).unwrap();
    assert_eq!(shed.metadata.response_code, ResponseCode::ServFail);
    assert!(shed.edns.is_some_and(|e| e.flags().dnssec_ok));
}

#[test]
fn garbage_of_every_length_harms_nothing() {
    let bench = Bench::new(Options {
        workers: 2,
        ..Options::default()
    });
    let client = bench.client();
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[0]
    };
    let good = query(1, "exact.example", RecordType::A);
    for length in (0..600).chain([4_000, 20_000, 65_507]) {
        client
            .send(&(0..length).map(|_| random()).collect::<Vec<_>>())
            .unwrap();
        let mut changed = good.clone();
        changed[usize::from(random()) % good.len()] = random();
        client.send(&changed).unwrap();
    }
    let fresh = bench.client();
    fresh.send(&good).unwrap();
    // Some of the changed queries reach the server, too.
    loop {
        let (asked, from) = bench.at_server();
        bench.server.send_to(&answer_or_echo(&asked), from).unwrap();
        fresh.set_nonblocking(true).unwrap();
        if fresh.recv(&mut [0; 512]).is_ok() {
            break;
        }
        fresh.send(&good).unwrap();
    }
}

/// An answer, or the query as a response without records.
fn answer_or_echo(asked: &[u8]) -> Vec<u8> {
    if Message::from_vec(asked).is_ok() {
        return answer(asked, &["192.0.2.1"]);
    }
    let mut echo = asked.to_vec();
    echo[2] |= 0x80;
    echo
}

#[test]
fn a_repeated_leased_answer_is_reported_again_only_when_leases_changed() {
    let bench = Bench::new(Options::default());
    bench.sink.set_leases_version(1);
    let ask = || {
        let client = bench.client();
        let sent = query(5, "a.good.example", RecordType::A);
        client.send(&sent).unwrap();
        let forwarded = bench.serve("192.0.2.1");
        let mut expected = answer(&forwarded, &["192.0.2.1"]);
        expected[..2].copy_from_slice(&sent[..2]);
        assert_eq!(receive(&client), expected);
    };
    let times = 50;
    (0..times).for_each(|_| ask());
    let times_learned = bench.sink.len();
    assert!(
        (1..times).contains(&times_learned),
        "learned {times_learned} times of {times}"
    );
    for version in 2..5 {
        let before = bench.sink.len();
        bench.sink.set_leases_version(version);
        ask();
        assert_eq!(bench.sink.len(), before + 1);
    }
    assert_eq!(
        bench.stats.answers.get(AnswerResult::Released),
        u64::try_from(times).unwrap() + 3
    );
}
