//! Ports by name: packets go to the port with the receiver's name, and follow it when it changes.
use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::dns::server::DnsServer;
use holdfast_e2e::lab::{at, web4};
use holdfast_e2e::policy::{CLIENT, WEB, egress, names};
use holdfast_e2e::web::Web;
use holdfast_e2e::{AgentOptions, Lab, Pod, Query, SdpOptions, eventually, with_lab};
use serde_json::Value;

const SOON: Duration = Duration::from_secs(10);

/// Web may reach port `http` of clients, and clients may reach port `in` of web.
const POLICY: &str = r#"apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: by-name, namespace: default}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toEndpoints: [{matchLabels: {app: client}}]
    toPorts: [{ports: [{port: http, protocol: TCP}]}]
  ingress:
  - fromEndpoints: [{matchLabels: {app: client}}]
    toPorts: [{ports: [{port: in, protocol: TCP}]}]
"#;

/// Adds a pod, or changes its labels and named ports.
fn add(lab: &Lab, pod: &Pod, labels: &str, named: &[&str]) -> Result<()> {
    let netns = pod.netns.name();
    let mut arguments = vec!["endpoint", "add", "--netns", netns, "--labels", labels];
    for port in named {
        arguments.extend(["--named-port", port]);
    }
    lab.agent(&arguments)?;
    lab.endpoint_id(pod)?;
    lab.proxies_in_step()
}

/// Warnings of `status` about port names in policies.
fn unknown(lab: &Lab) -> Result<Vec<String>> {
    let status = lab.agent_json(&["status"])?;
    let warnings = status.get("warnings").and_then(Value::as_array);
    let warnings = warnings.with_context(|| format!("no warnings: {status}"))?;
    let texts = warnings.iter().filter_map(Value::as_str);
    let about = texts.filter(|text| text.contains("port name"));
    Ok(about.map(str::to_owned).collect())
}

#[test]
fn ports_by_name_follow_their_pods() {
    with_lab(|lab| {
        let own: [[IpAddr; 2]; 2] = [&lab.a, &lab.b].map(|pod| [pod.v4.into(), pod.v6.into()]);
        let _a = Web::start(&lab.a.netns, &own[0], &[90, 91], &[])?;
        let _b = Web::start(&lab.b.netns, &own[1], &[80, 8080], &[])?;
        lab.write_policy("by-name.yaml", POLICY)?;
        let agent = lab.start_agent(&AgentOptions::default())?;
        add(lab, &lab.a, WEB, &["in=90/TCP"])?;
        add(lab, &lab.b, CLIENT, &["http=80"])?;
        for (a, b) in own[0].into_iter().zip(own[1]) {
            lab.a.expect_open(at(b, 80))?;
            lab.a.expect_closed(at(b, 8080))?;
            lab.b.expect_open(at(a, 90))?;
            lab.b.expect_closed(at(a, 91))?;
        }
        ensure!(unknown(lab)?.is_empty(), "{:?}", unknown(lab)?);
        let (a, b) = (own[0][0], own[1][0]);
        let moved = lab.a.stream(at(b, 80))?;
        let stays = lab.b.stream(at(a, 90))?;

        // The name now means another port, which gives the pod another identity.
        add(lab, &lab.b, CLIENT, &["http=8080", "other=80"])?;
        eventually("the name has moved", SOON, || {
            lab.a.expect_closed(at(b, 80))?;
            lab.a.expect_open(at(b, 8080))
        })?;
        moved.expect_cut(SOON)?;
        stays.expect_alive()?;

        let identities = lab.identities()?;
        let streams = [lab.a.stream(at(b, 8080))?, stays];
        agent.kill_9()?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        assert_eq!(lab.identities()?, identities, "identities changed");
        for stream in &streams {
            stream.expect_alive()?;
        }
        for (a, b) in own[0].into_iter().zip(own[1]) {
            lab.a.expect_open(at(b, 8080))?;
            lab.a.expect_closed(at(b, 80))?;
            lab.b.expect_open(at(a, 90))?;
        }

        add(lab, &lab.b, CLIENT, &[])?;
        eventually("no pod has the name", SOON, || {
            lab.a.expect_closed(at(b, 8080))
        })?;
        let [text] = &unknown(lab)?[..] else {
            panic!("one name is not known: {:?}", unknown(lab)?);
        };
        ensure!(
            text.contains("spec.egress[0]") && text.contains("port name http is not known"),
            "{text}"
        );
        let [from, to] = [&lab.a, &lab.b].map(|pod| lab.endpoint_id(pod));
        let (from, to) = (from?.to_string(), to?.to_string());
        let target = at(b, 8080).to_string();
        let why = ["why", &from, &target];
        let trace = [
            "policy", "trace", "--from", &from, "--to", &to, "--port", "8080",
        ];
        for command in [&why[..], &trace[..]] {
            let Err(said) = lab.agent(command) else {
                panic!("{command:?} says that it passes");
            };
            let said = format!("{said:#}");
            ensure!(
                said.contains("port name http is not known"),
                "{command:?}: {said}"
            );
        }
        Ok(())
    });
}

#[test]
fn dns_by_port_name_goes_through_the_proxy() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        let server = lab.b.v4.into();
        let _one = DnsServer::start(&lab.b.netns, &[server], &lab.zone)?;
        let _two = DnsServer::start_on(&lab.b.netns, &[server], 5353, &lab.zone)?;
        let dns = r#"
- toEndpoints: [{matchLabels: {app: client}}]
  toPorts:
  - ports: [{port: dns}, {port: dns-tcp}]
    rules: {dns: [{matchPattern: "*.good.test"}]}
"#;
        lab.write_policy(
            "web.yaml",
            &egress(
                "good-names",
                "web",
                &(dns.to_owned() + &names("*.good.test")),
            ),
        )?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        let _sdp = lab.start_sdp(&SdpOptions::default())?;
        add(lab, &lab.a, WEB, &[])?;
        lab.a.expect_closed(at(web4(10), 80))?;
        add(lab, &lab.b, CLIENT, &["dns=53/UDP", "dns-tcp=53/TCP"])?;

        let good = Query::a("www.good.test", server);
        eventually("the rules are there", SOON, || {
            lab.a.ask(&good)?.expect(web4(10)).map(drop)
        })?;
        lab.a.ask(&good.clone().tcp())?.expect(web4(10))?;
        lab.a.expect_open(at(web4(10), 80))?;
        let bad = Query::a("www.bad.test", server);
        lab.a.ask(&bad)?.expect_refused()?;
        let early = good.clone().port(5353).within(Duration::from_millis(300));
        ensure!(lab.a.ask(&early).is_err(), "port 5353 has no name yet");

        // The server's port changes, and queries follow its name.
        add(lab, &lab.b, CLIENT, &["dns=5353/UDP", "dns-tcp=5353/TCP"])?;
        eventually("the rules have moved", SOON, || {
            lab.a
                .ask(&good.clone().port(5353))?
                .expect(web4(10))
                .map(drop)
        })?;
        lab.a.ask(&bad.port(5353))?.expect_refused()?;
        let late = good.within(Duration::from_millis(300));
        ensure!(lab.a.ask(&late).is_err(), "port 53 has no name any more");
        Ok(())
    });
}
