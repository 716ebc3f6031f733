//! System calls that std and tokio do not offer: octets of a region to a socket without a copy,
//! a socket's readiness to take more, and the number of a network interface.

use std::{
    ffi::CString,
    io,
    net::TcpStream,
    os::fd::{AsRawFd, BorrowedFd},
    ptr,
    sync::Arc,
};

use tokio::io::unix::AsyncFd;

use userdma_proto::{
    iwarp::{Part, Transmit},
    mem::AccessError,
    verbs::Sge,
};

use crate::mr::Pin;

/// Pieces given to one `sendmsg`. Linux takes 1024 (`UIO_MAXIOV`).
const MAX_PIECES: usize = 1024;

/// A place in a [`Transmit`]: the part, and how many of its octets were sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Cursor {
    part: usize,
    offset: usize,
}

impl Cursor {
    /// Moves on by `n` octets of `tx`.
    pub(crate) fn advance(&mut self, tx: &Transmit, mut n: usize) {
        while n > 0 {
            let rest = part_len(&tx.parts()[self.part]) - self.offset;
            if n < rest {
                self.offset += n;
                return;
            }
            n -= rest;
            self.part += 1;
            self.offset = 0;
        }
    }
}

fn part_len(part: &Part) -> usize {
    match *part {
        Part::Bytes { start, end } => end - start,
        Part::Region(sge) => sge.length as usize,
    }
}

/// Why [`Gather::send`] sent nothing.
#[derive(Debug)]
pub(crate) enum SendError {
    /// The socket: `WouldBlock` when it is full.
    Io(io::Error),
    /// The next piece of registered memory is not there any more.
    Revoked,
}

/// The lists behind one `sendmsg`, kept for their capacity only: empty between calls.
#[derive(Default)]
pub(crate) struct Gather {
    pieces: Vec<libc::iovec>,
    pins: Vec<Pin<'static>>,
}

// SAFETY: the raw pointers in `pieces` are made, used and cleared within one call of `send`; what
// moves between threads is an empty list.
unsafe impl Send for Gather {}

impl Gather {
    /// Sends what `tx` holds from `at` on, as far as the socket takes it, without waiting. `pin`
    /// keeps a piece of a region in place until the call returns. Gives the octets sent and the
    /// octets offered.
    ///
    /// Where a piece cannot be pinned, what stands before it is sent; it is the error of the call
    /// in which it comes first.
    pub(crate) fn send<'a>(
        &mut self,
        socket: &TcpStream,
        tx: &Transmit,
        at: Cursor,
        mut pin: impl FnMut(Sge) -> Result<Pin<'a>, AccessError>,
    ) -> Result<(usize, usize), SendError> {
        // What a call before this one left, had it panicked.
        self.pieces.clear();
        let mut pins = emptied(std::mem::take(&mut self.pins));
        let mut offered = 0;
        let mut skip = at.offset;
        for part in &tx.parts()[at.part..] {
            if self.pieces.len() == MAX_PIECES {
                break;
            }
            let (base, len) = match *part {
                Part::Bytes { start, end } => {
                    let octets = &tx.bytes()[start + skip..end];
                    (octets.as_ptr(), octets.len())
                }
                Part::Region(sge) => {
                    // `skip` is below the part's length, a u32.
                    let rest = Sge::new(sge.addr + skip as u64, sge.length - skip as u32, sge.lkey);
                    match pin(rest) {
                        Ok(pinned) => {
                            let piece = (pinned.as_ptr(), pinned.len());
                            pins.push(pinned);
                            piece
                        }
                        Err(_) if self.pieces.is_empty() => {
                            self.pins = emptied(pins);
                            return Err(SendError::Revoked);
                        }
                        Err(_) => break,
                    }
                }
            };
            self.pieces.push(libc::iovec { iov_base: base.cast_mut().cast(), iov_len: len });
            offered += len;
            skip = 0;
        }
        // SAFETY: each piece lies in the `Transmit` that is borrowed here, or in a region that is
        // held by a pin of `pins`; both outlive the call.
        let sent = unsafe { self.sendmsg(socket) };
        self.pieces.clear();
        self.pins = emptied(pins);
        sent.map(|n| (n, offered)).map_err(SendError::Io)
    }

    /// # Safety
    /// What `pieces` names is readable memory until the call returns.
    unsafe fn sendmsg(&mut self, socket: &TcpStream) -> io::Result<usize> {
        // SAFETY: `msghdr` is plain data, for which all zeros is "no address, no pieces, no control".
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = self.pieces.as_mut_ptr();
        message.msg_iovlen = self.pieces.len() as _;
        loop {
            // SAFETY: `message` names `pieces.len()` pieces of readable memory, which the caller
            // promises; the call only reads them.
            let n = unsafe {
                libc::sendmsg(
                    socket.as_raw_fd(),
                    &raw const message,
                    libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
                )
            };
            if let Ok(n) = usize::try_from(n) {
                return Ok(n);
            }
            let e = io::Error::last_os_error();
            if e.kind() != io::ErrorKind::Interrupted {
                return Err(e);
            }
        }
    }
}

/// The same list without its pins, for pins of another lifetime. The collection works in place: the
/// capacity stays.
fn emptied<'b>(mut pins: Vec<Pin<'_>>) -> Vec<Pin<'b>> {
    pins.clear();
    pins.into_iter().map(|_| unreachable!("the list is empty")).collect()
}

/// The socket in the runtime's epoll, until the result is dropped. Inside of the runtime only.
pub(crate) fn watch(socket: Arc<TcpStream>) -> io::Result<AsyncFd<Arc<TcpStream>>> {
    // SAFETY: the socket is owned: its descriptor stays the same and open until the last clone of
    // the Arc is gone, and the result holds one.
    Ok(unsafe { AsyncFd::register(socket)? })
}

/// Whether the socket has room again, in the kernel's sense: a good part of its buffer is free (or
/// it has an error to tell). Does not wait.
pub(crate) fn writable(socket: BorrowedFd<'_>) -> bool {
    let mut entry = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
    // SAFETY: one entry, ours, and a time-out of zero.
    let n = unsafe { libc::poll(ptr::from_mut(&mut entry), 1, 0) };
    n > 0
}

/// Ends the connection at once, by RST where the peer has not closed, and whoever else still holds
/// the socket (RFC 9293 §3.10.5).
pub(crate) fn reset(socket: &TcpStream) {
    let nowhere = libc::sockaddr {
        sa_family: libc::AF_UNSPEC as libc::sa_family_t,
        // SAFETY: the rest is octets, which mean nothing in this family.
        ..unsafe { std::mem::zeroed() }
    };
    // SAFETY: `nowhere` is a whole address and lives through the call. Linux takes a connection
    // of this family as "disconnect"; a failure means that there is none.
    unsafe {
        libc::connect(
            socket.as_raw_fd(),
            &raw const nowhere,
            size_of_val(&nowhere) as libc::socklen_t,
        )
    };
}

/// The number of the network interface `name`, as IPv6 scope identifiers want it.
pub(crate) fn interface_index(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    // SAFETY: a NUL-terminated string that lives through the call.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    (index != 0).then_some(index)
}
