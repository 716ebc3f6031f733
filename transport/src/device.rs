//! The device: an address of this host, and what all objects on it share.

use std::{
    fmt,
    future::Future,
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use slab::Slab;
use socket2::SockRef;
use tokio::{
    net::{TcpSocket, TcpStream},
    runtime::Handle,
    task::JoinHandle,
};
use userdma_proto::{
    iwarp::{Config, Connection, Event, StartupError},
    roce::{
        PathMtu,
        port::{self, IcrcPolicy},
    },
    sim::{Impairer, Impairments},
    wire::ids::Qpn,
};

use crate::{
    capture::Tap,
    cq::Cq,
    engine::{
        Clock,
        datagram::{Engine, RoceStats, Settings},
    },
    error::{Error, Result},
    listener::Listener,
    mr::{DEFAULT_MAX_REGIONS, Table},
    net::{
        DEFAULT_PORT, HostPort, any_port, same_family,
        startup::Startup,
        tcp::TcpPort,
        udp::{ROCE_PORT, UdpOptions, UdpSocket},
    },
    pd::Pd,
    qp::{Qp, QpInit},
};

/// One address of this host, with the transport that works there. Cheap to clone. Over TCP sockets
/// exist only for its listeners and connections; over UDP there is one socket, as long as the device
/// or anything made with it.
#[derive(Clone)]
pub struct Device {
    shared: Arc<DeviceShared>,
}

/// Everything that may be set about a device before it opens:
/// `DeviceOptions { spin: Duration::ZERO, ..Default::default() }.open("tcp://[::1]")`.
#[derive(Debug, Clone)]
pub struct DeviceOptions {
    /// The runtime for the device's tasks; `None`: that of the caller of [`DeviceOptions::open`].
    pub runtime: Option<Handle>,
    /// How long an awaited operation polls before it sleeps, and how long a queue pair's task polls
    /// after it moved something: 50 µs by default. A budget below one wake-up (about 30 µs) locks
    /// both peers into waking each other; zero never spins.
    pub spin: Duration,
    /// Size in octets asked for the sockets' send buffers; `None` (the default): the system adapts
    /// it, over UDP it is 4 MiB.
    pub send_buffer: Option<usize>,
    /// Size in octets asked for the sockets' receive buffers; `None` (the default): the system
    /// adapts it, over UDP it is 4 MiB. What is really given bounds what peers may have on the way.
    pub recv_buffer: Option<usize>,
    /// Most octets read from a socket at a time, 128 KiB at least. The buffer of a connection grows
    /// to this size where its peer sends as much: 512 KiB by default.
    pub stream_buffer: usize,
    /// Queue pairs at a time: 16,384 by default, 65,536 at most.
    pub max_qps: usize,
    /// Registered regions at a time: 524,288 by default.
    pub max_regions: usize,
    /// Start-ups that one listener has under way at a time; when one more comes, the oldest is
    /// dropped, which has said nothing for longest. 1024 by default.
    pub max_startups: usize,
    /// Connection requests that one listener keeps for [`Listener::accept`]; who comes when there
    /// are as many is refused. 128 by default.
    pub backlog: usize,
    /// How long a stranger who connects may take to say what it wants: 10 s by default.
    pub startup_timeout: Duration,
    /// What a `udp://` device has besides.
    pub roce: RoceOptions,
}

/// A receive buffer that is too small for what a stranger may send in large packets: 1.1 MiB.
const SMALL_BUFFER: usize = 1_153_433;

/// What may be set about a `udp://` device:
/// `DeviceOptions { roce: RoceOptions { peer_udp_port: 4792, ..Default::default() }, .. }`.
#[derive(Debug, Clone)]
pub struct RoceOptions {
    /// The UDP port of peers, where they do not tell it themselves (userdma does): 4791 by default.
    pub peer_udp_port: u16,
    /// What becomes of packets whose ICRC is not found good: they are dropped, by default.
    pub icrc: IcrcPolicy,
    /// The largest path MTU of any connection; `None`, the default: what the route takes.
    pub mtu: Option<PathMtu>,
    /// Whether the peers are known to be userdma, so that they tell what their receive buffers take.
    /// Where they are not and our own buffer is small (under 1.1 MiB), path MTU 1024 is the most that
    /// is asked for unless one is set: a stranger keeps to no window of ours, and small packets fit
    /// better. Off by default.
    pub userdma_peers: bool,
    /// Whether packets are marked as ECN-capable, so that routers mark them instead of dropping
    /// them: on by default.
    pub ecn: bool,
    /// What is done to every packet received, between the socket and everything else: for tests.
    pub impair: Option<Impairments>,
    /// A file that gets a capture (pcapng) of all packets sent, and of all that were received and
    /// not taken away by `impair`.
    pub capture: Option<PathBuf>,
    /// Most packets that the kernel is given at once, which it cuts apart (UDP GSO): 128 by default,
    /// 1 for one by one.
    pub max_packets: usize,
}

impl Default for RoceOptions {
    fn default() -> Self {
        Self {
            peer_udp_port: ROCE_PORT,
            icrc: IcrcPolicy::Strict,
            mtu: None,
            userdma_peers: false,
            ecn: true,
            impair: None,
            capture: None,
            max_packets: UdpOptions::default().max_packets,
        }
    }
}

impl Default for DeviceOptions {
    fn default() -> Self {
        Self {
            runtime: None,
            spin: Duration::from_micros(50),
            send_buffer: None,
            recv_buffer: None,
            stream_buffer: 512 << 10,
            max_qps: 16_384,
            max_regions: DEFAULT_MAX_REGIONS,
            max_startups: 1024,
            backlog: 128,
            startup_timeout: Duration::from_secs(10),
            roce: RoceOptions::default(),
        }
    }
}

/// What a device counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct DeviceStats {
    /// Connections that came about, opened or accepted.
    pub connections: u64,
    /// TCP connections to our listeners that were closed at once: too many start-ups or requests.
    pub refused: u64,
    /// Start-ups of strangers that took too long.
    pub startup_timeouts: u64,
    /// Start-ups of strangers that were no MPA, or broke its rules.
    pub startup_malformed: u64,
    /// Start-ups of strangers who closed or reset before they were done.
    pub startup_lost: u64,
    /// Requests that were rejected, or dropped without an answer.
    pub rejected: u64,
    /// Failures of `accept(2)`, such as too many open files.
    pub accept_errors: u64,
}

/// The counters behind [`DeviceStats`].
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) connections: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) startup_timeouts: AtomicU64,
    pub(crate) startup_malformed: AtomicU64,
    pub(crate) startup_lost: AtomicU64,
    pub(crate) rejected: AtomicU64,
    pub(crate) accept_errors: AtomicU64,
}

pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// What the objects of a device share.
pub(crate) struct DeviceShared {
    host: HostPort,
    pub(crate) options: DeviceOptions,
    pub(crate) runtime: Handle,
    pub(crate) table: Arc<Table>,
    pub(crate) clock: Clock,
    pub(crate) counters: Arc<Counters>,
    /// Over UDP.
    engine: Option<Arc<Engine>>,
    numbers: Mutex<Numbers>,
    seed: u64,
    draws: AtomicU64,
}

/// Queue pair numbers: an index in the low 16 bits, and a salt above that changes with each use.
struct Numbers {
    used: Slab<()>,
    salt: u8,
}

impl Device {
    /// Opens the device at `uri` with the default options.
    ///
    /// `tcp://HOST[:PORT]` is iWARP over TCP: `tcp://10.0.0.1`, `tcp://0.0.0.0:7174`,
    /// `tcp://[::1]:0`, `tcp://[fe80::1%eth0]`, `tcp://host`. The address is where listeners listen
    /// and connections come from; with an unspecified one (`0.0.0.0`, `::`) the system chooses. No
    /// socket is made yet, and a name is looked up each time it is used.
    ///
    /// `udp://HOST[:PORT]` is RoCEv2. PORT is that of the device's UDP socket, which is bound now:
    /// 4791 where none is given, 0 for a free one. One address and port belong to one device. A
    /// name is looked up now.
    ///
    /// # Errors
    /// [`Error::BadAddress`] says what was expected, [`Error::State`] outside of a tokio runtime,
    /// [`Error::Io`] where the UDP socket cannot be had, and by whom it is taken.
    pub fn open(uri: &str) -> Result<Self> {
        DeviceOptions::default().open(uri)
    }

    /// A new protection domain.
    ///
    /// # Errors
    /// None today; a transport with a limit will say [`Error::Limit`].
    pub fn alloc_pd(&self) -> Result<Pd> {
        Ok(Pd::new(self.shared.clone()))
    }

    /// A completion queue that holds `depth` completions. More than that is an overflow, which loses
    /// nothing, and ends the queue pairs that use it ([`Cq`]).
    ///
    /// # Errors
    /// [`Error::Limit`] for a depth of 0 or above 4,194,304.
    pub fn create_cq(&self, depth: usize) -> Result<Cq> {
        if depth == 0 || depth > 1 << 22 {
            return Err(Error::Limit("a completion queue holds 1 to 4,194,304 completions"));
        }
        Ok(Cq::new(depth, self.shared.clock, self.shared.options.spin))
    }

    /// Connects a new queue pair to the listener at `peer` (`HOST[:PORT]`, port 7174 where none is
    /// given): looks the name up and tries its addresses in turn. `private_data` is shown to the
    /// peer's program.
    ///
    /// Over UDP the connection manager asks for the service of that rdma_cm port, at the peer's UDP
    /// port ([`RoceOptions::peer_udp_port`]). `private_data` has 56 octets at most there, and the
    /// peer sees zeros behind it; 12 of them are best left free, for two userdma peers to know each
    /// other.
    ///
    /// Over TCP it opens the connection and starts MPA up; 512 octets of private data at most, 508
    /// with revision 2.
    /// A peer that closes without a word is tried once more with MPA revision 1 (RFC 6581 §10).
    /// Dropping the future gives up.
    ///
    /// # Errors
    /// [`Error::BadAddress`], [`Error::Io`] where TCP did not connect, [`Error::Startup`] where MPA
    /// did not (a reject among it, with the peer's private data). Over UDP [`Error::Rejected`] and
    /// [`Error::NoAnswer`]. [`Error::rejection`] gives the private data of a rejection.
    pub async fn connect(
        &self,
        peer: &str,
        pd: &Pd,
        init: QpInit,
        private_data: &[u8],
    ) -> Result<Qp> {
        let qp = pd.create_qp(init)?;
        self.connect_qp(peer, &qp, private_data).await?;
        Ok(qp)
    }

    /// The same with a queue pair made before by [`Pd::create_qp`], so that receives are posted
    /// before the peer can send. If it fails, or the future is dropped, the queue pair is as it was
    /// before, its receives still posted.
    ///
    /// # Errors
    /// As [`Device::connect`]; [`Error::State`] where the queue pair is connected already.
    pub async fn connect_qp(&self, peer: &str, qp: &Qp, private_data: &[u8]) -> Result<()> {
        let peer = HostPort::parse(peer)?;
        if let Some(engine) = self.shared.engine() {
            let mut last = Error::State("the peer's name has no address");
            for peer in self.shared.look_up(peer).await? {
                match engine.connect(qp.shared(), peer, private_data).await {
                    Ok(()) => return Ok(()),
                    Err(e @ Error::Rejected { .. }) => return Err(e),
                    Err(e) => last = e,
                }
            }
            return Err(last);
        }
        let start = qp.begin()?;
        let dial = Dial {
            device: self.shared.clone(),
            peer,
            config: start.qp().config(),
            private_data: private_data.to_vec(),
        };
        let port = self.shared.on_runtime(dial.run()).await?;
        start.finish(Box::new(port))?;
        count(&self.shared.counters.connections);
        Ok(())
    }

    /// Listens at the device's address. `port`: `None` for that of the address (7174 where it has
    /// none), 0 for a free one. Over UDP it is the rdma_cm port, 7174 for `None`: a service behind
    /// the device's UDP socket.
    ///
    /// # Errors
    /// [`Error::Io`], which says what to do where the port is taken; over UDP [`Error::Port`].
    pub async fn listen(&self, port: Option<u16>) -> Result<Listener> {
        if self.shared.engine.is_some() {
            return Listener::over_udp(self.shared.clone(), port.unwrap_or(DEFAULT_PORT));
        }
        let port = port.or(self.shared.host.port()).unwrap_or(DEFAULT_PORT);
        let device = self.shared.clone();
        self.shared.on_runtime(Listener::bind(device, port)).await
    }

    /// What a device over UDP has.
    pub(crate) fn engine(&self) -> Result<&Arc<Engine>> {
        let missing = Error::Unsupported("only a udp:// device (RoCEv2) has datagrams");
        self.shared.engine().ok_or(missing)
    }

    pub(crate) fn random(&self) -> u64 {
        self.shared.random()
    }

    pub(crate) async fn look_up(&self, peer: HostPort) -> Result<Vec<SocketAddr>> {
        self.shared.look_up(peer).await
    }

    /// How long a stranger may take.
    pub(crate) fn patience(&self) -> Duration {
        self.shared.options.startup_timeout
    }

    /// Over UDP: the address and port of the device's socket; `None` over TCP.
    pub fn udp_addr(&self) -> Option<SocketAddr> {
        self.shared.engine().map(|engine| engine.local())
    }

    /// Over UDP: what the engine did and met; `None` over TCP.
    pub fn roce_stats(&self) -> Option<RoceStats> {
        self.shared.engine().map(|engine| engine.stats())
    }

    /// Over UDP: the largest path MTU toward `peer` that the route takes and
    /// [`RoceOptions::mtu`] allows.
    ///
    /// # Errors
    /// [`Error::BadAddress`] where there is none, [`Error::Io`] where no route leads there,
    /// [`Error::Unsupported`] over TCP.
    pub fn path_mtu(&self, peer: SocketAddr) -> Result<PathMtu> {
        match self.shared.engine() {
            Some(engine) => engine.path_mtu(peer),
            None => Err(Error::Unsupported("TCP finds the MTU of its path by itself")),
        }
    }

    /// The counters.
    pub fn stats(&self) -> DeviceStats {
        let c = &self.shared.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        DeviceStats {
            connections: read(&c.connections),
            refused: read(&c.refused),
            startup_timeouts: read(&c.startup_timeouts),
            startup_malformed: read(&c.startup_malformed),
            startup_lost: read(&c.startup_lost),
            rejected: read(&c.rejected),
            accept_errors: read(&c.accept_errors),
        }
    }
}

impl DeviceOptions {
    /// Opens the device at `uri`, as [`Device::open`] does.
    ///
    /// # Errors
    /// As [`Device::open`]; [`Error::Limit`] for options out of range.
    pub fn open(mut self, uri: &str) -> Result<Device> {
        let (scheme, host) = parse_uri(uri)?;
        if self.max_qps > 1 << 16 {
            return Err(Error::Limit("a device has 65,536 queue pairs at most"));
        }
        if self.stream_buffer < 128 << 10 {
            return Err(Error::Limit("the stream buffer has 128 KiB at least"));
        }
        let runtime = match self.runtime.take() {
            Some(handle) => handle,
            None => Handle::try_current().map_err(|_| {
                Error::State(
                    "no tokio runtime here: open the device inside of one, or set \
                     DeviceOptions::runtime",
                )
            })?,
        };
        let mut random = [0; 9];
        getrandom::fill(&mut random)
            .map_err(|e| Error::io("cannot draw random numbers", std::io::Error::other(e)))?;
        let [salt, seed @ ..] = random;
        let mut shared = DeviceShared {
            host,
            runtime,
            table: Table::with_limit(self.max_regions),
            clock: Clock::start(),
            counters: Arc::default(),
            engine: None,
            numbers: Mutex::new(Numbers { used: Slab::new(), salt }),
            seed: u64::from_ne_bytes(seed),
            draws: AtomicU64::new(0),
            options: self,
        };
        if scheme == Scheme::Udp {
            shared.engine = Some(shared.start_engine()?);
        }
        Ok(Device { shared: Arc::new(shared) })
    }
}

/// The transport of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scheme {
    Tcp,
    Udp,
}

fn parse_uri(uri: &str) -> Result<(Scheme, HostPort)> {
    let bad = |why: &str| {
        Error::BadAddress(format!(
            "{uri:?} is no device address: {why}. Expected tcp://HOST[:PORT], such as \
             tcp://0.0.0.0:7174 or tcp://[::1]:0, or udp://HOST[:PORT], such as udp://10.0.0.1"
        ))
    };
    let (scheme, rest) = uri.split_once("://").ok_or_else(|| bad("there is no ://"))?;
    let scheme = match scheme {
        "tcp" => Scheme::Tcp,
        "udp" => Scheme::Udp,
        _ => return Err(bad("the transport is unknown")),
    };
    Ok((scheme, HostPort::parse(rest.strip_suffix('/').unwrap_or(rest))?))
}

impl DeviceShared {
    /// Over UDP.
    pub(crate) fn engine(&self) -> Option<&Arc<Engine>> {
        self.engine.as_ref()
    }

    /// The socket of a `udp://` device, and what turns it.
    fn start_engine(&self) -> Result<Arc<Engine>> {
        let (options, roce) = (&self.options, &self.options.roce);
        let defaults = UdpOptions::default();
        let udp = UdpOptions {
            recv_buffer: options.recv_buffer.unwrap_or(defaults.recv_buffer),
            send_buffer: options.send_buffer.unwrap_or(defaults.send_buffer),
            max_packets: roce.max_packets,
            ..defaults
        };
        let socket = UdpSocket::bind(self.host.resolve_now(ROCE_PORT)?, &udp)?;
        let local = socket.local_addr();
        let seed = self.random();
        let cm = userdma_proto::roce::cm::Config {
            // Locally administered, as no vendor has given one.
            ca_guid: self.random() & !(0b11 << 56) | 0b10 << 56,
            peer_udp_port: roce.peer_udp_port,
            max_half_open: options.max_startups.max(1),
            disconnect_retries: 3,
            ..userdma_proto::roce::cm::Config::new(seed)
        };
        let config = port::Config {
            icrc: roce.icrc,
            max_mtu: roce.mtu.unwrap_or(PathMtu::Mtu4096),
            max_qps: options.max_qps,
            // The kernel counts more for a packet than its octets, though trains are kept together.
            window: u32::try_from(socket.recv_buffer() / 2).unwrap_or(u32::MAX).min(3 << 20),
            cm,
            ..port::Config::new(local, seed)
        };
        let settings = Settings {
            peer_udp_port: roce.peer_udp_port,
            mtu: roce.mtu,
            modest: !roce.userdma_peers && socket.recv_buffer() < SMALL_BUFFER,
            impairer: roce.impair.map(Impairer::new),
            tap: roce.capture.as_deref().map(|path| Tap::create(path, local)).transpose()?,
            table: self.table.clone(),
            clock: self.clock,
            spin: options.spin,
            runtime: self.runtime.clone(),
            counters: self.counters.clone(),
        };
        Ok(Engine::start(socket, config, settings))
    }

    /// A number for a new queue pair.
    pub(crate) fn allocate(&self) -> Result<Qpn> {
        let mut numbers = self.numbers.lock();
        if numbers.used.len() >= self.options.max_qps {
            return Err(Error::Limit("the device has as many queue pairs as it may (max_qps)"));
        }
        let index = numbers.used.insert(()) as u32;
        loop {
            numbers.salt = numbers.salt.wrapping_add(1);
            let qpn = u32::from(numbers.salt) << 16 | index;
            // 0 and 1 have a meaning of their own in InfiniBand.
            if qpn > 1 {
                return Ok(Qpn(qpn));
            }
        }
    }

    /// The number is free again.
    pub(crate) fn release(&self, qpn: Qpn) {
        self.numbers.lock().used.remove((qpn.0 & 0xffff) as usize);
    }

    pub(crate) fn qp_count(&self) -> usize {
        self.numbers.lock().used.len()
    }

    /// A number that nobody outside can guess: from the system's generator, or where that fails a
    /// mix of the one drawn when the device was opened.
    pub(crate) fn random(&self) -> u64 {
        getrandom::u64().unwrap_or_else(|_| {
            let draw = self.draws.fetch_add(1, Ordering::Relaxed);
            // SplitMix64 over the seed.
            let mut z = self.seed.wrapping_add(draw.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        })
    }

    /// The addresses of a peer: a name is looked up on the device's runtime.
    async fn look_up(&self, peer: HostPort) -> Result<Vec<SocketAddr>> {
        if peer.is_name() {
            self.on_runtime(async move { peer.resolve(DEFAULT_PORT).await }).await
        } else {
            peer.resolve(DEFAULT_PORT).await
        }
    }

    /// The device's own addresses.
    pub(crate) async fn local(&self, port: u16) -> Result<Vec<SocketAddr>> {
        let mut found = self.host.resolve(port).await?;
        found.iter_mut().for_each(|addr| addr.set_port(port));
        Ok(found)
    }

    pub(crate) fn buffers(&self, socket: SockRef<'_>) -> std::io::Result<()> {
        if let Some(size) = self.options.send_buffer {
            socket.set_send_buffer_size(size)?;
        }
        if let Some(size) = self.options.recv_buffer {
            socket.set_recv_buffer_size(size)?;
        }
        Ok(())
    }

    /// Runs `work` on the device's runtime, whoever awaits it; it ends with the returned future.
    pub(crate) async fn on_runtime<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        struct Aborting<T>(JoinHandle<T>);
        impl<T> Drop for Aborting<T> {
            fn drop(&mut self) {
                self.0.abort();
            }
        }
        let mut task = Aborting(self.runtime.spawn(work));
        match (&mut task.0).await {
            Ok(result) => result,
            Err(e) if e.is_panic() => std::panic::resume_unwind(e.into_panic()),
            Err(_) => Err(Error::State("the device's tokio runtime was shut down")),
        }
    }
}

/// A connection to be opened.
struct Dial {
    device: Arc<DeviceShared>,
    peer: HostPort,
    config: Config,
    private_data: Vec<u8>,
}

impl Dial {
    async fn run(mut self) -> Result<TcpPort> {
        let mut last = None;
        for peer in self.peer.resolve(DEFAULT_PORT).await? {
            let stream = match self.open_in_time(peer).await {
                Ok(stream) => stream,
                Err(e) => {
                    last = Some(e);
                    continue;
                }
            };
            return match self.start_up(peer, stream).await {
                // RFC 6581 §10: an unenhanced responder closes on revision 2. Revision 1 has no
                // peer-to-peer start-up, so who needs that has nothing else to try.
                Err(silent @ Error::Startup { source: StartupError::ClosedSilently, .. })
                    if self.config.mpa.revision == 2 && !self.config.mpa.peer_to_peer =>
                {
                    self.config.mpa.revision = 1;
                    match self.open_in_time(peer).await {
                        Ok(stream) => self.start_up(peer, stream).await,
                        // A server that has ended, say: how it went tells more than that.
                        Err(_) => Err(silent),
                    }
                }
                other => other,
            };
        }
        // `resolve` gives at least one address.
        Err(last.unwrap_or(Error::State("the peer's name has no address")))
    }

    async fn open_in_time(&self, peer: SocketAddr) -> Result<TcpStream> {
        tokio::time::timeout(self.config.startup_timeout, self.open(peer))
            .await
            .unwrap_or_else(|_| Err(Error::connect(peer, std::io::ErrorKind::TimedOut.into())))
    }

    async fn open(&self, peer: SocketAddr) -> Result<TcpStream> {
        let failed = |e| Error::connect(peer, e);
        let socket = match peer {
            SocketAddr::V4(_) => TcpSocket::new_v4(),
            SocketAddr::V6(_) => TcpSocket::new_v6(),
        }
        .map_err(failed)?;
        self.device.buffers(SockRef::from(&socket)).map_err(failed)?;
        if !self.device.host.is_unspecified() {
            let own = self.device.local(0).await?;
            let local = same_family(&own, &peer).ok_or_else(|| {
                Error::BadAddress(format!(
                    "cannot reach {peer} from {}: one is IPv4, the other IPv6",
                    self.device.host
                ))
            })?;
            socket.bind(any_port(local)).map_err(|e| Error::bind(local, e))?;
        }
        socket.connect(peer).await.map_err(failed)
    }

    async fn start_up(&self, peer: SocketAddr, stream: TcpStream) -> Result<TcpPort> {
        let now = self.device.clock.now();
        let conn = Connection::initiator(self.config.clone(), &self.private_data, now)?;
        let port = stream
            .into_std()
            .and_then(|s| TcpPort::new(conn, s, self.device.options.stream_buffer))
            .map_err(|e| Error::io(format!("the connection to {peer}"), e))?;
        let mut startup = Startup::new(self.device.clone(), port);
        match startup.event().await {
            Event::Established(_) => Ok(startup.into_port()),
            Event::StartupFailed(source) => {
                startup.finish_in_background();
                Err(Error::Startup { peer, source })
            }
            _ => Err(Error::Startup { peer, source: StartupError::Lost }),
        }
    }
}

impl Drop for DeviceShared {
    fn drop(&mut self) {
        if let Some(engine) = &self.engine {
            engine.shut_down();
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.shared.engine.is_some() { "udp" } else { "tcp" };
        write!(f, "Device({scheme}://{})", self.shared.host)
    }
}

impl fmt::Debug for DeviceShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceShared").field("host", &self.host).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn addresses_that_cannot_be_are_explained() {
        let e = parse_uri("10.0.0.1").unwrap_err().to_string();
        assert!(e.contains("there is no ://") && e.contains("tcp://HOST[:PORT]"), "{e}");
        let e = parse_uri("rdma://h").unwrap_err().to_string();
        assert!(e.contains("the transport is unknown"), "{e}");
        assert_eq!(parse_uri("udp://10.0.0.1").unwrap().0, Scheme::Udp);
        assert!(parse_uri("tcp://[::1]:0").is_ok());
        assert!(parse_uri("tcp://host/").is_ok());
    }

    #[test]
    fn without_a_runtime_it_says_what_to_do() {
        let e = Device::open("tcp://127.0.0.1").unwrap_err().to_string();
        assert!(e.contains("DeviceOptions::runtime"), "{e}");
    }

    #[tokio::test]
    async fn numbers_have_24_bits_and_are_not_reused_at_once() {
        let device = Device::open("tcp://127.0.0.1").unwrap().shared;
        let mut seen = HashSet::new();
        for _ in 0..200 {
            let qpn = device.allocate().unwrap();
            assert!(qpn.0 > 1 && qpn.0 < 1 << 24);
            assert!(seen.insert(qpn), "{qpn} came back");
            device.release(qpn);
        }
    }
}
