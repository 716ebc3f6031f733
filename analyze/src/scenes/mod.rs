//! Captures made up: for each kind of finding one that shows it, and one that nearly does.
//!
//! `userdma sim --show ID` writes them, `docs/findings.md` shows them, and tests hold the analyser against them.

mod stage;

use userdma_proto::wire::{
    crc::crc32c,
    ids::{Qpn, Stag},
    iwarp::{
        ddp,
        fpdu::MarkerEncoder,
        mpa::{Enhanced, StartFlags},
        rdmap::{Opcode as Rdmap, ReadRequest},
        terminate::{TermCode, TermLayer},
    },
    mad::cm::{Mra, Rej},
    roce::{aeth::NakCode, opcode::Opcode},
};

use crate::Kind;
pub use stage::Capture;
use stage::{A, B, MTU, PSNS, octets_of};

/// A capture that shows a kind of finding, and one that nearly does.
#[derive(Debug, Clone)]
pub struct Scene {
    /// It is found here.
    pub shows: Capture,
    /// It is not found here.
    pub nearly: Capture,
}

const P: u32 = PSNS[0];
const SYN: u8 = 0x02;
const RST_ACK: u8 = 0x14;
const RST: u8 = 0x04;
const PUSH: u8 = 0x18;
const DATA: u8 = 0x10;

fn scene(shows: impl FnOnce(&mut Capture), nearly: impl FnOnce(&mut Capture)) -> Scene {
    let made = |make: &mut dyn FnMut(&mut Capture)| {
        let mut capture = Capture::default();
        make(&mut capture);
        capture
    };
    let (mut shows, mut nearly) = (Some(shows), Some(nearly));
    Scene {
        shows: made(&mut |c| shows.take().into_iter().for_each(|f| f(c))),
        nearly: made(&mut |c| nearly.take().into_iter().for_each(|f| f(c))),
    }
}

/// The captures of a kind.
pub fn of(kind: Kind) -> Scene {
    match kind {
        Kind::RoceIcrcBad
        | Kind::RoceIcrcRewrite
        | Kind::RoceWrongQp
        | Kind::RocePkey
        | Kind::RoceMigReq
        | Kind::RoceLength
        | Kind::RocePad
        | Kind::RoceOpcodeSeq => packets(kind),
        Kind::RcPsnGap
        | Kind::RcRespGap
        | Kind::RcDuplicate
        | Kind::RcReorder
        | Kind::RcRetransmit
        | Kind::RcRetryStorm
        | Kind::RcRetryExhausted
        | Kind::RcAckReqUnanswered
        | Kind::FlowStalled
        | Kind::UcPsnGap
        | Kind::UcDuplicate
        | Kind::UcReorder => flows(kind),
        Kind::RcNakSeq
        | Kind::RcNakInvalid
        | Kind::RcNakAccess
        | Kind::RcNakOp
        | Kind::RcNakOther
        | Kind::RcRnr
        | Kind::RcRnrEarly
        | Kind::RcRnrExhausted
        | Kind::RcRecvTooSmall
        | Kind::RcOutstanding => refusals(kind),
        Kind::EcnMarked
        | Kind::EcnNoCnp
        | Kind::CnpSeen
        | Kind::CnpNoSlowdown
        | Kind::PfcPause
        | Kind::QosDscpMismatch
        | Kind::QosPcpMismatch => network(kind),
        Kind::CmReject
        | Kind::CmTimeout
        | Kind::CmRepeated
        | Kind::CmMra
        | Kind::CmRtuLate
        | Kind::CmDreqCrossed
        | Kind::CmDreqStale => connections(kind),
        Kind::MpaReject
        | Kind::MpaTimeout
        | Kind::MpaMismatch
        | Kind::MpaRtr
        | Kind::MpaResponderFirst
        | Kind::MpaSetupFailed
        | Kind::MpaReservedFlag
        | Kind::MpaMarkerOffGrid => start_ups(kind),
        Kind::IwCrcBad
        | Kind::IwSequence
        | Kind::IwLength
        | Kind::IwOutstanding
        | Kind::IwTerminate
        | Kind::IwTerminateOrder
        | Kind::IwRecvMissing => streams(kind),
        Kind::TcpGap
        | Kind::TcpRetransmit
        | Kind::TcpReorder
        | Kind::TcpDuplicate
        | Kind::TcpZeroWindow
        | Kind::TcpReset
        | Kind::TcpRefused => segments(kind),
        Kind::CapFramesMissing | Kind::CapSnaplen | Kind::CapOneWay | Kind::CapMidFlow => {
            captures(kind)
        }
    }
}

/// A connection with a message each way before anything happens.
fn begun(c: &mut Capture) {
    c.connect().send(A, P, 100).ack(B, P);
}

fn packets(kind: Kind) -> Scene {
    match kind {
        Kind::RoceIcrcBad => scene(
            |c| {
                begun(c);
                // An octet of the payload.
                c.with(|odd| odd.flip = Some((60, 0x11))).send(A, P + 1, 100).plain().ack(B, P + 1);
            },
            |c| {
                begun(c);
                // The time to live does not count.
                c.with(|odd| odd.flip = Some((8, 0x3f))).send(A, P + 1, 100).plain().ack(B, P + 1);
            },
        ),
        Kind::RoceIcrcRewrite => scene(
            |c| {
                begun(c);
                // The Identification, as a firewall normalises it.
                c.with(|odd| odd.flip = Some((5, 0x2a))).send(A, P + 1, 100).plain().ack(B, P + 1);
            },
            |c| {
                begun(c);
                c.with(|odd| odd.flip = Some((60, 0x11))).send(A, P + 1, 100).plain().ack(B, P + 1);
            },
        ),
        Kind::RoceWrongQp => scene(
            |c| {
                begun(c);
                c.with(|odd| odd.qp = Some(Qpn(0x99))).send(A, P + 1, 100);
            },
            |c| {
                begun(c);
                // A queue pair of its own, with numbers of its own.
                c.with(|odd| odd.qp = Some(Qpn(0x99))).send(A, 77, 100);
            },
        ),
        Kind::RocePkey => scene(
            |c| {
                begun(c);
                c.with(|odd| odd.pkey = 0x8001).send(A, P + 1, 100).plain().ack(B, P + 1);
            },
            // A limited and a full member understand each other.
            |c| {
                begun(c);
                c.with(|odd| odd.pkey = 0x7fff).send(A, P + 1, 100).plain().ack(B, P + 1);
            },
        ),
        Kind::RoceMigReq => scene(
            |c| {
                c.connect().with(|odd| odd.migreq = true).send(A, P, 100).plain().ack(B, P);
            },
            |c| {
                c.connect().with(|odd| odd.migreq = true).send(A, P, 100).ack(B, P);
            },
        ),
        Kind::RoceLength => scene(
            |c| {
                begun(c);
                c.write(A, P + 1, 100, 200).ack(B, P + 1);
            },
            |c| {
                begun(c);
                c.write(A, P + 1, 100, 100).ack(B, P + 1).sends(A, P + 2, 3).ack(B, P + 4);
            },
        ),
        Kind::RocePad => scene(
            |c| {
                begun(c);
                c.with(|odd| odd.pad = Some(2)).send(A, P + 1, 103).plain().ack(B, P + 1);
            },
            |c| {
                begun(c);
                c.send(A, P + 1, 103).ack(B, P + 1).send(A, P + 2, 0).ack(B, P + 2);
            },
        ),
        _ => scene(
            |c| {
                begun(c);
                c.part(A, P + 1, 3, 0).part(A, P + 1, 3, 1);
                // A WRITE ends the SEND.
                c.roce(A, Opcode::RC_WRITE_LAST, P + 3, MTU, |_| {});
            },
            |c| {
                begun(c);
                // The end of the first message is lost, and with it the sense of what follows.
                c.part(A, P + 1, 3, 0).part(A, P + 1, 3, 1).lose(A, 1).sends(A, P + 4, 2);
            },
        ),
    }
}

fn flows(kind: Kind) -> Scene {
    match kind {
        Kind::RcPsnGap => scene(
            |c| {
                begun(c);
                c.part(A, P + 1, 4, 0).lose(A, 1).part(A, P + 1, 4, 2).part(A, P + 1, 4, 3);
                c.nak(B, P + 2, NakCode::PSN_SEQUENCE);
                c.part(A, P + 1, 4, 1).part(A, P + 1, 4, 2).part(A, P + 1, 4, 3).ack(B, P + 4);
            },
            |c| {
                begun(c);
                // The second comes last: it was late.
                let second = c.frames() + 2;
                c.part(A, P + 1, 4, 0).part(A, P + 1, 4, 1).part(A, P + 1, 4, 2).part(
                    A,
                    P + 1,
                    4,
                    3,
                );
                c.swap(second, second + 1).ack(B, P + 4);
            },
        ),
        Kind::RcRespGap => scene(
            |c| {
                begun(c);
                c.read(A, P + 1, 4 * MTU as u32).responses(B, P + 1, 4, Some(2));
                c.after_us(70_000).read(A, P + 3, 2 * MTU as u32).responses(B, P + 3, 2, None);
            },
            |c| {
                begun(c);
                c.read(A, P + 1, 4 * MTU as u32).responses(B, P + 1, 4, None);
            },
        ),
        Kind::RcDuplicate => scene(
            |c| {
                begun(c);
                c.send(A, P + 1, 100);
                let last = c.frames();
                c.copy(last).ack(B, P + 1).ack(B, P + 1);
            },
            |c| {
                begun(c);
                // The same message again, but a packet of its own.
                c.send(A, P + 1, 100).after_us(70_000).send(A, P + 1, 100).ack(B, P + 1);
            },
        ),
        Kind::RcReorder => scene(
            |c| {
                begun(c);
                let second = c.frames() + 2;
                c.sends(A, P + 1, 4).swap(second, second + 1).ack(B, P + 4);
            },
            |c| {
                begun(c);
                c.sends(A, P + 1, 4).ack(B, P + 4);
            },
        ),
        Kind::RcRetransmit => scene(
            |c| {
                begun(c);
                c.send(A, P + 1, 100).after_us(70_000).send(A, P + 1, 100).ack(B, P + 1);
            },
            |c| {
                begun(c);
                c.send(A, P + 1, 100).after_us(70_000).send(A, P + 2, 100).ack(B, P + 2);
            },
        ),
        Kind::RcRetryStorm => scene(
            |c| {
                begun(c);
                for _ in 0..4 {
                    c.send(A, P + 1, 100).after_us(70_000);
                }
                c.ack(B, P + 1);
            },
            |c| {
                begun(c);
                // As often, but each time it was of use.
                for n in 1..5 {
                    c.send(A, P + n, 100).after_us(70_000).send(A, P + n, 100).ack(B, P + n);
                }
            },
        ),
        Kind::RcRetryExhausted => scene(
            |c| {
                begun(c);
                // retry_cnt is 3.
                for _ in 0..4 {
                    c.send(A, P + 1, 100).after_us(70_000);
                }
                c.disconnect();
            },
            |c| {
                begun(c);
                for _ in 0..4 {
                    c.send(A, P + 1, 100).after_us(70_000);
                }
                c.ack(B, P + 1).disconnect();
            },
        ),
        Kind::RcAckReqUnanswered => scene(
            |c| {
                begun(c);
                c.send(A, P + 1, 100).after_us(3_000_000);
                // The other direction lives.
                for n in 0..4 {
                    c.send(B, PSNS[1] + n, 100).ack(A, PSNS[1] + n).after_us(1_000_000);
                }
                c.send(A, P + 2, 100).after_us(100);
            },
            |c| {
                begun(c);
                // The later ACK is of both.
                c.send(A, P + 1, 100).after_us(3_000_000);
                c.send(A, P + 2, 100)
                    .ack(B, P + 2)
                    .after_us(4_000_000)
                    .send(A, P + 3, 1)
                    .ack(B, P + 3);
            },
        ),
        Kind::FlowStalled => scene(
            |c| {
                begun(c);
                c.send(A, P + 1, 100).after_us(9_000_000);
                // Somebody else goes on.
                c.with(|odd| odd.qp = Some(Qpn(0x77))).send(B, 9, 10);
            },
            |c| {
                begun(c);
                c.send(A, P + 1, 100).ack(B, P + 1).after_us(9_000_000);
                c.with(|odd| odd.qp = Some(Qpn(0x77))).send(B, 9, 10);
            },
        ),
        Kind::UcPsnGap => scene(
            |c| {
                uc(c, 100).lose(A, 1);
                uc(c, 102);
                uc(c, 103);
            },
            |c| {
                uc(c, 100);
                uc(c, 101);
                uc(c, 102);
            },
        ),
        Kind::UcDuplicate => scene(
            |c| {
                for psn in 100..103 {
                    uc(c, psn);
                }
                c.copy(2);
            },
            |c| {
                for psn in 100..104 {
                    uc(c, psn);
                }
            },
        ),
        _ => scene(
            |c| {
                for psn in 100..106 {
                    uc(c, psn);
                }
                c.swap(4, 5);
            },
            |c| {
                for psn in 100..104 {
                    uc(c, psn);
                }
                c.lose(A, 1);
                uc(c, 105);
            },
        ),
    }
}

fn uc(c: &mut Capture, psn: u32) -> &mut Capture {
    c.roce(A, Opcode::UC_SEND_ONLY, psn, 64, |_| {})
}

fn refusals(kind: Kind) -> Scene {
    let nak = |code: NakCode| {
        move |c: &mut Capture| {
            begun(c);
            c.write(A, P + 1, 100, 100).nak(B, P + 1, code);
        }
    };
    let acked = |c: &mut Capture| {
        begun(c);
        c.write(A, P + 1, 100, 100).ack(B, P + 1);
    };
    match kind {
        Kind::RcNakSeq => scene(
            |c| {
                begun(c);
                c.lose(A, 1).send(A, P + 2, 100).nak(B, P + 1, NakCode::PSN_SEQUENCE);
                c.send(A, P + 1, 100).send(A, P + 2, 100).ack(B, P + 2);
            },
            acked,
        ),
        Kind::RcNakInvalid => scene(nak(NakCode::INVALID_REQUEST), acked),
        Kind::RcNakAccess => scene(nak(NakCode::REMOTE_ACCESS), acked),
        Kind::RcNakOp => scene(nak(NakCode::REMOTE_OPERATIONAL), acked),
        Kind::RcNakOther => scene(nak(NakCode(9)), acked),
        Kind::RcRnr => scene(
            |c| {
                begun(c);
                c.send(A, P + 1, 100)
                    .rnr(B, P + 1, 1)
                    .after_us(1200)
                    .send(A, P + 1, 100)
                    .ack(B, P + 1);
            },
            acked,
        ),
        Kind::RcRnrEarly => scene(
            |c| {
                c.connect().send(A, P, 100).rnr(B, P, 0).after_us(1200).send(A, P, 100).ack(B, P);
            },
            |c| {
                begun(c);
                for n in 1..20 {
                    c.send(A, P + n, 100).ack(B, P + n);
                }
                c.send(A, P + 20, 100)
                    .rnr(B, P + 20, 20)
                    .after_us(1200)
                    .send(A, P + 20, 100)
                    .ack(B, P + 20);
            },
        ),
        // rnr_retry is 2.
        Kind::RcRnrExhausted => scene(
            |c| {
                begun(c);
                for _ in 0..3 {
                    c.send(A, P + 1, 100).rnr(B, P + 1, 1).after_us(1200);
                }
                c.disconnect();
            },
            |c| {
                begun(c);
                for _ in 0..2 {
                    c.send(A, P + 1, 100).rnr(B, P + 1, 1).after_us(1200);
                }
                c.send(A, P + 1, 100).ack(B, P + 1).disconnect();
            },
        ),
        Kind::RcRecvTooSmall => scene(
            |c| {
                begun(c);
                c.send(A, P + 1, 1000).nak(B, P + 1, NakCode::INVALID_REQUEST);
            },
            nak(NakCode::INVALID_REQUEST),
        ),
        // The connection allows 2.
        _ => scene(
            |c| {
                begun(c);
                c.read(A, P + 1, 100).fetch_add(A, P + 2).read(A, P + 3, 100);
                c.responses(B, P + 1, 1, None).atomic_ack(B, P + 2).responses(B, P + 3, 1, None);
            },
            |c| {
                begun(c);
                c.read(A, P + 1, 100).fetch_add(A, P + 2).responses(B, P + 1, 1, None);
                c.read(A, P + 3, 100).atomic_ack(B, P + 2).responses(B, P + 3, 1, None);
            },
        ),
    }
}

fn network(kind: Kind) -> Scene {
    let marked = |c: &mut Capture, from: u32, packets: u32| {
        c.with(|odd| odd.tos = 3);
        for n in from..from + packets {
            c.send(A, P + n, 1000).after_us(20);
        }
        c.plain();
    };
    match kind {
        Kind::EcnMarked => scene(
            move |c| {
                begun(c);
                marked(c, 1, 2);
                c.cnp(B).ack(B, P + 2);
            },
            // ECT(0) says only that it could be marked.
            |c| {
                begun(c);
                c.with(|odd| odd.tos = 2).send(A, P + 1, 1000).plain().ack(B, P + 1);
            },
        ),
        Kind::EcnNoCnp => scene(
            move |c| {
                begun(c);
                marked(c, 1, 80);
                c.ack(B, P + 80);
            },
            move |c| {
                begun(c);
                marked(c, 1, 40);
                c.cnp(B);
                marked(c, 41, 40);
                c.ack(B, P + 80);
            },
        ),
        Kind::CnpSeen => scene(
            move |c| {
                begun(c);
                marked(c, 1, 2);
                c.cnp(B).ack(B, P + 2);
            },
            move |c| {
                begun(c);
                marked(c, 1, 2);
                c.ack(B, P + 2);
            },
        ),
        Kind::CnpNoSlowdown => scene(
            move |c| {
                begun(c);
                marked(c, 1, 60);
                c.cnp(B);
                marked(c, 61, 100);
                c.ack(B, P + 160);
            },
            move |c| {
                begun(c);
                marked(c, 1, 60);
                c.cnp(B);
                // A tenth as fast.
                for n in 61..80 {
                    c.send(A, P + n, 1000).after_us(300);
                }
                c.ack(B, P + 79);
            },
        ),
        Kind::PfcPause => scene(
            |c| {
                begun(c);
                c.pause(1 << 3, 0xffff);
            },
            begun,
        ),
        Kind::QosDscpMismatch => scene(
            |c| {
                c.connect().with(|odd| odd.tos = 26 << 2).send(A, P, 100).plain().ack(B, P);
            },
            // ECN is none of it.
            |c| {
                c.connect().with(|odd| odd.tos = 26 << 2 | 2).send(A, P, 100);
                c.with(|odd| odd.tos = 26 << 2).ack(B, P);
            },
        ),
        _ => scene(
            |c| {
                c.connect().with(|odd| odd.pcp = Some(3)).send(A, P, 100);
                c.with(|odd| odd.pcp = Some(0)).ack(B, P);
            },
            |c| {
                c.connect().with(|odd| odd.pcp = Some(3)).send(A, P, 100).ack(B, P);
            },
        ),
    }
}

fn connections(kind: Kind) -> Scene {
    let rejected = |c: &mut Capture| {
        let rej = Rej {
            remote_comm_id: 0xa,
            reason: userdma_proto::wire::mad::cm::Reason(8),
            ..Default::default()
        };
        c.req(|_| {}).cm(B, 0x50, &rej.into());
    };
    match kind {
        Kind::CmReject => scene(rejected, |c| {
            c.connect().disconnect();
        }),
        Kind::CmTimeout => scene(
            |c| {
                c.req(|_| {}).after_us(600_000).req(|_| {}).after_us(600_000).req(|_| {});
            },
            |c| {
                c.req(|_| {}).after_us(600_000).req(|_| {}).rep().rtu().disconnect();
            },
        ),
        Kind::CmRepeated => scene(
            |c| {
                c.req(|_| {}).after_us(600_000).req(|_| {}).rep().rtu().disconnect();
            },
            // Another connection of the same program.
            |c| {
                c.connect().disconnect();
                c.req(|req| {
                    req.local_comm_id = 0x1a;
                    req.qpn = Qpn(0x12);
                });
                let rej = Rej { remote_comm_id: 0x1a, ..Default::default() };
                c.cm(B, 0x50, &rej.into());
            },
        ),
        Kind::CmMra => scene(
            |c| {
                let mra = Mra {
                    local_comm_id: 0xb,
                    remote_comm_id: 0xa,
                    service_timeout: 20,
                    ..Default::default()
                };
                c.req(|_| {}).cm(B, 0x50, &mra.into()).after_us(500_000).rep().rtu().disconnect();
            },
            |c| {
                c.req(|_| {}).after_us(200_000).rep().rtu().disconnect();
            },
        ),
        Kind::CmRtuLate => scene(
            |c| {
                c.req(|_| {}).rep().send(A, P, 100).rtu().ack(B, P);
            },
            |c| {
                c.req(|_| {}).rep().rtu().send(A, P, 100).ack(B, P);
            },
        ),
        Kind::CmDreqCrossed => scene(
            |c| {
                c.connect().dreq(A, 0x51).dreq(B, 0x61).drep(B, 0x51).drep(A, 0x61);
            },
            |c| {
                c.connect().dreq(A, 0x51).drep(B, 0x51);
            },
        ),
        _ => scene(
            |c| {
                c.connect().disconnect().after_us(1000).dreq(B, 0x61).drep(A, 0x61);
            },
            |c| {
                c.connect().disconnect();
            },
        ),
    }
}

fn depths(ird: u16, ord: u16) -> Option<Enhanced> {
    Some(Enhanced { ird, ord, ..Default::default() })
}

fn p2p() -> Option<Enhanced> {
    Some(Enhanced { ird: 2, ord: 2, peer_to_peer: true, rtr_write: true, ..Default::default() })
}

/// An empty WRITE: the ready-to-receive message.
fn empty_write() -> Vec<u8> {
    let header = ddp::TaggedHeader::new(Rdmap::WRITE, true, Stag(1), 0);
    Capture::fpdu(&octets_of(&header), &[])
}

fn start_ups(kind: Kind) -> Scene {
    let crc = StartFlags::CRC;
    let good = |c: &mut Capture| {
        c.stream().message(A, 1, b"hello").message(B, 1, b"hello").close();
    };
    match kind {
        Kind::MpaReject => scene(
            move |c| {
                c.handshake().start(A, crc, 2, depths(2, 2), b"");
                c.start(B, crc | StartFlags::REJECT, 2, depths(0, 0), b"not today").close();
            },
            good,
        ),
        Kind::MpaTimeout => scene(
            move |c| {
                c.handshake().start(A, crc, 2, depths(2, 2), b"").after_us(12_000_000).tcp(
                    A,
                    0x11,
                    &[],
                );
            },
            move |c| {
                c.handshake().start(A, crc, 2, depths(2, 2), b"").after_us(9_000_000);
                c.start(B, crc, 2, depths(2, 2), b"").message(A, 1, b"hello").close();
            },
        ),
        Kind::MpaMismatch => scene(
            move |c| {
                c.handshake().start(A, crc, 2, depths(2, 2), b"").start(
                    B,
                    crc,
                    2,
                    depths(2, 8),
                    b"",
                );
                c.message(A, 1, b"hello").close();
            },
            // The responder has less than was asked for: that is what the reply is for.
            move |c| {
                c.handshake().start(A, crc, 2, depths(8, 8), b"").start(
                    B,
                    crc,
                    2,
                    depths(2, 2),
                    b"",
                );
                c.message(A, 1, b"hello").close();
            },
        ),
        Kind::MpaRtr => scene(
            move |c| {
                c.handshake().start(A, crc, 2, p2p(), b"").start(B, crc, 2, p2p(), b"");
                c.message(A, 1, b"no ready-to-receive").close();
            },
            move |c| {
                c.handshake().start(A, crc, 2, p2p(), b"").start(B, crc, 2, p2p(), b"");
                let rtr = empty_write();
                c.tcp(A, PUSH, &rtr).message(B, 1, b"hello").close();
            },
        ),
        Kind::MpaResponderFirst => scene(
            |c| {
                c.stream().message(B, 1, b"hello").message(A, 1, b"hello").close();
            },
            good,
        ),
        Kind::MpaSetupFailed => scene(
            |c| {
                c.stream().message(B, 1, b"hello").tcp(A, RST_ACK, &[]);
            },
            |c| {
                c.stream().message(A, 1, b"hello").message(B, 1, b"hello").tcp(A, RST_ACK, &[]);
            },
        ),
        Kind::MpaReservedFlag => scene(
            move |c| {
                let flags = crc | StartFlags::GSO_EXP;
                c.handshake().start(A, flags, 2, depths(2, 2), b"").start(
                    B,
                    flags,
                    2,
                    depths(2, 2),
                    b"",
                );
                c.message(A, 1, b"hello").close();
            },
            good,
        ),
        _ => scene(|c| markers(c, false), |c| markers(c, true)),
    }
}

/// A stream whose initiator sends markers.
fn markers(c: &mut Capture, right: bool) {
    let flags = StartFlags::CRC | StartFlags::MARKERS;
    c.handshake().start(A, StartFlags::CRC, 2, depths(2, 2), b"");
    c.start(B, flags, 2, depths(2, 2), b"");
    let (mut encoder, mut stream, mut count) = (MarkerEncoder::new(true), Vec::new(), 0);
    for msn in 1..8 {
        let fpdu = Capture::untagged(Rdmap::SEND, true, 0, msn, 0, &[7; 400]);
        if right {
            encoder.push(&fpdu, &mut stream);
        } else {
            off_grid(&fpdu, &mut count, &mut stream);
        }
    }
    for part in stream.chunks(700) {
        c.tcp(A, PUSH, part);
    }
    c.close();
}

/// Markers of a sender that leaves the CRCs out of its count.
fn off_grid(fpdu: &[u8], count: &mut usize, out: &mut Vec<u8>) {
    let begin = out.len();
    for &octet in &fpdu[..fpdu.len() - 4] {
        if (*count).is_multiple_of(512) {
            let behind = (out.len() - begin) as u16;
            out.extend([0, 0]);
            out.extend(behind.to_be_bytes());
            *count += 4;
        }
        out.push(octet);
        *count += 1;
    }
    let sum = crc32c(&out[begin..]);
    out.extend(sum.to_le_bytes());
}

fn read_request(msn: u32, size: u32) -> Vec<u8> {
    let read = ReadRequest::new((Stag(9), 0), size, (Stag(5), 0));
    Capture::untagged(Rdmap::READ_REQUEST, true, 1, msn, 0, &octets_of(&read))
}

fn read_response() -> Vec<u8> {
    let header = ddp::TaggedHeader::new(Rdmap::READ_RESPONSE, true, Stag(9), 0);
    Capture::fpdu(&octets_of(&header), b"octets")
}

fn streams(kind: Kind) -> Scene {
    let good = |c: &mut Capture| {
        c.stream().message(A, 1, b"hello").message(A, 2, b"again").message(B, 1, b"hello").close();
    };
    let no_buffer = TermCode::new(TermLayer::DDP, 2, 2);
    let ended = move |code: TermCode, swapped: bool| {
        move |c: &mut Capture| {
            c.stream().message(A, 1, b"hello").terminate(B, code, swapped).close();
        }
    };
    match kind {
        Kind::IwCrcBad => scene(
            |c| {
                let mut octets = Capture::untagged(Rdmap::SEND, true, 0, 1, 0, b"damaged");
                octets[24] ^= 1;
                c.stream().tcp(A, PUSH, &octets).close();
            },
            good,
        ),
        Kind::IwSequence => scene(
            |c| {
                c.stream().message(A, 1, b"hello").message(A, 3, b"two is missing").close();
            },
            good,
        ),
        Kind::IwLength => scene(
            |c| {
                // A READ request that is not whole.
                let octets = Capture::untagged(Rdmap::READ_REQUEST, true, 1, 1, 0, b"short");
                c.stream().tcp(A, PUSH, &octets).close();
            },
            |c| {
                let octets = read_request(1, 6);
                c.stream().tcp(A, PUSH, &octets).tcp(B, PUSH, &read_response()).close();
            },
        ),
        // The start-up allows 2.
        Kind::IwOutstanding => scene(
            |c| {
                c.stream();
                for msn in 1..4 {
                    c.tcp(A, PUSH, &read_request(msn, 6));
                }
                for _ in 0..3 {
                    c.tcp(B, PUSH, &read_response());
                }
                c.close();
            },
            |c| {
                c.stream().tcp(A, PUSH, &read_request(1, 6)).tcp(A, PUSH, &read_request(2, 6));
                c.tcp(B, PUSH, &read_response()).tcp(A, PUSH, &read_request(3, 6));
                c.tcp(B, PUSH, &read_response()).tcp(B, PUSH, &read_response()).close();
            },
        ),
        Kind::IwTerminate => scene(ended(TermCode::new(TermLayer::DDP, 1, 0), false), good),
        Kind::IwTerminateOrder => scene(ended(no_buffer, true), ended(no_buffer, false)),
        _ => scene(ended(no_buffer, false), ended(TermCode::new(TermLayer::DDP, 2, 3), false)),
    }
}

fn segments(kind: Kind) -> Scene {
    let message = |msn: u32| Capture::untagged(Rdmap::SEND, true, 0, msn, 0, &[7; 300]);
    let good = move |c: &mut Capture| {
        c.stream();
        for msn in 1..6 {
            c.tcp(A, PUSH, &message(msn)).tcp(B, DATA, &[]);
        }
        c.close();
    };
    match kind {
        Kind::TcpGap => scene(
            move |c| {
                c.stream().tcp(A, PUSH, &message(1)).tcp(A, PUSH, &message(2));
                let lost = c.seq(A);
                let octets = message(3);
                c.lose_octets(A, octets.len() as u32).tcp(A, PUSH, &message(4)).tcp(
                    A,
                    PUSH,
                    &message(5),
                );
                c.after_us(1000).tcp_at(A, lost, PUSH, &octets).tcp(B, DATA, &[]).close();
            },
            good,
        ),
        Kind::TcpRetransmit => scene(
            move |c| {
                c.stream().tcp(A, PUSH, &message(1)).tcp(A, PUSH, &message(2));
                let last = c.seq(A);
                c.tcp(A, PUSH, &message(3)).after_us(200_000).tcp_at(A, last, PUSH, &message(3));
                c.tcp(B, DATA, &[]).close();
            },
            good,
        ),
        Kind::TcpReorder => scene(
            move |c| {
                c.stream();
                for msn in 1..6 {
                    c.tcp(A, PUSH, &message(msn));
                }
                let third = c.frames() - 2;
                c.swap(third, third + 1).tcp(B, DATA, &[]).close();
            },
            good,
        ),
        Kind::TcpDuplicate => scene(
            move |c| {
                c.stream().tcp(A, PUSH, &message(1)).tcp(A, PUSH, &message(2));
                let last = c.frames();
                c.copy(last).tcp(B, DATA, &[]).close();
            },
            good,
        ),
        Kind::TcpZeroWindow => scene(
            move |c| {
                c.stream().tcp(A, PUSH, &message(1));
                c.window = 0;
                c.tcp(B, DATA, &[]);
                c.window = 500;
                c.after_us(1000).tcp(B, DATA, &[]).close();
            },
            move |c| {
                c.stream().tcp(A, PUSH, &message(1));
                c.window = 1;
                c.tcp(B, DATA, &[]).close();
            },
        ),
        Kind::TcpReset => scene(
            move |c| {
                c.stream().tcp(A, PUSH, &message(1)).tcp(B, RST, &[]);
            },
            good,
        ),
        _ => scene(
            |c| {
                c.tcp(A, SYN, &[]).tcp(B, RST_ACK, &[]);
            },
            good,
        ),
    }
}

fn captures(kind: Kind) -> Scene {
    match kind {
        Kind::CapFramesMissing => scene(
            |c| {
                begun(c);
                // The ACK is of one that the capture lacks.
                c.lose(A, 1).send(A, P + 2, 100).ack(B, P + 2);
            },
            |c| {
                begun(c);
                c.lose(A, 1).send(A, P + 2, 100).nak(B, P + 1, NakCode::PSN_SEQUENCE);
                c.send(A, P + 1, 100).send(A, P + 2, 100).ack(B, P + 2);
            },
        ),
        Kind::CapSnaplen => scene(
            |c| {
                begun(c);
                c.with(|odd| odd.cut = Some(96)).send(A, P + 1, 1000).plain().ack(B, P + 1);
            },
            |c| {
                begun(c);
                c.send(A, P + 1, 1000).ack(B, P + 1);
            },
        ),
        Kind::CapOneWay => scene(
            |c| {
                for n in 0..4 {
                    c.send(A, 50 + n, 100);
                }
            },
            |c| {
                for n in 0..4 {
                    c.send(A, 50 + n, 100).ack(B, 50 + n);
                }
            },
        ),
        _ => scene(
            |c| {
                c.part(A, 50, 4, 2).part(A, 50, 4, 3).ack(B, 53);
            },
            |c| {
                c.sends(A, 50, 4).ack(B, 53);
            },
        ),
    }
}
