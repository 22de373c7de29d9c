//! `identity`: the numbers of a running agent, and numbers for documents without one.

use std::collections::{BTreeMap, BTreeSet};

use agent_core::{
    core::snapshot::IdentityView,
    identity::{
        assign::assign,
        cluster::{candidates, further_candidates},
        cluster_object::{CiliumIdentity, HOLDFAST, MADE_BY, MANAGED_BY},
    },
    kubernetes::{book::Book, labels::LabelFilter},
    labels::LabelSet,
    policy::document::{Body, PolicyDocument},
    source_event::SourceEvent,
};
use anyhow::{Result, bail};
use daemon::command_line::{failure, output::Output};
use holdfast_agent::{
    admin::client::Client,
    config::identity_args::{AssignArgs, IdentityCommand},
};
use serde_json::{Value, json};
use shared_maps::IdentityId;

use super::{
    policy::read_documents,
    show::{self, counted, print},
};

pub(crate) async fn run(command: IdentityCommand) -> Result<()> {
    let (wanted, args) = match command {
        IdentityCommand::List(args) => (None, args),
        IdentityCommand::Get { id, client } => (Some(id), client),
        IdentityCommand::Assign(args) => return print_objects(&args),
    };
    let mut identities: Vec<IdentityView> = Client::new(args.admin_socket())
        .get("/v1/identities")
        .await?;
    if let Some(id) = wanted {
        identities.retain(|identity| identity.id == id);
        let Some(identity) = identities.first() else {
            bail!("there is no identity {id}; `identity list` shows all except the reserved ones");
        };
        return print(args.output(), identity, |one| {
            show::identities(std::slice::from_ref(one))
        });
    }
    print(args.output(), &identities, |list| show::identities(list))
}

/// Prints a list of the objects that are missing. Fails if a document is refused.
fn print_objects(args: &AssignArgs) -> Result<()> {
    let mut documents = Vec::new();
    let mut refused = 0;
    let files = args.from.iter().chain(&args.known).cloned();
    for (_, read) in read_documents(&files.collect::<Vec<_>>())? {
        for document in read {
            match document {
                Ok(document) => documents.push(document),
                Err(error) => {
                    failure::note("holdfast-agent", &format!("refused: {error}"));
                    refused += 1;
                }
            }
        }
    }
    if refused > 0 {
        let refused = counted(refused, "document is", "documents are");
        bail!("{refused} refused: correct them, because pods may lack in the output otherwise");
    }
    let mut book = Book::new(LabelFilter::new(args.labels.clone()), &args.cluster_name);
    documents.iter().for_each(|document| book.put(document));
    let sets = sets(&mut book);
    for (key, warning) in book.warnings() {
        failure::note("holdfast-agent", &format!("{key}: warning: {warning}"));
    }
    let known = known(&documents);
    let range = args.identity_range;
    let assigned = assign(&sets, &known, |labels| {
        candidates(labels, range).chain(further_candidates(labels, range))
    })?;
    print(Output::Yaml, &list(&assigned), Value::to_string)
}

/// Label sets of all pods.
fn sets(book: &mut Book) -> BTreeSet<LabelSet> {
    let pods = book.changes().pods.into_iter();
    let pods = pods.filter_map(|change| match change {
        SourceEvent::Apply(pod) => Some(pod.labels),
        SourceEvent::Delete(_) | SourceEvent::Init | SourceEvent::InitDone => None,
    });
    pods.collect()
}

/// Numbers that documents give, even if another number counts for the same labels.
fn known(documents: &[PolicyDocument]) -> BTreeMap<IdentityId, LabelSet> {
    let known = documents
        .iter()
        .filter_map(|document| match &document.body {
            Body::Identity(CiliumIdentity { id, labels, .. }) => Some((*id, labels.clone())),
            _ => None,
        });
    known.collect()
}

/// The identities as one document that the agent and kubectl read.
fn list(assigned: &BTreeMap<IdentityId, LabelSet>) -> Value {
    let items = assigned.iter().map(|(id, labels)| {
        let labels = labels
            .iter()
            .map(|label| (format!("{}:{}", label.source(), label.key()), label.value()));
        json!({
            "apiVersion": "cilium.io/v2",
            "kind": "CiliumIdentity",
            "metadata": {
                "name": id.0.to_string(), "labels": {MANAGED_BY: HOLDFAST}, "annotations": {MADE_BY: HOLDFAST},
            },
            "security-labels": labels.collect::<BTreeMap<_, _>>(),
        })
    });
    json!({"apiVersion": "v1", "kind": "List", "items": items.collect::<Vec<_>>()})
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use agent_core::policy::parse::parse_documents;

    use super::*;

    fn pod(name: &str, app: &str) -> String {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: shop, labels: {{app: {app}}}}}\n\
             spec: {{containers: [{{name: c, ports: [{{name: http, containerPort: 80}}]}}]}}\n---\n"
        )
    }

    /// The documents that the command prints for these texts.
    fn assigned(texts: &[&str]) -> Vec<PolicyDocument> {
        let documents: Vec<PolicyDocument> = texts
            .iter()
            .flat_map(|text| parse_documents(text, "test"))
            .collect::<Result<_, _>>()
            .unwrap();
        let mut book = Book::new(LabelFilter::default(), "default");
        documents.iter().for_each(|document| book.put(document));
        let sets = sets(&mut book);
        let range = Default::default();
        let numbers = assign(&sets, &known(&documents), |labels| {
            candidates(labels, range)
        });
        let text = serde_json::to_string(&list(&numbers.unwrap())).unwrap();
        let read = parse_documents(&text, "printed").into_iter();
        read.collect::<Result<_, _>>().unwrap()
    }

    #[test]
    fn the_printed_objects_give_the_labels_of_the_pods_their_numbers() {
        let pods = pod("a", "web") + &pod("b", "web") + &pod("c", "db");
        let printed = assigned(&[&pods]);
        assert_eq!(printed.len(), 2, "{printed:?}");
        let Body::Identity(object) = &printed[0].body else {
            panic!("{printed:?}");
        };
        assert!(object.is_ours);
        let labels = object.labels.texts().join(",");
        assert!(
            labels.contains("k8s:io.kubernetes.pod.namespace=shop"),
            "{labels}"
        );
        // The same documents give the same numbers, in any order.
        let other = pod("c", "db") + &pod("b", "web");
        assert_eq!(assigned(&[&other]), printed);
    }

    #[test]
    fn labels_with_a_known_number_keep_it_and_are_not_printed() {
        let pods = pod("a", "web") + &pod("c", "db");
        let first = assigned(&[&pods]);
        let known = serde_json::to_string(&list(&super::known(&first[..1]))).unwrap();
        let printed = assigned(&[&pods, &known]);
        assert_eq!(printed, first[1..]);
    }

    #[test]
    fn a_refused_document_and_a_missing_file_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pods.yaml");
        let args = |from: PathBuf| AssignArgs {
            from: vec![from],
            known: None,
            identity_range: Default::default(),
            labels: Vec::new(),
            cluster_name: "default".to_owned(),
        };
        let error = print_objects(&args(file.clone())).unwrap_err().to_string();
        assert!(error.contains("pods.yaml"), "{error}");
        std::fs::write(&file, "apiVersion: v1\nkind: Pod\nmetadata: {name: A_b}\n").unwrap();
        let error = print_objects(&args(file)).unwrap_err().to_string();
        assert!(error.contains("1 document is refused"), "{error}");
    }
}
