//! The side that another node judges, with the command that answers there.

use std::net::IpAddr;

use agent_core::{
    core::why::{elsewhere::Elsewhere, peer_found::NodePortFound},
    policy::trace::{FlowDirection, Port},
};

use super::{Walk, hop};
use crate::admin::model::{Hop, HopState, UncheckedView};

impl Walk<'_> {
    /// The part of the verdict that a pod's own node gives: ingress at this port of a receiver, or egress of a
    /// sender.
    pub(super) fn unchecked(
        &self,
        at: IpAddr,
        elsewhere: &Elsewhere,
        port: Option<Port>,
    ) -> UncheckedView {
        let pod = elsewhere.pod.clone().unwrap_or_else(|| at.to_string());
        let (direction, flag) = match self.question.direction {
            FlowDirection::Egress => ("ingress", " --ingress"),
            FlowDirection::Ingress => ("egress", ""),
        };
        let endpoint = &self.found.endpoint;
        let own = endpoint.ipv4.iter().chain(&endpoint.ipv6);
        let mut own = own.filter_map(|own| own.parse::<IpAddr>().ok());
        let own = own.find(|own| own.is_ipv4() == at.is_ipv4());
        let command = own.map(|own| {
            let target = match (port, own) {
                (None, _) => own.to_string(),
                (Some(port), IpAddr::V4(_)) => format!("{own}:{port}"),
                (Some(port), IpAddr::V6(_)) => format!("[{own}]:{port}"),
            };
            format!("holdfast-agent why {pod} {target}{flag}")
        });
        UncheckedView {
            command,
            ..without_command(direction, at, elsewhere)
        }
    }

    /// The hop of a pod of another node.
    pub(super) fn other_node(&self, at: IpAddr, unchecked: &UncheckedView) -> Hop {
        let name = self.other_role();
        let pod = unchecked.pod.as_ref();
        let pod = pod.map_or("the pod".to_owned(), |pod| format!("pod {pod}"));
        let text = format!("{pod} is of another node: {}", not_checked(unchecked));
        hop(
            name,
            Some(at),
            HopState::Unknown,
            text,
            &run_there(unchecked),
        )
    }

    /// The hop of a port of another node.
    pub(super) fn other_node_port(&self, at: IpAddr, found: &NodePortFound) -> Option<Hop> {
        let elsewhere = found.elsewhere.as_ref()?;
        let text = format!(
            "the port leads to Service {}: {}",
            found.service.key,
            not_checked(&node_port_unchecked(at, elsewhere))
        );
        let remedy = "ask the nodes of the pods behind it. They may see that node as the sender";
        Some(hop("receiver", Some(at), HopState::Unknown, text, remedy))
    }
}

/// What is not checked here behind a port of another node.
pub(super) fn node_port_unchecked(at: IpAddr, elsewhere: &Elsewhere) -> UncheckedView {
    without_command("ingress", at, elsewhere)
}

fn without_command(direction: &str, at: IpAddr, elsewhere: &Elsewhere) -> UncheckedView {
    UncheckedView {
        direction: direction.to_owned(),
        address: at.to_string(),
        pod: elsewhere.pod.clone(),
        node: elsewhere.node.clone(),
        node_addresses: elsewhere
            .node_addresses
            .iter()
            .map(IpAddr::to_string)
            .collect(),
        command: None,
    }
}

/// Text such as `ingress at node n2 (192.0.2.7) is not checked here`.
pub(super) fn not_checked(unchecked: &UncheckedView) -> String {
    let addresses = match unchecked.node_addresses.as_slice() {
        [] => String::new(),
        some => format!(" ({})", some.join(", ")),
    };
    let node = match &unchecked.node {
        Some(node) => format!("node {node}{addresses}"),
        None => "its node".to_owned(),
    };
    format!("{} at {node} is not checked here", unchecked.direction)
}

pub(super) fn run_there(unchecked: &UncheckedView) -> String {
    let node = unchecked.node.as_ref();
    let node = node.map_or("the pod's node".to_owned(), |node| format!("node {node}"));
    let command = unchecked.command.as_ref();
    command.map_or_else(String::new, |command| format!("run on {node}: {command}"))
}
