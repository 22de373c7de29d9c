//! An object that the agents refuse says so in the cluster: a policy in its conditions, every object
//! in an Event, once for all nodes.
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::apiserver::{ApiServer, NAMESPACE, Options};
use holdfast_e2e::{AgentOptions, Lab, eventually, with_lab};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(20);
const EVENTS: &str = "events.events.k8s.io";
/// Field of the refused policy.
const FIELD: &str = "spec.egress[0].toEndpoints";

fn policy(kind: &str, namespace: Option<&str>, endpoints: &Value) -> Value {
    let mut policy = json!({
        "apiVersion": "cilium.io/v2", "kind": kind, "metadata": {"name": "web"},
        "spec": {"endpointSelector": {}, "egress": [{"toEndpoints": endpoints}]},
    });
    if let Some(namespace) = namespace {
        policy["metadata"]["namespace"] = json!(namespace);
    }
    policy
}

fn server(lab: &Lab, options: Options) -> Result<ApiServer> {
    let api = ApiServer::start(Some(&lab.node), &lab.directory().join("apiserver"), options)?;
    api.put(policy("CiliumNetworkPolicy", Some("shop"), &json!(7)))?;
    api.put(policy("CiliumClusterwideNetworkPolicy", None, &json!(7)))?;
    api.put(json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"name": "web", "namespace": "shop"},
        "spec": {"podSelector": {}, "policyTypes": ["Sideways"]},
    }))?;
    Ok(api)
}

fn options(api: &ApiServer) -> AgentOptions {
    AgentOptions::default()
        .flag("--kubernetes")
        .flag(&format!(
            "--kubeconfig={}",
            api.files().kubeconfig.display()
        ))
        .flag("--node-name=n1")
}

/// Waits until the condition of a policy has this status. Returns its message.
fn condition(api: &ApiServer, plural: &str, namespace: &str, status: &str) -> Result<String> {
    eventually(&format!("{plural} is Valid={status}"), SOON, || {
        let object = api.get(plural, namespace, "web")?.context("no object")?;
        let conditions = object["status"]["conditions"].as_array().cloned();
        let valid = conditions.unwrap_or_default();
        let valid = valid
            .iter()
            .find(|one| one["type"] == "Valid" && one["status"] == status);
        let valid = valid.with_context(|| format!("{}", object["status"]))?;
        Ok(valid["message"].as_str().unwrap_or_default().to_owned())
    })
}

#[test]
fn a_refused_policy_says_so_in_its_conditions_and_a_corrected_one_that_it_is_accepted() {
    with_lab(|lab| {
        let api = server(lab, Options::default())?;
        let agent = lab.start_agent(&options(&api))?;
        let policies = [
            ("ciliumnetworkpolicies", "shop"),
            ("ciliumclusterwidenetworkpolicies", ""),
        ];
        for (plural, namespace) in policies {
            let message = condition(&api, plural, namespace, "False")?;
            ensure!(message.contains(FIELD), "{message}");
        }
        api.put(policy("CiliumNetworkPolicy", Some("right"), &json!([{}])))?;
        condition(&api, "ciliumnetworkpolicies", "right", "True")?;
        let events = eventually("an Event for each object", SOON, || {
            let events = api.all(EVENTS)?;
            ensure!(events.len() == 3, "{events:?}");
            Ok(events)
        })?;
        let of = |kind: &str| {
            let mut events = events.iter();
            let event = events.find(|event| event["regarding"]["kind"] == kind);
            event.with_context(|| format!("no Event of {kind}: {events:?}"))
        };
        let event = of("CiliumNetworkPolicy")?;
        ensure!(event["note"].to_string().contains(FIELD), "{event}");
        ensure!(
            event["type"] == "Warning" && event["reason"] == "Refused",
            "{event}"
        );
        let object = api
            .get("ciliumnetworkpolicies", "shop", "web")?
            .context("gone")?;
        ensure!(
            event["regarding"]["uid"] == object["metadata"]["uid"],
            "{event}"
        );
        let namespace = &of("CiliumClusterwideNetworkPolicy")?["metadata"]["namespace"];
        ensure!(namespace == "default", "{namespace}");
        let note = of("NetworkPolicy")?["note"].to_string();
        ensure!(note.contains("policyTypes"), "{note}");
        let lease = api
            .get("leases", NAMESPACE, "holdfast-refusals")?
            .context("no Lease")?;
        ensure!(lease["spec"]["holderIdentity"] == "n1", "{lease}");

        // A restart writes nothing twice: existing Events are counted, not doubled.
        let version = object["metadata"]["resourceVersion"].clone();
        agent.kill_9()?;
        api.forget_answered();
        let _agent = lab.start_agent(&options(&api))?;
        eventually("the Events are counted", SOON, || {
            let events = api.all(EVENTS)?;
            let counted = events
                .iter()
                .filter(|event| event["series"]["count"] == 2)
                .count();
            ensure!(events.len() == 3 && counted == 3, "{events:?}");
            Ok(())
        })?;
        let object = api
            .get("ciliumnetworkpolicies", "shop", "web")?
            .context("gone")?;
        ensure!(object["metadata"]["resourceVersion"] == version, "{object}");

        // Corrected: accepted, and the Lease is free once nothing is refused.
        for (plural, namespace) in policies {
            api.edit(plural, namespace, "web", |policy| {
                policy["spec"]["egress"][0]["toEndpoints"] = json!([{}]);
            })?;
            condition(&api, plural, namespace, "True")?;
        }
        api.delete("networkpolicies", "shop", "web")?;
        eventually("the Lease is released", SOON, || {
            let lease = api
                .get("leases", NAMESPACE, "holdfast-refusals")?
                .context("no Lease")?;
            ensure!(lease["spec"]["holderIdentity"] == "", "{lease}");
            Ok(())
        })
    });
}

#[test]
fn an_egress_firewall_says_whether_it_is_accepted_once_for_all_nodes() {
    with_lab(|lab| {
        let directory = lab.directory().join("apiserver");
        let api = ApiServer::start(Some(&lab.node), &directory, Options::default())?;
        let firewall = |namespace: &str, to: &str, status: Value| {
            json!({
                "apiVersion": "k8s.ovn.org/v1", "kind": "EgressFirewall",
                "metadata": {"name": "default", "namespace": namespace},
                "spec": {"egress": [{"type": "Deny", "to": {"cidrSelector": to}}]},
                "status": status,
            })
        };
        let of_ovn = "zone-1: EgressFirewall Rules applied";
        let applied = "EgressFirewall Rules applied";
        let refused = "EgressFirewall Rules not correctly applied";
        api.put(firewall("good", "0.0.0.0/0", json!({})))?;
        api.put(firewall(
            "bad",
            "0.0.0.0/99",
            json!({"status": applied, "messages": [of_ovn]}),
        ))?;
        api.put(firewall(
            "ovn",
            "0.0.0.0/0",
            json!({"status": "", "messages": [of_ovn]}),
        ))?;
        let _agent = lab.start_agent(&options(&api))?;
        let status = |namespace: &str, sentence: &str| {
            let what = format!("{namespace} says {sentence}");
            eventually(&what, SOON, || {
                let object = api.get("egressfirewalls", namespace, "default")?;
                let status = object.context("no object")?["status"].clone();
                ensure!(status["status"] == sentence, "{status}");
                Ok(status["messages"].clone())
            })
        };
        let messages = status("good", applied)?;
        ensure!(
            messages == json!([format!("holdfast: {applied}")]),
            "{messages}"
        );
        let messages = status("bad", refused)?;
        ensure!(messages[0] == of_ovn, "{messages}");
        let ours = messages[1].as_str().unwrap_or_default();
        ensure!(
            ours.starts_with("holdfast: ") && ours.contains("spec.egress[0].to.cidrSelector"),
            "{messages}"
        );
        api.edit("egressfirewalls", "bad", "default", |firewall| {
            firewall["spec"]["egress"][0]["to"]["cidrSelector"] = json!("192.0.2.0/24");
        })?;
        status("bad", applied)?;
        let writes = |namespace: &str| {
            let answered = api.answered().into_iter();
            answered
                .filter(|one| one.resource == "egressfirewalls/status" && one.verb == "patch")
                .filter(|one| one.object.0.as_deref() == Some(namespace))
                .count()
        };
        let writes = ["good", "bad", "ovn"].map(writes);
        ensure!(writes == [1, 2, 0], "{writes:?}");
        Ok(())
    });
}

#[test]
fn an_agent_that_does_not_have_the_lease_writes_nothing_and_one_without_the_rights_says_so() {
    with_lab(|lab| {
        let mut allowed = Options::default();
        let is_patch = |rule: &Value| rule["verbs"] == json!(["patch"]);
        for document in &mut allowed.documents {
            if let Some(rules) = document["rules"].as_array_mut() {
                rules.retain(|rule| !is_patch(rule));
            }
        }
        let api = server(lab, allowed)?;
        api.put(json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {"name": "holdfast-refusals", "namespace": NAMESPACE},
            "spec": {"holderIdentity": "n2", "leaseDurationSeconds": 120},
        }))?;
        let _agent = lab.start_agent(&options(&api))?;
        let asked = || {
            let answered = api.answered();
            answered
                .iter()
                .filter(|a| a.resource == "leases" && a.verb == "get")
                .count()
        };
        eventually("the agent looks at the Lease", SOON, || {
            ensure!(asked() > 0, "not asked for");
            Ok(())
        })?;
        let wrote = |code: u16| {
            let mut answered = api.answered().into_iter();
            answered.any(|a| {
                matches!(a.verb, "patch" | "create")
                    && a.resource != "ciliumnodes"
                    && a.code == code
            })
        };
        ensure!(
            !wrote(201) && !wrote(200) && !wrote(403),
            "{:?}",
            api.answered()
        );

        // The other agent releases the Lease. This agent is restarted, without the right to patch.
        api.edit("leases", NAMESPACE, "holdfast-refusals", |lease| {
            lease["spec"]["holderIdentity"] = json!("");
        })?;
        drop(_agent);
        let _agent = lab.start_agent(&options(&api))?;
        eventually("status names the missing right", SOON, || {
            let status = lab.agent(&["status"])?;
            ensure!(status.contains("conditions of policies"), "{status}");
            ensure!(
                status.contains("ciliumclusterwidenetworkpolicies/status"),
                "{status}"
            );
            ensure!(status.contains("ClusterRole"), "{status}");
            Ok(())
        })?;
        eventually("Events are written all the same", SOON, || {
            let events = api.all(EVENTS)?;
            ensure!(events.len() == 3, "{events:?}");
            Ok(())
        })?;
        let refused = api.answered();
        let refused = refused.iter().filter(|a| a.code == 403).count();
        ensure!(refused <= 3, "{refused} requests were refused: a busy loop");
        Ok(())
    });
}
