//! How Cilium's datapath returns answers of servers in the cluster to its proxy in transparent
//! mode. It uses the conntrack entry of the pod's own query, so only answers to the address and
//! port of that query reach the proxy. Every other answer to a pod's address goes to the pod.
//!
//! ```text
//! pod 10.77.0.11:40000 ─► proxy        makes the entry (proxy_redirect)
//! server :53 ─► 10.77.0.11:40000       has an entry: marked 0x200, to the proxy
//! server :53 ─► 10.77.0.11:51234       has none: to the pod, which drops it
//! ```

use std::net::IpAddr;

use anyhow::Result;

use crate::lab::Lab;
use crate::shell;

/// Which answers bypass netfilter. There, a rule would recognise them by their socket alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routing {
    /// Answers of pods on the same node.
    Native,
    /// Answers of every server, on this node and on other nodes.
    Vxlan,
}

/// The rule of Cilium's iptables that recognises answers by their socket.
const SOCKET_RULE: &str = "iifname != lo meta mark & 0xf00 != { 0xe00, 0xf00, 0x800 } \
    meta l4proto { tcp, udp } socket transparent 1 meta mark set 0x200";

/// Makes the node return answers as Cilium's datapath does.
pub fn return_answers(lab: &Lab, routing: Routing) -> Result<()> {
    let judged = match routing {
        Routing::Native => "iifname \"lxc*\"",
        Routing::Vxlan => "iifname != lo",
    };
    let mut sets = String::new();
    let mut entries = String::new();
    let mut answers = String::new();
    for (family, address, pods) in [
        ("ip", "ipv4_addr", "10.77.0.0/24"),
        ("ip6", "ipv6_addr", "fd77::/64"),
    ] {
        sets += &format!(
            "set {family}_flows {{ type {address} . inet_service . {address} . inet_service . \
             inet_proto; flags dynamic, timeout; timeout 60s; }}\n"
        );
        entries += &format!(
            "iifname \"lxc*\" meta l4proto {{ tcp, udp }} th dport 53 add @{family}_flows \
             {{ {family} saddr . th sport . {family} daddr . th dport . meta l4proto }}\n"
        );
        answers += &format!(
            "{judged} {family} daddr {pods} meta l4proto {{ tcp, udp }} \
             {family} daddr . th dport . {family} saddr . th sport . meta l4proto \
             @{family}_flows meta mark set 0x200 accept\n\
             {judged} {family} daddr {pods} meta l4proto {{ tcp, udp }} th sport 53 drop\n"
        );
    }
    let rules = format!(
        "table inet cilium {{\n{sets}\
         chain entries {{ type filter hook prerouting priority mangle - 2\n{entries}}}\n\
         chain answers {{ type filter hook prerouting priority mangle - 1\n{answers}\
         {SOCKET_RULE}\n}}\n}}\n"
    );
    shell::feed(lab.node.command("nft").args(["-f", "-"]), &rules).map(|_| ())
}

/// Whether the entry of a UDP query exists.
pub fn has_entry(lab: &Lab, pod: (IpAddr, u16), server: IpAddr) -> Result<bool> {
    let family = if pod.0.is_ipv4() { "ip" } else { "ip6" };
    let set = format!("{family}_flows");
    let found = lab
        .node
        .run("nft", &["list", "set", "inet", "cilium", &set])?;
    let entry = format!("{} . {} . {server} . 53 . udp", pod.0, pod.1);
    Ok(found.contains(&entry))
}
