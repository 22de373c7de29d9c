//! Addresses per second that one proxy may have learned, and each endpoint's share of them.

use std::time::Duration;

use dns_policy::boot_time::BootTime;
use foldhash::{HashMap, HashMapExt as _};
use shared_maps::EndpointId;

/// Seconds of the rate that one endpoint may use at once.
const BURST: f64 = 10.0;

/// The rate of one stream.
///
/// Each recently learned pair counts against its endpoint. The rate pays these counts off for all
/// endpoints together, each in proportion to its count. By the rule of [`limits::quota::Quota`] an
/// endpoint may owe no more than is free. An endpoint that floods the proxy gets half of the rate, and the other
/// endpoints have the other half.
#[derive(Debug)]
pub(in crate::core) struct MappingRate {
    owed: HashMap<EndpointId, f64>,
    total: f64,
    at: BootTime,
}

impl MappingRate {
    pub(in crate::core) fn new(now: BootTime) -> Self {
        Self {
            owed: HashMap::new(),
            total: 0.0,
            at: now,
        }
    }

    /// Whether `endpoint` may have this many more addresses learned, at `rate` addresses per
    /// second.
    pub(in crate::core) fn take(
        &mut self,
        endpoint: EndpointId,
        addresses: usize,
        rate: u32,
        now: BootTime,
    ) -> bool {
        let rate = f64::from(rate);
        self.pay_off(rate, now);
        let addresses = u32::try_from(addresses).unwrap_or(u32::MAX).max(1);
        // A price above what any endpoint may owe would never pass.
        let price = f64::from(addresses).min(rate * BURST);
        let own = self.owed.get(&endpoint).copied().unwrap_or(0.0) + price;
        let free = 2.0 * rate * BURST - self.total - price;
        if own > free {
            return false;
        }
        self.owed.insert(endpoint, own);
        self.total += price;
        true
    }

    fn pay_off(&mut self, rate: f64, now: BootTime) {
        let elapsed = Duration::from_nanos(now.nanos().saturating_sub(self.at.nanos()));
        if elapsed.is_zero() {
            return;
        }
        self.at = now;
        if self.total == 0.0 {
            return;
        }
        let left = (1.0 - elapsed.as_secs_f64() * rate / self.total).max(0.0);
        self.owed.retain(|_, owed| {
            *owed *= left;
            // Below a thousandth of an address the endpoint is forgotten.
            *owed > 0.001
        });
        self.total = self.owed.values().sum();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: u32 = 20_000;

    /// Has endpoint 1 ask for `flood` addresses every 10 ms for a minute, and endpoint 2 for 5. Gives
    /// how many addresses of each endpoint pass.
    fn a_minute(flood: usize) -> [usize; 2] {
        let mut rate = MappingRate::new(BootTime::START);
        let mut passed = [0; 2];
        for turn in 0..6000 {
            let now = BootTime::from_nanos(turn * 10_000_000);
            let mut take = |id, count| {
                let all = (0..count).filter(|_| rate.take(EndpointId(id), 1, RATE, now));
                all.count()
            };
            passed[0] += take(1, flood);
            passed[1] += take(2, 5);
        }
        passed
    }

    #[test]
    fn a_flood_of_one_endpoint_costs_another_nothing() {
        for flood in [276, 2760] {
            let [flooded, other] = a_minute(flood);
            assert_eq!(other, 30_000, "at {flood}00 a second");
            let most = 60 * 20_000 + 10 * 20_000;
            assert!(flooded <= most && flooded > 60 * 19_000, "{flooded}");
        }
    }

    #[test]
    fn endpoints_that_ask_for_all_get_equal_shares() {
        let mut rate = MappingRate::new(BootTime::START);
        let mut passed = [0_u32; 4];
        for turn in 0..6000 {
            let now = BootTime::from_nanos(turn * 10_000_000);
            for _ in 0..200 {
                for (id, passed) in (0..).zip(&mut passed) {
                    *passed += u32::from(rate.take(EndpointId(id), 1, RATE, now));
                }
            }
        }
        let (least, most) = (passed.iter().min().unwrap(), passed.iter().max().unwrap());
        assert!(most - least < most / 100, "{passed:?}");
    }

    #[test]
    fn an_endpoint_that_asks_no_more_is_forgotten() {
        let mut rate = MappingRate::new(BootTime::START);
        assert!(rate.take(EndpointId(1), 1000, RATE, BootTime::START));
        assert!(rate.take(EndpointId(2), 1, RATE, BootTime::START.plus_secs(1)));
        assert_eq!(rate.owed.len(), 1);
    }
}
