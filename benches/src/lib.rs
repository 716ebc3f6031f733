//! Captures of any length, made from one recorded connection.
//!
//! A decoder that keeps state for each queue pair is not told much by the same 200 frames again and
//! again. So each repetition is a connection of its own: its own queue pairs, start PSNs and
//! communication ids, in the connection manager's messages as in the packets, its own times and
//! IPv4 Identifications, and every ICRC is computed anew. The first repetition is the recording,
//! octet by octet: that this comes out is the proof that nothing else is changed.
#![forbid(unsafe_code)]

use std::{
    fs::File,
    io::{self, Read, Write},
    path::Path,
};

use anyhow::{Context, Result, bail, ensure};
use userdma_proto::{
    dissect::capture::Reader,
    wire::{
        ids::{Psn, Qpn},
        mad::{CLASS_CM, MAD_LEN, MadHeader, cm::Message},
        roce::{ICRC_LEN, UDP_PORT, bth::Bth, icrc::Icrc, opcode::Opcode},
    },
};
use zerocopy::{FromBytes, IntoBytes};

const ETHERNET: usize = 14;
const IPV4: usize = 20;
const UDP: usize = 8;
const BTH: usize = ETHERNET + IPV4 + UDP;
const DETH: usize = 8;
const MAD: usize = BTH + Bth::LEN + DETH;
/// Between two repetitions.
const PAUSE_US: u64 = 1000;

/// A recorded connection of two reliable queue pairs, from its REQ to its DREP.
#[derive(Debug)]
pub struct Template {
    frames: Vec<Frame>,
    /// As the recording has them: the side that sent the REQ first.
    sides: [Side; 2],
    /// From the first frame of a repetition to that of the next.
    period_us: u64,
}

#[derive(Debug)]
struct Frame {
    time_us: u64,
    octets: Vec<u8>,
    /// Which side sent it.
    from: usize,
}

/// What one side of a connection calls its own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Side {
    ip: [u8; 4],
    qpn: u32,
    /// Where the *other* side's requests begin: REQ and REP name the PSN that their sender expects.
    start_psn: u32,
    comm_id: u32,
    /// Packets that it sends to queue pair 1, and frames in all, per repetition.
    mads: u32,
    frames: u32,
}

impl Template {
    /// Reads the recording: Ethernet, IPv4 without options, nothing but RoCEv2, one connection.
    ///
    /// # Errors
    ///
    /// What of this it is not.
    pub fn read(path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        Self::from_capture(file).with_context(|| format!("in {}", path.display()))
    }

    fn from_capture(input: impl Read) -> Result<Self> {
        let mut reader = Reader::new(input)?;
        let mut frames = Vec::new();
        let mut sides = [Side::default(); 2];
        while let Some(record) = reader.next_record()? {
            let n = record.number;
            let octets = record.data.to_vec();
            ensure!(record.len as usize == octets.len(), "frame {n} was not captured whole");
            let ip =
                octets.get(ETHERNET..BTH).with_context(|| format!("frame {n} is too short"))?;
            ensure!(
                record.link.0 == 1 && octets[12..14] == [8, 0] && ip[0] == 0x45 && ip[9] == 17,
                "frame {n} is not UDP over IPv4 over Ethernet"
            );
            let len = usize::from(u16::from_be_bytes([ip[2], ip[3]]));
            let port = u16::from_be_bytes([ip[IPV4 + 2], ip[IPV4 + 3]]);
            ensure!(port == UDP_PORT, "frame {n} goes to port {port}, which is not RoCEv2's");
            ensure!(
                octets.len() == ETHERNET + len && len >= BTH - ETHERNET + Bth::LEN + ICRC_LEN,
                "frame {n} is not exactly as long as its packet"
            );
            let ip = [ip[12], ip[13], ip[14], ip[15]];
            if n == 1 {
                sides[0].ip = ip;
            } else if ip != sides[0].ip {
                ensure!(sides[1].ip == [0; 4] || sides[1].ip == ip, "frame {n}: a third address");
                sides[1].ip = ip;
            }
            let from = usize::from(ip != sides[0].ip);
            let time_ns = record.time_ns.with_context(|| format!("frame {n} has no time"))?;
            let time_us = u64::try_from(time_ns / 1000).context("a time before 1970")?;
            let frame = Frame { time_us, octets, from };
            sides[from].frames += 1;
            sides[from].mads += u32::from(frame.is_mad());
            match frame.message().with_context(|| format!("frame {n}"))? {
                Some(Message::Req(req)) => {
                    sides[from].learn(req.qpn, req.start_psn, req.local_comm_id);
                }
                Some(Message::Rep(rep)) => {
                    sides[from].learn(rep.qpn, rep.start_psn, rep.local_comm_id);
                }
                _ => {}
            }
            frames.push(frame);
        }
        ensure!(sides.iter().all(|s| s.qpn > 1), "no REQ and REP that name two queue pairs");
        let (Some(first), Some(last)) = (frames.first(), frames.last()) else {
            bail!("there are no frames");
        };
        let took =
            last.time_us.checked_sub(first.time_us).context("the last frame is the first")?;
        Ok(Self { period_us: took + PAUSE_US, frames, sides })
    }

    /// Frames of one repetition.
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// Whether there is none: never.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Writes a classic pcap of `count` frames; the last repetition ends where they do.
    ///
    /// # Errors
    ///
    /// `out` takes no more.
    pub fn write(&self, count: u64, out: &mut impl Write) -> io::Result<()> {
        out.write_all(&[0xd4, 0xc3, 0xb2, 0xa1, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0])?;
        out.write_all(&[0, 0, 4, 0, 1, 0, 0, 0])?;
        let mut left = count;
        let mut octets = Vec::new();
        for repetition in 0_u64.. {
            let mut state = Repetition::new(self, repetition);
            for frame in &self.frames {
                if left == 0 {
                    return Ok(());
                }
                left -= 1;
                octets.clear();
                octets.extend_from_slice(&frame.octets);
                state.rewrite(frame, &mut octets);
                let time = frame.time_us + repetition * self.period_us;
                let len = octets.len() as u32;
                // The seconds of classic pcap are 32 bits wide.
                for field in [(time / 1_000_000) as u32, (time % 1_000_000) as u32, len, len] {
                    out.write_all(&field.to_le_bytes())?;
                }
                out.write_all(&octets)?;
            }
        }
        Ok(())
    }
}

impl Side {
    fn learn(&mut self, qpn: Qpn, start_psn: Psn, comm_id: u32) {
        (self.qpn, self.start_psn, self.comm_id) = (qpn.0, start_psn.get(), comm_id);
    }
}

impl Frame {
    fn bth(&self) -> Bth {
        Bth::read_from_bytes(&self.octets[BTH..BTH + Bth::LEN]).expect("its length was checked")
    }

    fn is_mad(&self) -> bool {
        self.bth().dest_qp().0 == 1
    }

    /// The connection manager's message in it.
    fn message(&self) -> Result<Option<Message<'_>>> {
        if !self.is_mad() {
            return Ok(None);
        }
        let mad = self.octets.get(MAD..MAD + MAD_LEN).context("a MAD that is not whole")?;
        let (header, body) = MadHeader::ref_from_prefix(mad).ok().context("no MAD header")?;
        ensure!(header.mgmt_class == CLASS_CM, "a MAD that is not the connection manager's");
        let message = Message::parse(header.attribute_id.get(), body)?;
        match message {
            Some(
                Message::Req(_)
                | Message::Rep(_)
                | Message::Rtu(_)
                | Message::Dreq(_)
                | Message::Drep(_),
            ) => Ok(message),
            _ => bail!("attribute {:#06x} is not expected here", header.attribute_id.get()),
        }
    }
}

/// One connection of many.
struct Repetition<'a> {
    old: &'a [Side; 2],
    new: [Side; 2],
    number: u64,
}

impl<'a> Repetition<'a> {
    fn new(template: &'a Template, number: u64) -> Self {
        let old = &template.sides;
        let mut new = *old;
        if number > 0 {
            for (i, side) in new.iter_mut().enumerate() {
                let n = 2 * number + i as u64;
                // Far from the recorded ones, and no two alike for 8 million repetitions.
                side.qpn = (0x1000 + n as u32) & 0xff_ffff;
                let mixed = mix(n);
                side.start_psn = mixed as u32 & 0xff_ffff;
                side.comm_id = (mixed >> 32) as u32;
            }
        }
        Self { old, new, number }
    }

    fn rewrite(&mut self, frame: &Frame, octets: &mut [u8]) {
        let (from, to) = (frame.from, 1 - frame.from);
        let repeat = self.number as u32;
        let mut bth = frame.bth();
        if frame.is_mad() {
            let psn = bth.psn().get().wrapping_add(repeat.wrapping_mul(self.old[from].mads));
            bth.psn = three(psn);
            self.rewrite_message(frame, octets);
        } else {
            bth.dest_qp = three(self.new[to].qpn);
            let request = Opcode(bth.opcode).info().is_some_and(|info| info.request);
            let responder = if request { to } else { from };
            let (old, new) = (self.old[responder].start_psn, self.new[responder].start_psn);
            bth.psn = three(bth.psn().get().wrapping_sub(old).wrapping_add(new));
        }
        octets[BTH..BTH + Bth::LEN].copy_from_slice(bth.as_bytes());

        let (headers, rest) = octets.split_at_mut(BTH);
        let (ip, udp) = headers[ETHERNET..].split_at_mut(IPV4);
        let id = u16::from_be_bytes([ip[4], ip[5]]);
        let id = id.wrapping_add(repeat.wrapping_mul(self.old[from].frames) as u16);
        ip[4..6].copy_from_slice(&id.to_be_bytes());
        ip[10..12].fill(0);
        let checksum = internet_checksum(ip);
        ip[10..12].copy_from_slice(&checksum.to_be_bytes());

        let udp: &[u8; UDP] = (&*udp).try_into().expect("8 octets");
        let end = rest.len() - ICRC_LEN;
        let mut icrc = Icrc::ipv4(ip, udp, &bth);
        icrc.update(&rest[Bth::LEN..end]);
        rest[end..].copy_from_slice(&icrc.finish());
    }

    fn rewrite_message(&self, frame: &Frame, octets: &mut [u8]) {
        let (own, peer) = (self.new[frame.from], self.new[1 - frame.from]);
        let Ok(Some(mut message)) = frame.message() else {
            unreachable!("it was read when the template was");
        };
        match &mut message {
            Message::Req(m) => {
                (m.local_comm_id, m.qpn) = (own.comm_id, Qpn(own.qpn));
                m.start_psn = Psn::new(own.start_psn);
            }
            Message::Rep(m) => {
                (m.local_comm_id, m.remote_comm_id) = (own.comm_id, peer.comm_id);
                (m.qpn, m.start_psn) = (Qpn(own.qpn), Psn::new(own.start_psn));
            }
            Message::Rtu(m) => (m.local_comm_id, m.remote_comm_id) = (own.comm_id, peer.comm_id),
            Message::Drep(m) => (m.local_comm_id, m.remote_comm_id) = (own.comm_id, peer.comm_id),
            Message::Dreq(m) => {
                (m.local_comm_id, m.remote_comm_id) = (own.comm_id, peer.comm_id);
                m.remote_qpn = Qpn(peer.qpn);
            }
            _ => {}
        }
        let (header, body) = MadHeader::mut_from_prefix(&mut octets[MAD..MAD + MAD_LEN])
            .expect("it was read when the template was");
        header.tid.set(header.tid.get().wrapping_add(self.number << 8));
        body.copy_from_slice(&message.to_body());
    }
}

const fn three(n: u32) -> [u8; 3] {
    let [_, a, b, c] = n.to_be_bytes();
    [a, b, c]
}

/// Spreads a number over 64 bits (the last step of SplitMix64).
const fn mix(n: u64) -> u64 {
    let n = n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ (n >> 31)
}

/// RFC 1071, over an even number of octets.
fn internet_checksum(octets: &[u8]) -> u16 {
    let words = octets.chunks_exact(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]])));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use userdma_proto::{
        dissect::{Dissector, IcrcState, Options},
        wire::mad::Mad,
    };

    use super::*;

    fn recording() -> Vec<u8> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pcaps/roce_large.pcap.gz");
        let mut octets = Vec::new();
        let mut file = flate2::read::GzDecoder::new(File::open(path).expect("it is shipped"));
        file.read_to_end(&mut octets).expect("it is gzip");
        octets
    }

    fn made(count: u64) -> Vec<u8> {
        let template = Template::from_capture(recording().as_slice()).expect("a connection");
        assert_eq!(template.len(), 200);
        let mut out = Vec::new();
        template.write(count, &mut out).expect("memory takes all");
        out
    }

    #[test]
    fn the_first_repetition_is_the_recording() {
        assert!(made(200) == recording());
        assert!(made(7) == recording()[..made(7).len()]);
    }

    #[test]
    fn each_repetition_is_a_connection_of_its_own() {
        let octets = made(3 * 200 + 50);
        let mut reader = Reader::new(octets.as_slice()).expect("a capture");
        let mut dissector = Dissector::new(Options::default());
        while let Some(record) = reader.next_record().expect("it is whole") {
            dissector.handle_record(&record);
        }
        dissector.finish();
        let (mut last, mut n, mut ids) = (0, 0, HashSet::new());
        // Of the repetition at hand: the queue pairs, and where their PSNs begin.
        let mut ends: Vec<(Qpn, Psn)> = Vec::new();
        let mut seen = HashSet::new();
        while let Some(frame) = dissector.poll_frame() {
            assert!(frame.error.is_none() && frame.roce.len() == 1, "frame {}", frame.number);
            let time = frame.time_ns.expect("pcap has times");
            assert!(time > last, "frame {}: time goes on", frame.number);
            (last, n) = (time, n + 1);
            let packet = &frame.roce[0];
            assert_eq!(packet.icrc, IcrcState::Good, "frame {}", frame.number);
            let bth = packet.headers.expect("it is whole").bth;
            if let Some(mad) = &packet.mad {
                let mad = Mad::parse(mad).expect("it is whole");
                match mad.cm().expect("it is whole").expect("it is the connection manager's") {
                    Message::Req(m) => {
                        assert!(ids.insert(m.local_comm_id));
                        ends = vec![(m.qpn, m.start_psn)];
                    }
                    Message::Rep(m) => {
                        assert!(ids.insert(m.local_comm_id) && ids.contains(&m.remote_comm_id));
                        ends.push((m.qpn, m.start_psn));
                        // In the recording both machines have the same number for theirs.
                        let new = ends.iter().enumerate().all(|end| seen.insert((end.0, end.1.0)));
                        assert!(new, "frame {}: new queue pairs", frame.number);
                    }
                    Message::Dreq(m) => assert!(ends.iter().any(|(qpn, _)| *qpn == m.remote_qpn)),
                    _ => {}
                }
                continue;
            }
            assert!(ends.iter().any(|(qpn, _)| *qpn == bth.dest_qp()), "frame {}", frame.number);
            // All requests are the first side's, and begin where the second side's REP says.
            let since = bth.psn().get().wrapping_sub(ends[1].1.get()) & 0xff_ffff;
            assert!(since < 200, "frame {}: PSN {since} behind the start", frame.number);
        }
        assert_eq!(n, 650);
        assert_eq!(seen.len(), 8);
        assert_eq!(ids.len(), 8);
    }

    #[test]
    fn the_opcode_table_tells_requests_from_answers() {
        // The generator leans on it: of what the recording has, these are answers.
        for (opcode, request) in [(0x04, true), (0x0c, true), (0x0e, false), (0x11, false)] {
            let info = Opcode(opcode).info().expect("it is in the table");
            assert_eq!(info.request, request, "{}", info.name);
        }
    }
}
