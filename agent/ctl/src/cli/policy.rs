//! `policy validate`: checks policies without a running agent.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Read as _,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use agent_cluster::own_interfaces;
use agent_core::{
    core::config::DNS_SERVICE,
    kubernetes::{book::Book, labels::LabelFilter},
    policy::{
        cidr_group::group_key,
        document::{PolicyDocument, PolicyError},
        lint::{
            self, firewalls,
            foreign_servers::{self, KnownServers},
        },
        network_policy::blocks_without_pods,
        parse::parse_documents,
    },
};
use anyhow::{Context as _, Result, bail};
use daemon::{command_line::output::Output, regular_file};
use holdfast_agent::{policy_dir::TWICE, watched_dir};
use serde::Serialize;

use super::show::{counted, print};

/// The labels that make identities under an agent without `--labels`.
static FILTER: LazyLock<LabelFilter> = LazyLock::new(LabelFilter::default);

#[derive(Serialize)]
struct Checked {
    file: String,
    documents: Vec<Document>,
}

#[derive(Serialize)]
struct Document {
    key: Option<String>,
    valid: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    warnings: Vec<String>,
}

/// Reads `files`, and the document files of directories. Fails if a document is
/// refused, or if a file has no document. `is_pruned`: the agents read no pods of other nodes.
pub(crate) fn validate(files: &[PathBuf], is_pruned: bool, output: Output) -> Result<()> {
    // Without the addresses of this host, one warning is missing, and the verdicts are the same.
    let own = own_interfaces::list().map(|all| all.own);
    let all = check(&read_documents(files)?, is_pruned, &own.unwrap_or_default());
    print(output, &all, |all| {
        let verdicts = all.iter().map(verdicts);
        verdicts.chain([summary(all)]).collect()
    })?;
    fail_if_refused(&all)
}

/// Each file's name, and its documents or why they are refused.
pub(super) type ReadFile = (String, Vec<Result<PolicyDocument, PolicyError>>);

/// In the place of a file name: standard input.
const STANDARD_INPUT: &str = "-";

/// Standard input, which may be as long as a file.
fn standard_input() -> Result<String> {
    let mut text = String::new();
    let most = regular_file::MAX_FILE;
    let stdin = std::io::stdin().lock();
    let read = stdin.take(most + 1).read_to_string(&mut text);
    if read.context("standard input cannot be read")? as u64 > most {
        bail!("standard input has more than {most} bytes; give several files");
    }
    Ok(text)
}

/// Reads documents of files and directories, in their order.
pub(super) fn read_documents(files: &[PathBuf]) -> Result<Vec<ReadFile>> {
    let mut read = Vec::new();
    for file in &document_files(files)? {
        let is_stdin = file.as_os_str() == STANDARD_INPUT;
        let text = match is_stdin {
            true => standard_input()?,
            false => watched_dir::read_file(file).with_context(|| {
                format!(
                    "{} cannot be read; give YAML or JSON files, directories of them, or - for standard input",
                    file.display()
                )
            })?,
        };
        let name = match is_stdin {
            true => "standard input".to_owned(),
            false => file.display().to_string(),
        };
        let documents = parse_documents(&text, &name);
        read.push((name, documents));
    }
    refuse_second_firewalls(&mut read);
    Ok(read)
}

/// Refuses each EgressFirewall of a namespace except the first, as the agent does.
fn refuse_second_firewalls(read: &mut [ReadFile]) {
    let mut first: BTreeMap<String, String> = BTreeMap::new();
    for (name, documents) in read {
        for slot in documents {
            let Ok(document) = &*slot else { continue };
            if !document.is_firewall() {
                continue;
            }
            let key = document.key.clone();
            let Some(file) = first.get(&key) else {
                first.insert(key, name.clone());
                continue;
            };
            *slot = Err(PolicyError {
                source_name: name.clone(),
                key: Some(key),
                field: "metadata.name".to_owned(),
                reason: format!("{file} has an EgressFirewall of this namespace already"),
                remedy: TWICE.to_owned(),
            });
        }
    }
}

/// The verdict on each document; its warnings consider the valid documents of all files, and the addresses of
/// this host.
fn check(read: &[ReadFile], is_pruned: bool, own: &BTreeSet<IpAddr>) -> Vec<Checked> {
    let good = read.iter().flat_map(|(_, documents)| documents).flatten();
    let good: Vec<&PolicyDocument> = good.collect();
    let mut book = Book::new(LabelFilter::default(), "default");
    good.iter().for_each(|document| book.put(document));
    book.changes();
    let mut joined: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let namespace = DNS_SERVICE.split('/').next().unwrap_or_default();
    let known = KnownServers {
        namespace,
        given: &[],
        only_trusted: false,
    };
    let foreign = foreign_servers::warnings(good.iter().copied(), known);
    let denied = firewalls::denied_servers(&good);
    let warnings_of_several = book.warnings().into_iter().chain(foreign).chain(denied);
    for (key, warning) in warnings_of_several {
        joined.entry(key).or_default().push(warning);
    }
    let verdict = |document: &Result<PolicyDocument, PolicyError>| match document {
        Ok(document) => Document {
            key: Some(document.key.clone()),
            valid: true,
            error: None,
            warnings: joined
                .get(&document.key)
                .into_iter()
                .flatten()
                .cloned()
                .chain(warnings(document, &good))
                .chain(lint::own_addresses::warnings(document, own))
                .chain(
                    is_pruned
                        .then(|| lint::pruned::warnings(document))
                        .into_iter()
                        .flatten(),
                )
                .collect(),
        },
        Err(error) => Document {
            key: error.key.clone(),
            valid: false,
            error: Some(error.to_string()),
            warnings: Vec::new(),
        },
    };
    read.iter()
        .map(|(name, documents)| Checked {
            file: name.clone(),
            documents: documents.iter().map(verdict).collect(),
        })
        .collect()
}

/// One line for each document and warning of a file.
fn verdicts(checked: &Checked) -> String {
    let mut text = String::new();
    for document in &checked.documents {
        let key = document.key.as_deref().unwrap_or("unnamed");
        match &document.error {
            None => text.push_str(&format!("{}: {key}: valid\n", checked.file)),
            Some(error) => text.push_str(&format!("refused: {error}\n")),
        }
        for warning in &document.warnings {
            text.push_str(&format!("{}: {key}: warning: {warning}\n", checked.file));
        }
    }
    text
}

fn fail_if_refused(all: &[Checked]) -> Result<()> {
    let empty: Vec<&str> = all
        .iter()
        .filter(|c| c.documents.is_empty())
        .map(|c| c.file.as_str())
        .collect();
    if !empty.is_empty() {
        bail!("no policy document in {}", empty.join(", "));
    }
    let refused = all
        .iter()
        .flat_map(|c| &c.documents)
        .filter(|d| !d.valid)
        .count();
    if refused > 0 {
        bail!(
            "{} refused",
            counted(refused, "document is", "documents are")
        );
    }
    Ok(())
}

/// The given files; a directory stands for the files in it that the agent would read.
fn document_files(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        if path.is_dir() {
            let names = watched_dir::names(path).with_context(|| {
                format!(
                    "{} cannot be read; give YAML or JSON files, or directories of them",
                    path.display()
                )
            })?;
            if names.is_empty() {
                bail!("{} has no .yaml, .yml or .json file", path.display());
            }
            files.extend(names.iter().map(|name| path.join(Path::new(name))));
        } else {
            files.push(path.clone());
        }
    }
    Ok(files)
}

/// How many documents of which kind were read, such as `read 2 documents in 1 file: 1
/// CiliumCIDRGroup, 1 CiliumNetworkPolicy`.
fn summary(all: &[Checked]) -> String {
    let documents = || all.iter().flat_map(|checked| &checked.documents);
    let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
    for document in documents() {
        let kind = document
            .key
            .as_deref()
            .and_then(|key| key.split('/').next());
        *kinds.entry(kind.unwrap_or("of unknown kind")).or_default() += 1;
    }
    let kinds: Vec<String> = kinds
        .iter()
        .map(|(kind, number)| format!("{number} {kind}"))
        .collect();
    format!(
        "read {} in {}: {}\n",
        counted(documents().count(), "document", "documents"),
        counted(all.len(), "file", "files"),
        if kinds.is_empty() {
            "none".to_owned()
        } else {
            kinds.join(", ")
        }
    )
}

fn warnings(document: &PolicyDocument, all: &[&PolicyDocument]) -> Vec<String> {
    let own = document.warnings.iter().cloned();
    let missing = lint::groups(document).into_iter().filter(|name| {
        let key = group_key(name);
        !all.iter().any(|other| other.key == key)
    });
    let missing = missing.map(|name| format!("these files have no CiliumCIDRGroup {name}"));
    let open = firewalls::open_family(document).map(|open| open.text);
    own.chain(open)
        .chain(lint::unlearned_in(document, all))
        .chain(blocks_without_pods(document, all))
        .chain(lint::labels_of_no_identity(document, |l| FILTER.keeps(l)))
        .chain(missing)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIREWALL: &str = r"
apiVersion: k8s.ovn.org/v1
kind: EgressFirewall
metadata: {name: default, namespace: shop}
spec: {egress: []}
";

    #[test]
    fn a_second_egress_firewall_of_a_namespace_is_refused() {
        let file = |name: &str, text: &str| (name.to_owned(), parse_documents(text, name));
        let other = FIREWALL.replace("shop", "bank");
        let mut read = [
            file("a.yaml", &format!("{FIREWALL}---\n{other}---\n{FIREWALL}")),
            file("b.yaml", FIREWALL),
        ];
        refuse_second_firewalls(&mut read);
        let checked = check(&read, false, &BTreeSet::new());
        let valid: Vec<Vec<bool>> = checked
            .iter()
            .map(|file| file.documents.iter().map(|d| d.valid).collect())
            .collect();
        assert_eq!(valid, [vec![true, true, false], vec![false]]);
        assert_eq!(
            checked[1].documents[0].error.as_deref(),
            Some(
                "b.yaml (EgressFirewall/shop/default): metadata.name: a.yaml has an \
                 EgressFirewall of this namespace already; rename or remove one of the two; of \
                 two EgressFirewalls, put all rules into one"
            )
        );
        assert!(fail_if_refused(&checked).is_err());
    }
}
