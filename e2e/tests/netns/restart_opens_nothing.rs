//! A restart of the agent opens nothing and gives no address to another pod, even if processes,
//! interfaces, addresses or documents were removed or damaged before it.
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::lab::{DNS4, UDP_PORT, at, web4};
use holdfast_e2e::policy::{CLIENT, WEB, cidr, egress, good_names};
use holdfast_e2e::{AgentOptions, Lab, Pod, Query, eventually, with_lab};
use serde_json::Value;

const SOON: Duration = Duration::from_secs(20);

/// Server that no policy here allows.
const DENIED: u8 = 12;

/// Cuts a file off after `bytes`, as a crash of its writer does.
fn tear(file: &Path, bytes: impl FnOnce(usize) -> usize) -> Result<()> {
    let text = std::fs::read(file).with_context(|| format!("read {}", file.display()))?;
    std::fs::write(file, text.get(..bytes(text.len())).unwrap_or_default())?;
    Ok(())
}

/// Allows one web server and nothing else.
fn only(app: &str, web: u8) -> String {
    egress(app, app, &cidr(&format!("203.0.113.{web}/32")))
}

/// Checks that the problems in the agent's status contain all of `parts`.
fn status_names(lab: &Lab, parts: &[&str]) -> Result<()> {
    let status = lab.agent_json(&["status"])?;
    let problems = status.get("problems").context("problems")?.to_string();
    for part in parts {
        let named = problems.contains(part);
        ensure!(named, "status does not name {part}: {problems}");
    }
    Ok(())
}

/// Checks that each pod reaches its allowed server, and not the server that policy denies to all.
fn each_reaches_its_server(pods: &[(&Pod, u8)]) -> Result<()> {
    for (pod, allowed) in pods {
        pod.expect_open(at(web4(*allowed), 80))?;
        pod.expect_closed(at(web4(DENIED), 80))?;
    }
    Ok(())
}

#[test]
fn a_pod_keeps_its_policy_when_its_process_interface_or_document_is_gone_at_a_restart() {
    with_lab(|lab| {
        lab.write_policy("web.yaml", &only("web", 10))?;
        lab.write_policy("client.yaml", &only("client", 11))?;
        let endpoints = lab.directory().join("endpoints/pods.yaml");
        let c = lab.add_pod("c", 13)?;
        let document = |pod: &Pod, ifname: &str| {
            let netns = pod.netns.name();
            format!("netns: {netns}\nifname: {ifname}\nlabels: [{CLIENT}]\n---\n")
        };
        let both = document(&lab.b, "eth0") + &document(&c, "eth0");
        std::fs::write(&endpoints, &both)?;
        let agent = lab.start_agent(&AgentOptions::default())?;
        let process = lab.a.process()?;
        let pid = process.pid();
        lab.agent(&["endpoint", "add", "--pid", &pid, "--labels", WEB])?;
        let pods = [(&lab.a, 10), (&lab.b, 11), (&c, 11)];
        for (pod, _) in pods {
            lab.endpoint_id(pod)?;
        }
        each_reaches_its_server(&pods)?;
        let shut = |pod: &Pod| pod.datagrams(at(web4(DENIED), UDP_PORT));
        let shut = [shut(&lab.a)?, shut(&lab.b)?, shut(&c)?];

        agent.kill_9()?;
        drop(process);
        lab.b.netns.batch(
            "link set eth0 down\n\
             link set eth0 name hidden0\n\
             link set hidden0 up\n\
             route add 10.77.0.1/32 dev hidden0\n\
             route add default via 10.77.0.1 dev hidden0",
        )?;
        // In the middle of the second document of the endpoints, and of a policy.
        tear(&endpoints, |length| {
            length - 4 - document(&c, "eth0").len() / 2
        })?;
        tear(&lab.policy_dir().join("web.yaml"), |length| length / 2)?;
        tear(&lab.policy_dir().join("client.yaml"), |_| 0)?;

        // Twice, because the second start uses the state that the first one found.
        for _ in 0..2 {
            let agent = lab.start_agent(&AgentOptions::default())?;
            each_reaches_its_server(&pods)?;
            status_names(
                lab,
                &["pods.yaml", "there is no process", "no interface eth0"],
            )?;
            let refused = lab.agent(&["policy", "get"])?;
            for file in ["web.yaml", "client.yaml"] {
                let named = refused.contains(&format!("refused: {file}"));
                ensure!(named, "{file} is not named: {refused}");
            }
            agent.kill_9()?;
        }
        for shut in shut {
            let (sent, echoed) = shut.finish();
            ensure!(sent > 0 && echoed == 0, "{echoed} datagrams came through");
        }

        // Documents that are removed while the agent is down take their policy with them.
        std::fs::write(&endpoints, document(&lab.b, "hidden0"))?;
        lab.remove_policy("web.yaml")?;
        lab.write_policy("client.yaml", &only("client", 11))?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        eventually("the pods without documents are open", SOON, || {
            lab.a.expect_open(at(web4(DENIED), 80))?;
            c.expect_open(at(web4(DENIED), 80))
        })?;
        lab.b.expect_closed(at(web4(DENIED), 80))?;
        lab.b.expect_open(at(web4(11), 80))
    });
}

/// The addresses of pods in the map of local endpoints.
fn addresses(lab: &Lab) -> Result<Vec<String>> {
    let list = lab.bpf_json(&["lxc", "list"])?;
    let list = list.as_array().context("no list")?;
    let of_pods = list.iter().filter(|e| e.get("endpoint") != Some(&0.into()));
    let address = |entry: &Value| entry.get("address")?.as_str().map(str::to_owned);
    Ok(of_pods.filter_map(address).collect())
}

#[test]
fn a_pod_that_claims_the_dns_servers_address_does_not_get_it_at_a_restart() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        // Pod b is behind a bridge, pod a is routed.
        lab.node.batch(
            "link add br0 type bridge\n\
             link set br0 up\n\
             link set lxcb master br0\n\
             route replace 10.77.0.12/32 dev br0\n\
             address add fe80::1/64 dev br0 nodad\n\
             route replace fd77::c/128 dev br0",
        )?;
        let programs = lab.start(&good_names())?;
        lab.add_endpoint(&lab.b, CLIENT)?;
        let before = addresses(lab)?;
        ensure!(before.len() == 4, "{before:?}");
        programs.agent.kill_9()?;
        for pod in [&lab.a, &lab.b] {
            pod.netns.batch(&format!(
                "address del {own}/32 dev eth0\n\
                 address add 192.0.2.53/32 dev eth0\n\
                 address add {own}/32 dev eth0\n\
                 route replace 10.77.0.1/32 dev eth0\n\
                 route replace default via 10.77.0.1 dev eth0 src {own}",
                own = pod.v4
            ))?;
        }
        let agent = lab.start_agent(&AgentOptions::default())?;
        lab.endpoint_id(&lab.a)?;
        lab.endpoint_id(&lab.b)?;
        ensure!(addresses(lab)? == before, "{:?}", addresses(lab)?);
        // A pod that has lost its own addresses gets no other address.
        agent.kill_9()?;
        for pod in [&lab.a, &lab.b] {
            pod.netns.batch(&format!(
                "address del {}/32 dev eth0\naddress del {}/128 dev eth0",
                pod.v4, pod.v6
            ))?;
        }
        let _agent = lab.start_agent(&AgentOptions::default())?;
        ensure!(addresses(lab)? == before, "{:?}", addresses(lab)?);
        status_names(lab, &["192.0.2.53", "routes none of"])?;
        for pod in [&lab.a, &lab.b] {
            pod.netns.batch(&format!(
                "address del 192.0.2.53/32 dev eth0\n\
                 address add {own}/32 dev eth0\n\
                 address add {six}/128 dev eth0 nodad\n\
                 route replace 10.77.0.1/32 dev eth0\n\
                 route replace default via 10.77.0.1 dev eth0",
                own = pod.v4,
                six = pod.v6
            ))?;
        }
        lab.connected("one")?;
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;
        Ok(())
    });
}
