//! How a connection ends on real sockets, and what is left of it then.

mod common;

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    thread,
};

use common::*;
use userdma::{
    Access, CloseReason, DeviceOptions, Error, MpaOptions, PostError, QpInit, QpState, RecvWr,
    Region, RemoteAddr, SendOp, SendWr, Sge, StartupError, WcStatus,
};

/// A listener of the test's own, and the address to connect to.
fn stranger() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    (listener, addr)
}

/// Takes an enhanced request without private data, and accepts it without CRC.
fn start_up(listener: &TcpListener) -> TcpStream {
    let (mut stream, _) = listener.accept().unwrap();
    let mut request = [0; 24];
    stream.read_exact(&mut request).unwrap();
    assert_eq!(request[16], 0x10, "S, and no C");
    stream.write_all(b"MPA ID Rep Frame\x10\x02\x00\x04\x00\x10\x00\x10").unwrap();
    stream
}

/// The octets behind a bad message of ours are never read by a peer that terminates at once: its
/// RST follows its Terminate, and a write of ours may meet it first.
#[tokio::test]
async fn a_terminate_is_read_though_the_peer_has_reset() {
    let (listener, addr) = stranger();
    let (go, gone) = (mpsc::channel(), mpsc::channel());
    let peer = thread::spawn(move || {
        let mut stream = start_up(&listener);
        go.1.recv().unwrap();
        // DDP untagged, no buffer available: 1/2/02.
        let mut fpdu = vec![0, 22, 0x41, 0x47];
        fpdu.extend([0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0]);
        fpdu.extend([0x12, 0x02, 0, 0, 0, 0, 0, 0]);
        stream.write_all(&fpdu[..]).unwrap();
        // Octets of ours are unread, so this resets.
        stream.peek(&mut [0]).unwrap();
        drop(stream);
        gone.0.send(()).unwrap();
    });
    let device = quick().open("tcp://127.0.0.1").unwrap();
    let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(64).unwrap());
    let mpa = MpaOptions { crc: false, ..MpaOptions::default() };
    let qp = device.connect(&addr, &pd, QpInit { mpa, ..QpInit::new(&cq) }, b"").await.unwrap();
    qp.post_send(SendWr::inline(1, SendOp::Send, b"nobody takes it")).unwrap();
    go.0.send(()).unwrap();
    gone.1.recv().unwrap();
    // The runtime's only thread was here all the time: nobody has looked at the socket since.
    qp.post_send(SendWr::inline(2, SendOp::Send, b"too late")).unwrap();
    let reason = tokio::time::timeout(LONG, qp.closed()).await.unwrap();
    assert!(matches!(reason, CloseReason::TerminateReceived(_)), "{reason:?}");
    peer.join().unwrap();
}

/// A program drops a queue pair as soon as it sees that it has failed; more than the sockets hold is
/// still to be said then, and the Terminate comes last.
#[tokio::test]
async fn dropping_a_failed_queue_pair_does_not_cut_its_terminate_off() {
    let (listener, addr) = stranger();
    let (go, dropped) = (mpsc::channel(), mpsc::channel());
    let peer = thread::spawn(move || {
        let mut stream = start_up(&listener);
        go.1.recv().unwrap();
        // An empty SEND, for which there is no receive.
        stream.write_all(&[0, 18, 0x41, 0x43, 0, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        stream.write_all(&[0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        dropped.1.recv().unwrap();
        let mut octets = Vec::new();
        stream.read_to_end(&mut octets).map(|_| octets)
    });
    let options = DeviceOptions { send_buffer: Some(64 << 10), ..quick() };
    let device = options.open("tcp://127.0.0.1").unwrap();
    let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(64).unwrap());
    let mpa = MpaOptions { crc: false, ..MpaOptions::default() };
    let qp = device.connect(&addr, &pd, QpInit { mpa, ..QpInit::new(&cq) }, b"").await.unwrap();
    let mr = pd.register(Region::alloc(32 << 20).unwrap(), Access::empty()).unwrap();
    qp.post_send(SendWr::write(1, [mr.slice(0..32 << 20)], RemoteAddr::default())).unwrap();
    go.0.send(()).unwrap();
    while qp.state() != QpState::Err {
        tokio::task::yield_now().await;
    }
    drop(qp);
    dropped.0.send(()).unwrap();
    let octets = tokio::task::spawn_blocking(|| peer.join().unwrap()).await.unwrap();
    let octets = octets.expect("FIN, and no RST");
    assert!(octets.len() < 32 << 20, "the WRITE was cut short");
    let terminate = &octets[octets.len() - 48..];
    assert_eq!(terminate[..4], [0, 42, 0x41, 0x47], "a Terminate");
    assert_eq!(terminate[20..22], [0x12, 0x02], "no buffer available");
    let wc = tokio::time::timeout(LONG, cq.next()).await.unwrap().unwrap();
    assert_eq!(wc.status, WcStatus::WR_FLUSH_ERR);
}

#[tokio::test]
async fn a_receive_that_no_message_fills_is_refused_in_every_state() {
    let (a, b) = pair().await;
    let huge = || RecvWr::new(1, [Sge { length: u32::MAX, ..Sge::default() }; 2]);
    let fresh = a.pd.create_qp(QpInit::new(&a.cq)).unwrap();
    for qp in [&a.qp, &fresh] {
        let refused = qp.post_recv(huge());
        assert!(matches!(refused, Err(PostError::TooLong { .. })), "{refused:?}");
    }
    drop(b);
}

/// A peer that takes one connection and closes it: revision 1 is tried where it may help, and what is
/// told is the silent close.
#[tokio::test]
async fn a_silent_close_is_told_as_such() {
    for peer_to_peer in [false, true] {
        let (listener, addr) = stranger();
        let peer = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_exact(&mut [0; 24]).unwrap();
            drop(listener);
        });
        let device = quick().open("tcp://127.0.0.1").unwrap();
        let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(64).unwrap());
        let mpa = MpaOptions { peer_to_peer, ..MpaOptions::default() };
        let init = QpInit { mpa, ..QpInit::new(&cq) };
        let e = device.connect(&addr, &pd, init, b"").await.unwrap_err();
        assert!(
            matches!(e, Error::Startup { source: StartupError::ClosedSilently, .. }),
            "{peer_to_peer}: {e:?}"
        );
        peer.join().unwrap();
    }
}

/// The device's runtime goes, the program stays: nobody would ever watch the socket again.
#[test]
fn the_end_of_the_runtime_ends_its_connections() {
    let new = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (outer, inner) = (new(), new());
    let options = DeviceOptions { runtime: Some(inner.handle().clone()), ..quick() };
    let (a, b) = inner.block_on(pair_with("127.0.0.1", options, |_| {}));
    drop(inner);
    for side in [a, b] {
        assert_eq!(side.qp.state(), QpState::Err);
        let got = outer.block_on(async {
            tokio::time::timeout(LONG, side.qp.recv_lent(vec![0; 8])).await.expect("no hang").1
        });
        assert!(matches!(got, Err(Error::Wc { .. })), "{got:?}");
        let reason = outer.block_on(async { tokio::time::timeout(LONG, side.qp.closed()).await });
        assert_eq!(reason.unwrap(), CloseReason::Lost);
    }
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Connections that ended in every way leave neither descriptors nor regions.
#[tokio::test]
async fn what_ended_leaves_nothing() {
    let (device, listener, addr) = listening("127.0.0.1", quick()).await;
    let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(64).unwrap());
    let before = open_files();
    for round in 0..60 {
        let accept = async {
            let request = listener.accept().await.unwrap();
            if round % 5 == 4 {
                return None;
            }
            Some(request.accept(&pd, QpInit::new(&cq), b"").await.unwrap())
        };
        let connect = device.connect(&addr, &pd, QpInit::new(&cq), b"");
        let (client, server) = tokio::join!(connect, accept);
        let (Ok(client), Some(server)) = (client, server) else { continue };
        match round % 5 {
            0 => assert_eq!(client.disconnect().await, CloseReason::Graceful),
            1 => drop(client),
            2 => {
                // A SEND without a receive: a Terminate.
                let _ = client.send_lent(vec![1; 8]).await;
            }
            _ => {
                let (got, sent) =
                    tokio::join!(server.recv_lent(vec![0; 8]), client.send_lent(vec![1; 8]));
                assert!(got.1.is_ok() && sent.1.is_ok());
                server.abort();
            }
        }
        tokio::time::timeout(LONG, server.closed()).await.expect("it ends");
    }
    // The tasks let go of their sockets when they run next.
    let patient = async {
        while open_files() > before {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(LONG, patient).await.expect("descriptors are closed");
    assert_eq!(pd.table().regions(), 0);
}
