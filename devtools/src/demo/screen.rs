//! The demo's output: the only module that writes to standard output. It uses colours and block
//! characters on a terminal, and plain ASCII everywhere else.

use std::fmt::Display;
use std::io::{self, IsTerminal as _, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anstream::{AutoStream, ColorChoice};
use owo_colors::{OwoColorize as _, Style};
use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};

/// Number of columns where there is no terminal, and largest number used.
const COLUMNS: usize = 100;
/// Least number of columns; narrower terminals break lines.
const LEAST_COLUMNS: usize = 80;
/// Parts of a character cell that block characters can fill.
const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
/// Duration of work up to which no sign of progress is shown.
const PATIENCE: Duration = Duration::from_millis(300);
/// Time between two pictures of a spinner.
const FRAME: Duration = Duration::from_millis(100);
/// Time between two progress lines where nothing can be drawn over.
const PLAIN_EVERY: Duration = Duration::from_secs(5);

/// The meaning of a piece of text for its reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tone {
    /// A good state.
    Good,
    /// An error.
    Bad,
    /// Text of little interest.
    Faint,
    /// A heading.
    Strong,
    /// Highlighted text.
    Accent,
}

/// Standard output and its abilities.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Screen {
    colour: bool,
    unicode: bool,
    /// Whether lines can be drawn over.
    live: bool,
    columns: usize,
}

/// A sign of progress, removed when dropped.
#[derive(Debug)]
pub(crate) struct Working {
    text: Arc<Mutex<String>>,
    done: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Screen {
    /// Detects the abilities of standard output.
    pub(crate) fn stdout() -> Self {
        let stdout = io::stdout();
        let terminal = stdout.is_terminal();
        let colour = AutoStream::choice(&stdout) != ColorChoice::Never;
        let size = terminal_size::terminal_size_of(&stdout);
        let columns = size.map_or(COLUMNS, |(width, _)| usize::from(width.0));
        Self {
            colour,
            unicode: terminal && colour && utf8_locale(),
            live: terminal && colour,
            columns: columns.clamp(LEAST_COLUMNS, COLUMNS),
        }
    }

    /// Returns the width of a line.
    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    /// Prints a line.
    pub(crate) fn line(&self, text: impl Display) {
        // An error means that the user closed standard output.
        let _ = writeln!(io::stdout().lock(), "{text}");
    }

    /// Prints an empty line.
    pub(crate) fn gap(&self) {
        self.line("");
    }

    /// Prints a line of little interest, indented.
    pub(crate) fn aside(&self, text: impl Display) {
        self.line(format!(
            "      {}",
            self.paint(Tone::Faint, &text.to_string())
        ));
    }

    /// Writes out everything before another program writes.
    pub(crate) fn flush(&self) {
        let _ = io::stdout().lock().flush();
    }

    /// Returns the text in a tone.
    pub(crate) fn paint(&self, tone: Tone, text: &str) -> String {
        let style = Style::new();
        let style = match tone {
            _ if !self.colour => return text.to_owned(),
            Tone::Good => style.green(),
            Tone::Bad => style.red().bold(),
            Tone::Faint => style.dimmed(),
            Tone::Strong => style.bold(),
            Tone::Accent => style.cyan(),
        };
        text.style(style).to_string()
    }

    /// Returns a mark of four columns for a good or a bad result.
    pub(crate) fn mark(&self, good: bool) -> String {
        match (good, self.unicode) {
            (true, true) => self.paint(Tone::Good, " ✔  "),
            (true, false) => self.paint(Tone::Good, "ok  "),
            (false, true) => self.paint(Tone::Bad, " ✘  "),
            (false, false) => self.paint(Tone::Bad, "BAD "),
        }
    }

    /// Returns a bar that fills `share` (0 to 1) of `cells` columns, padded to all of them.
    pub(crate) fn bar(&self, share: f64, cells: usize) -> String {
        let share = share.clamp(0.0, 1.0);
        let bar = if self.unicode {
            let eighths = round(share * cells as f64 * 8.0);
            "█".repeat(eighths / 8) + EIGHTHS[eighths % 8]
        } else {
            "#".repeat(round(share * cells as f64))
        };
        self.paint(Tone::Accent, &fit(&bar, cells))
    }

    /// Returns one bar of `cells` columns, divided in proportion to `parts`.
    pub(crate) fn divided_bar(&self, parts: &[u64], cells: usize) -> String {
        let total = parts.iter().sum::<u64>().max(1) as f64;
        let fills = if self.unicode {
            ["█", "▒"]
        } else {
            ["#", "-"]
        };
        let (mut sum, mut drawn) = (0, 0);
        let mut bar = String::new();
        for (part, fill) in parts.iter().zip(fills.into_iter().cycle()) {
            sum += part;
            let end = round(sum as f64 / total * cells as f64);
            bar.push_str(&fill.repeat(end - drawn));
            drawn = end;
        }
        self.paint(Tone::Accent, &fit(&bar, cells))
    }

    /// Shows a sign of progress, once work takes a while.
    pub(crate) fn working(&self, text: impl Into<String>) -> Working {
        let text = Arc::new(Mutex::new(text.into()));
        let done = Arc::<AtomicBool>::default();
        let (screen, shown, over) = (*self, text.clone(), done.clone());
        let thread = thread::Builder::new()
            .name("spinner".to_owned())
            .spawn(move || screen.spin(&shown, &over))
            .ok();
        Working { text, done, thread }
    }

    fn spin(&self, text: &Mutex<String>, done: &AtomicBool) {
        let frames = if self.unicode {
            "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
        } else {
            "|/-\\"
        };
        let mut frames = frames.chars().cycle();
        let started = Instant::now();
        let mut next = started + if self.live { PATIENCE } else { PLAIN_EVERY };
        let mut drawn = false;
        while !done.load(Ordering::Relaxed) {
            thread::park_timeout(next.saturating_duration_since(Instant::now()));
            if done.load(Ordering::Relaxed) || Instant::now() < next {
                continue;
            }
            let text = text.lock().unwrap_or_else(PoisonError::into_inner).clone();
            if self.live {
                let frame = frames.next().unwrap_or(' ');
                let seconds = started.elapsed().as_secs();
                let text = clip(&format!("{text}  {seconds} s"), self.columns - 8);
                self.draw(&format!("   {frame}  {}", self.paint(Tone::Faint, &text)));
                drawn = true;
                next += FRAME;
            } else {
                self.aside(format!("... {text}"));
                self.flush();
                next += PLAIN_EVERY;
            }
        }
        if drawn {
            self.draw("");
        }
    }

    /// Draws over the current line.
    fn draw(&self, text: &str) {
        let mut stdout = io::stdout().lock();
        let _ = write!(stdout, "\r\x1b[K{text}");
        let _ = stdout.flush();
    }
}

impl Working {
    /// Changes the text of the sign of progress.
    pub(crate) fn say(&self, text: impl Into<String>) {
        *self.text.lock().unwrap_or_else(PoisonError::into_inner) = text.into();
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        self.done.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A panic in the thread has been printed already.
            let _ = thread.join();
        }
    }
}

/// Returns the text, cut or padded with spaces to `columns`.
pub(crate) fn fit(text: &str, columns: usize) -> String {
    let text = clip(text, columns);
    let missing = columns.saturating_sub(text.width());
    text + &" ".repeat(missing)
}

/// Returns the text, with two dots in place of what does not fit.
pub(crate) fn clip(text: &str, columns: usize) -> String {
    if text.width() <= columns {
        return text.to_owned();
    }
    let mut width = 2;
    let fitting = text.chars().take_while(|c| {
        width += c.width().unwrap_or(0);
        width <= columns
    });
    fitting.collect::<String>() + ".."
}

/// Returns a count with a comma between thousands.
pub(crate) fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Returns a count and its noun: `1 pod`, `2 pods`.
pub(crate) fn plural(n: usize, what: &str) -> String {
    let s = if n == 1 { "" } else { "s" };
    format!("{} {what}{s}", count(n as u64))
}

/// Formats a duration in a suitable unit.
pub(crate) fn span(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    match seconds {
        s if s < 0.001 => format!("{:.0} us", s * 1e6),
        s if s < 0.01 => format!("{:.1} ms", s * 1e3),
        s if s < 1.0 => format!("{:.0} ms", s * 1e3),
        s => format!("{s:.1} s"),
    }
}

/// Rounds to the nearest whole number; bars are short.
fn round(number: f64) -> usize {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a small positive number of cells"
    )]
    let whole = number.round() as usize;
    whole
}

/// Returns whether the locale uses UTF-8. As in the C library, the first variable that is set
/// decides.
fn utf8_locale() -> bool {
    let names = ["LC_ALL", "LC_CTYPE", "LANG"];
    let mut values = names.iter().filter_map(|name| std::env::var(name).ok());
    let locale = values.find(|value| !value.is_empty()).unwrap_or_default();
    let locale = locale.to_ascii_lowercase();
    locale.contains("utf-8") || locale.contains("utf8")
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Screen = Screen {
        colour: false,
        unicode: false,
        live: false,
        columns: 80,
    };

    #[test]
    fn bars_fill_their_share() {
        assert_eq!(PLAIN.bar(0.5, 10), "#####     ");
        assert_eq!(PLAIN.bar(2.0, 3), "###");
        let fine = Screen {
            unicode: true,
            ..PLAIN
        };
        assert_eq!(fine.bar(0.3125, 4), "█▎  ");
        assert_eq!(PLAIN.divided_bar(&[1, 1, 2], 8), "##--####");
        assert_eq!(PLAIN.divided_bar(&[], 3), "   ");
    }

    #[test]
    fn text_fits() {
        assert_eq!(fit("abc", 5), "abc  ");
        assert_eq!(fit("abcdef", 5), "abc..");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(plural(1, "pod"), "1 pod");
        assert_eq!(span(Duration::from_micros(1500)), "1.5 ms");
    }
}
