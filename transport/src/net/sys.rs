//! System calls that std and tokio do not offer: octets of a region to a socket without a copy,
//! trains of datagrams and what the kernel tells beside them, a socket's readiness to take more, and
//! the number of a network interface.

use std::{
    ffi::CString,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket},
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    ptr,
    sync::Arc,
};

use libc::{c_int, c_uint};
use socket2::{SockAddr, SockAddrStorage};
use tokio::io::unix::AsyncFd;

use userdma_proto::{
    iwarp::{Part, Transmit},
    mem::AccessError,
    verbs::Sge,
};

use super::udp::Piece;
use crate::mr::Pin;

/// Pieces given to one `sendmsg`. Linux takes 1024 (`UIO_MAXIOV`).
pub(crate) const MAX_PIECES: usize = 1024;

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
        let sent = unsafe { sendmsg(socket.as_fd(), None, &mut self.pieces) };
        self.pieces.clear();
        self.pins = emptied(pins);
        sent.map(|n| (n, offered)).map_err(SendError::Io)
    }

    /// Sends `pieces` but for their first `skip` octets as datagrams of `segment` octets, the last
    /// one shorter perhaps: where `envelope` has a segment size by one call, all or nothing, and one
    /// datagram a call where it has none. Does not wait. `pin` keeps a piece of a region in place until
    /// the call returns. Gives the octets sent, which end a datagram.
    ///
    /// At most [`MAX_PIECES`] pieces that are not empty.
    pub(crate) fn send_datagrams<'a, 'p>(
        &mut self,
        socket: &UdpSocket,
        envelope: &Envelope,
        segment: usize,
        mut skip: usize,
        pieces: impl Iterator<Item = Piece<'p>>,
        mut pin: impl FnMut(Sge) -> Result<Pin<'a>, AccessError>,
    ) -> Result<usize, SendError> {
        // What a call before this one left, had it panicked.
        self.pieces.clear();
        let mut pins = emptied(std::mem::take(&mut self.pins));
        let mut revoked = false;
        for piece in pieces {
            let whole = piece.len();
            if whole <= skip {
                skip -= whole;
                continue;
            }
            let (base, len) = match piece {
                Piece::Bytes(octets) => (octets[skip..].as_ptr(), whole - skip),
                Piece::Region(sge) => {
                    // `skip` is below the piece's length, a u32.
                    let rest = Sge::new(sge.addr + skip as u64, sge.length - skip as u32, sge.lkey);
                    let Ok(pinned) = pin(rest) else {
                        revoked = true;
                        break;
                    };
                    let place = (pinned.as_ptr(), pinned.len());
                    pins.push(pinned);
                    place
                }
            };
            skip = 0;
            self.pieces.push(libc::iovec { iov_base: base.cast_mut().cast(), iov_len: len });
        }
        let sent = if revoked {
            Err(SendError::Revoked)
        } else if envelope.segmented {
            // SAFETY: each piece lies in octets that live for 'p, or in a region that is held by a
            // pin of `pins`; both outlive the call.
            unsafe { sendmsg(socket.as_fd(), Some(envelope), &mut self.pieces) }
                .map_err(SendError::Io)
        } else {
            // SAFETY: as above.
            unsafe { send_each(socket.as_fd(), envelope, segment, &mut self.pieces) }
                .map_err(SendError::Io)
        };
        self.pieces.clear();
        self.pins = emptied(pins);
        sent
    }
}

/// One call for each datagram of `segment` octets. An error after the first datagram is left for the
/// next call, which meets it again.
///
/// # Safety
/// What `pieces` names is readable memory until the call returns.
unsafe fn send_each(
    socket: BorrowedFd<'_>,
    envelope: &Envelope,
    segment: usize,
    mut pieces: &mut [libc::iovec],
) -> io::Result<usize> {
    let mut sent = 0;
    loop {
        // The pieces of this datagram: `count` whole ones and `rest` octets of the next.
        let (mut count, mut rest) = (0, segment);
        while count < pieces.len() && pieces[count].iov_len <= rest {
            rest -= pieces[count].iov_len;
            count += 1;
        }
        let cut = count < pieces.len() && rest > 0;
        let uncut = cut.then(|| std::mem::replace(&mut pieces[count].iov_len, rest));
        let these = &mut pieces[..count + usize::from(cut)];
        // SAFETY: the caller promises that the pieces are readable; a cut one is so the more.
        match unsafe { sendmsg(socket, Some(envelope), these) } {
            Ok(n) => sent += n,
            Err(_) if sent > 0 => return Ok(sent),
            Err(e) => return Err(e),
        }
        pieces = &mut pieces[count..];
        let Some(first) = pieces.first_mut() else { return Ok(sent) };
        if let Some(len) = uncut {
            first.iov_base = first.iov_base.wrapping_byte_add(rest);
            first.iov_len = len - rest;
        }
    }
}

/// One `sendmsg` that does not wait.
///
/// # Safety
/// What `pieces` names is readable memory until the call returns.
unsafe fn sendmsg(
    socket: BorrowedFd<'_>,
    envelope: Option<&Envelope>,
    pieces: &mut [libc::iovec],
) -> io::Result<usize> {
    // SAFETY: `msghdr` is plain data, for which all zeros is "no address, no pieces, no control".
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr();
    message.msg_iovlen = pieces.len() as _;
    if let Some(Envelope { to, control, .. }) = envelope {
        message.msg_name = to.as_ptr().cast_mut().cast();
        message.msg_namelen = to.len();
        message.msg_control = control.octets.as_ptr().cast_mut().cast();
        message.msg_controllen = control.len as _;
    }
    loop {
        // SAFETY: `message` names `pieces.len()` pieces of readable memory, which the caller
        // promises, and an address and control messages that are borrowed; the call only reads them.
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

/// Room for the control messages of one call: four of the largest kind.
const CONTROL: usize = 160;

/// Control messages, aligned as `cmsghdr` wants it.
#[repr(C, align(8))]
struct Control {
    octets: [u8; CONTROL],
    len: usize,
}

impl Control {
    const fn new() -> Self {
        Self { octets: [0; CONTROL], len: 0 }
    }

    /// Appends a message. `T` is plain data without padding.
    fn push<T: Copy>(&mut self, level: c_int, kind: c_int, value: T) {
        // SAFETY: arithmetic, in truth.
        let space = unsafe { libc::CMSG_SPACE(size_of::<T>() as c_uint) } as usize;
        // SAFETY: as above.
        let len = unsafe { libc::CMSG_LEN(size_of::<T>() as c_uint) };
        let room = &mut self.octets[self.len..][..space];
        // SAFETY: plain data, for which all zeros is a value.
        let mut head: libc::cmsghdr = unsafe { std::mem::zeroed() };
        head.cmsg_len = len as _;
        head.cmsg_level = level;
        head.cmsg_type = kind;
        let place = room.as_mut_ptr().cast::<libc::cmsghdr>();
        // SAFETY: `room` is `CMSG_SPACE` octets, which hold the header.
        unsafe { place.write_unaligned(head) };
        // SAFETY: arithmetic behind a header that is there.
        let data = unsafe { libc::CMSG_DATA(place) };
        // SAFETY: `room` holds the value behind the header, which is what `CMSG_SPACE` means.
        unsafe { data.cast::<T>().write_unaligned(value) };
        self.len += space;
    }
}

/// The option for IPv4's type of service or IPv6's traffic class.
pub(crate) const fn tos_option(v6: bool) -> (c_int, c_int) {
    if v6 { (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) } else { (libc::IPPROTO_IP, libc::IP_TOS) }
}

/// Everything about datagrams but their octets: for the kernel, in its own form.
pub(crate) struct Envelope {
    to: SockAddr,
    control: Control,
    segmented: bool,
}

impl Envelope {
    /// `tos` is the octet of IPv4's type of service or IPv6's traffic class, where it is not the
    /// socket's own; `from` the source address, of the same family as `to`; with `segment` the
    /// kernel makes datagrams of that size.
    pub(crate) fn new(
        to: SocketAddr,
        from: Option<IpAddr>,
        tos: Option<u8>,
        segment: Option<u16>,
    ) -> Self {
        let mut control = Control::new();
        if let Some(tos) = tos {
            let (level, kind) = tos_option(to.is_ipv6());
            control.push(level, kind, c_int::from(tos));
        }
        match (from, to) {
            (Some(IpAddr::V4(from)), _) => {
                let info = libc::in_pktinfo {
                    ipi_ifindex: 0,
                    ipi_spec_dst: libc::in_addr { s_addr: u32::from_ne_bytes(from.octets()) },
                    ipi_addr: libc::in_addr { s_addr: 0 },
                };
                control.push(libc::IPPROTO_IP, libc::IP_PKTINFO, info);
            }
            (Some(IpAddr::V6(from)), to) => {
                let scope = if let SocketAddr::V6(to) = to { to.scope_id() } else { 0 };
                let info = libc::in6_pktinfo {
                    ipi6_addr: libc::in6_addr { s6_addr: from.octets() },
                    ipi6_ifindex: scope as _,
                };
                control.push(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, info);
            }
            (None, _) => {}
        }
        if let Some(segment) = segment {
            control.push(libc::SOL_UDP, libc::UDP_SEGMENT, segment);
        }
        Self { to: to.into(), control, segmented: segment.is_some() }
    }
}

/// What one `recvmsg` brought, beside the octets.
#[derive(Debug)]
pub(crate) struct Received {
    /// Octets in the buffer.
    pub(crate) len: usize,
    /// There were more, and they are gone.
    pub(crate) truncated: bool,
    /// None: of no family of the Internet.
    pub(crate) from: Option<SocketAddr>,
    /// The local address it came to, where the socket asks for it.
    pub(crate) to: Option<IpAddr>,
    /// Type of service or traffic class.
    pub(crate) tos: u8,
    /// The size of the datagrams that the kernel joined.
    pub(crate) segment: Option<usize>,
    /// Datagrams that found the buffer full since the socket was made.
    pub(crate) overflows: Option<u32>,
}

/// Receives one datagram, or several that the kernel joined (`UDP_GRO`). Does not wait.
pub(crate) fn receive(socket: &UdpSocket, room: &mut [u8]) -> io::Result<Received> {
    let mut from = SockAddrStorage::zeroed();
    let mut control = Control::new();
    let mut piece = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
    // SAFETY: `msghdr` is plain data, for which all zeros is "no address, no pieces, no control".
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_name = (&raw mut from).cast();
    message.msg_namelen = from.size_of();
    message.msg_iov = &raw mut piece;
    message.msg_iovlen = 1;
    message.msg_control = control.octets.as_mut_ptr().cast();
    message.msg_controllen = CONTROL as _;
    let len = loop {
        // SAFETY: `message` names the address, the one piece and the control messages, which are
        // exclusively ours and as long as is said.
        let n = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
        if let Ok(n) = usize::try_from(n) {
            break n;
        }
        let e = io::Error::last_os_error();
        if e.kind() != io::ErrorKind::Interrupted {
            return Err(e);
        }
    };
    // SAFETY: the kernel has written an address of this length.
    let from = unsafe { SockAddr::new(from, message.msg_namelen) };
    let mut received = Received {
        len,
        truncated: message.msg_flags & libc::MSG_TRUNC != 0,
        from: from.as_socket(),
        to: None,
        tos: 0,
        segment: None,
        overflows: None,
    };
    // SAFETY: the kernel has left whole control messages in the octets that `message` names.
    let mut at = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    while !at.is_null() {
        // SAFETY: `CMSG_FIRSTHDR` and `CMSG_NXTHDR` give whole headers within the octets.
        let head = unsafe { at.read_unaligned() };
        match (head.cmsg_level, head.cmsg_type) {
            (libc::IPPROTO_IP, libc::IP_TOS) => {
                // SAFETY: the message is whole.
                received.tos = unsafe { value::<u8>(at) }.unwrap_or(0);
            }
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                // SAFETY: the message is whole.
                received.tos = unsafe { value::<c_int>(at) }.unwrap_or(0) as u8;
            }
            (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                // SAFETY: the message is whole.
                let info = unsafe { value::<libc::in_pktinfo>(at) };
                received.to =
                    info.map(|info| Ipv4Addr::from(info.ipi_spec_dst.s_addr.to_ne_bytes()).into());
            }
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                // SAFETY: the message is whole.
                let info = unsafe { value::<libc::in6_pktinfo>(at) };
                received.to = info.map(|info| Ipv6Addr::from(info.ipi6_addr.s6_addr).into());
            }
            (libc::SOL_UDP, libc::UDP_GRO) => {
                // SAFETY: the message is whole.
                let size = unsafe { value::<c_int>(at) };
                received.segment = size.and_then(|size| usize::try_from(size).ok());
            }
            (libc::SOL_SOCKET, libc::SO_RXQ_OVFL) => {
                // SAFETY: the message is whole.
                received.overflows = unsafe { value::<u32>(at) };
            }
            _ => {}
        }
        // SAFETY: `at` is a header of this message.
        at = unsafe { libc::CMSG_NXTHDR(&raw const message, at) };
    }
    Ok(received)
}

/// The value of a control message; None where it is shorter than a `T`.
///
/// # Safety
/// `at` is a whole control message, and any octets make a `T`.
unsafe fn value<T: Copy>(at: *const libc::cmsghdr) -> Option<T> {
    // SAFETY: the caller promises a header.
    let head = unsafe { at.read_unaligned() };
    // SAFETY: arithmetic, in truth.
    let need = unsafe { libc::CMSG_LEN(size_of::<T>() as c_uint) };
    // The field is as wide as the C library has it.
    if head.cmsg_len < need as _ {
        return None;
    }
    // SAFETY: arithmetic behind a header that is there.
    let data = unsafe { libc::CMSG_DATA(at) };
    // SAFETY: the message is whole and long enough.
    Some(unsafe { data.cast::<T>().read_unaligned() })
}

/// Sets an option whose value is an `int`.
pub(crate) fn set_option(
    socket: BorrowedFd<'_>,
    level: c_int,
    name: c_int,
    value: c_int,
) -> io::Result<()> {
    // SAFETY: `value` lives through the call and is as long as is said.
    let rc = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            (&raw const value).cast(),
            size_of::<c_int>() as libc::socklen_t,
        )
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Reads an option whose value is an `int`.
pub(crate) fn option(socket: BorrowedFd<'_>, level: c_int, name: c_int) -> io::Result<c_int> {
    let mut value: c_int = 0;
    let mut len = size_of::<c_int>() as libc::socklen_t;
    // SAFETY: `value` is ours and `len` octets long.
    let rc = unsafe {
        libc::getsockopt(socket.as_raw_fd(), level, name, (&raw mut value).cast(), &raw mut len)
    };
    if rc == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
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

/// The same for a socket of datagrams.
pub(crate) fn watch_datagrams(socket: Arc<UdpSocket>) -> io::Result<AsyncFd<Arc<UdpSocket>>> {
    // SAFETY: as in `watch`.
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
