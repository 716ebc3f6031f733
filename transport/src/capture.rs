//! What an engine sends and receives, as a capture that other programs read.

use std::{
    fmt,
    fs::File,
    io::Write,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use userdma_proto::{
    roce::{Train, port::Destination},
    wire::{
        pcapng::{Datagram, Direction, Interface, Writer},
        roce::icrc::{PathV4, verify_unknown_id},
    },
};

use crate::error::{Error, Result};

/// Octets that are kept before they are written to the file.
const ENOUGH: usize = 64 << 10;

/// A capture under way: pcapng, without privileges, of one engine's own traffic. With what it cannot write
/// it ends, and the engine's counters tell why.
pub(crate) struct Tap {
    path: PathBuf,
    /// Or why it ended early.
    file: Result<File, String>,
    writer: Writer,
    interface: Interface,
}

impl Tap {
    /// Begins a capture at `path`, replacing what is there, of the socket at `local`.
    pub(crate) fn create(path: &Path, local: SocketAddr) -> Result<Self> {
        let failed = |e| Error::io(format!("cannot write the capture {}", path.display()), e);
        let file = File::create(path).map_err(failed)?;
        let mut writer = Writer::new(concat!("userdma ", env!("CARGO_PKG_VERSION")));
        let interface = writer.interface(&format!("udp {local}"));
        let mut tap = Self { path: path.to_owned(), file: Ok(file), writer, interface };
        tap.flush();
        Ok(tap)
    }

    /// A train that is about to be sent, packet by packet as the kernel cuts it.
    pub(crate) fn outbound(&mut self, way: &Destination, train: &Train) {
        let now = nanos();
        for (i, payload) in train.octets().chunks(train.segment_len().max(1)).enumerate() {
            let datagram = Datagram::new(way.from, way.to, payload)
                .with_tos(way.tos)
                .with_identification(i as u16);
            self.write(now, Direction::Outbound, &datagram);
        }
    }

    /// A packet that was received. Identification and DF, which a socket does not show, are what
    /// the ICRC says; of a packet with a wrong one they are 0 and set.
    pub(crate) fn inbound(&mut self, from: SocketAddr, to: SocketAddr, ecn: u8, payload: &[u8]) {
        let mut datagram = Datagram::new(from, to, payload).with_tos(ecn);
        if let (IpAddr::V4(src), IpAddr::V4(dst)) = (from.ip(), to.ip()) {
            let path = PathV4 { src, dst, src_port: from.port(), dst_port: to.port() };
            if let Some(found) = verify_unknown_id(&path, payload, None) {
                datagram = datagram.with_identification(found.identification);
                datagram.dont_fragment = found.dont_fragment;
            }
        }
        self.write(nanos(), Direction::Inbound, &datagram);
    }

    fn write(&mut self, now: u64, direction: Direction, datagram: &Datagram<'_>) {
        // Both ends are of one family, and a packet is no longer than it was on the wire.
        let _ = self.writer.datagram(self.interface, now, direction, datagram, "");
        if self.writer.octets().len() >= ENOUGH {
            self.flush();
        }
    }

    /// Writes to the file what is kept.
    pub(crate) fn flush(&mut self) {
        let Self { path, file, writer, .. } = self;
        if writer.octets().is_empty() {
            return;
        }
        if let Ok(open) = file
            && let Err(e) = open.write_all(writer.octets())
        {
            *file = Err(format!("{}: {e}", path.display()));
        }
        writer.clear();
    }

    /// Why it is not whole, if it is not. What was kept is written first.
    pub(crate) fn failure(&mut self) -> Option<String> {
        self.flush();
        self.file.as_ref().err().cloned()
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        self.flush();
    }
}

impl fmt::Debug for Tap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tap").field("path", &self.path).finish_non_exhaustive()
    }
}

fn nanos() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}
