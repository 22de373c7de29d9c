//! `lab`: programs that the tests and the benchmarks start, and two for people.

mod apiserver;
mod demo;
mod hold_connections;
mod raw_forwarder;
mod traffic;
mod without;

use anyhow::Result;
use clap::Parser;

#[derive(Debug, Parser)]
#[command(about = "Programs of the lab")]
enum Command {
    Apiserver(apiserver::Arguments),
    Demo(demo::Options),
    /// Opens connections and keeps them idle
    HoldConnections(hold_connections::Options),
    /// Copies datagrams, or the bytes of connections, to a server and back
    RawForwarder(raw_forwarder::Options),
    /// Sends packets until standard input ends, and reports what was lost
    Traffic(traffic::Options),
    /// Runs a program for which some system calls fail with EPERM
    Without(without::Options),
}

fn main() -> Result<()> {
    match Command::parse() {
        Command::Apiserver(arguments) => apiserver::run(&arguments),
        Command::Demo(options) => demo::run(&options),
        Command::HoldConnections(options) => hold_connections::run(&options),
        Command::RawForwarder(options) => raw_forwarder::run(&options),
        Command::Traffic(options) => traffic::run(&options),
        Command::Without(options) => without::run(&options),
    }
}
