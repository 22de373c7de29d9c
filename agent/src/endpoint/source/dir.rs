//! Endpoint documents of a directory.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::Path,
};

use serde::Deserialize as _;

use super::{EndpointDocument, EndpointError};
use crate::watched_dir;

const PREFIX: &str = "dir/";

/// What the directory holds.
#[derive(Debug, Default)]
pub(super) struct Listing {
    /// Documents by key `dir/<file>` (`dir/<file>#<n>` from the second of a file on).
    pub documents: BTreeMap<String, Result<EndpointDocument, EndpointError>>,
    /// Files `dir/<file>` that cannot be read to their end: further documents of theirs are
    /// not known.
    pub torn: BTreeSet<String>,
}

/// Whether a document of a directory has this key.
pub(super) fn is_key(key: &str) -> bool {
    key.starts_with(PREFIX)
}

/// The file of a document's key.
pub(super) fn file_of(key: &str) -> &str {
    match key.rsplit_once('#') {
        Some((file, n)) if !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()) => file,
        _ => key,
    }
}

/// Reads the documents of `dir`.
pub(super) fn read(dir: &Path) -> io::Result<Listing> {
    let mut listing = Listing::default();
    for (name, text) in watched_dir::read(dir)? {
        let file = format!("{PREFIX}{name}");
        let parsed = match text {
            Ok(text) => parse(&file, &text),
            Err(error) => Err(EndpointError::Parse(error.to_string())),
        };
        match parsed {
            Ok((documents, None)) => listing.documents.extend(documents),
            Ok((documents, Some((key, error)))) => {
                listing.documents.extend(documents);
                listing.documents.insert(key, Err(error));
                listing.torn.insert(file);
            }
            Err(error) => {
                listing.documents.insert(file.clone(), Err(error));
                listing.torn.insert(file);
            }
        }
    }
    Ok(listing)
}

type Keyed<T> = (String, T);
type Parsed = (
    Vec<Keyed<Result<EndpointDocument, EndpointError>>>,
    Option<Keyed<EndpointError>>,
);

/// Documents of a text, and what ends it early.
fn parse(file: &str, text: &str) -> Result<Parsed, EndpointError> {
    if text.trim().is_empty() {
        let reason = "the file is empty; delete it to remove its endpoints";
        return Err(EndpointError::Parse(reason.to_owned()));
    }
    let mut documents = Vec::new();
    for (index, document) in serde_yaml_ng::Deserializer::from_str(text).enumerate() {
        let key = match index {
            0 => file.to_owned(),
            n => format!("{file}#{}", n + 1),
        };
        // By way of the YAML value: a field of the wrong form costs its document, a syntax
        // error costs all that follows it.
        let value = match serde_yaml_ng::Value::deserialize(document) {
            Ok(value) => value,
            Err(error) => {
                let error = EndpointError::Parse(error.to_string());
                return Ok((documents, Some((key, error))));
            }
        };
        let document = serde_yaml_ng::from_value::<Option<EndpointDocument>>(value)
            .map_err(|e| EndpointError::Parse(e.to_string()));
        match document {
            // An empty document, as after a closing `---`.
            Ok(None) => {}
            Ok(Some(document)) => {
                let checked = document.check().map(|_| document);
                documents.push((key, checked));
            }
            Err(error) => documents.push((key, Err(error))),
        }
    }
    Ok((documents, None))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn documents(text: &str) -> Vec<Keyed<Result<EndpointDocument, EndpointError>>> {
        let (documents, torn) = parse("dir/a.yaml", text).unwrap();
        assert!(torn.is_none(), "{torn:?}");
        documents
    }

    #[test]
    fn a_torn_file_says_where_it_ends() {
        let dir = tempfile::tempdir().unwrap();
        let whole = "netns: pod1\nlabels: [k8s:app=a]\n---\nnetns: pod2\nlabels: [k8s:app=b]\n";
        for (text, keys) in [
            (&whole[..whole.len() - 3], 2),
            ("netns: [", 1),
            ("", 1),
            ("\0\0\0\0", 1),
        ] {
            std::fs::write(dir.path().join("a.yaml"), text).unwrap();
            let listing = read(dir.path()).unwrap();
            assert!(listing.torn.contains("dir/a.yaml"), "{text:?}");
            assert_eq!(listing.documents.len(), keys, "{text:?}: {listing:?}");
        }
        assert_eq!(file_of("dir/a.yaml#12"), "dir/a.yaml");
        assert_eq!(file_of("dir/a#1.yaml"), "dir/a#1.yaml");
    }

    #[test]
    fn a_label_that_does_not_parse_is_named() {
        let read = documents("netns: pod1\nlabels: [k8s:app=a, 'k8s:']\n");
        let error = read[0].1.as_ref().unwrap_err().to_string();
        assert!(error.contains("`k8s:` is not a label"), "{error}");
    }

    #[test]
    fn several_documents_one_of_them_bad() {
        let read = documents(
            "netns: pod1\nlabels: [k8s:app=a]\n---\nnetns: pod2\npid: 3\nlabels: [k8s:app=b]\n---\n",
        );
        assert_eq!(read.len(), 2);
        assert_eq!(read[0].1.as_ref().unwrap().ifname, "eth0");
        assert_eq!(read[1].0, "dir/a.yaml#2");
        assert!(matches!(read[1].1, Err(EndpointError::Netns)));
    }

    #[test]
    fn named_ports_are_checked() {
        let read = |ports: &str| {
            let text = format!("netns: pod1\nlabels: [k8s:app=a]\nnamed-ports: [{ports}]\n");
            documents(&text).remove(0).1
        };
        let good = read("http=80/TCP, dns=53/UDP").unwrap();
        assert_eq!(good.named_ports, ["http=80/TCP", "dns=53/UDP"]);
        let error = read("http=0").unwrap_err().to_string();
        assert!(
            error.contains("named-ports") && error.contains("http=0"),
            "{error}"
        );
        let made = "netns: pod1\nlabels: ['gen:io.cilium.k8s.named-ports=http.TCP.80']\n";
        let error = documents(made).remove(0).1.unwrap_err();
        assert!(matches!(error, EndpointError::MadeLabel(_)), "{error}");
    }

    #[test]
    fn unknown_fields_are_named() {
        let read = documents("netns: pod1\nlabel: [k8s:app=a]\n");
        let error = read[0].1.as_ref().unwrap_err().to_string();
        assert!(error.contains("label"), "{error}");
    }
}
