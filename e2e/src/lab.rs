//! Building and tearing down the whole topology.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, ensure};
use parking_lot::Mutex;

use crate::dns::server::DnsServer;
use crate::dns::zone::Zone;
use crate::netns::Netns;
use crate::pod::Pod;
use crate::repairs::Repairs;
use crate::web::Web;
use crate::{config, shell};

static COUNT: AtomicU32 = AtomicU32::new(0);

/// Address of the first DNS server.
pub const DNS4: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 53));
/// IPv6 address of the first DNS server.
pub const DNS6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0x53, 0, 0, 0, 0, 0x53));
/// The second DNS server. No policy of the tests names it unless the test says so.
pub const OTHER_DNS4: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 54));
/// The node's address towards the world.
pub const NODE4: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
/// IPv6 address of the node towards the world.
pub const NODE6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0x53, 0, 0, 0, 0, 1));
/// Web servers listen on these TCP ports.
pub(crate) const TCP_PORTS: [u16; 3] = [80, 443, 8080];
/// Datagrams are echoed on this UDP port.
pub const UDP_PORT: u16 = 7777;
const HOSTS: std::ops::Range<u8> = 10..18;

/// Address of web server `host` (10 to 17) in 203.0.113.0/24.
pub const fn web4(host: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(203, 0, 113, host))
}

/// Address of web server `host` (10 to 17) in 2001:db8:113::/64.
pub const fn web6(host: u8) -> IpAddr {
    IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0x113, 0, 0, 0, 0, host as u16))
}

/// Address of web server `host` (10 to 17) in another network, 198.51.100.0/24.
pub const fn other4(host: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(198, 51, 100, host))
}

pub const fn at(address: IpAddr, port: u16) -> SocketAddr {
    SocketAddr::new(address, port)
}

/// A node, two pods and the world, ready for use.
#[derive(Debug)]
pub struct Lab {
    /// DNS servers, which are stopped before their namespace is deleted.
    pub dns: DnsServer,
    pub web: Web,
    /// Records of the DNS servers.
    pub zone: Zone,
    /// Namespace of agent and proxies.
    pub node: Netns,
    /// Namespace of the DNS and web servers: everything outside of the node and its pods.
    pub world: Netns,
    pub a: Pod,
    pub b: Pod,
    /// Repairs that agents of this lab made.
    pub repairs: Repairs,
    /// Program of the agent that was started last, if it is another build than this one. Client
    /// commands use it, too.
    pub(crate) client: Mutex<Option<PathBuf>>,
    name: String,
    directory: PathBuf,
    bpf_root: PathBuf,
    keep: bool,
}

impl Lab {
    /// Sets everything up, in well under a second.
    pub fn new() -> Result<Self> {
        let name = config::lab_name().unwrap_or_else(|| {
            let number = COUNT.fetch_add(1, Ordering::Relaxed);
            format!("hf-e2e-{}-{number}", std::process::id())
        });
        let directory = std::env::temp_dir().join(&name);
        for part in ["policies", "endpoints", "run", "state", "journal", "log"] {
            std::fs::create_dir_all(directory.join(part))?;
        }
        let bpf_root = Path::new("/sys/fs/bpf").join(&name);
        std::fs::create_dir(&bpf_root).with_context(|| {
            format!(
                "make {} (is bpffs mounted? cargo xtask setup)",
                bpf_root.display()
            )
        })?;

        let node = Netns::create(format!("{name}-node"))?;
        let world = Netns::create(format!("{name}-world"))?;
        node.sysctl(&[
            ("net.ipv4.ip_forward", "1"),
            ("net.ipv6.conf.all.forwarding", "1"),
            ("net.ipv4.conf.all.rp_filter", "0"),
            ("net.ipv4.conf.default.rp_filter", "0"),
            // The kernel's replies to pods must not be rate-limited.
            ("net.ipv4.icmp_ratelimit", "0"),
        ])?;
        connect_world(&node, &world)?;
        node.batch("address add 10.77.0.1/32 dev lo\naddress add fd77::1/128 dev lo")?;
        let a = connect_pod(&node, &name, "a", 11)?;
        let b = connect_pod(&node, &name, "b", 12)?;
        for netns in [&node, &world, &a.netns, &b.netns] {
            netns.settled()?;
        }

        let zone = Zone::default();
        let dns = DnsServer::start(&world, &[DNS4, DNS6, OTHER_DNS4], &zone)?;
        let hosts: Vec<IpAddr> = HOSTS
            .flat_map(|host| [web4(host), web6(host), other4(host)])
            .collect();
        let web = Web::start(&world, &hosts, &TCP_PORTS, &[UDP_PORT])?;
        Ok(Self {
            dns,
            web,
            zone,
            node,
            world,
            a,
            b,
            repairs: Repairs::default(),
            client: Mutex::default(),
            name,
            directory,
            bpf_root,
            keep: config::keep(),
        })
    }

    /// Adds a pod whose address ends in `host`. The caller owns it.
    pub fn add_pod(&self, name: &str, host: u8) -> Result<Pod> {
        let pod = connect_pod(&self.node, &self.name, name, host)?;
        pod.netns.settled()?;
        Ok(pod)
    }

    /// Name of the lab, with which the names of its network namespaces begin.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Directory of everything the programs write.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Root of the pins of this lab.
    pub fn bpf_root(&self) -> &Path {
        &self.bpf_root
    }

    /// Path of a pinned map.
    pub fn pin(&self, map: &str) -> PathBuf {
        self.bpf_root.join(shared_maps::pin::GLOBALS).join(map)
    }

    /// Directory from which the agent reads policy documents.
    pub fn policy_dir(&self) -> PathBuf {
        self.directory.join("policies")
    }

    /// Puts a policy document in force, or replaces it.
    pub fn write_policy(&self, file: &str, text: &str) -> Result<()> {
        let path = self.policy_dir().join(file);
        // The temporary file is outside of the watched directory, and has no document's extension.
        let new = self.directory.join(format!("{file}.new"));
        std::fs::write(&new, text)?;
        std::fs::rename(&new, &path)?;
        Ok(())
    }

    /// Removes a policy document.
    pub fn remove_policy(&self, file: &str) -> Result<()> {
        Ok(std::fs::remove_file(self.policy_dir().join(file))?)
    }

    /// Keeps everything when dropped, and prints how to enter the lab.
    pub fn keep(&mut self) {
        self.keep = true;
    }

    /// How to enter the lab, for a person.
    pub fn directions(&self) -> String {
        format!(
            "pod a:  nsenter --net=/run/netns/{0}-a bash\n\
             pod b:  nsenter --net=/run/netns/{0}-b bash\n\
             node:   nsenter --net=/run/netns/{0}-node bash\n\
             world:  nsenter --net=/run/netns/{0}-world bash\n\
             files:  {1}\nmaps:   {2}\n\
             remove: for n in a b node world; do ip netns delete {0}-$n; done; \
             rm -rf {1} {2}",
            self.name,
            self.directory.display(),
            self.bpf_root.display()
        )
    }

    /// Prints the end of each program's log.
    pub fn print_logs(&self) {
        let mut logs: Vec<_> = std::fs::read_dir(self.directory.join("log"))
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
            .collect();
        logs.sort();
        for path in logs {
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            eprintln!("--- {} (last 60 of {} lines)", path.display(), lines.len());
            for line in lines
                .get(lines.len().saturating_sub(60)..)
                .unwrap_or_default()
            {
                eprintln!("{line}");
            }
        }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if self.keep {
            eprintln!("the lab stays up:\n{}", self.directions());
            for netns in [
                &mut self.node,
                &mut self.world,
                &mut self.a.netns,
                &mut self.b.netns,
            ] {
                netns.keep();
            }
            return;
        }
        for directory in [&self.bpf_root, &self.directory] {
            if let Err(error) = std::fs::remove_dir_all(directory) {
                eprintln!("left behind: {}: {error}", directory.display());
            }
        }
    }
}

/// Runs a test in a lab of its own. If it fails, prints the programs' logs, and with
/// `HOLDFAST_KEEP=1` keeps the lab.
pub fn with_lab(test: impl FnOnce(&Lab) -> Result<()>) {
    let mut lab = Lab::new().unwrap_or_else(|error| panic!("no lab: {error:#}"));
    let keep = std::mem::replace(&mut lab.keep, false);
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        test(&lab)?;
        lab.repairs.check()
    }));
    if matches!(outcome, Ok(Ok(()))) {
        return;
    }
    lab.print_logs();
    lab.keep = keep;
    drop(lab);
    match outcome {
        Ok(Ok(())) => {}
        Ok(Err(error)) => panic!("{error:#}"),
        Err(panic) => resume_unwind(panic),
    }
}

fn connect_world(node: &Netns, world: &Netns) -> Result<()> {
    shell::run(
        "ip",
        &[
            "link",
            "add",
            "up0",
            "netns",
            node.name(),
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            world.name(),
        ],
    )?;
    node.batch(
        "address add 192.0.2.1/24 dev up0\n\
         address add 2001:db8:53::1/64 dev up0 nodad\n\
         link set up0 up\n\
         route add default via 192.0.2.2\n\
         route add default via 2001:db8:53::2",
    )?;
    let mut lines = String::from(
        "address add 192.0.2.2/24 dev eth0\n\
         address add 192.0.2.53/32 dev eth0\n\
         address add 192.0.2.54/32 dev eth0\n\
         address add 2001:db8:53::2/64 dev eth0 nodad\n\
         address add 2001:db8:53::53/128 dev eth0 nodad\n\
         link set eth0 up\n\
         route add default via 192.0.2.1\n\
         route add default via 2001:db8:53::1\n",
    );
    for host in HOSTS {
        for address in [web4(host), web6(host), other4(host)] {
            lines.push_str(&format!("address add {address} dev lo\n"));
        }
    }
    world.batch(&lines)
}

fn connect_pod(node: &Netns, lab: &str, name: &str, host: u8) -> Result<Pod> {
    ensure!(host > 1, "address 1 is the node's");
    let netns = Netns::create(format!("{lab}-{name}"))?;
    let host_side = format!("lxc{name}");
    shell::run(
        "ip",
        &[
            "link",
            "add",
            &host_side,
            "netns",
            node.name(),
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            netns.name(),
        ],
    )?;
    let v4 = Ipv4Addr::new(10, 77, 0, host);
    let v6 = Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, u16::from(host));
    node.batch(&format!(
        "link set {host_side} up\n\
         address add fe80::1/64 dev {host_side} nodad\n\
         route replace {v4}/32 dev {host_side}\n\
         route replace {v6}/128 dev {host_side}"
    ))?;
    netns.batch(&format!(
        "address add {v4}/32 dev eth0\n\
         address add {v6}/128 dev eth0 nodad\n\
         link set eth0 up\n\
         route add 10.77.0.1/32 dev eth0\n\
         route add default via 10.77.0.1 dev eth0\n\
         route add ::/0 via fe80::1 dev eth0"
    ))?;
    Ok(Pod {
        netns,
        v4,
        v6,
        host_side,
        answers: Default::default(),
    })
}
