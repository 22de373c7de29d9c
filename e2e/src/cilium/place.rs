//! The node as Cilium's agent sets it up: DNS redirected by TPROXY, pinned maps, endpoints' files.
//! A test can leave out each part, as in a container without the mount.

use std::fs;
use std::net::IpAddr;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use shared_maps::ipcache::{self, IpcacheKey, IpcacheValue};
use shared_maps::lxc::{self, LxcKey, LxcValue};
use shared_maps::user::{Globals, Map, MapKind, ipcache_key, lxc_key};

use super::world::{Endpoint, World};
use crate::lab::Lab;
use crate::pod::Pod;
use crate::shell;

/// Default port of holdfast-sdp, and the port in Cilium's documentation.
pub const PROXY_PORT: u16 = 10094;
/// Port 53 of UDP, TCP and SCTP, as DNSRulesV2 packs them for `protocol: ANY`.
const PORTS: [u32; 3] = [
    (1 << 24) | (17 << 16) | 53,
    (1 << 24) | (6 << 16) | 53,
    (1 << 24) | (132 << 16) | 53,
];

/// A pod's endpoint. Its number is the last byte of the pod's address.
pub fn endpoint(pod: &Pod, identity: u32) -> Endpoint {
    Endpoint {
        id: u16::from(pod.v4.octets()[3]),
        identity,
        addresses: vec![pod.v4.into(), pod.v6.into()],
    }
}

/// Redirects pods' packets for port 53 to the proxy, as Cilium does without BPF TPROXY.
pub fn redirect(lab: &Lab) -> Result<()> {
    let rules = format!(
        "table inet proxy {{ chain pre {{ type filter hook prerouting priority mangle;\n\
         iifname \"lxc*\" meta nfproto ipv4 meta l4proto {{ tcp, udp }} th dport 53 \
         meta mark set 0x200 tproxy ip to 127.0.0.1:{PROXY_PORT} accept\n\
         iifname \"lxc*\" meta nfproto ipv6 meta l4proto {{ tcp, udp }} th dport 53 \
         meta mark set 0x200 tproxy ip6 to [::1]:{PROXY_PORT} accept\n}}\n}}\n"
    );
    shell::feed(lab.node.command("nft").args(["-f", "-"]), &rules)?;
    for family in ["-4", "-6"] {
        let ip = |words: &str| -> Result<()> {
            let words: Vec<&str> = words.split(' ').collect();
            lab.node
                .run("ip", &[&[family], words.as_slice()].concat())?;
            Ok(())
        };
        ip("rule add pref 9 fwmark 0x200/0xf00 lookup 2004")?;
        ip("route add local default dev lo table 2004")?;
    }
    Ok(())
}

/// Pins `cilium_lxc` with the pods of `world`.
pub fn pin_lxc(lab: &Lab, world: &World, pods: &[&Pod]) -> Result<Map<LxcKey, LxcValue>> {
    let globals = globals(lab)?;
    let map = Map::open_or_create(&globals.path(lxc::NAME), MapKind::Hash, 64, lxc::FLAGS)?;
    for endpoint in &world.endpoints {
        let value = LxcValue {
            ifindex: ifindex(lab, pods, endpoint)?,
            lxc_id: endpoint.id,
            sec_id: endpoint.identity,
            ..LxcValue::default()
        };
        for address in &endpoint.addresses {
            map.set(&lxc_key(*address), &value)?;
        }
    }
    Ok(map)
}

/// Pins `cilium_ipcache_v2` with the endpoints and prefixes of `world`.
pub fn pin_ipcache(lab: &Lab, world: &World) -> Result<Map<IpcacheKey, IpcacheValue>> {
    let globals = globals(lab)?;
    let path = globals.path(ipcache::NAME);
    let map = Map::open_or_create(&path, MapKind::LpmTrie, 1024, ipcache::FLAGS)?;
    let set = |address: IpAddr, length: u8, identity: u32| {
        let value = IpcacheValue {
            sec_identity: identity,
            ..IpcacheValue::default()
        };
        map.set(&ipcache_key(address, length), &value)
    };
    for endpoint in &world.endpoints {
        for address in &endpoint.addresses {
            let length = if address.is_ipv4() { 32 } else { 128 };
            set(*address, length, endpoint.identity)?;
        }
    }
    for (prefix, identity) in &world.prefixes {
        set(prefix.addr(), prefix.prefix_len(), *identity)?;
    }
    Ok(map)
}

/// Replaces `cilium_ipcache_v2` by an empty map, as each start of the agent does.
pub fn repin_ipcache(lab: &Lab) -> Result<()> {
    let path = globals(lab)?.path(ipcache::NAME);
    fs::remove_file(&path)?;
    pin_ipcache(lab, &World::default())?;
    Ok(())
}

fn globals(lab: &Lab) -> Result<Globals> {
    let globals = Globals::new(lab.bpf_root());
    fs::create_dir_all(globals.dir())?;
    Ok(globals)
}

/// Writes the file of an endpoint that may query `servers` for names that match `regex`.
pub fn write_file(
    lab: &Lab,
    pod: &Pod,
    endpoint: &Endpoint,
    regex: &str,
    servers: &[IpAddr],
) -> Result<()> {
    let servers: serde_json::Map<String, Value> = servers
        .iter()
        .map(|server| (server.to_string(), json!({})))
        .collect();
    let rule = json!([{"Re": regex, "IPs": servers}]);
    let rules: serde_json::Map<String, Value> = PORTS
        .iter()
        .map(|port| (port.to_string(), rule.clone()))
        .collect();
    let file = json!({
        "ID": endpoint.id,
        "ContainerIfName": "eth0",
        "IfName": pod.host_side,
        "IfIndex": ifindex(lab, &[pod], endpoint)?,
        "ParentIfIndex": 0,
        "DisableLegacyIdentifiers": false,
        "OpLabels": {"Custom": {}, "OrchestrationIdentity": {}, "Disabled": {},
                     "OrchestrationInfo": {}},
        "LXCMAC": "0a:00:00:00:00:01",
        "IPv6": pod.v6.to_string(),
        "IPv6IPAMPool": "default",
        "IPv4": pod.v4.to_string(),
        "IPv4IPAMPool": "default",
        "NodeMAC": "0a:00:00:00:00:02",
        "SecLabel": {"id": endpoint.identity, "labels": {}},
        "Options": {"map": {}},
        "DNSRulesV2": rules,
        "DNSHistory": [],
        "DNSZombies": {},
        "K8sPodName": "web-0",
        "K8sNamespace": "default",
        "K8sUID": "0c4e9a8e-0000-4000-8000-000000000001",
        "DatapathConfiguration": {"external-ipam": true},
        "CiliumEndpointUID": "",
        "Properties": {},
        "NetnsCookie": "4711",
        "RTInfo": 0
    });
    let directory = state(lab).join(endpoint.id.to_string());
    fs::create_dir_all(&directory)?;
    fs::write(directory.join("ep_config.json"), file.to_string())?;
    // Other files in that directory must have no effect.
    fs::write(directory.join("ep_config.h"), "#define LXC_ID 1\n")?;
    Ok(())
}

fn state(lab: &Lab) -> std::path::PathBuf {
    lab.directory().join("state/state")
}

/// A ConfigMap as the kubelet mounts it: files are links into a dated directory.
pub fn mount_config_map(directory: &Path, keys: &[(&str, &str)]) -> Result<()> {
    let data = directory.join("..2026_06_01_10_00_00.123456789");
    fs::create_dir_all(&data)?;
    std::os::unix::fs::symlink(
        data.file_name().context("a name")?,
        directory.join("..data"),
    )?;
    for (key, value) in keys {
        fs::write(data.join(key), value)?;
        std::os::unix::fs::symlink(Path::new("..data").join(key), directory.join(key))?;
    }
    Ok(())
}

fn ifindex(lab: &Lab, pods: &[&Pod], endpoint: &Endpoint) -> Result<u32> {
    let pod = pods
        .iter()
        .find(|pod| endpoint.addresses.contains(&pod.v4.into()))
        .context("the endpoint is no pod of the lab")?;
    let link = lab
        .node
        .run("ip", &["-o", "link", "show", "dev", &pod.host_side])?;
    let number = link.split(':').next().context("no interface")?;
    Ok(number.trim().parse()?)
}
