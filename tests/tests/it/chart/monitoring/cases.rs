//! When alerts fire, and when they do not: reads `cases.txt`. A case begins with `== ALERT`; below each of its minutes
//! stand the series that differ from those of a healthy cluster.

use anyhow::{Context as _, Result};

/// A case of one alert.
#[derive(Debug, Default)]
pub(super) struct Case {
    pub(super) alert: &'static str,
    /// Series that differ while something is wrong, and the minute at which the alert fires.
    pub(super) fires: (Vec<Series>, u32),
    /// Series that differ in a case that is close to it, and the minute at which nothing fires.
    pub(super) quiet: (Vec<Series>, u32),
}

/// A series without the labels of its target, which is behind the `@`, and its values.
pub(super) type Series = (&'static str, &'static str);

/// Returns the series of a healthy cluster, and all cases in the order of the alerts' file.
pub(super) fn cases() -> Result<(Vec<Series>, Vec<Case>)> {
    let (mut healthy, mut cases) = (Vec::new(), Vec::<Case>::new());
    // Whether series are of the minute at which the alert fires, and of that at which nothing does.
    let mut of = [false; 2];
    let lines = include_str!("cases.txt").lines();
    for line in lines.filter(|line| !line.is_empty()) {
        let (word, rest) = line.split_once(' ').context(line)?;
        match (word, cases.last_mut()) {
            ("#", _) => {}
            ("==", _) => cases.push(Case {
                alert: rest,
                ..Case::default()
            }),
            (_, None) => healthy.push((word, rest)),
            ("fires" | "quiet", Some(case)) => {
                of = [false; 2];
                for minute in line.split(", ") {
                    let (word, minute) = minute.split_once(' ').context(line)?;
                    let (at, which) = match word {
                        "fires" => (&mut case.fires.1, 0),
                        _ => (&mut case.quiet.1, 1),
                    };
                    *at = minute.parse().context(line)?;
                    of[which] = true;
                }
            }
            (_, Some(case)) => {
                let both = of.into_iter().zip([&mut case.fires.0, &mut case.quiet.0]);
                let wanted = both.filter(|(is_of, _)| *is_of);
                wanted.for_each(|(_, series)| series.push((word, rest)));
            }
        }
    }
    Ok((healthy, cases))
}
