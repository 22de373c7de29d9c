//! All endpoints share the programs: each packet is judged with the settings and the policy of the
//! endpoint behind its interface. A packet without such an endpoint is dropped.
use std::process::Command;

use agent_core::datapath::{
    attachment::Attachment,
    map_query::{MapEntries, MapQuery, ProgramFault},
    plan::{Datapath as _, Step},
};
use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::kernel::{ENDPOINT, From, Kernel, PEER, PEER4, POD4, attachment, with_kernel};
use holdfast_e2e::packet::{ACK, Packet, tcp, udp};
use nix::net::if_::if_nametoindex;
use shared_maps::EndpointId;
use shared_maps::event::Reason;
use shared_maps::policy::{EGRESS, PolicyKey, PolicyValue};

/// Numbers that one interface has one after another, one for each table of slots.
const REUSED: [u32; 2] = [4711, 1_000_004_711];

fn ip(arguments: &str) -> Result<()> {
    let status = Command::new("ip").args(arguments.split(' ')).status()?;
    ensure!(status.success(), "ip {arguments}: {status}");
    Ok(())
}

fn frame(port: u16) -> Vec<u8> {
    Packet::new(POD4, PEER4, udp(4000, port)).frame()
}

fn of(endpoint: u16, ifindex: u32) -> Attachment {
    Attachment {
        endpoint: EndpointId(endpoint),
        ..attachment(ifindex)
    }
}

fn allow(kernel: &mut Kernel, endpoint: u16, port: u16) -> Result<()> {
    let key = PolicyKey::new(PEER, EGRESS, 17, port, 16);
    let step = Step::SetPolicy(EndpointId(endpoint), key, PolicyValue::allow(key));
    Ok(kernel.datapath().apply(&step)?)
}

fn faults(kernel: &mut Kernel, wanted: &Attachment) -> Result<Vec<ProgramFault>> {
    let query = MapQuery::Programs(vec![wanted.clone()]);
    match kernel.datapath().read_entries(&query)? {
        MapEntries::Programs(mut found) => Ok(found.pop().context("no answer")?.1),
        other => anyhow::bail!("{other:?}"),
    }
}

#[test]
fn nothing_passes_without_the_settings_of_an_endpoint() {
    with_kernel(|k| {
        k.allow(PEER, EGRESS, 17, 80)?;
        assert_eq!(k.send(&frame(80))?.reason, Reason::Allowed);
        k.datapath().apply(&Step::Detach(ENDPOINT))?;
        for frame in [
            frame(80),
            b"\xff\xff\xff\xff\xff\xff\x02\x42\x0a\x09\x01\x02\x08\x06".to_vec(),
        ] {
            assert_eq!(k.send(&frame)?.reason, Reason::NoEndpoint);
        }
        let answer = Packet::new(PEER4, POD4, udp(80, 4000)).frame();
        for from in [From::Outside, From::Local(0)] {
            assert_eq!(k.receive(&answer, from)?.reason, Reason::NoEndpoint);
        }
        Ok(())
    });
}

#[test]
fn each_of_many_endpoints_has_its_own_policy_and_a_new_one_none_of_its_predecessors() {
    with_kernel(|k| {
        for round in 0..3 {
            for endpoint in 100..140 {
                let id = EndpointId(endpoint);
                k.datapath().apply(&Step::CreatePolicyMap(id))?;
                k.reload(&of(endpoint, 1))?;
                let own = 1000 + endpoint + 100 * round;
                assert_eq!(k.send(&frame(own))?.reason, Reason::PolicyDenied);
                allow(k, endpoint, own)?;
                assert_eq!(k.send(&frame(own))?.reason, Reason::Allowed);
                for other in [own - 1, own + 1, own - 100] {
                    assert_eq!(k.send(&frame(other))?.reason, Reason::PolicyDenied);
                }
            }
            // These endpoints were replaced by others on the interface, and still have their
            // policies.
            for endpoint in 100..140 {
                k.reload(&of(endpoint, 1))?;
                let own = 1000 + endpoint + 100 * round;
                assert_eq!(k.send(&frame(own))?.reason, Reason::Allowed);
                assert_eq!(k.send(&frame(own - 1))?.reason, Reason::PolicyDenied);
            }
            for endpoint in 100..140 {
                let id = EndpointId(endpoint);
                k.datapath().apply(&Step::Detach(id))?;
                k.datapath().apply(&Step::RemovePolicyMap(id))?;
            }
        }
        Ok(())
    });
}

#[test]
fn new_settings_replace_the_old_ones_in_both_directions_at_once() {
    with_kernel(|k| {
        k.allow(PEER, EGRESS, 6, 80)?;
        let segment = Packet::new(POD4, PEER4, tcp(4000, 80, ACK)).frame();
        assert_eq!(k.send(&segment)?.reason, Reason::Allowed);
        let mut other = attachment(1);
        other.ipv4 = Some([10, 9, 1, 77].into());
        k.reload(&other)?;
        assert_eq!(k.send(&segment)?.reason, Reason::SpoofedSource);
        k.reload(&attachment(1))?;
        assert_eq!(k.send(&segment)?.reason, Reason::Allowed);
        Ok(())
    });
}

#[test]
fn a_reused_interface_number_is_the_new_endpoints() {
    with_kernel(|k| {
        for number in REUSED {
            reuse(k, number)?;
        }
        Ok(())
    });
}

fn reuse(k: &mut Kernel, number: u32) -> Result<()> {
    let add = format!("link add hf0 index {number} type veth peer name hf1");
    ip(&add)?;
    let (before, after) = (of(20, number), of(21, number));
    for wanted in [&before, &after] {
        let step = Step::CreatePolicyMap(wanted.endpoint);
        k.datapath().apply(&step)?;
    }
    k.datapath().apply(&Step::Attach(before.clone()))?;
    assert_eq!(faults(k, &before)?, []);

    // An existing interface belongs to one endpoint only.
    let error = k.datapath().apply(&Step::Attach(after.clone()));
    let error = error.expect_err("two endpoints").to_string();
    assert!(error.contains("endpoint 20 is behind it"), "{error}");
    assert_eq!(faults(k, &before)?, []);

    ip("link del hf0")?;
    ip(&add)?;
    k.datapath().apply(&Step::Attach(after.clone()))?;
    assert_eq!(faults(k, &after)?, []);
    // Late steps of the agent for the former endpoint do not affect the new endpoint.
    let error = k.datapath().apply(&Step::Attach(before.clone()));
    let error = error.expect_err("it is gone").to_string();
    assert!(error.contains("endpoint 21 is behind it"), "{error}");
    assert_eq!(faults(k, &after)?, []);
    k.datapath().apply(&Step::Detach(before.endpoint))?;
    assert_eq!(faults(k, &after)?, []);
    k.datapath().apply(&Step::Detach(after.endpoint))?;
    ip("link del hf0")
}

#[test]
fn an_endpoint_that_moves_leaves_nothing_at_its_former_interface() {
    with_kernel(|k| {
        ip("link add hf0 type veth peer name hf1")?;
        ip("link add hf2 type veth peer name hf3")?;
        let at = |name: &str| -> Result<Attachment> { Ok(attachment(if_nametoindex(name)?)) };
        k.datapath().apply(&Step::Attach(at("hf0")?))?;
        k.datapath().apply(&Step::Attach(at("hf2")?))?;
        assert_eq!(faults(k, &at("hf2")?)?, []);
        assert!(!faults(k, &at("hf0")?)?.is_empty());
        // Another endpoint may take the first interface.
        let successor = of(21, if_nametoindex("hf0")?);
        k.datapath()
            .apply(&Step::CreatePolicyMap(successor.endpoint))?;
        k.datapath().apply(&Step::Attach(successor.clone()))?;
        assert_eq!(faults(k, &successor)?, []);
        k.datapath().apply(&Step::Detach(ENDPOINT))?;
        assert_eq!(faults(k, &successor)?, []);
        Ok(())
    });
}
