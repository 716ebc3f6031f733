//! The engine of iWARP: one TCP connection a queue pair, behind a lock of its own.

use std::{
    collections::VecDeque,
    net::{SocketAddr, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    io::{Interest, Ready, unix::AsyncFd},
    sync::Notify,
};
use userdma_proto::{
    iwarp::{Connection, Event},
    time::Instant,
    verbs::{PostError, QpState, RecvWr, SendWr, Wc, WcOpcode},
};

use super::{Carrier, LOOK, Pollers, QpShared, Wakes, until};
use crate::{
    error::CloseReason,
    net::{
        sys,
        tcp::{Budget, TcpPort, Turn},
    },
};

/// What one turn of the task, and of an inline poller, may move before others get theirs.
const TURN: Budget = Budget { read: 2 << 20, write: 2 << 20 };
/// The same for a post: it sends, and does not receive.
const POST: Budget = Budget { read: 0, write: 4 << 20 };
/// Polls in vain within [`LOOK`] that make a program one that spins.
const SPINNING: u64 = 16;
/// A program whose last such poll is longer ago does not spin.
const RECENT: Duration = Duration::from_micros(200);
/// After this long without traffic a connection gives its buffers back.
const IDLE: Duration = Duration::from_secs(10);

/// What carries a queue pair of a `tcp://` device.
pub(crate) struct Stream {
    core: Mutex<Core>,
    /// The socket is closed: there is nothing to turn.
    over: AtomicBool,
    /// The task is out of epoll.
    unarmed: AtomicBool,
    pub(super) kick: Notify,
}

/// What a lock guards.
struct Core {
    port: Port,
    /// Receives posted before there was a connection, with their tags.
    recvs: VecDeque<(RecvWr, u64)>,
    /// Completions on their way to a queue: empty between turns.
    fresh: Vec<Wc>,
    addresses: Option<(SocketAddr, SocketAddr)>,
}

/// Where a queue pair stands with its connection.
enum Port {
    /// Made, not connected.
    Idle,
    /// A start-up is under way, outside of the lock.
    Starting,
    /// Connected, or it was.
    Tcp(Box<TcpPort>),
    /// Ended without ever being connected.
    Dead,
}

impl Stream {
    pub(super) fn new() -> Self {
        Self {
            core: Mutex::new(Core {
                port: Port::Idle,
                recvs: VecDeque::new(),
                fresh: Vec::new(),
                addresses: None,
            }),
            over: AtomicBool::new(true),
            unarmed: AtomicBool::new(false),
            kick: Notify::new(),
        }
    }

    /// Runs `f` under the lock, then tells whom it concerns.
    fn locked<R>(&self, qp: &QpShared, f: impl FnOnce(&mut Core, &mut Wakes) -> R) -> R {
        let mut wakes = Wakes::default();
        let result = f(&mut self.core.lock(), &mut wakes);
        wakes.fire(qp);
        result
    }

    /// Moves what can be moved.
    fn turn(&self, qp: &QpShared, now: Instant) -> Turn {
        let mut wakes = Wakes::default();
        let mut turn = self.core.lock().turn(self, qp, now, TURN, &mut wakes);
        turn.told = !wakes.is_empty();
        wakes.fire(qp);
        turn
    }

    /// The same for a poller, who does not wait for a lock that others use to do the same.
    pub(super) fn try_turn(&self, qp: &QpShared, now: Instant) -> Turn {
        if self.over.load(Ordering::Acquire) {
            return Turn::default();
        }
        let mut wakes = Wakes::default();
        let turn = {
            let Some(mut core) = self.core.try_lock() else {
                return Turn::default();
            };
            let before = core.port.needs();
            let turn = core.turn(self, qp, now, TURN, &mut wakes);
            self.left(before, core.port.needs(), turn);
            turn
        };
        wakes.fire(qp);
        turn
    }

    /// Posts send work with its tags under one lock and with one doorbell.
    pub(super) fn post_send(
        &self,
        qp: &QpShared,
        wrs: impl Iterator<Item = (SendWr, u64)>,
    ) -> Result<(), (usize, PostError)> {
        self.locked(qp, |core, wakes| {
            let mut taken = 0;
            let mut result = Ok(());
            for (wr, tag) in wrs {
                if let Err(e) = core.push_send(qp, wr, tag, wakes) {
                    result = Err((taken, e));
                    break;
                }
                taken += 1;
            }
            if taken > 0 {
                core.ring(self, qp, wakes);
            }
            result
        })
    }

    /// Posts receives with their tags under one lock.
    pub(super) fn post_recv(
        &self,
        qp: &QpShared,
        wrs: impl Iterator<Item = (RecvWr, u64)>,
    ) -> Result<(), (usize, PostError)> {
        self.locked(qp, |core, wakes| {
            for (taken, (wr, tag)) in wrs.enumerate() {
                core.push_recv(self, qp, wr, tag, wakes).map_err(|e| (taken, e))?;
            }
            Ok(())
        })
    }

    pub(super) fn begin(&self, qp: &Arc<QpShared>) -> Result<Start, QpState> {
        let mut core = self.core.lock();
        match core.port {
            Port::Idle => core.port = Port::Starting,
            Port::Starting => return Err(QpState::Init),
            Port::Tcp(_) | Port::Dead => {
                let state = core.port.state();
                return Err(state);
            }
        }
        Ok(Start { qp: qp.clone(), done: false })
    }

    pub(super) fn state(&self) -> QpState {
        self.core.lock().port.state()
    }

    pub(super) fn addresses(&self) -> Option<(SocketAddr, SocketAddr)> {
        self.core.lock().addresses
    }

    pub(super) fn with_connection<R>(&self, f: impl FnOnce(&Connection) -> R) -> Option<R> {
        match &self.core.lock().port {
            Port::Tcp(port) => Some(f(port.conn())),
            Port::Idle | Port::Starting | Port::Dead => None,
        }
    }

    /// Closes in order: what is posted is carried out first.
    pub(super) fn close(&self, qp: &QpShared) {
        let now = qp.device.clock.now();
        self.locked(qp, |core, wakes| match &mut core.port {
            Port::Tcp(port) => {
                port.conn_mut().close(now);
                core.turn(self, qp, now, TURN, wakes);
            }
            Port::Idle | Port::Starting | Port::Dead => core.die(qp, wakes),
        });
        self.kick.notify_one();
    }

    /// To the error state at once; TCP is reset.
    pub(super) fn abort(&self, qp: &QpShared) {
        let now = qp.device.clock.now();
        self.locked(qp, |core, wakes| match &mut core.port {
            Port::Tcp(port) => {
                port.conn_mut().abort(now);
                core.turn(self, qp, now, POST, wakes);
            }
            Port::Idle | Port::Starting | Port::Dead => core.die(qp, wakes),
        });
        self.kick.notify_one();
    }

    /// Nobody looks after the connection any more: it is lost. What the kernel has taken still goes
    /// out, and FIN behind it.
    fn abandon(&self, qp: &QpShared) {
        let now = qp.device.clock.now();
        self.locked(qp, |core, wakes| {
            if let Port::Tcp(port) = &mut core.port {
                port.conn_mut().handle_reset(now);
                core.turn(self, qp, now, POST, wakes);
            }
        });
    }

    /// Somebody else than the task took a turn. In epoll the task waits for room in the socket, for
    /// a timer, or for what the turn did not get done, only if it is told; out of epoll it looks by
    /// itself.
    fn left(&self, before: Needs, after: Needs, turn: Turn) {
        let news = (after.room && !before.room) || after.timer != before.timer || turn.more;
        if news && !self.unarmed.load(Ordering::SeqCst) {
            self.kick.notify_one();
        }
    }

    /// Somebody went to sleep who polled before: the task shall watch the socket again.
    pub(super) fn rouse(&self) {
        if self.unarmed.load(Ordering::SeqCst) {
            self.kick.notify_one();
        }
    }

    /// Whether somebody polls right now, and nobody relies on being woken.
    fn is_polled(&self, qp: &QpShared, look: &mut Look, now: Instant) -> bool {
        !self.is_awaited(qp) && look.spins(all_pollers(qp), now)
    }

    /// Whether somebody sleeps until this queue pair brings something.
    fn is_awaited(&self, qp: &QpShared) -> bool {
        all_pollers(qp).any(|pollers| pollers.asleep.load(Ordering::SeqCst) > 0)
    }

    /// The task leaves epoll (`true`) or will look again by itself (`false`).
    fn unarm(&self, qp: &QpShared, unarmed: bool) {
        self.unarmed.store(unarmed, Ordering::SeqCst);
        for pollers in all_pollers(qp) {
            if unarmed {
                pollers.unarmed.fetch_add(1, Ordering::SeqCst);
            } else {
                pollers.unarmed.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }
}

/// What the task saw of the pollers when it last began to count.
#[derive(Debug, Clone, Copy)]
struct Look {
    polls: u64,
    at: Instant,
}

impl Look {
    fn new(now: Instant) -> Self {
        Self { polls: 0, at: now }
    }

    /// Whether `pollers`, together, poll right now.
    fn spins<'a>(&mut self, pollers: impl Iterator<Item = &'a Pollers>, now: Instant) -> bool {
        let (mut polls, mut last) = (0u64, 0);
        for pollers in pollers {
            polls = polls.wrapping_add(pollers.polls.load(Ordering::Relaxed));
            last = last.max(pollers.last.load(Ordering::Relaxed));
        }
        let spins = polls.wrapping_sub(self.polls) >= SPINNING
            && now.saturating_since(Instant::from_nanos(last)) < RECENT;
        if now.saturating_since(self.at) >= LOOK {
            *self = Self { polls, at: now };
        }
        spins
    }
}

/// The places where somebody may poll for a queue pair.
fn all_pollers(qp: &QpShared) -> impl Iterator<Item = &Pollers> {
    let recv = (!qp.init.recv_cq.is(&qp.init.send_cq)).then(|| qp.init.recv_cq.pollers());
    [&qp.pollers, qp.init.send_cq.pollers()].into_iter().chain(recv)
}

impl Core {
    /// One turn of the port, then completions and events to where they belong.
    fn turn(
        &mut self,
        stream: &Stream,
        qp: &QpShared,
        now: Instant,
        budget: Budget,
        wakes: &mut Wakes,
    ) -> Turn {
        let Port::Tcp(port) = &mut self.port else {
            return Turn::default();
        };
        let turn = port.turn(now, &qp.device.table, budget);
        if turn.worked {
            self.settle(stream, qp, wakes);
        }
        turn
    }

    fn push_send(
        &mut self,
        qp: &QpShared,
        wr: SendWr,
        tag: u64,
        wakes: &mut Wakes,
    ) -> Result<(), PostError> {
        qp.may_post(tag, &qp.init.send_cq)?;
        match &mut self.port {
            Port::Tcp(port) => port.conn_mut().post_send(wr, tag),
            Port::Idle | Port::Starting => Err(PostError::BadState(QpState::Init)),
            Port::Dead => {
                qp.flush(wr.id, tag, wr.op.wc_opcode(), wakes);
                Ok(())
            }
        }
    }

    fn push_recv(
        &mut self,
        stream: &Stream,
        qp: &QpShared,
        wr: RecvWr,
        tag: u64,
        wakes: &mut Wakes,
    ) -> Result<(), PostError> {
        if qp.init.srq.is_some() {
            return Err(PostError::SharedReceives);
        }
        qp.may_post(tag, &qp.init.recv_cq)?;
        match &mut self.port {
            Port::Tcp(port) => {
                port.conn_mut().post_recv(wr, tag)?;
                if port.conn().state() == QpState::Err {
                    self.settle(stream, qp, wakes);
                }
                Ok(())
            }
            Port::Idle | Port::Starting => {
                wr.check(qp.init.max_sge)?;
                if self.recvs.len() >= qp.init.max_recv_wr {
                    return Err(PostError::QueueFull { max: qp.init.max_recv_wr });
                }
                self.recvs.push_back((wr, tag));
                Ok(())
            }
            Port::Dead => {
                qp.flush(wr.id, tag, WcOpcode::RECV, wakes);
                Ok(())
            }
        }
    }

    /// The doorbell: sends what was posted.
    fn ring(&mut self, stream: &Stream, qp: &QpShared, wakes: &mut Wakes) {
        let Port::Tcp(port) = &mut self.port else {
            return;
        };
        let before = Needs::of(port);
        let turn = port.turn(qp.device.clock.now(), &qp.device.table, POST);
        stream.left(before, Needs::of(port), turn);
        self.settle(stream, qp, wakes);
    }

    /// Completions to their futures and queues, events to whom they concern. Where a completion
    /// queue has overflowed, that is the end of the connection.
    fn settle(&mut self, stream: &Stream, qp: &QpShared, wakes: &mut Wakes) {
        self.deliver(stream, qp, wakes);
        if qp.overflowed().is_none() {
            return;
        }
        let Port::Tcp(port) = &mut self.port else {
            return;
        };
        if port.conn().state() == QpState::Err {
            return;
        }
        let now = qp.device.clock.now();
        port.conn_mut().fail(now);
        // The Terminate goes out; the task waits for the peer's FIN.
        port.turn(now, &qp.device.table, POST);
        stream.kick.notify_one();
        self.deliver(stream, qp, wakes);
    }

    fn deliver(&mut self, stream: &Stream, qp: &QpShared, wakes: &mut Wakes) {
        let Port::Tcp(port) = &mut self.port else {
            return;
        };
        let (send_cq, recv_cq) = (&qp.init.send_cq, &qp.init.recv_cq);
        let mut to = send_cq;
        while let Some(completion) = port.conn_mut().poll_completion() {
            let wc = completion.wc;
            if qp.completes_awaited(completion.tag, wc, wakes) {
                continue;
            }
            let cq = if wc.opcode.is_recv() { recv_cq } else { send_cq };
            if !cq.is(to) {
                to.push(&mut self.fresh, wakes);
                to = cq;
            }
            self.fresh.push(wc);
        }
        to.push(&mut self.fresh, wakes);
        if let Some(srq) = &qp.init.srq {
            srq.settle(wakes);
        }
        while let Some(event) = port.conn_mut().poll_event() {
            match event {
                Event::Closed(reason) => wakes.end_of_stream(qp, reason.into()),
                Event::StartupFailed(_) => wakes.end_of_stream(qp, CloseReason::Lost),
                // `Connection::established` tells the rest; after the peer's FIN the connection
                // carries out what is posted and closes by itself.
                Event::Request(_) | Event::Established(_) | Event::PeerClosed => {}
                _ => {}
            }
        }
        if port.socket().is_none() {
            stream.over.store(true, Ordering::Release);
        }
    }

    /// From Init to the error state, where no connection will ever be.
    fn die(&mut self, qp: &QpShared, wakes: &mut Wakes) {
        if matches!(self.port, Port::Dead) {
            return;
        }
        self.port = Port::Dead;
        while let Some((wr, tag)) = self.recvs.pop_front() {
            qp.flush(wr.id, tag, WcOpcode::RECV, wakes);
        }
        wakes.end_of_stream(qp, CloseReason::Aborted);
    }
}

/// What a connection waits for, apart from octets.
#[derive(Debug, Clone, Copy, Default)]
struct Needs {
    room: bool,
    timer: Option<Instant>,
}

impl Needs {
    fn of(port: &TcpPort) -> Self {
        Self { room: port.wants_write(), timer: port.conn().poll_timeout() }
    }
}

impl Port {
    fn needs(&self) -> Needs {
        match self {
            Self::Tcp(port) => Needs::of(port),
            Self::Idle | Self::Starting | Self::Dead => Needs::default(),
        }
    }

    fn state(&self) -> QpState {
        match self {
            Self::Idle | Self::Starting => QpState::Init,
            Self::Tcp(port) => port.conn().state(),
            Self::Dead => QpState::Err,
        }
    }
}

/// A start-up under way. Dropped before [`Start::finish`], the queue pair is as it was before.
pub(crate) struct Start {
    qp: Arc<QpShared>,
    done: bool,
}

impl Start {
    pub(crate) fn qp(&self) -> &Arc<QpShared> {
        &self.qp
    }

    /// The connection stands (at a responder: it is accepted): from here on the queue pair has it,
    /// with the receives posted so far.
    ///
    /// # Errors
    /// The queue pair was aborted meanwhile.
    pub(crate) fn finish(mut self, mut port: Box<TcpPort>) -> Result<(), PostError> {
        let qp = self.qp.clone();
        let Carrier::Stream(stream) = &qp.carrier else {
            return Err(PostError::BadState(qp.state()));
        };
        let Some(socket) = port.socket().cloned() else {
            return Err(PostError::BadState(QpState::Err));
        };
        stream.locked(&qp, |core, wakes| {
            if !matches!(core.port, Port::Starting) {
                return Err(PostError::BadState(core.port.state()));
            }
            core.addresses = port.addresses().ok();
            if let Some(srq) = &qp.init.srq {
                port.conn_mut().share_receives(srq.receives())?;
            }
            while let Some((wr, tag)) = core.recvs.pop_front() {
                // It fits: it was checked against the same limits when it was posted.
                let _fits = port.conn_mut().post_recv(wr, tag);
                debug_assert_eq!(_fits, Ok(()));
            }
            core.port = Port::Tcp(port);
            self.done = true;
            stream.over.store(false, Ordering::Release);
            core.turn(stream, &qp, qp.device.clock.now(), TURN, wakes);
            core.settle(stream, &qp, wakes);
            Ok(())
        })?;
        qp.device.runtime.spawn(drive(Driven(qp.clone()), socket));
        Ok(())
    }
}

impl Drop for Start {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        let Carrier::Stream(stream) = &self.qp.carrier else { return };
        let mut core = stream.core.lock();
        if matches!(core.port, Port::Starting) {
            core.port = Port::Idle;
        }
    }
}

/// What the task has to wait for.
struct Wait {
    read: bool,
    write: bool,
    deadline: Option<Instant>,
}

impl Stream {
    fn trim(&self) {
        if let Port::Tcp(port) = &mut self.core.lock().port {
            port.trim();
        }
    }

    fn wait(&self) -> Option<Wait> {
        match &self.core.lock().port {
            Port::Tcp(port) if port.socket().is_some() => Some(Wait {
                read: port.wants_read(),
                write: port.wants_write(),
                deadline: port.conn().poll_timeout(),
            }),
            Port::Tcp(_) | Port::Idle | Port::Starting | Port::Dead => None,
        }
    }
}

/// A queue pair in the hands of its task. Where the task goes first, with its runtime, nobody would
/// watch the socket any more, and who sleeps would sleep for ever: the connection ends then.
struct Driven(Arc<QpShared>);

impl Drop for Driven {
    fn drop(&mut self) {
        if let Carrier::Stream(stream) = &self.0.carrier
            && !stream.over.load(Ordering::Acquire)
        {
            stream.abandon(&self.0);
        }
    }
}

/// The task of a connected queue pair. Ends when the socket is closed.
async fn drive(driven: Driven, socket: Arc<TcpStream>) {
    let qp = &*driven.0;
    let Carrier::Stream(stream) = &qp.carrier else { return };
    let clock = qp.device.clock;
    let spin = qp.device.options.spin;
    let mut armed: Option<AsyncFd<Arc<TcpStream>>> = None;
    let mut look = Look::new(clock.now());
    let mut spin_until = look.at;
    let mut fat = false;
    let mut turn = Turn { more: true, ..Turn::default() };
    loop {
        let now = clock.now();
        if turn.told {
            // Somebody was woken who spins himself; spinning here would take his processor.
            spin_until = now;
        } else if turn.worked {
            spin_until = now + spin;
        }
        fat |= turn.worked;
        if turn.more {
            // One bounded turn after another, with the runtime's other tasks in between.
            tokio::task::yield_now().await;
            turn = stream.turn(qp, clock.now());
            continue;
        }
        let Some(wait) = stream.wait() else { return };
        if stream.is_polled(qp, &mut look, now) {
            armed = None;
            stream.unarm(qp, true);
            // Who went to sleep before `unarm` was seen did not kick: look once more.
            if !stream.is_awaited(qp) {
                stream.pause(qp, &wait).await;
            }
            stream.unarm(qp, false);
            turn = stream.turn(qp, clock.now());
            continue;
        }
        if now < spin_until {
            tokio::task::yield_now().await;
            turn = stream.turn(qp, clock.now());
            continue;
        }
        let interest = match (wait.read, wait.write) {
            (true, true) => Some(Interest::READABLE | Interest::WRITABLE),
            (true, false) => Some(Interest::READABLE),
            (false, true) => Some(Interest::WRITABLE),
            (false, false) => None,
        };
        let fd = match armed.take() {
            Some(fd) => fd,
            None => match sys::watch(socket.clone()) {
                Ok(fd) => fd,
                // No room in epoll: look by timer.
                Err(_) => {
                    stream.pause(qp, &wait).await;
                    turn = stream.turn(qp, clock.now());
                    continue;
                }
            },
        };
        let ready = async {
            match interest {
                Some(interest) => fd.ready(interest).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            guard = ready => {
                turn = stream.turn(qp, clock.now());
                if let Ok(mut guard) = guard {
                    if turn.drained {
                        guard.clear_ready_matching(Ready::READABLE);
                    }
                    if turn.blocked {
                        guard.clear_ready_matching(Ready::WRITABLE);
                    }
                }
            }
            () = stream.kick.notified() => turn = stream.turn(qp, clock.now()),
            () = until(clock, wait.deadline) => turn = stream.turn(qp, clock.now()),
            () = tokio::time::sleep(IDLE), if fat => {
                fat = false;
                stream.trim();
            }
        }
        armed = Some(fd);
    }
}

impl Stream {
    /// A short sleep without the socket. Longer where there are many queue pairs, so that their
    /// looking stays a small part of the processor.
    async fn pause(&self, qp: &QpShared, wait: &Wait) {
        let many = qp.device.qp_count() as u32;
        let pause = LOOK.max(LOOK / 64 * many);
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = self.kick.notified() => {}
            () = until(qp.device.clock, wait.deadline) => {}
        }
    }
}
