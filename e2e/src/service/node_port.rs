//! Ports of the node that lead to a pod: NodePorts, translated as by kube-proxy in each of its
//! modes, and host ports, translated as by the CNI plugin portmap.

use std::net::SocketAddr;

use anyhow::Result;

use crate::lab::Lab;
use crate::shell;

/// Networks of the lab's pods.
const PODS: [[&str; 2]; 2] = [["10.77.0.0/24", "10.88.0.0/24"], ["fd77::/64", "fd88::/64"]];

/// Program and mode that write the translation rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// kube-proxy in its mode nftables.
    Nftables,
    /// kube-proxy in its mode iptables, with `iptables-nft`.
    IptablesNft,
    /// kube-proxy in its mode iptables, with `iptables-legacy`.
    IptablesLegacy,
}

/// Why a port of the node leads to a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A NodePort with `externalTrafficPolicy: Cluster`.
    Cluster,
    /// A NodePort with `externalTrafficPolicy: Local`.
    Local,
    /// A `hostPort` of the pod.
    HostPort,
}

/// A TCP port of the node.
#[derive(Clone, Copy, Debug)]
pub struct NodePort {
    pub kind: Kind,
    pub port: u16,
    /// Address and port of the pod.
    pub backend: SocketAddr,
}

/// Makes the node translate these ports, in place of the ports of an earlier call. Host ports are
/// always translated by iptables.
pub fn open(lab: &Lab, mode: Mode, ports: &[NodePort]) -> Result<()> {
    close(lab)?;
    for six in [false, true] {
        let of_family = |port: &&NodePort| port.backend.is_ipv6() == six;
        let (host, service): (Vec<NodePort>, Vec<NodePort>) = ports
            .iter()
            .filter(of_family)
            .partition(|port| port.kind == Kind::HostPort);
        let host = portmap(&host, six);
        match mode {
            Mode::Nftables => {
                shell::feed(
                    lab.node.command("nft").args(["-f", "-"]),
                    &nftables(&service, six),
                )?;
                restore(lab, "nft", six, &host)?;
            }
            Mode::IptablesNft => restore(lab, "nft", six, &(iptables(&service, six) + &host))?,
            Mode::IptablesLegacy => {
                restore(lab, "legacy", six, &(iptables(&service, six) + &host))?;
            }
        }
    }
    Ok(())
}

/// Removes all rules of this module.
fn close(lab: &Lab) -> Result<()> {
    for six in [false, true] {
        for backend in ["nft", "legacy"] {
            restore(lab, backend, six, "")?;
        }
        let family = if six { "ip6" } else { "ip" };
        let table = format!("table {family} kube-proxy {{ }}\ndelete table {family} kube-proxy\n");
        shell::feed(lab.node.command("nft").args(["-f", "-"]), &table)?;
    }
    Ok(())
}

/// Replaces all rules of the table `nat` in one family.
fn restore(lab: &Lab, backend: &str, six: bool, rules: &str) -> Result<()> {
    let program = format!("ip{}tables-{backend}-restore", if six { "6" } else { "" });
    let mut command = lab.node.command(&program);
    shell::feed(&mut command, &format!("*nat\n{rules}COMMIT\n"))?;
    Ok(())
}

fn iptables(ports: &[NodePort], six: bool) -> String {
    let mut rules = String::from(
        ":KUBE-SERVICES - [0:0]\n:KUBE-NODEPORTS - [0:0]\n:KUBE-POSTROUTING - [0:0]\n\
         :KUBE-MARK-MASQ - [0:0]\n\
         -A PREROUTING -j KUBE-SERVICES\n-A OUTPUT -j KUBE-SERVICES\n\
         -A POSTROUTING -j KUBE-POSTROUTING\n\
         -A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS\n\
         -A KUBE-MARK-MASQ -j MARK --or-mark 0x4000\n\
         -A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN\n\
         -A KUBE-POSTROUTING -j MARK --xor-mark 0x4000\n\
         -A KUBE-POSTROUTING -j MASQUERADE --random-fully\n",
    );
    for NodePort {
        kind,
        port,
        backend,
    } in ports
    {
        let ip = backend.ip();
        rules += &format!(
            ":KUBE-EXT-{port} - [0:0]\n:KUBE-SVC-{port} - [0:0]\n:KUBE-SEP-{port} - [0:0]\n\
             -A KUBE-NODEPORTS -p tcp -m tcp --dport {port} -j KUBE-EXT-{port}\n"
        );
        if *kind == Kind::Cluster {
            rules += &format!("-A KUBE-EXT-{port} -j KUBE-MARK-MASQ\n");
        } else {
            for pods in PODS[usize::from(six)] {
                rules += &format!("-A KUBE-EXT-{port} -s {pods} -j KUBE-SVC-{port}\n");
            }
            rules += &format!(
                "-A KUBE-EXT-{port} -m addrtype --src-type LOCAL -j KUBE-MARK-MASQ\n\
                 -A KUBE-EXT-{port} -m addrtype --src-type LOCAL -j KUBE-SVC-{port}\n"
            );
        }
        rules += &format!(
            "-A KUBE-EXT-{port} -j KUBE-SVC-{port}\n\
             -A KUBE-SVC-{port} -j KUBE-SEP-{port}\n\
             -A KUBE-SEP-{port} -s {ip} -j KUBE-MARK-MASQ\n\
             -A KUBE-SEP-{port} -p tcp -m tcp -j DNAT --to-destination {backend}\n"
        );
    }
    rules
}

fn portmap(ports: &[NodePort], six: bool) -> String {
    let mut rules = String::from(
        ":CNI-HOSTPORT-DNAT - [0:0]\n:CNI-HOSTPORT-SETMARK - [0:0]\n:CNI-HOSTPORT-MASQ - [0:0]\n\
         -A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT\n\
         -A OUTPUT -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT\n\
         -A POSTROUTING -j CNI-HOSTPORT-MASQ\n\
         -A CNI-HOSTPORT-SETMARK -j MARK --set-xmark 0x2000/0x2000\n\
         -A CNI-HOSTPORT-MASQ -m mark --mark 0x2000/0x2000 -j MASQUERADE\n",
    );
    for NodePort { port, backend, .. } in ports {
        rules += &format!(":CNI-DN-{port} - [0:0]\n");
        let to = format!("-p tcp -m tcp --dport {port}");
        rules += &format!("-A CNI-HOSTPORT-DNAT {to} -j CNI-DN-{port}\n");
        for pods in PODS[usize::from(six)] {
            rules += &format!("-A CNI-DN-{port} -s {pods} {to} -j CNI-HOSTPORT-SETMARK\n");
        }
        rules += &format!("-A CNI-DN-{port} {to} -j DNAT --to-destination {backend}\n");
    }
    rules
}

fn nftables(ports: &[NodePort], six: bool) -> String {
    let family = if six { "ip6" } else { "ip" };
    let (mut chains, mut elements) = (String::new(), Vec::new());
    for NodePort {
        kind,
        port,
        backend,
    } in ports
    {
        elements.push(format!("tcp . {port} : goto external-{port}"));
        let masquerade = if *kind == Kind::Cluster {
            "jump mark-for-masquerade\n".to_owned()
        } else {
            let pods = PODS[usize::from(six)].join(", ");
            format!(
                "{family} saddr {{ {pods} }} goto service-{port}\n\
                 fib saddr type local jump mark-for-masquerade\n"
            )
        };
        let own = backend.ip();
        chains += &format!(
            "chain endpoint-{port} {{\n{family} saddr {own} jump mark-for-masquerade\n\
             meta l4proto tcp dnat to {backend}\n}}\n\
             chain service-{port} {{ numgen random mod 1 vmap {{ 0 : goto endpoint-{port} }}; }}\n\
             chain external-{port} {{\n{masquerade}goto service-{port}\n}}\n"
        );
    }
    let elements = elements.join(", ");
    format!(
        "table {family} kube-proxy {{\n\
         chain mark-for-masquerade {{ meta mark set meta mark or 0x4000; }}\n\
         chain masquerading {{\nmeta mark & 0x4000 == 0 return\n\
         meta mark set meta mark xor 0x4000\nmasquerade fully-random\n}}\n\
         {chains}\
         map service-nodeports {{ type inet_proto . inet_service : verdict; \
         elements = {{ {elements} }}; }}\n\
         chain services {{\nfib daddr type local meta l4proto . th dport vmap @service-nodeports\n}}\n\
         chain nat-prerouting {{ type nat hook prerouting priority dstnat; jump services; }}\n\
         chain nat-output {{ type nat hook output priority -100; jump services; }}\n\
         chain nat-postrouting {{ type nat hook postrouting priority srcnat; jump masquerading; }}\n\
         }}\n"
    )
}
