//! A query whose answer is leased costs no allocation, from socket to socket.
//!
//! It is a program of its own, because it counts the allocations of all threads of the process.

#[cfg(test)]
#[allow(dead_code, unreachable_pub, reason = "shared with other tests")]
#[path = "direct/bench.rs"]
mod bench;

use std::alloc::System;

use bench::{Bench, Options, TEST_TIMEOUT, answer, query};
use hickory_proto::rr::RecordType;
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const NAMES: u8 = 20;

#[test]
fn leased_answers_pass_without_allocation() {
    let bench = Bench::new(Options::default());
    bench.sink.set_leases_version(1);
    let client = bench.client();
    let pairs: Vec<(Vec<u8>, Vec<u8>)> = (0..NAMES)
        .map(|n| {
            let query = query(7, &format!("n{n}.good.example"), RecordType::A);
            let answer = answer(&query, &[&format!("192.0.2.{n}")]);
            (query, answer)
        })
        .collect();
    let mut buffer = [0; 512];
    let mut round = |pairs: &[(Vec<u8>, Vec<u8>)]| {
        for (query, answer) in pairs {
            client.send(query).unwrap();
            let (_, from) = bench.server.recv_from(&mut buffer).unwrap();
            let mut reply = [0; 512];
            let reply = &mut reply[..answer.len()];
            reply.copy_from_slice(answer);
            reply[..2].copy_from_slice(&buffer[..2]);
            bench.server.send_to(reply, from).unwrap();
            let length = client.recv(&mut buffer).unwrap();
            assert_eq!(&buffer[..length], &answer[..]);
        }
    };
    // All four sockets are open, and all tables have their final size.
    (0..50).for_each(|_| round(&pairs));
    // Sometimes an answer is reported again, which allocates. The test therefore looks for a round
    // without reports.
    let round_of_leased = || {
        let (told, region) = (bench.sink.len(), Region::new(ALLOCATOR));
        round(&pairs);
        let change = region.change();
        match bench.sink.len() - told {
            0 => Ok(change),
            more => Err(format!("{more} answers reported")),
        }
    };
    let change = polling::eventually(
        "a round of leased answers only",
        TEST_TIMEOUT,
        round_of_leased,
    );
    let change = change.unwrap();
    assert_eq!(change.allocations + change.reallocations, 0, "{change:?}");
}
