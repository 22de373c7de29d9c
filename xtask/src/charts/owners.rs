//! What the chart renders if the cluster already has objects of other programs and releases.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::{TcpListener, TcpStream},
    thread,
};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::{chart, read, render, tools, tools::Tools};
use crate::{process, repository};

const PAGE: &str = "docs/src/install.md";
const CRDS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/";
/// A CustomResourceDefinition of the chart, and the number of all its definitions without the
/// definition of CiliumIdentity.
const EXAMPLE: (&str, usize) = ("ciliumnodes.cilium.io", 6);

/// The agents of a release that runs.
const RUNNING: [(&str, &str, &str); 2] = [
    (
        "/apis/rbac.authorization.k8s.io/v1/clusterroles/holdfast-agent",
        "rbac.authorization.k8s.io/v1",
        "ClusterRole",
    ),
    (
        "/apis/apps/v1/namespaces/egress/daemonsets/holdfast-agent",
        "apps/v1",
        "DaemonSet",
    ),
];

/// The number of rendered definitions, or words of the error.
type Wanted = Result<usize, &'static [&'static str]>;

/// An installation in a cluster that has these objects already.
#[derive(Debug)]
struct Case {
    /// Metadata of the definition of [`EXAMPLE`], if it is in the cluster.
    definition: Option<Value>,
    /// Whether release `holdfast` of namespace `egress` runs.
    another_runs: bool,
    /// Value `identities.mode`.
    identities: &'static str,
    /// Whether Cilium's operator runs.
    operator_runs: bool,
    wanted: Wanted,
}

fn cases() -> [Case; 8] {
    let of_release = |name: &str| {
        json!({
            "labels": {"app.kubernetes.io/part-of": "holdfast"},
            "annotations": {
                "meta.helm.sh/release-name": name, "meta.helm.sh/release-namespace": "kube-system",
            },
        })
    };
    let beside = |definition: Option<Value>, wanted: Wanted| Case {
        definition,
        another_runs: false,
        identities: "node",
        operator_runs: false,
        wanted,
    };
    let beside_operator = |identities, wanted: Wanted| Case {
        identities,
        operator_runs: true,
        ..beside(None, wanted)
    };
    [
        beside(None, Ok(EXAMPLE.1)),
        beside(Some(of_release("holdfast")), Ok(EXAMPLE.1)),
        beside(Some(json!({})), Ok(EXAMPLE.1 - 1)),
        beside(
            Some(of_release("before")),
            Err(&[
                EXAMPLE.0,
                "before",
                "kube-system",
                "--take-ownership",
                "crds.install=always",
            ]),
        ),
        Case {
            another_runs: true,
            ..beside(
                None,
                Err(&["runs in this cluster", "helm uninstall holdfast -n egress"]),
            )
        },
        Case {
            identities: "cluster",
            ..beside(None, Ok(EXAMPLE.1 + 1))
        },
        beside_operator("node", Ok(EXAMPLE.1)),
        beside_operator(
            "cluster",
            Err(&[
                "identities.mode=cluster",
                "kube-system/cilium-operator",
                "identities.mode=node",
            ]),
        ),
    ]
}

/// Cases that do not render the wanted definitions, and definitions that the guide does not name.
pub(super) fn problems(tools: &Tools) -> Result<Vec<String>> {
    let mut problems = unnamed()?;
    for case in cases() {
        let url = serve(&case)?;
        let kubeconfig = tools.scratch.join("kubeconfig");
        fs::write(&kubeconfig, kubeconfig_of(&url).to_string())?;
        // Helm 4 would also look for the kind of each object.
        let helm = tools.helms.first().context("no helm")?;
        let chart = tools::text(&chart("holdfast"))?;
        let args = ["template", "holdfast", &chart, "-n", "kube-system"];
        let mut command = process::command(&tools::text(helm)?, &args);
        command.args([
            "--set",
            &format!("identities.mode={}", case.identities),
            "--dry-run=server",
            "--kubeconfig",
            &tools::text(&kubeconfig)?,
        ]);
        let found = match process::output(command) {
            Ok(text) => Ok(definitions(&text)?),
            Err(error) => Err(format!("{error:#}")),
        };
        let is_wanted = match (&found, &case.wanted) {
            (Ok(found), Ok(wanted)) => found == wanted,
            (Err(error), Err(words)) => words.iter().all(|word| error.contains(word)),
            _ => false,
        };
        if !is_wanted {
            problems.push(format!("charts/holdfast: {case:?}, but rendered {found:?}"));
        }
    }
    Ok(problems)
}

fn definitions(text: &str) -> Result<usize> {
    let objects = render::documents(text)?;
    let kind = "CustomResourceDefinition";
    Ok(objects.iter().filter(|one| one["kind"] == kind).count())
}

/// Definitions that the command of the guide does not delete.
fn unnamed() -> Result<Vec<String>> {
    let page = read(&repository::root().join(PAGE))?;
    let command = page.split_once("kubectl delete crd").unwrap_or_default().1;
    let command = command.split_once("```").unwrap_or_default().0;
    let mut problems = Vec::new();
    for entry in fs::read_dir(chart("holdfast").join("files/crds"))? {
        for crd in render::documents(&read(&entry?.path())?)? {
            let name = crd["metadata"]["name"].as_str().unwrap_or_default();
            if !command.contains(name) {
                problems.push(format!("{PAGE}: `kubectl delete crd` lacks {name}"));
            }
        }
    }
    Ok(problems)
}

fn kubeconfig_of(url: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "a",
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
        "clusters": [{"name": "a", "cluster": {"server": url}}],
        "users": [{"name": "a", "user": {}}],
    })
}

/// An API server with the objects of `case`; it serves until the process ends.
fn serve(case: &Case) -> Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let url = format!("http://{}", listener.local_addr()?);
    let mut answers = BTreeMap::from(discovery());
    if let Some(mut metadata) = case.definition.clone() {
        metadata["name"] = json!(EXAMPLE.0);
        answers.insert(
            format!("{CRDS}{}", EXAMPLE.0),
            json!({
                "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
                "metadata": metadata,
            }),
        );
    }
    for (path, version, kind) in RUNNING.into_iter().filter(|_| case.another_runs) {
        let annotations = json!({
            "meta.helm.sh/release-name": "holdfast", "meta.helm.sh/release-namespace": "egress",
        });
        let metadata = json!({"name": "holdfast-agent", "annotations": annotations});
        let object = json!({"apiVersion": version, "kind": kind, "metadata": metadata});
        answers.insert(path.to_owned(), object);
    }
    let operators = match case.operator_runs {
        true => json!([{
            "apiVersion": "apps/v1", "kind": "Deployment",
            "metadata": {
                "name": "cilium-operator", "namespace": "kube-system",
                "labels": {"io.cilium/app": "operator"},
            },
        }]),
        false => json!([]),
    };
    let deployments =
        json!({"apiVersion": "apps/v1", "kind": "DeploymentList", "items": operators});
    answers.insert("/apis/apps/v1/deployments".to_owned(), deployments);
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // If this fails, helm reports the error.
            let _ = answer(&stream, &answers);
        }
    });
    Ok(url)
}

fn discovery() -> [(String, Value); 8] {
    let resources = |version: &str, plural: &str, kind: &str, namespaced: bool| {
        json!({
            "apiVersion": "v1", "kind": "APIResourceList", "groupVersion": version,
            "resources": [{"name": plural, "kind": kind, "namespaced": namespaced, "verbs": ["get"]}],
        })
    };
    let version = json!({"groupVersion": "apiextensions.k8s.io/v1", "version": "v1"});
    let group = json!({
        "name": "apiextensions.k8s.io", "versions": [version], "preferredVersion": version,
    });
    let plural = "customresourcedefinitions";
    let mut apps = resources("apps/v1", "daemonsets", "DaemonSet", true);
    if let Some(resources) = apps["resources"].as_array_mut() {
        resources.push(json!({
            "name": "deployments", "kind": "Deployment", "namespaced": true, "verbs": ["get"],
        }));
    }
    let no_sets = json!({"apiVersion": "apps/v1", "kind": "DaemonSetList", "items": []});
    let roles = resources(
        "rbac.authorization.k8s.io/v1",
        "clusterroles",
        "ClusterRole",
        false,
    );
    let crds = resources(
        "apiextensions.k8s.io/v1",
        plural,
        "CustomResourceDefinition",
        false,
    );
    [
        (
            "/version",
            json!({"major": "1", "minor": "33", "gitVersion": "v1.33.0"}),
        ),
        ("/api", json!({"kind": "APIVersions", "versions": ["v1"]})),
        (
            "/apis",
            json!({"apiVersion": "v1", "kind": "APIGroupList", "groups": [group]}),
        ),
        ("/api/v1", resources("v1", "configmaps", "ConfigMap", true)),
        ("/apis/apiextensions.k8s.io/v1", crds),
        ("/apis/apps/v1", apps),
        ("/apis/rbac.authorization.k8s.io/v1", roles),
        ("/apis/apps/v1/namespaces/kube-system/daemonsets", no_sets),
    ]
    .map(|(path, answer)| (path.to_owned(), answer))
}

fn answer(mut stream: &TcpStream, answers: &BTreeMap<String, Value>) -> Result<()> {
    let mut lines = BufReader::new(stream).lines();
    let request = lines.next().unwrap_or_else(|| Ok(String::new()))?;
    while lines
        .next()
        .transpose()?
        .is_some_and(|line| !line.is_empty())
    {}
    let path = request.split([' ', '?']).nth(1).unwrap_or_default();
    let (code, body) = match answers.get(path) {
        Some(body) => ("200 OK", body.clone()),
        None => (
            "404 Not Found",
            json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}),
        ),
    };
    let body = body.to_string();
    let head = format!(
        "HTTP/1.1 {code}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    Ok(stream.write_all(format!("{head}{body}").as_bytes())?)
}
