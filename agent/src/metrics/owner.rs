//! Metrics of takeovers. The owner serves them, and so does a standby that has a metrics address of its own.

use std::fmt;

use daemon::{families, metrics::Families};
use dns_policy::boot_time::BootTime;
use prometheus_client::{collector::Collector, encoding::DescriptorEncoder, registry::Registry};

use crate::owner::takeovers::{OwnerEnd, Takeovers};

/// The values of one scrape.
#[derive(Clone, Copy, Debug, Default)]
pub struct OwnerScrape {
    /// Takeovers since the boot from owners that were stopped.
    pub stopped: u64,
    /// Takeovers since the boot from owners that died.
    pub died: u64,
    /// Those of the last ten minutes.
    pub recent: usize,
    /// Whether no agent stands by although one should; `None` = none has to.
    pub standby_missing: Option<bool>,
    /// Seconds since the owner last answered; `None` = this agent is the owner.
    pub silent_seconds: Option<u64>,
}

impl OwnerScrape {
    pub(crate) fn of(takeovers: &Takeovers, now: BootTime) -> Self {
        Self {
            stopped: takeovers.since_boot(OwnerEnd::Stopped),
            died: takeovers.since_boot(OwnerEnd::Died),
            recent: takeovers.recent(now),
            ..Self::default()
        }
    }

    /// The text of a scrape that has only these values.
    pub(crate) fn text(self) -> Result<String, fmt::Error> {
        let mut registry = Registry::with_prefix("holdfast");
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry)?;
        Ok(text)
    }

    pub(super) fn write(&self, out: &mut Families<'_, '_>) -> fmt::Result {
        let of = |end| match end {
            OwnerEnd::Stopped => self.stopped,
            OwnerEnd::Died => self.died,
        };
        families! { out;
            /// Standbys that became the owner of this node since its boot, by the end of the owner before
            counter_by takeovers = of;
            /// Takeovers of the last ten minutes from owners that died. After three, the next takeover
            /// waits, at most --standby-max-delay
            gauge takeovers_recent = self.recent;
        }?;
        if let Some(missing) = self.standby_missing {
            families! { out;
                /// 1 while no agent stands by, although --standby-expected says that one should; 0
                /// otherwise
                gauge standby_missing = missing;
            }?;
        }
        if let Some(seconds) = self.silent_seconds {
            families! { out;
                /// Seconds since the owner of this node last answered the standby. Only a standby with a
                /// metrics address of its own has this metric
                gauge standby_owner_silent_seconds = seconds;
            }?;
        }
        Ok(())
    }
}

impl Collector for OwnerScrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.write(&mut Families(&mut encoder))
    }
}
