//! The command line: exit codes, and errors that name what is wrong.

use std::{
    fs,
    io::Write as _,
    process::{Command, Output, Stdio},
};

const POLICY: &str = "apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: web, namespace: default}
spec:
  endpointSelector: {matchLabels: {app: web}}
  egress:
  - toFQDNs: [{matchPattern: \"*.good.test\"}]
";

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_holdfast-agent"))
        .args(arguments)
        .env_clear()
        .output()
        .expect("holdfast-agent runs")
}

/// Runs a command that must fail. Returns its standard error.
fn fails(code: i32, arguments: &[&str], names: &str) -> String {
    let output = run(arguments);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
    assert!(
        error.contains(names),
        "{arguments:?} does not name {names}: {error}"
    );
    error
}

#[test]
fn wrong_usage_ends_with_2_and_names_the_flag() {
    fails(2, &[], "Usage: holdfast-agent");
    fails(2, &["no-such-verb"], "no-such-verb");
    fails(2, &["run", "--no-such-flag"], "--no-such-flag");
    fails(2, &["status", "-o", "xml"], "--output");
    fails(2, &["identity", "get", "all"], "whole number");
    fails(
        2,
        &["endpoint", "add", "--labels", "k8s:app=web"],
        "--netns",
    );
    fails(2, &["endpoint", "add", "--netns", "pod1"], "--labels");
    fails(
        2,
        &[
            "endpoint", "add", "--netns", "pod1", "--pid", "1", "--labels", "a:b=c",
        ],
        "--pid",
    );
    for label in ["k8s:", ":web", "k8s:app=a b"] {
        let labels = format!("--labels=k8s:good=1,{label}");
        fails(
            2,
            &["endpoint", "add", "--netns", "pod1", &labels],
            &format!("`{label}` is not a label"),
        );
    }
    for label in ["reserved:host", "cidr:10.0.0.0/8", "fqdn:www.good.test"] {
        let labels = format!("--labels=k8s:good=1,{label}");
        let error = fails(2, &["endpoint", "add", "--netns", "pod1", &labels], label);
        assert!(error.contains("remove the label"), "{error}");
    }
    fails(2, &["ip", "get", "www.good.test"], "www.good.test");
    fails(2, &["policy", "validate"], "<FILE>");
    fails(2, &["why", "1"], "<TARGET>");
    fails(2, &["why", "1", "www.good.test:http"], "not a port");
    let trace = ["policy", "trace", "--from=a:b"];
    let traced = |further: &[&str], names: &str| fails(2, &[&trace[..], further].concat(), names);
    traced(&["--to=b"], "--port");
    traced(&["--to=b:80", "--port=443"], "leave one of them out");
    traced(&["--to=www.good.test:http"], "www.example.com:443");
    traced(&["--to=https://"], "names no host");
    fails(
        2,
        &["policy", "trace", "--from=https://a.test", "--to=b:80"],
        "--from",
    );
    fails(2, &["why", "1", "https://"], "names no host");
}

/// None of these commands may change the node.
#[test]
fn a_wrong_setting_ends_with_2_and_is_named() {
    let dir = tempfile::tempdir().expect("a directory");
    let state = dir.path().join("state");
    let state = state.to_str().expect("UTF-8");
    for (setting, names) in [
        ("--tofqdns-min-ttl=soon", "--tofqdns-min-ttl"),
        ("--tofqdns-proxy-port=0", "--tofqdns-proxy-port"),
        ("--tofqdns-proxy-port=65536", "--tofqdns-proxy-port"),
        ("--metrics-address=somewhere", "--metrics-address"),
        ("--policy-dir=/nowhere", "/nowhere"),
        ("--endpoint-dir=/nowhere", "--endpoint-dir"),
        ("--conntrack-gc-interval=1ms", "--conntrack-gc-interval"),
        ("--tofqdns-dns-reject-response-code=maybe", "refused"),
        ("--log-level=a=b=c", "--log-level"),
    ] {
        fails(2, &["run", "--state-dir", state, setting], names);
    }
    fails(
        2,
        &[
            "run",
            "--state-dir",
            state,
            "--enable-ipv4=false",
            "--enable-ipv6=false",
        ],
        "--enable-ipv4",
    );
    assert!(!dir.path().join("state").exists(), "the node was touched");
}

#[test]
fn a_traced_receiver_may_be_a_url_or_have_a_port() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("web.yaml");
    fs::write(&file, POLICY).expect("written");
    let file = file.to_str().expect("UTF-8");
    let traced = |to: &[&str]| {
        let trace = [
            "policy",
            "trace",
            "--policy-file",
            file,
            "--from=k8s:app=web",
        ];
        let output = run(&[&trace[..], to].concat());
        assert_eq!(output.status.code(), Some(1), "{to:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let wanted = traced(&["--to=www.good.test", "--port=443"]);
    assert!(wanted.contains("to www.good.test, 443/TCP"), "{wanted}");
    for to in ["https://www.good.test/login?next=/a:b", "www.good.test:443"] {
        assert_eq!(traced(&[&format!("--to={to}")]), wanted, "{to}");
    }
    let http = traced(&["--to=http://www.good.test"]);
    assert!(http.contains("to www.good.test, 80/TCP"), "{http}");
}

#[test]
fn a_misspelt_level_of_the_log_is_an_error_from_each_place() {
    let dir = tempfile::tempdir().expect("a directory");
    fs::write(dir.path().join("log-level"), "debgu\n").expect("written");
    // If a program accepts the level, it fails later: at these flags, or because it has no certificate.
    let no_family = &["--enable-ipv4=false", "--enable-ipv6=false"][..];
    for (verb, refused) in [("run", no_family), ("relay", &[])] {
        for place in ["flag", "environment", "former environment", "directory"] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_holdfast-agent"));
            let command = command.env_clear().arg(verb).args(refused);
            match place {
                "flag" => command.arg("--log-level=debgu"),
                "environment" => command.env("HOLDFAST_LOG_LEVEL", "debgu"),
                "former environment" => command.env("HOLDFAST_LOG", "debgu"),
                _ => command.arg("--config-dir").arg(dir.path()),
            };
            let output = command.output().expect("holdfast-agent runs");
            let error = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{verb}, {place}: {error}");
            let where_it_is = match place {
                "flag" => "--log-level",
                "environment" => "environment variable HOLDFAST_LOG_LEVEL",
                "former environment" => "environment variable HOLDFAST_LOG",
                _ => "/log-level, key \"log-level\"",
            };
            for part in [where_it_is, "`debgu`", "warn"] {
                assert!(error.contains(part), "{verb}, {place}: {error}");
            }
        }
    }
}

#[test]
fn a_request_to_a_missing_agent_ends_with_1_and_one_line() {
    let socket = "--admin-socket=/nowhere/netpol.sock";
    fails(
        1,
        &["netpol", "pods", socket],
        "`holdfast-agent netpol run`",
    );
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("none.sock");
    let socket = socket.to_str().expect("UTF-8");
    for verb in [
        &["status"][..],
        &["health"],
        &["health", "--live"],
        &["endpoint", "list"],
        &["endpoint", "get", "1"],
        &[
            "endpoint",
            "add",
            "--netns",
            "pod1",
            "--labels",
            "k8s:app=web",
        ],
        &["endpoint", "remove", "1"],
        &["policy", "get"],
        &["identity", "list"],
        &["identity", "get", "256"],
        &["ip", "list"],
        &["ip", "get", "10.0.0.1"],
        &["selectors", "list"],
        &["fqdn", "cache", "list"],
        &["fqdn", "cache", "clean"],
        &["fqdn", "names"],
        &["observe"],
        &["why", "1", "www.good.test:443"],
        &[
            "policy",
            "trace",
            "--from=k8s:app=web",
            "--to=192.0.2.1",
            "--port=443",
        ],
    ] {
        for form in ["table", "json", "yaml"] {
            let arguments = [verb, &["--admin-socket", socket, "-o", form]].concat();
            let error = fails(1, &arguments, "no agent answers on");
            for part in [
                socket,
                "No such file",
                "holdfast-agent run",
                "--admin-socket",
            ] {
                assert!(error.contains(part), "{verb:?} lacks {part}: {error}");
            }
            assert_eq!(error.lines().count(), 1, "{verb:?}: {error}");
            assert!(run(&arguments).stdout.is_empty(), "{verb:?} says something");
        }
    }
}

#[test]
fn missing_maps_end_with_1_and_are_named() {
    let dir = tempfile::tempdir().expect("a directory");
    let root = dir.path().to_str().expect("UTF-8");
    for (verb, map) in [
        (&["lxc", "list"][..], "cilium_lxc"),
        (&["ipcache", "list"], "cilium_ipcache_v2"),
        (&["policy", "list", "7"], "cilium_policy_v2_00007"),
        (&["ct", "list"], "cilium_ct4_global"),
    ] {
        let arguments = [&["bpf"][..], verb, &["--bpf-root", root]].concat();
        let error = fails(1, &arguments, map);
        assert!(error.contains(root), "{error}");
    }
}

#[test]
fn policies_are_checked_without_an_agent() {
    let dir = tempfile::tempdir().expect("a directory");
    let write = |name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::write(&path, text).expect("written");
        path.to_str().expect("UTF-8").to_owned()
    };
    let good = write("good.yaml", POLICY);
    let bad = write("bad.yaml", &POLICY.replace("matchPattern", "matchPatern"));
    let none = write("none.yaml", "");

    let output = run(&["policy", "validate", &good]);
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("web") && text.contains("valid"), "{text}");

    let output = run(&["policy", "validate", &good, &bad, "-o", "json"]);
    assert_eq!(output.status.code(), Some(1));
    let checked: Vec<serde_json::Value> =
        serde_json::from_slice(&output.stdout).expect("JSON, although one is refused");
    let valid = |file: usize| checked[file]["documents"][0]["valid"].clone();
    assert_eq!((valid(0), valid(1)), (true.into(), false.into()));
    let error = checked[1]["documents"][0]["error"].to_string();
    assert!(error.contains("matchPatern"), "{error}");

    let both = run(&["policy", "validate", dir.path().to_str().expect("UTF-8")]);
    let text = String::from_utf8_lossy(&both.stdout);
    assert!(
        text.contains("read 2 documents in 3 files: 1 CiliumNetworkPolicy, 1 of unknown kind")
            || text.contains("read 2 documents in 3 files: 2 CiliumNetworkPolicy"),
        "{text}"
    );

    fails(1, &["policy", "validate", &none], "none.yaml");
    fails(1, &["policy", "validate", "/nowhere.yaml"], "/nowhere.yaml");
}

#[test]
fn policies_are_read_from_standard_input() {
    let mut validate = Command::new(env!("CARGO_BIN_EXE_holdfast-agent"))
        .args(["policy", "validate", "-"])
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("holdfast-agent runs");
    let mut stdin = validate.stdin.take().expect("a pipe");
    stdin.write_all(POLICY.as_bytes()).expect("it reads");
    drop(stdin);
    let output = validate.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
    assert!(
        said.contains("standard input: CiliumNetworkPolicy/default/web: valid"),
        "{said}"
    );
}

#[test]
fn packets_are_traced_without_an_agent() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("web.yaml");
    let rules = "  - toCIDR: [192.0.2.53/32]\n    toPorts: [{ports: [{port: \"53\"}], rules: {dns: [{matchPattern: \"*\"}]}}]\n";
    fs::write(&file, format!("{POLICY}{rules}")).expect("written");
    let file = file.to_str().expect("UTF-8");
    let trace = |from: &str, to: &str, form: &[&str]| {
        let flags = [
            "--from",
            from,
            "--to",
            to,
            "--port=443",
            "--policy-file",
            file,
        ];
        run(&[&["policy", "trace"], &flags[..], form].concat())
    };
    let open = trace("k8s:app=web", "www.good.test", &[]);
    let text = String::from_utf8_lossy(&open.stdout).into_owned();
    assert_eq!(open.status.code(), Some(0), "{text}");
    let by = "allowed by CiliumNetworkPolicy/default/web spec.egress[0] (fqdn:*.good.test";
    assert!(text.contains(by) && text.ends_with("\nallowed\n"), "{text}");
    let shut = trace("k8s:app=web", "192.0.2.1", &["-o", "json"]);
    assert_eq!(shut.status.code(), Some(1));
    let shut: serde_json::Value = serde_json::from_slice(&shut.stdout).expect("JSON");
    assert_eq!(shut["steps"][0]["verdict"], "no-rule");
    let error = trace("web", "192.0.2.1", &[]);
    assert!(String::from_utf8_lossy(&error.stderr).contains("give labels"));
    fails(
        1,
        &[
            "policy",
            "trace",
            "--from=a:b",
            "--to=a:c",
            "--port=1",
            "--policy-file=/nowhere.yaml",
        ],
        "/nowhere.yaml",
    );
}

#[test]
fn named_ports_and_nodes_are_traced_without_an_agent() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("web.yaml");
    let rules = "  - toEndpoints: [{}]\n    toPorts: [{ports: [{port: https, protocol: TCP}]}]\n  - toEntities: [remote-node]\n";
    let node = r"
---
apiVersion: cilium.io/v2
kind: CiliumNode
metadata: {name: other}
spec: {addresses: [{type: InternalIP, ip: 192.0.2.2}]}
";
    fs::write(&file, format!("{POLICY}{rules}{node}")).expect("written");
    let file = file.to_str().expect("UTF-8");
    let trace = |to: &str, flags: &[&str]| {
        let question = ["--from=k8s:app=web", "--to", to, "--policy-file", file];
        let output = run(&[&["policy", "trace"], &question[..], flags].concat());
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text).into_owned();
        (output.status.code(), text)
    };
    let named = ["--named-port", "https=8443", "--named-port", "dns=53/UDP"];
    let at = |port| [&named[..], &["--port", port]].concat();
    let (code, text) = trace("k8s:app=db", &at("8443"));
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("TCP https (8443)"), "{text}");
    let (code, text) = trace("k8s:app=db", &at("443"));
    assert_eq!(code, Some(1), "{text}");
    let (code, text) = trace("k8s:app=db", &["--port=443"]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("port name https is not known"), "{text}");
    assert!(text.contains("--named-port http=80/TCP"), "{text}");
    let (code, text) = trace("192.0.2.2", &["--port=443"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("reserved:remote-node: allowed"), "{text}");
    let (code, text) = trace("192.0.2.2", &at("443"));
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("--named-port goes with labels"), "{text}");
    let (code, text) = trace("k8s:app=db", &["--port=443", "--named-port=https"]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("`https` is not a named port"), "{text}");
}

#[test]
fn help_teaches() {
    let output = run(&["--help"]);
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8_lossy(&output.stdout);
    for part in ["Exit codes: 0 success; 1 failure", "endpoint", "observe"] {
        assert!(text.contains(part), "--help lacks {part}");
    }
    let output = run(&["run", "--help"]);
    let text = String::from_utf8_lossy(&output.stdout);
    for part in ["--tofqdns-proxy-port", "default: 10094"] {
        assert!(text.contains(part), "run --help lacks {part}");
    }
    assert_eq!(run(&["--version"]).status.code(), Some(0));
}

#[test]
fn trace_by_files_knows_that_a_block_does_not_mean_the_pods_in_the_files() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("cluster.yaml");
    let text = "apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web, namespace: shop}
spec:
  podSelector: {matchLabels: {app: web}}
  policyTypes: [Egress]
  egress: [{to: [{ipBlock: {cidr: 10.0.0.0/8}}]}]
---
apiVersion: v1
kind: Pod
metadata: {name: db-0, namespace: shop, labels: {app: db}}
status: {podIP: 10.2.0.9}
";
    fs::write(&file, text).unwrap();
    let file = file.display().to_string();
    let trace = |to: &str| {
        let from = "--from=k8s:app=web,k8s:io.kubernetes.pod.namespace=shop";
        let arguments = [
            "policy",
            "trace",
            "--policy-file",
            &file,
            from,
            "--port=80",
            "--to",
            to,
        ];
        let output = run(&arguments);
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stdout).into_owned(),
        )
    };
    let (code, text) = trace("10.2.0.8");
    assert_eq!(code, Some(0), "{text}");
    assert!(
        text.contains("NetworkPolicy/shop/web spec.egress[0]"),
        "{text}"
    );
    let (code, text) = trace("10.2.0.9");
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains("k8s:app=db") && text.contains("no rule is about it"),
        "{text}"
    );
}
