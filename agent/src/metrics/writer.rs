//! Families of a scrape, written to Prometheus text.

use prometheus_client::{
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{counter::ConstCounter, gauge::ConstGauge},
    registry::Unit,
};

/// Values of one family with their labels.
pub(super) type Labelled<'a> = (&'a [(&'static str, &'a str)], u64);

/// Writes families of one scrape.
pub(super) struct Writer<'a, 'e> {
    pub(super) encoder: &'a mut DescriptorEncoder<'e>,
}

impl Writer<'_, '_> {
    pub(super) fn gauge(
        &mut self,
        name: &str,
        help: &str,
        value: u64,
    ) -> Result<(), std::fmt::Error> {
        use prometheus_client::metrics::MetricType::Gauge;
        let family = self.encoder.encode_descriptor(name, help, None, Gauge)?;
        ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX)).encode(family)
    }

    pub(super) fn labelled(
        &mut self,
        name: &str,
        help: &str,
        values: &[Labelled<'_>],
    ) -> Result<(), std::fmt::Error> {
        use prometheus_client::metrics::MetricType::Gauge;
        let mut family = self.encoder.encode_descriptor(name, help, None, Gauge)?;
        for (labels, value) in values {
            let gauge = ConstGauge::new(i64::try_from(*value).unwrap_or(i64::MAX));
            gauge.encode(family.encode_family(labels)?)?;
        }
        Ok(())
    }

    pub(super) fn counter(
        &mut self,
        name: &str,
        help: &str,
        value: u64,
    ) -> Result<(), std::fmt::Error> {
        use prometheus_client::metrics::MetricType::Counter;
        let family = self.encoder.encode_descriptor(name, help, None, Counter)?;
        ConstCounter::new(value).encode(family)
    }

    pub(super) fn counters(
        &mut self,
        name: &str,
        help: &str,
        values: &[(&'static str, &'static str, u64)],
    ) -> Result<(), std::fmt::Error> {
        use prometheus_client::metrics::MetricType::Counter;
        let (name, unit) = match name.strip_suffix("_bytes") {
            Some(name) => (name, Some(&Unit::Bytes)),
            None => (name, None),
        };
        let mut family = self.encoder.encode_descriptor(name, help, unit, Counter)?;
        for (label, word, value) in values {
            let labels = [(*label, *word)];
            ConstCounter::new(*value).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

/// As a value of a metric.
pub(super) fn count(value: usize) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}
