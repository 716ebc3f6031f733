//! A queue pair whose time-outs double, as those of userdma's devices do.

use std::{net::SocketAddr, time::Duration};

use userdma_proto::{
    mem::{NoMemory, PdId},
    roce::{Config, PathMtu, Qp, QpAttr, Train},
    time::Instant,
    verbs::{QpState, QpType, SendOp, SendWr, WcStatus},
    wire::ids::{Psn, Qpn},
};

const TIMEOUT: Duration = Duration::from_nanos(4096 << 10);

fn in_rts(backoff: bool) -> Qp {
    let config = Config { backoff, ..Config::new(QpType::Rc, PdId(1), Qpn(0x11)) };
    let mut qp = Qp::new(config);
    let [local, peer] =
        ["192.0.2.1:4791", "192.0.2.2:4791"].map(|addr| Some(addr.parse::<SocketAddr>().unwrap()));
    let mut attr = QpAttr {
        local,
        peer,
        dest_qp: Some(Qpn(0x22)),
        path_mtu: Some(PathMtu::Mtu1024),
        rq_psn: Some(Psn::new(5)),
        sq_psn: Some(Psn::new(7)),
        timeout: Some(10),
        retry_cnt: Some(7),
        ..QpAttr::default()
    };
    for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
        qp.modify(&QpAttr { state: Some(state), ..attr }).unwrap();
        attr = QpAttr::default();
    }
    qp
}

/// How long it waits after each time that it has sent, until it gives up.
fn waits(mut qp: Qp) -> Vec<Duration> {
    let (mut now, mut train, mut waits) = (Instant::ZERO, Train::default(), Vec::new());
    qp.post_send(SendWr::inline(1, SendOp::Send, b"is anybody there?"), 0).unwrap();
    while qp.poll_transmit(now, &NoMemory, usize::MAX, &mut train) {
        let at = qp.poll_timeout().expect("it waits for the answer");
        waits.push(at.saturating_since(now));
        now = at;
        qp.handle_timeout(now);
    }
    let completion = qp.poll_completion().expect("it has given up");
    assert_eq!((completion.wc.id, completion.wc.status), (1, WcStatus::RETRY_EXC_ERR));
    waits
}

#[test]
fn a_time_out_in_vain_doubles_the_next_one() {
    let times = [1, 2, 4, 8, 16, 16, 16, 16].map(|times| TIMEOUT * times);
    assert_eq!(waits(in_rts(true)), times);
    assert_eq!(waits(in_rts(false)), [TIMEOUT; 8]);
}
