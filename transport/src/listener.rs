//! Listening: TCP connections come in, start MPA up, and become requests for the program. Over UDP
//! requests come from the connection manager behind the device's socket.

use std::{collections::VecDeque, fmt, net::SocketAddr, sync::Arc, time::Duration};

use parking_lot::Mutex;
use socket2::SockRef;
use tokio::{
    net::{TcpListener, TcpSocket, TcpStream},
    sync::mpsc,
    task::{AbortHandle, JoinSet},
};
use userdma_proto::{
    iwarp::{Config, Connection, Event, MpaOptions, Request, StartupError},
    mem::PdId,
    roce::{cm, port as roce},
    verbs::QpType,
    wire::ids::Qpn,
};

use crate::{
    device::{DeviceShared, count},
    engine::datagram::Engine,
    error::{Error, Result},
    net::{startup::Startup, tcp::TcpPort},
    pd::Pd,
    qp::{Qp, QpInit},
};

/// A pause after a failure of `accept(2)` that will not go away by itself at once (no file
/// descriptors left).
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// A port that takes connections. Dropped, it takes no more; requests that nobody accepted are
/// rejected.
pub struct Listener {
    addr: SocketAddr,
    device: Arc<DeviceShared>,
    mpa: Arc<Mutex<MpaOptions>>,
    requests: Requests,
}

/// Where requests come from.
enum Requests {
    Tcp { queue: Queue<ConnRequest>, task: AbortHandle },
    Udp { queue: Queue<Box<roce::Request>>, engine: Arc<Engine> },
}

type Queue<T> = tokio::sync::Mutex<mpsc::Receiver<T>>;

/// A peer that wants to connect. Dropped, it is rejected without private data.
pub struct ConnRequest {
    device: Arc<DeviceShared>,
    asked: Asked,
    peer: SocketAddr,
}

/// What was asked, and by which way it is answered: `None` once it is.
enum Asked {
    Tcp(Option<Box<Startup>>, Request),
    Udp(Option<Arc<Engine>>, Box<roce::Request>),
}

impl Listener {
    pub(crate) async fn bind(device: Arc<DeviceShared>, port: u16) -> Result<Self> {
        // `local` gives at least one address.
        let wanted = device.local(port).await?[0];
        let failed = |e| Error::bind(wanted, e);
        let socket = match wanted {
            SocketAddr::V4(_) => TcpSocket::new_v4(),
            SocketAddr::V6(_) => TcpSocket::new_v6(),
        }
        .map_err(failed)?;
        socket.set_reuseaddr(true).map_err(failed)?;
        // Accepted sockets inherit the sizes, which bound the window that SYN-ACK announces.
        device.buffers(SockRef::from(&socket)).map_err(failed)?;
        socket.bind(wanted).map_err(failed)?;
        let listener = socket.listen(1024).map_err(failed)?;
        let addr = listener.local_addr().map_err(failed)?;
        let mpa = Arc::new(Mutex::new(MpaOptions::default()));
        let (sender, requests) = mpsc::channel(device.options.backlog.max(1));
        let runtime = device.runtime.clone();
        let task = runtime.spawn(take_connections(device.clone(), listener, mpa.clone(), sender));
        let requests = Requests::Tcp { queue: requests.into(), task: task.abort_handle() };
        Ok(Self { addr, device, mpa, requests })
    }

    /// Behind a device's UDP socket, at an rdma_cm port.
    pub(crate) fn over_udp(device: Arc<DeviceShared>, port: u16) -> Result<Self> {
        let Some(engine) = device.engine().cloned() else {
            return Err(Error::Unsupported("the device has no UDP socket"));
        };
        let backlog = device.options.backlog.max(1);
        let half_open = device.options.max_startups.max(backlog);
        let (port, queue) = engine.listen(port, backlog, half_open, device.random())?;
        let mut addr = engine.local();
        addr.set_port(port);
        let requests = Requests::Udp { queue: queue.into(), engine };
        Ok(Self { addr, device, mpa: Arc::default(), requests })
    }

    /// Where it listens, with the port that was chosen: of TCP, or of the rdma_cm behind the
    /// device's UDP socket.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// The next peer that wants to connect and has said so in full. Start-ups that fail are counted
    /// ([`DeviceStats`](crate::DeviceStats)) and not returned. Cancel safe.
    ///
    /// # Errors
    /// [`Error::State`] where the device's runtime was shut down.
    pub async fn accept(&self) -> Result<ConnRequest> {
        let next = match &self.requests {
            Requests::Tcp { queue, .. } => queue.lock().await.recv().await,
            Requests::Udp { queue, engine } => {
                let asked = queue.lock().await.recv().await;
                asked.map(|asked| ConnRequest {
                    device: self.device.clone(),
                    peer: asked.cm.peer,
                    asked: Asked::Udp(Some(engine.clone()), asked),
                })
            }
        };
        next.ok_or(Error::State("the device's tokio runtime was shut down"))
    }

    /// iWARP: what is said in the start-up of connections that arrive from now on, if the program
    /// rejects them. [`QpInit::mpa`] is what an accepted connection says.
    pub fn set_mpa(&self, mpa: MpaOptions) {
        *self.mpa.lock() = mpa;
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        match &self.requests {
            Requests::Tcp { task, .. } => task.abort(),
            Requests::Udp { engine, .. } => engine.unlisten(self.addr.port()),
        }
    }
}

/// The listener's task: bounded start-ups at a time, each with a time-out.
async fn take_connections(
    device: Arc<DeviceShared>,
    listener: TcpListener,
    mpa: Arc<Mutex<MpaOptions>>,
    requests: mpsc::Sender<ConnRequest>,
) {
    let mut startups = JoinSet::new();
    // In the order they came. Who has ended is let go of when there seem to be too many.
    let mut oldest: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = startups.join_next() => continue,
        };
        let Ok((stream, peer)) = accepted else {
            count(&device.counters.accept_errors);
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let max = device.options.max_startups.max(1);
        if oldest.len() >= max {
            oldest.retain(|startup| !startup.is_finished());
        }
        // Who has said nothing for longest makes room, so that strangers who say nothing do not
        // lock out somebody who has something to say.
        if oldest.len() >= max
            && let Some(silent) = oldest.pop_front()
        {
            silent.abort();
            count(&device.counters.refused);
        }
        let options = *mpa.lock();
        let startup = receive_request(device.clone(), stream, peer, options, requests.clone());
        oldest.push_back(startups.spawn(startup));
    }
}

/// One start-up, until its request is with the program or it has failed.
async fn receive_request(
    device: Arc<DeviceShared>,
    stream: TcpStream,
    peer: SocketAddr,
    mpa: MpaOptions,
    requests: mpsc::Sender<ConnRequest>,
) {
    // No queue pair and no domain yet: nothing is reached before `configure`.
    let config = Config {
        mpa,
        startup_timeout: device.options.startup_timeout,
        ..Config::new(PdId(0), Qpn(0), 0)
    };
    let conn = Connection::responder(config, device.clock.now());
    let port = stream
        .into_std()
        .and_then(|stream| TcpPort::new(conn, stream, device.options.stream_buffer));
    let Ok(port) = port else {
        count(&device.counters.startup_lost);
        return;
    };
    let mut startup = Startup::new(device.clone(), port);
    match startup.event().await {
        Event::Request(request) => {
            let request =
                ConnRequest { device, asked: Asked::Tcp(Some(startup.into()), request), peer };
            if let Err(e) = requests.try_send(request) {
                let mut request = e.into_inner();
                request.asked.drop_unanswered();
                count(&request.device.counters.refused);
            }
        }
        event => {
            count(match event {
                Event::StartupFailed(StartupError::TimedOut(_)) => {
                    &device.counters.startup_timeouts
                }
                Event::StartupFailed(StartupError::Malformed(_) | StartupError::Protocol(_)) => {
                    &device.counters.startup_malformed
                }
                _ => &device.counters.startup_lost,
            });
            startup.finish_in_background();
        }
    }
}

impl ConnRequest {
    /// The peer's TCP address; of RoCE that of its UDP socket.
    pub fn peer_addr(&self) -> SocketAddr {
        self.peer
    }

    /// What the peer's program says. Of RoCE all of the area that there is for it: zeros follow
    /// what was said.
    pub fn private_data(&self) -> &[u8] {
        match &self.asked {
            Asked::Tcp(_, request) => &request.private_data,
            Asked::Udp(_, request) => &request.cm.private_data,
        }
    }

    /// READs and atomics that the peer serves at a time; `None` where it did not say (MPA revision
    /// 1).
    pub fn ird(&self) -> Option<u16> {
        match &self.asked {
            Asked::Tcp(_, request) => request.ird,
            Asked::Udp(_, request) => Some(request.cm.responder_resources.into()),
        }
    }

    /// READs and atomics that the peer wants to have outstanding; `None` where it did not say.
    pub fn ord(&self) -> Option<u16> {
        match &self.asked {
            Asked::Tcp(_, request) => request.ord,
            Asked::Udp(_, request) => Some(request.cm.initiator_depth.into()),
        }
    }

    /// What was asked for over MPA; `None` on RoCE.
    pub fn mpa(&self) -> Option<&Request> {
        match &self.asked {
            Asked::Tcp(_, request) => Some(request),
            Asked::Udp(..) => None,
        }
    }

    /// What was asked of the connection manager; `None` on iWARP.
    pub fn cm(&self) -> Option<&cm::Request> {
        match &self.asked {
            Asked::Tcp(..) => None,
            Asked::Udp(_, request) => Some(&request.cm),
        }
    }

    /// The type of queue pair that the peer wants to be connected to.
    pub fn qp_type(&self) -> QpType {
        match self.cm().map(|request| request.transport) {
            Some(cm::Transport::Uc) => QpType::Uc,
            Some(cm::Transport::Rc) | None => QpType::Rc,
        }
    }

    /// Accepts with a new queue pair. Sends may be posted at once; they leave when the peer's first
    /// message has come, which it owes us (RFC 5044 §7.1.2), or on RoCE when it is ready.
    /// `private_data` as for [`Device::connect`](crate::Device::connect); of RoCE 196 octets at
    /// most.
    ///
    /// # Errors
    /// [`Error::Startup`] where the peer has gone; [`Error::Post`] where the private data is too
    /// long, and the peer is rejected then. Over UDP [`Error::Port`], for a queue pair of another
    /// type than [`ConnRequest::qp_type`] among others; the peer is rejected then.
    pub async fn accept(self, pd: &Pd, init: QpInit, private_data: &[u8]) -> Result<Qp> {
        let qp = pd.create_qp(init)?;
        self.accept_qp(&qp, private_data).await?;
        Ok(qp)
    }

    /// Accepts with a queue pair made before by [`Pd::create_qp`], so that receives are posted
    /// before the peer can send. If it fails the queue pair is as it was before.
    ///
    /// # Errors
    /// As [`ConnRequest::accept`]; [`Error::State`] where the queue pair is connected already.
    pub async fn accept_qp(mut self, qp: &Qp, private_data: &[u8]) -> Result<()> {
        let gone = Error::Startup { peer: self.peer, source: StartupError::Lost };
        let (start, startup) = match &mut self.asked {
            Asked::Tcp(startup, _) => (qp.begin()?, startup.take()),
            Asked::Udp(engine, request) => {
                let Some(answering) = engine else { return Err(gone) };
                // Where it fails the request is rejected when it is dropped.
                answering.accept(qp.shared(), request, private_data)?;
                *engine = None;
                return Ok(());
            }
        };
        let Some(startup) = startup else {
            return Err(gone);
        };
        let mut port = startup.into_port();
        // The peer may have closed while the request waited.
        let now = self.device.clock.now();
        if let Some(Event::StartupFailed(source)) = port.startup_event(now, &self.device.table) {
            count(&self.device.counters.startup_lost);
            return Err(Error::Startup { peer: self.peer, source });
        }
        if port.socket().is_none() {
            return Err(gone);
        }
        let conn = port.conn_mut();
        let accepted =
            conn.configure(start.qp().config()).and_then(|()| conn.accept(private_data, now));
        if let Err(e) = accepted {
            // Dropped, the request is rejected.
            if let Asked::Tcp(startup, _) = &mut self.asked {
                *startup = Some(Startup::new(self.device.clone(), port).into());
            }
            return Err(e.into());
        }
        port.refeed();
        start.finish(Box::new(port))?;
        count(&self.device.counters.connections);
        Ok(())
    }

    /// Says no, with `private_data` for the peer's program; of RoCE 148 octets at most.
    ///
    /// # Errors
    /// [`Error::Post`], over UDP [`Error::Port`], where the private data is too long; the peer is
    /// rejected without it then.
    pub async fn reject(mut self, private_data: &[u8]) -> Result<()> {
        self.refuse(private_data)
    }

    fn refuse(&mut self, private_data: &[u8]) -> Result<()> {
        let mut startup = match &mut self.asked {
            Asked::Tcp(startup, _) => match startup.take() {
                Some(startup) => startup,
                None => return Ok(()),
            },
            Asked::Udp(engine, request) => {
                let Some(engine) = engine.take() else { return Ok(()) };
                count(&self.device.counters.rejected);
                return engine.reject(request, private_data).inspect_err(|_| {
                    // Where it has timed out there is nobody to tell.
                    let _ = engine.reject(request, &[]);
                });
            }
        };
        count(&self.device.counters.rejected);
        let now = self.device.clock.now();
        let rejected = startup.reject(private_data, now);
        let result = match rejected {
            Ok(()) => Ok(()),
            Err(e) => {
                // Without private data it fits; where the peer has gone there is nobody to tell.
                let _ = startup.reject(&[], now);
                Err(e.into())
            }
        };
        startup.finish_in_background();
        result
    }
}

impl Asked {
    /// Lets go of the connection without an answer.
    fn drop_unanswered(&mut self) {
        match self {
            Self::Tcp(startup, _) => drop(startup.take()),
            Self::Udp(engine, _) => drop(engine.take()),
        }
    }
}

impl Drop for ConnRequest {
    fn drop(&mut self) {
        // No private data: it cannot be too long.
        let _ = self.refuse(&[]);
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Listener({})", self.addr)
    }
}

impl fmt::Debug for ConnRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnRequest")
            .field("peer", &self.peer)
            .field("private_data", &self.private_data())
            .finish_non_exhaustive()
    }
}
