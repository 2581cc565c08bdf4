//! The browser, tested with a small server in the same namespace.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kplane_rig::browser::{self, Browser, Element, Key, Look, Note, Tab, processes_of};
use kplane_rig::netns::NetNs;
use kplane_rig::wait::eventually;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use self::server::Server;
use crate::rig::DEADLINE;

mod server;

/// Beyond any delay of a browser on a busy test machine.
const PATIENCE: Duration = Duration::from_secs(15);
const MIB: u64 = 1 << 20;

/// Runs a test with a server, a browser and its first tab.
fn with_tab(test: impl FnOnce(&Server, &Browser, &Tab) -> Result<()>) -> Result<()> {
    browser::need()?;
    let ns = NetNs::new("viewer")?;
    // The server ends after the browser, whose connections it waits for.
    let server = Server::start(&ns)?;
    let browser = Browser::start(&ns)?;
    let tab = browser.tab()?;
    test(&server, &browser, &tab)
}

pub(crate) fn pages_are_opened_and_read() -> Result<()> {
    with_tab(|server, _, tab| {
        ensure!(tab.open(&server.url("/plain"))? == 200);
        ensure!(tab.text("document.title")? == "Plain");
        ensure!(tab.evaluate("Promise.resolve(6 * 7)")? == 42);
        let error = tab.evaluate("nothing.at.all").map_err(|e| e.to_string());
        ensure!(
            error.as_ref().is_err_and(|e| e.contains("ReferenceError")),
            "{error:?}"
        );
        let cost = tab.cost()?;
        ensure!(
            cost.first_paint > Duration::ZERO && cost.first_paint < PATIENCE,
            "{cost:?}"
        );
        ensure!((100..5_000).contains(&cost.bytes), "{cost:?}");
        ensure!(tab.complaints() == []);

        // A page is open when it has all that it needs.
        tab.open(&server.url("/slow"))?;
        ensure!(tab.text("document.readyState")? == "complete");

        ensure!(tab.open(&server.url("/missing"))? == 404);
        let nobody = tab.open("http://127.0.0.1:4444/").map_err(|e| format!("{e:#}"));
        ensure!(
            nobody.as_ref().is_err_and(|e| e.contains("ERR_CONNECTION_REFUSED")),
            "{nobody:?}"
        );
        Ok(())
    })
}

pub(crate) fn faults_of_a_page_are_reported() -> Result<()> {
    with_tab(|server, _, tab| {
        tab.open(&server.url("/loud"))?;
        let mut seen = Vec::new();
        let wanted = [
            Note::Said("a word {\"a\":1}".to_owned()),
            Note::Warned("a warning".to_owned()),
            Note::Warned("an error".to_owned()),
            Note::Dialog("a dialog".to_owned()),
        ];
        eventually(PATIENCE, "everything is reported", || {
            seen.extend(tab.notes());
            let failed = seen
                .iter()
                .any(|note| matches!(note, Note::Failed(text) if text.contains("a failure")));
            let logged = seen.iter().any(|note| matches!(note, Note::Logged(text) if text.contains("/missing") && text.contains("404")));
            let all = failed && logged && wanted.iter().all(|note| seen.contains(note));
            all.then_some(()).ok_or_else(|| format!("{seen:?}"))
        })?;
        // What was said is no fault, and what was reported once is not reported again.
        tab.evaluate("console.log('fine')")?;
        ensure!(tab.complaints() == []);
        ensure!(tab.notes() == []);
        Ok(())
    })
}

pub(crate) fn violations_of_a_policy_are_reported() -> Result<()> {
    with_tab(|server, _, tab| {
        tab.open(&server.url("/strict"))?;
        let mut seen = Vec::new();
        let away = "http://192.0.2.1/away.png";
        let wanted = [
            ("script-src-elem", "inline"),
            ("script-src-attr", "inline"),
            ("style-src-attr", "inline"),
            ("img-src", away),
        ]
        .map(|(directive, what)| Note::Refused {
            directive: directive.to_owned(),
            what: what.to_owned(),
        });
        eventually(PATIENCE, "every violation is reported", || {
            seen.extend(tab.complaints());
            let all = wanted.iter().all(|note| seen.contains(note));
            all.then_some(()).ok_or_else(|| format!("{seen:?}"))
        })?;
        ensure!(tab.text("document.title")? == "Strict", "a script ran");
        Ok(())
    })
}

pub(crate) fn requests_to_other_hosts_are_seen_and_fail() -> Result<()> {
    with_tab(|server, _, tab| {
        tab.open(&server.url("/outward"))?;
        let away = "http://192.0.2.1/away.png".to_owned();
        ensure!(tab.requests().contains(&away), "{:?}", tab.requests());
        ensure!(tab.evaluate("document.images[0].naturalWidth")? == 0);
        Ok(())
    })
}

pub(crate) fn scripts_are_switched_off() -> Result<()> {
    with_tab(|server, _, tab| {
        for (on, title) in [(true, "scripted"), (false, "Scripts"), (true, "scripted")] {
            tab.scripts(on)?;
            tab.open(&server.url("/scripts"))?;
            ensure!(tab.text("document.title")? == title, "scripts: {on}");
            let shown = "document.body.innerText.includes('without scripts')";
            ensure!(tab.evaluate(shown)? == !on, "scripts: {on}");
        }
        Ok(())
    })
}

pub(crate) fn events_arrive() -> Result<()> {
    with_tab(|server, _, tab| {
        tab.open(&server.url("/follower"))?;
        // The page is loaded, although the stream goes on.
        eventually(PATIENCE, "the page follows", || match server.followers() {
            1 => Ok(()),
            other => Err(other.to_string()),
        })?;
        for word in ["first", "second"] {
            server.say(word)?;
            tab.wait_until(PATIENCE, &format!("document.body.innerText === '{word}'"))?;
        }
        ensure!(tab.complaints() == []);
        Ok(())
    })
}

pub(crate) fn looks_and_pictures() -> Result<()> {
    with_tab(|server, browser, tab| {
        tab.open(&server.url("/coloured"))?;
        let file = browser.profile().join("picture.png");
        let mut pictures = Vec::new();
        for look in [
            Look::WIDE,
            Look {
                dark: true,
                ..Look::WIDE
            },
            Look::NARROW,
        ] {
            tab.look(look)?;
            let is_dark = "matchMedia('(prefers-color-scheme: dark)').matches";
            ensure!(tab.evaluate(is_dark)? == look.dark, "{look:?}");
            ensure!(tab.evaluate("innerWidth")? == look.width, "{look:?}");
            tab.screenshot(&file)?;
            let picture = fs::read(&file)?;
            ensure!(
                size_of_png(&picture)? == [look.width, look.height],
                "{look:?}"
            );
            pictures.push(picture);
        }
        ensure!(pictures[0] != pictures[1], "light and dark are the same");
        Ok(())
    })
}

/// Returns the width and height that the header of a PNG file names.
fn size_of_png(file: &[u8]) -> Result<[u32; 2]> {
    ensure!(file.starts_with(b"\x89PNG\r\n\x1a\n"));
    let number = |at: usize| -> Result<u32> {
        let bytes = file.get(at..at + 4).context("a short file")?;
        Ok(u32::from_be_bytes(bytes.try_into()?))
    };
    Ok([number(16)?, number(20)?])
}

pub(crate) fn keys_move_the_focus() -> Result<()> {
    with_tab(|server, _, tab| {
        tab.open(&server.url("/keys"))?;
        let mut order = Vec::new();
        for _ in 0..4 {
            tab.press(Key::Tab)?;
            let focus = tab.focus()?;
            order.push((focus.tag, focus.name, focus.is_visible));
        }
        let wanted = [
            ("a", "Skip", true),
            ("a", "Hidden outline", false),
            ("input", "Search", true),
            ("button", "Press", true),
        ]
        .map(|(tag, name, seen)| (tag.to_owned(), name.to_owned(), seen));
        ensure!(order == wanted, "{order:?}");
        tab.press(Key::Space)?;
        tab.wait_until(PATIENCE, "document.title === 'pressed'")?;
        tab.press(Key::BackTab)?;
        tab.write("grüße")?;
        ensure!(tab.text("document.querySelector('input').value")? == "grüße");
        // Enter sends the form, which leads to another page.
        tab.press(Key::Enter)?;
        tab.wait_until(PATIENCE, "location.search === '?name=gr%C3%BC%C3%9Fe'")?;
        Ok(())
    })
}

pub(crate) fn screen_readers_find_landmarks() -> Result<()> {
    with_tab(|server, _, tab| {
        tab.open(&server.url("/keys"))?;
        let elements = tab.accessible()?;
        for (role, name) in [
            ("navigation", "Sheets"),
            ("main", ""),
            ("heading", "Keys"),
            ("textbox", "Search"),
            ("columnheader", "Node"),
        ] {
            let (role, name) = (role.to_owned(), name.to_owned());
            let wanted = Element { role, name };
            ensure!(elements.contains(&wanted), "no {wanted:?} in {elements:?}");
        }
        Ok(())
    })
}

pub(crate) fn the_heap_grows_and_shrinks() -> Result<()> {
    with_tab(|server, _, tab| {
        tab.open(&server.url("/plain"))?;
        let before = tab.heap()?;
        ensure!(before < 20 * MIB, "{before}");
        tab.evaluate(
            "kept = Array.from({length: 1e6}, (_, i) => [i]); bytes = new Uint8Array(2**24); 0",
        )?;
        let full = tab.heap()?;
        ensure!(full > before + 30 * MIB, "{before}, {full}");
        tab.evaluate("kept = bytes = null; 0")?;
        let after = tab.heap()?;
        ensure!(after < before + 5 * MIB, "{before}, {full}, {after}");
        Ok(())
    })
}

pub(crate) fn tabs_share_nothing_and_send_headers() -> Result<()> {
    with_tab(|server, browser, tab| {
        tab.headers(&[("authorization", "Bearer of-good-news")])?;
        tab.open(&server.url("/echo"))?;
        tab.evaluate("document.cookie = 'seen=yes'")?;
        tab.open(&server.url("/echo"))?;
        let echo = tab.text("document.body.innerText")?;
        ensure!(
            echo.contains("Bearer of-good-news") && echo.contains("seen=yes"),
            "{echo}"
        );

        let other = browser.tab()?;
        other.open(&server.url("/echo"))?;
        let echo = other.text("document.body.innerText")?;
        ensure!(echo.starts_with("GET /echo"), "{echo}");
        ensure!(
            !echo.contains("Bearer") && !echo.contains("seen=yes"),
            "{echo}"
        );
        Ok(())
    })
}

pub(crate) fn a_browser_leaves_nothing() -> Result<()> {
    let mut profile = None;
    with_tab(|server, browser, tab| {
        tab.open(&server.url("/plain"))?;
        let path = browser.profile().to_owned();
        ensure!(!processes_of(&path)?.is_empty());
        profile = Some(path);
        Ok(())
    })?;
    profile.as_deref().map_or(Ok(()), nothing_is_left)
}

pub(crate) fn a_dead_browser_is_noticed() -> Result<()> {
    let mut profile = None;
    with_tab(|server, browser, tab| {
        tab.open(&server.url("/plain"))?;
        profile = Some(browser.profile().to_owned());
        // The processes of tabs end with the first one.
        let first = processes_of(browser.profile())?.into_iter().min();
        kill(Pid::from_raw(first.context("no process")?), Signal::SIGKILL)?;
        let error = eventually(PATIENCE, "questions fail", || {
            tab.evaluate("1").err().ok_or("there was an answer")
        })?;
        let error = format!("{error:#}");
        ensure!(error.contains("the browser has ended"), "{error}");
        Ok(())
    })?;
    profile.as_deref().map_or(Ok(()), nothing_is_left)
}

fn nothing_is_left(profile: &Path) -> Result<()> {
    ensure!(!profile.exists());
    eventually(DEADLINE, "all processes end", || {
        match processes_of(profile) {
            Ok(none) if none.is_empty() => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })?;
    ensure!(!profile.exists(), "a process wrote into the profile again");
    Ok(())
}
