//! What the wire saw, frame by frame: questions that tests ask of it.

use std::net::IpAddr;

use anyhow::{Result, ensure};
use userdma_proto::{
    dissect::{CrcState, Fpdu, Frame, IcrcState, Iwarp, Operation, Roce, Start},
    wire::{
        iwarp::{
            mpa::{StartFlags, StartKind},
            rdmap::Opcode,
        },
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
