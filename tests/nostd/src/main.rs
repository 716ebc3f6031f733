//! Links userdma-proto without std, and runs a little of it.
//!
//! ```sh
//! cargo run -p userdma-nostd --profile nostd
//! ```
//!
//! The binary has its own panic handler. If proto or a dependency of it brought std in, there
//! would be two, and the build would fail. It has its own allocator too, and exits with the number
//! of the first check that failed, 0 if none did. (The profile aborts on panic: unwinding would
//! need std's support.)
#![no_std]
#![no_main]

extern crate alloc;

use alloc::vec::Vec;
use core::{
    alloc::{GlobalAlloc, Layout},
    cell::UnsafeCell,
    net::Ipv4Addr,
    panic::PanicInfo,
    ptr,
    sync::atomic::{AtomicUsize, Ordering},
};

use userdma_proto::wire::{
    crc::crc32c,
    ids::{Msn, PKey, Psn, Qpn, Stag},
    iwarp::{
        ddp::{QN_SEND, Segment, UntaggedHeader},
        fpdu::{self, Deframer},
        mpa::{Start, StartFlags, StartKind},
        rdmap::Opcode,
        terminate::{TermCode, Terminate},
    },
    roce::{
        self, Headers, Packet,
        bth::Bth,
        icrc::{Icrc, Identification, PathV4, verify_unknown_id},
        immdt::ImmDt,
    },
};
use zerocopy::IntoBytes;

// Start files, `memcpy` and the like. The C library is not std.
#[link(name = "c")]
unsafe extern "C" {
    fn _exit(code: i32) -> !;
}

#[unsafe(no_mangle)]
extern "C" fn main(_argc: i32, _argv: *const *const u8) -> i32 {
    let checks = [
        check_crc(),
        check_start(),
        check_fpdu(true),
        check_fpdu(false),
        check_term(),
        check_roce(),
    ];
    match checks.iter().position(|&good| !good) {
        Some(failed) => failed as i32 + 1,
        None => 0,
    }
}

fn check_crc() -> bool {
    crc32c(b"123456789") == 0xe306_9283
}

fn check_start() -> bool {
    let start = Start {
        kind: StartKind::Request,
        flags: StartFlags::CRC,
        revision: 1,
        enhanced: None,
        private_data: b"hello",
    };
    let mut frame = Vec::new();
    start.emit(&mut frame);
    Start::parse(&frame) == Ok(Some((start, frame.len())))
}

fn check_fpdu(crc: bool) -> bool {
    let header = UntaggedHeader::new(Opcode::SEND, true, QN_SEND, Msn::FIRST, 0, Stag(0));
    let (mut stream, mut scratch) = (Vec::new(), Vec::new());
    let start = fpdu::begin(&mut stream);
    stream.extend_from_slice(header.as_bytes());
    stream.extend_from_slice(b"payload");
    fpdu::finish(&mut stream, start, crc);
    let Ok(Some(fpdu)) = Deframer::new(false, crc).next(&stream, &mut scratch) else {
        return false;
    };
    Segment::parse(fpdu.ulpdu).is_ok_and(|segment| segment.payload() == b"payload")
}

fn check_term() -> bool {
    let terminate = Terminate::new(TermCode::MPA_CRC);
    let mut payload = Vec::new();
    terminate.emit(&mut payload);
    Terminate::parse(&payload) == Ok(terminate)
}

/// A packet as an application's socket sends and receives it.
fn check_roce() -> bool {
    let path = PathV4 {
        src: Ipv4Addr::new(10, 0, 0, 1),
        dst: Ipv4Addr::new(10, 0, 0, 2),
        src_port: 0xc000,
        dst_port: roce::UDP_PORT,
    };
    let id = Identification { identification: 0x1234, dont_fragment: true };
    let opcode = roce::opcode::Opcode::RC_SEND_ONLY_IMM;
    let mut headers = Headers::new(Bth::new(opcode, PKey(0xffff), Qpn(0x12), Psn::new(0x345)));
    headers.immdt = Some(ImmDt::new(7));
    let mut packet = Vec::new();
    headers.emit_packet(b"payload", &mut packet);
    let mut icrc = Icrc::socket_v4(&path, id, packet.len() + roce::ICRC_LEN, &headers.bth);
    icrc.update(&packet[Bth::LEN..]);
    packet.extend_from_slice(&icrc.finish());

    let read = Packet::parse(&packet);
    read.is_ok_and(|read| read.headers == headers && read.payload == b"payload")
        && verify_unknown_id(&path, &packet, None) == Some(id)
}

#[panic_handler]
fn panic(_: &PanicInfo<'_>) -> ! {
    // SAFETY: `_exit` takes any number and has no other precondition.
    unsafe { _exit(101) }
}

/// Gives memory out and never takes it back.
struct Bump {
    arena: UnsafeCell<[u8; Self::SIZE]>,
    used: AtomicUsize,
}

impl Bump {
    const SIZE: usize = 1 << 20;
}

// SAFETY: the arena is only handed out in pieces that do not overlap (see `alloc`).
unsafe impl Sync for Bump {}

#[global_allocator]
static ALLOCATOR: Bump =
    Bump { arena: UnsafeCell::new([0; Bump::SIZE]), used: AtomicUsize::new(0) };

// SAFETY: every piece lies within the arena, is aligned, and overlaps no other one, because `used`
// only grows and each piece is taken from what it grew by.
unsafe impl GlobalAlloc for Bump {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let Some(room) = layout.size().checked_add(layout.align()) else {
            return ptr::null_mut();
        };
        let begin = self.used.fetch_add(room, Ordering::Relaxed);
        if begin.checked_add(room).is_none_or(|end| end > Self::SIZE) {
            return ptr::null_mut();
        }
        let piece = self.arena.get().cast::<u8>().wrapping_add(begin);
        piece.wrapping_add(piece.align_offset(layout.align()))
    }

    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}
}
