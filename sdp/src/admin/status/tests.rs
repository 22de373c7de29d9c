//! Both forms of a fixed status, byte for byte: `HOLDFAST_BLESS=1 cargo test -p holdfast-sdp
//! status` writes the files again.

use std::{fs, path::Path};

use dns_policy::epoch::Epoch;

use super::*;
use crate::{
    journal::JournalStatus,
    link::state::{Connection, RulesOrigin, Service, StateDirs},
    steering::SteeringStatus,
};

fn counted(all: &[(&str, u64)]) -> Vec<Counted> {
    let one = |(result, count): &(&str, u64)| Counted {
        result: (*result).to_owned(),
        count: *count,
    };
    all.iter().map(one).collect()
}

fn epoch() -> Epoch {
    Epoch {
        boot_id: "8a6f2a5e-51a1-4c6f-9d52-0c4c1f6f8f11".to_owned(),
        start: 3,
    }
}

fn healthy() -> Status {
    let replica = |pid, slots: &[u32], silent_ms| Replica {
        pid,
        is_this: pid == 4711,
        fallback: pid == 4600,
        slots: slots.to_vec(),
        silent_ms,
        live: silent_ms < 750,
    };
    Status {
        name: "sdp-4711".to_owned(),
        version: "0.1.0".to_owned(),
        pid: 4711,
        uptime_seconds: 7_384,
        ready: true,
        missing: Vec::new(),
        leaving: false,
        drain: Draining {
            since_ms: None,
            limit_ms: 10_000,
        },
        proxy_port: 10094,
        listeners: vec![
            ([127, 0, 0, 1], 10094).into(),
            ([0, 0, 0, 0, 0, 0, 0, 1], 10094).into(),
        ],
        workers: 2,
        under_way: Work {
            in_flight: 12,
            held: 1,
            tcp_connections: 3,
        },
        agent: LinkStatus {
            connection: Some(Connection {
                address: "unix:///run/holdfast/sdp.sock".to_owned(),
                service: Service::Native,
                agent_version: "0.1.0".to_owned(),
                epoch: epoch(),
                other_proxy_port: None,
                other_state_dir: None,
            }),
            last_error: None,
            sessions: 2,
            rules: RulesOrigin::Agent {
                epoch: epoch(),
                revision: 42,
            },
            acked_revision: Some(42),
            refused_rules: None,
            kept_endpoints: 0,
            skipped_rows: 0,
        },
        endpoints_with_rules: 18,
        maps: MapsStatus {
            root: "/sys/fs/bpf".to_owned(),
            lxc_problem: None,
            ipcache: Some("cilium_ipcache_v2".to_owned()),
            ipcache_problem: None,
            agent_tables: false,
            former_entries: 0,
        },
        mappings: SinkStatus {
            kept: 640,
            dropped: 0,
            leases: 612,
            queued: 0,
            in_flight: 1,
            agent_hung: false,
        },
        steering: Steering::of(&SteeringStatus::Joined(vec![0, 1])),
        replicas: vec![
            replica(4711, &[0, 1], 88),
            replica(4500, &[2], 1_900),
            replica(4600, &[3], 120),
        ],
        transparent: Mode::Off,
        privileges: Privileges {
            uid: 10094,
            gid: 10094,
            capabilities: vec!["CAP_BPF".to_owned(), "CAP_NET_RAW".to_owned()],
            files: Some(true),
            calls: true,
            for_kernel: vec!["CAP_BPF".to_owned()],
        },
        skipped_files: Vec::new(),
        rules_journal: RulesJournalStatus::default(),
        journal: JournalStatus {
            path: Some("/var/lib/holdfast/sdp/sdp-4711.journal".to_owned()),
            pairs: 5,
            bytes: 901,
            ..JournalStatus::default()
        },
        query_log: None,
        queries: counted(&[("forwarded", 120_417), ("denied_name", 93)]),
        answers: counted(&[("released", 119_800), ("realised", 602), ("late", 3)]),
        troubles: Vec::new(),
    }
}

/// Everything that can be wrong at once.
fn troubled() -> Status {
    let warning = |level: &str, text: &str, count| RecentWarning {
        level: level.to_owned(),
        text: text.to_owned(),
        count,
        first: "2026-03-01T08:00:00.25Z".to_owned(),
        last: "2026-03-01T09:30:00Z".to_owned(),
    };
    let mut status = healthy();
    status.uptime_seconds = 42;
    status.ready = false;
    status.leaving = true;
    status.drain.since_ms = Some(350);
    status.missing = vec![Missing {
        need: "staying".to_owned(),
        reason: "leaving".to_owned(),
    }];
    status.agent.connection = None;
    status.agent.acked_revision = None;
    status.agent.last_error = Some("the agent closed UpdateDNSRules".to_owned());
    status.agent.rules = RulesOrigin::Disk { endpoints: 18 };
    status.agent.refused_rules = Some("revision 43: endpoint 7 occurs twice".to_owned());
    status.maps.lxc_problem = Some("cilium_lxc is not pinned".to_owned());
    status.mappings.agent_hung = true;
    status.replicas = Vec::new();
    status.transparent = Mode::Blocked;
    let why = "/sys/fs/bpf/tc/globals/hf_steer_slots_v1 is not there".to_owned();
    status.steering = Steering {
        on: false,
        slots: Vec::new(),
        replacement_loses_nothing: true,
        failed_are_bypassed: false,
        text: format!("none: {why}"),
    };
    status.skipped_files = vec![Skipped {
        path: "/var/run/holdfast/state/7/ep_config.json".into(),
        reason: "line 1: expected value".to_owned(),
        damaged: true,
    }];
    status.journal.memory_only = Some("/var/lib/holdfast/sdp: No space left on device".to_owned());
    status.journal.errors = 9;
    status.query_log = Some(QueryLogStatus {
        which: "denied".to_owned(),
        target: "/var/log/holdfast/queries.log".to_owned(),
        one_in: 100,
        lines: 4,
        dropped: 2,
        problem: Some("No space left on device (os error 28)".to_owned()),
    });
    status.queries = Vec::new();
    status.answers = Vec::new();
    status.troubles = vec![
        warning("error", "file skipped (reason=line 1: expected value)", 1),
        warning(
            "warn",
            "connection to the agent lost; the proxy continues without it",
            12,
        ),
    ];
    status
        .troubles
        .extend((0..6).map(|n| warning("warn", &format!("odd {n}"), 1)));
    status
}

#[expect(
    clippy::disallowed_methods,
    reason = "asks whether to write, not how to run"
)]
fn golden(name: &str, shown: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data")
        .join(name);
    if std::env::var_os("HOLDFAST_BLESS").is_some() {
        fs::write(&path, shown).expect("the golden file can be written");
    }
    let golden = fs::read_to_string(&path).expect("the golden file");
    assert_eq!(shown, golden, "{name}: HOLDFAST_BLESS=1 if this is meant");
}

#[test]
fn the_status_of_a_healthy_proxy() {
    golden("status.txt", &healthy().text());
}

#[test]
fn the_status_of_a_proxy_with_problems() {
    golden("status-trouble.txt", &troubled().text());
}

#[test]
fn another_state_directory_of_the_agent_is_shown_with_both_paths_and_the_flag() {
    let mut status = healthy();
    if let Some(connection) = &mut status.agent.connection {
        connection.other_state_dir = Some(StateDirs {
            agent: "/var/run/a".to_owned(),
            own: "/var/run/b".to_owned(),
        });
    }
    let text = status.text();
    for part in ["/var/run/a", "/var/run/b", "the same --state-dir"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn the_json_keeps_its_shape_and_reads_back() {
    for (name, status) in [
        ("status.json", healthy()),
        ("status-trouble.json", troubled()),
    ] {
        let json = serde_json::to_string_pretty(&status).expect("JSON") + "\n";
        golden(name, &json);
        let back: Status = serde_json::from_str(&json).expect("a status");
        assert_eq!(back.text(), status.text());
    }
}
