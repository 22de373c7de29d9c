//! Endpoint documents of a directory.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    time::SystemTime,
};

use daemon::lookup::Lookup;
use limits::yaml;

use super::{EndpointDocument, EndpointError};
use crate::{
    document_dir::{DocumentDir, ListError},
    watched_dir,
};

const PREFIX: &str = "dir/";
/// Name of the file in the state directory that names the directory from which the documents were read.
const READ_FROM: &str = "endpoint_directory.json";

/// Documents and unreadable files that one listing of the directory found.
#[derive(Debug, Default)]
pub(super) struct Listing {
    /// Documents by key `dir/<file>` (`dir/<file>#<n>` for the second and later documents of a file).
    pub documents: BTreeMap<String, Result<EndpointDocument, EndpointError>>,
    /// Time of the last write of each file `dir/<file>`.
    pub written: BTreeMap<String, SystemTime>,
    /// Files `dir/<file>` that cannot be read to their end: they may have further documents.
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

/// The directory `dir`, as the last run stored it in the state directory `state`.
pub(super) fn open(dir: &Path, state: &Path, damaged: &mut Vec<String>) -> DocumentDir {
    DocumentDir::stored(dir, state.join(READ_FROM), damaged)
}

/// Reads the documents of `dir`. `known` are keys of documents that were read before. If the listing lacks the file
/// of such a document, the document is gone only if the file does not exist.
pub(super) fn read<'a>(
    dir: &mut DocumentDir,
    known: impl Iterator<Item = &'a String>,
) -> Result<Listing, ListError> {
    let known = known.filter(|key| is_key(key)).map(|key| file_of(key));
    let known: BTreeSet<&str> = known.collect();
    let names = dir.list(!known.is_empty())?;
    let mut listing = Listing::default();
    for file in known {
        let name = file.strip_prefix(PREFIX).unwrap_or(file);
        if names.contains(name) {
            continue;
        }
        match dir.look(name) {
            Lookup::Gone => {}
            Lookup::Found(()) => {
                listing.torn.insert(file.to_owned());
            }
            Lookup::Unknown(error) => {
                let text = format!("{error}; make it readable, or delete it");
                let error = EndpointError::Parse(text);
                listing.documents.insert(file.to_owned(), Err(error));
                listing.torn.insert(file.to_owned());
            }
        }
    }
    for (name, text) in watched_dir::read(dir.path(), names) {
        let file = format!("{PREFIX}{name}");
        let written = fs::metadata(dir.path().join(&name)).and_then(|file| file.modified());
        listing
            .written
            .extend(written.ok().map(|at| (file.clone(), at)));
        match text {
            Ok(text) => {
                let (documents, ending) = parse(&file, &text);
                listing.documents.extend(documents);
                if ending == Ending::Torn {
                    listing.torn.insert(file);
                }
            }
            Err(error) => {
                let text = format!("{error}; {}", error.remedy());
                let error = EndpointError::Parse(text);
                listing.documents.insert(file.clone(), Err(error));
                listing.torn.insert(file);
            }
        }
    }
    Ok(listing)
}

/// Whether all documents of a file are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Whole,
    Torn,
}

type Keyed = (String, Result<EndpointDocument, EndpointError>);

fn parse(file: &str, text: &str) -> (Vec<Keyed>, Ending) {
    if text.trim().is_empty() {
        let reason = "the file is empty; delete it to remove its endpoints".to_owned();
        let error = EndpointError::Parse(reason);
        return (vec![(file.to_owned(), Err(error))], Ending::Torn);
    }
    let mut documents = Vec::new();
    let mut ending = Ending::Whole;
    for (index, document) in yaml::documents(text).iter().enumerate() {
        let key = match index {
            0 => file.to_owned(),
            n => format!("{file}#{}", n + 1),
        };
        let document = match document.value() {
            Ok(value) => EndpointDocument::read(value),
            Err(fault) => {
                ending = Ending::Torn;
                let text = format!("{fault}; {}", fault.remedy());
                Err(EndpointError::Parse(text))
            }
        };
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
    (documents, ending)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn documents(text: &str) -> Vec<Keyed> {
        let (documents, ending) = parse("dir/a.yaml", text);
        assert_eq!(ending, Ending::Whole);
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
            let mut documents = DocumentDir::new(dir.path());
            let listing = read(&mut documents, std::iter::empty()).unwrap();
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
    fn labels_that_only_the_agent_gives_are_refused() {
        for label in [
            "reserved:host",
            "reserved:world=x",
            "cidr:10.0.0.0/8",
            "cidrgroup:io.cilium.policy.cidrgroupname/a",
            "fqdn:www.good.test",
            "dnsname:www.good.test",
            "dnsname-closed:www.good.test",
            "node:zone=a",
            "node-cidr:192.0.2.0/24",
            "service:shop/web",
        ] {
            let text = format!("netns: pod1\nlabels: [k8s:app=a, '{label}']\n");
            let read = documents(&text);
            let error = read[0].1.as_ref().expect_err(label).to_string();
            for part in [label, "only the agent", "k8s:app=web"] {
                assert!(error.contains(part), "{label}: {error}");
            }
        }
        let own = "netns: pod1\nlabels: [k8s:reserved=host, 'k8s:cidr=a', any:fqdn, role]\n";
        assert!(documents(own)[0].1.is_ok());
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
    fn one_field_says_where_an_endpoint_is() {
        let read = |place: &str| {
            documents(&format!("{place}\nlabels: [k8s:app=a]\n"))
                .remove(0)
                .1
        };
        for (place, key) in [
            ("container: podman/web", "podman/web"),
            ("container: docker/web", "docker/web"),
            ("interface: vb-web", "interface/vb-web"),
            ("netns: pod1", "pod1"),
            ("pid: 3", "pid-3"),
        ] {
            let netns = read(place).unwrap().namespace().unwrap();
            assert_eq!(netns.to_string(), key);
        }
        assert_eq!(read("bridge: br0").unwrap().bridge.as_deref(), Some("br0"));
        for two in [
            "container: podman/web\npid: 3",
            "interface: vb-web\nnetns: pod1",
            "bridge: br0\ncontainer: podman/web",
            "bridge: br0\ninterface: vb-web",
            "ifname: eth0",
        ] {
            assert!(matches!(read(two), Err(EndpointError::Netns)), "{two}");
        }
        for (text, part) in [
            ("container: web", "podman/web"),
            (
                "bridge: br0\naddresses: [10.0.0.7]",
                "addresses is of one endpoint",
            ),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
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
        assert!(
            error.contains("label: is an unknown field; did you mean labels?"),
            "{error}"
        );
    }

    #[test]
    fn every_field_is_known() {
        let all = "netns: pod1\nifname: eth1\nlabels: [k8s:app=a]\nnamed-ports: [http=80]\n\
                   addresses: [10.0.0.1]\nenable-policy: always\n---\npid: 1\npod: shop/web\n";
        for (key, read) in documents(all) {
            assert!(read.is_ok(), "{key}: {read:?}");
        }
    }
}
