//! `userdma serve`: rping's server (or librdmacm's rdma_server), and the server of `demo` and
//! `perf`, which their private data tells apart.

use std::{
    collections::{BTreeMap, btree_map::OccupiedEntry},
    fmt, io,
    net::SocketAddr,
    process::ExitCode,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    task::{JoinSet, spawn_blocking},
    time::{Instant, sleep, sleep_until, timeout},
};
use userdma::{
    Access, CloseReason, ConnRequest, Device, Mr, QpState, RecvWr, Region, SendOp, SendWr,
    proto::iwarp::Stats,
};

use crate::{
    chain,
    common::{
        Common, Link, Shape, Target, add_counters, check_last, check_wc, close, counters,
        counters_json, reason_text, with_reason, within,
    },
    demo::{self, is_flush},
    output::{self, counted, note},
    perf, roce, rping,
    session::{self, Asked, Hello, Mode},
    stop::Stop,
};

/// How long a demo or a perf may take for its first step: it has no reason to wait.
const FIRST_STEP: Duration = Duration::from_secs(5);
/// Octets that a connection takes beside its registered memory: what was received and is not used
/// yet, and the queues.
const CONNECTION: usize = 1 << 20;
/// Memory is accounted for in such pieces.
const PAGE: usize = 4096;

/// Wait for clients: rping, rdma_client, and the demo and perf of userdma.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  userdma serve --listen 10.0.0.1                         for rping -c, userdma ping, userdma perf
  userdma serve --listen '[::]:0' --json                  any address, a free port, events as JSON
  userdma serve --listen 10.0.0.1:7471 --as rdma-server   for librdmacm's rdma_client
  userdma serve --once --crc off                          one client, then the exit status tells
  userdma serve --listen 10.0.0.1 --transport roce        RoCEv2, behind UDP port 4791
  userdma serve --transport roce --udp-port 0             behind a free one: clients name it by
                                                          --peer-udp-port
  userdma serve --listen 10.0.0.1 --max-clients 4 --max-memory 256MiB --idle-timeout 10

A client beyond --max-clients or --max-memory is rejected and told why. A client of rping or
rdma_client that says nothing for --idle-timeout is closed; a demo or perf has to begin within 5 s,
then a demo may be silent for 30 s and a perf for 5 s.
Exit status: 0 after Ctrl-C or SIGTERM; with --once 0 if the client was served well, 1 if not;
2 for wrong arguments.")]
pub(crate) struct Serve {
    /// Where to listen; port 0 takes a free one
    #[arg(long, value_name = "ADDR[:PORT]", default_value = "127.0.0.1")]
    listen: Target,
    /// What clients get that are no userdma demo or perf
    #[arg(long = "as", value_enum, default_value_t = Service::Rping)]
    service: Service,
    /// Clients at a time; one more is rejected
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    max_clients: u32,
    /// Memory of all clients together: octets, or a number with KiB, MiB or GiB
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = octets)]
    max_memory: usize,
    /// Close an rping client that says nothing for so long; 0: never
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = idle_timeout)]
    idle_timeout: Idle,
    /// End after the first client
    #[arg(long)]
    once: bool,
    /// Print events as JSON, one a line
    #[arg(long)]
    json: bool,
    /// End when stdin closes (for a parent process)
    #[arg(long, hide = true)]
    until_stdin_closes: bool,
    #[command(flatten)]
    common: Common,
}

/// A service of librdmacm's examples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Service {
    /// `rping -s`
    Rping,
    /// `rdma_server`
    RdmaServer,
}

impl Service {
    const fn name(self) -> &'static str {
        match self {
            Self::Rping => "rping",
            Self::RdmaServer => "rdma-server",
        }
    }
}

/// How long a client may be silent; `None`: for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Idle(Option<Duration>);

/// Seconds with a fraction, 0 for never.
fn idle_timeout(text: &str) -> Result<Idle, String> {
    text.parse()
        .ok()
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .filter(|d| *d <= Duration::from_secs(86_400))
        .map(|d| Idle(Some(d).filter(|d| !d.is_zero())))
        .ok_or_else(|| format!("{text:?} is no number of seconds from 0 to 86400"))
}

/// Octets, with or without a unit.
fn octets(text: &str) -> Result<usize, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let shift = match &text[digits.len()..] {
        "" | "B" => Some(0),
        "K" | "KiB" => Some(10),
        "M" | "MiB" => Some(20),
        "G" | "GiB" => Some(30),
        _ => None,
    };
    let number: Option<usize> =
        digits.parse().ok().filter(|_| digits.bytes().all(|b| b.is_ascii_digit()));
    number
        .zip(shift)
        .and_then(|(number, shift)| number.checked_mul(1 << shift))
        .filter(|n| (CONNECTION..=1 << 40).contains(n))
        .ok_or_else(|| {
            format!("{text:?} is no size from 1MiB to 1024GiB: write 1048576, 512MiB or 2GiB")
        })
}

/// What all clients' tasks share.
struct Shared {
    dev: Device,
    common: Common,
    service: Service,
    json: bool,
    idle: Idle,
    stop: Stop,
    max_clients: u32,
    max_memory: usize,
    /// Places for clients.
    room: Arc<Semaphore>,
    /// Pages for clients.
    memory: Arc<Semaphore>,
    /// RoCE: clients that we accepted, by number. Of those that were not heard of since, anybody who can
    /// send datagrams makes as many as he likes: they give way to others, the oldest first.
    newcomers: Mutex<BTreeMap<u64, Newcomer>>,
    /// Who may wait until newcomers have had [`GRACE`].
    patience: Semaphore,
    /// Clients so far, by which they are numbered.
    number: AtomicU64,
    totals: Mutex<Totals>,
    /// Whether events were lost.
    failed: AtomicBool,
}

/// What a client takes up as long as it is served.
struct Admitted {
    _place: OwnedSemaphorePermit,
    _memory: OwnedSemaphorePermit,
}

/// What a client takes up, until it has ended or given way.
type Held = Arc<Mutex<Option<Admitted>>>;

/// A client that may not have finished its connection.
struct Newcomer {
    qp: userdma::Qp,
    held: Held,
    since: Instant,
}

/// Time to finish a connection before others may take its place: some round trips.
const GRACE: Duration = Duration::from_millis(100);

/// At most so many wait for that.
const PATIENT: usize = 16;

/// What is behind the lock stays right even if a task died while it held it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    clients: u64,
    failed: u64,
    stats: Stats,
}

impl Shared {
    /// An event: as JSON, or as text.
    fn event(&self, value: &Value, text: &str) {
        if self.json {
            self.print(&value.to_string());
        } else {
            self.print(text);
        }
    }

    /// Prints a line to stdout. If that cannot be, the server ends as after a signal: whoever
    /// started it has gone.
    fn print(&self, text: &str) {
        if let Err(e) = output::try_line(text) {
            self.lose_output(&e);
        }
    }

    fn lose_output(&self, error: &io::Error) {
        // A text in front of `head` is no failure; events that nobody gets are.
        let failed = self.json || error.kind() != io::ErrorKind::BrokenPipe;
        if failed && !self.failed.swap(true, Ordering::Relaxed) {
            note(&format!("error: cannot write to stdout ({error}): ending"));
        }
        self.stop.raise();
    }

    /// Room for a client, or why there is none.
    async fn admit(&self, asked: &Asked) -> Result<Admitted, String> {
        // A few may wait for those who are about to finish. Of more it is a flood, in which whoever
        // answers at once gets through as long as nobody waits.
        let patience = self.patience.try_acquire().ok();
        let until = Instant::now() + GRACE;
        loop {
            let admitted = self.try_admit(asked);
            let Err(_) = admitted else { return admitted };
            let oldest = self.oldest_newcomer(|entry| entry.get().since);
            let Some(since) = oldest else { return admitted };
            let wait = until.min(since + GRACE);
            if patience.is_some() && wait > Instant::now() {
                sleep_until(wait).await;
            } else {
                self.dismiss_newcomer();
            }
        }
    }

    /// What `f` makes of the client that was accepted first of those whose connection has not come
    /// about, if there is any.
    fn oldest_newcomer<T>(
        &self,
        f: impl FnOnce(OccupiedEntry<'_, u64, Newcomer>) -> T,
    ) -> Option<T> {
        let mut newcomers = lock(&self.newcomers);
        loop {
            let first = newcomers.first_entry()?;
            if first.get().qp.terms().is_none() {
                return Some(f(first));
            }
            // It came about.
            first.remove();
        }
    }

    /// Ends the connection that was accepted first of those that never came about, if there is any.
    fn dismiss_newcomer(&self) {
        while let Some(newcomer) = self.oldest_newcomer(|entry| entry.remove()) {
            let Some(admitted) = lock(&newcomer.held).take() else { continue };
            newcomer.qp.abort();
            drop(admitted);
            return;
        }
    }

    fn try_admit(&self, asked: &Asked) -> Result<Admitted, String> {
        let place = Arc::clone(&self.room)
            .try_acquire_owned()
            .map_err(|_| format!("too many clients: at most {} at a time", self.max_clients))?;
        let octets = CONNECTION
            + match asked {
                Asked::Refused(..) => 0,
                Asked::Stranger => rping::Server::OCTETS,
                Asked::Known(Hello { mode: Mode::Demo { size, .. }, .. }) => {
                    demo::Peer::octets(*size)
                }
                Asked::Known(Hello { mode: Mode::Perf { op, measure, size, millis }, .. }) => {
                    perf::Side::octets(perf::Run {
                        op: *op,
                        measure: *measure,
                        size: *size,
                        millis: *millis,
                    })
                }
            };
        // One client takes some 130 MiB at most.
        let pages = u32::try_from(octets.div_ceil(PAGE)).unwrap_or(u32::MAX);
        let memory = Arc::clone(&self.memory).try_acquire_many_owned(pages).map_err(|_| {
            format!(
                "too little memory: this takes {}, {} of {} are left",
                output::octets(octets as u64),
                output::octets((self.memory.available_permits() * PAGE) as u64),
                output::octets(self.max_memory as u64),
            )
        })?;
        Ok(Admitted { _place: place, _memory: memory })
    }

    fn failure(&self, peer: SocketAddr, mode: &str, error: &anyhow::Error) {
        let error = chain(error);
        if self.json {
            self.print(
                &json!({"event": "error", "peer": peer.to_string(), "mode": mode, "error": error})
                    .to_string(),
            );
        } else {
            note(&format!("error: {peer} ({mode}): {error}"));
        }
    }

    fn count(&self, ok: bool, stats: Option<Stats>) {
        let mut totals = lock(&self.totals);
        totals.clients += 1;
        totals.failed += u64::from(!ok);
        if let Some(stats) = stats {
            add_counters(&mut totals.stats, &stats);
        }
    }
}

/// Runs the command.
pub(crate) async fn run(args: Serve) -> Result<ExitCode> {
    args.common.check()?;
    let stop = Stop::on_signals()?;
    if args.until_stdin_closes {
        stop.when_stdin_closes()?;
    }
    let addr = args.listen.resolve().await?[0];
    let dev = args.common.listener(addr)?;
    let listener = dev
        .listen(Some(addr.port()))
        .await
        .with_context(|| format!("cannot listen on {} {addr}", args.common.transport.name()))?;
    listener.set_mpa(args.common.mpa());
    let local = listener.local_addr();
    let udp_port = dev.udp_addr().map(|addr| addr.port());
    let shared = Arc::new(Shared {
        dev,
        common: args.common.clone(),
        service: args.service,
        json: args.json,
        idle: args.idle_timeout,
        stop: stop.clone(),
        max_clients: args.max_clients,
        max_memory: args.max_memory,
        room: Arc::new(Semaphore::new(args.max_clients as usize)),
        memory: Arc::new(Semaphore::new(args.max_memory / PAGE)),
        newcomers: Mutex::default(),
        patience: Semaphore::new(PATIENT),
        number: AtomicU64::new(0),
        totals: Mutex::default(),
        failed: AtomicBool::new(false),
    });
    shared.event(
        &json!({
            "event": "listening",
            "transport": args.common.transport.name(),
            "addr": local.ip().to_string(),
            "port": local.port(),
            "udp_port": udp_port,
        }),
        &format!(
            "listening on {} {local}{}, as {}",
            args.common.transport.name(),
            udp_port.map(|port| format!(" behind UDP port {port}")).unwrap_or_default(),
            args.service.name()
        ),
    );
    if !local.ip().to_canonical().is_loopback() {
        note(&format!(
            "warning: {local} is reachable from other hosts, and nothing here asks who they are"
        ));
    }

    let mut clients = JoinSet::new();
    let mut errors = 0;
    let mut all_ok = true;
    loop {
        let request = tokio::select! {
            request = listener.accept() => request,
            // Finished clients leave the set as they go.
            Some(_) = clients.join_next(), if !clients.is_empty() => continue,
            () = stop.raised() => break,
        };
        let request = match request {
            Ok(request) => request,
            Err(e) if errors < 10 => {
                // Too many open files, and the like: it may pass.
                errors += 1;
                note(&format!("warning: cannot accept a connection: {}", chain(&e.into())));
                sleep(Duration::from_millis(100)).await;
                continue;
            }
            Err(e) => return Err(e).context("cannot accept connections"),
        };
        errors = 0;
        let client = client(Arc::clone(&shared), request);
        if args.once {
            all_ok = client.await;
            break;
        }
        clients.spawn(client);
    }

    // Whoever is still connected gets a moment to be told; the rest ends with its task.
    let drain = async { while clients.join_next().await.is_some() {} };
    let _ = timeout(Duration::from_secs(1), drain).await;
    clients.abort_all();
    if args.common.counts() {
        summary(&shared);
    }
    roce::check_capture(shared.dev.roce_stats().as_ref());
    let all_ok = all_ok && !shared.failed.load(Ordering::Relaxed);
    Ok(if all_ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn summary(shared: &Shared) {
    let totals = *lock(&shared.totals);
    let d = shared.dev.stats();
    let roce = shared.dev.roce_stats();
    shared.event(
        &json!({
            "event": "summary",
            "clients": totals.clients,
            "failed": totals.failed,
            "connections": d.connections,
            "rejected": d.rejected,
            "refused": d.refused,
            "startup_timeouts": d.startup_timeouts,
            "startup_malformed": d.startup_malformed,
            "startup_lost": d.startup_lost,
            "accept_errors": d.accept_errors,
            "counters": match &roce {
                Some(stats) => roce::counters_json(stats),
                None => counters_json(&totals.stats),
            },
        }),
        &format!(
            "{}, {} failed\n\
             connections {}, rejected {}, refused {}, start-ups timed out {} malformed {} lost {}, \
             accept errors {}\n{}",
            counted(totals.clients, "client"),
            totals.failed,
            d.connections,
            d.rejected,
            d.refused,
            d.startup_timeouts,
            d.startup_malformed,
            d.startup_lost,
            d.accept_errors,
            match &roce {
                Some(stats) => roce::counters(stats),
                None => counters(&totals.stats),
            },
        ),
    );
}

/// Serves one client from its request to its end. Says whether it went well.
async fn client(shared: Arc<Shared>, request: ConnRequest) -> bool {
    let peer = request.peer_addr();
    let asked = Hello::read(request.private_data());
    let mode = match &asked {
        Asked::Stranger => shared.service.name(),
        Asked::Known(hello) => hello.mode.name(),
        Asked::Refused(..) => "refused",
    };
    let held = match shared.admit(&asked).await {
        Ok(admitted) => Held::new(Mutex::new(Some(admitted))),
        Err(why) => {
            let answer = match asked {
                Asked::Known(hello) => session::refusal(hello.mode.code(), &why),
                Asked::Stranger | Asked::Refused(..) => session::short(&why).into(),
            };
            shared.failure(peer, mode, &anyhow!("rejected: {why}"));
            // The peer may be gone: there is nothing more to tell it.
            let _ = request.reject(&answer).await;
            shared.count(false, None);
            return false;
        }
    };
    let number = shared.number.fetch_add(1, Ordering::Relaxed);
    let mut stats = None;
    let served = tokio::select! {
        served = dispatch(&shared, request, asked, (number, &held), &mut stats) => Some(served),
        () = shared.stop.raised() => None,
    };
    let served = match served {
        Some(served) => served,
        None => {
            // The client is told by the end of the connection, in order if it answers at once.
            if let Some(qp) = &stats {
                let _ = timeout(Duration::from_millis(500), userdma::Qp::disconnect(qp)).await;
            }
            Err(anyhow!("the server was told to end"))
        }
    };
    lock(&shared.newcomers).remove(&number);
    let Some(_admitted) = lock(&held).take() else {
        shared.failure(
            peer,
            mode,
            &anyhow!("gave way to another: it never finished its connection"),
        );
        shared.count(false, None);
        return false;
    };
    let ok = match served {
        Ok((details, text, ok)) => {
            let mut event = json!({
                "event": "done",
                "peer": peer.to_string(),
                "mode": mode,
                "ok": ok,
            });
            merge(&mut event, details);
            shared.event(&event, &format!("{peer} ({mode}): done, {text}"));
            ok
        }
        Err(e) => {
            shared.failure(peer, mode, &e);
            false
        }
    };
    shared.count(ok, stats.map(|qp: userdma::Qp| qp.stats()));
    ok
}

fn merge(event: &mut Value, details: Value) {
    if let (Value::Object(event), Value::Object(details)) = (event, details) {
        event.extend(details);
    }
}

/// What a served client came to: details for JSON, the same as text, whether it went well.
type Outcome = (Value, String, bool);

async fn dispatch(
    shared: &Shared,
    request: ConnRequest,
    asked: Asked,
    held: (u64, &Held),
    qp: &mut Option<userdma::Qp>,
) -> Result<Outcome> {
    match asked {
        Asked::Refused(answer, why) => {
            request.reject(&answer).await.context("cannot reject")?;
            bail!("rejected: {why}");
        }
        Asked::Known(hello) => {
            let seed = hello.seed;
            let acceptance = hello.acceptance();
            match hello.mode {
                Mode::Demo { size, count } => {
                    let shape = demo::Peer::SHAPE;
                    let link = make(shared, shape, qp)?;
                    let first = First::post(&link)?;
                    let details = json!({"size": size, "count": count});
                    accept(shared, request, &link, held, &acceptance, hello.mode, details).await?;
                    let first = first.received(&link).await?;
                    let mut peer = demo::Peer::new(link.clone(), seed, size, count)?;
                    peer.post_receives()?;
                    let served = demo::serve(&mut peer, &first).await?;
                    let closed = well(&end(&link).await, true)?;
                    let mismatch = served.mismatch_text();
                    let ok = mismatch.is_none();
                    let text = match &mismatch {
                        None => format!("{} verified", counted(served.verified, "message")),
                        Some(mismatch) => format!("MISMATCH in {mismatch}"),
                    };
                    let details = json!({
                        "messages": served.messages,
                        "verified": served.verified,
                        "mismatch": mismatch,
                        "closed": closed,
                    });
                    Ok((details, text, ok))
                }
                Mode::Perf { op, measure, size, millis } => {
                    let run = perf::Run { op, measure, size, millis };
                    let link = make(shared, perf::shape(run), qp)?;
                    let first = First::post(&link)?;
                    let details = json!({
                        "op": op.name(),
                        "measure": measure.name(),
                        "size": size,
                        "duration": f64::from(millis) / 1000.0,
                    });
                    accept(shared, request, &link, held, &acceptance, hello.mode, details).await?;
                    let begin = first.received(&link).await?;
                    let side = perf::Side::new(link.clone(), run)?;
                    side.post_receives()?;
                    let stop = shared.stop.clone();
                    // It spins: it gets a thread of its own.
                    let result = spawn_blocking(move || perf::serve(side, &begin, &stop))
                        .await
                        .context("the measuring thread died")?;
                    let result = match result {
                        Ok(result) => result,
                        Err(e) if link.qp.state() == QpState::Err => {
                            return Err(with_reason(e, &link.qp).await);
                        }
                        Err(e) => return Err(e),
                    };
                    let closed = well(&end(&link).await, true)?;
                    let mut details = if result.claimed {
                        json!({"claimed_messages": result.messages})
                    } else {
                        json!({"messages": result.messages})
                    };
                    if let Some(octets) = result.octets {
                        merge(&mut details, json!({"bytes": octets}));
                    }
                    merge(&mut details, json!({"closed": closed}));
                    let by = if result.claimed { " by the client's own count" } else { "" };
                    Ok((details, format!("{}{by}", counted(result.messages, "message")), true))
                }
            }
        }
        Asked::Stranger => match shared.service {
            Service::Rping => {
                let shape = Shape { sends: 8, recvs: 8, depth: 16, one_cq: false };
                let link = make(shared, shape, qp)?;
                let server = rping::Server::prepare(&link)?;
                accept(shared, request, &link, held, &[], shared.service, json!({})).await?;
                let verbose = shared.common.verbose && !shared.json;
                let (rounds, outcome) = server.serve(&link, shared.idle.0, verbose).await;
                if let Err(e) = outcome {
                    return Err(give_up(e, &link).await);
                }
                let rounds_text = counted(rounds, "round");
                let closed = well(&end(&link).await, rounds > 0)
                    .with_context(|| format!("after {rounds_text}"))?;
                Ok((json!({"rounds": rounds, "closed": closed}), rounds_text, true))
            }
            Service::RdmaServer => {
                let shape = Shape { sends: 8, recvs: 8, depth: 16, one_cq: false };
                let link = make(shared, shape, qp)?;
                let closed = match rdma_server(shared, request, &link, held).await {
                    Ok(closed) => closed,
                    Err(e) => return Err(give_up(e, &link).await),
                };
                let details = json!({"messages": 2, "closed": closed});
                Ok((details, "one message each way".into(), true))
            }
        },
    }
}

/// The counterpart of librdmacm's rdma_client: receives 16 octets, sends 16, and the client
/// closes.
async fn rdma_server(
    shared: &Shared,
    request: ConnRequest,
    link: &Link,
    held: (u64, &Held),
) -> Result<&'static str> {
    const LEN: usize = 16;
    let buffer = link.pd.register(Region::alloc(LEN)?, Access::LOCAL_WRITE)?;
    link.qp.post_recv(RecvWr::new(0, [buffer.slice(0..LEN)]))?;
    accept(shared, request, link, held, &[], shared.service, json!({})).await?;
    let wc = within(shared.idle.0, link.recv_cq.next()).await.context(rping::IDLE)??;
    if is_flush(&wc) {
        bail!("the client closed without a message");
    }
    check_wc(&wc, "the receive")?;
    if wc.byte_len as usize != LEN {
        bail!("the client sent {} octets, rdma_client sends {LEN}", wc.byte_len);
    }
    link.qp.post_send(SendWr::inline(0, SendOp::Send, &[0; LEN]))?;
    let wc = within(shared.idle.0, link.send_cq.next()).await.context(rping::IDLE)??;
    check_last(&wc, "the SEND of the answer", &link.qp).await?;
    well(&end(link).await, true)
}

/// The receive of a demo's or a perf's first message. Until that comes the client holds no more
/// memory than this.
struct First(Mr);

impl First {
    /// More than any first message has.
    const LEN: usize = 256;

    fn post(link: &Link) -> Result<Self> {
        let mr = link.pd.register(Region::alloc(Self::LEN)?, Access::LOCAL_WRITE)?;
        link.qp.post_recv(RecvWr::new(0, [mr.slice(0..Self::LEN)]))?;
        Ok(Self(mr))
    }

    /// Sleeps until the message is there.
    async fn received(self, link: &Link) -> Result<Vec<u8>> {
        let wc = timeout(FIRST_STEP, link.recv_cq.next()).await.map_err(|_| {
            anyhow!("the client said nothing for {} s after it connected", FIRST_STEP.as_secs())
        })??;
        if let Err(e) = check_wc(&wc, "the receive of the first message") {
            return Err(with_reason(e, &link.qp).await);
        }
        let mut message = vec![0; wc.byte_len as usize];
        self.0.read_at(0, &mut message)?;
        Ok(message)
    }
}

/// Queues and a queue pair that is not connected yet.
fn make(shared: &Shared, shape: Shape, made: &mut Option<userdma::Qp>) -> Result<Link> {
    let pd = shared.dev.alloc_pd()?;
    let init = shape.queues(&shared.dev, &shared.common)?;
    let (send_cq, recv_cq) = (init.send_cq.clone(), init.recv_cq.clone());
    let qp = pd.create_qp(init)?;
    *made = Some(qp.clone());
    Ok(Link { dev: shared.dev.clone(), pd, send_cq, recv_cq, qp })
}

/// What a client is, for events: one word, and with its details.
trait Kind: fmt::Display {
    fn name(&self) -> &'static str;
}

impl Kind for Mode {
    fn name(&self) -> &'static str {
        Self::name(*self)
    }
}

impl Kind for Service {
    fn name(&self) -> &'static str {
        Self::name(*self)
    }
}

impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

async fn accept(
    shared: &Shared,
    request: ConnRequest,
    link: &Link,
    held: (u64, &Held),
    private_data: &[u8],
    what: impl Kind,
    details: Value,
) -> Result<()> {
    let peer = request.peer_addr();
    request.accept_qp(&link.qp, private_data).await.context("cannot accept")?;
    if shared.dev.udp_addr().is_some() {
        let (number, held) = held;
        let newcomer = Newcomer { qp: link.qp.clone(), held: held.clone(), since: Instant::now() };
        lock(&shared.newcomers).insert(number, newcomer);
    }
    let mut event = json!({"event": "connected", "peer": peer.to_string(), "mode": what.name()});
    merge(&mut event, details);
    shared.event(&event, &format!("{peer}: {what}"));
    if shared.common.verbose
        && let Some(settled) = link.settled()
    {
        note(&format!("{peer}: {settled}"));
    }
    Ok(())
}

/// The client closes first; one that does not within a while is closed.
async fn end(link: &Link) -> CloseReason {
    if let Ok(reason) = timeout(Duration::from_secs(5), link.qp.closed()).await {
        return reason;
    }
    close(&link.qp).await;
    link.qp.closed().await
}

/// Ends a connection because of `error`, in order if the client lets it: that is how it is told.
/// The error comes back with the connection's own end where that came first.
async fn give_up(error: anyhow::Error, link: &Link) -> anyhow::Error {
    if link.qp.peer_addr().is_none() {
        return error;
    }
    if link.qp.state() == QpState::Err {
        return with_reason(error, &link.qp).await;
    }
    close(&link.qp).await;
    error
}

/// How the connection of a client ended, in a word for JSON; an error if that was not in order.
///
/// A client that is `complete` got all it asked for, at least one round of rping, and nothing was
/// under way: it may end its process without closing, which resets TCP (`rping -c` of the kernel
/// may do so). Then it was served well, and the word tells how it left.
fn well(reason: &CloseReason, complete: bool) -> Result<&'static str> {
    match reason {
        CloseReason::Graceful => Ok("graceful"),
        CloseReason::Lost if complete => Ok("lost"),
        CloseReason::Aborted if complete => Ok("aborted"),
        other => bail!("the connection ended: {}", reason_text(other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_idle_times() {
        assert_eq!(octets("1048576"), Ok(1 << 20));
        assert_eq!(octets("64MiB"), Ok(64 << 20));
        assert_eq!(octets("2G"), Ok(2 << 30));
        for text in ["", "0", "1048575", "-1MiB", "+2G", "1.5GiB", "9TiB", "MiB", "99999999999GiB"]
        {
            assert!(octets(text).is_err(), "{text}");
        }
        assert_eq!(idle_timeout("0"), Ok(Idle(None)));
        assert_eq!(idle_timeout("2.5"), Ok(Idle(Some(Duration::from_millis(2500)))));
        for text in ["-1", "x", "nan", "86401"] {
            assert!(idle_timeout(text).is_err(), "{text}");
        }
    }

    #[test]
    fn details_join_the_event() {
        let mut event = json!({"event": "done", "ok": true});
        merge(&mut event, json!({"rounds": 3}));
        assert_eq!(event, json!({"event": "done", "ok": true, "rounds": 3}));
    }
}
