//! What an agent answers to `status`. A pod wrote it: lists and texts are bounded, and have no
//! characters that change a terminal.

use std::collections::BTreeMap;

use anyhow::Result;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::objects::Enforcement;

/// Maximum characters of a text.
const CHARACTERS: usize = 1000;
/// Maximum entries of a list.
const ENTRIES: usize = 1000;

/// State of an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Agent {
    pub(super) version: String,
    pub(super) enforcement: Enforcement,
    pub(super) ready: bool,
    /// Number of endpoints; for `netpol run`, of pods of the node that have an address.
    pub(super) endpoints: u64,
    /// Number of policy documents that the agent refuses.
    pub(super) refused: u64,
    /// Pods of the node that are not under policy, `namespace/name`.
    pub(super) unmanaged: Vec<String>,
    /// Pods that are under policy, but ran for a time before they were.
    pub(super) started_open: Vec<String>,
    /// Policies of kinds that this node cannot enforce, by kind.
    pub(super) not_enforced: BTreeMap<String, u64>,
    /// Problems in the words of the agent.
    #[serde(skip)]
    pub(super) problems: Vec<String>,
}

/// The fields of `status` that are read here. An agent of another version may lack some of them.
#[derive(Deserialize)]
struct Answer {
    version: String,
    ready: bool,
    summary: Summary,
    #[serde(default)]
    problems: Vec<String>,
    #[serde(default)]
    started_open: Vec<StartedOpen>,
}

/// The fields of `netpol status` that are read here.
#[derive(Deserialize)]
struct NetpolAnswer {
    version: String,
    ready: bool,
    pods: u64,
    #[serde(default)]
    refused: Vec<String>,
    #[serde(default)]
    problems: Vec<String>,
    #[serde(default)]
    not_enforced: BTreeMap<String, u64>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Summary {
    endpoints: u64,
    policies_rejected: u64,
}

#[derive(Deserialize)]
struct StartedOpen {
    pod: String,
    /// Absent: the pod is not under policy yet.
    until: Option<String>,
}

impl Agent {
    /// Reads the answer to the status command of this kind of enforcement.
    pub(super) fn parse(text: &[u8], enforcement: Enforcement) -> Result<Self> {
        match enforcement {
            Enforcement::Programs => read(text).map(Self::of_programs),
            Enforcement::Nftables => read(text).map(Self::of_netpol),
        }
    }

    fn of_netpol(answer: NetpolAnswer) -> Self {
        let kinds = answer.not_enforced.into_iter().take(ENTRIES);
        let kinds = kinds.filter(|(_, policies)| *policies > 0);
        Self {
            version: clean(&answer.version),
            enforcement: Enforcement::Nftables,
            ready: answer.ready,
            endpoints: answer.pods,
            refused: u64::try_from(answer.refused.len()).unwrap_or(u64::MAX),
            unmanaged: Vec::new(),
            started_open: Vec::new(),
            not_enforced: kinds.map(|(kind, count)| (clean(&kind), count)).collect(),
            problems: bounded(answer.problems.iter()),
        }
    }

    fn of_programs(answer: Answer) -> Self {
        let (taken_in, unmanaged): (Vec<_>, Vec<_>) = answer
            .started_open
            .into_iter()
            .partition(|pod| pod.until.is_some());
        Self {
            version: clean(&answer.version),
            enforcement: Enforcement::Programs,
            ready: answer.ready,
            endpoints: answer.summary.endpoints,
            refused: answer.summary.policies_rejected,
            unmanaged: bounded(unmanaged.iter().map(|pod| &pod.pod)),
            started_open: bounded(taken_in.iter().map(|pod| &pod.pod)),
            not_enforced: BTreeMap::new(),
            problems: bounded(answer.problems.iter()),
        }
    }

    /// Pods that ran before they were under policy do not count as a problem.
    pub(super) fn is_fine(&self) -> bool {
        self.ready && self.refused == 0 && self.unmanaged.is_empty() && self.problems.is_empty()
    }
}

fn read<T: DeserializeOwned>(text: &[u8]) -> Result<T> {
    Ok(serde_json::from_slice(text)?)
}

fn bounded<'a>(texts: impl Iterator<Item = &'a String>) -> Vec<String> {
    texts.take(ENTRIES).map(|text| clean(text)).collect()
}

/// The text in one line, without characters that change a terminal.
pub(super) fn clean(text: &str) -> String {
    let mut cleaned: String = text
        .chars()
        .take(CHARACTERS)
        .map(|c| if is_invisible(c) { ' ' } else { c })
        .collect();
    if text.chars().nth(CHARACTERS).is_some() {
        cleaned.push('…');
    }
    cleaned
}

/// Whether a character is a control character, changes the direction of a line, or has no width.
fn is_invisible(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use holdfast_agent::{admin::model::Status, endpoint::source::taken_in::StartedOpen};

    use holdfast_agent::netpol::model::NetpolStatus;

    use super::{
        Agent, CHARACTERS,
        Enforcement::{Nftables, Programs},
        clean,
    };

    #[test]
    fn the_answer_of_netpol_run_is_read() {
        let status = NetpolStatus {
            version: "0.1.0".to_owned(),
            ready: true,
            pods: 31,
            refused: vec!["one".to_owned()],
            problems: vec!["two".to_owned()],
            not_enforced: [("A".to_owned(), 2), ("B".to_owned(), 0)].into(),
            ..NetpolStatus::default()
        };
        let agent = Agent::parse(&serde_json::to_vec(&status).unwrap(), Nftables).unwrap();
        assert_eq!((agent.endpoints, agent.refused, agent.ready), (31, 1, true));
        assert_eq!(agent.not_enforced, [("A".to_owned(), 2)].into());
        assert_eq!(agent.problems, status.problems);
        assert!(!agent.is_fine());
    }

    #[test]
    fn pods_without_an_end_are_unmanaged() {
        let agent = Agent::parse(
            br#"{"version": "0.1.0", "ready": true, "further": [1],
                "summary": {"endpoints": 3, "policies_rejected": 1},
                "started_open": [{"pod": "a/b", "until": null},
                                 {"pod": "a/c", "until": "2026-11-26T10:00:00Z"}]}"#,
            Programs,
        );
        let agent = agent.unwrap();
        assert_eq!((agent.endpoints, agent.refused), (3, 1));
        assert_eq!(agent.unmanaged, ["a/b"]);
        assert_eq!(agent.started_open, ["a/c"]);
        assert!(!agent.is_fine());
    }

    #[test]
    fn the_answer_of_this_version_is_read() {
        let mut status = Status {
            version: "0.1.0".to_owned(),
            ready: true,
            problems: vec!["one".to_owned()],
            ..Status::default()
        };
        status.summary.endpoints = 2;
        status.summary.policies_rejected = 1;
        status.started_open = vec![StartedOpen {
            pod: "a/b".to_owned(),
            until: None,
        }];
        let agent = Agent::parse(&serde_json::to_vec(&status).unwrap(), Programs).unwrap();
        assert_eq!((agent.endpoints, agent.refused, agent.ready), (2, 1, true));
        assert_eq!(
            (agent.unmanaged, agent.problems),
            (vec!["a/b".to_owned()], status.problems)
        );
    }

    #[test]
    fn other_json_is_no_state() {
        for text in [
            "",
            "{}",
            "[]",
            r#"{"version": "0.1.0"}"#,
            "kubectl: warning",
        ] {
            assert!(Agent::parse(text.as_bytes(), Programs).is_err(), "{text}");
        }
    }

    #[test]
    fn texts_are_short_and_change_no_terminal() {
        assert_eq!(clean("a\u{1b}[31m\r\nb\u{9b}\u{202e}c"), "a [31m  b  c");
        let long = clean(&"ö".repeat(CHARACTERS + 1));
        assert_eq!(long.chars().count(), CHARACTERS + 1);
        assert!(long.ends_with('…'));
    }
}
