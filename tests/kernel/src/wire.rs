//! What the wire saw, frame by frame: questions that tests ask of it.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context, Result, ensure};
use userdma_proto::{
    dissect::{CrcState, Fpdu, Frame, IcrcState, Iwarp, Operation, Roce, Start},
    wire::{
        iwarp::{
            mpa::{StartFlags, StartKind},
            rdmap::Opcode,
        },
        mad::{Mad, cm::Message},
        roce::aeth::Syndrome,
    },
};

/// The RoCE packets, and who sent them.
pub(crate) fn roce(frames: &[Frame]) -> impl Iterator<Item = (IpAddr, &Roce)> {
    frames
        .iter()
        .filter_map(|frame| Some((frame.ends?.src, frame)))
        .flat_map(|(from, frame)| frame.roce.iter().map(move |packet| (from, &**packet)))
}

/// The FPDUs, and who sent them.
pub(crate) fn fpdus(frames: &[Frame]) -> impl Iterator<Item = (IpAddr, &Fpdu)> {
    frames.iter().filter_map(|frame| Some((frame.ends?.src, frame))).flat_map(|(from, frame)| {
        frame.iwarp.iter().filter_map(move |item| match item {
            Iwarp::Fpdu(fpdu) => Some((from, fpdu)),
            Iwarp::Start(_) | Iwarp::Error(_) => None,
        })
    })
}

/// Octets of payload of the FPDUs with `opcode` that `from` sent.
pub(crate) fn payloads(frames: &[Frame], from: IpAddr, opcode: Opcode) -> Vec<u16> {
    fpdus(frames)
        .filter(|(sender, fpdu)| {
            *sender == from && fpdu.header.is_some_and(|header| header.opcode() == opcode)
        })
        .map(|(_, fpdu)| fpdu.payload_len)
        .collect()
}

/// The start-up frames of iWARP, and who sent them.
pub(crate) fn starts(frames: &[Frame]) -> impl Iterator<Item = (IpAddr, &Start)> {
    frames.iter().filter_map(|frame| Some((frame.ends?.src, frame))).flat_map(|(from, frame)| {
        frame.iwarp.iter().filter_map(move |item| match item {
            Iwarp::Start(start) => Some((from, &**start)),
            Iwarp::Fpdu(_) | Iwarp::Error(_) => None,
        })
    })
}

/// The first octets of the TERMINATE messages that `from` sent: layer and type, code, flags, reserved.
pub(crate) fn terminates(frames: &[Frame], from: IpAddr) -> Vec<[u8; 4]> {
    let octets = fpdus(frames).filter(|(sender, _)| *sender == from).filter_map(|(_, fpdu)| {
        match &fpdu.operation {
            Operation::Terminate(_, octets) => octets.first_chunk().copied(),
            _ => None,
        }
    });
    octets.collect()
}

/// The syndromes of all AETHs that `from` sent.
pub(crate) fn syndromes(frames: &[Frame], from: IpAddr) -> Vec<Syndrome> {
    let packets = roce(frames).filter(|(sender, _)| *sender == from);
    packets.filter_map(|(_, packet)| Some(packet.headers.as_ref()?.aeth?.syndrome())).collect()
}

/// Every RoCE packet has a good ICRC, and there are some of both sides.
pub(crate) fn all_icrc_good(frames: &[Frame]) -> Result<()> {
    let bad: Vec<_> = frames
        .iter()
        .filter(|frame| frame.roce.iter().any(|packet| packet.icrc != IcrcState::Good))
        .map(|frame| frame.number)
        .collect();
    ensure!(bad.is_empty(), "frames with a bad ICRC: {bad:?}");
    let mut senders: Vec<_> = roce(frames).map(|(from, _)| from).collect();
    senders.sort();
    senders.dedup();
    ensure!(senders.len() == 2, "RoCE packets of {senders:?} alone");
    Ok(())
}

/// The longest packet of data carries so many octets.
pub(crate) fn path_mtu_is(frames: &[Frame], octets: u32) -> Result<()> {
    let longest = roce(frames)
        .filter(|(_, packet)| packet.mad.is_none())
        .map(|(_, packet)| packet.payload_len)
        .max();
    ensure!(
        longest.map(u64::from) == Some(octets.into()),
        "the longest packet carries {longest:?} octets, not {octets}"
    );
    Ok(())
}

/// With `on` every FPDU carries a CRC that is right; without it none was agreed on. There are FPDUs of both.
pub(crate) fn crc_is(frames: &[Frame], on: bool) -> Result<()> {
    let all: Vec<_> = fpdus(frames).map(|(_, fpdu)| fpdu).collect();
    ensure!(all.len() >= 2, "{} FPDUs on the wire", all.len());
    let used = all.iter().filter(|fpdu| fpdu.crc_in_use == Some(true)).count();
    ensure!(
        used == if on { all.len() } else { 0 },
        "{used} of {} FPDUs with the CRC in use",
        all.len()
    );
    let wrong = all.iter().filter(|fpdu| on && fpdu.crc != CrcState::Good).count();
    ensure!(wrong == 0, "{wrong} of {} FPDUs have a wrong CRC", all.len());
    Ok(())
}

/// Every start-up was of this revision on both sides, and there are some.
pub(crate) fn revision_is(frames: &[Frame], revision: u8) -> Result<()> {
    let found: Vec<_> = starts(frames).map(|(_, start)| start.revision).collect();
    ensure!(
        found.len() >= 2 && found.len() % 2 == 0 && found.iter().all(|&found| found == revision),
        "revisions on the wire: {found:?}, instead of {revision}"
    );
    Ok(())
}

/// Peer to peer was agreed on, and the initiator's first FPDU is an `rtr` of nothing, before any of the other side;
/// without an `rtr`: it was neither asked for nor agreed on.
pub(crate) fn rtr_is(frames: &[Frame], initiator: IpAddr, rtr: Option<Opcode>) -> Result<()> {
    let flags: Vec<_> = starts(frames)
        .map(|(_, start)| start.enhanced.is_some_and(|enhanced| enhanced.peer_to_peer))
        .collect();
    ensure!(flags == [rtr.is_some(); 2], "peer to peer in request and reply: {flags:?}");
    let Some(rtr) = rtr else { return Ok(()) };
    let (from, first) = fpdus(frames).next().context("no FPDU")?;
    let opcode = first.header.map(|header| header.opcode());
    let nothing = match &first.operation {
        Operation::ReadRequest(read) => read.size.get() == 0,
        _ => first.payload_len == 0,
    };
    ensure!(
        from == initiator && opcode == Some(rtr) && nothing,
        "the first FPDU is of {from}, {opcode:?} with {} octets",
        first.payload_len
    );
    Ok(())
}

/// Who sent the first FPDU of each connection.
pub(crate) fn first_fpdus(frames: &[Frame]) -> Vec<IpAddr> {
    let mut firsts = Vec::new();
    let mut begun = false;
    for frame in frames {
        let Some(ends) = frame.ends else { continue };
        for item in &frame.iwarp {
            match item {
                Iwarp::Start(_) => begun = true,
                Iwarp::Fpdu(_) if begun => {
                    begun = false;
                    firsts.push(ends.src);
                }
                Iwarp::Fpdu(_) | Iwarp::Error(_) => {}
            }
        }
    }
    firsts
}

/// The longest time between two frames that complete FPDUs, and the octets in FPDUs before and behind it.
pub(crate) fn silence(frames: &[Frame]) -> Option<(u64, Duration, u64)> {
    let mut all = Vec::new();
    for frame in frames {
        let octets: u64 = frame
            .iwarp
            .iter()
            .map(|item| if let Iwarp::Fpdu(fpdu) = item { fpdu.payload_len.into() } else { 0 })
            .sum();
        if octets > 0 {
            all.push((frame.time_ns?, octets));
        }
    }
    let at = (1..all.len()).max_by_key(|&at| all[at].0 - all[at - 1].0)?;
    let octets = |part: &[(i128, u64)]| part.iter().map(|(_, octets)| octets).sum();
    let time = u64::try_from(all[at].0 - all[at - 1].0).ok()?;
    Some((octets(&all[..at]), Duration::from_nanos(time), octets(&all[at..])))
}

/// Every REQ of the connection manager asks for this ACK time-out code, and there are some.
pub(crate) fn ack_timeout_is(frames: &[Frame], code: u8) -> Result<()> {
    let found = ack_timeouts(frames);
    ensure!(
        !found.is_empty() && found.iter().all(|&found| found == code),
        "ACK time-outs in REQs: {found:?}, not {code}"
    );
    Ok(())
}

/// The ACK time-out codes of all REQs.
pub(crate) fn ack_timeouts(frames: &[Frame]) -> Vec<u8> {
    roce(frames)
        .filter_map(|(_, packet)| packet.mad.as_deref())
        .filter_map(|octets| match Mad::parse(octets).ok()?.cm().ok()?? {
            Message::Req(req) => Some(req.primary.ack_timeout),
            _ => None,
        })
        .collect()
}

/// How many messages of the connection manager were sent a second time by their sender: the same transaction and
/// attribute in a packet of its own.
pub(crate) fn resent_mads(frames: &[Frame]) -> usize {
    let keys: Vec<_> = roce(frames)
        .filter_map(|(from, packet)| {
            Some((from, packet.mad.as_deref()?, packet.headers.as_ref()?.bth.psn()))
        })
        .filter_map(|(from, mad, psn)| Some((from, mad.get(8..18)?.to_vec(), psn)))
        .collect();
    // A copy that the network made has the same PSN.
    let is_resent = |at: usize| {
        let (from, what, psn) = &keys[at];
        let same = |other: &&(IpAddr, Vec<u8>, _)| other.0 == *from && other.1 == *what;
        let before: Vec<_> = keys[..at].iter().filter(same).collect();
        !before.is_empty() && before.iter().all(|other| other.2 != *psn)
    };
    (0..keys.len()).filter(|&at| is_resent(at)).count()
}

/// A connection was refused with private data that contains `words`.
pub(crate) fn refused_with(frames: &[Frame], words: &[u8]) -> Result<()> {
    let iwarp = starts(frames)
        .filter(|(_, start)| {
            start.kind == StartKind::Reply && start.flags.contains(StartFlags::REJECT)
        })
        .any(|(_, start)| contains(&start.private_data, words));
    let roce = roce(frames)
        .filter_map(|(_, packet)| packet.mad.as_deref())
        .any(|mad| is_reject(mad) && contains(mad, words));
    let words = String::from_utf8_lossy(words);
    ensure!(iwarp || roce, "nothing on the wire refuses with {words:?}");
    Ok(())
}

/// Whether a management datagram is the CM's REJ (attribute 0x0012).
fn is_reject(mad: &[u8]) -> bool {
    mad.get(16..18) == Some(&[0, 0x12])
}

pub(crate) fn contains(octets: &[u8], part: &[u8]) -> bool {
    octets.windows(part.len()).any(|window| window == part)
}

/// The sender and the identification of an IPv4 packet in an Ethernet frame without tags.
pub(crate) fn identification(frame: &[u8]) -> Option<(IpAddr, u16)> {
    if frame.get(12..14)? != [0x08, 0x00] {
        return None;
    }
    let ident = u16::from_be_bytes(*frame.get(18..)?.first_chunk()?);
    let src: [u8; 4] = *frame.get(26..)?.first_chunk()?;
    Some((src.into(), ident))
}

/// How many of these IPv4 identifications, which a sender counts up, came a second time.
pub(crate) fn copies(idents: &[u16]) -> u64 {
    // Near by: the number of 16 bits comes around.
    let near = |at: usize| &idents[at.saturating_sub(1000)..at];
    (0..idents.len()).filter(|&at| near(at).contains(&idents[at])).count() as u64
}

/// How many came behind a later one, and are no copies.
pub(crate) fn late(idents: &[u16]) -> u64 {
    let near = |at: usize| &idents[at.saturating_sub(1000)..at];
    let behind = |ident: u16, other: u16| (other.wrapping_sub(ident) as i16) > 0;
    (0..idents.len())
        .filter(|&at| {
            let ident = idents[at];
            !near(at).contains(&ident) && near(at).iter().any(|&other| behind(ident, other))
        })
        .count() as u64
}
