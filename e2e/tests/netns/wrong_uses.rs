//! A wrong command line or file is answered with what is wrong, where, and the remedy: the table in
//! wrong_uses.txt, against both programs while they run.

use std::{
    fs,
    net::{Ipv4Addr, TcpListener},
    process::Output,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use holdfast_e2e::lab::{DNS4, web4};
use holdfast_e2e::policy::{WEB, good_names};
use holdfast_e2e::{AgentOptions, Lab, Query, SdpOptions, config, with_lab};

const TABLE: &str = include_str!("wrong_uses.txt");
/// Minimum number of cases: with fewer, the table was not read.
const LEAST: usize = 40;
/// An agent reports missing proxies after it has waited for them.
const SOON: Duration = Duration::from_secs(30);

/// A row of the table.
struct Case {
    line: String,
    code: i32,
    /// Parts of the answer: what, where, remedy; then texts after `!`, which the answer must not
    /// have.
    parts: Vec<String>,
}

/// Writes the files of the table. Returns the rows, with placeholders filled.
fn cases(
    fill: &dyn Fn(&str) -> String,
    write: &dyn Fn(&str, &str) -> Result<()>,
) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    let mut command = None;
    let mut file: Option<(&str, String)> = None;
    for line in TABLE.lines().chain([""]) {
        if let Some(content) = line.strip_prefix("> ") {
            let (_, text) = file.as_mut().context("a line of no file")?;
            text.push_str(content);
            text.push('\n');
            continue;
        }
        if let Some((name, text)) = file.take() {
            write(name, &text)?;
        }
        if let Some(name) = line.strip_prefix("file ") {
            file = Some((name, String::new()));
        } else if let Some(expected) = line.strip_prefix("    ") {
            let command: String = command.take().with_context(|| expected.to_owned())?;
            let (code, parts) = expected.split_once(": ").context("no exit code")?;
            let parts: Vec<String> = parts.split(" | ").map(fill).collect();
            ensure!(parts.len() >= 3, "{expected}: what, where, remedy");
            let (line, code) = (fill(&command), code.parse()?);
            cases.push(Case { line, code, parts });
        } else if !line.is_empty() && !line.starts_with('#') {
            command = Some(line.to_owned());
        }
    }
    ensure!(cases.len() >= LEAST, "{} cases", cases.len());
    Ok(cases)
}

fn run(lab: &Lab, line: &str) -> Result<Output> {
    let as_user = line.strip_prefix("as-user ");
    let mut words = as_user.unwrap_or(line).split(' ');
    let program = words.next().context("an empty line")?;
    let socket = match program {
        "holdfast-sdp" => lab.sdp_admin("one"),
        _ => lab.agent_socket(),
    };
    // `timeout` ends a program that accepts the line and runs.
    let mut command = lab.node.command("timeout");
    command.arg("20");
    if as_user.is_some() {
        command.args([
            "setpriv",
            "--reuid=10094",
            "--regid=10094",
            "--clear-groups",
        ]);
    }
    command.arg(config::program(program)?).args(words);
    command.env("HOLDFAST_ADMIN_SOCKET", socket);
    Ok(command.output()?)
}

/// How an answer differs from its row.
fn differs(output: &Output, code: i32, parts: &[String]) -> Option<String> {
    let said = [&output.stdout[..], &output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    let is_wrong = |part: &&String| match part.strip_prefix('!') {
        Some(unwanted) => said.contains(unwanted),
        None => !said.contains(*part),
    };
    let wrong: Vec<&String> = parts.iter().filter(is_wrong).collect();
    let is_right = output.status.code() == Some(code) && wrong.is_empty();
    (!is_right).then(|| format!("{}, not as in {wrong:?}:\n{said}", output.status))
}

#[test]
fn each_wrong_use_is_told_what_is_wrong_where_and_the_remedy() {
    with_lab(|lab| {
        lab.write_policy("web.yaml", &good_names())?;
        let document = format!("netns: {}\nlabels: [k8s:app=web]\n", lab.b.netns.name());
        fs::write(lab.directory().join("endpoints/c1.yaml"), document)?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        let _sdp = lab.start_sdp(&SdpOptions::default())?;
        lab.connected("one")?;
        let id = lab.add_endpoint(&lab.a, WEB)?;
        lab.zone.set("www.good.test", &[web4(10)], 600);
        let learned = lab.a.ask(&Query::a("www.good.test", DNS4))?;
        learned.expect(web4(10))?;
        // Other processes may not share this port.
        let taken = lab
            .node
            .enter(|| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))??;
        let directory = lab.directory().join("wrong");
        fs::create_dir(&directory)?;
        let fill = |text: &str| {
            let text = text.replace("{dir}", &directory.to_string_lossy());
            let text = text.replace(
                "{taken}",
                &taken.local_addr().map_or(0, |at| at.port()).to_string(),
            );
            text.replace("{id}", &id.to_string())
        };
        let write = |name: &str, text: &str| Ok(fs::write(directory.join(name), text)?);
        let mut wrong = Vec::new();
        for Case { line, code, parts } in cases(&fill, &write)? {
            let repeated = line.strip_prefix("eventually ");
            let patience = repeated.map_or(Duration::ZERO, |_| SOON);
            let until = Instant::now() + patience;
            let differs = loop {
                let differs = differs(&run(lab, repeated.unwrap_or(&line))?, code, &parts);
                if differs.is_none() || Instant::now() >= until {
                    break differs;
                }
                std::thread::sleep(Duration::from_millis(500));
            };
            wrong.extend(differs.map(|differs| format!("{line}\n  {differs}")));
        }
        ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
        Ok(())
    });
}
