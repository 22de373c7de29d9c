//! Two nodes and a router between them, each with an agent and a BPF root of its own.
//!
//! ```text
//!  pods ── node of lab one ── up0 ── world of lab one ── r1 ── node of lab two ── pods
//! ```
//! Each node belongs to a [`Lab`]. The world of the first lab is the router. The labs' own pods
//! (hosts 11 and 12) have the same addresses on both nodes, so tests use other pods.

use std::net::Ipv4Addr;

use anyhow::Result;

use crate::lab::{Lab, with_lab};
use crate::netns::Netns;
use crate::pod::Pod;
use crate::shell;

/// Address of the first node towards the router.
pub const NODE_ONE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
/// Address of the second node towards the router.
pub const NODE_TWO: Ipv4Addr = Ipv4Addr::new(192, 0, 9, 2);
/// Device of both nodes that leads to the router.
pub const DEVICE: &str = "up0";

/// Two nodes and a router.
#[derive(Debug)]
pub struct Fleet<'l> {
    pub one: &'l Lab,
    pub two: &'l Lab,
}

impl Fleet<'_> {
    /// The namespace between the nodes. Its interface `eth0` leads to the first one.
    pub fn router(&self) -> &Netns {
        &self.one.world
    }

    /// Adds a pod to the first node. The router sends packets for all pods without a route of their
    /// own to this node.
    pub fn pod_of_one(&self, name: &str, host: u8) -> Result<Pod> {
        self.one.add_pod(name, host)
    }

    /// Adds a pod to the second node.
    pub fn pod_of_two(&self, name: &str, host: u8) -> Result<Pod> {
        let pod = self.two.add_pod(name, host)?;
        self.router()
            .batch(&format!("route add {}/32 via {NODE_TWO}", pod.v4))?;
        Ok(pod)
    }
}

/// Runs `test` with two nodes.
pub fn with_fleet(test: impl FnOnce(&Fleet<'_>) -> Result<()>) {
    with_lab(|one| {
        with_lab(|two| {
            connect(one, two)?;
            test(&Fleet { one, two })
        });
        Ok(())
    });
}

/// Connects the second node to the first lab's world in place of the second lab's world.
fn connect(one: &Lab, two: &Lab) -> Result<()> {
    let router = &one.world;
    two.node.batch("link delete up0")?;
    shell::run(
        "ip",
        &[
            "link",
            "add",
            DEVICE,
            "netns",
            two.node.name(),
            "type",
            "veth",
            "peer",
            "name",
            "r1",
            "netns",
            router.name(),
        ],
    )?;
    router.batch("address add 192.0.9.1/24 dev r1\nlink set r1 up")?;
    two.node.batch(&format!(
        "address add {NODE_TWO}/24 dev {DEVICE}\nlink set {DEVICE} up\n\
         route add default via 192.0.9.1"
    ))?;
    router.sysctl(&[
        ("net.ipv4.ip_forward", "1"),
        ("net.ipv4.conf.all.rp_filter", "0"),
        ("net.ipv4.conf.eth0.rp_filter", "0"),
        ("net.ipv4.conf.r1.rp_filter", "0"),
    ])
}
