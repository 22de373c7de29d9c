//! `netpol run`: NetworkPolicies enforced with nftables, between pods that are routed and pods on a
//! bridge.

mod cluster;
mod conformance;
mod connections;
mod exports;
mod foreign;
mod frames;
mod handover;
mod refused;
mod render;
mod restart;
mod routed;
mod tunnels;

use std::net::{IpAddr, SocketAddr};

use anyhow::{Result, ensure};
use holdfast_e2e::netpol_run::SOON;
use holdfast_e2e::web::Web;
use holdfast_e2e::{Lab, Pod, eventually};
use serde_json::{Value, json};

/// Port of the servers of pods.
const PORT: u16 = 80;

/// Pods `a` and `b` of the lab, with their documents and servers in both.
struct Pods<'a> {
    lab: &'a Lab,
    _servers: Vec<Web>,
}

impl<'a> Pods<'a> {
    fn new(lab: &'a Lab) -> Result<Self> {
        Self::of(lab, &[("a", &lab.a), ("b", &lab.b)])
    }

    fn of(lab: &'a Lab, pods: &[(&str, &Pod)]) -> Result<Self> {
        for (name, pod) in pods {
            lab.write_pod(name, &json!({"app": name}), pod)?;
        }
        Self::serve(lab, pods)
    }

    fn without_documents(lab: &'a Lab) -> Result<Self> {
        Self::serve(lab, &[("a", &lab.a), ("b", &lab.b)])
    }

    fn serve(lab: &'a Lab, pods: &[(&str, &Pod)]) -> Result<Self> {
        let servers = pods
            .iter()
            .map(|(_, pod)| Web::start(&pod.netns, &addresses(pod), &[PORT, 8080], &[7777]));
        Ok(Self {
            lab,
            _servers: servers.collect::<Result<_>>()?,
        })
    }
}

fn addresses(pod: &Pod) -> [IpAddr; 2] {
    [pod.v4.into(), pod.v6.into()]
}

/// Both addresses of a pod with a port.
fn both(pod: &Pod, port: u16) -> [SocketAddr; 2] {
    addresses(pod).map(|address| SocketAddr::new(address, port))
}

/// Selects the pod of this name.
fn of(name: &str) -> Value {
    json!({"matchLabels": {"app": name}})
}

/// Waits until `from` reaches `to` on all of these addresses, or on none.
fn reaches(from: &Pod, to: &[SocketAddr], is_open: bool) -> Result<()> {
    for to in to {
        let what = format!("{} {to}: open = {is_open}", from.host_side);
        eventually(&what, SOON, || match is_open {
            true => from.expect_open(*to),
            false => from.expect_closed(*to),
        })?;
    }
    Ok(())
}

/// Waits until `status` has each of these texts.
fn status_has(lab: &Lab, texts: &[&str]) -> Result<()> {
    eventually("netpol status", SOON, || {
        let status = lab.netpol(&["status"])?;
        for text in texts {
            ensure!(status.contains(text), "no {text:?} in:\n{status}");
        }
        Ok(())
    })
}
