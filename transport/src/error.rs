//! What may go wrong, in words that say what, where and what to do.

use std::{io, net::SocketAddr};

use userdma_proto::{
    iwarp::{self, StartupError},
    mem::AccessError,
    roce::{ModifyError, cm::Rejected, port::PortError},
    verbs::{PostError, WcOpcode, WcStatus},
    wire::{iwarp::terminate::Terminate, roce::aeth::Syndrome},
};

use crate::mr::RegisterError;

/// Why a call failed. Nothing changed, unless the call says otherwise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An address that cannot be read or used; the text says what was expected.
    #[error("{0}")]
    BadAddress(String),
    /// The operating system refused; `context` says what was tried and, where we know, what helps.
    #[error("{context}: {source}")]
    Io {
        /// What was tried.
        context: String,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// TCP connected, but no iWARP connection came about.
    #[error("no connection to {peer}: {source}")]
    Startup {
        /// The other side.
        peer: SocketAddr,
        /// Why.
        #[source]
        source: StartupError,
    },
    /// RoCE: the peer said no, its program or its connection manager.
    #[error("no connection to {peer}: {source}")]
    Rejected {
        /// The other side: its address, and the rdma_cm port.
        peer: SocketAddr,
        /// Why, with the private data of its program.
        #[source]
        source: Rejected,
    },
    /// RoCE: the peer said nothing in time.
    #[error(
        "no answer from {peer} at UDP port {udp_port}: nothing speaks RoCEv2 there, or a firewall \
         is in the way{}", trouble_hint(trouble.as_deref())
    )]
    NoAnswer {
        /// The other side: its address, and the rdma_cm port.
        peer: SocketAddr,
        /// Its UDP port.
        udp_port: u16,
        /// What the socket last refused to send.
        trouble: Option<String>,
    },
    /// RoCE: the peer has no such UD service, or does not tell.
    #[error("no datagrams for {peer}: {why} (SIDR status {status})")]
    NoService {
        /// The other side: its address, and the rdma_cm port.
        peer: SocketAddr,
        /// What it said (IBTA vol. 1, table 119).
        status: u8,
        /// The same in words.
        why: &'static str,
    },
    /// RoCE: what the port does not do.
    #[error("{0}")]
    Port(PortError),
    /// A work request or private data that cannot be taken.
    #[error("{0}")]
    Post(#[from] PostError),
    /// A piece of registered memory that may not be used so.
    #[error("{0}")]
    Access(#[from] AccessError),
    /// Memory that cannot be registered.
    #[error("{0}")]
    Register(#[from] RegisterError),
    /// This transport, or this version, cannot do that.
    #[error("{0}")]
    Unsupported(&'static str),
    /// The object is not in a state that takes this call.
    #[error("{0}")]
    State(&'static str),
    /// An awaited operation failed; the queue pair is in the error state. Where it was only flushed
    /// ([`WcStatus::WR_FLUSH_ERR`]) something else ended the connection:
    /// [`Qp::close_reason`](crate::Qp::close_reason) tells what, [`Qp::closed`](crate::Qp::closed)
    /// waits for it.
    #[error("{opcode} ended with: {status}{}", flush_hint(*status))]
    Wc {
        /// How it ended.
        status: WcStatus,
        /// What it was.
        opcode: WcOpcode,
    },
    /// More completions came than the queue holds; the number of entries it has. All of them were
    /// handed out before this error, and the queue pairs that use the queue have ended
    /// ([`Cq`](crate::Cq)).
    #[error("the completion queue overflowed: {0} entries; make it deeper or poll it more often")]
    CqOverflow(usize),
    /// A configured limit.
    #[error("limit reached: {0}")]
    Limit(&'static str),
}

/// What the calls of this crate return.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// How a queue pair ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum CloseReason {
    /// Both sides closed in order, or one did and the other was told.
    Graceful,
    /// iWARP: the peer sent a Terminate.
    TerminateReceived(Terminate),
    /// iWARP: we found an error and sent a Terminate.
    TerminateSent(Terminate),
    /// The peer has gone: TCP was reset, timed out, or ended in the middle of work; RoCE: the
    /// connection manager heard nothing any more.
    Lost,
    /// This side aborted.
    Aborted,
    /// iWARP: the program took memory away that it had posted for sending, after the headers in
    /// front of it had left: the stream cannot go on.
    SourceRevoked,
    /// RoCE: work of ours failed; its completion says how.
    WorkFailed,
    /// RoCE: the peer asked for something wrong, and was told so by this NAK.
    NakSent(Syndrome),
    /// RoCE: a receive that was posted cannot be used; its completion says why.
    ReceiveFailed,
}

impl From<iwarp::CloseReason> for CloseReason {
    fn from(reason: iwarp::CloseReason) -> Self {
        match reason {
            iwarp::CloseReason::Graceful => Self::Graceful,
            iwarp::CloseReason::TerminateReceived(terminate) => Self::TerminateReceived(terminate),
            iwarp::CloseReason::TerminateSent(terminate) => Self::TerminateSent(terminate),
            iwarp::CloseReason::Aborted => Self::Aborted,
            iwarp::CloseReason::SourceRevoked => Self::SourceRevoked,
            // All there is besides is that it was lost.
            _ => Self::Lost,
        }
    }
}

impl From<PortError> for Error {
    fn from(e: PortError) -> Self {
        match e {
            PortError::Post(e) => Self::Post(e),
            e => Self::Port(e),
        }
    }
}

impl From<ModifyError> for Error {
    fn from(e: ModifyError) -> Self {
        Self::Port(PortError::Modify(e))
    }
}

fn trouble_hint(trouble: Option<&str>) -> String {
    trouble.map(|trouble| format!(" (the socket said: {trouble})")).unwrap_or_default()
}

/// Where to look for the cause of a flush.
fn flush_hint(status: WcStatus) -> &'static str {
    if status == WcStatus::WR_FLUSH_ERR { " (Qp::close_reason tells why)" } else { "" }
}

impl Error {
    /// The private data with which the peer's program said no, if that is what it is.
    pub fn rejection(&self) -> Option<&[u8]> {
        match self {
            Self::Startup { source: StartupError::Rejected { private_data, .. }, .. }
            | Self::Rejected { source: Rejected { private_data, .. }, .. } => Some(private_data),
            _ => None,
        }
    }

    /// `context` says what was tried.
    pub(crate) fn io(context: impl Into<String>, source: io::Error) -> Self {
        Self::Io { context: context.into(), source }
    }

    /// An address to listen at could not be had.
    pub(crate) fn bind(addr: SocketAddr, source: io::Error) -> Self {
        let context = match source.kind() {
            io::ErrorKind::AddrInUse => format!(
                "cannot listen at {addr}: another socket holds it (`ss -ltnp 'sport = :{}'` shows \
                 whose); end that program, take another port, or port 0 for a free one",
                addr.port()
            ),
            io::ErrorKind::AddrNotAvailable => format!(
                "cannot use {addr}: no interface of this host has this address (`ip addr` lists them)"
            ),
            io::ErrorKind::PermissionDenied => {
                format!("cannot listen at {addr}: ports below 1024 are for root; take a higher one")
            }
            _ => format!("cannot listen at {addr}"),
        };
        Self::Io { context, source }
    }

    /// A TCP connection could not be made.
    pub(crate) fn connect(peer: SocketAddr, source: io::Error) -> Self {
        let context = match source.kind() {
            io::ErrorKind::ConnectionRefused => {
                format!("cannot connect to {peer}: nothing listens there")
            }
            io::ErrorKind::TimedOut => format!("cannot connect to {peer}: no answer in time"),
            io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => format!(
                "cannot connect to {peer}: no way leads there (`ip route get {}` shows what was tried)",
                peer.ip()
            ),
            _ => format!("cannot connect to {peer}"),
        };
        Self::Io { context, source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_refusal_says_that_nothing_listens() {
        let peer: SocketAddr = "10.0.0.1:7174".parse().unwrap();
        let text = |errno| Error::connect(peer, io::Error::from_raw_os_error(errno)).to_string();
        assert!(text(libc::ECONNREFUSED).contains("nothing listens there"));
        for errno in [libc::EHOSTUNREACH, libc::ENETUNREACH] {
            let text = text(errno);
            assert!(text.contains("no way leads there") && text.contains("route get 10.0.0.1`"));
        }
        for errno in [libc::EHOSTUNREACH, libc::ENETUNREACH, libc::ETIMEDOUT, libc::EACCES] {
            assert!(!text(errno).contains("nothing listens"), "{}", text(errno));
        }
    }

    #[test]
    fn a_flush_points_to_its_cause() {
        let wc = |status| Error::Wc { status, opcode: WcOpcode::SEND }.to_string();
        assert!(wc(WcStatus::WR_FLUSH_ERR).contains("Qp::close_reason"));
        assert!(!wc(WcStatus::REM_ACCESS_ERR).contains("close_reason"));
    }
}
