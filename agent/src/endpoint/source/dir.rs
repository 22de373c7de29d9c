//! Endpoint documents of a directory.

use std::{collections::BTreeMap, io, path::Path};

use serde::Deserialize as _;

use super::{EndpointDocument, EndpointError};
use crate::{watched_dir, yaml};

/// Documents by key `dir/<file>` (`dir/<file>#<n>` from the second of a file on).
pub(super) fn read(
    dir: &Path,
) -> io::Result<BTreeMap<String, Result<EndpointDocument, EndpointError>>> {
    let mut documents = BTreeMap::new();
    for (name, text) in watched_dir::read(dir)? {
        let key = format!("dir/{name}");
        match text {
            Ok(text) => documents.extend(parse(&key, &text)),
            Err(error) => {
                let text = format!("{error}; {}", error.remedy());
                documents.insert(key, Err(EndpointError::Parse(text)));
            }
        }
    }
    Ok(documents)
}

fn parse(key: &str, text: &str) -> Vec<(String, Result<EndpointDocument, EndpointError>)> {
    let mut documents = Vec::new();
    for (index, document) in yaml::documents(text).iter().enumerate() {
        let key = match index {
            0 => key.to_owned(),
            n => format!("{key}#{}", n + 1),
        };
        let document = document
            .value()
            .map_err(|fault| EndpointError::Parse(format!("{fault}; {}", fault.remedy())))
            .and_then(|value| {
                Option::<EndpointDocument>::deserialize(value)
                    .map_err(|e| EndpointError::Parse(e.to_string()))
            });
        match document {
            // An empty document, as after a closing `---`.
            Ok(None) => {}
            Ok(Some(document)) => {
                let checked = document.check().map(|_| document);
                documents.push((key, checked));
            }
            Err(error) => {
                documents.push((key, Err(error)));
            }
        }
    }
    documents
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_documents_one_of_them_bad() {
        let read = parse(
            "dir/a.yaml",
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
            parse("dir/a.yaml", &text).remove(0).1
        };
        let good = read("http=80/TCP, dns=53/UDP").unwrap();
        assert_eq!(good.named_ports, ["http=80/TCP", "dns=53/UDP"]);
        let error = read("http=0").unwrap_err().to_string();
        assert!(
            error.contains("named-ports") && error.contains("http=0"),
            "{error}"
        );
        let made = "netns: pod1\nlabels: ['gen:io.cilium.k8s.named-ports=http.TCP.80']\n";
        let error = parse("dir/a.yaml", made).remove(0).1.unwrap_err();
        assert!(matches!(error, EndpointError::MadeLabel(_)), "{error}");
    }

    #[test]
    fn unknown_fields_are_named() {
        let read = parse("dir/a.yaml", "netns: pod1\nlabel: [k8s:app=a]\n");
        let error = read[0].1.as_ref().unwrap_err().to_string();
        assert!(error.contains("label"), "{error}");
    }
}
