//! EgressFirewalls and DNSNameResolvers: the definitions and roles of the chart.

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::apiserver::Options;
use serde_json::{Value, json};

use super::client::Client;
use super::with_server;

const OBJECTS: &str = "/apis/network.openshift.io/v1alpha1/namespaces/kube-system/dnsnameresolvers";
const FIREWALLS: &str = "/apis/k8s.ovn.org/v1/namespaces/shop/egressfirewalls";
const SEEN: &str = "2026-01-01T00:00:00Z";

fn object(name: &str) -> Value {
    json!({
        "apiVersion": "network.openshift.io/v1alpha1", "kind": "DNSNameResolver",
        "metadata": {"name": "example"}, "spec": {"name": name},
    })
}

fn address(ip: &str) -> Value {
    json!({"ip": ip, "ttlSeconds": 5, "lastLookupTime": SEEN})
}

fn status(name: &str, addresses: &[Value]) -> Value {
    let condition = json!({
        "type": "Degraded", "status": "False", "reason": "NOERROR", "message": "No Error",
        "lastTransitionTime": SEEN,
    });
    let resolved = json!([{
        "dnsName": name, "resolvedAddresses": addresses, "conditions": [condition],
    }]);
    json!({"status": {"resolvedNames": resolved}})
}

#[test]
fn observed_5_the_status_of_a_dnsnameresolver_is_checked_and_its_name_never_changes() -> Result<()>
{
    with_server(Options::with_resolver(), async |server| {
        let agent = Client::agent(&server)?;
        for name in ["www.example.org", "org.", "*.org.*.", "Www.example.org."] {
            let refused = agent.post(OBJECTS, &object(name)).await?;
            ensure!(refused.code == 422, "{name}: {refused:?}");
        }
        let long = "a23456789.".repeat(26);
        ensure!(agent.post(OBJECTS, &object(&long)).await?.code == 422);
        let created = agent.post(OBJECTS, &object("www.example.org.")).await?;
        ensure!(created.code == 201, "{created:?}");
        let path = format!("{OBJECTS}/example");
        let to = format!("{path}/status");
        let whole = address("192.0.2.1");
        for name in [
            "www.example.org",
            "org.",
            "*.*.example.org.",
            "-a.example.org.",
        ] {
            let refused = agent
                .patch(&to, &status(name, std::slice::from_ref(&whole)))
                .await?;
            ensure!(refused.code == 422, "{name}: {refused:?}");
        }
        for field in ["ip", "ttlSeconds", "lastLookupTime"] {
            let mut part = whole.clone();
            part.as_object_mut().context("an object")?.remove(field);
            let refused = agent
                .patch(&to, &status("www.example.org.", &[part]))
                .await?;
            ensure!(
                refused.code == 422 && refused.text.contains(field),
                "{refused:?}"
            );
        }
        let mut odd = whole.clone();
        odd["ttlSeconds"] = json!(1_u64 << 31);
        let mut late = whole.clone();
        late["lastLookupTime"] = json!("yesterday");
        for addresses in [vec![whole.clone(), whole.clone()], vec![odd], vec![late]] {
            let refused = agent
                .patch(&to, &status("a.example.org.", &addresses))
                .await?;
            ensure!(refused.code == 422, "{refused:?}");
        }
        let mut bare = status("www.example.org.", std::slice::from_ref(&whole));
        bare["status"]["resolvedNames"][0]["conditions"][0]["reason"] = json!("");
        ensure!(agent.patch(&to, &bare).await?.code == 422, "no reason");
        let taken = agent
            .patch(&to, &status("*.example.org.", &[whole]))
            .await?;
        ensure!(taken.code == 200, "{taken:?}");
        let renamed = json!({"spec": {"name": "other.example.org."}});
        let refused = Client::admin(&server)?.patch(&path, &renamed).await?;
        ensure!(
            refused.code == 422 && refused.text.contains("spec.name"),
            "{refused:?}"
        );
        Ok(())
    })
}

#[test]
fn a_status_of_another_version_is_a_conflict_and_a_test_can_make_more() -> Result<()> {
    with_server(Options::with_resolver(), async |server| {
        let agent = Client::agent(&server)?;
        let created = agent.post(OBJECTS, &object("www.example.org.")).await?;
        let to = format!("{OBJECTS}/example/status");
        let at = |version: &Value, ip: &str| {
            let mut patch = status("www.example.org.", &[address(ip)]);
            patch["metadata"] = json!({"resourceVersion": version});
            patch
        };
        let version = created.body["metadata"]["resourceVersion"].clone();
        let first = agent.patch(&to, &at(&version, "192.0.2.1")).await?;
        ensure!(first.code == 200, "{first:?}");
        let late = agent.patch(&to, &at(&version, "192.0.2.2")).await?;
        ensure!(
            late.code == 409 && late.body["reason"] == "Conflict",
            "{late:?}"
        );

        server.conflict("dnsnameresolvers", 2)?;
        let mut codes = Vec::new();
        for n in 0..4 {
            let patch = status("www.example.org.", &[address(&format!("192.0.2.1{n}"))]);
            codes.push(agent.patch(&to, &patch).await?.code);
        }
        ensure!(codes == [200, 409, 200, 409], "{codes:?}");
        server.conflict("dnsnameresolvers", 0)?;
        let got = agent.get(&format!("{OBJECTS}/example")).await?;
        ensure!(
            got.body["status"]["resolvedNames"][0]["resolvedAddresses"][0]["ip"] == "192.0.2.12",
            "{got:?}"
        );
        Ok(())
    })
}

#[test]
fn agents_write_dnsnameresolvers_only_with_the_resolvers_role_and_in_its_namespace() -> Result<()> {
    let other = "/apis/network.openshift.io/v1alpha1/namespaces/shop/dnsnameresolvers";
    let codes = |options: Options| {
        let codes = std::cell::RefCell::new(Vec::new());
        with_server(options, async |server| {
            let agent = Client::agent(&server)?;
            for path in [OBJECTS, other] {
                let made = agent.post(path, &object("www.example.org.")).await?;
                codes.borrow_mut().push(made.code);
            }
            let all = "/apis/network.openshift.io/v1alpha1/dnsnameresolvers";
            let code = agent.get(all).await?.code;
            codes.borrow_mut().push(code);
            Ok(())
        })?;
        anyhow::Ok(codes.into_inner())
    };
    ensure!(codes(Options::with_resolver())? == [201, 403, 200]);
    ensure!(codes(Options::default())? == [403, 403, 200]);
    Ok(())
}

#[test]
fn an_egress_firewall_is_checked_by_its_definition() -> Result<()> {
    with_server(Options::default(), async |server| {
        let admin = Client::admin(&server)?;
        let firewall = |name: &str, rule: Value| {
            json!({
                "apiVersion": "k8s.ovn.org/v1", "kind": "EgressFirewall",
                "metadata": {"name": name}, "spec": {"egress": [rule]},
            })
        };
        let block = json!({"cidrSelector": "0.0.0.0/0"});
        let port = |protocol: &str, port: u32| json!([{"protocol": protocol, "port": port}]);
        for rule in [
            json!({"type": "allow", "to": block}),
            json!({"type": "AllowX", "to": block}),
            json!({"type": "Deny", "to": {}}),
            json!({"type": "Deny", "to": {"cidrSelector": "0.0.0.0/0", "dnsName": "a.b"}}),
            json!({"type": "Deny"}),
            json!({"type": "Allow", "to": {"dnsName": "com"}}),
            json!({"type": "Allow", "to": {"dnsName": "a.*.example.org"}}),
            json!({"type": "Deny", "to": block, "ports": port("TCPX", 80)}),
            json!({"type": "Deny", "to": block, "ports": port("TCP", 0)}),
            json!({"type": "Deny", "to": block, "ports": port("TCP", 65536)}),
        ] {
            let refused = admin.post(FIREWALLS, &firewall("default", rule)).await?;
            ensure!(refused.code == 422, "{refused:?}");
        }
        let good = json!({
            "type": "Allow", "to": {"dnsName": "*.Example.org"}, "ports": port("SCTP", 65535),
        });
        let refused = admin
            .post(FIREWALLS, &firewall("web", good.clone()))
            .await?;
        ensure!(
            refused.code == 422 && refused.text.contains("metadata.name"),
            "{refused:?}"
        );
        let taken = admin.post(FIREWALLS, &firewall("default", good)).await?;
        ensure!(taken.code == 201, "{taken:?}");
        let agent = Client::agent(&server)?;
        let patch = json!({"status": {"status": "s", "messages": ["n1: a", "n1: a"]}});
        let path = format!("{FIREWALLS}/default/status");
        ensure!(agent.patch(&path, &patch).await?.code == 422, "twice");
        let patch = json!({"status": {
            "status": "EgressFirewall Rules applied", "messages": ["holdfast: EgressFirewall Rules applied"],
        }});
        ensure!(agent.patch(&path, &patch).await?.code == 200);
        Ok(())
    })
}
