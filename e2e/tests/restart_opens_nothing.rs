//! A restart of the agent opens nothing and gives no address to another pod, whatever happened
//! to processes, interfaces, addresses and documents meanwhile.
use anyhow::{Context, Result, ensure};
use holdfast_e2e::lab::{DNS4, web4};
use holdfast_e2e::policy::{CLIENT, good_names};
use holdfast_e2e::{AgentOptions, Lab, Query, with_lab};
use serde_json::Value;

fn problems(lab: &Lab) -> Result<String> {
    let status = lab.agent_json(&["status"])?;
    Ok(status.get("problems").context("problems")?.to_string())
}

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
        // Without its own address a pod has no more.
        agent.kill_9()?;
        for pod in [&lab.a, &lab.b] {
            pod.netns.batch(&format!(
                "address del {}/32 dev eth0\naddress del {}/128 dev eth0",
                pod.v4, pod.v6
            ))?;
        }
        let _agent = lab.start_agent(&AgentOptions::default())?;
        ensure!(addresses(lab)? == before, "{:?}", addresses(lab)?);
        let said = problems(lab)?;
        let named = said.contains("192.0.2.53") && said.contains("routes none of");
        ensure!(named, "status does not name the address: {said}");
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
