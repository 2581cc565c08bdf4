//! Goals: what is wanted of a number, and whether it is reached.

/// What is wanted of a number.
#[derive(Clone, Copy)]
pub(crate) enum Limit {
    AtMost(f64),
    AtLeast(f64),
}

impl Limit {
    pub(crate) fn text(self) -> String {
        match self {
            Self::AtMost(most) => format!("<= {most}"),
            Self::AtLeast(least) => format!(">= {least}"),
        }
    }

    pub(crate) fn verdict(self, value: f64) -> &'static str {
        let holds = match self {
            Self::AtMost(most) => value <= most,
            Self::AtLeast(least) => value >= least,
        };
        if holds { "reached" } else { "**missed**" }
    }
}

/// Prints a goal that is an upper bound, and what was measured.
pub(crate) fn print(what: &str, most: f64, value: f64, unit: &str) {
    let limit = Limit::AtMost(most);
    let (wanted, verdict) = (limit.text(), limit.verdict(value));
    println!("goal: {what} {wanted} {unit}: {value:.2} {unit} {verdict}");
}
