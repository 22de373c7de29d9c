//! Measures the datapath's part of adding an endpoint, without the agent and the CNI plugin: making the policy map,
//! attaching the programs, replacing them.

use std::process::Command;
use std::time::{Duration, Instant};

use agent_core::datapath::{
    attachment::Attachment,
    plan::{Datapath as _, Step},
};
use anyhow::{Result, ensure};
use holdfast_e2e::kernel::{attachment, with_kernel};
use nix::net::if_::if_nametoindex;
use shared_maps::EndpointId;

/// Loads, attaches and replaces the programs of `endpoints` endpoints.
pub(crate) fn measure(endpoints: u16) -> Result<()> {
    with_kernel(|kernel| {
        let mut all = Vec::new();
        for number in 0..endpoints {
            let name = format!("hf{number}");
            ip(&format!("link add {name} type veth peer name pod{number}"))?;
            ip(&format!("link set {name} up"))?;
            ip(&format!("link set pod{number} up"))?;
            let endpoint = EndpointId(1000 + number);
            all.push(Attachment {
                endpoint,
                ..attachment(if_nametoindex(name.as_str())?)
            });
        }
        let mut policy = Vec::new();
        for attachment in &all {
            let begin = Instant::now();
            let step = Step::CreatePolicyMap(attachment.endpoint);
            kernel.datapath().apply(&step)?;
            policy.push(begin.elapsed());
        }
        print("make the policy map", &mut policy);
        for what in ["attach the programs", "replace the programs"] {
            let mut taken = Vec::new();
            for attachment in &all {
                let begin = Instant::now();
                kernel.datapath().apply(&Step::Attach(attachment.clone()))?;
                taken.push(begin.elapsed());
            }
            print(what, &mut taken);
        }
        Ok(())
    });
    Ok(())
}

fn ip(arguments: &str) -> Result<()> {
    let status = Command::new("ip").args(arguments.split(' ')).status()?;
    ensure!(status.success(), "ip {arguments}: {status}");
    Ok(())
}

/// Prints the median and the 99th percentile.
pub(crate) fn print(what: &str, taken: &mut [Duration]) {
    taken.sort();
    let at = |percent: usize| {
        let place = (taken.len() * percent / 100).min(taken.len().saturating_sub(1));
        taken.get(place).copied().unwrap_or_default().as_secs_f64() * 1000.0
    };
    let all: Duration = taken.iter().sum();
    println!(
        "{what}: p50 {:.2} ms, p99 {:.2} ms, {} in {:.2} s",
        at(50),
        at(99),
        taken.len(),
        all.as_secs_f64()
    );
}
