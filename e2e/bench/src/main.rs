//! The benchmarks, each a subcommand. `cargo xtask bench NAME` builds the programs that a benchmark
//! starts, and runs it.

mod agent;
mod attach;
mod cluster;
mod datapath;
mod dns;
mod ha;
mod hostile;
mod netpol;
mod relay;
mod release;
mod rules;
mod sandbox_probe;

use anyhow::Result;
use clap::Parser;

#[derive(Debug, Parser)]
#[command(about = "Benchmarks of Holdfast")]
enum Command {
    Agent(agent::Options),
    Attach(attach::Options),
    Cluster(cluster::Options),
    Datapath(datapath::Options),
    Dns(dns::Options),
    Ha(ha::Options),
    Hostile(hostile::Options),
    Netpol(netpol::Options),
    Relay(relay::Options),
    Release(release::Options),
    Rules(rules::Options),
    SandboxProbe(sandbox_probe::Options),
}

fn main() -> Result<()> {
    match Command::parse() {
        Command::Agent(options) => agent::run(&options),
        Command::Attach(options) => attach::run(&options),
        Command::Cluster(options) => cluster::run(&options),
        Command::Datapath(options) => datapath::run(&options),
        Command::Dns(options) => dns::run(&options),
        Command::Ha(options) => ha::run(&options),
        Command::Hostile(options) => hostile::run(&options),
        Command::Netpol(options) => netpol::run(&options),
        Command::Relay(options) => relay::run(&options),
        Command::Release(options) => release::run(&options),
        Command::Rules(options) => rules::run(&options),
        Command::SandboxProbe(options) => sandbox_probe::run(&options),
    }
}
