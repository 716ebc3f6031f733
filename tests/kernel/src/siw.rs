//! Tests against siw, iWARP of Linux.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use userdma_proto::wire::iwarp::{
    mpa::{StartFlags, StartKind},
    rdmap::Opcode,
};

use crate::{
    case::{Case, Lab, Link, Needs},
    impair::Effect,
    ours::Program,
    programs::{self, Rping},
    traffic::{self, Client, Run},
    wire,
};

/// rping's sizes: its smallest and its largest, those around what one FPDU carries at an MTU of 1500, and some.
const SIZES: [u32; 9] = [26, 27, 64, 1000, 1424, 1425, 4000, 16_384, 65_535];

fn rping(size: u32, rounds: u32, more: &'static [&'static str]) -> Rping<'static> {
    Rping { ipv6: false, size, rounds, more }
}

/// A hundred MB each way, on request.
pub(crate) fn long() -> Vec<Case> {
    Client::BOTH.map(|client| traffic::long(Needs::siw(&[]), client)).into()
}

pub(crate) fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    let plain = || Needs::siw(&[]);
    for size in SIZES {
        all.push(Case::new(format!("siw::rping::client_{size}"), plain(), move |lab| {
            rping(size, 100, &[]).client(lab)?;
            wire::crc_is(&lab.wire()?, true)
        }));
        all.push(Case::new(format!("siw::rping::server_{size}"), plain(), move |lab| {
            rping(size, 100, &[]).server(lab)?;
            wire::crc_is(&lab.wire()?, true)
        }));
    }
    all.push(Case::new("siw::rping::ipv6", plain(), |lab| {
        Rping { ipv6: true, ..rping(4000, 100, &[]) }.both(lab)
    }));
    all.extend(start_ups());
    all.extend(operations());
    all.push(Case::new("siw::operations::read_of_nothing", plain(), read_of_nothing));
    all.extend(errors());
    all.extend(connections());
    all.extend(examples());
    all.extend(networks());
    all.push(Case::new("siw::rdma_client", plain(), |lab| programs::rdma_client(lab, false)));
    all.push(Case::new("siw::rdma_server", plain(), programs::rdma_server));
    all.push(Case::new("siw::rdma_client_ipv6", plain(), |lab| programs::rdma_client(lab, true)));
    all.push(Case::new("siw::connect::no_listener_there", plain(), programs::no_listener_there));
    all.push(Case::new("siw::connect::no_listener_here", plain(), programs::no_listener_here));
    all.push(Case::new("siw::connect::reject_here", plain(), programs::reject_here));
    all
}

/// Every way to agree on revision, CRC and peer-to-peer.
fn start_ups() -> Vec<Case> {
    let mut all = Vec::new();
    for (name, parameters, more, on) in [
        // siw asks for a CRC or leaves it; so do we. It is in use where either asks.
        ("crc_ours", &["mpa_crc_required=N"][..], &[][..], true),
        ("crc_theirs", &["mpa_crc_required=Y"], &["--crc", "off"], true),
        ("crc_both", &["mpa_crc_required=Y"], &[], true),
        ("crc_none", &["mpa_crc_required=N"], &["--crc", "off"], false),
        ("rev1", &["mpa_version=1"], &["--mpa-rev", "1"], true),
        ("rev1_crc_none", &["mpa_version=1"], &["--mpa-rev", "1", "--crc", "off"], false),
        ("p2p", &["peer_to_peer=Y"], &["--p2p"], true),
        ("p2p_crc_none", &["peer_to_peer=Y"], &["--p2p", "--crc", "off"], false),
        ("gso", &["try_gso=Y"], &[], true),
    ] {
        all.push(Case::new(
            format!("siw::start::{name}_client"),
            Needs::siw(parameters),
            move |lab| {
                rping(4000, 100, more).client(lab)?;
                let frames = lab.wire()?;
                wire::crc_is(&frames, on)?;
                wire::revision_is(&frames, if name.starts_with("rev1") { 1 } else { 2 })?;
                wire::rtr_is(
                    &frames,
                    lab.peer(false),
                    name.starts_with("p2p").then_some(Opcode::WRITE),
                )
            },
        ));
        // As a responder siw echoes the request's C, even where it requires a CRC.
        all.push(Case::new(
            format!("siw::start::{name}_server"),
            Needs::siw(parameters),
            move |lab| {
                if name.starts_with("rev1") {
                    return revision_1(lab, more, on);
                }
                rping(4000, 100, more).server(lab)?;
                let frames = lab.wire()?;
                wire::crc_is(&frames, on && name != "crc_theirs")?;
                wire::revision_is(&frames, 2)?;
                wire::rtr_is(
                    &frames,
                    lab.host(false),
                    name.starts_with("p2p").then_some(Opcode::WRITE),
                )
            },
        ));
    }
    // Where both offer WRITE and READ it becomes a WRITE; one side of ours that takes READ alone makes it a READ.
    for client in Client::BOTH {
        let name = format!("siw::start::p2p_read_{}", client.name());
        all.push(Case::new(name, Needs::siw(&["peer_to_peer=Y"]), move |lab| {
            Run::new(client, "send:10 write:100 check read:100")
                .ours("--p2p --rtr read")
                .succeeds(lab)?;
            let initiator = if client == Client::Ours { lab.host(false) } else { lab.peer(false) };
            wire::rtr_is(&lab.wire()?, initiator, Some(Opcode::READ_REQUEST))
        }));
    }
    all.push(Case::new(
        "siw::start::strict_refuses_our_crc",
        Needs::siw(&["mpa_crc_strict=Y"]),
        |lab| refuses(lab, &[]),
    ));
    all.push(Case::new("siw::start::markers_are_refused", Needs::siw(&[]), |lab| {
        refuses(lab, &["--markers"])
    }));
    all
}

/// siw refuses what `userdma ping` asks for, and we say so.
fn refuses(lab: &Lab, more: &[&str]) -> Result<()> {
    let script = format!("rping -s -v -S 64 -a {} -p {}", lab.peer(false), programs::PORT);
    let to = programs::at(lab.peer(false), programs::PORT);
    lab.guest_while(&script, |_| {
        lab.guest_listens(programs::PORT)?;
        let mut args = vec!["ping", &to, "-c", "1"];
        args.extend(more);
        lab.ours(Program::Userdma, &args)?.ended_with(1)?.says("reject")?;
        Ok(())
    })
}

/// Revision 1 tells no depths: siw reports 0, rping's server takes that over, and cannot READ. What needs no READ
/// goes both ways.
fn revision_1(lab: &Lab, more: &[&str], crc: bool) -> Result<()> {
    let script = format!("rping -s -v -S 64 -a {} -p {}", lab.peer(false), programs::PORT);
    let to = programs::at(lab.peer(false), programs::PORT);
    let ((), rping) = lab.guest_beside(&script, |_| {
        lab.guest_listens(programs::PORT)?;
        let mut args = vec!["ping", &to, "-c", "1"];
        args.extend(more);
        lab.ours(Program::Userdma, &args)?.ended_with(1)?;
        Ok(())
    })?;
    rping.says("post send error -1")?;
    let said = Run::new(Client::Ours, "send:100 write:2000 check burst:8:3000 sleep:100")
        .ours(&more.join(" "))
        .succeeds(lab)?;
    ensure!(said.received().len() == 9, "{}", said.server.tail());
    let frames = lab.wire()?;
    wire::crc_is(&frames, crc)?;
    wire::revision_is(&frames, 1)
}

/// Every operation that iWARP of Linux has, at every size, in both directions.
fn operations() -> Vec<Case> {
    let mut all = Vec::new();
    for client in Client::BOTH {
        let name = client.name();
        for (kind, parameters) in [("", &[][..]), ("_gso", &["try_gso=Y"][..])] {
            let case = format!("siw::operations::sizes{kind}_{name}");
            all.push(Case::new(case, Needs::siw(parameters), move |lab| {
                let mut ops: Vec<_> = Vec::new();
                for &len in traffic::sizes(Link::Siw) {
                    ops.push(format!("send:{len} write:{len} check"));
                    // See `read_of_nothing`.
                    if len > 0 || client == Client::Guest {
                        ops.push(format!("read:{len}"));
                    }
                }
                let run = Run::new(client, &ops.join(" "))
                    .server("--memory 4194304 --receives 8 --receive-size 1048576")
                    .options("--memory 4194304");
                let said = run.succeeds(lab)?;
                ensure!(
                    said.received().len() == traffic::sizes(Link::Siw).len(),
                    "{:?}",
                    said.received()
                );
                // siw asks for no CRC, but obeys where we do.
                wire::crc_is(&lab.wire()?, true)
            }));
        }
        all.push(Case::new(format!("siw::operations::mix_ipv6_{name}"), Needs::siw(&[]), move |lab| {
            let ops = "send:100 sendsol:9 burst:16:100 burst:4:4000 write:2000 check write2:10 read:2000";
            Run::new(client, ops).ipv6().succeeds(lab).map(drop)
        }));
        all.push(Case::new(
            format!("siw::operations::events_{name}"),
            Needs::siw(&[]),
            move |lab| {
                let mut run = Run::new(client, "send:1000 write:5000 check read:5000 burst:8:300");
                match client {
                    Client::Guest => run.options = "--events".into(),
                    Client::Ours => run.server = "--events".into(),
                }
                run.succeeds(lab).map(drop)
            },
        ));
        all.push(Case::new(
            format!("siw::operations::eight_mib_{name}"),
            Needs::siw(&[]),
            move |lab| {
                Run::new(client, "write:8388608 check read:8000000 long:16")
                    .server("--memory 20971520")
                    .options("--memory 20971520")
                    .succeeds(lab)
                    .map(drop)
            },
        ));
        all.push(Case::new(
            format!("siw::operations::invalidate_{name}"),
            Needs::siw(&[]),
            move |lab| {
                let run = Run::new(client, "write2:10 sendinv:5 write2:10 sleep:500");
                let took = run.run(lab)?.received();
                // siw does not tell its program which key is gone.
                let told =
                    took.len() == 1 && (client == Client::Ours || took[0]["invalidated"].is_u64());
                ensure!(told, "{took:?}");
                terminated(lab, client, [[0x11, 0], [0x11, 0]])
            },
        ));
    }
    all
}

/// siw answers a READ of nothing with one octet where its last SEND had one, though not always; we may not take it:
/// there is no place for it. Tried until it does; whatever the wire says is what our side must make of it.
fn read_of_nothing(lab: &Lab) -> Result<()> {
    const TRIES: usize = 5;
    let (host, guest) = (lab.host(false), lab.peer(false));
    let mut ended = 0;
    for tries in 1..=TRIES {
        let said = Run::new(Client::Ours, "send:0 write:0 check read:0").run(lab)?;
        let frames = lab.wire()?;
        let answers = wire::payloads(&frames, guest, Opcode::READ_RESPONSE);
        ensure!(answers.len() == tries, "READ responses of {answers:?} octets in {tries} tries");
        match answers[tries - 1] {
            0 => said.client.success()?,
            1 => said.client.ended_with(1)?.says("BAD_RESP_ERR")?,
            octets => bail!("a READ response of {octets} octets"),
        };
        ended += usize::from(answers[tries - 1]);
        let found = wire::terminates(&frames, host);
        ensure!(
            found.len() == ended && found.iter().all(|octets| octets[..2] == [0x11, 1]),
            "TERMINATEs of ours: {found:02x?}"
        );
        if ended > 0 {
            break;
        }
    }
    Ok(())
}

/// The server, and nobody else, sent one TERMINATE, which begins so: of siw, and of ours.
fn terminated(lab: &Lab, client: Client, [siw, ours]: [[u8; 2]; 2]) -> Result<()> {
    let (host, guest) = (lab.host(false), lab.peer(false));
    let (from, other, want) = match client {
        Client::Ours => (guest, host, siw),
        Client::Guest => (host, guest, ours),
    };
    let frames = lab.wire()?;
    let found = wire::terminates(&frames, from);
    let first: Vec<_> = found.iter().map(|octets| [octets[0], octets[1]]).collect();
    ensure!(first == [want], "TERMINATEs of {from}: {found:02x?}, not {want:02x?}");
    let found = wire::terminates(&frames, other);
    ensure!(found.is_empty(), "TERMINATEs of {other}: {found:02x?}");
    Ok(())
}

/// Errors on purpose: the right TERMINATE, and the right completions.
///
/// siw swaps the halves of a TERMINATE's first octet (layer and type), which our decoder sees through; here the
/// octets themselves are compared. A WRITE or a SEND is done when TCP has it: what the peer thinks of it shows at
/// the next work request. Of siw's own client only that it is disconnected is certain: a request that is posted
/// behind a TERMINATE may never complete there.
fn errors() -> Vec<Case> {
    // Name, options of the server, operation, the TERMINATE of siw and of ours.
    type Error = (&'static str, &'static str, &'static str, [[u8; 2]; 2]);
    const ERRORS: [Error; 6] = [
        ("stag_write", "", "badwrite:100", [[0x11, 0], [0x11, 0]]),
        ("stag_read", "", "badread:100", [[0x10, 0], [0x01, 0]]),
        ("bounds_write", "", "oobwrite:100", [[0x11, 1], [0x11, 1]]),
        ("bounds_read", "", "oobread:100", [[0x10, 1], [0x01, 1]]),
        ("no_receive", "--receive-late never", "send:10", [[0x21, 2], [0x12, 2]]),
        ("receive_too_small", "--receive-size 100", "send:200", [[0x21, 2], [0x12, 5]]),
    ];
    let mut all = Vec::new();
    for client in Client::BOTH {
        for (name, server, op, first) in ERRORS {
            let case = format!("siw::errors::{name}_{}", client.name());
            all.push(Case::new(case, Needs::siw(&[]), move |lab| {
                let reads = op.contains("read");
                let too_small: &[_] =
                    if name == "receive_too_small" { &["LOC_LEN_ERR"] } else { &[] };
                match client {
                    Client::Ours if reads => {
                        let said =
                            Run::new(client, op).server(server).fails(lab, "REM_ACCESS_ERR")?;
                        said.server_failed_with(&[])?;
                    }
                    Client::Ours => {
                        let ops = format!("{op} sleep:300 read:8");
                        let said =
                            Run::new(client, &ops).server(server).fails(lab, "WR_FLUSH_ERR")?;
                        said.server_failed_with(too_small)?;
                    }
                    Client::Guest => {
                        let said =
                            Run::new(client, &format!("{op} sleep:500")).server(server).run(lab)?;
                        said.client.says("RDMA_CM_EVENT_DISCONNECTED")?;
                        said.server.says("TerminateSent")?;
                        let sent = said.sent();
                        // Its program does not learn why.
                        let status = if reads { "WR_FLUSH_ERR" } else { "SUCCESS" };
                        ensure!(
                            sent.len() == 1 && sent[0]["status"] == status,
                            "{sent:?}, not {status}"
                        );
                        said.server_failed_with(too_small)?;
                    }
                }
                terminated(lab, client, first)
            }));
        }
    }
    all
}

/// Connecting, many times, and not.
fn connections() -> Vec<Case> {
    let mut all = Vec::new();
    for client in Client::BOTH {
        let name = client.name();
        all.push(Case::new(
            format!("siw::connect::a_hundred_{name}"),
            Needs::siw(&[]),
            move |lab| {
                let said = Run::new(client, "send:10 write:100 check")
                    .server("--connections 100 --receives 4 --receive-size 4096")
                    .options("--connections 100 --receives 4 --receive-size 4096")
                    .succeeds(lab)?;
                ensure!(said.received().len() == 100, "{} messages arrived", said.received().len());
                Ok(())
            },
        ));
        all.push(Case::new(
            format!("siw::connect::private_data_{name}"),
            Needs::siw(&[]),
            move |lab| {
                // The READ is there because siw overlooks an FPDU right behind its reply: with an end at once
                // behind it the message would be lost.
                let said = Run::new(client, "send:10 read:8")
                    .options("--private who-asks")
                    .succeeds(lab)?;
                ensure!(
                    said.server.event("request")?["private"] == "who-asks",
                    "{}",
                    said.server.tail()
                );
                Ok(())
            },
        ));
        all.push(Case::new(format!("siw::connect::reject_{name}"), Needs::siw(&[]), move |lab| {
            let said = Run::new(client, "send:10").server("--reject not-today").run(lab)?;
            said.client.ended_with(3)?.says("not-today")?;
            said.server.success()?;
            wire::refused_with(&lab.wire()?, b"not-today")
        }));
    }
    all.push(Case::new("siw::connect::depths", Needs::siw(&[]), |lab| {
        let said =
            Run::new(Client::Ours, "read:100 read:200").options("--ord 3 --ird 5").succeeds(lab)?;
        let request = said.server.event("request")?;
        ensure!(
            request["responder_resources"] == 3 && request["initiator_depth"] == 5,
            "{request}"
        );
        Ok(())
    }));
    all
}

/// librdmacm's ucmatose. Its server sends first: as a responder we hold that back until the peer's first FPDU is
/// there, which siw's client sends by itself only with peer-to-peer on; and as an initiator we take what comes
/// right behind the reply.
fn examples() -> Vec<Case> {
    let p2p = || Needs::siw(&["peer_to_peer=Y"]);
    let connections = 3;
    vec![
        Case::new("siw::ucmatose::client", p2p(), move |lab| {
            let host = lab.host(false);
            let args = format!(
                "cmatose listen {host} 7471 --p2p --messages 5 --size 200 --connections {connections}"
            );
            let mut server = lab.ours_spawn(Program::Peer, &traffic::words(&args))?;
            server.expect("listening", Duration::from_secs(10))?;
            for _ in 0..connections {
                lab.guest(&format!("ucmatose -s {host} -C 5 -S 200 -c 1"))?
                    .success()?
                    .says("return status 0")?;
            }
            lab.end_of(server)?.success()?;
            // Ours comes behind the peer's, every time.
            let frames = lab.wire()?;
            let host = lab.host(false);
            let firsts = wire::first_fpdus(&frames);
            ensure!(
                firsts.len() == connections && firsts.iter().all(|&from| from != host),
                "the first FPDUs are of {firsts:?}"
            );
            Ok(())
        }),
        Case::new("siw::ucmatose::server", Needs::siw(&[]), |lab| {
            let guest = lab.peer(false);
            let script = format!("ucmatose -b {guest} -C 5 -S 200 -c 1");
            let args = format!("cmatose connect {guest} 7471 --messages 5 --size 200");
            let ((), theirs) = lab.guest_beside(&script, |_| {
                lab.guest_listens(7471)?;
                lab.ours(Program::Peer, &traffic::words(&args))?.success()?;
                Ok(())
            })?;
            theirs.success()?.says("return status 0")?;
            // Its data is right behind the reply: not one FPDU of ours is before it.
            let frames = lab.wire()?;
            let first = wire::fpdus(&frames).next().context("no FPDU")?.0;
            ensure!(first == guest, "the first FPDU is of {first}");
            Ok(())
        }),
        Case::new("siw::ucmatose::we_hold_back", Needs::siw(&[]), |lab| {
            let host = lab.host(false);
            let args = format!("cmatose listen {host} 7471 --messages 5 --size 200");
            let mut server = lab.ours_spawn(Program::Peer, &traffic::words(&args))?;
            server.expect("listening", Duration::from_secs(10))?;
            // Without peer-to-peer siw's client waits for us, and we for it: nothing breaks, and nothing is sent,
            // though our reply is there. (That it goes out behind the peer's first is `siw::ucmatose::client`.)
            let client = format!("timeout 3 ucmatose -s {host} -C 5 -S 200 -c 1");
            lab.guest(&client)?.ended_with(143)?;
            let frames = lab.wire()?;
            let replied = wire::starts(&frames).any(|(from, start)| {
                from == host
                    && start.kind == StartKind::Reply
                    && !start.flags.contains(StartFlags::REJECT)
            });
            ensure!(replied, "no reply of ours");
            let fpdus: Vec<_> = wire::fpdus(&frames).map(|(from, _)| from).collect();
            ensure!(fpdus.is_empty(), "FPDUs of {fpdus:?}");
            Ok(())
        }),
    ]
}

/// What a network does.
fn networks() -> Vec<Case> {
    let mut all = Vec::new();
    for client in Client::BOTH {
        for (name, what, effect) in [
            ("loss", "loss 2%", Effect::Lost),
            ("reorder", "delay 2ms reorder 75%", Effect::Reordered),
            ("duplicate", "duplicate 5%", Effect::Duplicated),
        ] {
            let case = format!("siw::network::{name}_{}", client.name());
            all.push(Case::new(case, Needs::siw(&[]), move |lab| {
                let network = lab.impair(what)?;
                Run::new(client, "send:30000 write:600000 check read:600000 burst:32:2000")
                    .server("--memory 4194304")
                    .options("--memory 4194304")
                    .succeeds(lab)?;
                network.was_met(&[effect])
            }));
        }
        let case = format!("siw::network::cut_cable_{}", client.name());
        all.push(Case::new(case, Needs::siw(&[]), move |lab| cut_cable(lab, client)));
    }
    all
}

/// The cable is cut in the middle of a transfer for a while: it goes on where it was.
fn cut_cable(lab: &Lab, client: Client) -> Result<()> {
    const CUT: Duration = Duration::from_secs(2);
    lab.while_cut(4 << 20, CUT, || {
        Run::new(client, "write:1000 check long:24 read:1000000")
            .server("--memory 4194304")
            .options("--memory 4194304")
            .succeeds(lab)
    })?;
    let (before, silence, behind) = wire::silence(&lab.wire()?).context("no FPDUs")?;
    ensure!(
        silence >= CUT - Duration::from_millis(200) && before.min(behind) > 1 << 20,
        "{before} octets, then {silence:?} without any, then {behind}: it was not cut in the middle"
    );
    Ok(())
}
