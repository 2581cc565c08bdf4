//! The history of convergence: how many nodes were in sync, for the last hour.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kplane_agents::hub::Hub;
use parking_lot::Mutex;

use super::html::Html;
use crate::server::census;

/// Time between two samples.
const PAUSE: Duration = Duration::from_secs(10);
/// Number of samples: an hour.
const SAMPLES: usize = 360;
/// Size of the picture.
const WIDTH: usize = 720;
const HEIGHT: usize = 48;

/// The fleet at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sample {
    at: Instant,
    in_sync: usize,
    nodes: usize,
}

/// The last samples; 16 KiB at most.
#[derive(Debug, Default)]
pub(super) struct Trend(Mutex<VecDeque<Sample>>);

impl Trend {
    /// Takes samples until the control plane ends.
    pub(super) async fn follow(self: Arc<Self>, hub: Arc<Hub>) {
        let mut ticks = tokio::time::interval(PAUSE);
        loop {
            tokio::select! {
                _ = ticks.tick() => self.add(&hub),
                () = hub.shutdown().cancelled() => return,
            }
        }
    }

    fn add(&self, hub: &Hub) {
        let census = census(hub);
        let nodes = census.states.values().sum();
        if nodes == 0 {
            // The input is not complete, or there is nothing to be in sync.
            return;
        }
        let sample = Sample {
            at: Instant::now(),
            in_sync: census.states.get("in_sync").copied().unwrap_or_default(),
            nodes,
        };
        self.push(sample);
    }

    fn push(&self, sample: Sample) {
        let mut samples = self.0.lock();
        samples.push_back(sample);
        if samples.len() > SAMPLES {
            samples.pop_front();
        }
    }

    /// Returns a picture, and its content in words.
    pub(super) fn html(&self) -> Html {
        let samples = self.0.lock();
        let mut html = Html::default();
        let (Some(first), Some(last)) = (samples.front(), samples.back()) else {
            return html;
        };
        let span = last.at.saturating_duration_since(first.at);
        let worst = samples.iter().map(|sample| sample.nodes - sample.in_sync).max();
        let words = format!(
            "Nodes in sync at this replica, last {}: {} of {} now, {} out of sync at worst",
            kplane_view::time::human(span),
            last.in_sync,
            last.nodes,
            worst.unwrap_or_default()
        );
        html.element("h2", "", "Convergence").element("p", "faint", &words);
        html.raw("<div class=\"axes\"><p class=\"faint\"><span>")
            .text(format_args!("{} of {0}", last.nodes))
            .raw("</span><span>0</span></p><svg class=\"trend\" role=\"img\" preserveAspectRatio=\"none\"")
            .attribute("viewBox", format_args!("0 0 {WIDTH} {HEIGHT}"))
            .attribute("aria-label", &words)
            .raw(">");
        let width = WIDTH / SAMPLES;
        for (place, sample) in samples.iter().enumerate() {
            let share = |count: usize| (count * HEIGHT).div_ceil(sample.nodes.max(1)).min(HEIGHT);
            let behind = share(sample.nodes - sample.in_sync);
            let x = (SAMPLES - samples.len() + place) * width;
            for (class, y, height) in [
                ("fill-good", behind, HEIGHT - behind),
                ("fill-bad", 0, behind),
            ] {
                if height > 0 {
                    html.raw("<rect")
                        .attribute("class", class)
                        .attribute("x", x)
                        .attribute("y", y)
                        .attribute("width", width)
                        .attribute("height", height)
                        .raw("/>");
                }
            }
        }
        html.raw("</svg><p></p><p class=\"faint\">");
        for moment in ["an hour ago", "30 min", "now"] {
            html.element("span", "", moment);
        }
        html.raw("</p></div>");
        html
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_hour_is_kept_and_the_worst_is_named() {
        let trend = Trend::default();
        assert_eq!(trend.html().as_str(), "");
        let start = Instant::now();
        for second in 0..1_000_u64 {
            trend.push(Sample {
                at: start + PAUSE * u32::try_from(second).unwrap(),
                in_sync: if second == 900 { 3 } else { 5 },
                nodes: 5,
            });
        }
        assert_eq!(trend.0.lock().len(), SAMPLES);
        let html = trend.html();
        assert!(
            html.as_str().contains("5 of 5 now, 2 out of sync at worst"),
            "{html:?}"
        );
        assert_eq!(html.as_str().matches("fill-bad").count(), 1);
    }
}
