//! The proxy's lookups in real pinned maps, and its start from these maps and the endpoints' files
//! without any agent.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use holdfast_e2e::{Netns, Program, config, eventually};
use holdfast_sdp::{
    maps::{Change, PinnedMaps},
    resolve::{QueryClient, Resolver},
};
use serde_json::Value;
use shared_maps::{
    EndpointId, IdentityId, ipcache,
    ipcache::{IpcacheKey, IpcacheValue, IpcacheValueV1},
    lxc,
    lxc::{FLAG_HOST, LxcKey, LxcValue},
    user::{Globals, Map, MapKind, boot_id, ipcache_key, lxc_key},
};

const POD: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 1, 0, 7));
const SERVER: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 53));
const SOON: Duration = Duration::from_secs(10);

/// A BPF root and a directory of this test alone.
struct TestRoot {
    bpf: PathBuf,
    dir: tempfile::TempDir,
}

impl TestRoot {
    fn new(test: &str) -> Self {
        let bpf = PathBuf::from(format!("/sys/fs/bpf/hf-e2e-{}-{test}", std::process::id()));
        fs::create_dir_all(Globals::new(&bpf).dir()).expect("bpffs is writable");
        Self {
            bpf,
            dir: tempfile::tempdir().expect("a directory"),
        }
    }

    fn globals(&self) -> Globals {
        Globals::new(&self.bpf)
    }

    fn lxc(&self) -> Map<LxcKey, LxcValue> {
        let path = self.globals().path(lxc::NAME);
        Map::open_or_create(&path, MapKind::Hash, 64, lxc::FLAGS).expect("a map")
    }

    fn ipcache(&self) -> Map<IpcacheKey, IpcacheValue> {
        let path = self.globals().path(ipcache::NAME);
        Map::open_or_create(&path, MapKind::LpmTrie, 64, ipcache::FLAGS).expect("a map")
    }

    fn unpin(&self, name: &str) {
        fs::remove_file(self.globals().path(name)).expect("the pin is there");
    }
}

impl Drop for TestRoot {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.bpf);
    }
}

fn pod(id: u16, identity: u32) -> LxcValue {
    LxcValue {
        ifindex: 12,
        lxc_id: id,
        sec_id: identity,
        ..LxcValue::default()
    }
}

fn identity(id: u32) -> IpcacheValue {
    IpcacheValue {
        sec_identity: id,
        ..IpcacheValue::default()
    }
}

#[test]
fn maps_that_appear_or_are_replaced_are_found() {
    let root = TestRoot::new("replace");
    let maps = PinnedMaps::open(&root.bpf, true);
    assert_eq!(maps.client(POD), QueryClient::Unknown);
    assert!(maps.problem().unwrap().contains("cilium_lxc"));

    root.lxc().set(&lxc_key(POD), &pod(7, 300)).unwrap();
    root.ipcache()
        .set(&ipcache_key(SERVER, 32), &identity(500))
        .unwrap();
    assert_eq!(maps.refresh(), Change::Reopened);
    let seven = QueryClient::Endpoint {
        id: EndpointId(7),
        identity: IdentityId(300),
        ifindex: 12,
    };
    assert_eq!(maps.client(POD), seven);
    assert_eq!(maps.server(SERVER), IdentityId(500));
    assert_eq!(
        maps.server(POD),
        IdentityId::WORLD_IPV4,
        "no prefix covers it"
    );
    assert_eq!(maps.problem(), None);
    assert_eq!(maps.refresh(), Change::Same);

    root.unpin(lxc::NAME);
    root.lxc().set(&lxc_key(POD), &pod(8, 300)).unwrap();
    assert_eq!(maps.refresh(), Change::Reopened);
    assert!(matches!(
        maps.client(POD),
        QueryClient::Endpoint {
            id: EndpointId(8),
            ..
        }
    ));

    root.unpin(lxc::NAME);
    maps.refresh();
    maps.refresh();
    assert_eq!(
        maps.client(POD),
        QueryClient::Unknown,
        "a map without a pin is not used"
    );
}

#[test]
fn the_nodes_own_addresses_are_the_host_and_longer_prefixes_win() {
    let root = TestRoot::new("host");
    let host = LxcValue {
        flags: FLAG_HOST,
        ..LxcValue::default()
    };
    root.lxc().set(&lxc_key(POD), &host).unwrap();
    let ipcache = root.ipcache();
    ipcache
        .set(&ipcache_key(IpAddr::from([192, 0, 0, 0]), 8), &identity(2))
        .unwrap();
    ipcache
        .set(
            &ipcache_key(IpAddr::from([192, 0, 2, 0]), 24),
            &identity(600),
        )
        .unwrap();
    let maps = PinnedMaps::open(&root.bpf, false);
    assert_eq!(maps.client(POD), QueryClient::Host);
    assert_eq!(maps.server(SERVER), IdentityId(600));
    assert_eq!(maps.server(IpAddr::from([192, 9, 9, 9])), IdentityId(2));
}

#[test]
fn the_older_ipcache_is_read_where_only_that_exists() {
    let root = TestRoot::new("older");
    let path = root.globals().path(ipcache::NAME_V1);
    let older: Map<IpcacheKey, IpcacheValueV1> =
        Map::open_or_create(&path, MapKind::LpmTrie, 64, ipcache::FLAGS).unwrap();
    let value = IpcacheValueV1 {
        sec_identity: 700,
        ..IpcacheValueV1::default()
    };
    older.set(&ipcache_key(SERVER, 32), &value).unwrap();
    let maps = PinnedMaps::open(&root.bpf, true);
    assert_eq!(maps.server(SERVER), IdentityId(700));
    assert_eq!(maps.status().ipcache.as_deref(), Some(ipcache::NAME_V1));
}

#[test]
fn a_map_of_another_layout_is_named_with_both() {
    let root = TestRoot::new("layout");
    let path = root.globals().path(lxc::NAME);
    let _other: Map<LxcKey, u64> =
        Map::open_or_create(&path, MapKind::Hash, 64, lxc::FLAGS).unwrap();
    let problem = PinnedMaps::open(&root.bpf, true).problem().unwrap();
    for part in ["cilium_lxc", "48-byte", "8-byte"] {
        assert!(problem.contains(part), "{problem}");
    }
}

fn endpoint_file(root: &Path, text: &str) -> Result<()> {
    let dir = root.join("state/state/7");
    fs::create_dir_all(&dir)?;
    fs::write(dir.join("ep_config.json"), text)?;
    Ok(())
}

fn ask(netns: &Netns, socket: &Path, arguments: &[&str]) -> Result<Value> {
    let program = config::program("holdfast-sdp")?;
    let mut command = netns.command(program.to_str().context("path")?);
    command
        .args(arguments)
        .args(["-o", "json", "--admin-socket"])
        .arg(socket);
    let output = command.output()?;
    // The program also prints an answer if the query is refused.
    let error = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).with_context(|| error.into_owned())
}

#[test]
fn without_an_agent_the_proxy_explains_from_disk_and_maps_and_drains_on_request() -> Result<()> {
    let root = TestRoot::new("start");
    root.lxc().set(&lxc_key(POD), &pod(7, 300))?;
    root.ipcache()
        .set(&ipcache_key(SERVER, 32), &identity(500))?;
    let boot = boot_id()?;
    let rule = r#"{"selector":"dns","any_server":false,"servers":[500],"names":[{"match_pattern":"*.good.test"}]}"#;
    let rules = format!(
        r#"{{"version":1,"boot_id":"{}","start":1,"revision":1,"ports":[{{"port":53,"protocol":17,"rules":[{rule}]}}]}}"#,
        boot
    );
    let text = format!(
        r#"{{"ID":7,"IPv4":"{POD}","IfIndex":12,"SecLabel":{{"id":300}},"HoldfastDNSRules":{rules}}}"#
    );
    endpoint_file(root.dir.path(), &text)?;

    let netns = Netns::create(format!("hf-e2e-{}-sdp", std::process::id()))?;
    netns.run("ip", &["link", "set", "lo", "up"])?;
    let socket = root.dir.path().join("admin.sock");
    let program = config::program("holdfast-sdp")?;
    let mut command = netns.command(program.to_str().context("path")?);
    command.arg("--bpf-root").arg(&root.bpf);
    command
        .arg("--state-dir")
        .arg(root.dir.path().join("state"));
    command.arg("--agent-address=unix:///nowhere/agent.sock");
    command.arg("--admin-socket").arg(&socket);
    command.args(["--name=lone", "--metrics-address=127.0.0.1:9961"]);
    let log = root.dir.path().join("sdp.log");
    let proxy = Program::start("holdfast-sdp", command, &log)?;

    eventually("ready", SOON, || {
        let status = ask(&netns, &socket, &["status"])?;
        ensure!(status.get("ready") == Some(&Value::Bool(true)), "{status}");
        let from = status.pointer("/agent/rules/from").and_then(Value::as_str);
        ensure!(from == Some("disk"), "{status}");
        Ok(())
    })?;
    let verdict = |name: &str, server: &str| -> Result<String> {
        let pod = POD.to_string();
        let answer = ask(
            &netns,
            &socket,
            &["explain", &pod, name, "--server", server],
        )?;
        ensure!(
            answer.get("endpoint").and_then(Value::as_u64) == Some(7),
            "{answer}"
        );
        Ok(answer
            .get("verdict")
            .and_then(Value::as_str)
            .context("no verdict")?
            .to_owned())
    };
    ensure!(verdict("www.good.test", "192.0.2.53")? == "allow");
    ensure!(verdict("www.bad.test", "192.0.2.53")? == "deny");
    ensure!(
        verdict("www.good.test", "192.0.2.54")? == "deny",
        "another server"
    );

    let status = proxy.terminate(SOON)?;
    ensure!(status.success(), "{status}");
    ensure!(!socket.exists(), "the admin socket was left behind");
    Ok(())
}
