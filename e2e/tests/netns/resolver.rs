//! Names of EgressFirewalls stay fresh although no pod asks, and what pods learned while the agent
//! was away is in the objects when it is back.
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use hickory_proto::op::ResponseCode;
use holdfast_e2e::dns::server::DnsServer;
use holdfast_e2e::dns::zone::{Manner, Zone};
use holdfast_e2e::lab::{DNS4, at, web4};
use holdfast_e2e::policy::{self, NOTHING_ELSE, TO_DNS};
use holdfast_e2e::{AgentOptions, Lab, Query, eventually, shell, with_lab};
use serde_json::Value;

const SOON: Duration = Duration::from_secs(10);
/// TTL of the records that change, seconds, and the time in which a change is known.
const TTL: u32 = 6;
const REFRESHED: Duration = Duration::from_secs(TTL as u64 + 2);
/// Time for ten failed look-ups and a TTL.
const FAILED: Duration = Duration::from_secs(40);
const SERVERS: u8 = 8;
/// Number of answers while the agent is away.
const ANSWERS: u16 = 1000;

/// Allows these names, and nothing else.
fn firewall(names: &[&str]) -> String {
    let allow = |name: &&str| format!("{{type: Allow, to: {{dnsName: '{name}'}}}}");
    let names: Vec<String> = names.iter().map(allow).collect();
    let names = names.iter().map(String::as_str);
    let rules: Vec<&str> = [TO_DNS]
        .into_iter()
        .chain(names)
        .chain([NOTHING_ELSE])
        .collect();
    policy::firewall("default", &rules)
}

fn options(lab: &Lab) -> Result<AgentOptions> {
    let dir = lab.directory().join("resolver");
    std::fs::create_dir_all(&dir)?;
    Ok(AgentOptions::default()
        .flag(&format!("--resolver-dir={}", dir.display()))
        .flag("--resolver-min-ttl=1s")
        .flag("--pod-cidr=10.77.0.0/24")
        .flag("--mapping-lease-slack=0s"))
}

/// Address of DNS server `n`, which is outside of the cluster.
fn server(n: u8) -> IpAddr {
    Ipv4Addr::new(192, 0, 2, 60 + n).into()
}

fn pooled(server: u8, n: u8) -> IpAddr {
    Ipv4Addr::new(203, 0, 114 + server, n).into()
}

/// The entry of a name in the object for this name.
fn entry(lab: &Lab, name: &str) -> Result<Value> {
    let objects = lab.agent_json(&["resolver", "list"])?;
    let objects = objects.as_array().context("a list")?;
    let mut names = objects
        .iter()
        .flat_map(|object| object["names"].as_array().cloned().unwrap_or_default());
    Ok(names
        .find(|entry| entry["name"] == name)
        .unwrap_or(Value::Null))
}

fn addresses(entry: &Value) -> Vec<String> {
    let addresses = entry["addresses"].as_array().cloned().unwrap_or_default();
    let ip = |address: &Value| address["ip"].as_str().map(str::to_owned);
    addresses.iter().filter_map(ip).collect()
}

fn has(lab: &Lab, name: &str, address: IpAddr) -> Result<()> {
    let entry = entry(lab, name)?;
    let addresses = addresses(&entry);
    ensure!(addresses.contains(&address.to_string()), "{entry}");
    Ok(())
}

#[test]
fn names_stay_fresh_although_no_pod_asks() {
    with_lab(|lab| {
        lab.world.batch(
            &(0..SERVERS)
                .map(|n| format!("address add {}/32 dev lo\n", server(n)))
                .collect::<String>(),
        )?;
        let zones: Vec<Zone> = (0..SERVERS).map(|_| Zone::default()).collect();
        let set = |host| {
            for zone in &zones {
                zone.set("www.example.test", &[web4(host)], TTL);
            }
        };
        set(10);
        let mut options = options(lab)?;
        let mut servers = Vec::new();
        for (n, zone) in (0..).zip(&zones) {
            zone.set("pool.example.test", &[pooled(n, 1), pooled(n, 2)], TTL);
            servers.push(DnsServer::start(&lab.world, &[server(n)], zone)?);
            options = options.flag(&format!("--dns-server={}", server(n)));
        }
        let policy = firewall(&["www.example.test", "pool.example.test"]);
        let _programs = lab.start_with(&policy, &options)?;
        eventually("the first look-up", SOON, || {
            has(lab, "www.example.test.", web4(10))
        })?;
        eventually("its address is open", SOON, || {
            lab.a.expect_open(at(web4(10), 80))
        })?;
        lab.a.expect_closed(at(web4(11), 80))?;

        // A look-up asks five servers once the name has several addresses, and each server has two
        // other addresses.
        eventually(
            "addresses of five servers after one TTL",
            REFRESHED + SOON,
            || {
                let entry = entry(lab, "pool.example.test.")?;
                let known = addresses(&entry);
                let of = |n: &u8| known.contains(&pooled(*n, 1).to_string());
                let count = (0..SERVERS).filter(of).count();
                ensure!(count >= 5, "{count} servers: {entry}");
                Ok(())
            },
        )?;

        set(11);
        eventually("the new address", REFRESHED, || {
            has(lab, "www.example.test.", web4(11))
        })?;
        eventually("the new address is open", SOON, || {
            lab.a.expect_open(at(web4(11), 80))
        })?;
        lab.leaves_ipcache(web4(10), FAILED)?;
        lab.a.expect_closed(at(web4(10), 80))?;

        let manner = |manner: Manner| {
            for zone in &zones {
                zone.manner("www.example.test", manner.clone());
            }
        };
        let failures = |least: u64| -> Result<()> {
            let entry = entry(lab, "www.example.test.")?;
            ensure!(entry["failures"].as_u64() >= Some(least), "{entry}");
            ensure!(entry["degraded"] == "NXDOMAIN", "{entry}");
            Ok(())
        };
        manner(Manner::Code(ResponseCode::NXDomain));
        eventually("failures", FAILED, || failures(3))?;
        manner(Manner::Normal);
        eventually("no failure after a success", FAILED, || {
            let entry = entry(lab, "www.example.test.")?;
            ensure!(
                entry["failures"] == 0 && entry["degraded"].is_null(),
                "{entry}"
            );
            ensure!(addresses(&entry) == [web4(11).to_string()], "{entry}");
            Ok(())
        })?;
        let status = lab.agent(&["status"])?;
        ensure!(status.contains("leads, 2 objects"), "{status}");
        manner(Manner::Code(ResponseCode::NXDomain));
        eventually("the name's entry goes", FAILED, || {
            let entry = entry(lab, "www.example.test.")?;
            ensure!(entry.is_null(), "{entry}");
            Ok(())
        })?;
        lab.leaves_ipcache(web4(11), FAILED)?;
        lab.a.expect_closed(at(web4(11), 80))?;
        let found = lab.agent(&["resolver", "lookup", "pool.example.test"])?;
        ensure!(found.contains("pool.example.test.: found"), "{found}");
        let missing = lab.agent(&["resolver", "lookup", "none.example.test"]);
        let missing = missing
            .err()
            .context("a name that does not exist was found")?;
        let missing = format!("{missing:#}");
        let says = "holdfast-agent: none.example.test. does not exist";
        ensure!(missing.contains(says), "{missing}");
        Ok(())
    });
}

/// A disk for the objects, mounted in the test's own mount namespace.
struct Disk(PathBuf);

impl Disk {
    fn read_only(path: &Path) -> Result<Self> {
        std::fs::create_dir_all(path)?;
        let text = path.display().to_string();
        shell::run(
            "mount",
            &["-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", &text],
        )?;
        Ok(Self(path.to_owned()))
    }

    fn remount(&self, mode: &str) -> Result<()> {
        let text = self.0.display().to_string();
        let mode = format!("remount,{mode}");
        shell::run("mount", &["-o", &mode, &text]).map(drop)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let path = self.0.display().to_string();
        if let Err(error) = shell::run("umount", &["-l", &path]) {
            eprintln!("left behind: {path}: {error:#}");
        }
    }
}

/// Waits until `status` has exactly one problem: the directory cannot be written.
fn says_read_only(lab: &Lab) -> Result<()> {
    eventually("the read-only directory is reported", SOON, || {
        let status = lab.agent_json(&["status"])?;
        let problems = status["problems"].as_array().context("problems")?;
        ensure!(problems.len() == 1, "{problems:?}");
        let problem = problems[0].as_str().context("a text")?;
        for part in [
            "memory only",
            "Read-only file system",
            "give a --resolver-dir",
            "/resolver/",
        ] {
            ensure!(problem.contains(part), "{part}: {problem}");
        }
        ensure!(status["resolver"]["role"] == "leads", "{status}");
        Ok(())
    })
}

#[test]
fn names_are_looked_up_in_memory_while_the_directory_is_read_only() {
    with_lab(|lab| {
        let directory = lab.directory().join("resolver");
        let disk = Disk::read_only(&directory)?;
        let options = options(lab)?.flag("--dns-server=192.0.2.53");
        lab.zone.set("www.example.test", &[web4(10)], TTL);
        let programs = lab.start_with(&firewall(&["www.example.test"]), &options)?;
        eventually("an address that no pod asked for is open", SOON, || {
            lab.a.expect_open(at(web4(10), 80))
        })?;
        says_read_only(lab)?;
        lab.zone.set("www.example.test", &[web4(11)], TTL);
        eventually("its next address is open", REFRESHED, || {
            lab.a.expect_open(at(web4(11), 80))
        })?;

        disk.remount("rw")?;
        let in_file = |address: IpAddr| {
            eventually(&format!("{address} is in a file"), SOON, || {
                let mut text = String::new();
                for file in std::fs::read_dir(directory.join("dnsnameresolvers"))? {
                    text.push_str(&std::fs::read_to_string(file?.path())?);
                }
                ensure!(text.contains(&format!("ip: {address}\n")), "{text}");
                let problems = lab.agent_json(&["status"])?["problems"].to_string();
                ensure!(problems == "[]", "{problems}");
                Ok(())
            })
        };
        in_file(web4(11))?;

        // The agent reads the existing objects, and looks up their names.
        programs.agent.kill_9()?;
        disk.remount("ro")?;
        lab.zone.set("www.example.test", &[web4(12)], TTL);
        let _agent = lab.start_agent(&options)?;
        eventually("the next look-up", REFRESHED + SOON, || {
            has(lab, "www.example.test.", web4(12))
        })?;
        says_read_only(lab)?;
        disk.remount("rw")?;
        in_file(web4(12))
    });
}

#[test]
fn answers_during_an_absence_of_the_agent_are_in_the_objects_afterwards() {
    with_lab(|lab| {
        let policy = firewall(&[
            "*.a.example.test",
            "*.b.example.test",
            "*.c.example.test",
            "*.d.example.test",
        ]);
        let options = options(lab)?.flag("--dns-server=192.0.2.53");
        let name = |n: u16| {
            let zone = ['a', 'b', 'c', 'd'][usize::from(n % 4)];
            format!("n{n}.{zone}.example.test")
        };
        let address = |n: u16| -> IpAddr {
            let [high, low] = n.to_be_bytes();
            Ipv4Addr::new(203, 0, 114 + high, low).into()
        };
        let programs = lab.start_with(&policy, &options)?;
        eventually("the objects", SOON, || {
            let objects = lab.agent_json(&["resolver", "list"])?;
            ensure!(objects.as_array().map(Vec::len) == Some(4), "{objects}");
            Ok(())
        })?;
        programs.agent.kill_9()?;
        let mut slowest = Duration::ZERO;
        for n in 0..ANSWERS {
            lab.zone.set(&name(n), &[address(n)], 3600);
            let reply = lab.a.ask(&Query::a(&name(n), DNS4))?.expect(address(n))?;
            slowest = slowest.max(reply.took);
        }
        println!("slowest of {ANSWERS} answers without an agent: {slowest:?}");
        let agent = lab.start_agent(&options)?;
        eventually("every answer is in an object", FAILED, || {
            let objects = lab.agent_json(&["resolver", "list"])?.to_string();
            let is_missing = |n: &u16| !objects.contains(&format!("\"{}\"", address(*n)));
            let missing = (0..ANSWERS).filter(is_missing).count();
            ensure!(missing == 0, "{missing} of {ANSWERS} are missing");
            Ok(())
        })?;
        let all_in_files = || -> Result<()> {
            let mut text = String::new();
            for file in std::fs::read_dir(lab.directory().join("resolver/dnsnameresolvers"))? {
                let path = file?.path();
                if path.extension().is_some_and(|ending| ending == "yaml") {
                    text.push_str(&std::fs::read_to_string(path)?);
                }
            }
            let is_missing = |n: &u16| !text.contains(&format!("ip: {}\n", address(*n)));
            let missing = (0..ANSWERS).filter(is_missing).count();
            ensure!(missing == 0, "{missing} of {ANSWERS} are missing");
            Ok(())
        };
        eventually("every answer is in a file", SOON, all_in_files)?;

        // When every program is gone, only the objects have the answers. The next run leads before it has
        // read the policies, and removes no object.
        agent.kill_9()?;
        programs.sdp.kill_9()?;
        let _agent = lab.start_agent(&options)?;
        eventually("the next agent leads", SOON, || {
            let status = lab.agent(&["status"])?;
            ensure!(status.contains("leads, 4 objects"), "{status}");
            Ok(())
        })?;
        let objects = lab.agent_json(&["resolver", "list"])?.to_string();
        let is_missing = |n: &u16| !objects.contains(&format!("\"{}\"", address(*n)));
        let missing = (0..ANSWERS).filter(is_missing).count();
        ensure!(missing == 0, "{missing} of {ANSWERS} are missing");
        all_in_files()
    });
}
