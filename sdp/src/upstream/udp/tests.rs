//! Limits on the sockets that each endpoint may open.

use nix::sys::epoll::EpollCreateFlags;

use super::*;

const TIMEOUT: Duration = Duration::from_secs(100);

struct Worker {
    upstream: UdpUpstream,
    epoll: Epoll,
    now: Instant,
    asked: u16,
}

impl Worker {
    fn new() -> Self {
        Self {
            upstream: UdpUpstream::new(false, 65_536, TIMEOUT, Counters::default()),
            epoll: Epoll::new(EpollCreateFlags::empty()).unwrap(),
            now: Instant::now(),
            asked: 0,
        }
    }

    /// Registers a new query of endpoint `id` to the server with this number. Nothing is sent.
    fn ask(&mut self, id: u16, server: u16) -> Result<Registration, RegisterError> {
        self.asked += 1;
        let [high, low] = self.asked.to_be_bytes();
        let message = [&[0; HEADER_LEN][..], &[2, high, low, 0, 0, 1, 0, 1]].concat();
        let question = &message[HEADER_LEN..];
        let mut query = PendingQuery::of_endpoint(id, question, self.now);
        query.from.server.set_port(server);
        self.upstream
            .register(&mut query, &message, self.now, &self.epoll)
    }

    /// Registers the same question of endpoint 1 from another port of the client.
    fn ask_from(&mut self, port: u16) -> Registration {
        let message = [&[0; HEADER_LEN][..], &[1, b'a', 0, 0, 1, 0, 1]].concat();
        let mut query = PendingQuery::of_endpoint(1, &message[HEADER_LEN..], self.now);
        query.from.client.set_port(port);
        self.upstream
            .register(&mut query, &message, self.now, &self.epoll)
            .unwrap()
    }

    /// Takes the answer to a query, and returns the ports of the clients that get it.
    fn answer(&mut self, sent: FlightRef) -> Vec<u16> {
        let flight = self.upstream.flights.get(sent.flight).unwrap();
        let answer = [
            &sent.id.to_be_bytes()[..],
            &[0x80, 0, 0, 1, 0, 0, 0, 0, 0, 0],
            &flight.query.question,
        ]
        .concat();
        let flight = self.upstream.answered(sent.socket, &answer, self.now);
        let recipients = flight.unwrap().query;
        recipients.recipients().map(|(to, _)| to.port()).collect()
    }

    /// Registers queries of endpoint `id` to silent servers from `first` on until one is refused.
    /// Returns how many were accepted.
    fn ask_all(&mut self, id: u16, first: u16) -> u16 {
        let refused = (first..first + 1000).find(|server| match self.ask(id, *server) {
            Ok(_) => false,
            Err(RegisterError::Full) => true,
            Err(error) => panic!("{error}"),
        });
        refused.expect("there is a limit") - first
    }
}

#[test]
fn silent_servers_stop_only_their_clients() {
    let mut worker = Worker::new();
    let one = worker.ask_all(1, 2000);
    for id in 2..6 {
        for server in 0..4 {
            let registered = worker.ask(id, 5000 + 10 * id + server);
            assert!(registered.is_ok(), "query of endpoint {id}: {registered:?}");
        }
    }
    assert!(matches!(worker.ask(1, 4000), Err(RegisterError::Full)));
    // Without waiting queries there is as much room as before, even with open sockets.
    worker.now += TIMEOUT;
    while worker.upstream.expired(worker.now).is_some() {}
    assert_eq!(worker.ask_all(2, 10_000), one);
}

#[test]
fn an_undelivered_query_is_sent_once_more_over_another_socket() {
    let mut worker = Worker::new();
    let message = [&[0; HEADER_LEN][..], &[1, b'a', 0, 0, 1, 0, 1]].concat();
    let sent = |id: u16| [&id.to_be_bytes()[..], &message[2..]].concat();
    let Registration::New(first) = worker.ask_from(1000) else {
        panic!("nothing is in flight");
    };
    let joined = worker.ask_from(1001);
    assert!(matches!(joined, Registration::Joined), "{joined:?}");
    let now = worker.now;
    let flight = worker.upstream.undelivered(first.socket, &sent(first.id));
    worker.upstream.retire(first.socket);
    let second = worker
        .upstream
        .again(flight.unwrap(), &sent(first.id), now, &worker.epoll);
    let second = second.unwrap();
    assert_ne!(second.socket, first.socket);
    assert_eq!(worker.upstream.in_flight(), 1);
    let flight = worker
        .upstream
        .undelivered(second.socket, &sent(second.id))
        .unwrap();
    let failed = worker
        .upstream
        .again(flight, &sent(second.id), now, &worker.epoll);
    let ports: Vec<u16> = failed
        .unwrap_err()
        .recipients()
        .map(|(to, _)| to.port())
        .collect();
    assert_eq!(ports, [1000, 1001], "all clients get SERVFAIL");
    assert_eq!(worker.upstream.in_flight(), 0);
}

#[test]
fn a_changed_or_shortened_quotation_is_not_sent_again() {
    let message = [&[0; HEADER_LEN][..], &[1, b'a', 0, 0, 1, 0, 1]].concat();
    let mut changed = message.clone();
    changed[3] = 0x10;
    let longer = [&message[..], &[0]].concat();
    for quoted in [changed, longer] {
        let mut worker = Worker::new();
        let Registration::New(first) = worker.ask_from(1000) else {
            panic!("nothing is in flight");
        };
        let quoted = [&first.id.to_be_bytes()[..], &quoted[2..]].concat();
        let flight = worker.upstream.undelivered(first.socket, &quoted).unwrap();
        let again = worker
            .upstream
            .again(flight, &quoted, worker.now, &worker.epoll);
        assert!(again.is_err(), "{quoted:?}");
    }
}

#[test]
fn an_old_socket_is_used_if_no_new_one_can_be_opened() {
    let mut worker = Worker::new();
    let last = 2000 + worker.ask_all(1, 2000) - 1;
    worker.now += TIMEOUT - Duration::from_secs(1);
    assert!(matches!(worker.ask(1, 4000), Err(RegisterError::Full)));
    let registered = worker.ask(1, last);
    assert!(
        matches!(registered, Ok(Registration::New(_))),
        "{registered:?}"
    );
}

#[test]
fn a_query_that_finds_a_socket_too_old_opens_none() {
    // The socket is too old because of its number of queries, and then because of its age.
    for (queries, pause) in [(25_000, Duration::ZERO), (200, Duration::from_secs(1))] {
        let mut worker = Worker::new();
        let mut used = Vec::new();
        for n in 0..queries {
            let before = worker.upstream.sockets.len();
            let Ok(Registration::New(registered)) = worker.ask(1, 53) else {
                panic!("query {n} is not registered");
            };
            assert!(
                n == 0 || worker.upstream.sockets.len() == before,
                "query {n}"
            );
            used.push(registered.socket);
            worker.upstream.remove(registered.flight);
            worker.upstream.renew(worker.now, &worker.epoll);
            assert_eq!(worker.upstream.sockets.len(), 1, "the old socket is closed");
            worker.now += pause;
        }
        used.dedup();
        assert!(used.len() >= 3, "{} sockets", used.len());
    }
}

#[test]
fn queries_leave_a_socket_that_gets_no_answers() {
    let mut worker = Worker::new();
    let ask = |worker: &mut Worker, wait: u64| {
        worker.now += Duration::from_millis(wait);
        match worker.ask(1, 53) {
            Ok(Registration::New(registered)) => registered,
            other => panic!("{other:?}"),
        }
    };
    let first = ask(&mut worker, 0);
    assert_eq!(ask(&mut worker, 299).socket, first.socket);
    let second = ask(&mut worker, 1);
    assert_ne!(second.socket, first.socket);
    assert!(
        worker.upstream.fd(first.socket).is_some(),
        "late answers still arrive there"
    );
    // A server that is silent for longer costs fewer sockets.
    assert_eq!(ask(&mut worker, 599).socket, second.socket);
    let third = ask(&mut worker, 1);
    assert_ne!(third.socket, second.socket);
    // Each answer is a sign of life, even while other queries wait.
    for _ in 0..3 {
        let waiting = ask(&mut worker, 200);
        assert_eq!(waiting.socket, third.socket);
        assert_eq!(worker.answer(waiting).len(), 1);
    }
    assert_eq!(ask(&mut worker, 299).socket, third.socket);
    assert_ne!(ask(&mut worker, 1).socket, third.socket);
}

fn sent(registration: Registration) -> FlightRef {
    match registration {
        Registration::New(sent) => sent,
        Registration::Joined => panic!("it waits for the answer to an equal query"),
    }
}

#[test]
fn a_lost_query_takes_no_equal_ones_with_it() {
    let mut worker = Worker::new();
    let lost = sent(worker.ask_from(1));
    for port in [2, 3] {
        worker.now += Duration::from_millis(100);
        assert!(matches!(worker.ask_from(port), Registration::Joined));
    }
    worker.now += Duration::from_millis(100);
    let next = sent(worker.ask_from(4));
    assert_ne!(next.socket, lost.socket, "the socket is silent");
    assert!(matches!(worker.ask_from(5), Registration::Joined));
    assert_eq!(worker.answer(next), [4, 2, 3, 5]);
    // If the first query's answer was only late, its own client gets it.
    assert_eq!(worker.answer(lost), [1]);
}

#[test]
fn a_client_that_repeats_its_query_gets_one_answer_to_each() {
    let mut worker = Worker::new();
    let first = sent(worker.ask_from(1));
    assert!(matches!(worker.ask_from(2), Registration::Joined));
    worker.now += Duration::from_secs(1);
    let repeated = sent(worker.ask_from(2));
    assert_eq!(worker.answer(repeated), [2]);
    assert_eq!(worker.answer(first), [1, 2]);
}

#[test]
fn while_answers_come_many_equal_queries_are_not_sent_one_by_one() {
    let mut worker = Worker::new();
    let mut sent = 0;
    for port in 0..1000 {
        sent += usize::from(matches!(worker.ask_from(port), Registration::New(_)));
    }
    assert_eq!(sent, 1000_usize.div_ceil(MAX_JOINED + 1));
}
