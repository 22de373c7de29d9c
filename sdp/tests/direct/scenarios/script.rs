//! The text of scenarios: one statement per line. Unknown words are errors.

use std::net::IpAddr;

use holdfast_sdp::{
    mapping::Release,
    stats::{AnswerResult, Label as _, QueryResult},
};

use super::message::{self, Opt, Record};

/// A named run of steps, each with its line.
#[derive(Debug)]
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) line: usize,
    pub(crate) steps: Vec<(usize, Step)>,
}

/// The parsed statement of one line.
#[derive(Debug)]
pub(crate) enum Step {
    Proxy(Setting),
    Agent(Agent),
    Ask(Ask),
    Server(String, ServerAction),
    Expect(String, Expected),
    Learned(Option<Learned>),
    Counted(Counter, u64),
    /// The server's UDP port is closed, or open again.
    Port {
        open: bool,
    },
    /// Upstream TCP connections so far.
    Connections(usize),
    /// A client ends its TCP connection.
    Hangup {
        client: String,
        end: End,
    },
}

#[derive(Debug)]
pub(crate) enum Setting {
    Reject,
    Allow(String),
    Ipv6,
    TimeoutMs(u64),
    DelayMs(u64),
    IdleMs(u64),
    ServerIdleMs(u64),
    InFlight(usize),
    GraceMs(u64),
}

#[derive(Debug)]
pub(crate) enum Agent {
    Says(Release),
    Realises,
}

/// A query that a client sends.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) label: String,
    pub(crate) client: String,
    pub(crate) tcp: bool,
    pub(crate) bytewise: bool,
    /// Arbitrary bytes, sent without a length.
    pub(crate) bare: bool,
    pub(crate) id: Option<u16>,
    pub(crate) bytes: Vec<u8>,
    /// The message that the server must receive.
    pub(crate) forwarded: Vec<u8>,
    pub(crate) edns: Option<Opt>,
}

/// The server's reaction to the query of a label.
#[derive(Debug)]
pub(crate) enum ServerAction {
    Receives,
    Answers(Box<Answer>),
    Sends(Vec<Piece>),
    Closes,
    /// Waits until the proxy has closed the connection.
    Closed,
}

/// Part of a message given in hexadecimal digits.
#[derive(Debug)]
pub(crate) enum Piece {
    Id,
    Question,
    Bytes(Vec<u8>),
}

#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) code: u16,
    pub(crate) flags: u16,
    pub(crate) sections: [Vec<Record>; 3],
    pub(crate) edns: Option<Opt>,
    pub(crate) wrong: Option<Wrong>,
    pub(crate) no_question: bool,
    pub(crate) cut: usize,
    pub(crate) bytewise: bool,
}

/// A part of an answer that a forger guessed wrong, or that a server gets wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wrong {
    Id,
    Question,
    Case,
    Opcode,
    Port,
    Address,
}

#[derive(Debug)]
pub(crate) enum Expected {
    /// The server's last message for this query, byte for byte except for the id.
    Answer,
    Own(Own),
    Closed,
}

/// An answer of the proxy's own.
#[derive(Debug, Default)]
pub(crate) struct Own {
    pub(crate) code: u16,
    pub(crate) soa: bool,
    pub(crate) no_question: bool,
    pub(crate) edns: Option<bool>,
    pub(crate) options: Vec<(u16, Vec<u8>)>,
}

#[derive(Debug)]
pub(crate) struct Learned {
    pub(crate) name: Option<String>,
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) ttl: Option<u32>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Counter {
    Query(QueryResult),
    Answer(AnswerResult),
    Timeouts,
    Joined,
}

/// How a client ends its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// Closes both directions of the connection.
    Both,
    /// Closes only the direction from the client.
    OfSending,
    Reset,
}

/// Words of one line that are not parsed yet.
struct Words<'a>(std::iter::Peekable<std::vec::IntoIter<&'a str>>);

impl<'a> Words<'a> {
    fn of(line: &'a str) -> Self {
        let words: Vec<_> = line.split_whitespace().collect();
        Self(words.into_iter().peekable())
    }

    fn maybe(&mut self) -> Option<&'a str> {
        self.0.next()
    }

    fn next(&mut self, what: &str) -> Result<&'a str, String> {
        self.0.next().ok_or_else(|| format!("{what} is missing"))
    }

    fn number<T: std::str::FromStr>(&mut self, what: &str) -> Result<T, String> {
        let word = self.next(what)?;
        word.parse().map_err(|_| format!("`{word}` is no {what}"))
    }

    /// A label before a colon, or the default label.
    fn label(&mut self) -> String {
        let label = self.0.peek().and_then(|word| word.strip_suffix(':'));
        let label = label.map(str::to_owned);
        if label.is_some() {
            self.0.next();
        }
        label.unwrap_or_else(|| "it".to_owned())
    }

    fn end(&mut self) -> Result<(), String> {
        self.0.next().map_or(Ok(()), |word| Err(unknown(word)))
    }
}

fn unknown(word: &str) -> String {
    format!("unknown word `{word}`")
}

/// Reads a file. Errors carry the number of their line.
pub(crate) fn parse(text: &str) -> Result<Vec<Case>, (usize, String)> {
    let mut cases: Vec<Case> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(name) = line.strip_prefix("case ") {
            let name = name.trim().to_owned();
            if cases.iter().any(|case| case.name == name) {
                return Err((number, format!("a second case `{name}`")));
            }
            let steps = Vec::new();
            cases.push(Case {
                name,
                line: number,
                steps,
            });
            continue;
        }
        let step = step(Words::of(line)).map_err(|error| (number, error))?;
        let Some(case) = cases.last_mut() else {
            return Err((number, "before the first case".to_owned()));
        };
        case.steps.push((number, step));
    }
    Ok(cases)
}

fn step(mut words: Words<'_>) -> Result<Step, String> {
    let step = match words.next("a statement")? {
        "proxy" => Step::Proxy(setting(&mut words)?),
        "agent" => Step::Agent(match words.next("what the agent does")? {
            "leased" => Agent::Says(Release::Leased),
            "holds" => Agent::Says(Release::Held),
            "away" => Agent::Says(Release::AgentAway),
            "realises" => Agent::Realises,
            word => return Err(unknown(word)),
        }),
        "ask" => Step::Ask(ask(&mut words)?),
        "server" => {
            let label = words.label();
            let word = words.next("what the server does")?;
            if let "gone" | "back" = word {
                words.end()?;
                let open = word == "back";
                return Ok(Step::Port { open });
            }
            let action = match word {
                "hears" => ServerAction::Receives,
                "closes" => ServerAction::Closes,
                "closed" => ServerAction::Closed,
                "answers" => ServerAction::Answers(Box::new(answer(&mut words)?)),
                "sends" => ServerAction::Sends(pieces(&mut words)?),
                word => return Err(unknown(word)),
            };
            Step::Server(label, action)
        }
        "expect" => {
            let label = words.label();
            Step::Expect(label, expected(&mut words)?)
        }
        "learned" => Step::Learned(learned(&mut words)?),
        "counted" => {
            let word = words.next("a counter")?;
            let counter = counter(word).ok_or_else(|| unknown(word))?;
            Step::Counted(counter, words.number("count")?)
        }
        "connections" => Step::Connections(words.number("number of connections")?),
        word @ ("hangup" | "half-close" | "reset") => Step::Hangup {
            client: words.maybe().unwrap_or("client").to_owned(),
            end: match word {
                "half-close" => End::OfSending,
                "reset" => End::Reset,
                _ => End::Both,
            },
        },
        word => return Err(unknown(word)),
    };
    words.end()?;
    Ok(step)
}

fn setting(words: &mut Words<'_>) -> Result<Setting, String> {
    Ok(match words.next("a setting")? {
        "nameError" => Setting::Reject,
        "allow" => Setting::Allow(words.next("a pattern")?.to_owned()),
        "ipv6" => Setting::Ipv6,
        "timeout-ms" => Setting::TimeoutMs(words.number("number")?),
        "delay-ms" => Setting::DelayMs(words.number("number")?),
        "idle-ms" => Setting::IdleMs(words.number("number")?),
        "server-idle-ms" => Setting::ServerIdleMs(words.number("number")?),
        "in-flight" => Setting::InFlight(words.number("number")?),
        "grace-ms" => Setting::GraceMs(words.number("milliseconds")?),
        word => return Err(unknown(word)),
    })
}

fn ask(words: &mut Words<'_>) -> Result<Ask, String> {
    let label = words.label();
    let mut ask = Ask {
        label,
        client: "client".to_owned(),
        tcp: false,
        bytewise: false,
        bare: false,
        id: None,
        bytes: Vec::new(),
        forwarded: Vec::new(),
        edns: None,
    };
    let mut first = words.next("a name")?;
    if first == "tcp" {
        ask.tcp = true;
        first = words.next("a name")?;
    }
    if let "hex" | "bare" = first {
        ask.bare = first == "bare";
        while let Some(word) = words.maybe() {
            ask.bytes.extend(message::hex(word)?);
        }
        ask.id = Some(u16::from_be_bytes(
            ask.bytes.first_chunk().copied().unwrap_or_default(),
        ));
        ask.forwarded = ask.bytes.clone();
        return Ok(ask);
    }
    let name = message::name(first)?;
    let word = words.next("a type")?;
    let qtype = message::rtype(word).ok_or_else(|| unknown(word))?;
    let mut class = 1_u16;
    let mut flags = 0x0100_u16;
    let mut counts = [1, 0, 0, 0];
    let mut lies = [None; 4];
    let mut padding = None;
    let (mut cut, mut tail) = (0, Vec::new());
    while let Some(word) = words.maybe() {
        match word {
            "from" => ask.client = words.next("a client")?.to_owned(),
            "bytewise" => ask.bytewise = true,
            "id" => ask.id = Some(words.number("id")?),
            "class" => class = words.number("class")?,
            "opcode" => flags |= words.number::<u16>("opcode")? << 11,
            "nord" => flags &= !0x0100,
            "qr" => flags |= 0x8000,
            "z" => flags |= 0x0040,
            "questions" => lies[0] = Some(words.number("count")?),
            "answers" => lies[1] = Some(words.number("count")?),
            "authorities" => lies[2] = Some(words.number("count")?),
            "additionals" => lies[3] = Some(words.number("count")?),
            "pad" => padding = Some(words.number("number")?),
            "cut" => cut = words.number("number")?,
            "tail" => tail.extend(message::hex(words.next("hex")?)?),
            word => {
                let known = flag(word, &mut flags) || edns(word, words, &mut ask.edns)?;
                known.then_some(()).ok_or_else(|| unknown(word))?;
            }
        }
    }
    counts[3] = u16::from(padding.is_some()) + u16::from(ask.edns.is_some());
    let build = |end_to_end| {
        let mut bytes = vec![0; 12];
        message::put(&mut bytes, 2, flags);
        for (at, count) in counts.iter().enumerate() {
            message::put(&mut bytes, 4 + 2 * at, lies[at].unwrap_or(*count));
        }
        bytes.extend_from_slice(&name);
        bytes.extend_from_slice(&qtype.to_be_bytes());
        bytes.extend_from_slice(&class.to_be_bytes());
        if let Some(padding) = padding {
            Record::padding(padding).write(&mut bytes);
        }
        if let Some(edns) = &ask.edns {
            edns.write(end_to_end, &mut bytes);
        }
        bytes.truncate(bytes.len().saturating_sub(cut));
        bytes.extend_from_slice(&tail);
        bytes
    };
    (ask.bytes, ask.forwarded) = (build(false), build(true));
    Ok(ask)
}

fn flag(word: &str, flags: &mut u16) -> bool {
    *flags |= match word {
        "aa" => 0x0400,
        "tc" => 0x0200,
        "ra" => 0x0080,
        "ad" => 0x0020,
        "cd" => 0x0010,
        _ => return false,
    };
    true
}

fn edns(word: &str, words: &mut Words<'_>, edns: &mut Option<Opt>) -> Result<bool, String> {
    if !["edns", "do", "version", "ednsflags", "option"].contains(&word) {
        return Ok(false);
    }
    let opt = edns.get_or_insert_default();
    match word {
        "edns" => opt.size = words.number("size")?,
        "do" => opt.flags |= 0x8000,
        "version" => opt.version = words.number("version")?,
        "ednsflags" => opt.flags |= words.number::<u16>("flags")?,
        _ => {
            let number = words.number("option's number")?;
            opt.options
                .push((number, message::hex(words.next("hex")?)?));
        }
    }
    Ok(true)
}

fn answer(words: &mut Words<'_>) -> Result<Answer, String> {
    let mut answer = Answer {
        flags: 0x8080,
        ..Answer::default()
    };
    let mut section = 0;
    while let Some(word) = words.maybe() {
        match word {
            "|" => {}
            "authority" => section = 1,
            "additional" => section = 2,
            "noquestion" => answer.no_question = true,
            "bytewise" => answer.bytewise = true,
            "cut" => answer.cut = words.number("number")?,
            "pad" => answer.sections[2].push(Record::padding(words.number("number")?)),
            "wrong" => {
                answer.wrong = Some(match words.next("what is wrong")? {
                    "id" => Wrong::Id,
                    "question" => Wrong::Question,
                    "case" => Wrong::Case,
                    "opcode" => Wrong::Opcode,
                    "port" => Wrong::Port,
                    "address" => Wrong::Address,
                    word => return Err(unknown(word)),
                });
            }
            word if message::code(word).is_some() => {
                answer.code = message::code(word).unwrap_or_default();
            }
            word => {
                if flag(word, &mut answer.flags) || edns(word, words, &mut answer.edns)? {
                    continue;
                }
                answer.sections[section].push(record(word, words)?);
            }
        }
    }
    if answer.code > 15 {
        answer.edns.get_or_insert_default().extended_code =
            u8::try_from(answer.code >> 4).unwrap_or(u8::MAX);
    }
    Ok(answer)
}

/// Words that end the data of a record.
const AFTER_DATA: [&str; 11] = [
    "|",
    "authority",
    "additional",
    "edns",
    "do",
    "version",
    "ednsflags",
    "option",
    "cut",
    "pad",
    "bytewise",
];

/// Parses a record: `[[owner] ttl] TYPE data…`.
fn record(first: &str, words: &mut Words<'_>) -> Result<Record, String> {
    let (mut owner, mut ttl, mut kind) = (None, 300, first);
    if first.contains('.') {
        owner = Some(message::name(first)?);
        ttl = words.number("TTL")?;
        kind = words.next("a type")?;
    } else if let Ok(number) = first.parse() {
        ttl = number;
        kind = words.next("a type")?;
    }
    let rtype = message::rtype(kind).ok_or_else(|| unknown(kind))?;
    let mut data = Vec::new();
    while let Some(word) = words.0.next_if(|word| !AFTER_DATA.contains(word)) {
        data.push(word);
    }
    Ok(Record {
        owner,
        ttl,
        rtype,
        data: message::data(rtype, &data)?,
    })
}

fn pieces(words: &mut Words<'_>) -> Result<Vec<Piece>, String> {
    let mut pieces = Vec::new();
    while let Some(word) = words.maybe() {
        pieces.push(match word {
            "ID" => Piece::Id,
            "QUESTION" => Piece::Question,
            word => Piece::Bytes(message::hex(word)?),
        });
    }
    Ok(pieces)
}

fn expected(words: &mut Words<'_>) -> Result<Expected, String> {
    let word = words.next("what is expected")?;
    let code = match word {
        "answer" => return Ok(Expected::Answer),
        "closed" => return Ok(Expected::Closed),
        word => message::code(word).ok_or_else(|| unknown(word))?,
    };
    let mut own = Own {
        code,
        ..Own::default()
    };
    while let Some(word) = words.maybe() {
        match word {
            "soa" => own.soa = true,
            "noquestion" => own.no_question = true,
            "edns" => own.edns = Some(true),
            "noedns" => own.edns = Some(false),
            "ede" => {
                let code: u16 = words.number("code")?;
                own.options.push((15, code.to_be_bytes().to_vec()));
            }
            "option" => {
                let number = words.number("option's number")?;
                let bytes = message::hex(words.next("hex")?)?;
                own.options.push((number, bytes));
            }
            word => return Err(unknown(word)),
        }
    }
    Ok(Expected::Own(own))
}

fn learned(words: &mut Words<'_>) -> Result<Option<Learned>, String> {
    let mut learned = Learned {
        name: None,
        addresses: Vec::new(),
        ttl: None,
    };
    while let Some(word) = words.maybe() {
        match word {
            "nothing" => return Ok(None),
            "ttl" => learned.ttl = Some(words.number("TTL")?),
            "name" => learned.name = Some(words.next("a name")?.to_owned()),
            word => learned
                .addresses
                .push(word.parse().map_err(|_| unknown(word))?),
        }
    }
    Ok(Some(learned))
}

fn counter(word: &str) -> Option<Counter> {
    let query = QueryResult::ALL.iter().find(|l| l.text() == word);
    let answer = AnswerResult::ALL.iter().find(|l| l.text() == word);
    match word {
        "timeouts" => Some(Counter::Timeouts),
        "joined" => Some(Counter::Joined),
        _ => query
            .map(|l| Counter::Query(*l))
            .or(answer.map(|l| Counter::Answer(*l))),
    }
}
