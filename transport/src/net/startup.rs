//! MPA start-up of one TCP connection, before a queue pair stands behind it.

use std::sync::Arc;

use tokio::io::{Interest, Ready};
use userdma_proto::{
    iwarp::{Event, StartupError},
    time::Instant,
    verbs::PostError,
};

use super::{sys, tcp::TcpPort};
use crate::device::DeviceShared;

/// A connection whose start-up is under way: who holds it drives it.
pub(crate) struct Startup {
    device: Arc<DeviceShared>,
    port: TcpPort,
}

impl Startup {
    pub(crate) fn new(device: Arc<DeviceShared>, port: TcpPort) -> Self {
        Self { device, port }
    }

    pub(crate) fn into_port(self) -> TcpPort {
        self.port
    }

    /// Responder: says no when it is driven next.
    pub(crate) fn reject(&mut self, private_data: &[u8], now: Instant) -> Result<(), PostError> {
        self.port.conn_mut().reject(private_data, now)
    }

    /// Drives the connection until it has something to tell. Cancel safe.
    pub(crate) async fn event(&mut self) -> Event {
        loop {
            if let Some(event) =
                self.port.startup_event(self.device.clock.now(), &self.device.table)
            {
                return event;
            }
            if !self.wait().await {
                return Event::StartupFailed(StartupError::Lost);
            }
        }
    }

    /// Lets the connection say what it still has to say, and closes it. What the socket takes at
    /// once is sent before this returns, so that a program which ends next loses nothing; the
    /// peer's FIN is awaited on the runtime.
    pub(crate) fn finish_in_background(mut self) {
        while self.port.startup_event(self.device.clock.now(), &self.device.table).is_some() {}
        let runtime = self.device.runtime.clone();
        runtime.spawn(async move {
            loop {
                while self.port.startup_event(self.device.clock.now(), &self.device.table).is_some()
                {
                }
                if self.port.socket().is_none() || !self.wait().await {
                    return;
                }
            }
        });
    }

    /// Waits until the socket or a timer lets it go on. False: it never will.
    async fn wait(&mut self) -> bool {
        let Some(socket) = self.port.socket().cloned() else {
            return false;
        };
        let deadline = self.port.conn().poll_timeout();
        let interest = match (self.port.wants_read(), self.port.wants_write()) {
            (true, true) => Some(Interest::READABLE | Interest::WRITABLE),
            (true, false) => Some(Interest::READABLE),
            (false, true) => Some(Interest::WRITABLE),
            (false, false) => None,
        };
        let ready = async {
            let Some(interest) = interest else {
                return std::future::pending().await;
            };
            let Ok(fd) = sys::watch(socket) else {
                return false;
            };
            match fd.ready(interest).await {
                Ok(mut guard) => {
                    guard.clear_ready_matching(Ready::ALL);
                    true
                }
                Err(_) => false,
            }
        };
        tokio::select! {
            alive = ready => alive,
            () = crate::engine::until(self.device.clock, deadline) => true,
        }
    }
}
