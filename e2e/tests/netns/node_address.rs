//! An address that the node gets is closed to pods at once, also if it is the address of a name
//! that they may look up.
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use holdfast_e2e::lab::{DNS4, at, web4};
use holdfast_e2e::policy::good_names;
use holdfast_e2e::{Lab, Query, eventually, with_lab};
use shared_maps::IdentityId;

const SOON: Duration = Duration::from_secs(20);
/// Number of times that the node gets the address and loses it.
const ROUNDS: u32 = 5;
/// Longest time of all rounds. An agent that only looks every five seconds takes five times as
/// long.
const ALL: Duration = Duration::from_secs(10);

/// Waits until the identity of an address is the node's, or is not. Returns how long that took.
fn until_host(lab: &Lab, address: IpAddr, host: bool) -> Result<Duration> {
    let begin = Instant::now();
    eventually("the identity of the address", SOON, || {
        let now = lab.ipcache()?.get(&address).copied();
        let is_host = now == Some(u64::from(IdentityId::HOST.0));
        ensure!(is_host == host, "{address} has {now:?}");
        Ok(())
    })?;
    Ok(begin.elapsed())
}

#[test]
fn an_address_that_the_node_gets_is_the_nodes_at_once() {
    with_lab(|lab| {
        let address = web4(10);
        lab.zone.set("www.good.test", &[address], 600);
        let _programs = lab.start(&good_names())?;
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(address)?;
        lab.a.expect_open(at(address, 80))?;
        let mut took = Duration::ZERO;
        for _ in 0..ROUNDS {
            lab.node
                .batch(&format!("address add {address}/32 dev lo"))?;
            took += until_host(lab, address, true)?;
            lab.node
                .batch(&format!("address del {address}/32 dev lo"))?;
            took += until_host(lab, address, false)?;
        }
        println!("{} on average", took.as_millis() / u128::from(2 * ROUNDS));
        ensure!(took < ALL, "{} changes took {took:?}", 2 * ROUNDS);
        // The address of a name that the node lost is open again.
        lab.a.expect_open(at(address, 80))
    });
}
