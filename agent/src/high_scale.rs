//! The last stage of this node in a migration to the tunnel between nodes, in the state directory.
//!
//! A node without the directory's files, such as a new one or one that was rebooted with its directory in
//! memory, may start at any stage: it has no pods that others know at another one.

use std::{io, path::Path};

use agent_core::tunnel_mode::Stage;
use daemon::{
    lookup::present,
    state_file::{self, Content, StateFileError, write_json},
};
use serde::{Deserialize, Serialize};

use crate::epoch;

const FILE: &str = "high_scale.json";
const VERSION: u32 = 1;

#[derive(Debug, Serialize, Deserialize)]
struct StageFile {
    version: u32,
    stage: StageName,
}

/// A step as the file has it: a text that [`Stage::named`] knows.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
struct StageName(Stage);

impl TryFrom<String> for StageName {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        let stage = Stage::named(&name).map(Self);
        stage.ok_or_else(|| format!("`{name}` is no step of --high-scale-ipcache"))
    }
}

impl From<StageName> for String {
    fn from(name: StageName) -> Self {
        name.0.as_str().to_owned()
    }
}

/// Why the agent does not start at a stage.
#[derive(Debug, thiserror::Error)]
pub enum StageError {
    #[error(transparent)]
    File(#[from] StateFileError),
    /// A stage was left out.
    #[error(
        "--high-scale-ipcache: this node was {}{lost}, and {} comes before {}: all nodes go there first, so that no node \
         sends packets that another does not unwrap; or add --high-scale-force",
        .before.as_str(), .skipped.as_str(), .now.as_str()
    )]
    Skipped {
        before: Stage,
        skipped: Stage,
        now: Stage,
        /// Why the stage before is not that of the file, in brackets; empty if it is.
        lost: String,
    },
}

/// Refuses a stage that leaves out the one before it. A damaged file is set aside, and counts as a lost one.
/// Returns what is wrong with it.
pub fn check(state_dir: &Path, now: Stage, is_forced: bool) -> Result<Option<String>, StageError> {
    let path = state_dir.join(FILE);
    let mut damaged = None;
    let before = match state_file::read_versioned::<StageFile>(&path, VERSION)? {
        Content::Found(file) => Some(file.stage.0),
        Content::Absent => None,
        Content::Damaged(damage) => {
            let text = damage.try_to_set_aside("; set aside as");
            damaged = Some(format!("{}: {text}", path.display()));
            None
        }
    };
    let before = match before {
        Some(stage) => stage,
        None if epoch::is_new(state_dir) => return Ok(damaged),
        None => Stage::Unset,
    };
    match before.skipped_before(now) {
        Some(skipped) if !is_forced => Err(StageError::Skipped {
            before,
            skipped,
            now,
            lost: damaged.map_or_else(String::new, |text| format!(" ({text})")),
        }),
        _ => Ok(damaged),
    }
}

/// Notes the stage at which the node is now. Without a mode there is no file.
pub fn note(state_dir: &Path, now: Stage) -> io::Result<()> {
    let path = state_dir.join(FILE);
    if now == Stage::Unset {
        return present(std::fs::remove_file(path)).map(|_| ());
    }
    let file = StageFile {
        version: VERSION,
        stage: StageName(now),
    };
    write_json(&path, &file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(name: &str) -> Stage {
        Stage::named(name).unwrap()
    }

    #[test]
    fn high_scale_steps_are_refused_by_the_note_of_the_last_run() {
        let dir = tempfile::tempdir().unwrap();
        let check = |name, is_forced| check(dir.path(), stage(name), is_forced);
        // A new node.
        assert!(check("full", false).is_ok());
        note(dir.path(), stage("off")).unwrap();
        let text = std::fs::read_to_string(dir.path().join(FILE)).unwrap();
        assert_eq!(text, "{\n  \"version\": 1,\n  \"stage\": \"off\"\n}");
        assert!(check("decap-only", false).is_ok() && check("unset", false).is_ok());
        let error = check("full", false).unwrap_err().to_string();
        for word in [
            "was off",
            "decap-only comes before full",
            "--high-scale-force",
        ] {
            assert!(error.contains(word), "{error}");
        }
        assert!(check("full", true).is_ok());
        note(dir.path(), stage("unset")).unwrap();
        note(dir.path(), stage("unset")).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn high_scale_a_lost_or_damaged_note_of_an_earlier_run_is_no_mode() {
        let dir = tempfile::tempdir().unwrap();
        epoch::begin_noting(dir.path(), &mut Vec::new()).unwrap();
        let (file, aside) = (
            dir.path().join(FILE),
            dir.path().join(format!("{FILE}.corrupt")),
        );
        let check = |name| check(dir.path(), stage(name), false);
        assert!(matches!(check("off"), Ok(None)));
        assert!(check("decap-only").is_err());
        for text in [
            "",
            "{",
            "[]",
            r#"{"version":1}"#,
            r#"{"version":1,"stage":"a-later-one"}"#,
        ] {
            std::fs::write(&file, text).unwrap();
            let error = check("full").unwrap_err().to_string();
            for word in ["this node was unset (", "high_scale.json: ", "set aside as"] {
                assert!(error.contains(word), "{text}: {error}");
            }
            assert_eq!(std::fs::read_to_string(&aside).unwrap(), text);
            assert!(!file.exists(), "{text}");
            // The next start finds no file.
            assert!(check("full").is_err(), "{text}");
            std::fs::write(&file, text).unwrap();
            let damaged = check("off").unwrap().unwrap();
            assert!(damaged.contains("high_scale.json.corrupt"), "{damaged}");
        }
        let newer = r#"{"version":2,"stage":"full","more":[]}"#;
        std::fs::write(&file, newer).unwrap();
        let error = check("off").unwrap_err().to_string();
        assert!(error.contains("newer release"), "{error}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), newer);
    }
}
