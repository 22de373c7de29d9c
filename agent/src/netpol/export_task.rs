//! `--vpp-export-dir`: the policies of this node's pods as files for a VPP vswitch.
//!
//! A file is replaced in one step, when its content changes. A file that cannot be written keeps its last content.
//! Nothing here stops enforcement.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use daemon::{regular_file, state_file::write_atomic};
use netpol::{
    contiv::Flow,
    node::NodeRules,
    render::vpp::{acl, sessions},
};
use tokio::{task::spawn_blocking, time::sleep};
use tokio_util::sync::CancellationToken;

use super::state::Shared;

const ACL_TEXT: &str = "acl.txt";
const ACL: &str = "acl.json";
const SESSIONS: &str = "session-rules.json";
/// This file is written and removed at the start, as a test.
const PROBE: &str = ".holdfast-probe";
/// First and longest time until a file that cannot be written is tried again.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));

/// Which files are exported, and where.
#[derive(Clone, Debug)]
pub(super) struct Target {
    pub(super) directory: PathBuf,
    pub(super) nat_loopback: Option<IpAddr>,
    pub(super) node_interfaces: BTreeSet<String>,
}

/// Checks that files can be written.
///
/// # Errors
/// The reason, with the remedy.
pub(super) fn check(directory: &Path) -> anyhow::Result<()> {
    let probe = directory.join(PROBE);
    // Another user may own the directory, and may have put a link at this path.
    let tried = regular_file::create(&probe).and_then(|_| fs::remove_file(&probe));
    tried.map_err(|error| {
        anyhow::anyhow!(
            "--vpp-export-dir {}: {error}; give a directory that exists and in which this process can write",
            directory.display()
        )
    })
}

/// Writes files until stopped.
pub(super) async fn run(target: Target, shared: Arc<Shared>, stop: CancellationToken) {
    let mut writer = Writer {
        target,
        contents: BTreeMap::new(),
    };
    let exporting = async {
        let mut pause = None;
        loop {
            match pause {
                None => shared.exports_due.notified().await,
                Some(pause) => {
                    tokio::select! {
                        () = shared.exports_due.notified() => {}
                        () = sleep(pause) => {}
                    }
                }
            }
            let from = Arc::clone(&shared);
            let Ok((back, attempt)) = spawn_blocking(move || writer.write(&from)).await else {
                tracing::error!(
                    "an export panicked (a bug); files in --vpp-export-dir are no longer written"
                );
                return;
            };
            writer = back;
            let longer = pause.map_or(RETRY.0, |pause: Duration| (pause * 2).min(RETRY.1));
            pause = attempt.is_failed.then_some(longer);
            note(&shared, attempt);
        }
    };
    let _stopped = stop.run_until_cancelled(exporting).await;
}

/// Shows the result of an attempt.
fn note(shared: &Shared, attempt: Attempt) {
    let mut state = shared.state.lock();
    if let Some(exports) = &mut state.exports {
        exports.note(attempt.has_written, attempt.problems);
    }
}

/// Result of writing the files.
#[derive(Debug, Default)]
struct Attempt {
    has_written: bool,
    /// Whether some files could not be written; a later attempt may succeed.
    is_failed: bool,
    problems: Vec<String>,
}

/// Writes files whose content has changed.
#[derive(Debug)]
struct Writer {
    target: Target,
    /// Files as this process wrote them last.
    contents: BTreeMap<&'static str, String>,
}

impl Writer {
    fn write(mut self, shared: &Shared) -> (Self, Attempt) {
        let rules = {
            let state = shared.state.lock();
            // The files of the last run stay as long as its table does.
            state
                .is_known()
                .then(|| NodeRules::of(&state.pipeline, self.target.nat_loopback))
        };
        let mut attempt = Attempt::default();
        if let Some(rules) = rules {
            self.files(&rules, &mut attempt);
        }
        (self, attempt)
    }

    fn files(&mut self, rules: &NodeRules, attempt: &mut Attempt) {
        let acls = rules.acls(&self.target.node_interfaces);
        self.file(ACL_TEXT, acl::cli(&acls), attempt);
        self.file(ACL, format!("{:#}\n", acl::to_json(&acls)), attempt);
        match rules.sessions(&rules.tables(Flow::Egress)) {
            Ok(rules) => {
                self.file(
                    SESSIONS,
                    format!("{:#}\n", sessions::to_json(&rules)),
                    attempt,
                );
            }
            Err(refused) => attempt.problems.push(format!(
                "{}: the file keeps its last content, or is missing: {refused}",
                self.path(SESSIONS).display()
            )),
        }
    }

    fn file(&mut self, name: &'static str, content: String, attempt: &mut Attempt) {
        let path = self.path(name);
        if self.contents.get(name) == Some(&content) && path.exists() {
            return;
        }
        match write_atomic(&path, content.as_bytes()) {
            Ok(()) => {
                attempt.has_written = true;
                self.contents.insert(name, content);
            }
            Err(error) => {
                attempt.is_failed = true;
                attempt.problems.push(problem(&path, &error));
            }
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.target.directory.join(name)
    }
}

fn problem(path: &Path, error: &io::Error) -> String {
    format!(
        "{}: {error}: the file is not as the policies say; make it possible to write in the directory of \
         --vpp-export-dir; tried again",
        path.display()
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use agent_core::policy::parse::parse_documents;
    use serde_json::Value;

    use super::*;

    const PODS: &str = "
{apiVersion: v1, kind: Pod, metadata: {name: web-0, namespace: shop, labels: {app: web}},
 spec: {nodeName: one, containers: [{name: c}]}, status: {podIP: 10.1.0.1}}
---
{apiVersion: v1, kind: Pod, metadata: {name: db-0, namespace: shop, labels: {app: db}},
 spec: {nodeName: two, containers: [{name: c}]}, status: {podIP: 10.1.0.2}}
";

    fn policy(ports: &str) -> String {
        format!(
            "{{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {{name: web, namespace: shop}},
 spec: {{podSelector: {{matchLabels: {{app: web}}}}, policyTypes: [Egress],
        egress: [{{to: [{{podSelector: {{matchLabels: {{app: db}}}}}}], ports: [{ports}]}}]}}}}"
        )
    }

    fn put(shared: &Shared, text: &str) {
        let mut state = shared.state.lock();
        for document in parse_documents(text, "test") {
            state.put(document.unwrap());
        }
        state.set_listed();
        state.commit().unwrap();
    }

    fn json(directory: &Path, name: &str) -> Value {
        serde_json::from_slice(&fs::read(directory.join(name)).unwrap()).unwrap()
    }

    fn writer(directory: &Path) -> Writer {
        Writer {
            target: Target {
                directory: directory.to_owned(),
                nat_loopback: None,
                node_interfaces: BTreeSet::from(["uplink".to_owned()]),
            },
            contents: BTreeMap::new(),
        }
    }

    #[test]
    fn the_check_follows_no_link() {
        let directory = tempfile::tempdir().unwrap();
        let victim = directory.path().join("victim");
        fs::write(&victim, "kept").unwrap();
        symlink(&victim, directory.path().join(PROBE)).unwrap();
        check(directory.path()).unwrap();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "kept");
        assert!(!directory.path().join(PROBE).exists());
    }

    #[test]
    fn files_follow_the_policies_and_a_refused_one_keeps_its_last_content() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let shared = Shared::new("one");
        put(&shared, PODS);
        put(&shared, &policy("{port: 5432}"));
        let (writer, attempt) = writer(path).write(&shared);
        assert!(
            attempt.has_written && attempt.problems.is_empty(),
            "{attempt:?}"
        );
        let (acls, rules) = (json(path, ACL), json(path, SESSIONS));
        assert!(acls.to_string().contains("uplink"), "{acls}");
        assert!(rules.to_string().contains("5432"), "{rules}");
        let commands = fs::read_to_string(path.join(ACL_TEXT)).unwrap();
        assert!(commands.contains("pod:shop/web-0"), "{commands}");

        let (writer, attempt) = writer.write(&shared);
        assert!(!attempt.has_written, "nothing changed");

        put(&shared, &policy("{port: 1, endPort: 2000}"));
        let (writer, attempt) = writer.write(&shared);
        assert!(attempt.has_written && !attempt.is_failed);
        let [problem] = attempt.problems.as_slice() else {
            panic!("{attempt:?}");
        };
        let field = "NetworkPolicy/shop/web spec.egress[0].ports[0]";
        assert!(problem.contains(field), "{problem}");
        assert_eq!(json(path, SESSIONS), rules);
        assert_ne!(json(path, ACL), acls);

        put(&shared, &policy("{port: 80}"));
        let (_, attempt) = writer.write(&shared);
        assert!(attempt.problems.is_empty(), "{attempt:?}");
        assert_ne!(json(path, SESSIONS), rules);
    }

    #[test]
    fn a_file_that_cannot_be_written_is_a_problem_until_it_can() {
        let directory = tempfile::tempdir().unwrap();
        let gone = directory.path().join("gone");
        let error = check(&gone).unwrap_err().to_string();
        assert!(error.starts_with("--vpp-export-dir "), "{error}");
        assert!(error.contains("can write"), "{error}");
        check(directory.path()).unwrap();
        let shared = Shared::new("one");
        put(&shared, PODS);
        let (writer, attempt) = writer(&gone).write(&shared);
        assert!(
            attempt.is_failed && attempt.problems.len() == 3,
            "{attempt:?}"
        );
        fs::create_dir(&gone).unwrap();
        let (_, attempt) = writer.write(&shared);
        assert!(!attempt.is_failed && attempt.has_written, "{attempt:?}");
        assert_eq!(json(&gone, ACL), serde_json::json!({"acls": []}));
    }

    #[test]
    fn nothing_is_written_before_the_policies_are_known() {
        let directory = tempfile::tempdir().unwrap();
        let shared = Shared::new("one");
        let (_, attempt) = writer(directory.path()).write(&shared);
        assert!(!attempt.has_written);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
