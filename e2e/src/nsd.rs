//! NSD as the lab's DNS server under load.

use std::net::IpAddr;

use anyhow::Result;

use crate::lab::Lab;
use crate::netns::Netns;
use crate::process::Program;

/// Maximum number of simultaneous connections, enough for four pods and for the remains of a drain.
const TCP_CONNECTIONS: u32 = 2000;
/// Size of the receive buffer in bytes. It holds seconds of queries, so that a busy machine loses
/// none at the server.
const RECEIVE_BUFFER: u32 = 16 << 20;

/// Serves one zone on port 53 of addresses of the world.
pub(crate) fn start(lab: &Lab, addresses: &[IpAddr], zone: &str, records: &str) -> Result<Program> {
    start_in(lab, &lab.world, "nsd", addresses, zone, records)
}

/// Like [`start`], in any namespace and with any name of the server. So several servers can run.
pub(crate) fn start_in(
    lab: &Lab,
    netns: &Netns,
    name: &str,
    addresses: &[IpAddr],
    zone: &str,
    records: &str,
) -> Result<Program> {
    let directory = lab.directory().join(name);
    std::fs::create_dir_all(&directory)?;
    std::fs::write(directory.join(zone), records)?;
    let dir = directory.display();
    let listen: String = addresses
        .iter()
        .map(|address| format!("  ip-address: {address}\n"))
        .collect();
    let configuration = format!(
        "server:\n{listen}  username: \"\"\n  chroot: \"\"\n  zonesdir: {dir}\n  database: \"\"\n\
         \x20 pidfile: \"\"\n  xfrdfile: {dir}/xfrd\n  xfrdir: {dir}\n  zonelistfile: {dir}/zones\n  server-count: 1\n\
         \x20 tcp-count: {TCP_CONNECTIONS}\n  receive-buffer-size: {RECEIVE_BUFFER}\n\
         \x20 rrl-ratelimit: 0\n  rrl-whitelist-ratelimit: 0\n\
         remote-control:\n  control-enable: no\nzone:\n  name: {zone}\n  zonefile: {zone}\n"
    );
    let file = directory.join("nsd.conf");
    std::fs::write(&file, configuration)?;
    let mut command = netns.command("nsd");
    command.arg("-d").arg("-c").arg(&file);
    let log = lab.directory().join(format!("log/{name}.log"));
    Program::start("nsd", command, &log)
}
