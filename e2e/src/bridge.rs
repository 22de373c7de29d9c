//! A Linux bridge on the lab's node, with pods at its ports, as podman, docker, LXC, flannel and
//! k3s set it up.

use std::net::{Ipv4Addr, Ipv6Addr};

use anyhow::Result;

use crate::lab::Lab;
use crate::netns::Netns;
use crate::pod::Pod;
use crate::shell;

/// A bridge with the node's addresses 10.88.0.1 and fd88::1.
#[derive(Debug)]
pub struct Bridge<'l> {
    lab: &'l Lab,
    name: String,
}

impl<'l> Bridge<'l> {
    /// Makes a bridge with the node's addresses on it.
    pub fn new(lab: &'l Lab, name: &str) -> Result<Self> {
        let bridge = Self::without_address(lab, name)?;
        lab.node.batch(&format!(
            "address add 10.88.0.1/24 dev {name}\naddress add fd88::1/64 dev {name} nodad"
        ))?;
        Ok(bridge)
    }

    /// Makes a bridge without addresses of the node.
    pub fn without_address(lab: &'l Lab, name: &str) -> Result<Self> {
        lab.node.batch(&format!(
            "link add {name} type bridge forward_delay 0\nlink set {name} up"
        ))?;
        Ok(Self {
            lab,
            name: name.to_owned(),
        })
    }

    /// Makes a bridge, and moves the routed `pods` to ports of the bridge.
    pub fn of_pods(lab: &'l Lab, name: &str, pods: &[&Pod]) -> Result<Self> {
        let bridge = Self::without_address(lab, name)?;
        lab.node.batch(&format!(
            "address add 10.77.0.1/24 dev {name}\n\
             address add fd77::1/64 dev {name} nodad\n\
             address add fe80::1/64 dev {name} nodad"
        ))?;
        for pod in pods {
            let port = &pod.host_side;
            lab.node.batch(&format!(
                "route del {}/32 dev {port}\n\
                 route del {}/128 dev {port}\n\
                 address del fe80::1/64 dev {port}\n\
                 link set {port} master {name}",
                pod.v4, pod.v6
            ))?;
        }
        lab.node.settled()?;
        Ok(bridge)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// A pod at a port of the bridge. Its addresses end in `host`.
    pub fn add_pod(&self, name: &str, host: u8) -> Result<Pod> {
        self.add_port(name, host, None)
    }

    /// Like [`Self::add_pod`], with the MAC address `mac` on the host side.
    pub fn add_port(&self, name: &str, host: u8, mac: Option<&str>) -> Result<Pod> {
        let netns = Netns::create(format!("{}-{name}", self.lab.name()))?;
        let host_side = format!("lxc{name}");
        let node = self.lab.node.name();
        let mut arguments = vec!["link", "add", &host_side];
        if let Some(mac) = mac {
            arguments.extend(["address", mac]);
        }
        arguments.extend(["netns", node, "type", "veth"]);
        arguments.extend(["peer", "name", "eth0", "netns", netns.name()]);
        shell::run("ip", &arguments)?;
        let v4 = Ipv4Addr::new(10, 88, 0, host);
        let v6 = Ipv6Addr::new(0xfd88, 0, 0, 0, 0, 0, 0, u16::from(host));
        self.lab.node.batch(&format!(
            "link set {host_side} master {}\nlink set {host_side} up",
            self.name
        ))?;
        netns.batch(&format!(
            "address add {v4}/24 dev eth0\n\
             address add {v6}/64 dev eth0 nodad\n\
             link set eth0 up\n\
             route add default via 10.88.0.1\n\
             route add default via fd88::1"
        ))?;
        netns.settled()?;
        Ok(Pod {
            netns,
            v4,
            v6,
            host_side,
            answers: Default::default(),
        })
    }
}
