//! `holdfast-agent why`: each hop from policy to map entry is broken in turn. The answer names the
//! hop, its actual state, and the remedy.
use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::lab::{DNS4, at, other4, web4};
use holdfast_e2e::policy::{CLIENT, WEB, cidr, dns, dns_to, egress, names, only_names};
use holdfast_e2e::{AgentOptions, Lab, Query, SdpOptions, config, eventually, with_lab};
use serde_json::{Value, json};
use shared_maps::EndpointId;
use shared_maps::policy::{EGRESS, PolicyKey};
use shared_maps::user::{Access, Globals, ipcache_key};

const SOON: Duration = Duration::from_secs(10);
const NAME: &str = "www.good.test";

/// The answer of `why` as JSON and as text, which must agree.
pub(super) fn why(lab: &Lab, arguments: &[&str]) -> Result<(Value, String)> {
    let program = config::program("holdfast-agent")?.display().to_string();
    let mut command = lab.node.command(&program);
    command.arg("why").args(arguments).args(["-o", "json"]);
    command.arg("--admin-socket").arg(lab.agent_socket());
    let output = command.output()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    let answer: Value =
        serde_json::from_str(&said).with_context(|| format!("{arguments:?}: {said}{error}"))?;
    let allowed = answer.get("allowed").and_then(Value::as_bool);
    ensure!(
        (allowed == Some(true)) == output.status.success(),
        "{answer}"
    );
    let mut command = lab.node.command(&program);
    command.arg("why").args(arguments);
    command.arg("--admin-socket").arg(lab.agent_socket());
    let text = String::from_utf8(command.output()?.stdout)?;
    println!("$ holdfast-agent why {}\n{text}", arguments.join(" "));
    Ok((answer, text))
}

/// The first missing hop of `why`, with its text and remedy.
fn missing(answer: &Value) -> Result<(String, String)> {
    let hops = answer
        .get("hops")
        .and_then(Value::as_array)
        .context("hops")?;
    let field = |hop: &Value, name: &str| {
        let field = hop.get(name).and_then(Value::as_str);
        field.unwrap_or_default().to_owned()
    };
    let hop = hops
        .iter()
        .find(|hop| field(hop, "state") == "missing")
        .with_context(|| format!("no hop is missing in {answer:#}"))?;
    Ok((
        field(hop, "hop"),
        format!("{}; do: {}", field(hop, "text"), field(hop, "remedy")),
    ))
}

/// Checks that `why` says no, names `hop` first, and has each of `parts` in its text.
fn broken(lab: &Lab, arguments: &[&str], hop: &str, parts: &[&str]) -> Result<()> {
    let (answer, text) = why(lab, arguments)?;
    ensure!(answer.get("allowed") == Some(&json!(false)), "{answer:#}");
    ensure!(
        text.contains("MISSING") && text.contains("not allowed: "),
        "{text}"
    );
    let (name, said) = missing(&answer)?;
    ensure!(name == hop, "{name} is named, not {hop}: {answer:#}");
    for part in parts {
        ensure!(said.contains(part), "{hop} lacks {part}: {said}");
    }
    Ok(())
}

/// Checks that `why` says yes, and that its text has each of `parts`.
fn open(lab: &Lab, arguments: &[&str], parts: &[&str]) -> Result<()> {
    let (answer, text) = why(lab, arguments)?;
    ensure!(answer.get("allowed") == Some(&json!(true)), "{answer:#}");
    ensure!(!text.contains("MISSING"), "{text}");
    for part in parts {
        ensure!(text.contains(part), "lacks {part}: {text}");
    }
    Ok(())
}

/// Puts a policy in force.
fn policy(lab: &Lab, rules: &str) -> Result<()> {
    let before = revision(lab)?;
    lab.write_policy("web.yaml", &egress("good-names", "web", rules))?;
    eventually("the policy is in force", SOON, || {
        ensure!(revision(lab)? > before, "still revision {before}");
        Ok(())
    })
}

fn revision(lab: &Lab) -> Result<u64> {
    let status = lab.agent_json(&["status"])?;
    let revision = status.pointer("/summary/revision").and_then(Value::as_u64);
    revision.context("revision")
}

#[test]
fn why_names_the_hop_that_is_broken() {
    with_lab(|lab| {
        lab.zone.set(NAME, &[web4(10)], 600);
        let good = dns("*.good.test") + &names("*.good.test");
        let _agent = {
            lab.write_policy("web.yaml", &egress("good-names", "web", &good))?;
            lab.start_agent(&AgentOptions::default())?
        };
        let id = lab.add_endpoint(&lab.a, WEB)?.to_string();
        let own = lab.a.v4.to_string();
        let want = format!("{NAME}:80");

        // No proxy runs yet, so nothing can be learned.
        broken(
            lab,
            &[&id, &want],
            "names",
            &["www.good.test", "holdfast-sdp"],
        )?;
        let _sdp = lab.start_sdp(&SdpOptions::default())?;
        lab.connected("one")?;
        broken(lab, &[&id, &want], "names", &["look the name up"])?;
        lab.a.ask(&Query::a(NAME, DNS4))?.expect(web4(10))?;

        // Without a fault, by each way to name the endpoint.
        let key = format!("{}/eth0", lab.a.netns.name());
        let full = format!("cli/{key}");
        for called in [id.as_str(), &own, &full, lab.a.netns.name()] {
            open(
                lab,
                &[called, &want],
                &[
                    "203.0.113.10",
                    "fqdn:*.good.test",
                    "cilium_policy_v2_",
                    "allowed by CiliumNetworkPolicy/default/good-names spec.egress[1]",
                ],
            )?;
        }
        open(lab, &[&id, NAME], &["80/TCP", "7777/UDP"])?;
        open(
            lab,
            &[&id, "203.0.113.10:7777/UDP"],
            &["learned for www.good.test"],
        )?;
        open(lab, &[&id, "192.0.2.53:53/UDP"], &["through the DNS proxy"])?;
        lab.a.expect_open(at(web4(10), 80))?;

        // No rule allows the port.
        broken(
            lab,
            &[&id, &format!("{NAME}:443")],
            "policy-map",
            &["443/TCP", "TCP 80, UDP 7777", "spec.egress[1]"],
        )?;
        // The address belongs to no prefix.
        broken(
            lab,
            &[&id, "198.51.100.10:80"],
            "identity",
            &["reserved:world-ipv4", "no selector"],
        )?;
        traced(lab, &id)?;
        learned(lab, &id, &want)?;
        rules(lab, &id, &want)?;
        receivers(lab, &id)?;
        unknown(lab, &id)
    });
}

/// `policy trace` agrees about policy, by endpoint, labels, names and addresses.
fn traced(lab: &Lab, id: &str) -> Result<()> {
    for (from, to) in [(id, NAME), (WEB, "203.0.113.10")] {
        let trace = ["policy", "trace", "--from", from, "--to", to, "--port=80"];
        let by = "allowed by CiliumNetworkPolicy/default/good-names spec.egress[1]";
        let said = lab.agent(&trace)?;
        ensure!(said.contains(by) && said.ends_with("\nallowed\n"), "{said}");
        let json = lab.agent_json(&trace)?;
        ensure!(json.get("allowed") == Some(&json!(true)), "{json}");
    }
    let shut = [
        "policy",
        "trace",
        "--from",
        id,
        "--to=203.0.113.11",
        "--port=80",
    ];
    let error = lab.agent(&shut).err().context("it is not dropped")?;
    ensure!(format!("{error:#}").contains("not allowed"), "{error:#}");
    Ok(())
}

/// Entries in the kernel are removed without the agent.
fn learned(lab: &Lab, id: &str, want: &str) -> Result<()> {
    let maps = Globals::new(lab.bpf_root());
    let ipcache = maps.ipcache(Access::ReadWrite)?;
    let entry = ipcache_key(web4(10), 32);
    let value = ipcache.get(&entry)?.context("the address is in the map")?;
    lab.repairs.expect();
    // The agent may repair the map before `why` reads it.
    eventually("the ipcache is named", SOON, || {
        ipcache.remove(&entry)?;
        broken(
            lab,
            &[id, want],
            "ipcache",
            &[
                &format!(
                    "the intended one is {} by 203.0.113.10/32",
                    value.sec_identity
                ),
                "fqdn-name-manager/www.good.test",
                "another program",
            ],
        )
    })?;
    ipcache.set(&entry, &value)?;
    open(lab, &[id, want], &[])?;

    let policy = maps.policy(EndpointId(id.parse()?), Access::ReadWrite)?;
    let key = PolicyKey::new(value.sec_identity, EGRESS, 6, 80, 16);
    let entry = policy.get(&key)?.context("the entry is in the map")?;
    eventually("the policy map is named", SOON, || {
        policy.remove(&key)?;
        broken(
            lab,
            &[id, want],
            "policy-map",
            &["no entry for identity", "80/TCP", "policy allows it"],
        )
    })?;
    policy.set(&key, &entry)?;
    open(lab, &[id, want], &[])
}

/// Policies that deny the address or lack a rule: the answer names the reason.
fn rules(lab: &Lab, id: &str, want: &str) -> Result<()> {
    let deny = "- toCIDR: [\"203.0.113.0/24\"]\n";
    let denying = egress("no-web", "web", deny).replace("egress:", "egressDeny:");
    let good = dns("*.good.test") + &names("*.good.test");
    let before = revision(lab)?;
    lab.write_policy("deny.yaml", &denying)?;
    eventually("the deny is in force", SOON, || {
        ensure!(revision(lab)? > before, "not yet");
        broken(lab, &[id, want], "policy-map", &["denies", "identity"])
    })?;
    let (answer, _) = why(lab, &[id, want])?;
    let verdict = answer.get("verdict").and_then(Value::as_str).unwrap_or("");
    ensure!(
        verdict.contains("denied by CiliumNetworkPolicy/default/no-web spec.egressDeny[0]"),
        "{verdict}"
    );
    lab.remove_policy("deny.yaml")?;
    eventually("the deny is gone", SOON, || open(lab, &[id, want], &[]))?;

    policy(lab, &(dns("*.good.test") + &names("*.else.test")))?;
    broken(
        lab,
        &[id, want],
        "selector",
        &["no toFQDNs rule", NAME, "matchName"],
    )?;
    policy(lab, &(dns("*.else.test") + &names("*.good.test")))?;
    broken(lab, &[id, want], "dns", &["refused", "toPorts.rules.dns"])?;
    policy(
        lab,
        &(dns_to("*.good.test", &["10.250.0.0/24"]) + &names("*.good.test")),
    )?;
    let (answer, _) = why(lab, &[id, want])?;
    ensure!(
        answer.to_string().contains("cidr:10.250.0.0/24"),
        "{answer:#}"
    );
    policy(lab, &names("*.none.test"))?;
    broken(
        lab,
        &[id, "www.none.test:80"],
        "dns",
        &["no DNS rule is about this endpoint"],
    )?;
    policy(lab, &(good + &cidr("198.51.100.0/24")))?;
    open(
        lab,
        &[id, "198.51.100.10:80"],
        &["cidr:198.51.100.0/24", "spec.egress[2]"],
    )?;
    lab.a.expect_open(at(other4(10), 80))
}

/// The other pod's own policy counts, too.
fn receivers(lab: &Lab, id: &str) -> Result<()> {
    let other = lab.add_endpoint(&lab.b, CLIENT)?;
    let peer = IpAddr::from(lab.b.v4).to_string();
    let before = revision(lab)?;
    let allow = only_names("*.good.test") + "  - toEndpoints: [{matchLabels: {app: client}}]\n";
    lab.write_policy("web.yaml", &allow)?;
    eventually("pods may be reached", SOON, || {
        ensure!(revision(lab)? > before, "not yet");
        open(lab, &[id, &format!("{peer}:80")], &["receiver"])
    })?;
    let closed = r"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: closed, namespace: default}
spec:
  endpointSelector: {matchLabels: {app: client}}
  ingress:
  - fromEntities: [world]
";
    lab.write_policy("client.yaml", closed)?;
    eventually("the receiver is named", SOON, || {
        broken(
            lab,
            &[id, &format!("{peer}:80")],
            "receiver",
            &["ingress", &format!("{other:05}")],
        )
    })?;
    let own = lab.a.v4.to_string();
    broken(
        lab,
        &[&other.to_string(), &own, "--ingress"],
        "identity",
        &["no selector"],
    )?;
    open(
        lab,
        &[&other.to_string(), "203.0.113.10:80", "--ingress"],
        &["entity:world"],
    )
}

fn unknown(lab: &Lab, id: &str) -> Result<()> {
    for (arguments, named) in [
        (&["absent", NAME][..], "there is no endpoint absent"),
        (&["eth0", NAME], "may mean"),
        (&[id, NAME, "--ingress"], "give the sender's address"),
    ] {
        let arguments = [&["why"][..], arguments].concat();
        let error = lab.agent(&arguments).err().context("it was answered")?;
        ensure!(format!("{error:#}").contains(named), "{error:#}");
    }
    Ok(())
}
