//! What is wrong with a field.

/// What is wrong with a field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// Path of the field, for example `spec.egress[0].toPorts`.
    pub field: String,
    /// What is wrong with it.
    pub reason: String,
    pub remedy: String,
}

impl Fault {
    pub(crate) fn new(field: &str, reason: &str, remedy: &str) -> Self {
        Self {
            field: field.to_owned(),
            reason: reason.to_owned(),
            remedy: remedy.to_owned(),
        }
    }
}

pub(crate) type Checked<T> = Result<T, Fault>;
