//! Service addresses that the lab's node translates to the address of a server, as kube-proxy does
//! in its nftables and iptables modes.

pub(crate) mod flows;
pub mod node_port;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::Result;

use crate::lab::Lab;
use crate::shell;

/// IPv4 address of a Service: host number `host` in 10.96.0.0/24.
pub const fn service4(host: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 96, 0, host))
}

/// IPv6 address of a Service: host number `host` in fd96::/64.
pub const fn service6(host: u8) -> IpAddr {
    IpAddr::V6(Ipv6Addr::new(0xfd96, 0, 0, 0, 0, 0, 0, host as u16))
}

/// Translates each service address to a server, for port 53, in packets that the node forwards and
/// in packets that it sends.
pub fn translate(lab: &Lab, services: &[(IpAddr, IpAddr)]) -> Result<()> {
    let mut rules = String::new();
    for (service, server) in services {
        let (family, server) = match server {
            IpAddr::V4(ip) => ("ip", ip.to_string()),
            IpAddr::V6(ip) => ("ip6", format!("[{ip}]")),
        };
        rules += &format!(
            "{family} daddr {service} meta l4proto {{ tcp, udp }} th dport 53 \
             dnat {family} to {server}:53\n"
        );
    }
    let table = format!(
        "table inet kube {{\n\
         chain services {{\n{rules}}}\n\
         chain pre {{ type nat hook prerouting priority -100; jump services; }}\n\
         chain out {{ type nat hook output priority -100; jump services; }}\n}}\n"
    );
    shell::feed(lab.node.command("nft").args(["-f", "-"]), &table)?;
    Ok(())
}

/// A port of a Service: the address and port that clients use, and where it leads.
#[derive(Clone, Debug)]
pub struct ServicePort {
    /// `tcp` or `udp`.
    pub protocol: &'static str,
    /// Address and port of the Service.
    pub at: SocketAddr,
    /// Addresses and ports of the pods. Without any, connections are refused.
    pub backends: Vec<SocketAddr>,
}

/// Translates Services as kube-proxy does. Each connection gets a random backend. If the client is
/// no pod, or is the backend itself, the source becomes the node's address. Without a backend,
/// connections are refused. Replaces the rules of an earlier call.
pub fn kube_proxy(lab: &Lab, ports: &[ServicePort]) -> Result<()> {
    let (mut chains, mut services, mut refused) = (String::new(), String::new(), String::new());
    for (n, port) in ports.iter().enumerate() {
        let (family, pods) = match port.at.ip() {
            IpAddr::V4(_) => ("ip", "10.77.0.0/24, 10.88.0.0/24"),
            IpAddr::V6(_) => ("ip6", "fd77::/64, fd88::/64"),
        };
        let (address, number, protocol) = (port.at.ip(), port.at.port(), port.protocol);
        let to = format!("{family} daddr {address} {protocol} dport {number}");
        if port.backends.is_empty() {
            refused += &format!("{to} reject\n");
            continue;
        }
        services += &format!("{to} goto service{n}\n");
        let mut picks = Vec::new();
        for (m, backend) in port.backends.iter().enumerate() {
            chains += &format!(
                "chain backend{n}x{m} {{\n\
                 {family} saddr {} meta mark set meta mark | 0x4000\n\
                 meta l4proto {protocol} dnat {family} to {backend}\n}}\n",
                backend.ip()
            );
            picks.push(format!("{m} : goto backend{n}x{m}"));
        }
        chains += &format!(
            "chain service{n} {{\n\
             {family} saddr != {{ {pods} }} meta mark set meta mark | 0x4000\n\
             numgen random mod {} vmap {{ {} }}\n}}\n",
            picks.len(),
            picks.join(", ")
        );
    }
    let table = format!(
        "table inet kube {{ }}\ndelete table inet kube\ntable inet kube {{\n{chains}\
         chain services {{\n{services}}}\n\
         chain refused {{\n{refused}}}\n\
         chain pre {{ type nat hook prerouting priority -100; jump services; }}\n\
         chain out {{ type nat hook output priority -100; jump services; }}\n\
         chain post {{ type nat hook postrouting priority 100; \
         meta mark & 0x4000 == 0x4000 masquerade; }}\n\
         chain forward {{ type filter hook forward priority 0; jump refused; }}\n\
         chain own {{ type filter hook output priority 0; jump refused; }}\n}}\n"
    );
    shell::feed(lab.node.command("nft").args(["-f", "-"]), &table)?;
    Ok(())
}
