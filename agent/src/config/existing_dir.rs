//! Directories that must exist before the agent starts.

use std::path::PathBuf;

use clap::builder::{PathBufValueParser, TypedValueParser};

/// The path of a directory that exists.
pub(super) fn existing_dir() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path| match path.is_dir() {
        true => Ok(path),
        false => Err(format!(
            "{} is not a directory; create it first",
            path.display()
        )),
    })
}
