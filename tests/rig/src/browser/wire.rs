//! The pipe to a browser: questions, their answers, and what tabs report by themselves.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{ChildStdin, ChildStdout};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use serde_json::{Map, Value, json};

use super::DEADLINE;
use super::notes::Notes;

/// Number of the questions whose answers do not matter.
const NO_ANSWER: u64 = 0;
/// End of a message.
const END: u8 = 0;

/// The pipe to a browser.
#[derive(Debug)]
pub(super) struct Wire {
    input: Mutex<Option<ChildStdin>>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Number of the last question.
    last: u64,
    /// Answers that nobody has taken yet, by the numbers of their questions.
    answers: HashMap<u64, Result<Value, String>>,
    /// What tabs reported, by session.
    tabs: HashMap<String, Notes>,
    has_ended: bool,
}

impl Wire {
    /// Starts the thread that reads from the browser.
    pub(super) fn start(
        input: ChildStdin,
        output: ChildStdout,
    ) -> Result<(Arc<Self>, JoinHandle<()>)> {
        let wire = Arc::new(Self {
            input: Mutex::new(Some(input)),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let reader = Arc::clone(&wire);
        let reader = thread::Builder::new()
            .name("browser".to_owned())
            .spawn(move || reader.read(output))
            .context("start a thread")?;
        Ok((wire, reader))
    }

    /// Asks the browser (`session` is `None`) or a tab, and returns the answer.
    ///
    /// # Errors
    /// The browser refused, has ended, or did not answer in time.
    pub(super) fn ask(
        &self,
        session: Option<&str>,
        method: &str,
        parameters: &[(&str, Value)],
    ) -> Result<Value> {
        let number = {
            let mut state = self.state();
            state.last += 1;
            state.last
        };
        self.send(number, session, method, parameters)?;
        let answer = self
            .wait(DEADLINE, |state| state.answers.remove(&number))
            .with_context(|| format!("{method}: no answer"))?;
        answer.map_err(|error| anyhow!("{method}: {error}"))
    }

    /// Waits until a tab's notes satisfy a condition, and returns what that yields.
    ///
    /// # Errors
    /// The browser has ended, or the time has passed.
    pub(super) fn wait_for<T>(
        &self,
        session: &str,
        within: Duration,
        mut look: impl FnMut(&mut Notes) -> Option<T>,
    ) -> Result<T> {
        self.wait(within, |state| {
            state.tabs.get_mut(session).and_then(&mut look)
        })
    }

    /// Calls the closure with a tab's notes.
    pub(super) fn notes<T>(&self, session: &str, look: impl FnOnce(&mut Notes) -> T) -> T {
        look(self.state().tabs.entry(session.to_owned()).or_default())
    }

    /// Removes a tab's notes.
    pub(super) fn forget(&self, session: &str) {
        self.state().tabs.remove(session);
    }

    /// Closes the pipe, which ends the browser.
    pub(super) fn close(&self) {
        lock(&self.input).take();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn wait<T>(
        &self,
        within: Duration,
        mut look: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<T> {
        let end = Instant::now() + within;
        let mut state = self.state();
        loop {
            if let Some(value) = look(&mut state) {
                return Ok(value);
            }
            if state.has_ended {
                bail!("the browser has ended");
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("not within {within:?}");
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn send(
        &self,
        number: u64,
        session: Option<&str>,
        method: &str,
        parameters: &[(&str, Value)],
    ) -> Result<()> {
        let parameters: Map<String, Value> = parameters
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.clone()))
            .collect();
        let mut message = json!({"id": number, "method": method, "params": parameters});
        if let Some(session) = session {
            message["sessionId"] = session.into();
        }
        let mut bytes = serde_json::to_vec(&message)?;
        bytes.push(END);
        let mut input = lock(&self.input);
        let input = input.as_mut().context("the browser is closed")?;
        let written = input.write_all(&bytes).and_then(|()| input.flush());
        written.with_context(|| format!("{method}: the browser has ended"))
    }

    fn read(&self, output: ChildStdout) {
        let mut output = BufReader::new(output);
        let mut message = Vec::new();
        while let Ok(1..) = output.read_until(END, &mut message) {
            if message.last() == Some(&END) {
                message.pop();
            }
            if let Ok(value) = serde_json::from_slice(&message) {
                self.take(value);
            }
            message.clear();
        }
        self.state().has_ended = true;
        self.changed.notify_all();
    }

    fn take(&self, mut message: Value) {
        if let Some(number) = message["id"].as_u64() {
            if number != NO_ANSWER {
                let answer = match message["error"]["message"].as_str() {
                    Some(error) => Err(error.to_owned()),
                    None => Ok(message["result"].take()),
                };
                self.state().answers.insert(number, answer);
            }
        } else if let (Some(session), Some(event)) =
            (message["sessionId"].as_str(), message["method"].as_str())
        {
            self.notes(session, |notes| notes.take(event, &message["params"]));
            if event == "Page.javascriptDialogOpening" {
                // Scripts of the page wait until the dialog is closed. If the browser has ended, nothing waits.
                let no = [("accept", false.into())];
                let _ = self.send(NO_ANSWER, Some(session), "Page.handleJavaScriptDialog", &no);
            }
        }
        self.changed.notify_all();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
