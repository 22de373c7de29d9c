//! The DNS server, and the other programs on the paths.

use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

use anyhow::{Result, ensure};
use holdfast_e2e::{Lab, Program, config};

use super::paths::{
    DNSDIST_PORT, FORWARDER, FORWARDER6, PORT, PORT_MANY, RAW_PORT, Route, SERVER, SERVER6,
};

/// The DNS server and the forwarders, which run until this is dropped.
pub(crate) struct Servers {
    _nsd: Program,
    raw: Program,
    raw6: Program,
    raw_tcp: Program,
    dnsdist: Option<Program>,
}

impl Servers {
    /// Starts all servers. Each of `names` gets an address.
    pub(crate) fn start(lab: &Lab, names: impl Iterator<Item = String>) -> Result<Self> {
        widen_ports(lab)?;
        let raw = |log: &str, listen, server, more: &[&str]| -> Result<Program> {
            let program = config::program("lab")?;
            let mut command = lab.node.command(&program.display().to_string());
            command.arg("raw-forwarder");
            command.arg(SocketAddr::new(listen, RAW_PORT).to_string());
            command.arg(SocketAddr::new(server, PORT).to_string());
            command.args(more);
            Program::start(
                "raw_forwarder",
                command,
                &lab.directory().join(format!("log/{log}.log")),
            )
        };
        Ok(Self {
            _nsd: start_nsd(lab, names)?,
            raw: raw("raw", FORWARDER, SERVER, &[])?,
            raw6: raw("raw6", FORWARDER6, SERVER6, &[])?,
            raw_tcp: raw("raw-tcp", FORWARDER, SERVER, &["tcp"])?,
            dnsdist: start_dnsdist(lab)?,
        })
    }

    /// Whether the path exists. dnsdist may not be installed.
    pub(crate) fn has(&self, route: Route) -> bool {
        route != Route::Dnsdist || self.dnsdist.is_some()
    }

    /// The process on the path, if there is exactly one.
    pub(crate) fn process(&self, route: Route, ipv6: bool) -> Option<u32> {
        match route {
            Route::Raw if ipv6 => Some(self.raw6.id()),
            Route::Raw => Some(self.raw.id()),
            Route::RawTcp => Some(self.raw_tcp.id()),
            Route::Dnsdist => self.dnsdist.as_ref().map(Program::id),
            _ => None,
        }
    }
}

/// Gives clients more ports, because a client that closes first keeps its port for a minute.
pub(crate) fn widen_ports(lab: &Lab) -> Result<()> {
    for pod in [&lab.a, &lab.b] {
        pod.netns.sysctl(&[
            ("net.ipv4.ip_local_port_range", "1025 65535"),
            ("net.ipv4.tcp_tw_reuse", "1"),
        ])?;
    }
    lab.node.sysctl(&[
        ("net.ipv4.ip_local_port_range", "16384 65535"),
        ("net.ipv4.tcp_tw_reuse", "1"),
    ])
}

pub(crate) fn start_nsd(lab: &Lab, names: impl Iterator<Item = String>) -> Result<Program> {
    let directory = lab.directory().join("nsd");
    std::fs::create_dir_all(&directory)?;
    let mut zone = String::from(
        "$ORIGIN bench.test.\n$TTL 600\n@ IN SOA ns hostmaster 1 3600 600 86400 60\n@ IN NS ns\nns IN A 192.0.2.2\n",
    );
    let first = u32::from(Ipv4Addr::new(100, 64, 0, 0));
    for (name, address) in names.zip(first..) {
        writeln!(zone, "{name}. IN A {}", Ipv4Addr::from(address))?;
    }
    std::fs::write(directory.join("bench.test"), zone)?;
    let show = |path: &Path| path.display().to_string();
    let mut configuration = String::from("server:\n");
    for ip in [SERVER, SERVER6] {
        for port in [PORT, PORT_MANY] {
            writeln!(configuration, "  ip-address: {ip}@{port}")?;
        }
    }
    write!(
        configuration,
        "  username: \"\"\n  chroot: \"\"\n  zonesdir: {dir}\n  database: \"\"\n\
         \x20 pidfile: \"\"\n  xfrdfile: {dir}/xfrd\n  xfrdir: {dir}\n  zonelistfile: {dir}/zones\n  server-count: 1\n\
         \x20 tcp-count: 1000\n  rrl-ratelimit: 0\n  rrl-whitelist-ratelimit: 0\n\
         remote-control:\n  control-enable: no\nzone:\n  name: bench.test\n  zonefile: bench.test\n",
        dir = show(&directory)
    )?;
    let file = directory.join("nsd.conf");
    std::fs::write(&file, configuration)?;
    let mut command = lab.world.command("nsd");
    command.arg("-d").arg("-c").arg(&file);
    Program::start("nsd", command, &lab.directory().join("log/nsd.log"))
}

fn start_dnsdist(lab: &Lab) -> Result<Option<Program>> {
    let program = Path::new("/usr/bin/dnsdist");
    if !program.exists() {
        println!("dnsdist is not installed: its row is left out (cargo xtask bench installs it)");
        return Ok(None);
    }
    let file = lab.directory().join("dnsdist.conf");
    std::fs::write(
        &file,
        format!(
            "setLocal(\"{FORWARDER}:{DNSDIST_PORT}\")\n\
             newServer({{address=\"{SERVER}:{PORT}\", checkName=\"ns.bench.test.\", mustResolve=true}})\n\
             setACL(\"0.0.0.0/0\")\nsetSecurityPollSuffix(\"\")\n"
        ),
    )?;
    let mut command = lab.node.command(&program.display().to_string());
    command
        .args(["--supervised", "--disable-syslog", "-C"])
        .arg(&file);
    let mut dnsdist = Program::start("dnsdist", command, &lab.directory().join("log/dnsdist.log"))?;
    ensure!(dnsdist.check_alive().is_ok(), "dnsdist: {}", dnsdist.log());
    Ok(Some(dnsdist))
}
