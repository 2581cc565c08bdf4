//! Calls every Service, at all its addresses, from all callers.

use std::time::Instant;

use anyhow::Result;

use super::super::call::{Call, Finding};
use super::super::objects::Service;
use super::super::screen::{Screen, Tone, count, fit, plural};
use super::super::stage::{Show, Stage};
use super::super::survey::{Planner, by_pod, make_all};

/// Cells of the bar that is divided among pods.
const BAR: usize = 20;
/// Most failed calls that are shown for each Service.
const MOST_WRONG: usize = 8;

/// Calls all Services.
pub(super) fn run(show: &mut Show, stage: &mut Stage) -> Result<()> {
    let planner = Planner::new(&stage.objects, &stage.world);
    let services = &stage.objects.services;
    let callers = stage.world.callers.len();
    show.screen.aside(format!(
        "from {callers} callers: a client outside, a pod and the node itself, at each of {}",
        plural(stage.objects.nodes.len(), "node"),
    ));
    let mut total = 0;
    for service in services {
        if let Some(reason) = service.skipped {
            let name = fit(&service.name.to_string(), 26);
            show.screen
                .aside(format!("    {name} {reason:?}: nothing to proxy"));
            continue;
        }
        total += survey(show, &planner, service, "every path")?.calls;
    }
    show.screen
        .aside(format!("{} connections in all", count(total)));
    Ok(())
}

/// Calls one Service in every way, prints a line, and records a check.
pub(super) fn survey(
    show: &mut Show,
    planner: &Planner<'_>,
    service: &Service,
    label: &str,
) -> Result<Finding> {
    let began = Instant::now();
    let calls = planner.calls(service);
    let working = show.screen.working(format!("calling {}", service.name));
    let progress = |done| {
        working.say(format!(
            "calling {}: {done} of {}",
            service.name,
            calls.len()
        ));
    };
    let findings = make_all(&calls, &progress)?;
    drop(working);
    let mut sum = Finding::default();
    findings.iter().for_each(|finding| sum.add(finding));
    let wrong = wrongs(&calls, &findings);
    print(
        &show.screen,
        planner,
        service,
        &calls,
        &sum,
        wrong.is_empty(),
    );
    let right = findings.iter().filter(|finding| finding.is_right()).count();
    let what = format!("{} {}: {label}", service.name, service.kind);
    let expected = format!("{} right", plural(calls.len(), "path"));
    let seen = format!("{right} right, {} conns", count(sum.calls));
    show.check((&what, &expected), seen, wrong, began);
    Ok(sum)
}

fn print(
    screen: &Screen,
    planner: &Planner<'_>,
    service: &Service,
    calls: &[Call],
    sum: &Finding,
    good: bool,
) {
    let by_pod = by_pod(planner, &sum.answers);
    let counts: Vec<u64> = by_pod.values().copied().collect();
    let bar = screen.divided_bar(&counts, BAR);
    let pods = match counts.len() {
        0 => "no pods".to_owned(),
        n => plural(n, "pod"),
    };
    let mut kinds: Vec<&str> = Vec::new();
    for call in calls {
        let kind = match call.kind {
            "external IP" => "ext IP",
            "load balancer" => "LB",
            kind => kind,
        };
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    let name = fit(&service.name.to_string(), 22);
    let paths = format!("{:>4} paths", calls.len());
    let kinds = screen.paint(Tone::Faint, &kinds.join(", "));
    screen.line(format!(
        "  {}{name} {bar} {} {paths}  {kinds}",
        screen.mark(good),
        fit(&pods, 7)
    ));
}

fn wrongs(calls: &[Call], findings: &[Finding]) -> Vec<String> {
    let all = calls.iter().zip(findings);
    let mut wrong: Vec<String> = all
        .filter_map(|(call, finding)| call.complaint(finding))
        .collect();
    if wrong.len() > MOST_WRONG {
        let more = wrong.len() - MOST_WRONG;
        wrong.truncate(MOST_WRONG);
        wrong.push(format!("and {more} more paths went wrong"));
    }
    wrong
}
