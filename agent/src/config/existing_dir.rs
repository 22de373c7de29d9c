//! Directories that must exist before the agent starts.

use std::path::{Path, PathBuf};

use clap::builder::{PathBufValueParser, TypedValueParser};

/// The path of a directory that exists.
pub(super) fn existing_dir() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path| match path.is_dir() {
        true => Ok(path),
        false => Err(refusal(&path)),
    })
}

fn refusal(path: &Path) -> String {
    let shown = path.display();
    match path.exists() {
        true => format!("{shown} is not a directory; give the directory that it is in"),
        false => format!("{shown} is not a directory; create it first"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_another_remedy_than_nothing() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(refusal(file.path()).contains("the directory that it is in"));
        assert!(refusal(Path::new("/no/such")).contains("create it first"));
    }
}
