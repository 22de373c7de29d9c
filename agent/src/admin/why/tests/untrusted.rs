//! Answers of DNS servers that do not count.

use super::*;

#[test]
fn a_name_whose_answer_does_not_count_names_the_server_and_the_remedy() {
    let mut found = found();
    found.has_tier = true;
    found.untrusted = vec![UntrustedAnswer {
        meant_by: MeantBy::Firewall,
        name: Fqdn::normalise("www.example.com"),
        address: [192, 0, 2, 1].into(),
        servers: vec!["192.0.2.54:53".parse().unwrap()],
    }];
    found.trusted_dns = vec!["192.0.2.53:53".parse().unwrap()];
    let mut dropped = read();
    dropped.peer.verdict = Some(Verdict::NoRule);
    dropped.entries = Ok(Entries::default());
    let why = why(&found, &[dropped], true);
    missing(
        &why,
        "names",
        "the answer with 192.0.2.1 for www.example.com came from 192.0.2.54:53, which does not count",
    );
    for says in ["trusted now: 192.0.2.53:53", "--dns-server", "DNS Service"] {
        missing(&why, "names", says);
    }
    // If packets to the address pass, no trusted answer is missing.
    let passes = self::why(&found, &[read()], true);
    assert!(passes.hops.iter().all(|hop| hop.state != HopState::Missing));
}

#[test]
fn an_answer_that_opened_nothing_names_the_server_although_nothing_was_learned() {
    let mut found = found();
    found.names = Vec::new();
    found.untrusted = vec![UntrustedAnswer {
        meant_by: MeantBy::ToFqdns,
        name: Fqdn::normalise("www.example.com"),
        address: [192, 0, 2, 1].into(),
        servers: vec!["10.2.0.7:53".parse().unwrap()],
    }];
    let mut dropped = read();
    dropped.peer.verdict = Some(Verdict::NoRule);
    dropped.entries = Ok(Entries::default());
    let why = why(&found, &[dropped], true);
    for says in [
        "came from 10.2.0.7:53, which does not count for toFQDNs (--tofqdns-servers=trusted)",
        "trust 10.2.0.7:53: with --dns-server",
    ] {
        missing(&why, "names", says);
    }
}
