//! Service addresses that the lab's node translates to the address of a server, as kube-proxy does
//! in its nftables and iptables modes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::Result;

use crate::lab::Lab;
use crate::shell;

/// Service number `host`, 10.96.0.0/24.
pub const fn service4(host: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 96, 0, host))
}

/// Service number `host`, fd96::/64.
pub const fn service6(host: u8) -> IpAddr {
    IpAddr::V6(Ipv6Addr::new(0xfd96, 0, 0, 0, 0, 0, 0, host as u16))
}

/// Translates each service address to a server, for port 53, both in packets that the node
/// forwards and in those that it sends.
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
