//! The two text formats: OpenMetrics for clients that ask for it, and the older Prometheus format,
//! which kube-proxy uses, for all others.
//!
//! The Prometheus format differs from OpenMetrics in three respects here. Counters have the suffix
//! `_total` in HELP and TYPE lines too. Whole numbers have no fraction. There is no mark at the
//! end.

use hyper::header::{ACCEPT, HeaderMap};
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;

/// A format of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// The older text format.
    Prometheus,
    /// The newer text format.
    OpenMetrics,
}

impl Format {
    /// Returns the format that a client wants. Weights are ignored: a client that names OpenMetrics
    /// can read it.
    pub fn wanted(headers: &HeaderMap) -> Self {
        let accepts = |value: &hyper::header::HeaderValue| {
            let text = value.to_str().unwrap_or_default();
            text.contains("application/openmetrics-text")
        };
        if headers.get_all(ACCEPT).iter().any(accepts) {
            Self::OpenMetrics
        } else {
            Self::Prometheus
        }
    }

    /// Returns the value of the header field Content-Type.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }

    /// Prints all metrics of a registry.
    pub fn print(self, registry: &Registry) -> String {
        let mut open = String::with_capacity(32 * 1024);
        // Writing to a string cannot fail.
        let _ = encode(&mut open, registry);
        match self {
            Self::OpenMetrics => open,
            Self::Prometheus => to_prometheus(&open),
        }
    }
}

fn to_prometheus(open: &str) -> String {
    let mut text = String::with_capacity(open.len() + 1024);
    let mut help = None;
    for line in open.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            // The HELP line is printed with the TYPE line, because the type determines the name.
            help = rest.split_once(' ');
        } else if let Some((name, kind)) = type_of(line) {
            let suffix = if kind == "counter" { "_total" } else { "" };
            if let Some((_, help)) = help.take() {
                text.push_str(&format!("# HELP {name}{suffix} {help}\n"));
            }
            text.push_str(&format!("# TYPE {name}{suffix} {kind}\n"));
        } else if !line.starts_with('#') {
            text.push_str(&without_fraction(line));
            text.push('\n');
        }
    }
    text
}

/// Returns a sample without `.0` in its value and in its bucket's bound.
fn without_fraction(sample: &str) -> String {
    let sample = sample.strip_suffix(".0").unwrap_or(sample);
    match sample.split_once("{le=\"") {
        // The bound is the first label, and a number.
        Some((name, rest)) => format!("{name}{{le=\"{}", rest.replacen(".0\"", "\"", 1)),
        None => sample.to_owned(),
    }
}

fn type_of(line: &str) -> Option<(&str, &str)> {
    line.strip_prefix("# TYPE ")?.split_once(' ')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_older_format_has_full_names() {
        let open = "# HELP a_b Some text.\n# TYPE a_b counter\na_b_total{x=\"y\"} 1\n\
                    # HELP c_total Other.\n# TYPE c_total gauge\nc_total{v=\"1.0\"} 2.0\n\
                    # HELP d Three.\n# TYPE d histogram\nd_bucket{le=\"1.0\"} 0\n\
                    d_bucket{le=\"10.5\"} 0\n# EOF\n";
        let text = "# HELP a_b_total Some text.\n# TYPE a_b_total counter\na_b_total{x=\"y\"} 1\n\
                    # HELP c_total Other.\n# TYPE c_total gauge\nc_total{v=\"1.0\"} 2\n\
                    # HELP d Three.\n# TYPE d histogram\nd_bucket{le=\"1\"} 0\n\
                    d_bucket{le=\"10.5\"} 0\n";
        assert_eq!(to_prometheus(open), text);
    }

    #[test]
    fn prometheus_gets_what_it_asks_for() {
        let wanted = |accept: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(ACCEPT, accept.parse().unwrap());
            Format::wanted(&headers)
        };
        assert_eq!(wanted("*/*"), Format::Prometheus);
        assert_eq!(
            wanted("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.3"),
            Format::OpenMetrics
        );
        assert_eq!(Format::wanted(&HeaderMap::new()), Format::Prometheus);
    }
}
