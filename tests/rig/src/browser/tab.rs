//! A tab: opens pages, runs scripts in them, presses keys, takes pictures, and says what the page did.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::notes::{Note, exception};
use super::wire::Wire;
use super::{DEADLINE, Key};
use crate::wait::eventually;

/// What the browser shall report, and the parameters of that.
const REPORTS: [&str; 5] = [
    "Page.enable",
    "Runtime.enable",
    "Log.enable",
    "Audits.enable",
    "Accessibility.enable",
];

/// Describes the element that has the focus.
const FOCUS: &str = r#"(() => {
  const element = document.activeElement;
  const style = getComputedStyle(element);
  const box = element.getBoundingClientRect();
  const drawn = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0 || style.boxShadow !== "none";
  const inside = box.width > 1 && box.height > 1 && box.right > 0 && box.bottom > 0
    && box.left < innerWidth && box.top < innerHeight;
  const name = element === document.body ? "" : element.getAttribute("aria-label") || element.innerText || element.name;
  return [element.tagName.toLowerCase(), (name || "").trim(), drawn && inside];
})()"#;

/// Returns when the page was first painted, in ms, and the bytes that came over the wire for the document.
const COST: &str = r#"(() => {
  const paint = performance.getEntriesByName("first-contentful-paint")[0];
  const document = performance.getEntriesByType("navigation")[0];
  return paint && document && document.loadEventEnd > 0 && [paint.startTime, document.transferSize];
})()"#;

/// The size of the window and the colours that the user wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    /// Pixels.
    pub width: u32,
    /// Pixels.
    pub height: u32,
    /// Whether the user wants dark colours.
    pub dark: bool,
}

impl Look {
    /// A laptop's screen, in light colours.
    pub const WIDE: Self = Self {
        width: 1440,
        height: 900,
        dark: false,
    };
    /// A phone's screen, in light colours.
    pub const NARROW: Self = Self {
        width: 390,
        height: 844,
        dark: false,
    };
}

/// The element that has the focus of the keyboard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Focus {
    /// The name of its tag, such as `a`; `body` if no element has the focus.
    pub tag: String,
    /// Its label or text.
    pub name: String,
    /// Whether a user sees it: it lies in the window, and has an outline or a shadow.
    pub is_visible: bool,
}

/// An element as a screen reader presents it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Element {
    /// Such as `heading`, `link`, `columnheader` or `navigation`.
    pub role: String,
    /// Its accessible name.
    pub name: String,
}

/// What it took to show a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// Time from the start of the navigation until something of the page was painted.
    pub first_paint: Duration,
    /// Bytes of the document that came over the wire, with headers and as compressed.
    pub bytes: u64,
}

/// A tab with cookies and a cache of its own. Dropping it closes it.
#[derive(Debug)]
pub struct Tab {
    wire: Arc<Wire>,
    context: String,
    session: String,
}

impl Tab {
    pub(super) fn new(wire: &Arc<Wire>) -> Result<Self> {
        let context = wire.ask(None, "Target.createBrowserContext", &[])?;
        let context = word(&context, "browserContextId")?;
        let mut tab = Self {
            wire: Arc::clone(wire),
            context,
            session: String::new(),
        };
        let page = [
            ("url", "about:blank".into()),
            ("browserContextId", tab.context.clone().into()),
        ];
        let target = tab.wire.ask(None, "Target.createTarget", &page)?;
        let target = word(&target, "targetId")?;
        let flat = [("targetId", target.into()), ("flatten", true.into())];
        let session = tab.wire.ask(None, "Target.attachToTarget", &flat)?;
        tab.session = word(&session, "sessionId")?;
        for report in REPORTS {
            tab.ask(report, &[])?;
        }
        // The browser would keep what it received for the developer tools, and that would count as the page's heap.
        let nothing = [
            ("maxTotalBufferSize", 0.into()),
            ("maxResourceBufferSize", 0.into()),
        ];
        tab.ask("Network.enable", &nothing)?;
        let enabled = [("enabled", true.into())];
        tab.ask("Page.setLifecycleEventsEnabled", &enabled)?;
        // A tab without a window would never have the focus.
        tab.ask("Emulation.setFocusEmulationEnabled", &enabled)?;
        tab.look(Look::WIDE)?;
        Ok(tab)
    }

    /// Opens an address, waits until the page is loaded, and returns the HTTP status.
    ///
    /// # Errors
    /// Nothing answers at the address, or the page is not loaded in time.
    pub fn open(&self, url: &str) -> Result<u64> {
        let answer = self.ask("Page.navigate", &[("url", url.into())])?;
        if let Some(error) = answer["errorText"].as_str() {
            bail!("open {url}: {error}");
        }
        let loader = word(&answer, "loaderId").with_context(|| format!("open {url}"))?;
        let status = self.wire.wait_for(&self.session, DEADLINE, |notes| {
            let is_loaded = notes.loaded.contains(&loader);
            is_loaded.then(|| notes.statuses.get(&loader).copied().unwrap_or_default())
        });
        status.with_context(|| format!("{url} is not loaded"))
    }

    /// Runs an expression in the page, waits for it if it is a promise, and returns its value. This also works with
    /// [scripts off](Self::scripts).
    ///
    /// # Errors
    /// The script failed, or the page went away meanwhile.
    pub fn evaluate(&self, expression: &str) -> Result<Value> {
        let parameters = [
            ("expression", expression.into()),
            ("returnByValue", true.into()),
            ("awaitPromise", true.into()),
        ];
        let mut answer = self.ask("Runtime.evaluate", &parameters)?;
        let details = &answer["exceptionDetails"];
        ensure!(details.is_null(), "{expression}: {}", exception(details));
        Ok(answer["result"]["value"].take())
    }

    /// Runs an expression in the page and returns its value, which is a text.
    ///
    /// # Errors
    /// As [`Tab::evaluate`], or the value is no text.
    pub fn text(&self, expression: &str) -> Result<String> {
        let value = self.evaluate(expression)?;
        value
            .as_str()
            .map(str::to_owned)
            .with_context(|| format!("{expression} is {value}, and no text"))
    }

    /// Waits until an expression is true in the page, and returns how long that took.
    ///
    /// # Errors
    /// The time has passed.
    pub fn wait_until(&self, within: Duration, expression: &str) -> Result<Duration> {
        let start = std::time::Instant::now();
        eventually(within, expression, || match self.evaluate(expression) {
            Ok(Value::Bool(true)) => Ok(start.elapsed()),
            Ok(other) => Err(other.to_string()),
            Err(error) => Err(format!("{error:#}")),
        })
    }

    /// Switches the page's scripts on or off, from the next page on.
    ///
    /// # Errors
    /// The browser has ended or does not answer.
    pub fn scripts(&self, on: bool) -> Result<()> {
        let off = [("value", (!on).into())];
        self.ask("Emulation.setScriptExecutionDisabled", &off)?;
        Ok(())
    }

    /// Sends these headers, such as `authorization`, with every request from now on.
    ///
    /// # Errors
    /// The browser has ended or does not answer.
    pub fn headers(&self, headers: &[(&str, &str)]) -> Result<()> {
        let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), Value::from(*value)));
        let headers = Value::Object(headers.collect());
        self.ask("Network.setExtraHTTPHeaders", &[("headers", headers)])?;
        Ok(())
    }

    /// Sets the size of the window and the colours that the user wants.
    ///
    /// # Errors
    /// The browser has ended or does not answer.
    pub fn look(&self, look: Look) -> Result<()> {
        let size = [
            ("width", look.width.into()),
            ("height", look.height.into()),
            ("deviceScaleFactor", 1.into()),
            ("mobile", false.into()),
        ];
        self.ask("Emulation.setDeviceMetricsOverride", &size)?;
        let colours = if look.dark { "dark" } else { "light" };
        let colours = json!([{"name": "prefers-color-scheme", "value": colours}]);
        self.ask("Emulation.setEmulatedMedia", &[("features", colours)])?;
        Ok(())
    }

    /// Writes a picture of the window as PNG.
    ///
    /// # Errors
    /// The browser does not answer, or the file cannot be written.
    pub fn screenshot(&self, file: &Path) -> Result<()> {
        let answer = self.ask("Page.captureScreenshot", &[("format", "png".into())])?;
        let picture =
            STANDARD.decode(word(&answer, "data")?).context("a picture from the browser")?;
        fs::write(file, picture).with_context(|| format!("write {}", file.display()))
    }

    /// Presses and releases a key.
    ///
    /// # Errors
    /// The browser has ended or does not answer.
    pub fn press(&self, key: Key) -> Result<()> {
        for event in key.events() {
            self.ask("Input.dispatchKeyEvent", &event)?;
        }
        Ok(())
    }

    /// Types a text where the focus is.
    ///
    /// # Errors
    /// The browser has ended or does not answer.
    pub fn write(&self, text: &str) -> Result<()> {
        self.ask("Input.insertText", &[("text", text.into())])?;
        Ok(())
    }

    /// Returns the element that has the focus of the keyboard.
    ///
    /// # Errors
    /// As [`Tab::evaluate`].
    pub fn focus(&self) -> Result<Focus> {
        let value = self.evaluate(FOCUS)?;
        let (tag, name, is_visible) = serde_json::from_value(value).context("the focus")?;
        Ok(Focus {
            tag,
            name,
            is_visible,
        })
    }

    /// Returns the elements that a screen reader presents, in the page's order.
    ///
    /// # Errors
    /// The browser has ended or does not answer.
    pub fn accessible(&self) -> Result<Vec<Element>> {
        let tree = self.ask("Accessibility.getFullAXTree", &[])?;
        let nodes = tree["nodes"].as_array().context("elements of the page")?;
        let text = |value: &Value| value["value"].as_str().unwrap_or_default().to_owned();
        Ok(nodes
            .iter()
            .filter(|node| node["ignored"] == false)
            .map(|node| Element {
                role: text(&node["role"]),
                name: text(&node["name"]),
            })
            .collect())
    }

    /// Collects garbage, and returns the bytes that the page's scripts and elements still use.
    ///
    /// # Errors
    /// The browser has ended or does not answer.
    pub fn heap(&self) -> Result<u64> {
        self.ask("HeapProfiler.collectGarbage", &[])?;
        let usage = self.ask("Runtime.getHeapUsage", &[])?;
        // Objects of scripts, elements of the page, and memory of arrays.
        let parts = ["usedSize", "embedderHeapUsedSize", "backingStorageSize"];
        parts
            .map(|part| {
                let bytes = usage[part].as_u64();
                bytes.with_context(|| format!("{part} in {usage}"))
            })
            .into_iter()
            .sum()
    }

    /// Returns what it took to show the page that is open.
    ///
    /// # Errors
    /// Nothing of the page has been painted in time.
    pub fn cost(&self) -> Result<Cost> {
        let value = eventually(DEADLINE, "the page is painted", || {
            match self.evaluate(COST) {
                Ok(value @ Value::Array(_)) => Ok(value),
                Ok(_) => Err("nothing is painted".to_owned()),
                Err(error) => Err(format!("{error:#}")),
            }
        })?;
        let (ms, bytes): (f64, u64) = serde_json::from_value(value).context("cost of the page")?;
        Ok(Cost {
            first_paint: Duration::from_secs_f64(ms / 1000.0),
            bytes,
        })
    }

    /// Returns and forgets what the page did so far.
    pub fn notes(&self) -> Vec<Note> {
        let take = |notes: &mut super::notes::Notes| std::mem::take(&mut notes.notes);
        self.wire.notes(&self.session, take)
    }

    /// Returns and forgets what the page did so far and a page without faults does not do: errors on the console,
    /// violations of its policy, failed requests, dialogs. What scripts said besides is forgotten as well.
    pub fn complaints(&self) -> Vec<Note> {
        self.notes().into_iter().filter(|note| !matches!(note, Note::Said(_))).collect()
    }

    /// Returns the addresses that the tab has asked for since it was opened, also in vain.
    pub fn requests(&self) -> Vec<String> {
        self.wire.notes(&self.session, |notes| notes.requests.clone())
    }

    fn ask(&self, method: &str, parameters: &[(&str, Value)]) -> Result<Value> {
        self.wire.ask(Some(&self.session), method, parameters)
    }
}

impl Drop for Tab {
    fn drop(&mut self) {
        // The browser may have ended.
        let context = [("browserContextId", self.context.clone().into())];
        let _ = self.wire.ask(None, "Target.disposeBrowserContext", &context);
        self.wire.forget(&self.session);
    }
}

fn word(value: &Value, name: &str) -> Result<String> {
    value[name]
        .as_str()
        .map(str::to_owned)
        .with_context(|| format!("no {name} in {value}"))
}
