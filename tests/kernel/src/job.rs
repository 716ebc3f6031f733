//! What came of a command, here or in the guest, and commands that still run.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::tools::{go_on, last_lines};

/// What a command came to.
#[derive(Clone, Debug)]
pub(crate) struct Output {
    /// The command, as it was given.
    pub(crate) command: String,
    /// Its exit status; `None` where a signal ended it.
    pub(crate) code: Option<i32>,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) took: Duration,
}

impl Output {
    /// Its stdout. What is no text is replaced.
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).replace('\0', "")
    }

    pub(crate) fn stderr_text(&self) -> String {
        String::from_utf8_lossy(&self.stderr).replace('\0', "")
    }

    /// Both, one behind the other.
    pub(crate) fn all(&self) -> String {
        self.text() + &self.stderr_text()
    }

    /// The end of both, for messages.
    pub(crate) fn tail(&self) -> String {
        last_lines(&self.all(), 12)
    }

    /// An error unless it ended with 0.
    pub(crate) fn success(&self) -> Result<&Self> {
        self.ended_with(0)
    }

    /// An error unless it ended with `code`.
    pub(crate) fn ended_with(&self, code: i32) -> Result<&Self> {
        ensure!(
            self.code == Some(code),
            "`{}` ended with {} instead of {code}:\n{}",
            self.command,
            self.code.map_or("a signal".into(), |code| code.to_string()),
            self.tail()
        );
        Ok(self)
    }

    /// An error unless it says `what`.
    pub(crate) fn says(&self, what: &str) -> Result<&Self> {
        ensure!(
            self.all().contains(what),
            "`{}` does not say {what:?}:\n{}",
            self.command,
            self.tail()
        );
        Ok(self)
    }

    /// The lines of its stdout that are JSON objects.
    pub(crate) fn objects(&self) -> Vec<Value> {
        self.text().lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// The first object whose `event` is `name`.
    pub(crate) fn event(&self, name: &str) -> Result<Value> {
        let found = self.objects().into_iter().find(|object| object["event"] == name);
        found.with_context(|| format!("`{}` has no event {name:?}:\n{}", self.command, self.tail()))
    }
}

/// What a running command has printed so far, and how it ended.
#[derive(Debug, Default)]
struct Seen {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    /// Its end; the exit status as in [`Output::code`].
    ended: Option<(Option<i32>, Instant)>,
    /// It will say nothing more, for another reason than its end.
    broken: Option<String>,
}

/// The threads that read what a command prints write it here; others wait for it.
#[derive(Clone, Debug)]
pub(crate) struct Watched {
    pub(crate) command: String,
    began: Instant,
    seen: Arc<(Mutex<Seen>, Condvar)>,
}

impl Watched {
    pub(crate) fn new(command: &str) -> Self {
        Self { command: command.into(), began: Instant::now(), seen: Arc::default() }
    }

    fn change(&self, f: impl FnOnce(&mut Seen)) {
        f(&mut lock(&self.seen.0));
        self.seen.1.notify_all();
    }

    pub(crate) fn printed(&self, octets: &[u8]) {
        self.change(|seen| seen.stdout.extend_from_slice(octets));
    }

    pub(crate) fn complained(&self, octets: &[u8]) {
        self.change(|seen| seen.stderr.extend_from_slice(octets));
    }

    pub(crate) fn ended(&self, code: Option<i32>) {
        self.change(|seen| seen.ended = Some((code, Instant::now())));
    }

    pub(crate) fn broke(&self, why: &str) {
        self.change(|seen| seen.broken = Some(why.into()));
    }

    pub(crate) fn has_ended(&self) -> bool {
        lock(&self.seen.0).ended.is_some()
    }

    /// Waits until `look` finds something, at most for `limit`. `None`: it did not.
    fn wait_for<T>(
        &self,
        limit: Duration,
        mut look: impl FnMut(&Seen) -> Option<T>,
    ) -> Result<Option<T>> {
        let until = Instant::now() + limit;
        let mut seen = lock(&self.seen.0);
        loop {
            go_on()?;
            if let Some(found) = look(&seen) {
                return Ok(Some(found));
            }
            if let Some(why) = &seen.broken {
                bail!("`{}`: {why}", self.command);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            // In slices, because of Ctrl-C.
            let slice = left.min(Duration::from_millis(200));
            seen = self.seen.1.wait_timeout(seen, slice).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Its end, if that comes in time.
    pub(crate) fn wait(&self, limit: Duration) -> Result<Option<Output>> {
        self.wait_for(limit, |seen| seen.ended.map(|(code, at)| self.output(seen, code, at)))
    }

    /// Waits for a line of its stdout that contains `what`.
    ///
    /// # Errors
    /// It ended without one, or `limit` is over.
    pub(crate) fn expect(&self, what: &str, limit: Duration) -> Result<String> {
        let found = self.wait_for(limit, |seen| {
            let text = String::from_utf8_lossy(&seen.stdout);
            let line = text.lines().find(|line| line.contains(what));
            match line {
                Some(line) => Some(Ok(line.to_owned())),
                None => seen.ended.map(|(code, at)| Err(self.output(seen, code, at))),
            }
        })?;
        match found {
            Some(Ok(line)) => Ok(line),
            Some(Err(output)) => {
                bail!("`{}` ended without {what:?}:\n{}", self.command, output.tail())
            }
            None => bail!(
                "`{}` did not say {what:?} in {limit:?}:\n{}",
                self.command,
                self.so_far().tail()
            ),
        }
    }

    /// What there is of it now.
    pub(crate) fn so_far(&self) -> Output {
        let seen = lock(&self.seen.0);
        self.output(&seen, seen.ended.and_then(|(code, _)| code), Instant::now())
    }

    fn output(&self, seen: &Seen, code: Option<i32>, at: Instant) -> Output {
        Output {
            command: self.command.clone(),
            code,
            stdout: seen.stdout.clone(),
            stderr: seen.stderr.clone(),
            took: at - self.began,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_sees_lines_and_the_end() {
        let watched = Watched::new("x");
        watched.printed(b"one\ntwo");
        let short = Duration::from_millis(10);
        assert_eq!(watched.expect("tw", short).unwrap(), "two");
        let error = watched.expect("three", short).unwrap_err().to_string();
        assert!(error.contains("did not say \"three\""), "{error}");
        assert!(watched.wait(short).unwrap().is_none());
        watched.ended(Some(3));
        let error = watched.expect("three", short).unwrap_err().to_string();
        assert!(error.contains("ended without \"three\""), "{error}");
        let output = watched.wait(short).unwrap().expect("it has ended");
        assert_eq!((output.code, output.text().as_str()), (Some(3), "one\ntwo"));
        assert!(output.success().unwrap_err().to_string().contains("ended with 3 instead of 0"));
    }

    #[test]
    fn a_broken_line_is_told() {
        let watched = Watched::new("x");
        watched.broke("the guest is gone");
        let error = watched.wait(Duration::from_secs(1)).unwrap_err().to_string();
        assert_eq!(error, "`x`: the guest is gone");
    }
}
