//! The two sides meet over TCP and tell each other their queue pairs' addresses.

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use anyhow::{Context, Result, anyhow, bail};
use socket2::{Domain, Socket, Type};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::timeout,
};

use super::exchange::{Address, DONE, LEN, why_not};
use crate::common::Target;

/// How long a connection may take to come about, and the other side to say what is its turn.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// The addresses of an IPv4 socket as such, where they come from an IPv6 one.
pub(super) fn canonical(addr: SocketAddr) -> SocketAddr {
    match addr {
        SocketAddr::V6(v6) => match v6.ip().to_ipv4_mapped() {
            Some(v4) => SocketAddr::from((v4, v6.port())),
            None => addr,
        },
        SocketAddr::V4(_) => addr,
    }
}

/// Listens at `bind`, or at `port` of all addresses of both families.
pub(super) fn listen(bind: Option<SocketAddr>, port: u16) -> Result<TcpListener> {
    if let Some(addr) = bind {
        return listen_at(addr).with_context(|| taken(addr));
    }
    let all = SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
    match listen_at(all) {
        Ok(listener) => Ok(listener),
        // A host without IPv6.
        Err(e) if e.raw_os_error() == Some(EAFNOSUPPORT) => {
            let all = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
            listen_at(all).with_context(|| taken(all))
        }
        Err(e) => Err(e).with_context(|| taken(all)),
    }
}

/// "Address family not supported by protocol", on Linux.
const EAFNOSUPPORT: i32 = 97;

fn taken(addr: SocketAddr) -> String {
    format!("cannot listen at TCP {addr} (another port: --port, another address: --bind)")
}

fn listen_at(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, None)?;
    if addr.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&addr.into())?;
    socket.listen(1)?;
    TcpListener::from_std(socket.into())
}

/// Connects to the first of the host's addresses that answers.
pub(super) async fn connect(target: &Target) -> Result<TcpStream> {
    let mut last = None;
    for addr in target.resolve().await? {
        let failed = |e: &dyn std::fmt::Display| anyhow!("cannot connect to TCP {addr}: {e}");
        match timeout(PATIENCE, TcpStream::connect(addr)).await {
            Ok(Ok(tcp)) => return Ok(tcp),
            Ok(Err(e)) => last = Some(failed(&e)),
            Err(_) => last = Some(failed(&format!("no answer in {} s", PATIENCE.as_secs()))),
        }
    }
    // `resolve` gives at least one address.
    let e = last.unwrap_or_else(|| anyhow!("{target} has no address"));
    Err(e.context("is a server there? (`userdma pingpong`, `ibv_rc_pingpong -g INDEX`)"))
}

/// Tells `own`, filled up to `all` addresses: one call, which the programs' reads depend on.
pub(super) async fn tell(
    tcp: &mut (impl AsyncWrite + Unpin),
    own: &[Address],
    all: usize,
) -> Result<()> {
    let unused = Address::default();
    let fill = all.saturating_sub(own.len());
    let mut text = Vec::with_capacity(all * LEN);
    for address in own.iter().chain(std::iter::repeat_n(&unused, fill)) {
        text.extend(address.to_line());
    }
    in_time(tcp.write_all(&text)).await.context("cannot tell the peer this side's address")
}

/// Hears `all` addresses and gives back those of queue pairs, which are `qps`.
pub(super) async fn hear(
    tcp: &mut (impl AsyncRead + Unpin),
    qps: usize,
    all: usize,
) -> Result<Vec<Address>> {
    let mut found = Vec::with_capacity(all);
    while found.len() < all {
        let n = found.len();
        let mut line = [0; LEN];
        in_time(fill(tcp, &mut line)).await.map_err(|e| {
            e.context(format!(
                "the peer did not tell address {} of {all}{}",
                n + 1,
                why_not(n, all)
            ))
        })?;
        found.push(Address::from_line(&line).with_context(|| {
            format!(
                "what the peer told as address {} of {all} is none: is it a pingpong program?",
                n + 1
            )
        })?);
    }
    let used = found.iter().take_while(|address| !address.is_unused()).count();
    if used != qps {
        bail!(
            "the peer has {used} queue pairs and this side {qps}: both need the same number \
             (--qps here, -q there)"
        );
    }
    found.truncate(used);
    for (i, address) in found.iter().enumerate() {
        if address.gid == Default::default() {
            bail!(
                "the peer told no GID, which RoCE needs: start it with a GID index \
                 (`ibv_rc_pingpong -g 1`; `show_gids`, or /sys/class/infiniband/*/ports/*/gids)"
            );
        }
        if i > 0 && address.gid != found[0].gid {
            bail!(
                "the peer's queue pairs have GIDs that differ: {} and {}",
                found[0].gid,
                address.gid
            );
        }
    }
    Ok(found)
}

/// The client's last word.
pub(super) async fn tell_done(tcp: &mut (impl AsyncWrite + Unpin)) -> Result<()> {
    in_time(tcp.write_all(DONE)).await.context("cannot tell the peer that all is done")
}

/// Hears the client's last word, after `all` addresses.
pub(super) async fn hear_done(tcp: &mut (impl AsyncRead + Unpin), all: usize) -> Result<()> {
    let mut word = [0; DONE.len()];
    in_time(fill(tcp, &mut word)).await.context("the client did not say that it is done")?;
    if word != *DONE {
        let more = if word[4] == b':' { all + 1 } else { all };
        bail!(
            "the client was to say \"done\" and said \"{}\"{}",
            word.escape_ascii(),
            why_not(more, all)
        );
    }
    Ok(())
}

/// What a client is to look at whose server closed without a word. The programs do so where they
/// cannot bring their queue pair up.
pub(super) fn silent_server(e: anyhow::Error) -> anyhow::Error {
    let is_silence = |cause: &(dyn std::error::Error + 'static)| {
        cause.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == SILENCE)
    };
    if !e.chain().any(is_silence) {
        return e;
    }
    e.context(
        "it gave up, and says itself why: a UDP port that is taken (on one host each side needs an address \
         or a port of its own); a program of libibverbs without a GID index (-g) whose GID is of the same \
         IP version as this side's; or another --type",
    )
}

/// The peer closed without a word.
const SILENCE: io::ErrorKind = io::ErrorKind::ConnectionAborted;

/// Reads all of `room`, or tells how much there was.
async fn fill(tcp: &mut (impl AsyncRead + Unpin), room: &mut [u8]) -> io::Result<()> {
    let mut n = 0;
    while n < room.len() {
        match tcp.read(&mut room[n..]).await? {
            0 => {
                let text = format!("it closed after {n} of {} octets", room.len());
                let kind = if n == 0 { SILENCE } else { io::ErrorKind::UnexpectedEof };
                return Err(io::Error::new(kind, text));
            }
            more => n += more,
        }
    }
    Ok(())
}

async fn in_time<T>(work: impl Future<Output = io::Result<T>>) -> Result<T> {
    match timeout(PATIENCE, work).await {
        Ok(done) => Ok(done?),
        Err(_) => bail!("nothing in {} s", PATIENCE.as_secs()),
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use tokio::io::duplex;
    use userdma::{
        Qpn,
        proto::wire::ids::{Gid, Psn},
    };

    use super::{super::exchange::SRQ_ADDRESSES, *};

    fn addresses(qps: u32) -> Vec<Address> {
        let gid = Gid::from(IpAddr::from([10, 0, 0, 1]));
        (0..qps).map(|i| Address { lid: 0, qpn: Qpn(i + 17), psn: Psn::new(i), gid }).collect()
    }

    fn chain<T: std::fmt::Debug>(result: Result<T>) -> String {
        crate::chain(&result.unwrap_err())
    }

    #[tokio::test]
    async fn one_address_and_many_arrive() {
        for (qps, all) in [(1, 1), (1, SRQ_ADDRESSES), (16, SRQ_ADDRESSES), (255, SRQ_ADDRESSES)] {
            let (mut a, mut b) = duplex(1 << 16);
            let own = addresses(qps);
            tell(&mut a, &own, all).await.unwrap();
            tell_done(&mut a).await.unwrap();
            assert_eq!(hear(&mut b, qps as usize, all).await.unwrap(), own);
            hear_done(&mut b, all).await.unwrap();
            drop(a);
            assert_eq!(b.read(&mut [0]).await.unwrap(), 0, "nothing is left over");
        }
    }

    #[tokio::test]
    async fn a_piece_at_a_time_is_heard_too() {
        let (mut a, mut b) = duplex(3);
        let own = addresses(1);
        let (told, heard) = tokio::join!(tell(&mut a, &own, 1), hear(&mut b, 1, 1));
        told.unwrap();
        assert_eq!(heard.unwrap(), own);
    }

    #[tokio::test]
    async fn what_goes_wrong_is_told() {
        let (mut a, mut b) = duplex(1 << 16);
        a.write_all(&[b'0'; 20]).await.unwrap();
        drop(a);
        let error = chain(hear(&mut b, 1, 1).await);
        assert!(error.contains("address 1 of 1") && error.contains("20 of 52 octets"), "{error}");

        let (mut a, mut b) = duplex(1 << 16);
        a.write_all(&[b'x'; LEN]).await.unwrap();
        let error = chain(hear(&mut b, 1, 1).await);
        assert!(error.contains("is none") && error.contains("octet 0 is 'x'"), "{error}");

        // The wrong number of queue pairs.
        let (mut a, mut b) = duplex(1 << 16);
        tell(&mut a, &addresses(4), SRQ_ADDRESSES).await.unwrap();
        let error = chain(hear(&mut b, 16, SRQ_ADDRESSES).await);
        assert!(error.contains("4 queue pairs and this side 16"), "{error}");

        // A program without -g.
        let (mut a, mut b) = duplex(1 << 16);
        let own = [Address { gid: Gid::default(), ..addresses(1)[0] }];
        tell(&mut a, &own, 1).await.unwrap();
        let error = chain(hear(&mut b, 1, 1).await);
        assert!(error.contains("no GID") && error.contains("-g"), "{error}");
    }

    /// An srq client at an rc server, and the other way round.
    #[tokio::test]
    async fn the_wrong_program_is_suspected() {
        let (mut a, mut b) = duplex(1 << 16);
        tell(&mut a, &addresses(16), SRQ_ADDRESSES).await.unwrap();
        hear(&mut b, 1, 1).await.unwrap();
        let error = chain(hear_done(&mut b, 1).await);
        assert!(error.contains("ibv_srq_pingpong"), "{error}");

        let (mut a, mut b) = duplex(1 << 16);
        tell(&mut a, &addresses(1), 1).await.unwrap();
        drop(a);
        let error = chain(hear(&mut b, 16, SRQ_ADDRESSES).await);
        assert!(error.contains("address 2 of 256") && error.contains("ibv_rc_pingpong"), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_peer_is_given_up() {
        let (_a, mut b) = duplex(64);
        let error = chain(hear(&mut b, 1, 1).await);
        assert!(error.contains("nothing in 10 s"), "{error}");
    }

    #[tokio::test]
    async fn listeners_take_both_families_and_name_what_is_taken() {
        let listener = listen(None, 0).unwrap();
        let port = listener.local_addr().unwrap().port();
        let v4 = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
        let (tcp, peer) = listener.accept().await.unwrap();
        assert_eq!(canonical(peer), v4.local_addr().unwrap());
        assert_eq!(canonical(tcp.local_addr().unwrap()), v4.peer_addr().unwrap());
        let error = chain(listen(None, port).map(drop));
        assert!(error.contains(&port.to_string()) && error.contains("--port"), "{error}");
    }

    #[tokio::test]
    async fn nobody_there_is_told_with_what_may_help() {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let target: Target = free.to_string().parse().unwrap();
        let error = chain(connect(&target).await.map(drop));
        assert!(error.contains("userdma pingpong") && error.contains(&free.to_string()), "{error}");
    }
}
