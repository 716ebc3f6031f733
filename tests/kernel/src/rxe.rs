//! Tests against rxe, RoCEv2 of Linux.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use userdma_proto::wire::roce::aeth::{NakCode, Syndrome};

use crate::{
    case::{Case, Lab, Link, Needs},
    impair::Effect,
    ours::Program,
    programs::{self, Pingpong, Rping},
    traffic::{self, Client, Run},
    wire,
};

/// The MTU of the wire, and the path MTU that rxe makes of it.
const MTUS: [(u16, u32); 6] =
    [(576, 256), (620, 512), (1500, 1024), (2500, 2048), (4500, 4096), (9000, 4096)];

/// The ACK time-out of a REQ: 67 ms of ours, 134 ms as the least that the rdma_cm asks for.
fn ack_timeout(client: Client) -> u8 {
    match client {
        Client::Ours => 14,
        Client::Guest => 15,
    }
}

fn rping(ipv6: bool, size: u32) -> Rping<'static> {
    Rping { ipv6, size, rounds: 100, more: &[] }
}

/// Runs `f`, and then every ICRC on the wire must be good.
fn checked(lab: &Lab, f: impl FnOnce(&Lab) -> Result<()>) -> Result<()> {
    f(lab)?;
    wire::all_icrc_good(&lab.wire()?)
}

/// A hundred MB each way, on request.
pub(crate) fn long() -> Vec<Case> {
    Client::BOTH.map(|client| traffic::long(Needs::rxe(1500), client)).into()
}

pub(crate) fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for (mtu, path) in MTUS {
        for ipv6 in [false, true] {
            if ipv6 && mtu < 1280 {
                continue;
            }
            let family = if ipv6 { "ipv6" } else { "ipv4" };
            for server in [false, true] {
                let role = if server { "server" } else { "client" };
                let name = format!("rxe::rping::{family}_mtu{mtu}_path{path}_{role}");
                all.push(Case::new(name, Needs::rxe(mtu), move |lab| {
                    checked(lab, |lab| {
                        let rping = rping(ipv6, 4000);
                        if server { rping.server(lab) } else { rping.client(lab) }.map(drop)
                    })?;
                    wire::path_mtu_is(&lab.wire()?, path.min(4000))
                }));
            }
        }
    }
    // A wire that carries IPv6 has a path MTU of 1024 at least, unless the initiator asks for less.
    for (path, more) in [(256, &["--mtu", "256"]), (512, &["--mtu", "512"])] {
        let name = format!("rxe::rping::ipv6_path{path}_server");
        all.push(Case::new(name, Needs::rxe(1500), move |lab| {
            checked(lab, |lab| Rping { more, ..rping(true, 4000) }.server(lab).map(drop))?;
            wire::path_mtu_is(&lab.wire()?, path)
        }));
    }
    let plain = || Needs::rxe(1500);
    for kind in ["rc", "uc", "ud", "srq"] {
        for (name, size, events, ipv6) in [
            ("small", 64, false, false),
            ("events", 1000, true, false),
            ("large", 4096, false, false),
            ("ipv6", 1000, false, true),
        ] {
            if kind == "ud" && size > 1024 {
                continue;
            }
            let game = Pingpong { kind, mtu: 1024, size, iters: 500, events, ipv6 };
            let other = game.clone();
            all.push(Case::new(
                format!("rxe::pingpong::{kind}_{name}_client"),
                plain(),
                move |lab| checked(lab, |lab| game.client(lab)),
            ));
            all.push(Case::new(
                format!("rxe::pingpong::{kind}_{name}_server"),
                plain(),
                move |lab| checked(lab, |lab| other.server(lab)),
            ));
        }
    }
    for mtu in [256, 512, 2048, 4096] {
        let game = Pingpong { kind: "rc", mtu, size: 5000, iters: 200, events: false, ipv6: false };
        let other = game.clone();
        all.push(Case::new(
            format!("rxe::pingpong::rc_mtu{mtu}_client"),
            Needs::rxe(4500),
            move |lab| {
                checked(lab, |lab| game.client(lab))?;
                wire::path_mtu_is(&lab.wire()?, mtu)
            },
        ));
        all.push(Case::new(
            format!("rxe::pingpong::rc_mtu{mtu}_server"),
            Needs::rxe(4500),
            move |lab| {
                checked(lab, |lab| other.server(lab))?;
                wire::path_mtu_is(&lab.wire()?, mtu)
            },
        ));
    }
    all.extend(operations());
    all.extend(errors());
    all.extend(connections());
    all.extend(examples());
    all.extend(networks());
    all.push(Case::new("rxe::rdma_client", plain(), |lab| {
        checked(lab, |lab| programs::rdma_client(lab, false))
    }));
    all.push(Case::new("rxe::rdma_server", plain(), |lab| checked(lab, programs::rdma_server)));
    all.push(Case::new("rxe::rdma_client_ipv6", plain(), |lab| {
        checked(lab, |lab| programs::rdma_client(lab, true))
    }));
    all.push(Case::new("rxe::connect::no_listener_there", plain(), programs::no_listener_there));
    all.push(Case::new("rxe::connect::no_listener_here", plain(), programs::no_listener_here));
    all.push(Case::new("rxe::connect::reject_here", plain(), programs::reject_here));
    all
}

/// Every operation that RoCE of Linux has, at every size and path MTU, in both directions.
fn operations() -> Vec<Case> {
    let mut all = Vec::new();
    // The initiator asks: rxe takes less than its wire could carry.
    for path in [256, 512] {
        let name = format!("rxe::operations::path{path}_{}", Client::Ours.name());
        all.push(Case::new(name, Needs::rxe(1500), move |lab| {
            checked(lab, |lab| {
                let ops = "send:0 send:5000 write:70001 check read:70001 sendimm:257:9";
                Run::new(Client::Ours, ops).ours(&format!("--mtu {path}")).succeeds(lab)?;
                wire::path_mtu_is(&lab.wire()?, path)
            })
        }));
    }
    for client in Client::BOTH {
        let name = client.name();
        for (mtu, path) in MTUS {
            let case = format!("rxe::operations::sizes_mtu{mtu}_path{path}_{name}");
            all.push(Case::new(case, Needs::rxe(mtu), move |lab| {
                checked(lab, |lab| {
                    let mut ops: Vec<_> = Vec::new();
                    for len in traffic::sizes(Link::Rxe) {
                        ops.push(format!("send:{len} write:{len} check read:{len}"));
                    }
                    let run = Run::new(client, &ops.join(" "))
                        .server("--memory 4194304 --receives 8 --receive-size 1048576")
                        .options("--memory 4194304");
                    let said = run.succeeds(lab)?;
                    let (came, want) = (said.received().len(), traffic::sizes(Link::Rxe).len());
                    ensure!(came == want, "{came} messages of {want}");
                    let frames = lab.wire()?;
                    wire::path_mtu_is(&frames, path)?;
                    wire::ack_timeout_is(&frames, ack_timeout(client))
                })
            }));
        }
        all.push(Case::new(format!("rxe::operations::mix_{name}"), Needs::rxe(1500), move |lab| {
            checked(lab, |lab| {
                let ops = "sendimm:0:0x11223344 sendimm:5000:0xdeadbeef writeimm:0:0x1234 writeimm:2500:0xc0ffee check \
                           faa:5 faa:0x100000000 cas:0x1111111211111116:9 cas:1:2 faa:0 burst:16:100 sendsol:9";
                let said = Run::new(client, ops).succeeds(lab)?;
                let old: Vec<_> = said.sent().iter().filter_map(|sent| sent["old"].as_str().map(str::to_owned)).collect();
                ensure!(
                    old == [
                        "1111111111111111",
                        "1111111111111116",
                        "1111111211111116",
                        "0000000000000009",
                        "0000000000000009"
                    ],
                    "{old:?}"
                );
                let imms: Vec<_> = said.received().iter().filter_map(|received| received["imm"].as_u64()).collect();
                ensure!(imms == [0x1122_3344, 0xdead_beef, 0x1234, 0xc0_ffee], "{imms:x?}");
                ensure!(said.server.event("closed")?["words"][0] == "0000000000000009", "{}", said.server.tail());
                Ok(())
            })
        }));
        all.push(Case::new(
            format!("rxe::operations::events_ipv6_{name}"),
            Needs::rxe(1500),
            move |lab| {
                checked(lab, |lab| {
                    let mut run =
                        Run::new(client, "send:1000 write:5000 check read:5000 burst:8:300").ipv6();
                    match client {
                        Client::Guest => run.options = "--events".into(),
                        Client::Ours => run.server = "--events".into(),
                    }
                    run.succeeds(lab).map(drop)
                })
            },
        ));
        all.push(Case::new(
            format!("rxe::operations::invalidate_{name}"),
            Needs::rxe(1500),
            move |lab| {
                checked(lab, |lab| {
                    let run = Run::new(client, "sleep:200 write2:10 sendinv:5 write2:10")
                        .server("--window");
                    let took = run.fails(lab, "REM_ACCESS_ERR")?.received();
                    // rxe does not tell its program which key is gone.
                    let told = took.len() == 1
                        && (client == Client::Ours || took[0]["invalidated"].is_u64());
                    ensure!(told, "{took:?}");
                    Ok(())
                })
            },
        ));
    }
    all
}

/// Errors on purpose: the right NAK, and the right completions.
fn errors() -> Vec<Case> {
    // Name, options of the server, of the client, operations, the status at the client, the syndrome of rxe and of
    // ours.
    type Error =
        (&'static str, &'static str, &'static str, &'static str, &'static str, [Syndrome; 2]);
    const ACCESS: [Syndrome; 2] = [Syndrome::Nak(NakCode::REMOTE_ACCESS); 2];
    // rxe leaves min_rnr_timer as rdma_cm does: at 0, 655 ms. Ours is 12.
    const NOT_READY: [Syndrome; 2] = [Syndrome::RnrNak(0), Syndrome::RnrNak(12)];
    let errors: [Error; 9] = [
        ("rkey_write", "", "", "send:5 badwrite:100", "REM_ACCESS_ERR", ACCESS),
        ("rkey_read", "", "", "send:5 badread:100", "REM_ACCESS_ERR", ACCESS),
        ("rkey_atomic", "", "", "send:5 badfaa:1", "REM_ACCESS_ERR", ACCESS),
        ("bounds_write", "", "", "write:5 oobwrite:4000", "REM_ACCESS_ERR", ACCESS),
        ("bounds_read", "", "", "read:5 oobread:4000", "REM_ACCESS_ERR", ACCESS),
        (
            "receive_too_small",
            "--receive-size 1000",
            "",
            "send:500 send:3000",
            "rxe differs",
            [Syndrome::Nak(NakCode::REMOTE_OPERATIONAL), Syndrome::Nak(NakCode::INVALID_REQUEST)],
        ),
        ("receives_late", "--receive-late 900", "", "send:10 send:20", "SUCCESS", NOT_READY),
        (
            "receives_never",
            "--receive-late never --rnr-retry 1",
            "--rnr-retry 1",
            "send:10",
            "RNR_RETRY_EXC_ERR",
            NOT_READY,
        ),
        ("receives_in_time", "", "", "send:10 send:20", "SUCCESS", [Syndrome::ACK; 2]),
    ];
    let mut all = Vec::new();
    for client in Client::BOTH {
        for (name, server, options, ops, status, syndromes) in errors {
            let case = format!("rxe::errors::{name}_{}", client.name());
            all.push(Case::new(case, Needs::rxe(1500), move |lab| {
                checked(lab, |lab| {
                    let run = Run::new(client, ops).server(server).options(options);
                    let ours = client == Client::Ours;
                    let said = match (status, ours) {
                        ("SUCCESS", _) => run.succeeds(lab)?,
                        ("rxe differs", true) => run.fails(lab, "REM_OP_ERR")?,
                        ("rxe differs", false) => run.fails(lab, "REM_INV_REQ_ERR")?,
                        _ => run.fails(lab, status)?,
                    };
                    let failed: &[_] = match (name, ours) {
                        ("receive_too_small", true) => &["LOC_QP_OP_ERR"],
                        ("receive_too_small", false) => &["LOC_LEN_ERR"],
                        _ => &[],
                    };
                    said.server_failed_with(failed)?;
                    let from = if ours { lab.peer(false) } else { lab.host(false) };
                    let want = syndromes[usize::from(!ours)];
                    let found = wire::syndromes(&lab.wire()?, from);
                    ensure!(found.contains(&want), "no {want:?} of {from}: {found:?}");
                    let naks =
                        found.iter().filter(|found| !matches!(found, Syndrome::Ack(_))).count();
                    ensure!(naks > 0 || matches!(want, Syndrome::Ack(_)), "{found:?}");
                    Ok(())
                })
            }));
        }
    }
    all
}

/// Connecting, many times, through loss, and not.
fn connections() -> Vec<Case> {
    let mut all = Vec::new();
    for client in Client::BOTH {
        let name = client.name();
        all.push(Case::new(format!("rxe::connect::fifty_{name}"), Needs::rxe(1500), move |lab| {
            checked(lab, |lab| {
                let said = Run::new(client, "send:10 write:100 check")
                    .server("--connections 50 --receives 4 --receive-size 4096")
                    .options("--connections 50 --receives 4 --receive-size 4096")
                    .succeeds(lab)?;
                ensure!(said.received().len() == 50, "{} messages arrived", said.received().len());
                Ok(())
            })
        }));
        all.push(Case::new(
            format!("rxe::connect::private_data_{name}"),
            Needs::rxe(1500),
            move |lab| {
                let said =
                    Run::new(client, "send:10").options("--private who-asks").succeeds(lab)?;
                ensure!(
                    said.server.event("request")?["private"] == "who-asks",
                    "{}",
                    said.server.tail()
                );
                Ok(())
            },
        ));
        all.push(Case::new(format!("rxe::connect::reject_{name}"), Needs::rxe(1500), move |lab| {
            let said = Run::new(client, "send:10").server("--reject not-today").run(lab)?;
            said.client.ended_with(3)?.says("not-today")?;
            said.server.success()?;
            wire::refused_with(&lab.wire()?, b"not-today")
        }));
        // Lost and doubled messages of the connection manager.
        let case = format!("rxe::connect::through_loss_{name}");
        all.push(Case::new(case, Needs::rxe(1500), move |lab| through_loss(lab, client)));
    }
    all
}

/// Connections through a network that loses and doubles, until it has done both in either direction, and messages
/// of the connection manager were sent again because of it.
fn through_loss(lab: &Lab, client: Client) -> Result<()> {
    const EFFECTS: [Effect; 2] = [Effect::Lost, Effect::Duplicated];
    let network = lab.impair("loss 12% duplicate 30%")?;
    let mut last = Ok(());
    for _ in 0..8 {
        lab.extend(Duration::from_secs(90));
        Run::new(client, "send:10")
            .server("--connections 3 --receives 4 --receive-size 4096")
            .options("--connections 3 --receives 4 --receive-size 4096")
            .succeeds(lab)?;
        last = network.was_met(&EFFECTS);
        if last.is_ok() && wire::resent_mads(&lab.wire()?) > 0 {
            return Ok(());
        }
    }
    last?;
    bail!("no message of the connection manager was sent again")
}

/// librdmacm's ucmatose, and udaddy, which finds a service for datagrams (SIDR).
fn examples() -> Vec<Case> {
    let plain = || Needs::rxe(1500);
    vec![
        Case::new("rxe::ucmatose::client", plain(), |lab| {
            checked(lab, |lab| {
                let host = lab.host(false);
                let args =
                    format!("cmatose listen {host} 7471 --transport roce --messages 5 --size 200");
                let mut server = lab.ours_spawn(Program::Peer, &traffic::words(&args))?;
                server.expect("listening", Duration::from_secs(10))?;
                lab.guest(&format!("ucmatose -s {host} -C 5 -S 200 -c 1"))?
                    .success()?
                    .says("return status 0")?;
                lab.end_of(server)?.success().map(drop)
            })
        }),
        Case::new("rxe::ucmatose::server", plain(), |lab| {
            checked(lab, |lab| {
                let (host, guest) = (lab.host(false), lab.peer(false));
                let args = format!(
                    "cmatose connect {guest} 7471 --transport roce --from {host} --messages 5 --size 200"
                );
                let ((), theirs) =
                    lab.guest_beside(&format!("ucmatose -b {guest} -C 5 -S 200 -c 1"), |_| {
                        lab.guest_listens(7471)?;
                        lab.ours(Program::Peer, &traffic::words(&args))?.success()?;
                        Ok(())
                    })?;
                theirs.success()?.says("return status 0").map(drop)
            })
        }),
        Case::new("rxe::udaddy::client", plain(), |lab| {
            checked(lab, |lab| {
                let host = lab.host(false);
                let args =
                    format!("udaddy listen {host} 7174 --transport roce --messages 5 --size 100");
                let mut server = lab.ours_spawn(Program::Peer, &traffic::words(&args))?;
                server.expect("listening", Duration::from_secs(10))?;
                lab.guest(&format!("udaddy -s {host} -C 5 -S 100 -c 1"))?
                    .success()?
                    .says("return status 0")?;
                lab.end_of(server)?.success().map(drop)
            })
        }),
        Case::new("rxe::udaddy::server", plain(), |lab| {
            checked(lab, |lab| {
                let (host, guest) = (lab.host(false), lab.peer(false));
                let args = format!(
                    "udaddy connect {guest} 7174 --transport roce --from {host} --messages 5 --size 100"
                );
                let ((), theirs) =
                    lab.guest_beside(&format!("udaddy -b {guest} -C 5 -S 100 -c 1"), |_| {
                        lab.guest_listens(7174)?;
                        lab.ours(Program::Peer, &traffic::words(&args))?.success()?;
                        Ok(())
                    })?;
                theirs.success()?.says("return status 0").map(drop)
            })
        }),
    ]
}

/// What a network does: contents are compared on both sides.
fn networks() -> Vec<Case> {
    let mut all = Vec::new();
    for client in Client::BOTH {
        let big = "--memory 20971520";
        for (name, what, effects, ops) in [
            (
                "loss_and_duplicates",
                "loss 1% duplicate 1%",
                &[Effect::Lost, Effect::Duplicated][..],
                "write:8388608 check read:8388608",
            ),
            (
                "reorder",
                "delay 1ms reorder 95%",
                &[Effect::Reordered],
                "write:1048576 check read:1048576",
            ),
        ] {
            let case = format!("rxe::network::{name}_{}", client.name());
            all.push(Case::new(case, Needs::rxe(1500), move |lab| {
                let network = lab.impair(what)?;
                Run::new(client, ops).server(big).options(big).succeeds(lab)?;
                wire::ack_timeout_is(&lab.wire()?, ack_timeout(client))?;
                network.was_met(effects)
            }));
        }
    }
    all
}
