//! The directory of the repository.

use std::path::Path;

/// Root directory of the repository, the parent of `xtask`.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask lies in the workspace")
}
