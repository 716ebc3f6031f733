//! What may go wrong, in words that say what, where and what to do.

use std::{io, net::SocketAddr};

use userdma_proto::{
    iwarp::StartupError,
    mem::AccessError,
    verbs::{PostError, WcOpcode, WcStatus},
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

/// Where to look for the cause of a flush.
fn flush_hint(status: WcStatus) -> &'static str {
    if status == WcStatus::WR_FLUSH_ERR { " (Qp::close_reason tells why)" } else { "" }
}

impl Error {
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
