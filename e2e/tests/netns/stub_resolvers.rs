//! Widely used resolvers get allowed names and report refused names: dig, kdig, glibc, musl,
//! dnspython, c-ares.
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use holdfast_e2e::dns::zone::Manner;
use holdfast_e2e::lab::{DNS4, DNS6, at, web4, web6};
use holdfast_e2e::policy::{WEB, good_names};
use holdfast_e2e::{AgentOptions, Lab, Program, SdpOptions, shell, with_lab};

/// Number of addresses of a name whose answers over UDP the server truncates.
const MANY: u8 = 60;
/// Number of addresses of a name whose answer fits a datagram, but not a packet.
const LARGE: u8 = 250;

/// Output and exit status of a program.
#[derive(Debug)]
struct Said {
    code: Option<i32>,
    text: String,
}

impl Said {
    /// Lines that are addresses, or begin with one.
    fn addresses(&self) -> BTreeSet<IpAddr> {
        let first = |line: &str| line.split_whitespace().next()?.parse().ok();
        self.text.lines().filter_map(first).collect()
    }

    fn expect(&self, addresses: &[IpAddr]) -> Result<()> {
        let wanted: BTreeSet<_> = addresses.iter().copied().collect();
        ensure!(self.addresses() == wanted, "wanted {wanted:?}: {self:?}");
        Ok(())
    }

    fn expect_text(&self, text: &str) -> Result<()> {
        ensure!(self.text.contains(text), "wanted `{text}`: {self:?}");
        Ok(())
    }
}

fn run(command: &mut Command) -> Result<Said> {
    let output = command
        .output()
        .with_context(|| format!("start {command:?} (is it installed? cargo xtask setup)"))?;
    let said = [output.stdout, output.stderr].concat();
    Ok(Said {
        code: output.status.code(),
        text: String::from_utf8_lossy(&said).into_owned(),
    })
}

/// Runs a program in the pod.
fn in_pod(lab: &Lab, program: &str, arguments: &[&str]) -> Result<Said> {
    run(lab.a.netns.command(program).args(arguments))
}

/// Runs a program in the pod with this resolv.conf, in a mount namespace of its own.
fn with_resolv_conf(lab: &Lab, text: &str, program: &[&str]) -> Result<Said> {
    let file = lab.directory().join("resolv.conf");
    std::fs::write(&file, text)?;
    let mut command = lab.a.netns.command("unshare");
    // Go needs a directory for its build cache.
    command.env("GOCACHE", lab.directory().join("go"));
    command
        .args(["--mount", "--propagation", "private", "sh", "-c"])
        .arg("mount --bind \"$0\" /etc/resolv.conf && exec \"$@\"")
        .arg(&file)
        .args(program);
    run(&mut command)
}

/// Starts an agent and a proxy, with the names and the policy of these tests.
fn start(lab: &Lab, options: &SdpOptions) -> Result<[Program; 2]> {
    lab.zone.set("www.good.test", &[web4(10), web6(10)], 60);
    lab.zone.set("v4.good.test", &[web4(12)], 60);
    lab.zone.set("www.bad.test", &[web4(11), web6(11)], 60);
    lab.zone.set("many.good.test", &many(), 60);
    lab.zone.set("large.good.test", &hosts(LARGE), 60);
    lab.zone.manner("many.good.test", Manner::Truncated);
    lab.write_policy("web.yaml", &good_names())?;
    let agent = lab.start_agent(&AgentOptions::default())?;
    let sdp = lab.start_sdp(options)?;
    lab.add_endpoint(&lab.a, WEB)?;
    Ok([agent, sdp])
}

fn many() -> Vec<IpAddr> {
    hosts(MANY)
}

fn hosts(count: u8) -> Vec<IpAddr> {
    (1..=count)
        .map(|host| Ipv4Addr::new(198, 18, 0, host).into())
        .collect()
}

/// No refused query may have left the node, and allowed addresses are open.
fn expect_judged(lab: &Lab) -> Result<()> {
    ensure!(lab.zone.asked("www.bad.test") == 0, "a refused query left");
    lab.a.expect_open(at(web4(10), 80))?;
    lab.a.expect_closed(at(web4(11), 80))
}

/// A proxy that answers REFUSED, as under a Cilium agent.
fn refuses() -> SdpOptions {
    SdpOptions::default().flag("--tofqdns-dns-reject-response-code=refused")
}

#[test]
fn dig() {
    with_lab(|lab| {
        let _running = start(lab, &SdpOptions::default())?;
        for server in [DNS4, DNS6] {
            let server = format!("@{server}");
            let dig = |arguments: &[&str]| {
                let fixed = [server.as_str(), "+tries=1", "+time=3"];
                in_pod(lab, "dig", &[&fixed, arguments].concat())
            };
            for way in [
                "+notcp",
                "+tcp",
                "+noedns",
                "+bufsize=512",
                "+dnssec",
                "+cd",
            ] {
                dig(&[way, "+short", "www.good.test", "A"])?.expect(&[web4(10)])?;
            }
            dig(&["+short", "www.good.test", "AAAA"])?.expect(&[web6(10)])?;
            let two = [
                "+tcp",
                "+keepopen",
                "+short",
                "www.good.test",
                "A",
                "v4.good.test",
                "A",
            ];
            dig(&two)?.expect(&[web4(10), web4(12)])?;
            for way in ["+notcp", "+tcp"] {
                let refused = dig(&[way, "www.bad.test", "A"])?;
                refused.expect_text("status: NXDOMAIN")?;
                refused.expect_text("EDE: 15 (Blocked)")?;
            }
            // Cookies: the second query carries a cookie as a server might have returned it.
            let cookie = "+cookie=01020304050607081112131415161718";
            let refused = dig(&[cookie, "www.bad.test", "A"])?;
            refused.expect_text("COOKIE: 01020304050607081112131415161718 (good)")?;
            dig(&["+edns=1", "+noednsneg", "www.bad.test"])?.expect_text("status: BADVERS")?;
            // Some 4,000 bytes, in fragments on their way to the proxy and from it.
            let large = dig(&["+bufsize=8192", "+ignore", "large.good.test", "A"])?;
            large.expect_text(&format!("ANSWER: {LARGE},"))?;
            let whole = dig(&["many.good.test", "A"])?;
            whole.expect_text("Truncated, retrying in TCP mode")?;
            whole.expect_text(&format!("ANSWER: {MANY},"))?;
        }
        expect_judged(lab)
    });
}

#[test]
fn kdig() {
    with_lab(|lab| {
        let _running = start(lab, &SdpOptions::default())?;
        for server in [DNS4, DNS6] {
            let server = format!("@{server}");
            let kdig = |arguments: &[&str]| {
                let fixed = [server.as_str(), "+retry=0", "+timeout=3"];
                in_pod(lab, "kdig", &[&fixed, arguments].concat())
            };
            for way in ["+notcp", "+tcp", "+edns", "+dnssec"] {
                kdig(&[way, "+short", "www.good.test", "A"])?.expect(&[web4(10)])?;
                kdig(&[way, "+short", "www.good.test", "AAAA"])?.expect(&[web6(10)])?;
                kdig(&[way, "www.bad.test"])?.expect_text("status: NXDOMAIN")?;
            }
            let two = [
                "+tcp",
                "+keepopen",
                "+short",
                "www.good.test",
                "v4.good.test",
            ];
            kdig(&two)?.expect(&[web4(10), web4(12)])?;
            kdig(&["+short", "many.good.test"])?.expect(&many())?;
        }
        expect_judged(lab)
    });
}

#[test]
fn glibc() {
    with_lab(|lab| {
        let _running = start(lab, &SdpOptions::default())?;
        let both = [web4(10), web6(10)];
        for server in [DNS4, DNS6] {
            for options in [
                "",
                "use-vc",
                "single-request",
                "single-request-reopen",
                "edns0",
                "trust-ad",
            ] {
                let conf = format!("nameserver {server}\noptions timeout:3 attempts:1 {options}\n");
                let getent = |name| with_resolv_conf(lab, &conf, &["getent", "ahosts", name]);
                getent("www.good.test")?.expect(&both).context(options)?;
                getent("v4.good.test")?
                    .expect(&[web4(12)])
                    .context(options)?;
                getent("many.good.test")?.expect(&many()).context(options)?;
                let refused = getent("www.bad.test")?;
                refused.expect(&[])?;
                ensure!(refused.code == Some(2), "{options}: {refused:?}");
            }
        }
        expect_judged(lab)
    });
}

#[test]
fn glibc_continues_its_search_list_after_a_refused_name() {
    for reject in [SdpOptions::default(), refuses()] {
        searches(&reject);
    }
}

fn searches(reject: &SdpOptions) {
    with_lab(|lab| {
        let _running = start(lab, reject)?;
        for options in ["", "use-vc", "edns0"] {
            let conf = format!(
                "nameserver {DNS4}\nsearch default.svc.test svc.test\noptions ndots:5 timeout:3 attempts:1 {options}\n"
            );
            let getent = |name| with_resolv_conf(lab, &conf, &["getent", "ahosts", name]);
            getent("www.good.test")?.expect(&[web4(10), web6(10)])?;
            let refused = getent("www.bad.test")?;
            ensure!(refused.code == Some(2), "{refused:?}");
        }
        expect_judged(lab)
    });
}

/// The program of `lookup.c`, linked with musl.
fn with_musl(lab: &Lab) -> Result<PathBuf> {
    let source = lab.directory().join("lookup.c");
    std::fs::write(&source, include_str!("stub_resolvers/lookup.c"))?;
    let program = lab.directory().join("lookup");
    shell::finish(
        Command::new("musl-gcc")
            .args(["-static", "-o"])
            .arg(&program)
            .arg(&source),
    )?;
    Ok(program)
}

#[test]
fn musl() {
    with_lab(|lab| {
        let _running = start(lab, &SdpOptions::default())?;
        let program = with_musl(lab)?;
        let program = program.to_str().context("a path of UTF-8")?;
        for server in [DNS4, DNS6] {
            let conf = format!(
                "nameserver {server}\nsearch default.svc.test svc.test\noptions ndots:5 timeout:3 attempts:1\n"
            );
            let lookup = |name| with_resolv_conf(lab, &conf, &[program, name]);
            lookup("www.good.test")?.expect(&[web4(10), web6(10)])?;
            lookup("v4.good.test")?.expect(&[web4(12)])?;
            let refused = lookup("www.bad.test")?;
            refused.expect_text("Name does not resolve")?;
        }
        expect_judged(lab)
    });
}

#[test]
fn musl_ignores_refused() {
    with_lab(|lab| {
        let _running = start(lab, &refuses())?;
        let program = with_musl(lab)?;
        let program = program.to_str().context("a path of UTF-8")?;
        let conf = format!("nameserver {DNS4}\noptions timeout:1 attempts:1\n");
        let lookup = |name| with_resolv_conf(lab, &conf, &[program, name]);
        lookup("www.good.test")?.expect(&[web4(10), web6(10)])?;
        // The resolver waits until its timeout.
        lookup("www.bad.test")?.expect_text("Try again")?;
        expect_judged(lab)
    });
}

#[test]
fn dnspython() {
    with_lab(|lab| {
        let _running = start(lab, &SdpOptions::default())?;
        for server in [DNS4, DNS6] {
            let server = server.to_string();
            let ask = |name, kind, way| {
                python(
                    lab,
                    include_str!("stub_resolvers/with_dnspython.py"),
                    &[server.as_str(), name, kind, way],
                )
            };
            for way in ["udp", "tcp"] {
                ask("www.good.test", "A", way)?.expect(&[web4(10)])?;
                ask("www.good.test", "AAAA", way)?.expect(&[web6(10)])?;
                let refused = ask("www.bad.test", "A", way)?;
                refused.expect_text("NXDOMAIN\nEDE 15")?;
            }
            ask("many.good.test", "A", "fallback")?.expect(&many())?;
        }
        expect_judged(lab)
    });
}

#[test]
fn c_ares() {
    with_lab(|lab| {
        let _running = start(lab, &SdpOptions::default())?;
        for server in [DNS4, DNS6] {
            let server = server.to_string();
            let ask = |name, kind| {
                python(
                    lab,
                    include_str!("stub_resolvers/with_cares.py"),
                    &[server.as_str(), name, kind],
                )
            };
            ask("www.good.test", "A")?.expect(&[web4(10)])?;
            ask("www.good.test", "AAAA")?.expect(&[web6(10)])?;
            ask("www.bad.test", "A")?.expect_text("ARES_ENOTFOUND")?;
            ask("many.good.test", "A")?.expect(&many())?;
        }
        expect_judged(lab)
    });
}

#[test]
fn c_ares_continues_its_search_list_after_a_refused_name() {
    with_lab(|lab| {
        let _running = start(lab, &SdpOptions::default())?;
        let conf = format!(
            "nameserver {DNS4}\nsearch default.svc.test svc.test\noptions ndots:5 timeout:3 attempts:1\n"
        );
        let script = include_str!("stub_resolvers/with_cares.py");
        let lookup = |name| with_resolv_conf(lab, &conf, &["/usr/bin/python3", "-c", script, name]);
        lookup("www.good.test")?.expect(&[web4(10)])?;
        lookup("www.bad.test")?.expect_text("ARES_ENOTFOUND")?;
        expect_judged(lab)
    });
}

/// The resolver of a programming language, with the command that runs a source file.
struct Language {
    package: &'static str,
    file: &'static str,
    source: &'static str,
    command: &'static [&'static str],
}

const LANGUAGES: [Language; 3] = [
    Language {
        package: "golang-go",
        file: "lookup.go",
        source: include_str!("stub_resolvers/lookup.go"),
        command: &["env", "GODEBUG=netdns=go", "go", "run"],
    },
    Language {
        package: "default-jdk-headless",
        file: "Lookup.java",
        source: include_str!("stub_resolvers/Lookup.java"),
        command: &["java"],
    },
    Language {
        package: "nodejs",
        file: "lookup.js",
        source: include_str!("stub_resolvers/lookup.js"),
        command: &["node"],
    },
];

/// With a search list, every allowed name resolves, and a refused name is reported as missing.
#[test]
#[ignore = "needs golang-go, default-jdk-headless and nodejs: cargo xtask test --tier nightly"]
fn go_java_and_node_continue_their_search_lists_after_a_refused_name() {
    with_lab(|lab| {
        let _running = start(lab, &SdpOptions::default())?;
        let conf = format!(
            "nameserver {DNS4}\nsearch default.svc.test svc.test\noptions ndots:5 timeout:3 attempts:1\n"
        );
        for language in LANGUAGES {
            let file = lab.directory().join(language.file);
            std::fs::write(&file, language.source)?;
            let file = file.to_str().context("a path of UTF-8")?;
            let lookup = |name| {
                let program: Vec<&str> = language
                    .command
                    .iter()
                    .copied()
                    .chain([file, name])
                    .collect();
                with_resolv_conf(lab, &conf, &program).with_context(|| {
                    format!(
                        "is {} installed? cargo xtask test --tier nightly installs it",
                        language.package
                    )
                })
            };
            lookup("v4.good.test")?.expect(&[web4(12)])?;
            lookup("www.bad.test")?.expect_text("no such name")?;
        }
        ensure!(lab.zone.asked("www.bad.test") == 0, "a refused query left");
        lab.a.expect_open(at(web4(12), 80))
    });
}

/// Runs a script with the system's Python, which has the packages.
fn python(lab: &Lab, script: &str, arguments: &[&str]) -> Result<Said> {
    in_pod(
        lab,
        "/usr/bin/python3",
        &[&["-c", script], arguments].concat(),
    )
}
