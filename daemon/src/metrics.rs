//! Metrics of a program: label values, counters by label, and the families of a scrape.

use std::{
    fmt,
    marker::PhantomData,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use prometheus_client::{
    encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::Unit,
};
pub use shared_maps::words;

/// A closed set of label values.
pub trait Label: Copy + fmt::Debug + Send + Sync + 'static {
    /// Name of the label in metrics.
    const NAME: &'static str;
    /// Every value, in the order of [`Self::index`].
    const ALL: &'static [Self];
    /// Position of the value in [`Self::ALL`].
    fn index(self) -> usize;
    /// Text of the value in metrics and `status`.
    fn text(self) -> &'static str;
    /// Its meaning, in a sentence.
    fn meaning(self) -> &'static str;
}

/// Declares a fieldless enum that is a [`Label`]. The comment of a value is its meaning.
#[macro_export]
macro_rules! label {
    ($(#[$meta:meta])* $name:ident = $label:literal { $($values:tt)* }) => {
        $crate::metrics::words! {
            $(#[$meta])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
            pub enum $name { $($values)* }
        }

        impl $crate::metrics::Label for $name {
            const NAME: &'static str = $label;
            const ALL: &'static [Self] = &$name::ALL;
            fn index(self) -> usize { self as usize }
            fn text(self) -> &'static str { self.as_str() }
            fn meaning(self) -> &'static str { $name::meaning(self) }
        }
    };
}

/// For the documentation of a metric with label `L`: metric, label, value, meaning.
pub fn meanings<L: Label>(metric: &'static str) -> impl Iterator<Item = [&'static str; 4]> {
    let all = L::ALL.iter();
    all.map(move |label| [metric, L::NAME, label.text(), label.meaning()])
}

/// One counter for each value of a label, for rare events. Clones share the counters.
#[derive(Clone, Debug)]
pub struct Counts<L> {
    counts: Arc<[AtomicU64]>,
    label: PhantomData<L>,
}

impl<L: Label> Default for Counts<L> {
    fn default() -> Self {
        Self {
            counts: L::ALL.iter().map(|_| AtomicU64::new(0)).collect(),
            label: PhantomData,
        }
    }
}

impl<L: Label> Counts<L> {
    /// Counts one event with `label`.
    pub fn inc(&self, label: L) {
        if let Some(count) = self.counts.get(label.index()) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Events with `label` so far.
    pub fn get(&self, label: L) -> u64 {
        let count = self.counts.get(label.index());
        count.map_or(0, |count| count.load(Ordering::Relaxed))
    }
}

/// Writes the families of one scrape; [`families!`](crate::families) is its notation.
///
/// A name that ends in `_bytes` has that unit.
#[derive(Debug)]
pub struct Families<'a, 'e>(pub &'a mut DescriptorEncoder<'e>);

impl Families<'_, '_> {
    /// A metric of any kind, without labels of its own.
    pub fn metric(&mut self, name: &str, help: &str, metric: &impl EncodeMetric) -> fmt::Result {
        metric.encode(self.begin(name, help, metric.metric_type())?)
    }

    /// Histograms of durations; the name ends in `_seconds`.
    pub fn durations(&mut self, name: &str, help: &str, metric: &impl EncodeMetric) -> fmt::Result {
        let name = name.strip_suffix("_seconds").unwrap_or(name);
        let (unit, kind) = (Some(&Unit::Seconds), metric.metric_type());
        metric.encode(self.0.encode_descriptor(name, help, unit, kind)?)
    }

    /// A level, or 1 while a condition holds.
    pub fn gauge(&mut self, name: &str, help: &str, value: impl TryInto<i64>) -> fmt::Result {
        self.metric(name, help, &gauge(value))
    }

    /// A number that only grows.
    pub fn counter(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        self.metric(name, help, &ConstCounter::new(value))
    }

    /// A level for each value of a label.
    pub fn gauges<V: TryInto<i64>>(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        values: impl IntoIterator<Item = (impl AsRef<str>, V)>,
    ) -> fmt::Result {
        let mut family = self.begin(name, help, MetricType::Gauge)?;
        for (of, value) in values {
            gauge(value).encode(family.encode_family(&[(label, of.as_ref())])?)?;
        }
        Ok(())
    }

    /// A counter for each value of a label.
    pub fn counters(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        values: impl IntoIterator<Item = (impl AsRef<str>, u64)>,
    ) -> fmt::Result {
        let mut family = self.begin(name, help, MetricType::Counter)?;
        for (of, value) in values {
            let counter = ConstCounter::new(value);
            counter.encode(family.encode_family(&[(label, of.as_ref())])?)?;
        }
        Ok(())
    }

    /// A level for each value of `L`.
    pub fn gauge_by<L: Label, V: TryInto<i64>>(
        &mut self,
        name: &str,
        help: &str,
        value: impl Fn(L) -> V,
    ) -> fmt::Result {
        let all = L::ALL.iter();
        self.gauges(name, help, L::NAME, all.map(|l| (l.text(), value(*l))))
    }

    /// A counter for each value of `L`.
    pub fn counter_by<L: Label>(
        &mut self,
        name: &str,
        help: &str,
        value: impl Fn(L) -> u64,
    ) -> fmt::Result {
        let all = L::ALL.iter();
        self.counters(name, help, L::NAME, all.map(|l| (l.text(), value(*l))))
    }

    fn begin<'s>(
        &'s mut self,
        name: &'s str,
        help: &str,
        kind: MetricType,
    ) -> Result<MetricEncoder<'s>, fmt::Error> {
        let (name, unit) = match name.strip_suffix("_bytes") {
            Some(name) => (name, Some(&Unit::Bytes)),
            None => (name, None),
        };
        self.0.encode_descriptor(name, help, unit, kind)
    }
}

fn gauge(value: impl TryInto<i64>) -> ConstGauge<i64> {
    ConstGauge::new(value.try_into().unwrap_or(i64::MAX))
}

/// Writes families to [`Families`]: for each its help text as a comment, the method that writes it,
/// its name, its label unless the method has one or needs none, and what it is made of.
#[macro_export]
macro_rules! families {
    ($to:expr; $($(#[doc = $help:literal])+ $method:ident $name:ident $([$label:expr])? = $value:expr;)+) => {{
        $($to.$method(stringify!($name), concat!($($help),+).trim_ascii_start(), $($label,)? $value)?;)+
        ::core::fmt::Result::Ok(())
    }};
}
