//! The plot: four panels over the number of Services, on logarithmic scales, as SVG.

use std::iter;

use anyhow::Result;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::percentile;
use crate::against::contender::Contender;
use crate::against::measure::Row;
use crate::against::report::time;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

const DARK: RGBColor = RGBColor(0x22, 0x22, 0x22);
const GREY: RGBColor = RGBColor(0x55, 0x55, 0x55);
const FAINT: RGBColor = RGBColor(0xdd, 0xdd, 0xdd);
/// Height of a label, and so the least distance between two, in pixels.
const LABEL: i32 = 14;

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
fn colour(contender: Contender) -> RGBColor {
    match contender {
        Contender::KubeProxyNftables => RGBColor(0xb3, 0x42, 0x1f),
        Contender::KubeProxyIptables => RGBColor(0xe0, 0x9f, 0x3e),
        Contender::KubeProxyIptablesLegacy => RGBColor(0x8a, 0x6d, 0x3b),
        Contender::KplaneStandalone => RGBColor(0x1f, 0x6f, 0xb3),
        Contender::Kplane => RGBColor(0x3b, 0xa3, 0xa0),
        Contender::KplaneIptables => RGBColor(0x6a, 0x4f, 0xb3),
        Contender::KplaneIptablesLegacy => RGBColor(0x9a, 0x8f, 0xd0),
        Contender::KplaneUserspace => RGBColor(0x4f, 0x8f, 0x3a),
    }
}

/// Letters placed by the left end of their middle.
fn letters(size: i32, colour: RGBColor) -> TextStyle<'static> {
    let style = ("sans-serif", size).into_font().color(&colour);
    style.pos(Pos::new(HPos::Left, VPos::Center))
}

/// The picture.
pub(crate) fn svg(rows: &[Row], subtitle: &str) -> Result<String> {
    let mut out = String::new();
    let root = SVGBackend::with_string(&mut out, (920, 716)).into_drawing_area();
    root.fill(&WHITE)?;
    let (head, body) = root.split_vertically(84);
    let title = "kplane and kube-proxy on one node, one API server";
    head.draw(&Text::new(title, (20, 22), letters(21, DARK)))?;
    head.draw(&Text::new(subtitle, (20, 44), letters(15, GREY)))?;
    for (contender, x) in shown(rows).zip((26..).step_by(180)) {
        head.draw(&Circle::new((x, 65), 5, colour(contender).filled()))?;
        head.draw(&Text::new(
            contender.name(),
            (x + 10, 65),
            letters(15, DARK),
        ))?;
    }
    for (area, panel) in body.split_evenly((2, 2)).iter().zip(&PANELS) {
        draw(area, panel, rows)?;
    }
    root.present()?;
    drop((head, body, root));
    Ok(out)
}

fn shown(rows: &[Row]) -> impl Iterator<Item = Contender> {
    Contender::ALL
        .into_iter()
        .filter(|contender| rows.iter().any(|row| row.contender == *contender))
}

/// The least and the largest that a logarithmic scale can show.
fn extent(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let positive = values.filter(|value| *value > 0.0);
    let least = positive.clone().reduce(f64::min).unwrap_or(1.0);
    (least, positive.reduce(f64::max).unwrap_or(1.0))
}

/// One panel.
fn draw(area: &Area<'_>, panel: &Panel, rows: &[Row]) -> Result<()> {
    let mut sizes: Vec<f64> = rows.iter().map(|row| f64::from(row.services)).collect();
    sizes.dedup();
    let (fewest, most) = extent(sizes.iter().copied());
    // Room at both ends, so that points do not sit on the frame, and on the right for labels.
    let room = (most / fewest).max(1.3);
    let across = fewest / room.powf(0.05)..most * room.powf(0.3);
    let (low, high) = extent(rows.iter().map(panel.value));
    let low = low.log10().floor();
    let high = high.log10().ceil().max(low + 1.0);
    let exponents = iter::successors(Some(low), |exponent| Some(exponent + 1.0));
    let tens = exponents.take_while(|exponent| *exponent <= high);
    let up = 10f64.powf(low)..10f64.powf(high);
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .set_label_area_size(LabelAreaPosition::Left, 64)
        .set_label_area_size(LabelAreaPosition::Bottom, 40)
        .caption(panel.title, ("sans-serif", 16, FontStyle::Bold, &DARK))
        .build_cartesian_2d(
            across.log_scale().with_key_points(sizes),
            up.clone()
                .log_scale()
                .with_key_points(tens.map(|ten| 10f64.powf(ten)).collect()),
        )?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .bold_line_style(FAINT)
        .axis_style(FAINT)
        .label_style(("sans-serif", 14, &GREY))
        .x_desc("Services")
        .x_label_formatter(&|size| size.to_string())
        .y_label_formatter(&|value| (panel.show)(*value))
        .draw()?;
    let mut ends = Vec::new();
    for contender in shown(rows) {
        let its = rows.iter().filter(|row| row.contender == contender);
        let points = its.map(|row| (f64::from(row.services), (panel.value)(row).max(up.start)));
        let colour = colour(contender);
        ends.extend(points.clone().next_back().map(|end| (end, colour)));
        let line = LineSeries::new(points, colour.filled().stroke_width(2));
        chart.draw_series(line.point_size(4))?;
    }
    // Values at the ends of lines, moved apart where they would lie on each other.
    ends.sort_by(|((_, a), _), ((_, b), _)| a.total_cmp(b));
    let mut above = i32::MAX;
    for (end, colour) in ends {
        let y = chart.backend_coord(&end).1;
        above = y.min(above - LABEL);
        let style = letters(15, colour);
        let label = Text::new((panel.show)(end.1), (8, above - y), style);
        chart.draw_series([EmptyElement::at(end) + label])?;
    }
    Ok(())
}
