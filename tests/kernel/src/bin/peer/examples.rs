//! The other sides of librdmacm's examples ucmatose and udaddy: who sends when.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use tokio::time::timeout;
use userdma::{
    Access, Cq, Device, Mr, Pd, Qp, QpInit, QpType, RDMA_UDP_QKEY, RecvWr, Region, SendOp, SendWr,
    proto::{
        roce::{PathMtu, QpAttr},
        verbs::{QpState, UdDest},
        wire::ids::Psn,
    },
};

use crate::{
    Settings, say, summary, text, told,
    traffic::{none, place, status},
};

const PATIENCE: Duration = Duration::from_secs(30);
/// In front of a datagram: room for the GRH.
const GRH: usize = 40;

/// `ucmatose`: the server sends `messages`, then the client does.
pub(crate) async fn cmatose(set: &Settings, server: bool) -> Result<bool> {
    let dev = set.device(server)?;
    let mut wrong = 0;
    if !server {
        for _ in 0..set.connections {
            let game = Game::new(&dev, set, QpType::Rc)?;
            let connected = dev.connect_qp(&set.peer(), &game.qp, &[]).await;
            connected.map_err(|e| told(&e))?;
            say(&json!({"event": "established"}));
            wrong += game.receive().await?;
            wrong += game.send(None).await?;
            let _ = timeout(PATIENCE, game.qp.closed()).await;
        }
        return Ok(summary(set.messages, set.messages, wrong));
    }
    let listener = dev.listen(Some(set.port)).await?;
    listener.set_mpa(set.mpa);
    say(&json!({"event": "listening"}));
    for _ in 0..set.connections {
        let request = listener.accept().await?;
        let game = Game::new(&dev, set, QpType::Rc)?;
        request.accept_qp(&game.qp, &[]).await?;
        say(&json!({"event": "established"}));
        // Over iWARP the library holds these back until the client's first FPDU is there.
        wrong += game.send(None).await?;
        wrong += game.receive().await?;
        // It is the server that disconnects.
        game.end().await;
    }
    Ok(summary(set.messages, set.messages, wrong))
}

/// `rdma_client`: one message of 16 octets each way, and the client disconnects.
pub(crate) async fn rdma_client(set: &Settings) -> Result<bool> {
    let one = Settings { messages: 1, size: 16, ..set.clone() };
    let dev = set.device(false)?;
    let game = Game::new(&dev, &one, QpType::Rc)?;
    let connected = dev.connect_qp(&set.peer(), &game.qp, &[]).await;
    connected.map_err(|e| told(&e))?;
    say(&json!({"event": "established"}));
    let (mut wrong, mut open) = (0, 2);
    let from = place(&game.memory, 1, game.slot());
    let sge = userdma::Sge::new(from.addr, 16, from.lkey);
    game.qp.post_send(SendWr::send(1000, [sge]))?;
    // Which of the two comes first is the network's.
    while open > 0 {
        let wc = game.next().await?.context("the server does not answer")?;
        wrong += usize::from(!wc.status.is_ok() || wc.opcode.is_recv() && wc.byte_len != 16);
        open -= 1;
    }
    game.end().await;
    Ok(summary(1, 1, wrong))
}

/// `udaddy`: the client asks for the service, sends `messages` datagrams, and gets as many back.
pub(crate) async fn udaddy(set: &Settings, server: bool) -> Result<bool> {
    let dev = set.device(server)?;
    let game = Game::new(&dev, set, QpType::Ud)?;
    let own = if server { set.address } else { set.from.context("--from is missing")? };
    let local = std::net::SocketAddr::new(own, 4791);
    game.qp.modify(&QpAttr { qkey: Some(RDMA_UDP_QKEY), ..QpAttr::to(QpState::Init) })?;
    game.post_receives()?;
    game.qp.modify(&QpAttr {
        local: Some(local),
        path_mtu: Some(PathMtu::Mtu1024),
        ..QpAttr::to(QpState::Rtr)
    })?;
    game.qp.modify(&QpAttr { sq_psn: Some(Psn::new(0)), ..QpAttr::to(QpState::Rts) })?;
    if !server {
        let service = dev.resolve(&set.peer(), &[]).await.map_err(|e| told(&e))?;
        say(
            &json!({"event": "resolved", "qpn": service.dest.qpn.0, "private": text(&service.private_data)}),
        );
        let mut wrong = game.send(Some(service.dest)).await?;
        wrong += game.receive().await?;
        return Ok(summary(set.messages, set.messages, wrong));
    }
    let _listener =
        dev.listen_datagrams(Some(set.port), &game.qp, RDMA_UDP_QKEY, b"served by peer")?;
    say(&json!({"event": "listening"}));
    let (mut wrong, mut from) = (0, None);
    for _ in 0..set.messages {
        let wc = game.next().await?.context("the client's datagrams stay away")?;
        wrong += usize::from(!wc.status.is_ok() || wc.byte_len as usize != set.size + GRH);
        // Whom to answer: by its queue pair, and by the address in the GRH.
        let mut grh = [0; GRH];
        game.memory.read_at(wc.id as usize * game.slot(), &mut grh)?;
        from = wc.src_qp.map(|qpn| (qpn, source(&grh)));
    }
    let (qpn, ip) = from.context("a datagram without a source")?;
    let addr = std::net::SocketAddr::new(ip, 4791);
    wrong += game.send(Some(UdDest { addr, qpn, qkey: RDMA_UDP_QKEY })).await?;
    // The answers leave before the socket goes.
    tokio::time::sleep(Duration::from_millis(200)).await;
    Ok(summary(set.messages, set.messages, wrong))
}

/// The source address in a GRH area: an IPv4 header in the last 20 octets, or an IPv6 header.
fn source(grh: &[u8; GRH]) -> std::net::IpAddr {
    if grh[20] == 0x45 {
        return std::net::Ipv4Addr::new(grh[32], grh[33], grh[34], grh[35]).into();
    }
    let mut octets = [0; 16];
    octets.copy_from_slice(&grh[8..24]);
    std::net::Ipv6Addr::from(octets).to_canonical()
}

/// A queue pair, and memory for what comes and what goes.
struct Game {
    set: Settings,
    cq: Cq,
    qp: Qp,
    /// Receives in front, what is sent behind them.
    memory: Mr,
    _pd: Pd,
}

impl Game {
    fn new(dev: &Device, set: &Settings, kind: QpType) -> Result<Self> {
        let pd = dev.alloc_pd()?;
        let cq = dev.create_cq(4 * set.messages + 16)?;
        let init = QpInit {
            max_send_wr: set.messages + 1,
            max_recv_wr: set.messages + 1,
            mtu: set.mtu,
            mpa: set.mpa,
            ..QpInit::new(&cq).kind(kind)
        };
        let qp = pd.create_qp(init)?;
        let memory = pd.register(
            Region::alloc((set.messages + 1) * (set.size + GRH).max(1))?,
            Access::LOCAL_WRITE,
        )?;
        let game = Self { set: set.clone(), cq, qp, memory, _pd: pd };
        if kind != QpType::Ud {
            game.post_receives()?;
        }
        Ok(game)
    }

    fn slot(&self) -> usize {
        self.set.size + GRH
    }

    fn post_receives(&self) -> Result<()> {
        for number in 0..self.set.messages {
            let sge = place(&self.memory, number, self.slot());
            self.qp.post_recv(RecvWr::new(number as u64, [sge]))?;
        }
        Ok(())
    }

    async fn next(&self) -> Result<Option<userdma::Wc>> {
        match timeout(PATIENCE, self.cq.next()).await {
            Ok(wc) => Ok(Some(wc?)),
            Err(_) => Ok(None),
        }
    }

    /// Waits for all messages of the peer. Gives how many were wrong.
    async fn receive(&self) -> Result<usize> {
        let mut wrong = 0;
        for n in 0..self.set.messages {
            let wc = self.next().await?;
            let wc = wc.with_context(|| format!("{n} messages came of {}", self.set.messages))?;
            if wc.qpn != self.qp.qpn() || !wc.status.is_ok() || !wc.opcode.is_recv() {
                say(&json!({"event": "received", "status": status(&wc)}));
                wrong += 1;
            }
        }
        Ok(wrong)
    }

    /// Sends all messages, and waits until they are gone. Gives how many were wrong.
    async fn send(&self, to: Option<UdDest>) -> Result<usize> {
        let from = place(&self.memory, self.set.messages, self.slot());
        let sge = userdma::Sge::new(from.addr, self.set.size as u32, from.lkey);
        for n in 0..self.set.messages {
            // As the examples do it: all with an immediate over datagrams.
            let op = if to.is_some() { SendOp::SendImm(self.qp.qpn().0) } else { SendOp::Send };
            let wr = SendWr::new(1000 + n as u64, op, [sge]);
            let wr = match to {
                Some(dest) => wr.to(dest),
                None => wr,
            };
            self.qp.post_send(wr)?;
        }
        let (mut wrong, mut gone) = (0, 0);
        while gone < self.set.messages {
            let wc = self.next().await?.context("what was sent does not complete")?;
            ensure!(!wc.opcode.is_recv(), "a message came too early");
            wrong += usize::from(!wc.status.is_ok());
            gone += 1;
        }
        Ok(wrong)
    }

    async fn end(&self) {
        if timeout(Duration::from_secs(5), self.qp.disconnect()).await.is_err() {
            say(&json!({"event": "aborted", "why": none().to_string()}));
            self.qp.abort();
        }
    }
}
