//! Management datagrams in words: the connection manager's messages in full, of others the names.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use userdma_proto::wire::mad::{
    CLASS_CM, Mad, attribute_name, class_name,
    cm::{self, Message},
    method_name,
};

use super::{
    line::{Line, Style},
    text::{private_data, wrong},
};

/// What a management datagram says.
pub(super) fn mad(line: &mut Line, octets: &[u8]) {
    line.text("  ");
    let mad = match Mad::parse(octets) {
        Ok(mad) => mad,
        Err(e) => return line.paint(Style::Bad, |line| line.display(e)),
    };
    let (class, method) = (mad.header.mgmt_class, mad.header.method);
    let attribute = mad.header.attribute_id.get();
    let name = |line: &mut Line, name: Option<&'static str>, code: u64, digits| match name {
        Some(name) => line.text(name),
        None => line.hex_of(code, digits),
    };
    line.paint(Style::Name, |line| {
        name(line, class_name(class), class.into(), 2);
        // All of the connection manager's messages are sent the same way.
        if class != CLASS_CM {
            line.byte(b' ');
            name(line, method_name(class, method), method.into(), 2);
        }
        line.byte(b' ');
        name(line, attribute_name(class, attribute), attribute.into(), 4);
    });
    if mad.header.status() != 0 {
        line.text("  ");
        line.paint(Style::Warn, |line| {
            line.text("status ");
            line.hex_of(mad.header.status().into(), 4);
        });
    }
    match mad.cm() {
        Ok(Some(message)) => cm(line, &message),
        Ok(None) => {}
        Err(e) => wrong(line, "error: ", &e.to_string()),
    }
}

/// A message of the connection manager in words.
fn cm(line: &mut Line, message: &Message<'_>) {
    let found = message.ip_cm();
    let ip_cm = found.as_ref().map(|(ip_cm, _)| ip_cm);
    // These two say nothing but whose they are.
    if !matches!(message, Message::Rtu(_) | Message::Drep(_)) {
        line.text("  ");
    }
    match message {
        Message::Req(m) => {
            service(line, m.service_id, ip_cm);
            queue_pair(line, m.qpn.0, m.start_psn.get());
            line.text(", ");
            line.text(match (m.transport, m.extended_transport) {
                (0, _) => "RC",
                (1, _) => "UC",
                (2, _) => "RD",
                (_, 1) => "XRC",
                _ => "transport unknown",
            });
            line.text(", path MTU ");
            match cm::mtu(m.mtu) {
                Some(mtu) => line.num(mtu),
                None => {
                    line.text("code ");
                    line.num(m.mtu);
                }
            }
            line.text(", retries ");
            line.num(m.retry_count);
            rnr_retries(line, m.rnr_retry_count);
            line.text(", ACK timeout ");
            match m.primary.ack_timeout {
                0 => line.text("none"),
                code => timeout(line, code),
            }
            depths(line, m.responder_resources, m.initiator_depth);
            if m.srq {
                line.text(", SRQ");
            }
            identifiers(line, m.local_comm_id, None);
        }
        Message::Rep(m) => {
            line.text("QP ");
            line.hex_of(m.qpn.0.into(), 6);
            line.text(", PSN ");
            line.num(m.start_psn.get());
            rnr_retries(line, m.rnr_retry_count);
            depths(line, m.responder_resources, m.initiator_depth);
            if m.srq {
                line.text(", SRQ");
            }
            identifiers(line, m.local_comm_id, Some(m.remote_comm_id));
        }
        Message::Rej(m) => {
            refused(line, m.reason.name(), m.reason.0);
            if let Some(answered @ ("REQ" | "REP")) = m.message_name() {
                line.text(", answers the ");
                line.text(answered);
            }
            identifiers(line, m.local_comm_id, Some(m.remote_comm_id));
        }
        Message::Mra(m) => {
            line.text("got the ");
            line.text(m.message_name().unwrap_or("message"));
            line.text(", wait ");
            timeout(line, m.service_timeout);
            identifiers(line, m.local_comm_id, Some(m.remote_comm_id));
        }
        Message::Rtu(m) => identifiers(line, m.local_comm_id, Some(m.remote_comm_id)),
        Message::Dreq(m) => {
            line.text("QP ");
            line.hex_of(m.remote_qpn.0.into(), 6);
            identifiers(line, m.local_comm_id, Some(m.remote_comm_id));
        }
        Message::Drep(m) => identifiers(line, m.local_comm_id, Some(m.remote_comm_id)),
        Message::SidrReq(m) => {
            service(line, m.service_id, ip_cm);
            identifiers(line, m.request_id, None);
        }
        Message::SidrRep(m) => {
            if m.status == cm::SidrRep::VALID {
                line.text("QP ");
                line.hex_of(m.qpn.0.into(), 6);
                line.text(", Q_Key ");
                line.hex_of(m.qkey.0.into(), 8);
            } else {
                refused(line, m.status_name(), m.status);
            }
            identifiers(line, m.request_id, None);
        }
        Message::Lap(m) => {
            line.text("QP ");
            line.hex_of(m.remote_qpn.0.into(), 6);
            line.text(", path ");
            line.ip(m.alternate.local_gid.to_ip());
            line.text(" > ");
            line.ip(m.alternate.remote_gid.to_ip());
            identifiers(line, m.local_comm_id, Some(m.remote_comm_id));
        }
        Message::Apr(m) => {
            if m.status == cm::Apr::LOADED {
                line.text("path loaded");
            } else {
                refused(line, m.status_name(), m.status);
            }
            identifiers(line, m.local_comm_id, Some(m.remote_comm_id));
        }
    }
    private_data(line, found.map_or(message.private_data(), |(_, rest)| rest));
}

/// Why not, and its code.
fn refused(line: &mut Line, why: Option<&'static str>, code: impl itoa::Integer) {
    line.paint(Style::Bad, |line| {
        line.text(why.unwrap_or("refused"));
        line.text(" (");
        line.num(code);
        line.byte(b')');
    });
}

/// Who asks for what.
fn service(line: &mut Line, service_id: u64, ip_cm: Option<&cm::IpCm>) {
    if let Some((ip_cm, (src, dst))) = ip_cm.and_then(|ip_cm| Some((ip_cm, ip_cm.addresses()?))) {
        socket(line, src, ip_cm.src_port);
        line.text(" > ");
        socket(line, dst, service_id as u16);
        if let Some((space, _)) = cm::PortSpace::of_service_id(service_id) {
            line.text(" (");
            line.display(space);
            line.text(" port space)");
        }
    } else {
        line.text("service ");
        line.hex_of(service_id, 16);
    }
}

fn socket(line: &mut Line, ip: IpAddr, port: u16) {
    let unspecified = [IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)];
    match ip {
        // A program that did not bind.
        ip if unspecified.contains(&ip) => line.byte(b'*'),
        IpAddr::V4(_) => line.ip(ip),
        IpAddr::V6(_) => {
            line.byte(b'[');
            line.ip(ip);
            line.byte(b']');
        }
    }
    line.byte(b':');
    line.num(port);
}

fn queue_pair(line: &mut Line, qpn: u32, psn: u32) {
    line.text(", QP ");
    line.hex_of(qpn.into(), 6);
    line.text(", PSN ");
    line.num(psn);
}

fn rnr_retries(line: &mut Line, n: u8) {
    line.text(", RNR retries ");
    match n {
        7 => line.text("without end"),
        n => line.num(n),
    }
}

/// READs and atomics at a time, as rdma_cm calls the two numbers.
fn depths(line: &mut Line, responder_resources: u8, initiator_depth: u8) {
    line.text(", responder resources ");
    line.num(responder_resources);
    line.text(", initiator depth ");
    line.num(initiator_depth);
}

fn timeout(line: &mut Line, code: u8) {
    let seconds = cm::timeout(code).as_secs_f64();
    match seconds {
        ..1e-3 => line.display(format_args!("{:.1} us", seconds * 1e6)),
        ..1.0 => line.display(format_args!("{:.1} ms", seconds * 1e3)),
        _ => line.display(format_args!("{seconds:.1} s")),
    }
}

fn identifiers(line: &mut Line, local: u32, remote: Option<u32>) {
    line.text("  id ");
    line.hex_of(local.into(), 8);
    if let Some(remote) = remote {
        line.text(" for ");
        line.hex_of(remote.into(), 8);
    }
}

#[cfg(test)]
mod tests {
    use super::{super::sample::*, *};
    use userdma_proto::wire::ids::{Psn, QKey, Qpn};

    #[test]
    fn messages_of_the_connection_manager() {
        let told = |message: Message<'_>| written(|line| cm(line, &message));
        let address = "10.0.0.1".parse().unwrap();
        let header = cm::IpCm::new(address, 40_000, "10.0.0.2".parse().unwrap()).unwrap();
        let data = [&header.to_bytes()[..], b"hello", &[0; 51]].concat();
        let mut req = cm::Req {
            local_comm_id: 0x77,
            service_id: cm::PortSpace::TCP.service_id(7174),
            qpn: Qpn(0x12),
            start_psn: Psn::new(5),
            responder_resources: 8,
            initiator_depth: 4,
            retry_count: 6,
            rnr_retry_count: 7,
            mtu: 3,
            private_data: &data,
            ..cm::Req::default()
        };
        req.primary.ack_timeout = 19;
        assert_eq!(
            told(req.into()),
            "  10.0.0.1:40000 > 10.0.0.2:7174 (TCP port space), QP 0x000012, PSN 5, RC, path MTU 1024, \
             retries 6, RNR retries without end, ACK timeout 2.1 s, responder resources 8, \
             initiator depth 4  id 0x00000077  private data \"hello\""
        );
        // A service that is not rdma_cm's: its private data is all the program's.
        (req.service_id, req.mtu, req.rnr_retry_count) = (0x1000_0000_0000_0005, 9, 3);
        (req.transport, req.extended_transport, req.srq) = (3, 1, true);
        let words = told(req.into());
        assert!(words.starts_with("  service 0x1000000000000005, QP"), "{words}");
        assert!(words.contains("XRC, path MTU code 9, retries 6, RNR retries 3, "), "{words}");
        assert!(words.contains(", SRQ  id 0x00000077  private data 0040"), "{words}");
        let rej = |reason| {
            let (local_comm_id, remote_comm_id) = (1, 2);
            let rej = cm::Rej { local_comm_id, remote_comm_id, reason, ..cm::Rej::default() };
            told(rej.into())
        };
        assert_eq!(
            rej(cm::Reason::INVALID_SERVICE_ID),
            "  invalid service ID (8), answers the REQ  id 0x00000001 for 0x00000002"
        );
        assert!(rej(cm::Reason(0x1234)).starts_with("  refused (4660), answers"));
        let rep =
            cm::Rep { local_comm_id: 1, remote_comm_id: 2, qpn: Qpn(3), ..cm::Rep::default() };
        let words = told(rep.into());
        assert!(words.starts_with("  QP 0x000003, PSN 0, RNR retries 0, responder"), "{words}");
        let rtu = cm::Rtu { local_comm_id: 1, remote_comm_id: 2, private_data: b"x" };
        assert_eq!(told(rtu.into()), "  id 0x00000001 for 0x00000002  private data \"x\"");
        let mra = cm::Mra { message: cm::Mra::LAP, service_timeout: 10, ..cm::Mra::default() };
        assert!(told(mra.into()).starts_with("  got the LAP, wait 4.2 ms  id"));
        let sidr = |status| {
            let rep =
                cm::SidrRep { status, qpn: Qpn(9), qkey: QKey(0x1_2345), ..Default::default() };
            told(rep.into())
        };
        assert_eq!(sidr(0), "  QP 0x000009, Q_Key 0x00012345  id 0x00000000");
        assert_eq!(sidr(1), "  service ID is not supported (1)  id 0x00000000");
        let apr = |status| told(cm::Apr { status, ..cm::Apr::default() }.into());
        assert!(apr(0).starts_with("  path loaded  id"), "{}", apr(0));
        assert!(apr(99).starts_with("  refused (99)  id"), "{}", apr(99));
    }

    #[test]
    fn management_datagrams() {
        let told = |octets: &[u8]| written(|line| mad(line, octets));
        let mut octets = [0u8; 256];
        // SA, Get, PathRecord.
        (octets[0], octets[1], octets[2], octets[3]) = (1, 3, 2, 1);
        octets[17] = 0x35;
        assert_eq!(told(&octets), "  SA Get PathRecord");
        octets[5] = 0x1c;
        assert_eq!(told(&octets), "  SA Get PathRecord  status 0x001c");
        // GetResp of a directed-route SMP: bit 15 is its direction, and no status.
        let mut smp = octets;
        (smp[1], smp[2], smp[3], smp[4], smp[5], smp[17]) = (0x81, 1, 0x81, 0x80, 0, 0x11);
        assert_eq!(told(&smp), "  SMP_DIRECTED GetResp NodeInfo");
        smp[5] = 0x04;
        assert_eq!(told(&smp), "  SMP_DIRECTED GetResp NodeInfo  status 0x0004");
        // A CM message that was cut, an attribute and a class that nobody knows.
        (octets[1], octets[5], octets[17]) = (7, 0, 0x10);
        let cut = told(&octets[..100]);
        assert!(cut.starts_with("  CM REQ  error: CM message: at offset "), "{cut}");
        octets[17] = 0x99;
        assert_eq!(told(&octets), "  CM 0x0099");
        octets[1] = 0xee;
        assert!(told(&octets).starts_with("  0xee "), "{}", told(&octets));
        assert_eq!(told(&octets[..9]), "  MAD: at offset 0: 24 octets needed, 9 found");
    }
}
