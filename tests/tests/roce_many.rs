//! Many queue pairs behind one socket, and what is left of them when they are gone.

mod common;

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use common::*;
use tokio::{runtime::Builder, sync::Semaphore, task::JoinSet};
use userdma::{
    CloseReason, Device, DeviceOptions, Mr, Pd, Qp, QpInit, QpType, Region, SendOp, SendWr,
};

/// These tests look at the whole process: one begins when the runtime of the one before, with all that its tasks
/// held, is gone.
fn alone(mut runtime: Builder, test: impl Future<Output = ()>) {
    let _alone = one_at_a_time();
    let runtime = runtime.enable_all().build().unwrap();
    runtime.block_on(test);
    drop(runtime);
}

fn one_at_a_time() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn two_workers() -> Builder {
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(2);
    builder
}

/// How many UDP sockets this process has open.
fn sockets() -> usize {
    let mut inodes = HashSet::new();
    for family in ["udp", "udp6"] {
        let table = std::fs::read_to_string(format!("/proc/self/net/{family}")).unwrap_or_default();
        let lines = table.lines().skip(1);
        inodes.extend(lines.filter_map(|line| Some(line.split_whitespace().nth(9)?.to_owned())));
    }
    let files = std::fs::read_dir("/proc/self/fd").unwrap();
    let links = files.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
    links
        .filter_map(|link| {
            let inode = link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
            inodes.contains(inode).then_some(())
        })
        .count()
}

/// The processor time that this process has used.
fn processor_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    // Behind the name, which may have anything in it: utime and stime, in hundredths of a second.
    let fields: Vec<_> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    Duration::from_millis(10 * ticks)
}

/// Until `done` says so.
async fn until(mut done: impl FnMut() -> bool, what: &str) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < LONG, "{what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

fn a_device(peer: Option<&Device>) -> (Device, Pd) {
    let device = match peer {
        Some(peer) => toward(peer, "127.0.0.1", quick()),
        None => quick().open("udp://127.0.0.1:0").unwrap(),
    };
    let pd = device.alloc_pd().unwrap();
    (device, pd)
}

fn memory(pd: &Pd, len: usize) -> Mr {
    pd.register(Region::alloc(len).unwrap(), all()).unwrap()
}

const MANY: usize = 2000;
/// How many are being connected, or work, at a time.
const AT_A_TIME: usize = 64;

/// One message there and back, a word written, the same word read.
async fn exchange(index: usize, qp: &Qp, peer: &Qp, places: &(Mr, Mr)) {
    let (own, target) = places;
    let word = (index as u64 + 1).to_ne_bytes();
    let answer = async {
        let (question, wc) = peer.recv_lent(vec![0; 16]).await;
        wc.unwrap();
        peer.send_lent(question).await.1.unwrap();
    };
    let ask = async {
        let ((got, wc), (_, sent)) =
            tokio::join!(qp.recv_lent(vec![0; 16]), qp.send_lent(word.to_vec()));
        wc.unwrap();
        sent.unwrap();
        assert_eq!(got, word);
        let at = 8 * index;
        own.write_at(at, &word).unwrap();
        qp.write(own.slice(at..at + 8), target.remote(at)).await.unwrap();
        own.write_at(at, &[0; 8]).unwrap();
        qp.read(own.slice(at..at + 8), target.remote(at)).await.unwrap();
        assert_eq!(octets(own, at, 8), word);
    };
    tokio::join!(answer, ask);
}

/// As many who send as hard as they can toward one socket: it holds what all of them have on the way.
#[test]
fn many_senders_do_not_overrun_one_socket() {
    alone(two_workers(), many_senders());
}

async fn many_senders() {
    const LEN: usize = 1 << 20;
    let (there, there_pd) = a_device(None);
    let listener = there.listen(Some(0)).await.unwrap();
    let addr = listener.local_addr().to_string();
    let cq = there.create_cq(64).unwrap();
    let mut senders = Vec::new();
    for _ in 0..8 {
        let (here, pd) = a_device(Some(&there));
        let own = here.create_cq(64).unwrap();
        let (answer, qp) = tokio::join!(
            async {
                let request = listener.accept().await.unwrap();
                request.accept(&there_pd, QpInit::new(&cq), b"").await.unwrap()
            },
            here.connect(&addr, &pd, QpInit::new(&own), b""),
        );
        senders.push((here, pd, own, qp.unwrap(), answer, memory(&there_pd, LEN)));
    }
    let mut work = JoinSet::new();
    for (here, pd, _, qp, _, target) in &senders {
        let (here, qp, source, to) = (here.clone(), qp.clone(), memory(pd, LEN), target.remote(0));
        work.spawn(async move {
            let write = || qp.write(source.slice(0..LEN), to);
            for _ in 0..16 {
                let done = tokio::join!(write(), write(), write(), write());
                assert!([done.0, done.1, done.2, done.3].iter().all(Result::is_ok));
            }
            here
        });
    }
    // The device is there as long as its work.
    while let Some(here) = work.join_next().await {
        drop(here.unwrap());
    }
    assert_eq!(there.roce_stats().unwrap().udp.overflows, 0);
}

#[test]
fn two_thousand_queue_pairs_on_one_socket() {
    alone(two_workers(), two_thousand());
}

async fn two_thousand() {
    let (before, began) = (sockets(), Instant::now());
    let (there, there_pd) = a_device(None);
    let (here, here_pd) = a_device(Some(&there));
    let listener = Arc::new(there.listen(Some(0)).await.unwrap());
    let addr = listener.local_addr().to_string();
    let there_cq = there.create_cq(64).unwrap();
    let here_cq = here.create_cq(64).unwrap();

    // The requests may come in another order than they are taken: each says which one it is.
    let serving = {
        let (pd, cq, listener) = (there_pd.clone(), there_cq.clone(), listener.clone());
        tokio::spawn(async move {
            let mut peers: Vec<Option<Qp>> = vec![None; MANY];
            for _ in 0..MANY {
                let request = listener.accept().await.unwrap();
                let (index, _) = request.private_data().split_first_chunk().unwrap();
                let index = u64::from_be_bytes(*index) as usize;
                let qp = request.accept(&pd, QpInit::new(&cq), b"").await.unwrap();
                assert!(peers[index].replace(qp).is_none());
            }
            peers
        })
    };
    let room = Arc::new(Semaphore::new(AT_A_TIME));
    let mut connecting = JoinSet::new();
    for index in 0..MANY {
        let (device, pd, cq) = (here.clone(), here_pd.clone(), here_cq.clone());
        let (addr, room) = (addr.clone(), room.clone());
        connecting.spawn(async move {
            let _place = room.acquire().await.unwrap();
            let data = (index as u64).to_be_bytes();
            let qp = device.connect(&addr, &pd, QpInit::new(&cq), &data).await.unwrap();
            (index, qp)
        });
    }
    let mut qps: Vec<Option<Qp>> = vec![None; MANY];
    while let Some(connected) = connecting.join_next().await {
        let (index, qp) = connected.unwrap();
        qps[index] = Some(qp);
    }
    let peers: Vec<Qp> = serving.await.unwrap().into_iter().map(Option::unwrap).collect();
    let qps: Vec<Qp> = qps.into_iter().map(Option::unwrap).collect();
    assert_eq!(sockets(), before + 2, "one for all of each side");
    println!("connected after {:?}", began.elapsed());

    let places = Arc::new((memory(&here_pd, 8 * MANY), memory(&there_pd, 8 * MANY)));
    let mut working = JoinSet::new();
    for (index, (qp, peer)) in qps.iter().cloned().zip(peers.iter().cloned()).enumerate() {
        let (places, room) = (places.clone(), room.clone());
        working.spawn(async move {
            let _place = room.acquire().await.unwrap();
            exchange(index, &qp, &peer, &places).await;
        });
    }
    while let Some(worked) = working.join_next().await {
        worked.unwrap();
    }
    for index in 0..MANY {
        let there = octets(&places.1, 8 * index, 8);
        assert_eq!(there, (index as u64 + 1).to_ne_bytes(), "queue pair {index}");
    }
    println!("worked after {:?}", began.elapsed());

    // Those that have nothing to do cost nothing.
    tokio::time::sleep(Duration::from_millis(50)).await;
    let used = processor_time();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let used = processor_time() - used;
    assert!(used <= Duration::from_millis(50), "{used:?} in a second of doing nothing");

    // All end: in order, by an abort, and by being dropped.
    let mut ending = JoinSet::new();
    for (index, (qp, peer)) in qps.into_iter().zip(peers).enumerate() {
        let room = room.clone();
        ending.spawn(async move {
            let _place = room.acquire().await.unwrap();
            match index % 3 {
                0 => assert_eq!(qp.disconnect().await, CloseReason::Graceful),
                1 => qp.abort(),
                _ => drop(qp),
            }
            let end = tokio::time::timeout(LONG, peer.closed()).await.expect("it ends");
            assert_eq!(end, CloseReason::Graceful);
        });
    }
    while let Some(ended) = ending.join_next().await {
        ended.unwrap();
    }
    println!("ended after {:?}", began.elapsed());
    for device in [&here, &there] {
        let stats = device.roce_stats().unwrap();
        assert_eq!((stats.port.unroutable, stats.cm.overflowed, stats.trouble), (0, 0, None));
        assert_eq!(device.stats().connections, MANY as u64);
    }
    drop((here, there, here_pd, there_pd, listener, here_cq, there_cq, places));
    until(|| sockets() == before, "the sockets are closed").await;
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
}

/// One connection that ends in the way `round` says.
async fn a_connection(
    round: usize,
    here: &Device,
    there: &Device,
    addr: &str,
    listener: &userdma::Listener,
) {
    let [a, b] =
        [here, there].map(|device| (device.alloc_pd().unwrap(), device.create_cq(64).unwrap()));
    // Nothing waits for what is over.
    let close_timeout = Duration::from_secs(600);
    let init = |cq| QpInit { close_timeout, ..QpInit::new(cq) };
    let accept = async {
        let request = listener.accept().await.unwrap();
        match round % 8 {
            0 => None,
            1 => {
                request.reject(b"no").await.unwrap();
                None
            }
            _ => Some(request.accept(&b.0, init(&b.1), b"").await.unwrap()),
        }
    };
    let connect = here.connect(addr, &a.0, init(&a.1), b"");
    let (client, server) = tokio::join!(connect, accept);
    let (Ok(client), Some(server)) = (client, server) else { return };
    match round % 8 {
        2 => assert_eq!(client.disconnect().await, CloseReason::Graceful),
        3 => drop(client),
        4 => {
            // A key that nobody has: a NAK.
            let wrong = userdma::RemoteAddr::new(0, userdma::RKey(0xdead_beef));
            let write = SendWr::inline(0, SendOp::Write(wrong), b"octets");
            client.submit(write).await.unwrap_err();
        }
        5 => {
            // Dropped while a message waits for a receive, and one for a message.
            let waiting = client.send_lent(vec![1; 8]);
            let receiving = client.recv_lent(vec![0; 8]);
            let both = async { tokio::join!(waiting, receiving) };
            tokio::time::timeout(Duration::from_millis(1), both).await.unwrap_err();
            drop(client);
        }
        _ => {
            let (got, sent) =
                tokio::join!(server.recv_lent(vec![0; 8]), client.send_lent(vec![1; 8]));
            assert!(got.1.is_ok() && sent.1.is_ok());
            server.abort();
        }
    }
    tokio::time::timeout(LONG, server.closed()).await.expect("it ends");
    drop(server);
    until(|| a.0.table().regions() + b.0.table().regions() == 0, "lent memory is let go").await;
}

/// Devices and connections that ended in every way leave neither descriptors nor tasks.
#[test]
fn what_ended_leaves_nothing() {
    alone(Builder::new_current_thread(), what_ended());
}

async fn what_ended() {
    let metrics = tokio::runtime::Handle::current().metrics();
    let before = (sockets(), metrics.num_alive_tasks());
    let now = || (sockets(), metrics.num_alive_tasks());
    for _ in 0..3 {
        let (there, there_pd) = a_device(None);
        let (here, here_pd) = a_device(Some(&there));
        let listener = there.listen(Some(0)).await.unwrap();
        let addr = listener.local_addr().to_string();
        assert_eq!(now(), (before.0 + 2, before.1 + 2), "a socket and a task for each device");
        for round in 0..40 {
            a_connection(round, &here, &there, &addr, &listener).await;
        }
        assert_eq!(now(), (before.0 + 2, before.1 + 2), "connections need neither");
        // Some that were never connected, and one that nobody waits for any more.
        let cq = here.create_cq(8).unwrap();
        let idle = here_pd.create_qp(QpInit::new(&cq)).unwrap();
        let datagrams = here_pd.create_qp(QpInit::new(&cq).kind(QpType::Ud)).unwrap();
        datagrams.open_datagram(Default::default(), userdma::PathMtu::Mtu1024).unwrap();
        let connect = here.connect(&addr, &here_pd, QpInit::new(&cq), b"");
        tokio::time::timeout(Duration::from_millis(1), connect).await.unwrap_err();
        drop((idle, datagrams, cq, here, there, here_pd, there_pd, listener));
        until(|| now() == before, "sockets and tasks are gone").await;
    }
    // With the device's last queue pair, whatever is left of it.
    let (there, there_pd) = a_device(None);
    let cq = there.create_cq(8).unwrap();
    let qp = there_pd.create_qp(QpInit::new(&cq)).unwrap();
    drop((there, there_pd, cq));
    tokio::task::yield_now().await;
    assert_eq!(now(), (before.0 + 1, before.1 + 1), "the queue pair keeps it");
    drop(qp);
    until(|| now() == before, "and nobody else").await;
}

#[test]
fn without_a_runtime_it_says_what_to_do() {
    let _alone = one_at_a_time();
    let e = Device::open("udp://127.0.0.1:0").unwrap_err().to_string();
    assert!(e.contains("DeviceOptions::runtime"), "{e}");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let options = DeviceOptions { runtime: Some(runtime.handle().clone()), ..quick() };
    let device = options.open("udp://127.0.0.1:0").unwrap();
    // The runtime first: the device is of no more use, and harms nobody.
    drop(runtime);
    assert!(device.udp_addr().is_some());
    drop(device);
}
