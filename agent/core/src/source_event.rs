//! Changes that sources of policies and endpoints report.

/// Change at a source, in the grammar that every source speaks: what was not
/// applied between `Init` and `InitDone` is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceEvent<T> {
    Init,
    /// This object is there now, new or changed.
    Apply(T),
    InitDone,
    /// The object of this key is gone.
    Delete(String),
}
