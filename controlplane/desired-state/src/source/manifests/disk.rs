//! Requests to a file system that may never answer. A link may lead to a network file system whose
//! server is dead, and a thread that waits for it in the kernel cannot be interrupted. So requests
//! run on threads that nothing has to wait for, not even the end of the process.

use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Maximum time for an answer, and between two parts of a large file.
const PATIENCE: Duration = Duration::from_secs(5);
/// Silence after which another thread continues with the remaining paths.
const HELP_AFTER: Duration = Duration::from_millis(50);
/// Maximum number of threads that are stuck on links; as many again may be stuck on files in the
/// folder itself.
const MAX_STUCK: usize = 8;
/// Pause before a path without an answer is tried again, if its thread has returned.
const RETRY: Duration = Duration::from_secs(60);

/// Requests to a file system; remembers paths that do not answer.
#[derive(Debug)]
pub(super) struct Disk {
    patience: Duration,
    stuck: Vec<Stuck>,
}

impl Default for Disk {
    fn default() -> Self {
        Self {
            patience: PATIENCE,
            stuck: Vec::new(),
        }
    }
}

/// A path that does not answer, and the thread that waits for it.
#[derive(Debug)]
struct Stuck {
    path: PathBuf,
    since: Instant,
    thread: JoinHandle<()>,
}

/// The reason why nothing is known of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NoAnswer {
    #[error("the disk does not answer within {} s; check the disk or file server", PATIENCE.as_secs())]
    Late,
    #[error("not read, because the disk does not answer for {MAX_STUCK} other files")]
    NotAsked,
}

/// A counter of progress.
#[derive(Clone, Debug, Default)]
pub(super) struct Beat(Arc<AtomicU64>);

impl Beat {
    /// Records that another part has arrived.
    pub(super) fn beat(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A request about one path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Question {
    pub(super) path: PathBuf,
    /// The path leads out of the folder.
    pub(super) is_link: bool,
}

impl Question {
    /// Creates a request about a path in the folder itself.
    pub(super) fn plain(path: PathBuf) -> Self {
        let is_link = false;
        Self { path, is_link }
    }
}

/// State that all threads of one round share.
struct Round<W> {
    waiting: Mutex<VecDeque<PathBuf>>,
    beat: Beat,
    work: W,
}

/// A thread of a round, and its current path.
struct Worker {
    asking: Arc<Mutex<Option<PathBuf>>>,
    thread: JoinHandle<()>,
}

impl Disk {
    /// Runs `work` for each path. Paths that do not answer in time do not delay the others. Takes
    /// at most [`PATIENCE`] longer than the paths that answer.
    pub(super) fn each<T, W>(
        &mut self,
        questions: Vec<Question>,
        work: W,
    ) -> Vec<(PathBuf, Result<T, NoAnswer>)>
    where
        T: Send + 'static,
        W: Fn(&Path, &Beat) -> T + Send + Sync + 'static,
    {
        self.stuck
            .retain(|stuck| !stuck.thread.is_finished() || stuck.since.elapsed() < RETRY);
        let known_stuck = |path: &Path| self.stuck.iter().any(|stuck| stuck.path == path);
        let mut asked: Vec<&Question> = questions
            .iter()
            .filter(|question| {
                let room = self.stuck.len() < MAX_STUCK || !question.is_link;
                room && !known_stuck(&question.path)
            })
            .collect();
        // Paths in the folder itself come first, so that links to other disks do not delay them.
        asked.sort_by_key(|question| question.is_link);
        let round = Arc::new(Round {
            waiting: Mutex::new(asked.iter().map(|question| question.path.clone()).collect()),
            beat: Beat::default(),
            work,
        });
        let expected = asked.len();
        let mut answers = self.ask(&round, expected);
        let not_asked: Vec<PathBuf> = std::mem::take(&mut *round.waiting.lock()).into();
        let full = self.stuck.len() >= MAX_STUCK;
        let verdict = |question: Question| {
            let path = question.path;
            let answer = answers.remove(&path).ok_or_else(|| {
                let stuck = self.stuck.iter().any(|stuck| stuck.path == path);
                let skipped = not_asked.contains(&path) || (full && !stuck);
                if skipped { NoAnswer::NotAsked } else { NoAnswer::Late }
            });
            (path, answer)
        };
        questions.into_iter().map(verdict).collect()
    }

    fn ask<T, W>(&mut self, round: &Arc<Round<W>>, expected: usize) -> HashMap<PathBuf, T>
    where
        T: Send + 'static,
        W: Fn(&Path, &Beat) -> T + Send + Sync + 'static,
    {
        let (sender, receiver) = mpsc::channel();
        let mut answers = HashMap::with_capacity(expected);
        let mut workers = Vec::new();
        let (mut quiet_since, mut beats) = (Instant::now(), 0);
        while answers.len() < expected {
            let needs_help = !round.waiting.lock().is_empty();
            if needs_help && (workers.is_empty() || quiet_since.elapsed() >= HELP_AFTER) {
                workers.extend(self.helper(round, &sender, workers.len()));
            }
            if workers.is_empty() {
                break;
            }
            match receiver.recv_timeout(HELP_AFTER) {
                Ok((path, answer)) => {
                    quiet_since = Instant::now();
                    answers.insert(path, answer);
                }
                // This cannot happen before the end of this function, which owns a sender.
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    let now = round.beat.0.load(Ordering::Relaxed);
                    if std::mem::replace(&mut beats, now) != now {
                        quiet_since = Instant::now();
                    }
                    if quiet_since.elapsed() >= self.patience {
                        break;
                    }
                }
            }
        }
        for worker in workers {
            let path = worker.asking.lock().take();
            self.stuck.extend(path.map(|path| Stuck {
                path,
                since: Instant::now(),
                thread: worker.thread,
            }));
        }
        answers
    }

    /// Starts another thread of a round, unless too many are stuck already.
    fn helper<T, W>(
        &self,
        round: &Arc<Round<W>>,
        answers: &Sender<(PathBuf, T)>,
        workers: usize,
    ) -> Option<Worker>
    where
        T: Send + 'static,
        W: Fn(&Path, &Beat) -> T + Send + Sync + 'static,
    {
        let most = if workers == 0 { 2 * MAX_STUCK } else { MAX_STUCK };
        if self.stuck.len() + workers >= most {
            return None;
        }
        let asking = Arc::new(Mutex::new(None));
        let (round, answers, current) = (Arc::clone(round), answers.clone(), Arc::clone(&asking));
        let work = move || {
            // The locks are taken one after the other: a path is always in one of the two.
            while let Some(path) = next(&round.waiting, &current) {
                let answer = (round.work)(&path, &round.beat);
                let in_time = current.lock().take().is_some();
                // A late answer is dropped.
                if !in_time || answers.send((path, answer)).is_err() {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name("disk".to_owned()).spawn(work);
        thread.ok().map(|thread| Worker { asking, thread })
    }
}

fn next(waiting: &Mutex<VecDeque<PathBuf>>, asking: &Mutex<Option<PathBuf>>) -> Option<PathBuf> {
    let mut asking = asking.lock();
    *asking = waiting.lock().pop_front();
    asking.clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk() -> Disk {
        Disk {
            patience: PATIENCE / 5,
            ..Disk::default()
        }
    }

    fn questions(names: &[&str]) -> Vec<Question> {
        let question = |name: &&str| Question {
            path: name.into(),
            is_link: name.starts_with("link"),
        };
        names.iter().map(question).collect()
    }

    /// Answers with the length of the name; for "stuck" paths, only after the gate opens.
    fn work(gate: &Arc<Mutex<()>>) -> impl Fn(&Path, &Beat) -> usize + Send + Sync + 'static {
        let gate = Arc::clone(gate);
        move |path, _| {
            if path.to_string_lossy().contains("stuck") {
                drop(gate.lock());
            }
            path.as_os_str().len()
        }
    }

    #[test]
    fn what_does_not_answer_keeps_nobody_else() {
        let (mut disk, gate) = (disk(), Arc::new(Mutex::new(())));
        let closed = gate.lock();
        let asked = ["link-stuck", "a", "stuck", "b"];
        let answers = disk.each(questions(&asked), work(&gate));
        let expected = [Err(NoAnswer::Late), Ok(1), Err(NoAnswer::Late), Ok(1)];
        assert!(answers.iter().map(|(_, answer)| *answer).eq(expected));
        // The path is not tried again while its thread is stuck.
        let again = Instant::now();
        let answers = disk.each(questions(&asked), work(&gate));
        assert!(answers.iter().map(|(_, answer)| *answer).eq(expected));
        assert!(again.elapsed() < PATIENCE / 10);
        drop(closed);
        while !disk.stuck.iter().all(|stuck| stuck.thread.is_finished()) {
            thread::yield_now();
        }
        disk.stuck.iter_mut().for_each(|stuck| stuck.since -= RETRY);
        let answers = disk.each(questions(&asked), work(&gate));
        assert!(answers.iter().all(|(_, answer)| answer.is_ok()));
    }

    #[test]
    fn so_many_threads_are_stuck_and_no_more() {
        let (mut disk, gate) = (disk(), Arc::new(Mutex::new(())));
        let closed = gate.lock();
        let names: Vec<String> = (0..20).map(|n| format!("link-stuck-{n}")).collect();
        let mut names: Vec<&str> = names.iter().map(String::as_str).collect();
        names.push("plain");
        let answers = disk.each(questions(&names), work(&gate));
        let of = |wanted| answers.iter().filter(|(_, a)| *a == wanted).count();
        assert_eq!(of(Err(NoAnswer::Late)), MAX_STUCK);
        assert_eq!(of(Err(NoAnswer::NotAsked)), 20 - MAX_STUCK);
        assert_eq!((of(Ok(5)), disk.stuck.len()), (1, MAX_STUCK));
        // Paths in the folder itself are still read.
        let answers: Vec<_> = disk
            .each(questions(&["link-2", "plain"]), work(&gate))
            .into_iter()
            .map(|(_, answer)| answer)
            .collect();
        assert_eq!(answers, [Err(NoAnswer::NotAsked), Ok(5)]);
        drop(closed);
    }

    #[test]
    fn a_slow_file_is_read_to_its_end() {
        let mut disk = disk();
        let slow = |_: &Path, beat: &Beat| {
            let begun = Instant::now();
            while begun.elapsed() < PATIENCE * 2 / 5 {
                thread::sleep(HELP_AFTER / 5);
                beat.beat();
            }
        };
        let answers = disk.each(questions(&["slow"]), slow);
        assert_eq!(answers, [("slow".into(), Ok(()))]);
    }
}
