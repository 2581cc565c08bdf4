//! Encoding of all series of one metric name. The rest of [`super`] only lists the metrics.

use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

/// The sum, and the number of values of each bucket by its upper bound.
pub type Distribution = (f64, Vec<(f64, u64)>);

/// Labels of one series.
pub type Labels<'a> = [(&'static str, &'a str)];

/// A metric's name and its help text. Names of counters come without `_total`, which their encoding
/// adds.
pub struct Name(pub &'static str, pub &'static str);

impl Name {
    /// Writes a counter.
    pub fn counter<'a>(
        &self,
        to: &mut DescriptorEncoder<'_>,
        series: impl IntoIterator<Item = (&'a Labels<'a>, f64)>,
    ) -> fmt::Result {
        let mut metric = to.encode_descriptor(self.0, self.1, None, MetricType::Counter)?;
        for (labels, value) in series {
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
    pub fn gauge<'a>(
        &self,
        to: &mut DescriptorEncoder<'_>,
        series: impl IntoIterator<Item = (&'a Labels<'a>, f64)>,
    ) -> fmt::Result {
        let mut metric = to.encode_descriptor(self.0, self.1, None, MetricType::Gauge)?;
        for (labels, value) in series {
            if labels.is_empty() {
                metric.encode_gauge(&value)?;
            } else {
                metric.encode_family(&labels)?.encode_gauge(&value)?;
            }
        }
        Ok(())
    }

    /// Writes a histogram of durations.
    pub fn histogram<'a>(
        &self,
        to: &mut DescriptorEncoder<'_>,
        series: impl IntoIterator<Item = (&'a Labels<'a>, Distribution)>,
    ) -> fmt::Result {
        let mut metric = to.encode_descriptor(self.0, self.1, None, MetricType::Histogram)?;
        for (labels, (sum, counts)) in series {
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
