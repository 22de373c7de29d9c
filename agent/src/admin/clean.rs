//! The report of `fqdn cache clean`.

use std::collections::BTreeSet;

use agent_core::core::clean::Unrevoked;
use dns_policy::{boot_time::BootTime, wall_time};

use super::model::{Done, StillOpen};
use crate::proxies::ProxyView;

/// Maximum pairs that one report lists.
const LISTED: usize = 1000;

/// How many of the `before` addresses were forgotten; if there were none, also why.
pub(super) fn forgot(pattern: Option<&str>, before: usize, after: usize) -> String {
    let gone = before.saturating_sub(after);
    match (before, gone, pattern) {
        (0, ..) => "there was no learned address to forget".to_owned(),
        (_, 0, Some(pattern)) => format!(
            "forgot 0 of {before} learned addresses: no name matches {pattern}; `fqdn cache list` shows \
             the names"
        ),
        _ => format!("forgot {gone} of {before} learned addresses"),
    }
}

/// `forgot`, and the pairs that are still open, with the time and the proxies that keep them open.
pub(super) fn done(forgot: String, left: &[Unrevoked], proxies: &[ProxyView]) -> Done {
    let Some(last) = left.iter().map(|pair| pair.until).max() else {
        return Done {
            message: forgot,
            ..Done::default()
        };
    };
    let streams: BTreeSet<u64> = left.iter().flat_map(|p| &p.streams).map(|s| s.0).collect();
    let name = |stream: &u64| {
        let proxy = proxies.iter().find(|proxy| proxy.stream == *stream);
        match proxy {
            Some(proxy) => format!("proxy {}", proxy.instance),
            None => "a proxy that is no longer connected and whose process runs".to_owned(),
        }
    };
    let holders: BTreeSet<String> = streams.iter().map(name).collect();
    let holders: Vec<String> = holders.into_iter().collect();
    Done {
        message: format!(
            "{forgot}; {} of them stay open, until {} at the latest: {} did not give its leases \
             back; if it hangs, end its process",
            left.len(),
            at(last),
            holders.join(", ")
        ),
        still_open: left
            .iter()
            .take(LISTED)
            .map(|pair| StillOpen {
                name: pair.name.to_string(),
                address: pair.address.to_string(),
                until: at(pair.until),
            })
            .collect(),
    }
}

/// An instant of this boot as wall time, to the second.
fn at(instant: BootTime) -> String {
    const SECOND: u64 = 1_000_000_000;
    let left = instant.nanos().saturating_sub(BootTime::now().nanos());
    wall_time::render(wall_time::now().saturating_add(left) / SECOND * SECOND)
}

#[cfg(test)]
mod tests {
    use dns_policy::name::Fqdn;

    use super::*;
    use agent_core::core::event::StreamId;

    #[test]
    fn names_that_stay_open_are_listed_with_their_end_and_cause() {
        let none = done("forgot 1 of 1".to_owned(), &[], &[]);
        assert_eq!(none.message, "forgot 1 of 1");
        assert!(none.still_open.is_empty());
        let left = Unrevoked {
            name: Fqdn::normalise("www.example.com"),
            address: [192, 0, 2, 1].into(),
            until: BootTime::now().plus_secs(1800),
            streams: [StreamId(3), StreamId(4)].into(),
        };
        let proxy = ProxyView {
            stream: 3,
            instance: "replica1".to_owned(),
            ..ProxyView::default()
        };
        let some = done("forgot 1 of 1".to_owned(), &[left], &[proxy]);
        for part in [
            "1 of them stay open, until 2",
            "proxy replica1",
            "no longer connected",
        ] {
            assert!(some.message.contains(part), "{}", some.message);
        }
        assert_eq!(some.still_open[0].name, "www.example.com.");
        assert_eq!(some.still_open[0].address, "192.0.2.1");
    }
}
