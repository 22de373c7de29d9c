//! The log against a file: format, hostile names, sampling, a full queue, rotation.

use std::{fs, net::Ipv4Addr, path::Path};

use dns_policy::rule::Transport;
use dns_wire::{Rcode, query::Query};
use polling::until;
use serde_json::Value;

use super::*;

fn entry(name: &str) -> Entry {
    Entry {
        time: 1_709_208_000_123_456_000,
        asked: Instant::now(),
        endpoint: Some((7, 12_345)),
        pod: Ipv4Addr::new(10, 0, 1, 5).into(),
        name: name.to_owned(),
        qtype: 28,
        transport: Transport::Tcp,
        allowed: true,
        server: ([10, 0, 0, 10], 53).into(),
        server_identity: Some(1053),
        rule: Some(("k8s:app=dns".to_owned(), "*.example.com.".to_owned())),
        end: QueryEnd {
            result: "realised",
            rcode: Some(0),
            answers: 2,
            took: Duration::from_micros(2500),
            held: Duration::from_micros(700),
        },
    }
}

fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).expect("the log");
    let all = text.lines().map(serde_json::from_str);
    all.collect::<Result<_, _>>().expect("a JSON object a line")
}

fn config(path: &Path, sample: &str) -> QueryLogConfig {
    QueryLogConfig {
        which: Which::All,
        target: Target::File(path.to_owned()),
        sample: sample.parse().expect("a share"),
    }
}

fn close(log: &QueryLog) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build();
    runtime.expect("a runtime").block_on(log.close());
}

#[test]
fn lines_are_as_documented() {
    let mut shown = Vec::new();
    Line::of(&entry("www.example.com."), 1).write(&mut shown);
    let denied = Entry {
        endpoint: None,
        qtype: 65_280,
        transport: Transport::Udp,
        allowed: false,
        server_identity: None,
        rule: None,
        end: QueryEnd::own("unknown_source", Rcode::Refused),
        ..entry(".")
    };
    Line::of(&denied, 100).write(&mut shown);
    dropped_line(&mut shown);
    let golden = include_str!("../../tests/data/query-log.jsonl");
    assert_eq!(String::from_utf8(shown).expect("UTF-8"), golden);
}

fn dropped_line(to: &mut Vec<u8>) {
    line::dropped(1_709_208_001_000_000_000, 17, to);
}

#[test]
fn bytes_of_a_name_neither_end_the_line_nor_the_string() {
    let label = b"a\n\",\"verdict\":\"allowed\x00\x1b\xff\\";
    let mut query = vec![0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    query.push(u8::try_from(label.len()).expect("short"));
    query.extend_from_slice(label);
    query.extend_from_slice(&[0, 0, 1, 0, 1]);
    let name = Query::decode(&query).expect("a query").name;
    let mut shown = Vec::new();
    Line::of(&entry(name.as_str()), 1).write(&mut shown);
    let printable = |byte: &u8| (0x20..0x7f).contains(byte);
    let (end, line) = shown.split_last().expect("a line");
    assert!(*end == b'\n' && line.iter().all(printable), "{shown:?}");
    let back: Value = serde_json::from_slice(line).expect("JSON");
    assert_eq!(back["name"], name.as_str());
    assert_eq!(back["verdict"], "allowed");
    assert!(name.as_str().contains("\\010"), "{}", name.as_str());
}

#[test]
fn one_in_n_is_sampled_and_denied_excludes_allowed() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut config = config(&dir.path().join("q.log"), "1/10");
    let stats = QueryLogStats::default();
    let log = QueryLog::open(&config, &stats).expect("a log");
    let taken: Vec<u32> = (0..20_000).filter(|_| log.takes(true)).collect();
    // One in ten of each type is logged. The limits are so wide that the test practically never
    // fails by chance.
    let of_a = taken.iter().filter(|n| n.is_multiple_of(2)).count();
    let of_aaaa = taken.len() - of_a;
    assert!((700..1300).contains(&of_a), "{of_a}");
    assert!((700..1300).contains(&of_aaaa), "{of_aaaa}");
    config.which = Which::Denied;
    let log = QueryLog::open(&config, &stats).expect("a log");
    assert_eq!((0..1000).filter(|_| log.takes(true)).count(), 0);
    assert!((0..1000).any(|_| log.takes(false)));
    for bad in ["", "0", "1/0", "2/3", "1/x", "10"] {
        assert!(bad.parse::<Sample>().is_err(), "{bad:?} was accepted");
    }
    for bad in [
        "",
        "queries.log",
        "Stdout",
        "/",
        "/queries.log",
        "//queries.log",
        "/./queries.log",
        "/logs/../queries.log",
        "/logs/..",
    ] {
        assert!(bad.parse::<Target>().is_err(), "{bad:?} was accepted");
    }
}

#[test]
fn waiting_lines_are_written_at_the_end() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("q.log");
    let stats = QueryLogStats::default();
    let log = QueryLog::open(&config(&path, "1"), &stats).expect("a log");
    for n in 0..1000 {
        log.submit(Box::new(entry(&format!("n{n}."))));
    }
    close(&log);
    let lines = lines(&path);
    assert_eq!(lines.len(), 1000);
    assert_eq!(lines[999]["name"], "n999.");
    assert_eq!((stats.lines.get(), stats.dropped.get()), (1000, 0));
    // The writer has ended: the line counts as dropped, and `submit` does not wait.
    log.submit(Box::new(entry("late.")));
    assert_eq!(stats.dropped.get(), 1);
}

#[test]
fn a_full_queue_drops_lines_counts_and_reports_them() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("q.log");
    let (queue, receiver) = sync_channel(2);
    let stats = QueryLogStats::default();
    let config = config(&path, "1");
    let log = QueryLog {
        config: config.clone(),
        dropped: Arc::default(),
        queue,
        closing: Arc::default(),
        problem: Arc::default(),
        stats: stats.clone(),
        writer: Mutex::new(None),
    };
    for n in 0..5 {
        log.submit(Box::new(entry(&format!("n{n}."))));
    }
    assert_eq!(stats.dropped.get(), 3);
    let writer = Writer {
        lines: receiver,
        output: Output::new(config.target),
        buffer: Vec::new(),
        waiting: 0,
        reporting: 0,
        one_in: 1,
        dropped: Arc::clone(&log.dropped),
        closing: Arc::clone(&log.closing),
        problem: Arc::clone(&log.problem),
        stats: stats.clone(),
    };
    log.closing.store(true, Ordering::Release);
    writer.run();
    let lines = lines(&path);
    assert_eq!(lines.len(), 3, "{lines:?}");
    assert_eq!(lines[1]["name"], "n1.");
    assert_eq!(lines[2]["dropped"], 3);
    assert_eq!(stats.lines.get(), 2);
}

#[test]
fn a_file_that_is_moved_is_opened_again_and_kept_if_that_fails() {
    let dir = tempfile::tempdir().expect("a directory");
    let place = dir.path().join("logs");
    fs::create_dir(&place).expect("a directory");
    let (path, moved) = (place.join("q.log"), dir.path().join("q.log.1"));
    let now = Instant::now();
    let at = |seconds| now + Duration::from_secs(seconds);
    let mut output = Output::new(Target::File(path.clone()));
    let mut write = |text: &str, now| output.write(text.as_bytes(), now);
    write("one\n", at(0)).0.expect("written");
    fs::rename(&path, &moved).expect("moved");
    // For up to a second, the old file still gets lines, so that no line is lost.
    write("two\n", now).0.expect("written");
    write("three\n", at(2)).1.expect("opened again");
    assert_eq!(fs::read_to_string(&moved).expect("moved"), "one\ntwo\n");
    assert_eq!(fs::read_to_string(&path).expect("new"), "three\n");
    let second = dir.path().join("q.log.2");
    fs::rename(&path, &second).expect("moved");
    fs::remove_dir(&place).expect("removed");
    let (written, opened) = write("four\n", at(4));
    written.expect("written");
    assert!(opened.is_err());
    assert_eq!(fs::read_to_string(&second).expect("moved"), "three\nfour\n");
}

#[test]
fn a_file_that_cannot_be_opened_is_tried_again_and_lost_lines_are_reported() {
    let dir = tempfile::tempdir().expect("a directory");
    let place = dir.path().join("logs");
    let path = place.join("q.log");
    let stats = QueryLogStats::default();
    let log = QueryLog::open(&config(&path, "1"), &stats).expect("a log");
    let problem = log.status().problem.expect("a problem");
    assert!(problem.contains("q.log"), "{problem}");
    for n in 0..3 {
        log.submit(Box::new(entry(&format!("n{n}."))));
    }
    until("lines are lost", || stats.dropped.get(), |seen| *seen == 3);
    // In the meantime the writer fails to report the lost lines. They must not be forgotten.
    let tried = stats.errors.get();
    until(
        "the write is tried again",
        || stats.errors.get(),
        |seen| *seen > tried,
    );
    assert_eq!(log.status().problem, Some(problem));
    fs::create_dir(&place).expect("a directory");
    until(
        "the file is opened",
        || log.status().problem,
        Option::is_none,
    );
    log.submit(Box::new(entry("last.")));
    close(&log);
    let lines = lines(&path);
    assert_eq!(lines[0]["dropped"], 3);
    assert_eq!(lines.last().expect("a line")["name"], "last.");
    assert_eq!((stats.lines.get(), stats.dropped.get()), (1, 3));
}

#[test]
fn a_symbolic_link_is_not_followed() {
    let dir = tempfile::tempdir().expect("a directory");
    let (path, other) = (dir.path().join("q.log"), dir.path().join("other"));
    fs::write(&other, "").expect("a file");
    std::os::unix::fs::symlink(&other, &path).expect("a link");
    let mut output = Output::new(Target::File(path));
    let error = output.follow(Instant::now()).expect_err("a link");
    assert!(error.to_string().contains("symbolic link"), "{error}");
    assert!(output.write(b"x\n", Instant::now()).0.is_err());
    assert_eq!(fs::read(&other).expect("a file"), b"");
}
