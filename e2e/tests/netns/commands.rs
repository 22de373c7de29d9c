//! Every command of both programs, as text and as JSON, on one running lab.

mod asked;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::lab::{DNS4, DNS6, OTHER_DNS4, at, other4, web4, web6};
use holdfast_e2e::policy::{CLIENT, cidr, dns, egress, names};
use holdfast_e2e::{Lab, Query, SdpOptions, eventually, with_lab};
use serde_json::{Value, json};
use shared_maps::conntrack::{CtKey4, CtValue, NAME_ANY4, NAME_TCP4};
use shared_maps::user::{Map, MapKind};

use self::asked::{Asked, has, parsed, run, text};

const SOON: Duration = Duration::from_secs(10);
const AGENT: &str = "holdfast-agent";
const SDP: &str = "holdfast-sdp";

#[test]
fn every_command_has_text_and_json() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10), web6(10)], 600);
        let rules = dns("*.good.test") + &names("*.good.test") + &cidr("198.51.100.0/24");
        let mut programs = lab.start(&egress("good-names", "web", &rules))?;
        let other = lab.add_endpoint(&lab.b, CLIENT)?;
        let id = lab.endpoint_id(&lab.a)?;
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;
        let _stream = lab.a.stream(at(web4(10), 80))?;
        lab.a
            .ask(&Query::aaaa("www.good.test", DNS6))?
            .expect(web6(10))?;
        let _stream6 = lab.a.stream(at(web6(10), 80))?;
        lab.a.expect_open(at(other4(10), 80))?;
        lab.a.expect_closed(at(web4(11), 80))?;

        let mut asked = Asked::new(lab);
        questions(&mut asked, id, other)?;
        maps(&mut asked, id);
        packets(&mut asked, id);
        documents(&mut asked)?;
        proxy(&mut asked, id);
        wrong_numbers(&mut asked);
        asked.done()?;

        cleaning(lab, id)?;
        removing(lab, id)?;
        let last = run(lab, SDP, &["drain"])?;
        ensure!(last.code == Some(1), "{last:?}");
        ensure!(last.error.contains("last proxy of this node"), "{last:?}");
        let left = text(lab, SDP, &["drain", "--force"], 0)?;
        ensure!(left.contains("left after"), "{left}");
        let status = programs.sdp.wait(SOON)?;
        ensure!(status.success(), "the drained proxy ended with {status}");
        let mut next = lab.start_sdp(&SdpOptions::default())?;
        let left = parsed(lab, SDP, &["drain", "--force"], 0)?;
        ensure!(has(&left, &json!({"left": true})), "{left}");
        ensure!(next.wait(SOON)?.success());
        Ok(())
    });
}

fn questions(asked: &mut Asked<'_>, id: u64, other: u64) -> Result<()> {
    let lab = asked.lab;
    let (own, number) = (lab.a.v4.to_string(), id.to_string());
    let listing = lab.agent_json(&["endpoint", "list"])?;
    let identity = listing
        .as_array()
        .and_then(|list| list.iter().find(|one| one.get("id") == Some(&json!(id))))
        .and_then(|one| one.get("identity"))
        .and_then(Value::as_u64)
        .context("identity of the pod")?;

    asked.ask(
        AGENT,
        &["status"],
        &["Ready", "yes", "2", "disabled", "one"],
        &[
            json!({"ready": true, "problems": [], "warnings": [], "damaged_files": []}),
            json!({"endpoints": 2, "policies": 1, "policies_rejected": 0}),
            json!({"instance": "one", "kind": "rules"}),
        ],
    );
    asked.ask(
        AGENT,
        &["status", "--verbose"],
        &["WAITING", "MOST", "ipcache entries", "512000", "Reconciler"],
        &[
            json!({"what": "ipcache entries", "most": 512_000}),
            json!({"what": "identities of names", "most": null}),
            json!({"kind": "mappings", "instance": "one", "waiting": 0}),
        ],
    );
    asked.ask(
        AGENT,
        &["endpoint", "list"],
        &[&own, "k8s:app=web", "k8s:app=client", "egress"],
        &[
            json!({"id": id, "ipv4": own, "state": "ready", "egress_enforced": true}),
            json!({"id": other, "egress_enforced": false}),
        ],
    );
    asked.ask(
        AGENT,
        &["endpoint", "get", &number],
        &[
            &number,
            &own,
            "k8s:app=web",
            "53/UDP",
            "*.good.test",
            "good-names",
        ],
        &[
            json!({"id": id, "ipv4": own, "problem": null}),
            json!({"port": 53, "protocol": "TCP", "names": ["*.good.test"]}),
        ],
    );
    asked.ask(
        AGENT,
        &["identity", "list"],
        &["REFERENCES", "k8s:app=client", "fqdn:*.good.test"],
        &[json!({"id": identity})],
    );
    asked.ask(
        AGENT,
        &["identity", "get", &identity.to_string()],
        &[&identity.to_string(), "k8s:app=web"],
        &[json!({"id": identity})],
    );
    let learned = asked.lab.agent_json(&["ip", "get", "203.0.113.10"])?;
    let learned = learned.get("identity").cloned().context("identity")?;
    for (arguments, prefix) in [
        (&["ip", "list"][..], "203.0.113.10/32"),
        (&["ip", "get", "203.0.113.10"], "203.0.113.10/32"),
    ] {
        asked.ask(
            AGENT,
            arguments,
            &[prefix, &learned.to_string(), "yes"],
            &[json!({"prefix": prefix, "identity": learned, "realised": learned})],
        );
    }
    asked.ask(
        AGENT,
        &["ip", "get", "198.51.100.77"],
        &["198.51.100.0/24"],
        &[json!({"prefix": "198.51.100.0/24"})],
    );
    asked.ask(
        AGENT,
        &["ip", "get", "2001:db8::1"],
        &["::/0", "world"],
        &[json!({"prefix": "::/0", "identity": 10})],
    );
    asked.ask(
        AGENT,
        &["selectors", "list"],
        &["*.good.test", "198.51.100.0/24", "fqdn", "cidr"],
        &[
            json!({"selector": "fqdn:*.good.test", "kind": "fqdn", "users": 1}),
            json!({"kind": "cidr", "users": 1}),
        ],
    );
    asked.ask(
        AGENT,
        &["fqdn", "names"],
        &["*.good.test", "fqdn"],
        &[json!({"selector": "fqdn:*.good.test", "kind": "fqdn"})],
    );
    asked.lacks(AGENT, &["fqdn", "names"], "cidr");
    asked.ask(
        AGENT,
        &["fqdn", "cache", "list"],
        &["www.good.test", "203.0.113.10", "lookup", "600"],
        &[json!({"endpoint": id, "address": "203.0.113.10", "source": "lookup", "ttl": 600})],
    );
    Ok(())
}

fn maps(asked: &mut Asked<'_>, id: u64) {
    let lab = asked.lab;
    let root = lab.bpf_root().display().to_string();
    let (v4, v6) = (lab.a.v4.to_string(), lab.a.v6.to_string());
    asked.ask(
        AGENT,
        &["bpf", "lxc", "list", "--bpf-root", &root],
        &["NODE-MAC", &v4, &v6, &id.to_string()],
        &[
            json!({"address": v4, "endpoint": id}),
            json!({"address": v6, "endpoint": id}),
        ],
    );
    asked.ask(
        AGENT,
        &["bpf", "ipcache", "list", "--bpf-root", &root],
        &["203.0.113.10/32", "198.51.100.0/24", "2001:db8:53::53/128"],
        &[
            json!({"prefix": "203.0.113.10/32"}),
            json!({"prefix": "198.51.100.0/24"}),
        ],
    );
    asked.ask(
        AGENT,
        &[
            "bpf",
            "policy",
            "list",
            &id.to_string(),
            "--bpf-root",
            &root,
        ],
        &["egress", "redirect", "allow", "UDP", "53", "10094"],
        &[
            json!({"direction": "egress", "protocol": "UDP", "port": "53", "verdict": "redirect",
                   "proxy_port": 10094}),
            json!({"direction": "egress", "protocol": "TCP", "port": "80", "verdict": "allow"}),
            json!({"direction": "ingress", "identity": 0, "port": "any", "verdict": "allow"}),
        ],
    );
    asked.ask(
        AGENT,
        &["bpf", "ct", "list", "--bpf-root", &root],
        &["TCP", "out", "203.0.113.10:80", "198.51.100.10:80"],
        &[
            json!({"protocol": "TCP", "direction": "out", "to": "203.0.113.10:80"}),
            json!({"protocol": "TCP", "to": "198.51.100.10:80"}),
            json!({"protocol": "TCP", "to": "[2001:db8:113::a]:80"}),
        ],
    );
}

#[test]
fn conntrack_is_listed_where_one_family_is_off() {
    with_lab(|lab| {
        let root = lab.bpf_root().display().to_string();
        let list = ["bpf", "ct", "list", "--bpf-root", &root];
        // An agent whose IPv6 is off makes such maps.
        std::fs::create_dir_all(lab.pin(""))?;
        for name in [NAME_TCP4, NAME_ANY4] {
            let _map: Map<CtKey4, CtValue> =
                Map::open_or_create(&lab.pin(name), MapKind::LruHash, 64, 0)?;
        }
        ensure!(text(lab, AGENT, &list, 0)?.contains("PROTOCOL"));
        Ok(())
    });
}

/// The records of the first three connections, which arrive with a delay.
fn packets(asked: &mut Asked<'_>, id: u64) {
    let own = asked.lab.a.v4;
    let found = eventually("the packets are seen", SOON, || {
        let lines = text(asked.lab, AGENT, &["observe", "-o", "json"], 0)?;
        let lines: Vec<Value> = lines
            .lines()
            .map(|line| serde_json::from_str(line).with_context(|| line.to_owned()))
            .collect::<Result<_>>()?;
        for expected in [
            json!({"endpoint": id, "direction": "egress", "reason": "redirected", "protocol": 17,
                   "destination": "192.0.2.53:53", "dropped": false}),
            json!({"endpoint": id, "reason": "allowed", "destination": "203.0.113.10:80",
                   "names": ["www.good.test"]}),
            json!({"endpoint": id, "reason": "policy_denied", "protocol": 6,
                   "destination": "203.0.113.11:80", "dropped": true, "rules": []}),
        ] {
            ensure!(
                lines.iter().any(|line| has(line, &expected)),
                "{expected} is not among {lines:?}"
            );
        }
        Ok(())
    });
    asked.note("observe", found);
    let found = text(asked.lab, AGENT, &["observe"], 0).and_then(|lines| {
        let denied = lines
            .lines()
            .find(|line| line.contains("policy_denied") && line.contains("203.0.113.11:80"));
        let denied = denied.with_context(|| lines.clone())?;
        let start = format!("endpoint {id} egress policy_denied: TCP {own}:");
        ensure!(denied.contains(&start), "{denied}");
        ensure!(denied.ends_with(" no rule allows it"), "{denied}");
        let allowed = lines
            .lines()
            .find(|line| line.contains(" allowed: TCP") && line.contains("203.0.113.10:80"));
        let allowed = allowed.with_context(|| lines.clone())?;
        let by = "www.good.test by CiliumNetworkPolicy/default/good-names spec.egress[1]";
        ensure!(allowed.contains(by), "{allowed}");
        Ok(())
    });
    asked.note("observe", found);
}

fn documents(asked: &mut Asked<'_>) -> Result<()> {
    let lab = asked.lab;
    asked.ask(
        AGENT,
        &["policy", "get"],
        &["good-names", "web.yaml"],
        &[
            json!({"rejected": []}),
            json!({"endpoints": [lab.endpoint_id(&lab.a)?]}),
        ],
    );
    let file = |name: &str, text: &str| -> Result<String> {
        let path = lab.directory().join(name);
        std::fs::write(&path, text)?;
        Ok(path.display().to_string())
    };
    let good = file("good.yaml", &egress("fine", "web", &dns("*.a.test")))?;
    let bad = file("bad.yaml", &egress("broken", "web", &dns("a{1,2}.x")))?;
    let empty = file("empty.yaml", "# nothing\n")?;
    asked.ask(
        AGENT,
        &["policy", "validate", &good],
        &["good.yaml", "fine", "valid"],
        &[json!({"file": good}), json!({"valid": true})],
    );
    for (files, named) in [
        (&[&bad][..], "a{1,2}.x"),
        (&[&good, &bad], "refused"),
        (&[&empty], "empty.yaml"),
        (
            &[&lab.directory().join("absent.yaml").display().to_string()],
            "absent.yaml",
        ),
    ] {
        let mut arguments = vec!["policy", "validate"];
        arguments.extend(files.iter().map(|file| file.as_str()));
        asked.fails(AGENT, &arguments, named);
    }
    let outcome = run(lab, AGENT, &["policy", "validate", &bad, "-o", "json"]).and_then(|done| {
        ensure!(done.code == Some(1), "{done:?}");
        let refused: Value = serde_json::from_str(&done.said)?;
        ensure!(has(&refused, &json!({"valid": false})), "{refused}");
        Ok(())
    });
    asked.note("policy validate -o json", outcome);
    Ok(())
}

fn proxy(asked: &mut Asked<'_>, id: u64) {
    let (own, number) = (asked.lab.a.v4.to_string(), id.to_string());
    asked.ask(
        SDP,
        &["status"],
        &[
            "one",
            "ready",
            "connected to",
            "from the agent",
            "slots",
            "127.0.0.1:10094",
        ],
        &[
            json!({"name": "one", "ready": true, "missing": [], "proxy_port": 10094}),
            json!({"from": "agent"}),
        ],
    );
    for arguments in [&["policy"][..], &["policy", "--endpoint", &number]] {
        asked.ask(
            SDP,
            arguments,
            &[
                "from the agent",
                "endpoint",
                &number,
                "53/udp",
                "53/tcp",
                "*.good.test",
            ],
            &[
                json!({"endpoint": id}),
                json!({"port": 53, "protocol": "udp"}),
                json!({"names": ["*.good.test."]}),
            ],
        );
    }
    let server = DNS4.to_string();
    let elsewhere = OTHER_DNS4.to_string();
    for (name, server, verdict, why) in [
        ("www.good.test", &server, "allow", "allows the name"),
        ("www.bad.test", &server, "deny", "no rule allows the name"),
        (
            "www.good.test",
            &elsewhere,
            "deny",
            "no rule is about this server",
        ),
    ] {
        asked.ask_for(
            i32::from(verdict == "deny"),
            SDP,
            &["explain", &own, name, "--server", server],
            &[&format!("endpoint {id}"), name, "*.good.test", verdict, why],
            &[json!({"who": "endpoint", "endpoint": id, "verdict": verdict})],
        );
    }
    asked.ask(
        SDP,
        &["explain", &number, "www.good.test", "--port", "53/TCP"],
        &["allow", "53/tcp"],
        &[json!({"endpoint": id, "protocol": "tcp", "verdict": "allow"})],
    );
    asked.fails(SDP, &["explain", "65000", "www.good.test"], "65000");
    asked.fails(SDP, &["policy", "--endpoint", "65000"], "65000");
    asked.ask_for(
        1,
        SDP,
        &["explain", "10.77.0.99", "www.good.test"],
        &["unknown", "deny"],
        &[json!({"who": "unknown", "verdict": "deny"})],
    );
}

fn wrong_numbers(asked: &mut Asked<'_>) {
    let root = asked.lab.bpf_root().display().to_string();
    asked.fails(AGENT, &["endpoint", "get", "65000"], "65000");
    asked.fails(AGENT, &["endpoint", "remove", "65000"], "65000");
    asked.fails(AGENT, &["identity", "get", "1"], "no identity 1");
    let arguments = ["bpf", "policy", "list", "65000", "--bpf-root", &root];
    asked.fails(AGENT, &arguments, "cilium_policy_v2_65000");
    asked.fails(
        AGENT,
        &["bpf", "ct", "list", "--bpf-root", "/nowhere"],
        "/nowhere",
    );
}

/// Learned names are removed, and their addresses close.
fn cleaning(lab: &Lab, id: u64) -> Result<()> {
    let clean = ["fqdn", "cache", "clean"];
    let none = text(
        lab,
        AGENT,
        &[&clean[..], &["--matchpattern", "*.a.test"]].concat(),
        0,
    )?;
    ensure!(none.contains("forgot 0 of 2"), "{none}");
    lab.a.expect_open(at(web4(10), 80))?;
    let one = text(
        lab,
        AGENT,
        &[&clean[..], &["--matchpattern", "*.good.test"]].concat(),
        0,
    )?;
    ensure!(one.contains("forgot 2 of 2"), "{one}");
    eventually("the address closes", SOON, || {
        lab.a.expect_closed(at(web4(10), 80))
    })?;
    let left = lab.agent_json(&["fqdn", "cache", "list"])?;
    ensure!(left == json!([]), "{left}");

    lab.a
        .ask(&Query::a("www.good.test", DNS4))?
        .expect(web4(10))?;
    let listed = lab.agent_json(&["fqdn", "cache", "list"])?;
    ensure!(has(&listed, &json!({"endpoint": id})), "{listed}");
    let all = parsed(lab, AGENT, &clean, 0)?;
    ensure!(
        has(&all, &json!({"message": "forgot 1 of 1 learned addresses"})),
        "{all}"
    );
    Ok(())
}

/// A removed endpoint is not in the map, and is unrestricted again.
fn removing(lab: &Lab, id: u64) -> Result<()> {
    lab.a.expect_closed(at(web4(11), 80))?;
    let removed = text(lab, AGENT, &["endpoint", "remove", &id.to_string()], 0)?;
    ensure!(removed.contains("removed"), "{removed}");
    let own = json!({"address": lab.a.v4.to_string()});
    let listed = lab.bpf_json(&["lxc", "list"])?;
    ensure!(!has(&listed, &own), "{listed}");
    lab.a.expect_open(at(web4(11), 80))?;

    let number = lab.add_endpoint(&lab.a, holdfast_e2e::policy::WEB)?;
    lab.a.expect_closed(at(web4(11), 80))?;
    let listed = lab.agent_json(&["endpoint", "list"])?;
    let key = listed
        .as_array()
        .and_then(|list| {
            list.iter()
                .find(|one| one.get("id") == Some(&json!(number)))
        })
        .and_then(|one| one.get("key"))
        .and_then(Value::as_str)
        .context("key")?;
    let removed = parsed(lab, AGENT, &["endpoint", "remove", key], 0)?;
    ensure!(
        has(&removed, &json!({"message": format!("removed {key}")})),
        "{removed}"
    );
    lab.a.expect_open(at(web4(11), 80))
}
