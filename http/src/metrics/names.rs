//! Encoding of all series of one metric name. The rest of [`super`] only lists the metrics.

use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

/// The sum, and the number of values of each bucket by its upper bound.
pub type Distribution = (f64, Vec<(f64, u64)>);

/// The name and the value of a label.
pub type Label<'a> = (&'static str, &'a str);

/// Returns the only series of a metric without labels.
pub fn alone<T>(value: T) -> ([Label<'static>; 0], T) {
    ([], value)
}

/// A metric's name and its help text. Names of counters come without `_total`, which their encoding
/// adds.
pub struct Metric {
    name: &'static str,
    help: &'static str,
}

impl Metric {
    /// Creates a metric without a help text.
    pub fn new(name: &'static str) -> Self {
        Self { name, help: "" }
    }

    /// Sets the help text.
    #[must_use]
    pub fn help(self, help: &'static str) -> Self {
        Self { help, ..self }
    }

    /// Writes a counter.
    pub fn counter<'a, L: AsRef<[Label<'a>]>>(
        &self,
        to: &mut DescriptorEncoder<'_>,
        series: impl IntoIterator<Item = (L, f64)>,
    ) -> fmt::Result {
        let mut metric = to.encode_descriptor(self.name, self.help, None, MetricType::Counter)?;
        for (labels, value) in series {
            let labels = labels.as_ref();
            if labels.is_empty() {
                metric.encode_counter::<NoLabelSet, _, f64>(&value, None)?;
            } else {
                let mut one = metric.encode_family(&labels)?;
                one.encode_counter::<NoLabelSet, _, f64>(&value, None)?;
            }
        }
        Ok(())
    }

    /// Writes a gauge.
    pub fn gauge<'a, L: AsRef<[Label<'a>]>>(
        &self,
        to: &mut DescriptorEncoder<'_>,
        series: impl IntoIterator<Item = (L, f64)>,
    ) -> fmt::Result {
        let mut metric = to.encode_descriptor(self.name, self.help, None, MetricType::Gauge)?;
        for (labels, value) in series {
            let labels = labels.as_ref();
            if labels.is_empty() {
                metric.encode_gauge(&value)?;
            } else {
                metric.encode_family(&labels)?.encode_gauge(&value)?;
            }
        }
        Ok(())
    }

    /// Writes a histogram of durations.
    pub fn histogram<'a, L: AsRef<[Label<'a>]>>(
        &self,
        to: &mut DescriptorEncoder<'_>,
        series: impl IntoIterator<Item = (L, Distribution)>,
    ) -> fmt::Result {
        let mut metric = to.encode_descriptor(self.name, self.help, None, MetricType::Histogram)?;
        for (labels, (sum, counts)) in series {
            let labels = labels.as_ref();
            // The count is the sum of the printed buckets, so that both always agree.
            let count = counts.iter().map(|(_, n)| n).sum();
            if labels.is_empty() {
                metric.encode_histogram::<NoLabelSet>(sum, count, &counts, None)?;
            } else {
                let mut one = metric.encode_family(&labels)?;
                one.encode_histogram::<NoLabelSet>(sum, count, &counts, None)?;
            }
        }
        Ok(())
    }
}
