//! What a tab reports by itself while it shows a page.

use std::collections::HashMap;

use serde_json::Value;

/// Something that a page did. All but [`Note::Said`] is a fault of a page that should have none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// A script wrote to the console, without a sign of trouble.
    Said(String),
    /// A script wrote a warning or an error to the console.
    Warned(String),
    /// A script failed.
    Failed(String),
    /// The browser wrote to the console, for example that a request failed or that it refused an inline script.
    Logged(String),
    /// The page's Content Security Policy refused something.
    Refused {
        /// Such as `script-src-elem`.
        directive: String,
        /// The address that was refused, or `inline` and `eval`.
        what: String,
    },
    /// A script opened a dialog such as that of `alert()`; the text is the dialog's. It was closed.
    Dialog(String),
}

/// What a tab reported.
#[derive(Debug, Default)]
pub(super) struct Notes {
    pub(super) notes: Vec<Note>,
    /// Addresses that the page asked for.
    pub(super) requests: Vec<String>,
    /// HTTP statuses of documents, by the browser's name of the navigation.
    pub(super) statuses: HashMap<String, u64>,
    /// Navigations whose documents are loaded with all that they need.
    pub(super) loaded: Vec<String>,
}

impl Notes {
    /// Takes an event.
    pub(super) fn take(&mut self, event: &str, it: &Value) {
        let note = match event {
            "Runtime.consoleAPICalled" => said(it),
            "Runtime.exceptionThrown" => Note::Failed(exception(&it["exceptionDetails"])),
            "Log.entryAdded" => logged(&it["entry"]),
            "Audits.issueAdded" => match refused(&it["issue"]) {
                Some(note) => note,
                None => return,
            },
            "Page.javascriptDialogOpening" => Note::Dialog(text(&it["message"])),
            _ => return self.follow(event, it),
        };
        self.notes.push(note);
    }

    fn follow(&mut self, event: &str, it: &Value) {
        match event {
            "Network.requestWillBeSent" => self.requests.push(text(&it["request"]["url"])),
            "Network.responseReceived" if it["type"] == "Document" => {
                let status = it["response"]["status"].as_u64().unwrap_or_default();
                self.statuses.insert(text(&it["loaderId"]), status);
            }
            "Page.lifecycleEvent" if it["name"] == "load" => {
                self.loaded.push(text(&it["loaderId"]));
            }
            _ => {}
        }
    }
}

/// Returns the text of an exception.
pub(super) fn exception(details: &Value) -> String {
    let description = &details["exception"]["description"];
    match description.as_str() {
        Some(description) => description.to_owned(),
        None => text(&details["text"]),
    }
}

fn said(it: &Value) -> Note {
    let words: Vec<String> = it["args"].as_array().into_iter().flatten().map(argument).collect();
    let words = words.join(" ");
    match it["type"].as_str() {
        Some("warning" | "error" | "assert") => Note::Warned(words),
        _ => Note::Said(words),
    }
}

/// Returns an argument of a script's call.
fn argument(it: &Value) -> String {
    match (&it["value"], &it["description"]) {
        (Value::String(text), _) | (Value::Null, Value::String(text)) => text.clone(),
        (value, _) => value.to_string(),
    }
}

fn logged(entry: &Value) -> Note {
    let words = [&entry["text"], &entry["url"]].map(text);
    Note::Logged(words.join(" ").trim_end().to_owned())
}

fn refused(issue: &Value) -> Option<Note> {
    let details = &issue["details"]["contentSecurityPolicyIssueDetails"];
    let directive = details["violatedDirective"].as_str()?.to_owned();
    let what = match (
        details["blockedURL"].as_str(),
        details["contentSecurityPolicyViolationType"].as_str(),
    ) {
        (Some(url), _) if !url.is_empty() => url,
        (_, Some("kInlineViolation")) => "inline",
        (_, Some("kEvalViolation")) => "eval",
        (_, other) => other.unwrap_or_default(),
    };
    let what = what.to_owned();
    Some(Note::Refused { directive, what })
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}
