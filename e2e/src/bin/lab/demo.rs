//! `cargo xtask demo`: the main scenario in a lab of network namespaces, with output for a person.
//! Ends with an error if a step fails.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::Args;
use holdfast_e2e::lab::{DNS4, DNS6, at, web4, web6};
use holdfast_e2e::load::Load;
use holdfast_e2e::policy::good_names;
use holdfast_e2e::{AgentOptions, Lab, Program, Programs, Query, SdpOptions};

const LIMIT: Duration = Duration::from_secs(15);
/// Limit for opening addresses, from the time when the agent is ready.
const OPENS: Duration = Duration::from_secs(2);
const ROLLS: u16 = 3;

/// Plays Holdfast's story in network namespaces and checks each step.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Leave the lab up and say how to enter it
    #[arg(long)]
    keep: bool,
}

/// Prints each checked step with its time.
struct Story {
    start: Instant,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let story = Story {
        start: Instant::now(),
    };
    let mut lab = Lab::new()?;
    let running = play(&story, &lab);
    match (&running, options.keep) {
        (Err(_), _) => lab.print_logs(),
        (Ok(_), true) => {
            println!(
                "\nThe lab stays up, with its programs; leave with ctrl-c.\n{}",
                lab.directions()
            );
            lab.keep();
            loop {
                std::thread::park();
            }
        }
        (Ok(_), false) => {}
    }
    let running = running?;
    println!(
        "\nAll of it holds ({:.0} s).",
        story.start.elapsed().as_secs_f32()
    );
    drop(running);
    Ok(())
}

fn play(story: &Story, lab: &Lab) -> Result<(Program, Program)> {
    story.chapter("A node, two pods and the world outside");
    lab.zone.set("www.good.test", &[web4(10), web6(10)], 600);
    lab.zone.set("later.good.test", &[web4(11)], 600);
    lab.zone.set("www.bad.test", &[web4(12)], 600);
    lab.a.expect_open(at(web4(10), 80))?;
    story.checked("without policy the pod reaches everything");

    story.chapter("Agent, one DNS proxy, and a policy: names below good.test, port 80");
    let Programs { agent, sdp } = lab.start(&good_names())?;
    lab.a.expect_closed(at(web4(10), 80))?;
    story.checked("an address that was not looked up is closed");
    let good = Query::a("www.good.test", DNS4);
    let bad = Query::a("www.bad.test", DNS4);
    lab.a.ask(&good)?.expect(web4(10))?;
    story.checked("www.good.test is answered, from the server's own address");
    lab.a.datagram(at(web4(10), 7777), Duration::from_secs(2))?;
    lab.a.expect_open(at(web4(10), 80))?;
    story.checked("its address is open, from the first packet after the answer");
    lab.a.expect_closed(at(web4(10), 443))?;
    story.checked("another port of it is closed");
    lab.a
        .ask(&Query::aaaa("www.good.test", DNS6).tcp())?
        .expect(web6(10))?;
    lab.a.expect_open(at(web6(10), 80))?;
    story.checked("the same over IPv6 and TCP");
    lab.a.ask(&bad)?.expect_refused()?;
    story.checked("www.bad.test does not exist for the pod, and its query never left the node");

    story.chapter("The agent is killed");
    let stream = lab.a.stream(at(web4(10), 80))?;
    let identities = lab.identities()?;
    agent.kill_9()?;
    lab.a.ask(&good)?.expect(web4(10))?;
    lab.a.ask(&bad)?.expect_refused()?;
    lab.a.expect_open(at(web4(10), 80))?;
    stream.expect_alive()?;
    story.checked("names are answered and refused, new and open connections go on");

    story.chapter("The proxy is killed too, and a new one starts without the agent");
    sdp.kill_9()?;
    let one = lab.start_sdp(&SdpOptions::new("one", 9971))?;
    lab.a.ask(&good)?.expect(web4(10))?;
    lab.a.ask(&bad)?.expect_refused()?;
    story.checked("it serves from the endpoint's file and the pinned maps");
    lab.a
        .ask(&Query::a("later.good.test", DNS4))?
        .expect(web4(11))?;
    lab.a.expect_closed(at(web4(11), 80))?;
    story.checked("an unknown name is answered; its address stays closed for now");
    one.kill_9()?;
    let one = lab.start_sdp(&SdpOptions::new("two", 9972))?;
    lab.a.ask(&good)?.expect(web4(10))?;
    story.checked("that proxy is killed as well; the next one adopts its journal");

    story.chapter("The agent comes back");
    let agent = lab.start_agent(&AgentOptions::default())?;
    lab.audit_settled("good.test", OPENS)?;
    lab.a.expect_open(at(web4(11), 80))?;
    story.checked("what two dead proxies learned while it was away is open");
    let now = lab.identities()?;
    ensure!(
        now == identities,
        "identities changed: {identities:?}, now {now:?}"
    );
    stream.expect_alive()?;
    story.checked("identities are unchanged, and the open connection never broke");

    story.chapter("Proxies are rolled under load");
    let load = Load::start(&lab.a, &good, web4(10), 4)?;
    load.flows(200)?;
    let mut current = one;
    for roll in 0..ROLLS {
        let next = SdpOptions::new(&format!("roll{roll}"), 9980 + roll);
        let next = lab.start_sdp(&next)?;
        current.terminate(LIMIT)?;
        current = next;
        load.flows(200)?;
    }
    let answered = load.finish()?;
    story.checked(&format!(
        "{ROLLS} replacements, {answered} queries, none lost or wrong"
    ));
    Ok((agent, current))
}

impl Story {
    fn chapter(&self, text: &str) {
        println!("\n{text}");
    }

    fn checked(&self, text: &str) {
        println!(
            "  {:>5.1} s  ok  {text}",
            self.start.elapsed().as_secs_f32()
        );
    }
}
