//! Two connected queue pairs, and how to wait for their completions.
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::time::{Duration, Instant};

use userdma::{
    Access, Cq, Device, DeviceOptions, Listener, Mr, Pd, Qp, QpInit, RecvWr, Region, SendWr, Wc,
};

/// Longer than anything here takes on a busy machine; a test that comes so far has failed.
pub(crate) const LONG: Duration = Duration::from_secs(30);

/// All rights.
pub(crate) fn all() -> Access {
    Access::LOCAL_WRITE
        | Access::REMOTE_WRITE
        | Access::REMOTE_READ
        | Access::REMOTE_ATOMIC
        | Access::REMOTE_INVALIDATE
}

/// One end of a connection.
pub(crate) struct Side {
    pub(crate) device: Device,
    pub(crate) pd: Pd,
    pub(crate) cq: Cq,
    pub(crate) qp: Qp,
}

impl Side {
    /// `len` octets with all rights, filled with a pattern that starts at `seed`.
    pub(crate) fn mr(&self, len: usize, seed: u8) -> Mr {
        let mr = self.pd.register(Region::alloc(len).unwrap(), all()).unwrap();
        mr.write_at(0, &pattern(len, seed)).unwrap();
        mr
    }

    /// The next completion.
    pub(crate) async fn wc(&self) -> Wc {
        tokio::time::timeout(LONG, self.cq.next()).await.expect("a completion in time").unwrap()
    }

    /// The next completion, which must be a success of `id`.
    pub(crate) async fn done(&self, id: u64) -> Wc {
        let wc = self.wc().await;
        assert!(wc.status.is_ok(), "{wc:?}");
        assert_eq!(wc.id, id, "{wc:?}");
        assert_eq!(wc.qpn, self.qp.qpn());
        wc
    }

    /// Posts and waits until it is done.
    pub(crate) async fn post(&self, wr: SendWr) -> Wc {
        let id = wr.id;
        self.qp.post_send(wr).unwrap();
        self.done(id).await
    }
}

/// Polls until there is a completion.
pub(crate) fn spin(cq: &Cq) -> Wc {
    let began = Instant::now();
    let mut wc = [Wc::default()];
    while cq.poll(&mut wc) == 0 {
        assert!(began.elapsed() < LONG, "a completion in time");
    }
    wc[0]
}

/// Octets that differ from their neighbours for a long way.
pub(crate) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8).wrapping_add(seed))
        .collect()
}

/// What lies at `offset` of a region.
pub(crate) fn octets(mr: &Mr, offset: usize, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    mr.read_at(offset, &mut out).unwrap();
    out
}

/// The options of most tests.
pub(crate) fn quick() -> DeviceOptions {
    DeviceOptions::default()
}

/// A device at `host` and a listener at a free port of it.
pub(crate) async fn listening(host: &str, options: DeviceOptions) -> (Device, Listener, String) {
    let device = options.open(&format!("tcp://{host}:0")).unwrap();
    let listener = device.listen(None).await.unwrap();
    let addr = listener.local_addr().to_string();
    (device, listener, addr)
}

/// A queue pair of `here` that connects to `addr`, and the one of `there` that its listener makes.
async fn connected(
    here: &Device,
    there: &Device,
    listener: &Listener,
    addr: &str,
    settings: impl Fn(&mut QpInit),
) -> (Side, Side) {
    let parts = |device: &Device| {
        let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(1024).unwrap());
        let mut init = QpInit::new(&cq);
        settings(&mut init);
        (pd, cq, init)
    };
    let responder = async {
        let (pd, cq, init) = parts(there);
        let request = listener.accept().await.unwrap();
        let qp = request.accept(&pd, init, b"").await.unwrap();
        Side { device: there.clone(), pd, cq, qp }
    };
    let initiator = async {
        let (pd, cq, init) = parts(here);
        let qp = here.connect(addr, &pd, init, b"").await.unwrap();
        Side { device: here.clone(), pd, cq, qp }
    };
    tokio::join!(initiator, responder)
}

/// Two connected queue pairs: the initiator and the responder. `settings` adapts the defaults.
pub(crate) async fn pair_with(
    host: &str,
    options: DeviceOptions,
    settings: impl Fn(&mut QpInit),
) -> (Side, Side) {
    let (device, listener, addr) = listening(host, options.clone()).await;
    let here = options.open(&format!("tcp://{host}:0")).unwrap();
    connected(&here, &device, &listener, &addr, settings).await
}

/// Two connected queue pairs on IPv4 with the defaults.
pub(crate) async fn pair() -> (Side, Side) {
    pair_with("127.0.0.1", quick(), |_| {}).await
}

/// A SEND from `from` to `to` that carries nothing: what was posted before it has arrived then.
pub(crate) async fn barrier(from: &Side, to: &Side) {
    to.qp.post_recv(RecvWr::new(u64::MAX, [])).unwrap();
    from.post(SendWr::send(u64::MAX - 1, [])).await;
    to.done(u64::MAX).await;
}

/// A device at a free UDP port of `host` whose peers are at the port of `peer`.
pub(crate) fn toward(peer: &Device, host: &str, mut options: DeviceOptions) -> Device {
    options.roce.peer_udp_port = peer.udp_addr().unwrap().port();
    options.open(&format!("udp://{host}:0")).unwrap()
}

/// Two connected queue pairs over UDP, each device at a port of its own.
pub(crate) async fn roce_pair_with(
    host: &str,
    options: [DeviceOptions; 2],
    settings: impl Fn(&mut QpInit),
) -> (Side, Side) {
    let [initiating, responding] = options;
    let device = responding.open(&format!("udp://{host}:0")).unwrap();
    let listener = device.listen(Some(0)).await.unwrap();
    let here = toward(&device, host, initiating);
    let addr = listener.local_addr().to_string();
    connected(&here, &device, &listener, &addr, settings).await
}

/// Two connected queue pairs over UDP on IPv4 with the defaults.
pub(crate) async fn roce_pair() -> (Side, Side) {
    roce_pair_with("127.0.0.1", [quick(), quick()], |_| {}).await
}
