//! Being asked to end: Ctrl-C, SIGTERM, or a parent that went away.

use std::{
    io::Read,
    process, thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
};

use crate::output::note;

/// Signals that come this soon after the first one are the same wish.
const REPEAT: Duration = Duration::from_millis(300);

/// A flag that is raised once and seen by tasks (which await it) and by spinning threads (which
/// look at it now and then). Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Stop(watch::Sender<bool>);

impl Stop {
    /// A flag that nothing raises but [`Stop::raise`].
    pub(crate) fn new() -> Self {
        Self(watch::Sender::new(false))
    }

    /// A flag that Ctrl-C and SIGTERM raise; a second signal ends the process at once. Needs the
    /// runtime.
    pub(crate) fn on_signals() -> Result<Self> {
        let stop = Self::new();
        let mut interrupt = signal(SignalKind::interrupt()).context("cannot watch for Ctrl-C")?;
        let mut terminate = signal(SignalKind::terminate()).context("cannot watch for SIGTERM")?;
        let raised = stop.clone();
        tokio::spawn(async move {
            let mut first: Option<Instant> = None;
            loop {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                }
                match first {
                    None => {
                        first = Some(Instant::now());
                        raised.raise();
                    }
                    // A process group may be sent the same signal twice (timeout(1) does so).
                    Some(first) if first.elapsed() < REPEAT => {}
                    Some(_) => {
                        note("ended by a second signal");
                        process::exit(130);
                    }
                }
            }
        });
        Ok(stop)
    }

    /// Raises the flag when stdin reaches its end: so does a parent's death, which closes the pipe.
    pub(crate) fn when_stdin_closes(&self) -> Result<()> {
        let stop = self.clone();
        // A thread, because a blocking read of stdin cannot be cancelled: it ends with the process.
        thread::Builder::new()
            .name("stdin".into())
            .spawn(move || {
                let mut buf = [0; 64];
                let mut stdin = std::io::stdin().lock();
                while matches!(stdin.read(&mut buf), Ok(n) if n > 0) {}
                stop.raise();
            })
            .context("cannot start the thread that watches stdin")?;
        Ok(())
    }

    /// Raises the flag.
    pub(crate) fn raise(&self) {
        self.0.send_replace(true);
    }

    /// Whether it was raised.
    pub(crate) fn is_raised(&self) -> bool {
        *self.0.borrow()
    }

    /// Waits until it is raised. Cancel safe.
    pub(crate) async fn raised(&self) {
        // The sender lives as long as `self`, so waiting cannot fail.
        let _ = self.0.subscribe().wait_for(|raised| *raised).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_raised_flag_is_seen_by_all_clones_now_and_later() {
        let stop = Stop::new();
        let waiter = tokio::spawn({
            let stop = stop.clone();
            async move { stop.raised().await }
        });
        assert!(!stop.is_raised());
        stop.clone().raise();
        waiter.await.unwrap();
        assert!(stop.is_raised());
        stop.raised().await;
    }
}
