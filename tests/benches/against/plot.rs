//! The plot: four panels over the number of Services, on logarithmic scales, as SVG.

use std::fmt::Write as _;

use crate::against::contender::Contender;
use crate::against::measure::{Row, percentile};
use crate::against::report::time;

/// Of the whole picture and of a panel's plane, in pixels.
const WIDTH: f64 = 920.0;
const HEIGHT: f64 = 716.0;
const PLANE_WIDTH: f64 = 330.0;
const PLANE_HEIGHT: f64 = 210.0;
/// Corners of the planes.
const LEFT: [f64; 2] = [80.0, 540.0];
const TOP: [f64; 2] = [112.0, 426.0];
/// Height of a label, and so the least distance between two.
const LABEL: f64 = 13.0;

/// One quantity.
struct Panel {
    title: &'static str,
    value: fn(&Row) -> f64,
    show: fn(f64) -> String,
}

const PANELS: [Panel; 4] = [
    Panel {
        title: "one endpoint change: API write to kernel, p50",
        value: |row| percentile(&row.from_request, 50).as_secs_f64(),
        show: seconds,
    },
    Panel {
        title: "CPU for one endpoint change",
        value: |row| row.change_cpu.as_secs_f64(),
        show: seconds,
    },
    Panel {
        title: "cold start: process start to kernel",
        value: |row| row.cold.as_secs_f64(),
        show: seconds,
    },
    Panel {
        title: "resident memory",
        value: |row| row.memory.now as f64 / f64::from(1 << 20),
        show: |mib| format!("{mib:.0} MiB"),
    },
];

fn seconds(value: f64) -> String {
    time(std::time::Duration::from_secs_f64(value))
}

/// Readable on white and on dark, also by those who see no red: the shade differs too.
fn colour(contender: Contender) -> &'static str {
    match contender {
        Contender::KubeProxyNftables => "#b3421f",
        Contender::KubeProxyIptables => "#e09f3e",
        Contender::KubeProxyIptablesLegacy => "#8a6d3b",
        Contender::KplaneStandalone => "#1f6fb3",
        Contender::Kplane => "#3ba3a0",
        Contender::KplaneIptables => "#6a4fb3",
        Contender::KplaneIptablesLegacy => "#9a8fd0",
        Contender::KplaneUserspace => "#4f8f3a",
    }
}

/// A logarithmic scale from a pixel to another.
struct Scale {
    from: f64,
    to: f64,
    pixels: (f64, f64),
}

impl Scale {
    /// From the power of ten below the smallest to that above the largest.
    fn of(values: impl Iterator<Item = f64> + Clone, pixels: (f64, f64)) -> Self {
        let positive = values.filter(|value| *value > 0.0);
        let least = positive.clone().fold(f64::INFINITY, f64::min);
        let most = positive.fold(0.0, f64::max);
        if most == 0.0 {
            return Self {
                from: 0.0,
                to: 1.0,
                pixels,
            };
        }
        let (from, to) = (least.log10().floor(), most.log10().ceil());
        Self {
            from,
            to: to.max(from + 1.0),
            pixels,
        }
    }

    fn at(&self, value: f64) -> f64 {
        let share = (value.log10() - self.from) / (self.to - self.from);
        self.pixels.0 + share.clamp(0.0, 1.0) * (self.pixels.1 - self.pixels.0)
    }

    /// The powers of ten.
    fn ticks(&self) -> impl Iterator<Item = f64> + use<> {
        let (mut exponent, to) = (self.from, self.to);
        std::iter::from_fn(move || {
            let tick = (exponent <= to).then(|| 10f64.powf(exponent));
            exponent += 1.0;
            tick
        })
    }
}

/// The picture.
pub(crate) fn svg(rows: &[Row], subtitle: &str) -> String {
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    );
    text(
        &mut out,
        (LEFT[0] - 60.0, 28.0),
        "font-size=\"17\" fill=\"#222\"",
        "kplane and kube-proxy on one node, one API server",
    );
    text(&mut out, (LEFT[0] - 60.0, 48.0), "fill=\"#555\"", subtitle);
    let mut x = LEFT[0] - 60.0;
    for contender in shown(rows) {
        let _ = writeln!(
            out,
            "<circle cx=\"{x}\" cy=\"65\" r=\"5\" fill=\"{}\"/>",
            colour(contender)
        );
        text(
            &mut out,
            (x + 10.0, 69.0),
            "fill=\"#222\"",
            contender.name(),
        );
        x += 180.0;
    }
    for (index, panel) in PANELS.iter().enumerate() {
        draw(&mut out, panel, rows, (LEFT[index % 2], TOP[index / 2]));
    }
    out.push_str("</svg>\n");
    out
}

fn shown(rows: &[Row]) -> impl Iterator<Item = Contender> {
    let all = Contender::ALL.into_iter();
    all.filter(|contender| rows.iter().any(|row| row.contender == *contender))
}

/// Of a panel.
struct Scales {
    across: Scale,
    up: Scale,
}

fn draw(out: &mut String, panel: &Panel, rows: &[Row], (left, top): (f64, f64)) {
    let services = || rows.iter().map(|row| f64::from(row.services));
    let least = services().fold(f64::INFINITY, f64::min).log10();
    let most = services().fold(0.0, f64::max).log10();
    let scales = Scales {
        // Room at both ends, so that points do not sit on the frame.
        across: Scale {
            from: least - 0.1,
            to: most.max(least + 0.1) + 0.1,
            pixels: (left, left + PLANE_WIDTH - 60.0),
        },
        up: Scale::of(rows.iter().map(panel.value), (top + PLANE_HEIGHT, top)),
    };
    let style = "font-weight=\"bold\" fill=\"#222\"";
    text(out, (left, top - 10.0), style, panel.title);
    axes(out, panel, rows, &scales, (left, top));
    lines(out, panel, rows, &scales);
}

fn axes(out: &mut String, panel: &Panel, rows: &[Row], scales: &Scales, (left, top): (f64, f64)) {
    let (right, bottom) = (left + PLANE_WIDTH, top + PLANE_HEIGHT);
    let end = "text-anchor=\"end\" fill=\"#555\"";
    for tick in scales.up.ticks() {
        let y = scales.up.at(tick);
        line(out, (left, y), (right, y), "#dddddd", 1.0);
        text(out, (left - 6.0, y + 4.0), end, &(panel.show)(tick));
    }
    let mut sizes: Vec<u32> = rows.iter().map(|row| row.services).collect();
    sizes.dedup();
    for size in sizes {
        let x = scales.across.at(f64::from(size));
        let middle = "text-anchor=\"middle\" fill=\"#555\"";
        line(out, (x, bottom), (x, bottom + 4.0), "#888888", 1.0);
        text(out, (x, bottom + 18.0), middle, &size.to_string());
    }
    text(out, (right, bottom + 18.0), end, "Services");
}

fn lines(out: &mut String, panel: &Panel, rows: &[Row], scales: &Scales) {
    let mut labels = Vec::new();
    for contender in shown(rows) {
        let colour = colour(contender);
        let its = rows.iter().filter(|row| row.contender == contender);
        let its: Vec<&Row> = its.collect();
        let points: Vec<(f64, f64)> = its
            .iter()
            .map(|row| {
                let x = scales.across.at(f64::from(row.services));
                (x, scales.up.at((panel.value)(row)))
            })
            .collect();
        for pair in points.windows(2) {
            line(out, pair[0], pair[1], colour, 2.0);
        }
        for (x, y) in &points {
            // Writing to a string does not fail.
            let _ = writeln!(
                out,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{colour}\"/>"
            );
        }
        if let (Some((x, y)), Some(row)) = (points.last(), its.last()) {
            labels.push((*x, *y, (panel.show)((panel.value)(row)), colour));
        }
    }
    place(out, labels);
}

/// Values at the ends of lines, moved apart where they would lie on each other.
fn place(out: &mut String, mut labels: Vec<(f64, f64, String, &'static str)>) {
    labels.sort_by(|a, b| b.1.total_cmp(&a.1));
    let mut above = f64::INFINITY;
    for (x, y, label, colour) in labels {
        let y = y.min(above - LABEL);
        above = y;
        let style = format!("fill=\"{colour}\" font-weight=\"bold\"");
        text(out, (x + 8.0, y + 4.0), &style, &label);
    }
}

fn line(out: &mut String, from: (f64, f64), to: (f64, f64), colour: &str, width: f64) {
    // Writing to a string does not fail.
    let _ = writeln!(
        out,
        "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{colour}\" stroke-width=\"{width}\"/>",
        from.0, from.1, to.0, to.1
    );
}

fn text(out: &mut String, (x, y): (f64, f64), style: &str, content: &str) {
    let content = content.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" {style}>{content}</text>"
    );
}
