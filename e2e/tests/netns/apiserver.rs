//! The API server of the tests behaves as a real one: each observation of a kube-apiserver 1.36.2 is
//! a test here, as are roles, pages and the faults that a test can set.

mod admission;
mod client;
mod resolver;

use std::future::Future;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use client::Client;
use holdfast_e2e::apiserver::{ApiServer, Options, Refusal, StreamingLists, pod};
use serde_json::{Value, json};

const POLICIES: &str = "/apis/cilium.io/v2/namespaces/shop/ciliumnetworkpolicies";
const PODS: &str = "/api/v1/pods";

/// CRDs whose schemas know all fields.
const STRICT_CRDS: &str = include_str!("apiserver/strict_crds.yaml");

fn with_server<F: Future<Output = Result<()>>>(
    options: Options,
    test: impl FnOnce(ApiServer) -> F,
) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let server = ApiServer::start(None, directory.path(), options)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(test(server))
}

fn policy(spec: Value) -> Value {
    let mut policy = json!({
        "apiVersion": "cilium.io/v2", "kind": "CiliumNetworkPolicy",
        "metadata": {"name": "web", "namespace": "shop"},
    });
    policy["spec"] = spec;
    policy
}

fn web(name: &str) -> Value {
    pod("shop", name, json!({"app": "web"}), "n1", &["10.0.0.1"])
}

fn revision(object: &Value) -> Result<u64> {
    let text = object["metadata"]["resourceVersion"].as_str();
    Ok(text
        .with_context(|| format!("no revision: {object}"))?
        .parse()?)
}

#[test]
fn observed_1_lists_of_custom_resources_answer_429_right_after_a_restart() -> Result<()> {
    let options = Options {
        starts_for: Duration::from_millis(300),
        ..Options::default()
    };
    with_server(options, async |server| {
        let client = Client::agent(&server)?;
        server.away();
        client
            .get("/readyz")
            .await
            .err()
            .context("the server is away")?;
        server.back()?;
        ensure!(client.get("/readyz").await?.text == "ok");
        let path = "/apis/cilium.io/v2/ciliumnetworkpolicies";
        let first = client.get(path).await?;
        ensure!(
            first.code == 429 && first.body["reason"] == "TooManyRequests",
            "{first:?}"
        );
        ensure!(client.get(PODS).await?.code == 200);
        let mut later = client.get(path).await?;
        while later.code == 429 {
            tokio::time::sleep(Duration::from_millis(20)).await;
            later = client.get(path).await?;
        }
        ensure!(later.code == 200, "{later:?}");
        Ok(())
    })
}

#[test]
fn observed_2_a_watch_at_an_old_revision_gets_200_and_410_in_the_body() -> Result<()> {
    with_server(Options::default(), async |server| {
        let client = Client::agent(&server)?;
        let old = server.put(web("web-1"))?;
        let mut running = client
            .watch(&format!("{PODS}?watch=1&resourceVersion={old}"))
            .await?;
        server.expire("pods")?;
        for lines in [
            &mut running,
            &mut client
                .watch(&format!("{PODS}?watch=1&resourceVersion={old}"))
                .await?,
        ] {
            ensure!(lines.code == 200);
            let line = lines.next().await?.context("no line")?;
            let status = &line["object"];
            ensure!(line["type"] == "ERROR", "{line}");
            ensure!(
                status["kind"] == "Status" && status["code"] == 410,
                "{line}"
            );
            ensure!(status["reason"] == "Expired", "{line}");
            let message = status["message"].as_str().unwrap_or_default();
            ensure!(message.starts_with("too old resource version: "), "{line}");
            ensure!(lines.next().await?.is_none(), "the watch ends");
        }
        // A new list gives a revision that can be watched.
        let list = client.get(PODS).await?.body;
        let path = format!("{PODS}?watch=1&resourceVersion={}", revision(&list)?);
        let mut lines = client.watch(&path).await?;
        server.put(web("web-2"))?;
        ensure!(lines.change().await? == ("ADDED".into(), "web-2".into()));
        Ok(())
    })
}

#[test]
fn observed_3_streaming_lists_end_with_a_bookmark_or_fail_with_an_old_etcd() -> Result<()> {
    let path = format!(
        "{PODS}?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true"
    );
    with_server(Options::default(), async |server| {
        server.put(web("web-1"))?;
        let mut lines = Client::agent(&server)?.watch(&path).await?;
        ensure!(lines.change().await? == ("ADDED".into(), "web-1".into()));
        let end = lines.next().await?.context("no bookmark")?;
        let marked = &end["object"]["metadata"]["annotations"]["k8s.io/initial-events-end"];
        ensure!(end["type"] == "BOOKMARK" && marked == "true", "{end}");
        server.put(web("web-2"))?;
        ensure!(lines.change().await? == ("ADDED".into(), "web-2".into()));
        Ok(())
    })?;
    let old_etcd = Options {
        streaming_lists: StreamingLists::Refused,
        ..Options::default()
    };
    with_server(old_etcd, async |server| {
        let mut lines = Client::agent(&server)?.watch(&path).await?;
        let line = lines.next().await?.context("no line")?;
        ensure!(
            line["type"] == "ERROR" && line["object"]["code"] == 500,
            "{line}"
        );
        let message = line["object"]["message"].as_str().unwrap_or_default();
        let wanted = "required storage feature RequestWatchProgress is disabled";
        ensure!(message.contains(wanted), "{line}");
        // The server makes a streaming list of every watch that has bookmarks and begins with the
        // state.
        server.put(web("web-1"))?;
        let state = format!("{PODS}?watch=1&resourceVersion=0");
        let bookmarks = format!("{state}&allowWatchBookmarks=true");
        let mut lines = Client::agent(&server)?.watch(&bookmarks).await?;
        let line = lines.next().await?.context("no line")?;
        ensure!(line["object"]["code"] == 500, "{line}");
        let mut lines = Client::agent(&server)?.watch(&state).await?;
        ensure!(lines.change().await? == ("ADDED".into(), "web-1".into()));
        Ok(())
    })
}

#[test]
fn observed_4_status_is_written_only_through_its_subresource_and_is_no_new_generation() -> Result<()>
{
    with_server(Options::default(), async |server| {
        let admin = Client::admin(&server)?;
        let mut object = policy(json!({"description": "a"}));
        object["status"] = json!({"conditions": []});
        let created = admin.post(POLICIES, &object).await?;
        ensure!(
            created.code == 201 && created.body["status"].is_null(),
            "{created:?}"
        );
        let first = revision(&created.body)?;

        let condition = json!({"type": "Valid", "status": "False", "reason": "Refused"});
        let patch = json!({"status": {"conditions": [condition]}});
        let path = format!("{POLICIES}/web");
        let ignored = admin.patch(&path, &patch).await?;
        ensure!(
            ignored.code == 200 && ignored.body["status"].is_null(),
            "{ignored:?}"
        );
        ensure!(revision(&ignored.body)? == first, "no change, no revision");

        let status = Client::agent(&server)?
            .patch(&format!("{path}/status"), &patch)
            .await?;
        ensure!(status.code == 200, "{status:?}");
        ensure!(
            status.body["status"]["conditions"][0]["type"] == "Valid",
            "{status:?}"
        );
        ensure!(status.body["metadata"]["generation"] == 1, "{status:?}");
        ensure!(revision(&status.body)? > first);

        let spec = admin
            .patch(&path, &json!({"spec": {"description": "b"}}))
            .await?;
        ensure!(spec.body["metadata"]["generation"] == 2, "{spec:?}");
        ensure!(spec.body["status"] == status.body["status"], "{spec:?}");
        Ok(())
    })
}

#[test]
fn observed_6_an_unknown_field_is_refused_when_strict_and_otherwise_pruned_with_a_warning()
-> Result<()> {
    let options = Options::default().with_documents(STRICT_CRDS)?;
    with_server(options, async |server| {
        let admin = Client::admin(&server)?;
        let object = policy(json!({"bogus": 1, "endpointSelector": {"matchLabels": {"any": "x"}}}));
        let strict = format!("{POLICIES}?fieldValidation=Strict");
        let refused = admin.post(&strict, &object).await?;
        ensure!(refused.code == 400, "{refused:?}");
        let wanted = "strict decoding error: unknown field \\\"spec.bogus\\\"";
        ensure!(refused.text.contains(wanted), "{refused:?}");
        let pruned = admin.post(POLICIES, &object).await?;
        ensure!(pruned.code == 201, "{pruned:?}");
        let warning = pruned.warning.as_deref();
        ensure!(
            warning == Some("299 - \"unknown field \\\"spec.bogus\\\"\""),
            "{pruned:?}"
        );
        let spec = &pruned.body["spec"];
        ensure!(
            *spec == json!({"endpointSelector": {"matchLabels": {"any": "x"}}}),
            "{spec}"
        );
        Ok(())
    })
}

#[test]
fn observed_7_the_event_of_a_write_may_come_before_its_answer() -> Result<()> {
    with_server(Options::default(), async |server| {
        let client = Client::agent(&server)?;
        let old = server.put(policy(json!({})))?;
        let path = format!("{POLICIES}?watch=1&resourceVersion={old}");
        let path = path.replace("/namespaces/shop", "");
        let mut lines = client.watch(&path).await?;
        server.hold_answers(true);
        let patch = json!({"status": {"conditions": []}});
        let to = format!("{POLICIES}/web/status");
        let answer = client.patch(&to, &patch);
        tokio::pin!(answer);
        tokio::select! {
            answer = &mut answer => anyhow::bail!("answered first: {answer:?}"),
            change = lines.change() => ensure!(change? == ("MODIFIED".into(), "web".into())),
        }
        server.hold_answers(false);
        ensure!(answer.await?.code == 200);
        Ok(())
    })
}

#[test]
fn only_requests_that_a_role_allows_are_answered() -> Result<()> {
    with_server(Options::default(), async |server| {
        server.put(web("web-1"))?;
        let agent = Client::agent(&server)?;
        for (path, allowed) in [
            (PODS, true),
            (
                "/api/v1/pods?watch=1&timeoutSeconds=1&resourceVersion=0",
                true,
            ),
            ("/api/v1/namespaces/shop/pods/web-1", false),
            ("/api/v1/secrets", false),
            ("/api/v1/nodes", false),
            (
                "/apis/apps/v1/namespaces/kube-system/daemonsets/other",
                false,
            ),
        ] {
            let answer = agent.get(path).await?;
            ensure!(
                answer.code == if allowed { 200 } else { 403 },
                "{path}: {answer:?}"
            );
        }
        let refused = agent.get("/api/v1/nodes").await?;
        ensure!(refused.body["reason"] == "Forbidden", "{refused:?}");
        let wanted = "nodes is forbidden: User \"system:serviceaccount:kube-system:holdfast-agent\" cannot list resource \"nodes\" in API group \"\" at the cluster scope";
        ensure!(refused.body["message"] == wanted, "{refused:?}");
        // Allowed by resourceNames, but the object does not exist.
        let named = "/apis/apps/v1/namespaces/kube-system/daemonsets/holdfast-agent";
        ensure!(agent.get(named).await?.code == 404);
        // Allowed in one namespace.
        let lease = json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {"name": "holdfast-resolver"},
        });
        let leases = "/apis/coordination.k8s.io/v1/namespaces";
        ensure!(
            agent
                .post(&format!("{leases}/kube-system/leases"), &lease)
                .await?
                .code
                == 201
        );
        ensure!(
            agent
                .post(&format!("{leases}/default/leases"), &lease)
                .await?
                .code
                == 403
        );
        // A Lease of another component, which an agent may neither read nor replace.
        for (name, code) in [("kube-scheduler", 403), ("holdfast-refusals", 200)] {
            let own = json!({
                "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                "metadata": {"name": name, "namespace": "kube-system"},
                "spec": {"holderIdentity": "other"},
            });
            server.put(own.clone())?;
            let path = format!("{leases}/kube-system/leases/{name}");
            ensure!(agent.get(&path).await?.code == code, "get {name}");
            let replaced = server.get("leases", "kube-system", name)?;
            let mut replaced = replaced.context("the Lease is there")?;
            replaced["spec"]["holderIdentity"] = json!("agent");
            let answer = agent.put(&path, &replaced).await?;
            ensure!(answer.code == code, "put {name}: {answer:?}");
        }
        // A kind without its CRD, requested by an account that may list it.
        server.uninstall("ciliumnodes")?;
        let gone = agent.get("/apis/cilium.io/v2/ciliumnodes").await?;
        ensure!(
            gone.code == 404 && gone.text == "404 page not found\n",
            "{gone:?}"
        );
        // No token, or an old token.
        server.expire_token();
        let late = agent.get(PODS).await?;
        ensure!(
            late.code == 401 && late.body["reason"] == "Unauthorized",
            "{late:?}"
        );
        server.rotate_token(2)?;
        ensure!(Client::agent(&server)?.get(PODS).await?.code == 200);
        let verbs: Vec<_> = server.answered().iter().map(|a| (a.verb, a.code)).collect();
        ensure!(
            verbs.contains(&("create", 403)) && verbs.contains(&("watch", 200)),
            "{verbs:?}"
        );
        Ok(())
    })
}

#[test]
fn lists_come_in_pages_and_a_watch_follows_them_without_a_gap() -> Result<()> {
    with_server(Options::default(), async |server| {
        let agent = Client::agent(&server)?;
        for number in 0..7 {
            server.put(web(&format!("web-{number}")))?;
        }
        let mut path = format!("{PODS}?limit=3");
        let (mut names, mut sizes, mut first) = (Vec::new(), Vec::new(), None);
        loop {
            let page = agent.get(&path).await?.body;
            let items = page["items"].as_array().context("no items")?;
            ensure!(
                page["kind"] == "PodList" && items[0]["kind"].is_null(),
                "{page}"
            );
            names.extend(
                items
                    .iter()
                    .map(|item| item["metadata"]["name"].to_string()),
            );
            sizes.push(items.len());
            first = first.or(Some(revision(&page)?));
            ensure!(Some(revision(&page)?) == first, "one revision");
            match page["metadata"]["continue"].as_str() {
                Some(token) => path = format!("{PODS}?limit=3&continue={token}"),
                None => break,
            }
            // Between two pages, a listed object is deleted and another one is created.
            if sizes.len() == 1 {
                server.delete("pods", "shop", "web-0")?;
                server.put(web("web-9"))?;
            }
        }
        ensure!(
            sizes == [3, 3, 2] && names.len() == 8,
            "{sizes:?} {names:?}"
        );
        let first = first.context("no page")?;
        let path = format!("{PODS}?watch=1&allowWatchBookmarks=true&resourceVersion={first}");
        let mut lines = agent.watch(&path).await?;
        ensure!(lines.change().await? == ("DELETED".into(), "web-0".into()));
        ensure!(lines.change().await? == ("ADDED".into(), "web-9".into()));
        let bookmark = lines.next().await?.context("no bookmark")?;
        ensure!(bookmark["type"] == "BOOKMARK", "{bookmark}");
        ensure!(revision(&bookmark["object"])? >= first + 2, "{bookmark}");
        let metadata = agent.metadata("/api/v1/namespaces").await?.body;
        ensure!(
            metadata["kind"] == "PartialObjectMetadataList",
            "{metadata}"
        );
        // The next page, after the server has forgotten the history.
        let token = agent.get(&format!("{PODS}?limit=1")).await?.body;
        let token = token["metadata"]["continue"]
            .as_str()
            .context("no token")?
            .to_owned();
        server.expire("pods")?;
        let late = agent
            .get(&format!("{PODS}?limit=1&continue={token}"))
            .await?;
        ensure!(
            late.code == 410 && late.body["reason"] == "Expired",
            "{late:?}"
        );
        Ok(())
    })
}

#[test]
fn a_watch_with_a_selector_sees_objects_enter_and_leave_it() -> Result<()> {
    with_server(Options::default(), async |server| {
        let agent = Client::agent(&server)?;
        let label = "service.kubernetes.io/headless";
        let service = |labels: Value| {
            json!({
                "apiVersion": "v1", "kind": "Service",
                "metadata": {"namespace": "shop", "name": "web", "labels": labels},
            })
        };
        let path = "/api/v1/services?watch=1&labelSelector=!service.kubernetes.io%2Fheadless%2C!service.kubernetes.io%2Fservice-proxy-name";
        let mut lines = agent.watch(path).await?;
        for (labels, word) in [
            (json!({}), "ADDED"),
            (json!({"a": "b"}), "MODIFIED"),
            (json!({label: ""}), "DELETED"),
            (json!({"a": "c"}), "ADDED"),
        ] {
            server.put(service(labels))?;
            ensure!(lines.change().await? == (word.into(), "web".into()));
        }
        Ok(())
    })
}

#[test]
fn faults_break_hold_and_refuse_as_a_test_sets_them() -> Result<()> {
    with_server(Options::default(), async |server| {
        let agent = Client::agent(&server)?;
        let start = server.put(web("web-1"))?;
        let path = format!("{PODS}?watch=1&resourceVersion={start}");
        let mut lines = agent.watch(&path).await?;
        server.break_streams("pods")?;
        lines
            .next()
            .await
            .err()
            .context("the connection is broken off")?;

        let mut lines = agent.watch(&path).await?;
        server.hold("pods")?;
        server.put(web("web-2"))?;
        let silent = tokio::time::timeout(Duration::from_millis(200), lines.next()).await;
        ensure!(silent.is_err(), "a held stream sent {silent:?}");
        server.release("pods")?;
        ensure!(lines.change().await? == ("ADDED".into(), "web-2".into()));

        for (refusal, codes) in [
            (Refusal::Forbidden, [403, 403, 403]),
            (Refusal::NotServed, [404, 404, 404]),
            (Refusal::TooMany(2), [429, 429, 200]),
            (Refusal::Internal(1), [500, 200, 200]),
            (Refusal::Unavailable, [503, 503, 503]),
        ] {
            server.refuse("pods", refusal)?;
            for code in codes {
                let answer = agent.get(PODS).await?;
                ensure!(answer.code == code, "{refusal:?}: {answer:?}");
            }
        }
        server.allow("pods")?;
        server.null_items("pods", true)?;
        let list = agent.get(PODS).await?;
        ensure!(list.code == 200 && list.body["items"].is_null(), "{list:?}");
        server.away();
        ensure!(lines.next().await.is_err(), "the server is away");
        Ok(())
    })
}

#[test]
fn writes_are_checked_as_a_real_server_checks_them() -> Result<()> {
    with_server(Options::default(), async |server| {
        let agent = Client::agent(&server)?;
        let leases = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases";
        let mut lease = json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "holdfast-refusals"},
            "spec": {"holderIdentity": "n1"},
        });
        let created = agent.post(leases, &lease).await?;
        ensure!(created.code == 201, "{created:?}");
        ensure!(agent.post(leases, &lease).await?.code == 409);
        let path = format!("{leases}/holdfast-refusals");
        ensure!(agent.put(&path, &lease).await?.code == 422, "no revision");
        lease["metadata"]["resourceVersion"] = created.body["metadata"]["resourceVersion"].clone();
        lease["spec"]["holderIdentity"] = json!("n2");
        ensure!(agent.put(&path, &lease).await?.code == 200);
        let late = agent.put(&path, &lease).await?;
        ensure!(
            late.code == 409 && late.body["reason"] == "Conflict",
            "{late:?}"
        );

        // The event of an object without namespace is in `default`.
        let event = json!({
            "apiVersion": "events.k8s.io/v1", "kind": "Event",
            "metadata": {"generateName": "web."}, "eventTime": "2026-01-01T00:00:00.000000Z",
            "reportingController": "holdfast-agent", "reportingInstance": "n1", "action": "Validate",
            "reason": "Refused",
            "type": "Warning", "regarding": {"kind": "CiliumClusterwideNetworkPolicy", "name": "web"},
        });
        let events = "/apis/events.k8s.io/v1/namespaces";
        for (namespace, code) in [("default", 201), ("shop", 422)] {
            let answer = agent
                .post(&format!("{events}/{namespace}/events"), &event)
                .await?;
            ensure!(answer.code == code, "{answer:?}");
        }
        let wrong = json!({"status": {"conditions": [{"type": "Valid"}]}});
        server.put(policy(json!({})))?;
        let refused = agent
            .patch(&format!("{POLICIES}/web/status"), &wrong)
            .await?;
        ensure!(refused.code == 422, "{refused:?}");
        Ok(())
    })
}
