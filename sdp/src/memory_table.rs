//! The table of the proxy's memory in docs/src/security.md, computed from the constants.

use crate::{app, config, journal, listener, mapping, proxy::ProxyConfig, sink};

const PAGE: &str = include_str!("../../docs/src/security.md");
const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
/// Maximum bytes of a query in flight, with its question and its places in the tables.
const IN_FLIGHT: usize = KIB;
/// Approximate bytes of a pair in the table of stored pairs, the lease table and the journal.
const KEPT_PAIR: usize = 250;
const LEASED_PAIR: usize = 150;
const JOURNAL_PAIR: usize = 160;
/// MiB of everything that is not in a table: rules, code, stacks.
const REST: usize = 64;

fn mib(bytes: usize) -> usize {
    bytes.div_ceil(MIB)
}

/// The number with commas between thousands: 65536 is `65,536`.
fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.char_indices() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[test]
fn the_memory_table_of_the_guide_agrees_with_the_constants() {
    let proxy = ProxyConfig::default();
    let workers = config::MOST_WORKERS_BY_DEFAULT;
    let connections = app::TCP_CONNECTIONS;
    let (allowance, held) = (listener::TCP_ALLOWANCE, listener::HELD_BYTES);
    let delayed = listener::DELAYED_BYTES;
    let (kept, leases, written) = (sink::KEPT_PAIRS, mapping::lease::LIMIT, journal::PAIRS);
    let mut rows = vec![
        (
            format!(
                "messages on TCP connections | {} MiB, and {} KiB for each of {} connections",
                mib(proxy.tcp_memory),
                allowance / KIB,
                grouped(connections)
            ),
            mib(proxy.tcp_memory + connections * allowance),
        ),
        (
            format!(
                "answers that wait for the agent | {} MiB for each worker, {workers} workers at \
                 most",
                mib(held)
            ),
            mib(workers * held),
        ),
        (
            format!(
                "queries that wait for their share of queries in flight | {} MiB for each worker",
                mib(delayed)
            ),
            mib(workers * delayed),
        ),
        (
            format!(
                "queries in flight | {}, under 1 KiB each",
                grouped(proxy.in_flight)
            ),
            mib(proxy.in_flight * IN_FLIGHT),
        ),
        (
            format!(
                "pairs kept while the agent is down | {} pairs of some {KEPT_PAIR} bytes",
                grouped(kept)
            ),
            mib(kept * KEPT_PAIR),
        ),
        (
            format!(
                "leases | {} pairs of some {LEASED_PAIR} bytes",
                grouped(leases)
            ),
            mib(leases * LEASED_PAIR),
        ),
        (
            format!(
                "journal | {} pairs of some {JOURNAL_PAIR} bytes",
                grouped(written)
            ),
            mib(written * JOURNAL_PAIR),
        ),
    ];
    let total = REST + rows.iter().map(|(_, mib)| mib).sum::<usize>();
    for (text, bound) in rows.drain(..) {
        let row = format!("| {text}: {bound} MiB |\n");
        assert!(PAGE.contains(&row), "missing in the table: {row}");
    }
    for row in [
        format!("| rules, code, stacks | {REST} MiB |\n"),
        format!("| total | {total} MiB |\n"),
    ] {
        assert!(PAGE.contains(&row), "missing in the table: {row}");
    }
}
