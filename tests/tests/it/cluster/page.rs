//! The page in a real browser, through `kpctl page`: what it shows, live and without scripts, by keyboard, and with texts
//! that would be scripts if they could.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use kplane_tests::browser::{self, Browser, Key, Look, Tab};
use kplane_tests::cluster::objects;
use kplane_tests::process::Process;
use kplane_tests::wait::eventually;
use serde_json::json;

use crate::cluster::faults::{addresses, serve, slice};
use crate::cluster::support::kpctl::kpctl;
use crate::cluster::support::world::{DEADLINE, product};
use crate::cluster::support::{World, with_world};

/// The status API of the first replica.
const PLANE: &str = "127.0.0.1:7466";
/// A text that a Service brings into the page, by an annotation with a wrong value.
const HOSTILE: &str = "<img src=x onerror=alert(1)><script>alert(2)</script>";
/// The other node's agent is connected to the other replica.
const SYNCED: &str = "1 of 2 nodes in sync";
/// All sheets that are no object's.
const SHEETS: [&str; 6] = ["", "nodes", "services", "map", "changes", "reasons"];

pub(crate) fn the_page_shows_the_fleet_live_and_runs_nothing_else() -> Result<()> {
    browser::need()?;
    with_world(|world| {
        serve(world.api(), "paged", 91, 2)?;
        hostile(world)?;
        world.settle()?;
        let page = Page::open(world)?;
        let browser = Browser::start(world.topology.host("control")?.ns())?;
        let tab = browser.tab()?;
        sheets(&page, &tab)?;
        change_comes(&page, &tab, world)?;
        trouble_comes(&page, &tab, world)?;
        by_keyboard(&page, &tab)?;
        looks(&page, &tab)?;
        tab.scripts(false)?;
        sheets(&page, &tab)?;
        let complaints = tab.complaints();
        ensure!(complaints.is_empty(), "{complaints:?}");
        // The console says it too.
        let code = tab.open(&format!("{}node?name=nobody", page.url))?;
        ensure!(code == 404, "{code}");
        Ok(())
    })
}

/// `kpctl page` as it runs.
struct Page {
    url: String,
    _process: Process,
}

impl Page {
    fn open(world: &World) -> Result<Self> {
        let mut kpctl = Command::new(&product()?.kpctl);
        kpctl.arg("page").env("KPLANE_SERVER", PLANE);
        kpctl.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut process = world.topology.host("control")?.ns().command(kpctl)?;
        let output = process.stdout.take().context("the output of kpctl")?;
        let mut url = String::new();
        BufReader::new(output).read_line(&mut url)?;
        Ok(Self {
            url: url.trim().to_owned(),
            _process: process,
        })
    }

    fn show(&self, tab: &Tab, sheet: &str) -> Result<String> {
        let code = tab.open(&format!("{}{sheet}", self.url))?;
        ensure!(code == 200, "{sheet}: {code}");
        main_text(tab)
    }
}

fn main_text(tab: &Tab) -> Result<String> {
    tab.text("document.getElementById('main').innerText")
}

/// A Service whose annotation is a script, in a message about it.
fn hostile(world: &World) -> Result<()> {
    let mut service = objects::service("default", "hostile", json!({}));
    service["metadata"]["annotations"] = json!({ "kplane.io/ipvs-scheduler": HOSTILE });
    world.api().apply(&service)?;
    world.wait_issue(&["onerror"], true)
}

/// Every sheet is there and has no fault, and hostile text is text.
fn sheets(page: &Page, tab: &Tab) -> Result<()> {
    for sheet in SHEETS {
        let text = page.show(tab, sheet)?;
        ensure!(text.len() > 20, "sheet {sheet:?}: {text}");
        let complaints = tab.complaints();
        ensure!(complaints.is_empty(), "{sheet}: {complaints:?}");
    }
    let fleet = page.show(tab, "")?;
    ensure!(fleet.contains(SYNCED), "the fleet: {fleet}");
    ensure!(
        fleet.contains("<img src=x onerror=alert(1)>"),
        "hostile text: {fleet}"
    );
    let node = page.show(tab, "node?name=node-1")?;
    ensure!(node.contains("InSync"), "{node}");
    Ok(())
}

/// An endpoint that is added is on the sheet of its Service soon, without a reload.
fn change_comes(page: &Page, tab: &Tab, world: &World) -> Result<()> {
    let sheet = "service?namespace=default&name=paged";
    let text = page.show(tab, sheet)?;
    ensure!(
        text.contains("10.244.91.2") && !text.contains("10.244.91.3"),
        "{text}"
    );
    tab.wait_until(
        DEADLINE,
        "document.getElementById('live').textContent == 'live'",
    )?;
    tab.evaluate("window.same = true")?;
    world.api().apply(&slice("paged", &addresses(91, 3)))?;
    let there = "document.getElementById('main').innerText.includes('10.244.91.3')";
    let took = tab.wait_until(DEADLINE, there)?;
    println!("a change is on the page after {took:?}");
    // The kernel of the node whose agent is connected here leads there.
    let held = "document.querySelectorAll('.matrix td.good').length == 3";
    tab.wait_until(DEADLINE, held)?;
    let same = tab.evaluate("window.same === true")?;
    ensure!(same == json!(true), "the page was loaded anew");
    // The first reason on the sheet leads to its explanation.
    let code = tab.text("document.querySelector('article h3 a').textContent")?;
    tab.evaluate("document.querySelector('article h3 a').click()")?;
    let explained = format!(
        "document.querySelector(':target')?.textContent == {}",
        json!(code)
    );
    tab.wait_until(DEADLINE, &explained)?;
    Ok(())
}

/// A node that loses its agent is on the sheet of the fleet, with the reason, and goes again.
fn trouble_comes(page: &Page, tab: &Tab, world: &mut World) -> Result<()> {
    page.show(tab, "")?;
    let says = |what: &str| {
        let text = "document.getElementById('main').innerText";
        format!("{text}.includes({})", json!(what))
    };
    world.stop_agent("node-1");
    tab.wait_until(DEADLINE, &says("0 of 2 nodes in sync"))?;
    let square = "document.querySelector('.squares a.bad')?.title == 'node-1: Disconnected'";
    tab.wait_until(DEADLINE, square)?;
    let text = main_text(tab)?;
    ensure!(
        text.contains("Disconnected") && text.contains("node-1"),
        "without the agent: {text}"
    );
    found_in_three_commands(world)?;
    world.restart_agent("node-1", 0)?;
    tab.wait_until(DEADLINE, &says(SYNCED))?;
    let text = main_text(tab)?;
    ensure!(!text.contains("Disconnected"), "with it again: {text}");
    Ok(())
}

/// A reader who knows no command finds the node, its trouble, and what to do with three.
fn found_in_three_commands(world: &World) -> Result<()> {
    let run = |args: &[&str]| -> Result<String> {
        let (_, text, _) = kpctl(world, 7466, args)?;
        Ok(text)
    };
    let help = run(&["--help"])?;
    for command in ["status", "describe"] {
        ensure!(help.contains(command), "{help}");
    }
    let status = run(&["status"])?;
    let there = status
        .lines()
        .any(|line| line.contains("node-1") && line.contains("Disconnected"));
    ensure!(there, "{status}");
    let next = "check that kp-nodeagent runs on node-1";
    ensure!(status.contains(next), "{status}");
    let node = run(&["describe", "node", "node-1"])?;
    ensure!(node.contains("Disconnected"), "{node}");
    Ok(())
}

/// The keyboard reaches the content at once, then everything in the order of the page; screen readers find its parts.
fn by_keyboard(page: &Page, tab: &Tab) -> Result<()> {
    page.show(tab, "nodes")?;
    let mut names = Vec::new();
    for _ in 0..8 {
        tab.press(Key::Tab)?;
        let focus = tab.focus()?;
        ensure!(focus.is_visible, "{focus:?}");
        names.push(focus.name);
    }
    let wanted = [
        "Skip to the content",
        "Fleet",
        "Nodes",
        "Services",
        "Map",
        "Changes",
        "Reasons",
    ];
    ensure!(names[..7] == wanted, "{names:?}");
    let parts = tab.accessible()?;
    for (role, name) in [
        ("navigation", "Sheets"),
        ("main", ""),
        ("heading", "Nodes"),
        ("columnheader", "State"),
        ("rowheader", "node-1"),
    ] {
        let there = parts.iter().any(|part| part.role == role && part.name.contains(name));
        ensure!(there, "no {role} {name:?}: {parts:?}");
    }
    Ok(())
}

/// Pictures of all sheets, to be looked at.
fn looks(page: &Page, tab: &Tab) -> Result<()> {
    let folder: PathBuf = Path::new(env!("CARGO_TARGET_TMPDIR")).join("page");
    std::fs::create_dir_all(&folder)?;
    let objects = ["service?namespace=default&name=paged", "node?name=node-1"];
    let looks = [
        ("wide", Look::WIDE),
        ("narrow", Look::NARROW),
        (
            "huge",
            Look {
                width: 2560,
                height: 1440,
                ..Look::WIDE
            },
        ),
        (
            "dark",
            Look {
                dark: true,
                ..Look::WIDE
            },
        ),
    ];
    for (name, look) in looks {
        tab.look(look)?;
        for (number, sheet) in SHEETS.iter().copied().chain(objects).enumerate() {
            page.show(tab, sheet)?;
            tab.screenshot(&folder.join(format!("{name}-{number}.png")))?;
        }
        // Only tables and terminal text are scrolled sideways, not the page.
        let fits = "document.documentElement.scrollWidth <= window.innerWidth";
        eventually(DEADLINE, "the page fits its window", || {
            let fits = tab.evaluate(fits)?;
            ensure!(fits == json!(true), "{name}: it does not");
            Ok::<_, anyhow::Error>(())
        })?;
    }
    tab.look(Look::WIDE)
}
