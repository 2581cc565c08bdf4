//! The output of `kpctl`.

use std::time::Instant;

use anyhow::Result;

use super::super::screen::{Screen, Tone};
use super::super::stage::{Show, Stage};

/// Shows the fleet and one Service.
pub(super) fn run(show: &mut Show, stage: &mut Stage) -> Result<()> {
    let began = Instant::now();
    let star = stage.star.as_ref().map(ToString::to_string);
    let mut wrong = kpctl(&show.screen, stage, &["status"])?;
    if let Some(star) = &star {
        wrong.extend(kpctl(&show.screen, stage, &["describe", "service", star])?);
    }
    let healthy = stage
        .cast
        .kpctl_quietly(stage.control()?, &["status", "--check"])?;
    if !healthy {
        wrong.push("kpctl status --check: something is not as it should be".to_owned());
    }
    let seen = if healthy {
        "every node in sync"
    } else {
        "trouble"
    };
    show.check(("kpctl status --check", "exit code 0"), seen, wrong, began);
    Ok(())
}

/// Runs a command of `kpctl` below its own text; returns the errors.
pub(super) fn kpctl(screen: &Screen, stage: &Stage, args: &[&str]) -> Result<Vec<String>> {
    let command = format!("kpctl {}", args.join(" "));
    screen.gap();
    screen.line(format!(
        "  {} {}",
        screen.paint(Tone::Faint, "$"),
        screen.paint(Tone::Strong, &command)
    ));
    screen.flush();
    let good = stage.cast.kpctl(stage.control()?, args)?;
    Ok(if good {
        Vec::new()
    } else {
        vec![format!("{command} failed")]
    })
}
