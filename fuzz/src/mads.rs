//! MADs of the connection manager that are nearly right, and a look at ours.

use std::{
    collections::{BTreeMap, VecDeque},
    net::IpAddr,
};

use userdma_proto::{
    roce::cm::{ConnId, Event, Token},
    wire::{
        ids::{Gid, PKey, Psn, QKey, Qpn},
        mad::{
            CLASS_CM, MAD_LEN, METHOD_SEND, Mad,
            cm::{
                self, Apr, Drep, Dreq, IpCm, Lap, Message, Mra, Path, PortSpace, Reason, Rej, Rep,
                Req, Rtu, SidrRep, SidrReq,
            },
        },
    },
};

use crate::{Choices, mad::check_message};

pub(crate) const SERVICE: u64 = PortSpace::TCP.service_id(7174);
pub(crate) const OTHER_SERVICE: u64 = PortSpace::TCP.service_id(7175);
/// Of no port of rdma_cm.
pub(crate) const PLAIN_SERVICE: u64 = 0x1234;
pub(crate) const UD_SERVICE: u64 = PortSpace::UDP.service_id(7174);
pub(crate) const SERVICES: [u64; 4] = [SERVICE, OTHER_SERVICE, PLAIN_SERVICE, UD_SERVICE];

/// MADs that are remembered.
const MOST_SEEN: usize = 24;

/// What somebody knows who sees the MADs that managers send.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// The newest one first.
    mads: VecDeque<[u8; MAD_LEN]>,
    /// The queue pairs that go by a communication ID.
    qpns: BTreeMap<u32, Qpn>,
    /// The transaction of every communication ID: none stands for two connections.
    transactions: BTreeMap<u32, u64>,
}

impl Seen {
    /// A manager sent this MAD, which must be good.
    pub(crate) fn see(&mut self, mad: &[u8; MAD_LEN]) {
        let parsed = Mad::parse(mad).expect("a whole header");
        assert_eq!((parsed.header.mgmt_class, parsed.header.method), (CLASS_CM, METHOD_SEND));
        let message = parsed.cm().expect("a whole body").expect("a message");
        check_message(message.attribute(), &message);
        if let Message::Req(_) | Message::Rep(_) | Message::SidrReq(_) = message {
            let id = message.local_comm_id().expect("it has one");
            let tid = parsed.header.tid();
            let before = *self.transactions.entry(id).or_insert(tid);
            assert_eq!(before, tid, "ID {id:#x} was used twice");
        }
        let (Message::Req(Req { qpn, local_comm_id: id, .. })
        | Message::Rep(Rep { qpn, local_comm_id: id, .. })) = message
        else {
            self.keep(mad);
            return;
        };
        if self.qpns.len() > 4 * MOST_SEEN {
            self.qpns.pop_first();
        }
        self.qpns.insert(id, qpn);
        self.keep(mad);
    }

    fn keep(&mut self, mad: &[u8; MAD_LEN]) {
        self.mads.truncate(MOST_SEEN - 1);
        self.mads.push_front(*mad);
    }

    /// A MAD from `from` to `to`. One octet: the message; one: which MAD it answers, the newest
    /// one is 0; one of flags: bit 0 another communication ID, bit 1 another transaction, bit 2
    /// another ID of the sender, bit 3 another queue pair; then what the message needs.
    pub(crate) fn mad(&self, choices: &mut Choices<'_>, from: IpAddr, to: IpAddr) -> [u8; MAD_LEN] {
        let (what, which, flags): (u8, u8, u8) = (choices.any(), choices.any(), choices.any());
        let seen = self.mads.get(usize::from(which) % self.mads.len().max(1));
        let answered = seen.and_then(|mad| Mad::parse(mad).ok());
        let message = answered.as_ref().and_then(|mad| mad.cm().ok().flatten());
        let tid = answered.as_ref().map_or(7, |mad| mad.header.tid());
        let tid = if flags & 2 == 0 { tid } else { choices.any::<u8>().into() };
        let number = |id: Option<u32>, on: bool, choices: &mut Choices<'_>| match id {
            Some(id) if !on && id != 0 => id,
            _ => choices.any::<u8>().into(),
        };
        // What is theirs for the manager is the sender's own.
        let remote = message.as_ref().and_then(Message::local_comm_id);
        let qpn = remote.and_then(|id| self.qpns.get(&id)).map(|qpn| qpn.0);
        let remote_comm_id = number(remote, flags & 1 != 0, choices);
        let local = message.as_ref().and_then(Message::remote_comm_id);
        let local_comm_id = number(local, flags & 4 != 0, choices);
        let remote_qpn = Qpn(number(qpn, flags & 8 != 0, choices));
        let private = choices.any::<u8>();
        let text = [private; 24];
        let private_data = &text[..usize::from(private) % 25];
        let code: u8 = choices.any();
        let mut area = Vec::new();
        let message: Message<'_> = match what % 12 {
            0 | 11 => {
                let service_id = SERVICES[usize::from(code & 3)];
                self.request_data(choices, service_id, (from, to), private_data, &mut area);
                area.resize(Req::PRIVATE_DATA_LEN, 0);
                token(private, &mut area);
                let [qp, timeouts, retries, kind]: [u8; 4] =
                    core::array::from_fn(|_| choices.any());
                let path = Path::roce(Gid::from(from), Gid::from(to));
                Req {
                    local_comm_id,
                    service_id,
                    qpn: Qpn(qp.into()),
                    responder_resources: code >> 2,
                    initiator_depth: qp,
                    remote_cm_timeout: timeouts & 31,
                    transport: kind & 3,
                    flow_control: kind & 4 != 0,
                    start_psn: Psn::new(100),
                    local_cm_timeout: (timeouts >> 3) & 31,
                    retry_count: retries & 7,
                    pkey: PKey(0xffff),
                    mtu: (kind >> 5) ^ 3,
                    rnr_retry_count: retries >> 3 & 7,
                    max_cm_retries: retries >> 4,
                    primary: Path { ack_timeout: retries & 31, traffic_class: qp, ..path },
                    private_data: &area,
                    ..Req::default()
                }
                .into()
            }
            1 => Mra {
                local_comm_id,
                remote_comm_id,
                message: code >> 5 & 3,
                service_timeout: code & 31,
                private_data,
            }
            .into(),
            2 => Rej {
                local_comm_id,
                remote_comm_id,
                message: code & 3,
                info_len: private & 7,
                reason: Reason(u16::from(code >> 2 & 31)),
                ari: &[3, 0, 0, 0, 0, 0, 0, 0],
                private_data,
            }
            .into(),
            3 => {
                area.extend_from_slice(private_data);
                area.resize(Rep::PRIVATE_DATA_LEN, 0);
                token(private, &mut area);
                let qp: u8 = choices.any();
                Rep {
                    local_comm_id,
                    remote_comm_id,
                    qpn: Qpn(qp.into()),
                    start_psn: Psn::new(100),
                    responder_resources: code & 15,
                    initiator_depth: code >> 4,
                    target_ack_delay: private & 31,
                    rnr_retry_count: code & 7,
                    private_data: &area,
                    ..Rep::default()
                }
                .into()
            }
            4 => Rtu { local_comm_id, remote_comm_id, private_data }.into(),
            5 => Dreq { local_comm_id, remote_comm_id, remote_qpn, private_data }.into(),
            6 => Drep { local_comm_id, remote_comm_id, private_data }.into(),
            7 => {
                let service_id = SERVICES[3 - usize::from(code & 3)];
                self.request_data(choices, service_id, (from, to), private_data, &mut area);
                area.resize(SidrReq::PRIVATE_DATA_LEN, 0);
                token(private, &mut area);
                SidrReq {
                    request_id: local_comm_id,
                    pkey: PKey(0xffff),
                    service_id,
                    private_data: &area,
                }
                .into()
            }
            8 => SidrRep {
                request_id: remote_comm_id,
                status: code & 3,
                qpn: remote_qpn,
                service_id: UD_SERVICE,
                qkey: QKey(9),
                private_data,
                ..SidrRep::default()
            }
            .into(),
            9 => Lap { local_comm_id, remote_comm_id, private_data, ..Lap::default() }.into(),
            _ => Apr { local_comm_id, remote_comm_id, private_data, ..Apr::default() }.into(),
        };
        let mut out = [0; MAD_LEN];
        message.emit_mad(tid, METHOD_SEND, &mut out);
        out
    }

    /// What a request begins with: rdma_cm's header where its service has one, unless an octet
    /// says otherwise.
    fn request_data(
        &self,
        choices: &mut Choices<'_>,
        service_id: u64,
        (from, to): (IpAddr, IpAddr),
        private_data: &[u8],
        area: &mut Vec<u8>,
    ) {
        if PortSpace::of_service_id(service_id).is_some() && choices.any::<u8>() < 0xe0 {
            area.extend(IpCm::new(from, 7, to).map(|ip| ip.to_bytes()).into_iter().flatten());
        }
        area.extend_from_slice(private_data);
    }
}

/// Puts a token at the end of the area, if the lowest bit says so; its port is the upper ones'.
fn token(choice: u8, area: &mut [u8]) {
    if choice & 1 == 0 {
        return;
    }
    let udp_port = 4791 + u16::from(choice >> 6);
    let token = Token { udp_port, out_of_order: choice & 2 != 0, window: 1 << (choice >> 2 & 15) };
    let at = area.len() - Token::LEN;
    area[at..].copy_from_slice(&token.to_bytes());
}

/// The life of one connection, as it was told.
#[derive(Debug, Default)]
pub(crate) struct Told {
    pub(crate) request: bool,
    pub(crate) rejected_by_us: bool,
    pub(crate) established: bool,
    pub(crate) over: bool,
    released: bool,
}

/// The life of all connections of a manager.
#[derive(Debug, Default)]
pub(crate) struct Lives(pub(crate) BTreeMap<ConnId, Told>);

impl Lives {
    /// We asked, or answered: the connection is known.
    pub(crate) fn told(&mut self, conn: ConnId) -> &mut Told {
        self.0.entry(conn).or_default()
    }

    /// Events in an order that is allowed, each once.
    pub(crate) fn follow(&mut self, event: &Event) {
        match event {
            Event::Request(request) => {
                assert!(
                    self.0
                        .insert(request.conn, Told { request: true, ..Told::default() })
                        .is_none()
                );
                assert!(cm::mtu(1) <= Some(request.mtu) && request.peer.port() != 0);
            }
            Event::Established(ready) => {
                let told = self.told(ready.conn);
                assert!(!told.established && !told.over && !told.rejected_by_us, "{told:?}");
                told.established = true;
                assert!(ready.peer.port() != 0);
            }
            Event::Rejected(rejected) => self.over(rejected.conn, event),
            Event::TimedOut { conn, .. }
            | Event::Dropped { conn }
            | Event::Disconnected { conn, .. }
            | Event::Resolved { conn, .. }
            | Event::Unresolved { conn, .. } => self.over(*conn, event),
            Event::Released { conn, .. } => {
                let told = self.told(*conn);
                assert!(told.established && told.over && !told.released, "{told:?}");
                told.released = true;
            }
            Event::Queried { private_data, .. } => {
                assert!(private_data.len() <= SidrReq::PRIVATE_DATA_LEN);
            }
            other => panic!("{other:?}"),
        }
    }

    fn over(&mut self, conn: ConnId, event: &Event) {
        let told = self.told(conn);
        assert!(!told.over && !told.rejected_by_us, "{event:?} after {told:?}");
        told.over = true;
    }

    /// Nothing happens any more: every connection came to its end.
    pub(crate) fn check_over(&self) {
        for (conn, told) in &self.0 {
            assert!(told.over || told.rejected_by_us, "{conn}: {told:?}");
            assert_eq!(told.established, told.released, "{conn}: {told:?}");
        }
    }
}
