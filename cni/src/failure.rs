//! Errors in the format of the CNI specification.

use serde_json::json;

/// Codes of the specification; from 100 on they are the plugin's own.
const VERSION: u32 = 1;
const ENVIRONMENT: u32 = 4;
const INPUT: u32 = 6;
const CONFIG: u32 = 7;
const AGAIN: u32 = 11;
const REFUSED: u32 = 100;

/// Why a command fails, with an error code of the specification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) code: u32,
    pub(crate) text: String,
}

impl Failure {
    fn new(code: u32, text: &str) -> Self {
        Self {
            code,
            text: text.to_owned(),
        }
    }

    /// The configuration has a version that is not supported.
    pub(crate) fn version(text: &str) -> Self {
        Self::new(VERSION, text)
    }

    /// A variable of the environment is missing or wrong.
    pub(crate) fn environment(text: &str) -> Self {
        Self::new(ENVIRONMENT, text)
    }

    /// The input is not JSON.
    pub(crate) fn input(text: &str) -> Self {
        Self::new(INPUT, text)
    }

    /// A field of the configuration is wrong.
    pub(crate) fn config(text: &str) -> Self {
        Self::new(CONFIG, text)
    }

    /// The command may succeed later: the runtime tries again.
    pub(crate) fn again(text: &str) -> Self {
        Self::new(AGAIN, text)
    }

    /// The agent refuses this pod's interface.
    pub(crate) fn refused(text: &str) -> Self {
        Self::new(REFUSED, text)
    }

    /// Whether the command may succeed later.
    pub(crate) fn passes(&self) -> bool {
        self.code == AGAIN
    }

    /// The failure as the runtime reads it.
    pub(crate) fn json(&self, version: &str) -> String {
        let text = json!({
            "cniVersion": version,
            "code": self.code,
            "msg": format!("holdfast-cni: {}", self.text),
        });
        text.to_string()
    }
}
