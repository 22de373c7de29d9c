//! Queries over TCP.

use std::{
    collections::VecDeque,
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

use dns_policy::{mapping::Realised, rule::Transport};
use hickory_proto::{op::ResponseCode, rr::RecordType};
use holdfast_sdp::{
    mapping::Release,
    query_report::Event,
    stats::{Protocol, QueryResult},
};
use polling::until;

use crate::bench::{Bench, Options, answer, query, rcode, receive_frame, send_frames};

#[test]
fn pipelined_queries_share_one_upstream_connection_and_come_back_in_any_order() {
    for v6 in [false, true] {
        let bench = Bench::new(Options {
            v6,
            ..Options::default()
        });
        let client = bench.tcp_client();
        let first = query(1, "a.good.example", RecordType::A);
        let second = query(1, "b.good.example", RecordType::A);
        send_frames(&client, &[&first, &second]);
        let server = bench.tcp_at_server();
        let (one, two) = (
            receive_frame(&server).unwrap(),
            receive_frame(&server).unwrap(),
        );
        assert_eq!(one[2..], first[2..]);
        assert_ne!(
            one[..2],
            two[..2],
            "one id from the client, two to the server"
        );
        let (late, early) = (answer(&one, &["192.0.2.1"]), answer(&two, &["192.0.2.2"]));
        send_frames(&server, &[&early, &late]);
        assert_eq!(receive_frame(&client).unwrap()[2..], early[2..]);
        assert_eq!(receive_frame(&client).unwrap()[2..], late[2..]);
        let (mapping, _) = bench.sink.next();
        assert_eq!(
            (mapping.name.as_str(), mapping.transport),
            ("b.good.example.", Transport::Tcp)
        );
        send_frames(&client, &[&query(2, "bad.example", RecordType::A)]);
        assert_eq!(
            rcode(&receive_frame(&client).unwrap()),
            ResponseCode::Refused
        );
    }
}

#[test]
fn each_answer_is_reported_while_an_agent_wants_reports_although_its_bytes_repeat() {
    let bench = Bench::new(Options::default());
    bench.sink.set_leases_version(1);
    let reports = bench.reports.listen();
    let (client, mut server) = (bench.tcp_client(), None);
    for id in 1..=3 {
        send_frames(
            &client,
            &[&query(id, "nothing.good.example", RecordType::A)],
        );
        let server = server.get_or_insert_with(|| bench.tcp_at_server());
        let asked = receive_frame(server).unwrap();
        send_frames(server, &[&answer(&asked, &[])]);
        receive_frame(&client).unwrap();
        let reported: Vec<_> = std::iter::from_fn(|| bench.reports.take())
            .map(|report| report.event)
            .collect();
        assert!(
            matches!(reported[..], [Event::Query, Event::Answer(_)]),
            "query {id}: {reported:?}"
        );
    }
    drop(reports);
}

#[test]
fn a_query_in_pieces_is_reassembled() {
    let bench = Bench::new(Options::default());
    let mut client = bench.tcp_client();
    let message = query(1, "bad.example", RecordType::A);
    let mut bytes = u16::try_from(message.len()).unwrap().to_be_bytes().to_vec();
    bytes.extend_from_slice(&message);
    for piece in bytes.chunks(3) {
        client.write_all(piece).unwrap();
    }
    assert_eq!(
        rcode(&receive_frame(&client).unwrap()),
        ResponseCode::Refused
    );
}

#[test]
fn more_queries_than_may_wait_are_read_as_others_are_answered() {
    let bench = Bench::new(Options::default());
    let client = bench.tcp_client();
    let queries: Vec<_> = (0..200)
        .map(|id| query(id, &format!("x{id}.good.example"), RecordType::A))
        .collect();
    let all: Vec<_> = queries.iter().map(Vec::as_slice).collect();
    send_frames(&client, &all);
    let server = bench.tcp_at_server();
    // First come as many queries as can wait at once, and then one for each answer.
    let mut waiting: VecDeque<_> = (0..64).map(|_| receive_frame(&server).unwrap()).collect();
    for id in 0..200_u16 {
        let asked = waiting.pop_front().unwrap();
        send_frames(&server, &[&answer(&asked, &["192.0.2.1"])]);
        let answered = receive_frame(&client).unwrap();
        assert_eq!(answered[..2], id.to_be_bytes());
        assert_eq!(answered[2..12], answer(&asked, &["192.0.2.1"])[2..12]);
        if id < 200 - 64 {
            waiting.push_back(receive_frame(&server).unwrap());
        }
    }
    assert_eq!(bench.stats.in_flight.get(), 0);
}

#[test]
fn length_and_message_leave_together() {
    let bench = Bench::new(Options::default());
    let mut client = bench.tcp_client();
    let message = query(1, "a.good.example", RecordType::A);
    send_frames(&client, &[&message]);
    let mut server = bench.tcp_at_server();
    let mut bytes = [0; 512];
    assert_eq!(server.read(&mut bytes).unwrap(), 2 + message.len());
    send_frames(&client, &[&query(1, "bad.example", RecordType::A)]);
    assert!(client.read(&mut bytes).unwrap() > 2);
}

#[test]
fn a_held_answer_waits_and_others_do_not() {
    let bench = Bench::new(Options::default());
    let client = bench.tcp_client();
    send_frames(&client, &[&query(1, "a.good.example", RecordType::A)]);
    let server = bench.tcp_at_server();
    bench.sink.set_release(Release::Held);
    send_frames(
        &server,
        &[&answer(&receive_frame(&server).unwrap(), &["192.0.2.1"])],
    );
    let (_, on_realised) = bench.sink.next();
    bench.sink.set_release(Release::Leased);
    send_frames(&client, &[&query(2, "a.good.example", RecordType::AAAA)]);
    send_frames(
        &server,
        &[&answer(&receive_frame(&server).unwrap(), &["2001:db8::1"])],
    );
    assert_eq!(receive_frame(&client).unwrap()[..2], [0, 2]);
    on_realised.unwrap()(Realised::Yes);
    assert_eq!(receive_frame(&client).unwrap()[..2], [0, 1]);
}

#[test]
fn queries_that_a_server_left_unanswered_are_sent_once_more() {
    let bench = Bench::new(Options::default());
    let client = bench.tcp_client();
    send_frames(&client, &[&query(1, "a.good.example", RecordType::A)]);
    let first = bench.tcp_at_server();
    let asked = receive_frame(&first).unwrap();
    drop(first);
    let second = bench.tcp_at_server();
    assert_eq!(receive_frame(&second).unwrap(), asked);
    drop(second);
    assert_eq!(
        rcode(&receive_frame(&client).unwrap()),
        ResponseCode::ServFail
    );
    assert_eq!(bench.stats.queries.get(QueryResult::UpstreamError), 1);
    assert_eq!(bench.stats.in_flight.get(), 0);
}

#[test]
fn an_unreachable_server_is_servfail() {
    let bench = Bench::new(Options::default());
    let client = bench.tcp_client();
    let Bench {
        tcp_server,
        listeners: _listeners,
        ..
    } = bench;
    drop(tcp_server);
    send_frames(&client, &[&query(1, "a.good.example", RecordType::A)]);
    assert_eq!(
        rcode(&receive_frame(&client).unwrap()),
        ResponseCode::ServFail
    );
}

#[test]
fn connections_are_bounded() {
    let bench = Bench::new(Options::default());
    // A single client gets half of the eight places.
    let clients: Vec<_> = (0..4).map(|_| bench.tcp_client()).collect();
    until(
        "four are accepted",
        || bench.stats.tcp_connections.get(),
        |seen| *seen == 4,
    );
    assert_eq!(receive_frame(&bench.tcp_client()), None);
    assert_eq!(bench.stats.tcp_refused.get(), 1);
    drop(clients);
    until(
        "their places are free again",
        || bench.stats.tcp_connections.get(),
        |seen| *seen == 0,
    );
}

#[test]
fn a_drain_ends_connections_between_queries() {
    let bench = Bench::new(Options::default());
    let idle = bench.tcp_client();
    let busy = bench.tcp_client();
    send_frames(&busy, &[&query(1, "a.good.example", RecordType::A)]);
    let server = bench.tcp_at_server();
    let asked = receive_frame(&server).unwrap();
    let Bench {
        listeners, runtime, ..
    } = bench;
    let draining = runtime.spawn(listeners.drain(Duration::from_secs(10)));
    assert_eq!(receive_frame(&idle), None);
    send_frames(&server, &[&answer(&asked, &["192.0.2.1"])]);
    assert_eq!(rcode(&receive_frame(&busy).unwrap()), ResponseCode::NoError);
    assert_eq!(receive_frame(&busy), None);
    let report = runtime.block_on(draining).unwrap();
    assert_eq!((report.abandoned, report.cut), (0, 0));
}

/// Result of a read with a time limit.
enum Frame {
    Message(Vec<u8>),
    None,
    End,
}

fn frame_within(mut stream: &TcpStream) -> Frame {
    let mut length = [0; 2];
    match stream.read(&mut length) {
        Ok(2) => {}
        Ok(_) => return Frame::End,
        Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return Frame::None,
        Err(_) => return Frame::End,
    }
    let mut message = vec![0; usize::from(u16::from_be_bytes(length))];
    match stream.read_exact(&mut message) {
        Ok(()) => Frame::Message(message),
        Err(_) => Frame::End,
    }
}

/// Sends a query, answers it at the server, and checks that the connection ends with the answer: a
/// client that has read the answer sees the end.
fn last_answers(client: &TcpStream, server: &TcpStream, ids: &[u16]) {
    let queries: Vec<_> = ids
        .iter()
        .map(|id| query(*id, "a.good.example", RecordType::A))
        .collect();
    let all: Vec<_> = queries.iter().map(Vec::as_slice).collect();
    send_frames(client, &all);
    let asked: Vec<_> = ids
        .iter()
        .map(|_| receive_frame(server).expect("a query"))
        .collect();
    let answers: Vec<_> = asked.iter().map(|q| answer(q, &["192.0.2.1"])).collect();
    let all: Vec<_> = answers.iter().map(Vec::as_slice).collect();
    send_frames(server, &all);
    for id in ids {
        let answered = receive_frame(client).expect("the query is answered");
        assert_eq!(answered[..2], id.to_be_bytes());
    }
    client.set_nonblocking(true).expect("non-blocking");
    let end = Read::read(&mut &*client, &mut [0]).map_err(|e| e.kind());
    assert_eq!(end, Ok(0), "the end of the connection came with the answer");
}

#[test]
fn a_drain_ends_a_lasting_connection_with_an_answer_and_loses_no_query() {
    let mut options = Options::default();
    options.config.tcp_last_query = Duration::from_secs(60);
    let bench = Bench::new(options);
    let clients = [bench.tcp_client(), bench.tcp_client()];
    let mut server = None;
    for client in &clients {
        send_frames(client, &[&query(1, "b.good.example", RecordType::A)]);
        let server = server.get_or_insert_with(|| bench.tcp_at_server());
        let asked = receive_frame(server).unwrap();
        send_frames(server, &[&answer(&asked, &["192.0.2.1"])]);
        receive_frame(client).unwrap();
    }
    let server = server.expect("a connection");
    let Bench {
        listeners,
        runtime,
        proxy,
        ..
    } = bench;
    let draining = runtime.spawn(listeners.drain(Duration::from_secs(60)));
    until(
        "the proxy drains",
        || TcpStream::connect(proxy).err(),
        Option::is_some,
    );
    // The connections are idle for a while, and then send another query.
    last_answers(&clients[0], &server, &[2]);
    last_answers(&clients[1], &server, &[3, 4, 5]);
    let report = runtime.block_on(draining).unwrap();
    assert_eq!((report.abandoned, report.cut), (0, 0));
}

#[test]
fn a_drain_that_takes_too_long_cuts_connections_and_reports_it() {
    let bench = Bench::new(Options::default());
    let busy = bench.tcp_client();
    send_frames(&busy, &[&query(1, "a.good.example", RecordType::A)]);
    let server = bench.tcp_at_server();
    receive_frame(&server).unwrap();
    let Bench {
        listeners,
        runtime,
        stats,
        ..
    } = bench;
    let report = runtime.block_on(listeners.drain(Duration::from_millis(100)));
    assert_eq!(report.cut, 1);
    assert_eq!(receive_frame(&busy), None);
    assert_eq!((stats.in_flight.get(), stats.tcp_connections.get()), (0, 0));
}

/// Keeps two queries in flight until the connection ends. Returns how many were answered, and how
/// the connection ended.
fn pipeline(client: &TcpStream) -> (usize, std::io::Result<usize>) {
    let mut stream = client;
    let mut answered = 0;
    for id in 0_u16.. {
        let asked = query(id, "a.good.example", RecordType::A);
        let length = u16::try_from(asked.len()).unwrap().to_be_bytes();
        // The end may come before the query.
        let _ = stream.write_all(&[&length[..], &asked].concat());
        if id < 1 {
            continue;
        }
        let mut length = [0; 2];
        match stream.read(&mut length) {
            Ok(2) => {}
            end => return (answered, end),
        }
        let mut answer = vec![0; usize::from(u16::from_be_bytes(length))];
        stream.read_exact(&mut answer).unwrap();
        answered += 1;
    }
    unreachable!("a connection ends before all ids are used")
}

#[test]
fn a_drain_answers_all_queries_of_a_client_that_always_has_some_in_flight() {
    let bench = Bench::new(Options::default());
    let client = bench.tcp_client();
    let (report, (answered, end), asked) = std::thread::scope(|scope| {
        let asks = scope.spawn(|| pipeline(&client));
        let server = bench.tcp_at_server();
        let serves = scope.spawn(move || {
            // Answers a query when the next one has arrived, and the last one when no other
            // arrives.
            server
                .set_read_timeout(Some(Duration::from_millis(100)))
                .unwrap();
            let mut before: Option<Vec<u8>> = None;
            let mut asked = 0;
            loop {
                let (next, is_over) = match frame_within(&server) {
                    Frame::Message(next) => (Some(next), false),
                    Frame::None => (None, false),
                    Frame::End => (None, true),
                };
                asked += usize::from(next.is_some());
                if let Some(before) = before.take() {
                    send_frames(&server, &[&answer(&before, &["192.0.2.1"])]);
                }
                if is_over {
                    return asked;
                }
                before = next;
            }
        });
        until(
            "queries flow",
            || bench.stats.transports.get(Protocol::Tcp),
            |seen| *seen > 10,
        );
        let Bench {
            listeners, runtime, ..
        } = bench;
        let report = runtime.block_on(listeners.drain(Duration::from_secs(4)));
        (report, asks.join().unwrap(), serves.join().unwrap())
    });
    assert_eq!((report.abandoned, report.cut), (0, 0));
    assert_eq!(answered, asked, "every query that was sent on is answered");
    assert_eq!(end.map_err(|e| e.kind()), Ok(0), "the end, not a reset");
}

#[test]
fn garbage_ends_or_stalls_only_its_own_connection() {
    let bench = Bench::new(Options::default());
    let mut bad = bench.tcp_client();
    bad.write_all(&[0xff; 4096]).unwrap();
    let mut empty = bench.tcp_client();
    empty.write_all(&[0; 4096]).unwrap();
    let good = bench.tcp_client();
    send_frames(&good, &[&query(2, "bad.example", RecordType::A)]);
    assert_eq!(rcode(&receive_frame(&good).unwrap()), ResponseCode::Refused);
}

/// Sends empty messages as long as the peer reads them.
fn flood(mut stream: &TcpStream) {
    while stream.write_all(&[0; 1 << 16]).is_ok() {}
}

#[test]
fn a_server_that_never_pauses_does_not_stop_the_clock() {
    let mut options = Options::default();
    options.config.timeout = Duration::from_millis(20);
    let bench = Bench::new(options);
    let client = bench.tcp_client();
    send_frames(&client, &[&query(1, "a.good.example", RecordType::A)]);
    let server = bench.tcp_at_server();
    receive_frame(&server).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| flood(&server));
        until(
            "the query is given up",
            || bench.stats.upstream_timeouts.get(),
            |seen| *seen == 1,
        );
        drop(client);
        drop(bench);
    });
}

#[test]
fn a_client_that_never_pauses_does_not_delay_a_drain() {
    let bench = Bench::new(Options::default());
    let client = bench.tcp_client();
    std::thread::scope(|scope| {
        scope.spawn(|| flood(&client));
        until(
            "the query has come",
            || bench.stats.transports.get(Protocol::Tcp),
            |seen| *seen > 0,
        );
        let Bench {
            listeners, runtime, ..
        } = bench;
        let (done, drained) = std::sync::mpsc::channel();
        runtime.spawn(async move {
            let _ = done.send(listeners.drain(Duration::from_secs(1)).await);
        });
        let report = drained.recv_timeout(Duration::from_secs(20));
        client.shutdown(std::net::Shutdown::Both).unwrap_or(());
        runtime.shutdown_background();
        report.expect("the drain ends");
    });
}
