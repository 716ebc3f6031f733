//! One iWARP connection on its TCP socket: reads, writes and shuts down as far as the socket lets
//! it, and never waits. Who calls, and when, is the [engine](crate::engine)'s matter.
//!
//! Octets out: headers from a buffer and payload from its region in one `sendmsg` of up to 1 MiB.
//! Octets in: one buffer, whole FPDUs, one copy to where they belong. Without CRC the kernel could
//! put the rest of the FPDU under way straight into its region; but what follows it is not known
//! before its header was checked, so that is one call a FPDU, which measured slower than reading
//! many of them at once (0.92 to 1.01 of a bare stream against 1.18 to 1.35) and saves 15 % of the
//! receiver's time at best.

use std::{
    io::{self, Read},
    net::{Shutdown as Half, SocketAddr, TcpStream},
    os::fd::AsFd,
    sync::Arc,
    time::Duration,
};

use socket2::{SockRef, TcpKeepalive};
use userdma_proto::{
    iwarp::{Connection, Event, Shutdown, Transmit},
    mem::Memory,
    time::Instant,
};

use super::sys::{self, Cursor, Gather, SendError};
use crate::mr::Table;

/// Octets asked of `poll_transmit` at a time where payload goes to the kernel uncopied.
const CHUNK: usize = 1 << 20;
/// The same where payload is copied and checksummed first: long enough for few system calls, short
/// enough that what was copied is still in the cache when the kernel takes it.
const CHUNK_CRC: usize = 512 << 10;
/// The receive buffer of a connection that has not shown yet that it needs more.
const RX_FIRST: usize = 4 << 10;
/// Octets sent between two looks at the segment size, which grows as TCP learns the path.
const MSS_EVERY: usize = 1 << 20;

/// A peer whose host has gone without a word: asked after a minute of silence, every 10 s, and given
/// up after 6 questions. Where octets of ours are not acknowledged, TCP's own time-out comes first
/// (`net.ipv4.tcp_retries2`, some 15 minutes).
const KEEPALIVE: TcpKeepalive = TcpKeepalive::new()
    .with_time(Duration::from_secs(60))
    .with_interval(Duration::from_secs(10))
    .with_retries(6);

/// How far one turn may go, in octets.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Budget {
    /// Read from the socket.
    pub(crate) read: usize,
    /// Written to it.
    pub(crate) write: usize,
}

/// What one turn did.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Turn {
    /// Octets moved, or the connection changed.
    pub(crate) worked: bool,
    /// Somebody was woken (set by the engine).
    pub(crate) told: bool,
    /// The budget ended before the work did: take another turn.
    pub(crate) more: bool,
    /// The socket has nothing more to read.
    pub(crate) drained: bool,
    /// The socket takes no more.
    pub(crate) blocked: bool,
}

/// A connection and its socket.
pub(crate) struct TcpPort {
    conn: Connection,
    /// None once it is closed.
    socket: Option<Arc<TcpStream>>,
    rx: RxBuffer,
    /// What is in `rx` may go on without new octets: the program answered a request.
    refeed: bool,
    eof: bool,
    tx: Transmit,
    at: Cursor,
    unwritten: usize,
    blocked: bool,
    gather: Gather,
    until_mss: usize,
}

impl TcpPort {
    /// `socket` is connected. It is made non-blocking, without delay, and asks a silent peer whether
    /// it is there; `rx_max` bounds the receive buffer.
    pub(crate) fn new(mut conn: Connection, socket: TcpStream, rx_max: usize) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        SockRef::from(&socket).set_tcp_keepalive(&KEEPALIVE)?;
        conn.set_emss(mss(&socket));
        Ok(Self {
            conn,
            socket: Some(Arc::new(socket)),
            rx: RxBuffer::new(rx_max),
            refeed: false,
            eof: false,
            tx: Transmit::default(),
            at: Cursor::default(),
            unwritten: 0,
            blocked: false,
            gather: Gather::default(),
            until_mss: MSS_EVERY,
        })
    }

    pub(crate) fn conn(&self) -> &Connection {
        &self.conn
    }

    /// The connection, to post to it or to end it; a turn must follow.
    pub(crate) fn conn_mut(&mut self) -> &mut Connection {
        &mut self.conn
    }

    /// The socket, until it is closed.
    pub(crate) fn socket(&self) -> Option<&Arc<TcpStream>> {
        self.socket.as_ref()
    }

    pub(crate) fn addresses(&self) -> io::Result<(SocketAddr, SocketAddr)> {
        match &self.socket {
            Some(socket) => Ok((socket.local_addr()?, socket.peer_addr()?)),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// Whether the socket may still bring octets.
    pub(crate) fn wants_read(&self) -> bool {
        self.socket.is_some() && !self.eof
    }

    /// Whether octets wait for room in the socket.
    pub(crate) fn wants_write(&self) -> bool {
        self.socket.is_some() && self.blocked
    }

    /// What was received and held back goes on at the next turn.
    pub(crate) fn refeed(&mut self) {
        self.refeed = true;
    }

    /// Moves what can be moved: a due timer, octets in, octets out, shutting down.
    pub(crate) fn turn(&mut self, now: Instant, table: &Table, budget: Budget) -> Turn {
        let mut turn = Turn::default();
        if self.conn.poll_timeout().is_some_and(|due| due <= now) {
            self.conn.handle_timeout(now);
            turn.worked = true;
        }
        if budget.read > 0 {
            self.receive(now, table, budget.read, &mut turn);
        }
        self.transmit(now, table, budget.write, &mut turn);
        turn
    }

    /// Gives memory back that only traffic needs.
    pub(crate) fn trim(&mut self) {
        self.rx.trim();
        if self.unwritten == 0 {
            self.tx = Transmit::default();
            self.at = Cursor::default();
            self.gather = Gather::default();
        }
    }

    /// Octets out, and then what has to happen to the socket.
    pub(crate) fn transmit(
        &mut self,
        now: Instant,
        table: &Table,
        mut budget: usize,
        turn: &mut Turn,
    ) {
        // While the kernel has little room, asking it is cheaper than building lists for a write
        // that moves a few octets.
        if self.blocked {
            self.blocked =
                self.socket.as_ref().is_some_and(|socket| !sys::writable(socket.as_fd()));
        }
        while !self.blocked && budget > 0 && self.socket.is_some() {
            if self.unwritten == 0 && !self.fill(now, table) {
                break;
            }
            turn.worked = true;
            budget = budget.saturating_sub(self.write(now, table));
        }
        turn.blocked = self.blocked;
        turn.more |= budget == 0 && !self.blocked;
        while let Some(how) = self.conn.poll_shutdown() {
            turn.worked = true;
            self.shut_down(how);
        }
    }

    /// Gets the next octets to send. False: there are none.
    fn fill(&mut self, now: Instant, table: &Table) -> bool {
        self.tx.clear();
        self.at = Cursor::default();
        let crc = self.conn.established().is_some_and(|e| e.crc);
        let chunk = if crc { CHUNK_CRC } else { CHUNK };
        let some = self.conn.poll_transmit(now, table, chunk, &mut self.tx);
        self.unwritten = self.tx.len();
        some && self.unwritten > 0
    }

    /// One `sendmsg`. Returns how many octets it took.
    fn write(&mut self, now: Instant, table: &Table) -> usize {
        let Some(socket) = &self.socket else { return 0 };
        let scope = self.conn.config().scope;
        let sent = self.gather.send(socket, &self.tx, self.at, |sge| table.pin_read(scope, sge));
        match sent {
            Ok((n, offered)) => {
                self.at.advance(&self.tx, n);
                self.unwritten -= n;
                // A stream socket that took less than it was offered is full.
                self.blocked = n < offered;
                self.until_mss = self.until_mss.saturating_sub(n);
                if self.until_mss == 0 {
                    self.until_mss = MSS_EVERY;
                    self.conn.set_emss(mss(socket));
                }
                self.conn.handle_written(now, n);
                n
            }
            Err(SendError::Io(e)) if e.kind() == io::ErrorKind::WouldBlock => {
                self.blocked = true;
                0
            }
            Err(SendError::Io(_)) => {
                self.drop_unwritten();
                // What the peer said before it reset is still there, a Terminate perhaps.
                self.receive(now, table, usize::MAX, &mut Turn::default());
                self.conn.handle_reset(now);
                0
            }
            // The program took memory away that it had promised to leave in place until the
            // completion. The header is out, so the stream cannot go on.
            Err(SendError::Revoked) => {
                self.drop_unwritten();
                self.conn.handle_source_revoked(now);
                0
            }
        }
    }

    fn drop_unwritten(&mut self) {
        self.tx.clear();
        self.at = Cursor::default();
        self.unwritten = 0;
        self.blocked = false;
    }

    fn shut_down(&mut self, how: Shutdown) {
        match how {
            Shutdown::Write => {
                if let Some(socket) = &self.socket {
                    // Fails only where the peer has closed already, which reading tells.
                    let _ = socket.shutdown(Half::Write);
                }
            }
            // The task holds the socket until it runs next, so dropping ours is not enough.
            Shutdown::Close => {
                if let Some(socket) = &self.socket {
                    let _ = socket.shutdown(Half::Both);
                }
                self.close();
            }
            Shutdown::Abort => {
                if let Some(socket) = &self.socket {
                    sys::reset(socket);
                }
                self.close();
            }
        }
    }

    fn close(&mut self) {
        self.drop_unwritten();
        self.socket = None;
        self.rx = RxBuffer::new(self.rx.max);
        self.tx = Transmit::default();
        self.gather = Gather::default();
    }

    /// Octets in.
    fn receive(&mut self, now: Instant, table: &Table, mut budget: usize, turn: &mut Turn) {
        if std::mem::take(&mut self.refeed) {
            self.feed(now, table);
        }
        while self.wants_read() {
            let Some(socket) = &self.socket else { break };
            let room = self.rx.room();
            let size = room.len();
            match (&**socket).read(room) {
                Ok(0) => {
                    self.eof = true;
                    turn.worked = true;
                    self.conn.handle_eof(now, self.rx.octets().len());
                }
                Ok(n) => {
                    turn.worked = true;
                    self.rx.filled(n);
                    self.feed(now, table);
                    if n < size {
                        // A stream socket that gave less than there was room for is empty.
                        break;
                    }
                    self.rx.widen();
                    budget = budget.saturating_sub(n);
                    if budget == 0 {
                        turn.more = true;
                        return;
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    self.eof = true;
                    turn.worked = true;
                    self.drop_unwritten();
                    self.conn.handle_reset(now);
                }
            }
        }
        turn.drained = true;
    }

    fn feed<M: Memory + ?Sized>(&mut self, now: Instant, mem: &M) {
        let used = self.conn.handle_stream(now, self.rx.octets(), mem);
        self.rx.consume(used);
    }

    /// A turn of a start-up, and the event that it may have brought.
    pub(crate) fn startup_event(&mut self, now: Instant, table: &Table) -> Option<Event> {
        self.turn(now, table, Budget { read: RX_FIRST, write: CHUNK });
        self.conn.poll_event()
    }
}

impl std::fmt::Debug for TcpPort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TcpPort")
            .field("socket", &self.socket)
            .field("unwritten", &self.unwritten)
            .field("blocked", &self.blocked)
            .finish_non_exhaustive()
    }
}

/// The segment size TCP uses now, options subtracted.
fn mss(socket: &TcpStream) -> usize {
    // The least that IPv4 allows stands in where the system does not tell.
    SockRef::from(socket).tcp_mss().map_or(536, |mss| mss as usize)
}

/// Received octets: what is not used up yet, and room behind it. Grows while reads fill it.
struct RxBuffer {
    octets: Vec<u8>,
    start: usize,
    end: usize,
    max: usize,
}

impl RxBuffer {
    fn new(max: usize) -> Self {
        Self { octets: Vec::new(), start: 0, end: 0, max }
    }

    /// What is to be used up.
    fn octets(&self) -> &[u8] {
        &self.octets[self.start..self.end]
    }

    fn consume(&mut self, n: usize) {
        self.start += n;
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        }
    }

    fn filled(&mut self, n: usize) {
        self.end += n;
    }

    /// Room for more, at least a quarter of the buffer: moves the rest to the front, or grows,
    /// where there is less.
    fn room(&mut self) -> &mut [u8] {
        let len = self.octets.len();
        if len - self.end <= len / 4 {
            self.octets.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
            if len - self.end <= len / 4 {
                self.octets.resize((len * 2).max(RX_FIRST), 0);
            }
        }
        &mut self.octets[self.end..]
    }

    /// Gives the memory back where nothing is in it.
    fn trim(&mut self) {
        if self.start == self.end {
            *self = Self::new(self.max);
        }
    }

    /// A read filled all the room: make more of it for the next.
    fn widen(&mut self) {
        let len = self.octets.len();
        if len < self.max {
            self.octets.resize((len * 4).min(self.max), 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use userdma_proto::{iwarp::Config, mem::PdId, wire::ids::Qpn};

    #[test]
    fn a_silent_peer_is_asked_whether_it_is_there() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let conn = Connection::responder(Config::new(PdId(0), Qpn(2), 0), Instant::ZERO);
        let port = TcpPort::new(conn, stream, 1 << 20).unwrap();
        let socket = SockRef::from(&**port.socket().unwrap());
        assert!(socket.keepalive().unwrap());
        let time = socket.tcp_keepalive_time().unwrap();
        let questions =
            socket.tcp_keepalive_interval().unwrap() * socket.tcp_keepalive_retries().unwrap();
        assert_eq!(time + questions, Duration::from_secs(120));
    }

    #[test]
    fn the_receive_buffer_keeps_what_is_not_used_up_and_grows() {
        let mut rx = RxBuffer::new(1 << 20);
        let first = rx.room().len();
        assert_eq!(first, RX_FIRST);
        for (i, octet) in rx.room().iter_mut().enumerate() {
            *octet = i as u8;
        }
        rx.filled(first);
        rx.widen();
        assert_eq!(rx.octets.len(), 4 * RX_FIRST);
        rx.consume(first - 3);
        assert_eq!(rx.octets(), [253, 254, 255]);
        // Fill to the brim without using anything up: the front is reclaimed, then it doubles.
        let n = rx.room().len();
        rx.filled(n);
        assert!(rx.room().len() > n / 4);
        assert_eq!(rx.octets()[..3], [253, 254, 255]);
        rx.consume(rx.octets().len());
        assert_eq!((rx.start, rx.end), (0, 0));
        rx.trim();
        assert_eq!((rx.octets.capacity(), rx.room().len()), (0, RX_FIRST));
    }
}
