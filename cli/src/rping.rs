//! What rping says: adverts, the pattern, and the server's side of a round.
//!
//! ```text
//!  client                                        server
//!  SEND advert {source addr, rkey, length} ───►
//!                                          ◄───  READ of the source
//!                                          ◄───  SEND of 16 octets, all zero
//!  SEND advert {sink addr, rkey, length}   ───►
//!                                          ◄───  WRITE into the sink
//!                                          ◄───  SEND of 16 octets, all zero
//! ```
//!
//! The client closes when it has done its rounds.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use userdma::{Access, RKey, RecvWr, Region, RemoteAddr, SendOp, SendWr};

use crate::{
    common::{Link, check_last, check_wc, within},
    output::line,
};

/// Octets of an advert, and of what the server answers.
pub(crate) const ADVERT_LEN: usize = 16;
/// Smallest message: `rdma-ping-` with a large number, some letters and the final NUL.
pub(crate) const MIN_SIZE: u32 = 26;
/// Largest message of rping.
pub(crate) const MAX_SIZE: u32 = 65_535;
/// Messages served: what rping can ask for, rounded up.
const SERVED: u32 = 65_536;
/// Receives that are always posted: one advert at a time arrives, the others are for a client
/// that is early.
const RECEIVES: usize = 4;

/// The error of a server whose client lets nothing happen any more.
pub(crate) const IDLE: &str = "the client was silent for longer than --idle-timeout";

/// Where a client's buffer is, as it tells the server. Big endian on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Advert {
    /// Address in the client's region.
    pub(crate) addr: u64,
    /// Its key.
    pub(crate) rkey: RKey,
    /// Its length in octets.
    pub(crate) length: u32,
}

impl Advert {
    /// As it is sent.
    pub(crate) fn to_bytes(self) -> [u8; ADVERT_LEN] {
        let mut b = [0; ADVERT_LEN];
        b[..8].copy_from_slice(&self.addr.to_be_bytes());
        b[8..12].copy_from_slice(&self.rkey.0.to_be_bytes());
        b[12..].copy_from_slice(&self.length.to_be_bytes());
        b
    }

    /// As it arrives.
    pub(crate) fn from_bytes(b: &[u8; ADVERT_LEN]) -> Self {
        let [a0, a1, a2, a3, a4, a5, a6, a7, k0, k1, k2, k3, l0, l1, l2, l3] = *b;
        Self {
            addr: u64::from_be_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
            rkey: RKey(u32::from_be_bytes([k0, k1, k2, k3])),
            length: u32::from_be_bytes([l0, l1, l2, l3]),
        }
    }

    /// The same as a place for a work request.
    pub(crate) const fn place(self) -> RemoteAddr {
        RemoteAddr::new(self.addr, self.rkey)
    }
}

/// Writes the message of round `round` over `buf`: `rdma-ping-N: `, letters from `A` to `z` that
/// start one further each round, and a final NUL.
pub(crate) fn fill(round: u64, buf: &mut [u8]) {
    let Some((last, body)) = buf.split_last_mut() else {
        return;
    };
    *last = 0;
    const LETTERS: u64 = (b'z' - b'A' + 1) as u64;
    let head = format!("rdma-ping-{round}: ");
    let head = head.as_bytes();
    let cut = head.len().min(body.len());
    body[..cut].copy_from_slice(&head[..cut]);
    let mut letter = b'A' + (round % LETTERS) as u8;
    for b in &mut body[cut..] {
        *b = letter;
        letter = if letter == b'z' { b'A' } else { letter + 1 };
    }
}

/// Where two messages differ first: offset, octet expected, octet found.
pub(crate) fn first_difference(expected: &[u8], found: &[u8]) -> Option<(usize, u8, u8)> {
    let at = expected.iter().zip(found).position(|(a, b)| a != b)?;
    Some((at, expected[at], found[at]))
}

/// A message as text: up to its NUL, anything unprintable as a dot.
pub(crate) fn text(message: &[u8]) -> String {
    let end = message.iter().position(|&b| b == 0).unwrap_or(message.len());
    let printable = |&b: &u8| {
        if b == b' ' || b.is_ascii_graphic() { b as char } else { '.' }
    };
    message[..end].iter().map(printable).collect()
}

/// A server's side of one connection: its region, its receives.
pub(crate) struct Server {
    region: userdma::Mr,
    adverts: userdma::Mr,
}

impl Server {
    /// Octets of the memory that [`Server::prepare`] registers.
    pub(crate) const OCTETS: usize = SERVED as usize + RECEIVES * ADVERT_LEN;

    /// Makes the region and posts the receives; `link.qp` is not connected yet.
    pub(crate) fn prepare(link: &Link) -> Result<Self> {
        let region = Region::alloc(SERVED as usize)?;
        let region = link.pd.register(region, Access::LOCAL_WRITE)?;
        let adverts = Region::alloc(RECEIVES * ADVERT_LEN)?;
        let adverts = link.pd.register(adverts, Access::LOCAL_WRITE)?;
        let server = Self { region, adverts };
        for slot in 0..RECEIVES {
            server.post(link, slot)?;
        }
        Ok(server)
    }

    fn post(&self, link: &Link, slot: usize) -> Result<()> {
        let at = slot * ADVERT_LEN;
        link.qp.post_recv(RecvWr::new(slot as u64, [self.adverts.slice(at..at + ADVERT_LEN)]))?;
        Ok(())
    }

    /// The next advert; `None` when the client closed.
    async fn advert(&self, link: &Link, idle: Option<Duration>) -> Result<Option<Advert>> {
        let wc = within(idle, link.recv_cq.next()).await.context(IDLE)??;
        if wc.status == userdma::WcStatus::WR_FLUSH_ERR {
            return Ok(None);
        }
        check_wc(&wc, "the receive of an advert")?;
        if wc.byte_len as usize != ADVERT_LEN {
            bail!("the client sent {} octets where an advert has {ADVERT_LEN}", wc.byte_len);
        }
        let mut b = [0; ADVERT_LEN];
        let slot = wc.id as usize;
        self.adverts.read_at(slot * ADVERT_LEN, &mut b)?;
        self.post(link, slot)?;
        let advert = Advert::from_bytes(&b);
        if advert.length > SERVED {
            bail!(
                "the client's buffer has {} octets, this server takes at most {SERVED}",
                advert.length
            );
        }
        Ok(Some(advert))
    }

    async fn done(link: &Link, idle: Option<Duration>, wr: SendWr, what: &str) -> Result<()> {
        check_wc(&Self::completed(link, idle, wr, what).await?, what)
    }

    async fn completed(
        link: &Link,
        idle: Option<Duration>,
        wr: SendWr,
        what: &str,
    ) -> Result<userdma::Wc> {
        link.qp.post_send(wr).with_context(|| format!("cannot post {what}"))?;
        Ok(within(idle, link.send_cq.next()).await.context(IDLE)??)
    }

    /// Serves rounds until the client closes, or lets nothing happen for longer than `idle`; says
    /// how many were served whole. An error comes with the number that went before it.
    pub(crate) async fn serve(
        &self,
        link: &Link,
        idle: Option<Duration>,
        verbose: bool,
    ) -> (u64, Result<()>) {
        let mut rounds = 0;
        loop {
            match self.round(link, idle, verbose).await {
                Ok(true) => rounds += 1,
                Ok(false) => return (rounds, Ok(())),
                Err(e) => return (rounds, Err(e.context(format!("round {rounds}")))),
            }
        }
    }

    /// One round; false when the client closed instead of beginning one.
    async fn round(&self, link: &Link, idle: Option<Duration>, verbose: bool) -> Result<bool> {
        let Some(source) = self.advert(link, idle).await? else {
            return Ok(false);
        };
        let sge = self.region.slice(0..source.length as usize);
        let wr = SendWr::read(0, [sge], source.place());
        Self::done(link, idle, wr, "the READ of the source").await?;
        if verbose {
            let mut message = vec![0; source.length as usize];
            self.region.read_at(0, &mut message)?;
            line(&format!("server ping data: {}", text(&message)));
        }
        let answer = || SendWr::inline(0, SendOp::Send, &[0; ADVERT_LEN]);
        Self::done(link, idle, answer(), "the SEND after the READ").await?;
        let Some(sink) = self.advert(link, idle).await? else {
            bail!("the client closed in the middle of a round");
        };
        let length = source.length.min(sink.length) as usize;
        let wr = SendWr::write(0, [self.region.slice(0..length)], sink.place());
        Self::done(link, idle, wr, "the WRITE into the sink").await?;
        let what = "the SEND after the WRITE";
        let wc = Self::completed(link, idle, answer(), what).await?;
        check_last(&wc, what, &link.qp).await?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unhex(s: &str) -> Vec<u8> {
        (0..s.len()).step_by(2).map(|i| u8::from_str_radix(&s[i..i + 2], 16).unwrap()).collect()
    }

    /// Frames 8, 10, 18 and 26 of iwarp_rping.pcap: rping -C 3 against the Linux kernel.
    #[test]
    fn adverts_and_messages_are_those_of_rping() {
        let bytes: [u8; 16] = unhex("0000562186e083709da5530000000040").try_into().unwrap();
        let advert = Advert::from_bytes(&bytes);
        assert_eq!(advert, Advert { addr: 0x5621_86e0_8370, rkey: RKey(0x9da5_5300), length: 64 });
        assert_eq!(advert.to_bytes(), bytes);

        let rounds = [
            "72646d612d70696e672d303a204142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f70717200",
            "72646d612d70696e672d313a2042434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f7071727300",
            "72646d612d70696e672d323a20434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737400",
        ];
        for (n, hex) in rounds.iter().enumerate() {
            let mut buf = [0xff; 64];
            fill(n as u64, &mut buf);
            assert_eq!(buf.as_slice(), unhex(hex), "round {n}");
        }
    }

    /// Frames 10 and 11 of iwarp_rping_4000.pcap: the letters begin again after `z`.
    #[test]
    fn letters_wrap_after_z() {
        let mut buf = vec![0xff; 4000];
        fill(0, &mut buf);
        assert_eq!(&buf[60..80], unhex("707172737475767778797a414243444546474849").as_slice());
        assert_eq!(&buf[1428..1436], unhex("58595a5b5c5d5e5f").as_slice());
        assert_eq!(buf[3999], 0);
        // The first letter comes round again after the 58 from A to z.
        let (mut first, mut again) = ([0; 26], [0; 26]);
        fill(1, &mut first);
        fill(1 + 58, &mut again);
        assert_eq!((first[13], again[14]), (b'B', b'B'));
    }

    #[test]
    fn any_size_and_round_is_filled() {
        for size in 0..64 {
            let mut buf = vec![0xff; size];
            fill(u64::MAX, &mut buf);
            assert!(buf.last().is_none_or(|&b| b == 0));
            assert!(buf.iter().rev().skip(1).all(|b| (b' '..=b'z').contains(b)));
        }
        let mut buf = [0xff; MIN_SIZE as usize];
        fill(999_999, &mut buf);
        assert!(text(&buf).starts_with("rdma-ping-999999: "));
    }

    #[test]
    fn differences_and_text() {
        assert_eq!(first_difference(b"abc", b"abc"), None);
        assert_eq!(first_difference(b"abc", b"abd"), Some((2, b'c', b'd')));
        assert_eq!(text(b"a\x01b c\0zz"), "a.b c");
    }
}
