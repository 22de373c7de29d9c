//! Runs the scenarios of `sdp/tests/scenarios/*.txt`. CONTRIBUTING.md describes their words.

#[path = "scenarios/message.rs"]
mod message;
#[path = "scenarios/script.rs"]
mod script;
#[path = "scenarios/setup.rs"]
mod setup;

use std::{collections::HashMap, fs, path::PathBuf, time::Duration};

use dns_policy::{mapping::Realised, reject_code::RejectCode};
use hickory_proto::{op::Message, rr::RData};
use holdfast_sdp::mapping::OnRealised;
use polling::until;

use self::{
    message::Opt,
    script::{
        Agent, Answer, Ask, Case, Counter, Expected, Own, Piece, ServerAction, Setting, Step, Wrong,
    },
    setup::{Received, Setup, Source, hex},
};
use crate::bench::Options;

/// Makes a test of each file of scenarios.
macro_rules! files {
    ($($name:ident),* $(,)?) => {
        const FILES: &[&str] = &[$(stringify!($name)),*];
        $(#[test]
        fn $name() {
            play(stringify!($name));
        })*
    };
}

files!(
    edns, errors, refusal, names, records, answers, tcp, stubs, transfers
);

fn directory() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests", "scenarios"]
        .iter()
        .collect()
}

#[test]
fn every_file_is_run() {
    let mut there: Vec<_> = fs::read_dir(directory())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|ext| ext == "txt"))
        .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
        .collect();
    there.sort();
    let mut listed = FILES.to_vec();
    listed.sort_unstable();
    assert_eq!(there, listed);
}

#[test]
fn an_unknown_word_is_named_with_its_line() {
    for (text, line, word) in [
        ("case a\nask x.example A\nexpekt answer", 3, "expekt"),
        ("case a\n\nask x.example A quickly", 3, "quickly"),
        ("case a\nserver answers A 192.0.2.1 authority MD x", 2, "MD"),
        (
            "case a\nserver answers A 192.0.2.1 192.0.2.2",
            2,
            "192.0.2.2",
        ),
        ("case a\nexpect REFUSED loudly", 2, "loudly"),
        ("case a\ncounted sheep 1", 2, "sheep"),
        ("ask x.example A", 1, "before the first case"),
        ("case a\ncase a", 2, "a second case"),
    ] {
        let (at, error) = script::parse(text).unwrap_err();
        assert!(at == line && error.contains(word), "{text}: {at}: {error}");
    }
}

#[test]
fn a_wrong_expectation_is_found() {
    let refused = "ask two: x.example A\nexpect two: REFUSED";
    let twice = format!("{refused}\n{refused}");
    for (text, line, what) in [
        ("ask x.example A\nexpect NXDOMAIN", 3, "code"),
        ("ask x.example A\nexpect REFUSED soa", 3, "SOA"),
        ("ask x.example A do\nexpect REFUSED noedns", 3, "wanted"),
        ("ask x.example A do\nexpect REFUSED", 3, "OPT"),
        (&format!("ask x.example A\n{refused}"), 4, "id"),
        // The second refusal arrives after all messages of the first batch.
        (&format!("ask x.good.example A\n{twice}"), 1, "had got"),
        (
            "ask x.good.example A\nserver answers A 192.0.2.1\nexpect REFUSED",
            4,
            "code",
        ),
        (
            "ask x.good.example A\nserver answers A 192.0.2.1\nlearned 192.0.2.2",
            4,
            "learned",
        ),
    ] {
        let case = script::parse(&format!("case a\n{text}")).unwrap().pop();
        let (at, error) = act(&case.unwrap()).unwrap_err();
        assert!(at == line && error.contains(what), "{text}: {at}: {error}");
    }
}

fn play(file: &str) {
    let path = directory().join(file).with_extension("txt");
    let text = fs::read_to_string(&path).unwrap();
    let shown = format!("sdp/tests/scenarios/{file}.txt");
    let cases =
        script::parse(&text).unwrap_or_else(|(line, error)| panic!("{shown}:{line}: {error}"));
    let mut failed = Vec::new();
    for case in &cases {
        if let Err((line, error)) = act(case) {
            failed.push(format!("{shown}:{line}: {}: {error}", case.name));
        }
    }
    assert!(failed.is_empty(), "\n{}", failed.join("\n"));
}

/// A query and its answers.
struct Asked {
    ask: Ask,
    id: u16,
    received: Option<Received>,
    /// Bytes of the server's last answer to it.
    answer: Vec<u8>,
}

struct Play {
    setup: Setup,
    asked: HashMap<String, Asked>,
    held: Option<OnRealised>,
    next_id: u16,
}

fn act(case: &Case) -> Result<(), (usize, String)> {
    let mut options = Options::default();
    for (_, step) in &case.steps {
        if let Step::Proxy(setting) = step {
            set(&mut options, setting);
        }
    }
    let mut play = Play {
        setup: Setup::new(options),
        asked: HashMap::new(),
        held: None,
        next_id: 0x2a00,
    };
    for (line, step) in &case.steps {
        play.step(step).map_err(|error| (*line, error))?;
    }
    play.setup.end().map_err(|error| (case.line, error))
}

fn set(options: &mut Options, setting: &Setting) {
    let config = &mut options.config;
    match setting {
        Setting::Reject => config.reject = RejectCode::NameError,
        Setting::Allow(pattern) => options.allow.push(pattern.clone()),
        Setting::Ipv6 => options.v6 = true,
        Setting::TimeoutMs(ms) => config.timeout = Duration::from_millis(*ms),
        Setting::DelayMs(ms) => config.max_delay = Duration::from_millis(*ms),
        Setting::IdleMs(ms) => config.tcp_idle = Duration::from_millis(*ms),
        Setting::ServerIdleMs(ms) => config.server_idle = Duration::from_millis(*ms),
        Setting::InFlight(limit) => config.in_flight = *limit,
        Setting::GraceMs(ms) => config.in_flight_grace = Duration::from_millis(*ms),
    }
}

impl Play {
    fn step(&mut self, step: &Step) -> Result<(), String> {
        match step {
            Step::Proxy(_) => Ok(()),
            Step::Agent(Agent::Says(release)) => {
                self.setup.bench.sink.set_release(*release);
                Ok(())
            }
            Step::Agent(Agent::Realises) => {
                let held = self.held.take().or_else(|| self.setup.bench.sink.next().1);
                held.ok_or("the agent was asked for nothing")?(Realised::Yes);
                Ok(())
            }
            Step::Ask(ask) => self.ask(ask),
            Step::Server(label, action) => self.serve(label, action),
            Step::Port { open } => self.setup.port(*open),
            Step::Expect(label, expected) => self.expect(label, expected),
            Step::Learned(None) if self.setup.bench.sink.is_empty() => Ok(()),
            Step::Learned(None) => Err("something was learned".to_owned()),
            Step::Learned(Some(learned)) => self.learned(learned),
            Step::Counted(counter, wanted) => {
                let stats = &self.setup.bench.stats;
                let count = || match counter {
                    Counter::Query(label) => stats.queries.get(*label),
                    Counter::Answer(label) => stats.answers.get(*label),
                    Counter::Timeouts => stats.upstream_timeouts.get(),
                    Counter::Joined => stats.joined.get(),
                };
                match until(&format!("{counter:?} {wanted}"), count, |seen| {
                    seen >= wanted
                }) {
                    counted if counted == *wanted => Ok(()),
                    counted => Err(format!("counted {counted}")),
                }
            }
            Step::Connections(wanted) => {
                let count = self.setup.connections()?;
                if count == *wanted {
                    Ok(())
                } else {
                    Err(format!("{count} connections"))
                }
            }
            Step::Hangup { client, end } => self.setup.hangup(client, *end),
        }
    }

    fn ask(&mut self, ask: &Ask) -> Result<(), String> {
        let id = ask.id.unwrap_or(self.next_id);
        self.next_id += 1;
        let mut bytes = ask.bytes.clone();
        if bytes.len() >= 2 && !ask.bare {
            message::put(&mut bytes, 0, id);
        }
        self.setup.ask(ask, &bytes)?;
        let asked = Asked {
            ask: ask.clone(),
            id,
            received: None,
            answer: Vec::new(),
        };
        self.asked.insert(ask.label.clone(), asked);
        Ok(())
    }

    fn serve(&mut self, label: &str, action: &ServerAction) -> Result<(), String> {
        let asked = self.asked.get_mut(label).ok_or("no query has this label")?;
        let body = asked.ask.forwarded.get(2..).unwrap_or_default();
        let received = match (&asked.received, action) {
            (
                Some(received),
                ServerAction::Answers(_)
                | ServerAction::Sends(_)
                | ServerAction::Closes
                | ServerAction::Closed,
            ) => received.clone(),
            (_, ServerAction::Receives) | (None, _) => self.setup.receive_query(body)?,
        };
        asked.received = Some(received.clone());
        let (bytes, bytewise, wrong) = match action {
            ServerAction::Receives => return Ok(()),
            ServerAction::Closes => return self.setup.close(received.from),
            ServerAction::Closed => return self.setup.closed(received.from),
            ServerAction::Answers(answer) => (
                build(answer, &received.bytes),
                answer.bytewise,
                answer.wrong,
            ),
            ServerAction::Sends(pieces) => (join(pieces, &received.bytes), false, None),
        };
        let source = match wrong {
            Some(Wrong::Port) => Source::OtherPort,
            Some(Wrong::Address) => Source::OtherAddress,
            _ => Source::Server,
        };
        self.setup.reply(received.from, &bytes, bytewise, source)?;
        asked.answer = bytes;
        if let ServerAction::Answers(answer) = action
            && let Some(edns) = &answer.edns
        {
            // The message for the client, without the options that are not passed on.
            let mut without = Vec::new();
            edns.write(true, &mut without);
            let mut with = Vec::new();
            edns.write(false, &mut with);
            if let Some(head) = asked.answer.strip_suffix(with.as_slice()) {
                asked.answer = [head, &without].concat();
            }
        }
        Ok(())
    }

    fn expect(&mut self, label: &str, expected: &Expected) -> Result<(), String> {
        let asked = self.asked.get(label).ok_or("no query has this label")?;
        let got = self.setup.receive(&asked.ask.client, asked.ask.tcp)?;
        let got = match (expected, got) {
            (Expected::Closed, None) => return Ok(()),
            (Expected::Closed, Some(got)) => return Err(format!("got {}", hex(&got))),
            (_, None) => return Err("the connection was closed".to_owned()),
            (_, Some(got)) => got,
        };
        match expected {
            Expected::Own(own) => check_own(own, asked, &got)?,
            Expected::Answer | Expected::Closed => {
                let mut wanted = asked.answer.clone();
                if wanted.len() >= 2 {
                    message::put(&mut wanted, 0, asked.id);
                }
                if got != wanted {
                    return Err(format!("got {}\nwanted {}", hex(&got), hex(&wanted)));
                }
            }
        }
        Ok(())
    }

    fn learned(&mut self, learned: &script::Learned) -> Result<(), String> {
        let (mapping, on_realised) = self.setup.bench.sink.next();
        self.held = on_realised;
        let mut wanted = learned.addresses.clone();
        wanted.sort_unstable();
        let name = learned.name.as_deref();
        let fits = mapping.addresses == wanted
            && learned.ttl.is_none_or(|ttl| ttl == mapping.ttl)
            && name.is_none_or(|name| name == mapping.name.as_str());
        if fits {
            Ok(())
        } else {
            Err(format!("learned {mapping:?}"))
        }
    }
}

/// The server's answer to `query`.
fn build(answer: &Answer, query: &[u8]) -> Vec<u8> {
    let mut bytes = query[..12].to_vec();
    let received = u16::from_be_bytes([query[2], query[3]]);
    let mut flags = answer.flags | (received & 0x7900) | (answer.code & 15);
    if answer.wrong == Some(Wrong::Opcode) {
        flags ^= 0x2000;
    }
    message::put(&mut bytes, 2, flags);
    let question = match answer.wrong {
        Some(Wrong::Question) => [
            &message::name("x.elsewhere.example").unwrap()[..],
            &[0, 1, 0, 1],
        ]
        .concat(),
        _ => message::question(query).unwrap_or_default().to_vec(),
    };
    message::put(&mut bytes, 4, u16::from(!answer.no_question));
    if !answer.no_question {
        bytes.extend_from_slice(&question);
    }
    let [answers, authorities, additionals] = &answer.sections;
    let additional = additionals.len() + usize::from(answer.edns.is_some());
    for (at, count) in [(6, answers.len()), (8, authorities.len()), (10, additional)] {
        message::put(&mut bytes, at, u16::try_from(count).unwrap());
    }
    for record in answers.iter().chain(authorities).chain(additionals) {
        record.write(&mut bytes);
    }
    if let Some(edns) = &answer.edns {
        edns.write(false, &mut bytes);
    }
    match answer.wrong {
        Some(Wrong::Id) => bytes[0] ^= 1,
        Some(Wrong::Case) => bytes[13] ^= 0x20,
        _ => {}
    }
    bytes.truncate(bytes.len() - answer.cut);
    bytes
}

fn join(pieces: &[Piece], received: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for piece in pieces {
        match piece {
            Piece::Id => bytes.extend_from_slice(&received[..2]),
            Piece::Question => {
                bytes.extend_from_slice(message::question(received).unwrap_or_default());
            }
            Piece::Bytes(more) => bytes.extend_from_slice(more),
        }
    }
    bytes
}

/// Checks an answer made by the proxy byte for byte, except for the SOA's data.
fn check_own(own: &Own, asked: &Asked, got: &[u8]) -> Result<(), String> {
    let sent = &asked.ask.bytes;
    let question = if own.no_question {
        &[]
    } else {
        message::question(sent).ok_or("the query has no question to echo: say `noquestion`")?
    };
    let edns = own.edns.unwrap_or(asked.ask.edns.is_some());
    let flags = u16::from_be_bytes([sent[2], sent[3]]) & 0x7910;
    let mut head = asked.id.to_be_bytes().to_vec();
    head.extend_from_slice(&(0x8000 | flags | (own.code & 15)).to_be_bytes());
    for there in [!own.no_question, false, own.soa, edns] {
        head.extend_from_slice(&u16::from(there).to_be_bytes());
    }
    head.extend_from_slice(question);
    let mut tail = Vec::new();
    if edns {
        let sent = asked.ask.edns.as_ref().map_or(0, |opt| opt.flags);
        let opt = Opt {
            extended_code: u8::try_from(own.code >> 4).unwrap(),
            flags: sent & 0x8000,
            options: own.options.clone(),
            ..Opt::default()
        };
        opt.write(false, &mut tail);
    }
    let got_hex = hex(got);
    if got.get(..4) != head.get(..4) {
        return Err(format!("id, flags or code: got {got_hex}"));
    }
    if !got.ends_with(&tail) {
        return Err(format!("OPT: got {got_hex}, wanted …{}", hex(&tail)));
    }
    if got.get(8..10) != head.get(8..10) {
        return Err(format!("SOA: got {got_hex}"));
    }
    let middle = got
        .strip_prefix(head.as_slice())
        .and_then(|rest| rest.strip_suffix(tail.as_slice()))
        .ok_or_else(|| format!("got {got_hex}, wanted {}", hex(&head)))?;
    if middle.is_empty() == own.soa {
        return Err(format!("SOA: got {got_hex}"));
    }
    let message = Message::from_vec(got).map_err(|e| format!("undecodable: {e}: {got_hex}"))?;
    for record in &message.authorities {
        let RData::SOA(soa) = &record.data else {
            return Err(format!("no SOA: {got_hex}"));
        };
        if record.ttl == 0 || soa.minimum != record.ttl {
            return Err(format!("TTL of the SOA and its minimum: {got_hex}"));
        }
    }
    Ok(())
}
